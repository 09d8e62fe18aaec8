"""The order of work in a pipeline: complete, free of deadlock, bounded in what it holds; cuts by cost."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.pipeline import Section, Work, cut_sections, schedule
from flowtrain.plan import Layout


def assert_runs(ranks: int, sections: int, packs: int) -> None:
    """Every rank gets to its end: sends never wait, receives wait for what was sent; and in the order of sending.

    Packs are given out as flow does it: never more than `packs_held` that are not done on all ranks.
    """
    work = [schedule(rank, ranks, sections, packs) for rank in range(ranks)]
    last = ranks * sections - 1
    at = [0] * ranks
    sent: dict[tuple[int, int, bool], list[tuple[int, int]]] = {}
    taken: dict[tuple[int, int, bool], int] = {}
    done = [[0] * packs for _ in range(ranks)]
    held = Layout(pp=ranks, vpp=sections).packs_held
    moved = True
    while moved:
        moved = False
        for rank in range(ranks):
            while at[rank] < len(work[rank]):
                step = work[rank][at[rank]]
                finished = sum(1 for slot in range(packs) if all(of[slot] == sections for of in done))
                if step.slot >= finished + held:
                    break
                number = step.section * ranks + rank
                source = number - 1 if step.forward else number + 1
                if 0 <= source <= last:
                    line = (source % ranks, rank, step.forward)
                    position = taken.get(line, 0)
                    if position >= len(sent.get(line, [])):
                        break
                    assert sent[line][position] == (source, step.slot), "taken in another order than sent"
                    taken[line] = position + 1
                target = number + 1 if step.forward else number - 1
                if 0 <= target <= last:
                    sent.setdefault((rank, target % ranks, step.forward), []).append((number, step.slot))
                done[rank][step.slot] += not step.forward
                at[rank] += 1
                moved = True
    assert at == [len(of) for of in work], f"stuck: {ranks} ranks of {sections} sections, {packs} packs at {at}"


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 20))
def test_every_rank_gets_to_its_end(ranks: int, sections: int, packs: int) -> None:
    assert_runs(ranks, sections if ranks > 1 else 1, packs)


@settings(deadline=None)
@given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 20))
def test_a_section_takes_each_pack_once_and_in_order(ranks: int, sections: int, packs: int) -> None:
    for rank in range(ranks):
        work = schedule(rank, ranks, sections, packs)
        for section in range(sections):
            for forward in (True, False):
                assert [w.slot for w in work if w[:2] == (forward, section)] == list(range(packs))
        for step in work:
            if not step.forward:
                assert work.index(Work(True, step.section, step.slot)) < work.index(step)


def test_plain_1f1b_is_the_one_of_the_page() -> None:
    text = ["".join(("B", "F")[w.forward] + str(w.slot) + " " for w in schedule(rank, 2, 1, 4)) for rank in (0, 1)]
    assert text == ["F0 F1 B0 F2 B1 F3 B2 B3 ", "F0 B0 F1 B1 F2 B2 F3 B3 "]


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(0, 12), st.integers(1, 5))
def test_the_dearest_section_is_as_cheap_as_can_be(costs: list[int], head: int, num: int) -> None:
    num = min(num, len(costs))
    found = cut_sections(costs, head, num)
    assert [s.start for s in found[1:]] == [s.stop for s in found[:-1]]
    assert (found[0].start, found[-1].stop) == (0, len(costs))
    assert all(s.stop > s.start for s in found)
    assert [s.is_first for s in found] == [True] + [False] * (num - 1)
    assert [s.is_last for s in found] == [False] * (num - 1) + [True]

    def dearest(bounds: tuple[int, ...]) -> int:
        ends = (0, *bounds, len(costs))
        return max(sum(costs[a:b]) + (head if b == len(costs) else 0) for a, b in pairwise(ends))

    best = min(dearest(cut) for cut in combinations(range(1, len(costs)), num - 1))
    assert dearest(tuple(s.start for s in found[1:])) == best


def test_a_section_of_everything_is_the_default() -> None:
    assert cut_sections([1, 1], 1, 1) == (Section(0, 2),)
