"""A client's addresses are those that the controller's directory foresaw, over many rounds of a small segment."""

from __future__ import annotations

import random

import pytest
import torch

from flowtrain.pool.client import PoolClient
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


def test_a_process_without_a_segment_cannot_put() -> None:
    pool = PoolClient(None, {})
    assert pool.handle() is None
    with pytest.raises(AssertionError, match="no segment to put into"):
        pool.put(0, 0, (), 64, None)
    pool.close()
