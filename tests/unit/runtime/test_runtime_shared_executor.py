"""Orders of a rank in a process that it shares with others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flowtrain.runtime.shared_executor import _Lane


def test_orders_are_executed_by_their_numbers() -> None:
    lane, done = _Lane("producer-0"), list[int]()

    def note(number: int) -> Callable[[], None]:
        return lambda: done.append(number)

    futures = [lane.put(number, note(number)) for number in (2, 0, 3, 1)]
    for future in futures:
        future.result(timeout=5)
    assert done == [0, 1, 2, 3]


def test_a_failed_order_is_told_and_the_next_one_done() -> None:
    lane = _Lane("producer-0")

    def fail() -> None:
        raise ValueError("no such row")

    failed, good = lane.put(0, fail), lane.put(1, lambda: 5)
    with pytest.raises(ValueError, match="no such row"):
        failed.result(timeout=5)
    assert good.result(timeout=5) == 5
