"""A client's addresses are those that the controller's directory foresaw, over many rounds of a small segment."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.pool.address import NUM_GENERATIONS
from flowtrain.pool.block import BlockError
from flowtrain.pool.client import PoolClient, Put
from flowtrain.pool.directory import Directory
from flowtrain.pool.private import PrivateSegment
from flowtrain.pool.transport import make_transports
from flowtrain.types import EmbeddingRef, Phase, Role, TensorSpec, UnitId

SEGMENT_BYTES = 1 << 14


@pytest.mark.parametrize("seed", range(4))
def test_units_in_and_out_of_a_small_segment(seed: int) -> None:
    dice = random.Random(seed)
    pool = PoolClient(PrivateSegment(2, SEGMENT_BYTES), {})
    reader = PoolClient(None, make_transports(["local"]))
    handle = pool.handle()
    assert handle is not None
    reader.attach({2: handle})
    directory = Directory({2: SEGMENT_BYTES})
    in_use: list[tuple[UnitId, list[EmbeddingRef]]] = []
    num_put = 0
    for number in range(200):
        unit = UnitId(Phase.TRAIN, 1, 0, 0, number)
        rows = [dice.randint(1, 12) for _ in range(dice.randint(1, 3))]
        sizes = [row * 64 for row in rows]
        frees = directory.frees(2)
        while not directory.reserve(2, unit, sizes):
            done, refs = in_use.pop(dice.randrange(len(in_use)))
            for ref in refs:
                assert torch.equal(reader.get(ref)[0], torch.full((ref.bytes // 64, 16), float(ref.position)))
            reader.release(refs)
            directory.lease(refs, (Role.CONSUMER, 0))
            directory.release(done)
            frees += directory.frees(2)
        pool.free(frees)
        refs = []
        for row in rows:
            specs = (TensorSpec(0, (row, 16), "float32"),)
            bad = dice.random() < 0.1
            tensors = None if bad else [torch.full((row, 16), float(num_put))]
            address = pool.put(num_put, 0, specs, row * 64, tensors)
            if not bad:
                refs.append(EmbeddingRef(num_put, unit, address, row * 64, specs, (), 0))
            num_put += 1
        directory.written(refs)
        directory.assert_invariants()
        in_use.append((unit, refs))
    pool.close()


@settings(max_examples=20)
@given(rounds=st.integers(1, 2), extra=st.integers(0, NUM_GENERATIONS - 1))
def test_a_use_after_release_is_told_also_where_the_address_comes_again(rounds: int, extra: int) -> None:
    """A place used 1024 or 2048 times and some: the address may be the old one, the position in the header is not."""
    pool = PoolClient(PrivateSegment(0, 256), {})
    reader = PoolClient(None, make_transports(["local"]))
    handle = pool.handle()
    assert handle is not None
    reader.attach({0: handle})
    specs, features = (TensorSpec(0, (16,), "float32"),), [torch.zeros(16)]
    unit = UnitId(Phase.TRAIN, 1, 0, 0, 0)

    def put(position: int) -> EmbeddingRef:
        return EmbeddingRef(position, unit, pool.put(position, 0, specs, 64, features), 64, specs, (), 0)

    stale = now = put(0)
    for position in range(1, rounds * NUM_GENERATIONS + extra + 1):
        pool.free([now.address])
        now = put(position)
    assert (now.address == stale.address) == (extra == 0)
    with pytest.raises(BlockError, match=f"position is {now.position}, expected 0"):
        reader.get(stale)
    assert len(reader.get(now)) == 1
    reader.close()
    pool.close()


def test_a_process_without_a_segment_cannot_put() -> None:
    pool = PoolClient(None, {})
    assert pool.handle() is None
    with pytest.raises(AssertionError, match="no segment to put into"):
        pool.put(0, 0, (), 64, None)
    pool.close()


SHAPES = st.lists(st.sampled_from([(3, 4), (3, 4), (3, 4), (5, 4), (0, 4), (12,)]), min_size=1, max_size=5)


@settings(max_examples=80, deadline=None)
@given(SHAPES, st.sampled_from(["float32", "bfloat16"]), st.sampled_from([128, 192]))
def test_tensors_of_one_block_alike_or_not_come_back_as_they_were(
    shapes: list[tuple[int, ...]], dtype: str, gap: int
) -> None:
    """However the tensors of a block lie, each is itself, features and gradients, and a block is no part of another."""
    pool, reader = PoolClient(PrivateSegment(2, SEGMENT_BYTES), {}), PoolClient(None, make_transports(["local"]))
    handle = pool.handle()
    assert handle is not None
    reader.attach({2: handle})
    specs = tuple(TensorSpec(number * gap, shape, dtype) for number, shape in enumerate(shapes))
    kind, num_bytes = getattr(torch, dtype), gap * len(shapes) + 64
    made = [[torch.randn(shape).to(kind) for shape in shapes] for _ in range(3)]
    unit = UnitId(Phase.TRAIN, 1, 0, 0, 0)
    addresses = pool.put_all(0, [Put(number, specs, num_bytes, tensors) for number, tensors in enumerate(made)])
    refs = [EmbeddingRef(n, unit, address, num_bytes, specs, (), 0) for n, address in enumerate(addresses)]
    got = reader.get_all(refs)
    assert all(torch.equal(a, b) for one, other in zip(got, made, strict=True) for a, b in zip(one, other, strict=True))
    storages = [{tensor.untyped_storage().data_ptr() for tensor in of_block if tensor.numel()} for of_block in got]
    assert not storages[0] & storages[1]
    reader.put_gradients(refs, [[-tensor for tensor in of_block] for of_block in made])
    reader.flush()
    for ref, of_block in zip(refs, pool.gradients(refs), strict=False):
        assert all(torch.equal(a, -b) for a, b in zip(of_block, made[ref.position], strict=True))
    reader.release(refs)
    pool.free(addresses)
    reader.close()
    pool.close()
