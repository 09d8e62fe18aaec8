"""What no packing of given rows can beat: lower bounds, in whole numbers, each with its reason.

* `dearest_pack`, of K packs: the mean pack; the dearest row; and by the pigeon-hole, for every j, of the jK + 1 dearest
  rows some pack has j + 1, which cost at least as much as the j + 1 cheapest of them.
* `lock_step`, the sum over slots of the dearest pack: the mean rank; the bound on the dearest pack, which is in a slot.
  (The sum of every R-th row in falling order is no bound: rows may share packs and leave later slots empty.)
* `fewest_packs` that hold rows of these tokens: their sum; and Martello and Toth's bound: rows of more than half a pack
  exclude each other and leave little room for the rest.
* `reachable`, dearest over mean of packs filled from a stream: a full pack of short rows costs less than a long row
  alone, so two caps at once can make even packs impossible.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def dearest_pack(costs: Sequence[int], num_packs: int) -> int:
    """
    >>> dearest_pack([4, 4, 4], 2)
    8
    """
    ordered = sorted(costs, reverse=True)
    bound = max(-(-sum(ordered) // num_packs), ordered[0] if ordered else 0)
    for j in range(1, (len(ordered) - 1) // num_packs + 1):
        last = j * num_packs + 1
        bound = max(bound, sum(ordered[last - j - 1 : last]))
    return bound


def lock_step(costs: Sequence[int], num_ranks: int, num_slots: int) -> int:
    """
    >>> lock_step([9, 1, 1, 1], 2, 2)
    9
    """
    return max(-(-sum(costs) // num_ranks), dearest_pack(costs, num_ranks * num_slots))


def fewest_packs(tokens: Sequence[int], cap: int) -> int:
    """Martello and Toth's L2; every row is at most `cap`.

    >>> fewest_packs([6, 6, 6, 4], 10)
    3
    """
    assert all(0 < number <= cap for number in tokens), "a row is empty or longer than a pack"
    ordered = sorted(tokens, reverse=True)
    sums = [0, *accumulate(ordered)]
    bound = -(-sums[-1] // cap)

    def longer_than(limit: int) -> int:
        """How many rows have more tokens than this."""
        low, high = 0, len(ordered)
        while low < high:
            middle = (low + high) // 2
            if ordered[middle] > limit:
                low = middle + 1
            else:
                high = middle
        return low

    over_half = next((place for place, number in enumerate(ordered) if 2 * number <= cap), len(ordered))
    for smallest in {0, *(number for number in ordered if 2 * number <= cap)}:
        alone = min(longer_than(cap - smallest), over_half)
        counted = longer_than(smallest - 1) if smallest else len(ordered)
        room = (over_half - alone) * cap - (sums[over_half] - sums[alone])
        rest = sums[max(counted, over_half)] - sums[over_half] - room
        bound = max(bound, over_half + max(0, -(-rest // cap)))
    return bound


def reachable(longest_cost: int, short_cost: int, short_tokens: int, cap: int) -> float:
    """Dearest / mean of packs that run at once when one has a row of `longest_cost` and the others can be filled with
    short rows only, which together cost `short_cost` for `short_tokens`; 1.0 where such a pack reaches it."""
    if not short_tokens:
        return 1.0
    return max(1.0, longest_cost * short_tokens / (short_cost * cap))
