"""The stream of rows: position order whatever the order of arrival, and bounded reading ahead."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.data.blocks import BlockRead
from flowtrain.data.stream import ReadRequest, SampleStream
from flowtrain.types import Phase, SampleMeta


def answer(request: ReadRequest) -> BlockRead:
    positions = range(request.start, request.start + request.count)
    return BlockRead(
        Phase.TRAIN, request.block, request.start, tuple(SampleMeta.of(p, p, f"row-{p}", 1, 0, 1) for p in positions)
    )


@dataclass
class Reading:
    """Drives a stream: answers requests in the order that `data` draws, and checks the bound at every turn."""

    stream: SampleStream
    block_rows: int
    in_flight: list[ReadRequest] = field(default_factory=list)
    asked: list[ReadRequest] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)

    def want(self, more: int) -> None:
        self.stream.want(more)
        fresh = self.stream.requests()
        self.in_flight += fresh
        self.asked += fresh
        ahead = sum(request.count for request in self.asked) - len(self.taken)
        assert ahead <= max(more, 0) + self.block_rows - 1 or not fresh

    def arrive(self, index: int) -> None:
        self.stream.add(answer(self.in_flight.pop(index)))
        self.taken += [row.position for row in self.stream.take()]


@settings(max_examples=150)
@given(
    data=st.data(),
    block_rows=st.integers(1, 7),
    num_readers=st.integers(1, 4),
    start=st.integers(0, 30),
    length=st.integers(0, 40),
)
def test_any_order_of_arrival_gives_the_same_order(
    data: st.DataObject, block_rows: int, num_readers: int, start: int, length: int
) -> None:
    carried = data.draw(st.sets(st.integers(0, start - 1), max_size=10)) if start else set()
    stream = SampleStream(50, block_rows, num_readers, start=start, carried=tuple(carried), end=start + length)
    reading = Reading(stream, block_rows)
    while not stream.exhausted:
        reading.want(data.draw(st.integers(1, 12)))
        assert reading.in_flight, "rows are wanted and nothing is asked for"
        reading.arrive(data.draw(st.integers(0, len(reading.in_flight) - 1)))
    assert reading.taken == [*sorted(carried), *range(start, start + length)]
    assert [request.block for request in reading.asked] == list(range(len(reading.asked)))
    assert all(request.reader == request.block % num_readers for request in reading.asked)
    assert all(request.count <= block_rows for request in reading.asked)


def test_nothing_is_asked_for_before_it_is_wanted() -> None:
    stream = SampleStream(10, 4, 1)
    assert stream.requests() == []
    stream.want(5)
    assert [request.start for request in stream.requests()] == [0, 4]
    assert stream.requests() == []


def test_an_endless_stream_goes_on_past_the_rows() -> None:
    stream = SampleStream(3, 4, 2)
    stream.want(8)
    for request in stream.requests():
        stream.add(answer(request))
    assert [row.position for row in stream.take()] == list(range(8))
    assert not stream.exhausted


def test_neighbours_among_the_carried_share_a_block() -> None:
    stream = SampleStream(100, 4, 1, start=20, carried=(9, 3, 4, 5, 10), end=20)
    stream.want(5)
    assert [(request.start, request.count) for request in stream.requests()] == [(3, 3), (9, 2)]


def test_a_block_nobody_asked_for_is_refused() -> None:
    stream = SampleStream(10, 4, 1)
    with pytest.raises(AssertionError, match="not asked for"):
        stream.add(answer(ReadRequest(0, 0, 4, 0)))
