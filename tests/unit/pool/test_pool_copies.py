"""What a reader sees of another one's copies is what that one has copied, wherever its ring stands."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.pool.address import make_address
from flowtrain.pool.block import ALIGNMENT, HEADER_BYTES, BlockError
from flowtrain.pool.client import PoolClient
from flowtrain.pool.segment import Segment
from flowtrain.pool.transport import CopiesTransport, Span, make_transports
from flowtrain.pool.transport.inbox import Inbox
from flowtrain.pool.transport.nixl_agent import why_missing
from flowtrain.types import EmbeddingRef, Phase, TensorSpec, UnitId

CAPACITY = 1 << 14
SHAPE = (16, 24)
SPECS = (TensorSpec(0, SHAPE, "float32"),)
PAYLOAD = 16 * 24 * 4


@given(
    st.lists(st.lists(st.integers(1, 16).map(lambda lines: lines * ALIGNMENT), min_size=1, max_size=7), max_size=30),
    st.integers(1, 2),
)
def test_both_rings_say_the_same_of_every_block(packs: list[list[int]], held_packs: int) -> None:
    """`held_packs` are read before the oldest is given back, as in a pipeline."""
    segment = Segment.create(3, CAPACITY, "test-copies")
    inbox, other = Inbox(segment), CopiesTransport(segment.handle())
    held: deque[list[Span]] = deque()
    for number, sizes in enumerate(packs):
        offsets = [sum(sizes[:n]) + number * CAPACITY for n in range(len(sizes))]
        spans = [Span(make_address(1, at + HEADER_BYTES), size) for at, size in zip(offsets, sizes, strict=True)]
        for value, memory in enumerate(inbox.take(spans)):
            memory[:] = bytes([(number + value) % 256]) * len(memory)
        for value, memory in enumerate(other.read(spans, 1.0)):
            assert bytes(memory) == bytes([(number + value) % 256]) * len(memory)
        held.append(spans)
        if len(held) == held_packs:
            inbox.give(held[0])
            other.release(held.popleft())
    other.close()
    other.close()
    segment.close()


@pytest.fixture
def trio() -> Iterator[tuple[PoolClient, PoolClient, PoolClient]]:
    """An owner, a reader that copies its blocks by NIXL, and one that sees these copies."""
    if missing := why_missing():
        pytest.skip(missing)
    own, copies = (Segment.create(number, CAPACITY, "test-copies") for number in (5, 9))
    owner = PoolClient(own, make_transports(["local", "nixl"], own))
    copying = PoolClient(copies, make_transports(["nixl"], copies))
    seeing = PoolClient(None, make_transports(["nixl"], None))
    handle = owner.handle()
    assert handle is not None
    copying.attach({5: handle})
    seeing.attach({5: handle}, copying.handle(within_machine=True))
    yield owner, copying, seeing
    for pool in (seeing, copying, owner):
        pool.close()


def test_a_block_crosses_once_and_its_gradient_goes_back(trio: tuple[PoolClient, PoolClient, PoolClient]) -> None:
    owner, copying, seeing = trio
    assert seeing.sees_copies
    assert not copying.sees_copies
    for number in range(10):  # around the ring
        value = torch.full(SHAPE, float(number))
        address = owner.put(number, 0, SPECS, PAYLOAD, [value])
        ref = EmbeddingRef(number, UnitId(Phase.TRAIN, 1, 0, 0, 0), address, PAYLOAD, SPECS, (), 0)
        (copy,), (seen,) = copying.get(ref), seeing.get(ref)
        assert torch.equal(copy, value)
        assert torch.equal(seen, value)
        copying.put_gradients([ref], [[value + 0.5]])
        copying.flush()
        assert torch.equal(owner.gradients([ref])[0][0], value + 0.5)
        for pool in (copying, seeing):
            pool.release([ref])
        owner.free([address])
    assert copying.use().bytes_out == {"nixl": 10 * PAYLOAD}
    assert seeing.use().bytes_out == {"copies": 10 * PAYLOAD}


def test_what_was_not_copied_is_told_by_its_header(trio: tuple[PoolClient, PoolClient, PoolClient]) -> None:
    """A reader that is ahead of the copies finds another block there, or none."""
    owner, copying, seeing = trio
    address = owner.put(1, 0, SPECS, PAYLOAD, [torch.zeros(SHAPE)])
    ref = EmbeddingRef(1, UnitId(Phase.TRAIN, 1, 0, 0, 0), address, PAYLOAD, SPECS, (), 0)
    with pytest.raises(BlockError, match="no block starts here"):
        seeing.get(ref)
    copying.get(ref)
    seeing.put_gradients([ref], [[torch.ones(SHAPE)]])
    with pytest.raises(AssertionError, match="gradients are written by a reader that sees the copies of another one"):
        seeing.flush()
