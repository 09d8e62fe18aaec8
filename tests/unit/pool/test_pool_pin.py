"""Page-locking: nothing without a GPU in use, the whole segment with one."""

from __future__ import annotations

import mmap

import pytest
import torch

from flowtrain.pool.client import PoolClient
from flowtrain.pool.pin import pin, unpin
from flowtrain.pool.private import PrivateSegment
from flowtrain.pool.segment import OwnSegment, Segment
from flowtrain.pool.transport import make_transports
from flowtrain.types import EmbeddingRef, Phase, TensorSpec, UnitId


def test_a_process_that_uses_no_gpu_locks_nothing() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        pytest.skip("an earlier test of this process uses the GPU")
    assert pin(memoryview(bytearray(4096))) == pin(memoryview(b"")) == ((), 0)
    pool = PoolClient(PrivateSegment(0, 1 << 16), {})
    assert pool.pinned_bytes == 0
    pool.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("transport", ["local", "shm"])
def test_views_of_a_locked_segment_are_pinned(transport: str) -> None:
    torch.zeros(1, device="cuda")
    segment: OwnSegment = PrivateSegment(0, 1 << 20) if transport == "local" else Segment.create(0, 1 << 20, "test")
    owner = PoolClient(segment, {})
    reader = PoolClient(None, make_transports([transport]))
    handle = owner.handle()
    assert handle is not None
    reader.attach({0: handle})
    assert owner.pinned_bytes == 1 << 20
    assert reader.pinned_bytes == (1 << 20 if transport == "shm" else 0), "the pages of this process are locked once"
    specs = (TensorSpec(0, (16,), "float32"),)
    address = owner.put(0, 0, specs, 64, [torch.ones(16, device="cuda")])
    ref = EmbeddingRef(0, UnitId(Phase.TRAIN, 1, 0, 0, 0), address, 64, specs, (), 0)
    (view,) = reader.get(ref)
    assert view.is_pinned()
    assert torch.equal(view.to("cuda", non_blocking=True).cpu(), torch.ones(16))
    reader.close()
    owner.close()
    assert not view.is_pinned()
    torch.zeros(1, device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_refusal_is_one_warning_and_no_error_of_the_next_kernel() -> None:
    torch.zeros(1, device="cuda")
    memory = memoryview(bytearray(1 << 20))
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    cudart = torch.cuda.cudart()
    assert int(cudart.cudaHostRegister(start, memory.nbytes, 0)) == 0
    with pytest.warns(RuntimeWarning, match="1048576 of 1048576 bytes of a pool segment stay pageable"):
        assert pin(memory) == ((), 0)
    torch.ones(4, device="cuda").add_(1)
    torch.cuda.synchronize()
    cudart.cudaHostUnregister(start)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_segment_is_locked_in_chunks_and_each_is_unlocked() -> None:
    torch.zeros(1, device="cuda")
    memory = memoryview(mmap.mmap(-1, (1 << 20) + 4096))
    view = torch.frombuffer(memory, dtype=torch.uint8)
    for _ in range(2):
        pinned = pin(memory, chunk_bytes=1 << 18)
        assert len(pinned.starts) == 5
        assert pinned.bytes == memory.nbytes
        assert view[:16].is_pinned()
        assert view[-16:].is_pinned()
        unpin(pinned)
        assert not view[:16].is_pinned()
