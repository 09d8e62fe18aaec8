"""One suite over every way in which an owner and a reader share segments.

| pair | owner | reader |
|---|---|---|
| `local` | this process | the same process, private memory |
| `local-shared` | this process | the same process, memory that others can map too |
| `shm` | this process | the same process, attached through /proc |
| `shm-spawned` | this process | another process, told what to do over a pipe |
| `nixl` | this process | the same process, through agents of its own |
| `nixl-spawned` | this process | another process, told what to do over a pipe |
| `ray` | an actor | this process |
"""

from __future__ import annotations

import pytest
import torch
from pool_pairs import COPYING, HERE, PAIRS, SECONDS, SEGMENT_BYTES, Pair, Reader, owner_of_segment

from flowtrain.errors import LostProcessError, PlanError
from flowtrain.pool.address import generation_of, make_address, make_owner, offset_of
from flowtrain.pool.arena import ArenaFullError
from flowtrain.pool.block import HEADER_BYTES, BlockError, block_bytes
from flowtrain.pool.client import PoolClient
from flowtrain.pool.transport import TRANSPORTS, make_transports
from flowtrain.runtime.ray_transport import RayTransport
from flowtrain.types import Address, EmbeddingRef, Phase, TensorSpec, UnitId


def test_every_transport_is_in_the_suite() -> None:
    assert {name.partition("-")[0] for name in PAIRS} == {*TRANSPORTS, "ray"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_features_arrive_bit_for_bit(pair: Pair, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(n, 24, generator=generator).to(dtype) for n in (7, 1, 0)]
    refs = [pair.put(position, [tensor * position for tensor in tensors]) for position in range(4)]
    for ref in reversed(refs):
        got = pair.reader.do("get", ref)
        assert [t.dtype for t in got] == [dtype] * 3
        for tensor, expected in zip(got, tensors, strict=True):
            assert torch.equal(tensor, expected * ref.position)


def test_a_gradient_lies_over_its_features_and_nowhere_else(pair: Pair) -> None:
    before, ref, after = (pair.put(p, [torch.full((5, 3), float(p)), torch.ones(2)]) for p in (1, 2, 3))
    grads = [torch.arange(15.0).reshape(5, 3), torch.tensor([-1.0, 0.5])]
    pair.reader.do("put_gradient", ref, grads)
    assert all(torch.equal(a, b) for a, b in zip(pair.owner.gradients([ref])[0], grads, strict=True))
    assert torch.equal(pair.reader.do("get", before)[0], torch.full((5, 3), 1.0))
    assert torch.equal(pair.reader.do("get", after)[0], torch.full((5, 3), 3.0))
    pair.reader.do("release", ref)
    with pytest.raises(BlockError, match="in state GRADIENTS: state is 2, expected 1"):
        pair.reader.do("get", ref)
    with pytest.raises(BlockError, match="in state FEATURES: state is 1, expected 2"):
        pair.owner.gradients([before])


def test_a_reader_has_views_and_not_copies(pair: Pair) -> None:
    if pair.transport in COPYING:
        pytest.skip("this transport copies")
    ref = pair.put(1, [torch.zeros(4)])
    pair.reader.do("keep", "view", ref)
    other, handle = Reader("local"), pair.owner.handle()
    assert handle is not None
    other.attach({5: handle})
    other.pool.get(ref)[0].fill_(8.0)
    assert torch.equal(pair.reader.do("look", "view")[0], torch.full((4,), 8.0))
    pair.reader.do("put_gradient", ref, [torch.full((4,), 9.0)])
    assert torch.equal(pair.reader.do("look", "view")[0], torch.full((4,), 9.0))


def test_a_copy_stays_as_it_is_until_it_is_released(pair: Pair) -> None:
    if pair.transport not in COPYING:
        pytest.skip("this transport has views")
    ref = pair.put(1, [torch.full((4,), 3.0)])
    pair.reader.do("keep", "copy", ref)
    pair.owner.free([ref.address])
    pair.put(2, [torch.full((4,), 4.0)])
    assert torch.equal(pair.reader.do("look", "copy")[0], torch.full((4,), 3.0))


def test_copies_take_the_room_of_those_released(pair: Pair) -> None:
    """A hundred packs through a segment that holds three of them; blocks differ in size, so that the ring wraps."""
    for number in range(100):
        refs = tuple(pair.put(p, [torch.full((1 << 14 | number * 16 + p,), float(number + p))]) for p in range(3))
        got = pair.reader.do("get_all", refs)
        assert [float(t.min()) for t in got] == [float(t.max()) for t in got] == [number, number + 1, number + 2]
        pair.owner.free([ref.address for ref in refs])


def test_an_owner_that_is_let_go_of_is_reached_again(pair: Pair) -> None:
    ref, handle = pair.put(1, [torch.full((4,), 3.0)]), pair.owner.handle()
    assert handle is not None
    assert torch.equal(pair.reader.do("get", ref)[0], torch.full((4,), 3.0))
    for _ in range(2):
        pair.reader.do("detach", handle.owner)
        with pytest.raises(BlockError, match="is not attached"):
            pair.reader.do("get", ref)
    pair.reader.do("attach", {handle.owner: handle})
    assert torch.equal(pair.reader.do("get", ref)[0], torch.full((4,), 3.0))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"position": 8}, "position is 7, expected 8"),
        ({"version": 3}, "version is 2, expected 3"),
        ({"bytes": 64}, "payload_bytes is 128, expected 64"),
    ],
)
def test_a_reference_that_is_not_the_block_is_refused(pair: Pair, change: dict[str, int], told: str) -> None:
    ref = pair.put(7, [torch.ones(32)], version=2)
    wrong = EmbeddingRef(**{**{name: getattr(ref, name) for name in EmbeddingRef.__slots__}, **change})
    with pytest.raises(BlockError, match=told):
        pair.reader.do("get", wrong)
    assert torch.equal(pair.reader.do("get", ref)[0], torch.ones(32))


def test_an_address_where_no_block_starts_is_refused(pair: Pair) -> None:
    ref = pair.put(7, [torch.ones(32)])
    fields = {name: getattr(ref, name) for name in EmbeddingRef.__slots__}
    with pytest.raises(BlockError, match="no block starts here"):
        pair.reader.do("get", EmbeddingRef(**{**fields, "address": Address(ref.address + 1)}))
    with pytest.raises(BlockError, match="outside the segment"):
        pair.reader.do("get", EmbeddingRef(**{**fields, "address": make_address(5, SEGMENT_BYTES)}))
    with pytest.raises(BlockError, match=r"owner 133 is not attached, only \[5\]"):
        pair.reader.do("get", EmbeddingRef(**{**fields, "address": make_address(make_owner(2, 5), 64)}))


def test_a_freed_block_and_a_bad_rows_block_cannot_be_read(pair: Pair) -> None:
    ref = pair.put(7, [torch.ones(32)])
    address = pair.owner.put(8, 0, ref.tensors, ref.bytes, None)
    assert offset_of(address) == offset_of(ref.address) + block_bytes(ref.bytes), "a bad row takes its place"
    fields = {name: getattr(ref, name) for name in EmbeddingRef.__slots__}
    with pytest.raises(BlockError, match="in state EMPTY"):
        pair.reader.do("get", EmbeddingRef(**{**fields, "position": 8, "address": address}))
    pair.owner.free([ref.address])
    with pytest.raises(BlockError, match="in state FREED"):
        pair.reader.do("get", ref)
    with pytest.raises(AssertionError, match="freed twice"):
        pair.owner.free([ref.address])
    with pytest.raises(AssertionError, match="owner 5 is told to free"):
        pair.owner.free([make_address(6, offset_of(ref.address))])


def test_the_segment_is_bounded_and_its_bytes_are_used_again(pair: Pair) -> None:
    block = torch.ones((1 << 18) // 4 - 2 * HEADER_BYTES // 4)
    refs = [pair.put(p, [block * p]) for p in range(4)]
    with pytest.raises(ArenaFullError):
        pair.put(4, [block])
    pair.owner.free(ref.address for ref in refs[:2])
    again = pair.put(5, [block * 5])
    assert offset_of(again.address) == offset_of(refs[0].address)
    assert again.address != refs[0].address, "another block at the same place is another address"
    assert torch.equal(pair.reader.do("get", again)[0], block * 5)
    assert torch.equal(pair.reader.do("get", refs[2])[0], block * 2)


def test_features_are_cast_and_gradients_are_not(pair: Pair) -> None:
    specs = (TensorSpec(0, (3,), "bfloat16"),)
    exact = torch.tensor([1.0, 1.00390625, 3.0])
    address = pair.owner.put(0, 0, specs, 64, [exact])
    ref = EmbeddingRef(0, UnitId(Phase.TRAIN, 1, 0, 0, 0), address, 64, specs, (), 0)
    assert torch.equal(pair.reader.do("get", ref)[0], exact.to(torch.bfloat16))
    with pytest.raises(AssertionError, match=r"is torch\.float32, expected torch\.bfloat16"):
        pair.reader.do("put_gradient", ref, [exact])


def test_a_wrong_shape_is_refused_and_never_broadcast(pair: Pair) -> None:
    specs = (TensorSpec(0, (3, 2), "float32"),)
    with pytest.raises(AssertionError, match=r"features of position 0 have shape \(2,\), expected \(3, 2\)"):
        pair.owner.put(0, 0, specs, 64, [torch.ones(2)])
    with pytest.raises(AssertionError, match="ends past its payload of 16 bytes"):
        pair.owner.put(0, 0, specs, 16, [torch.ones(3, 2)])


def test_views_outlive_the_pool(pair: Pair) -> None:
    ref = pair.put(1, [torch.arange(6.0)])
    pair.reader.do("keep", "view", ref)
    pair.owner.close()
    pair.owner.close()
    assert torch.equal(pair.reader.do("look", "view")[0], torch.arange(6.0))


def test_a_closed_segment_cannot_be_attached(pair: Pair) -> None:
    if pair.transport in COPYING:
        pytest.skip("a process that is gone is told of in tests of its own")
    handle = pair.owner.handle()
    assert handle is not None
    again = PoolClient(None, make_transports(["local" if handle.fd < 0 else "shm"]))
    again.attach({5: handle})
    again.attach({5: handle})
    again.close()
    pair.reader.do("drop")
    pair.owner.close()
    with pytest.raises(LostProcessError, match="pool owner 5"):
        again.attach({5: handle})


def test_a_write_into_one_block_is_no_change_of_another() -> None:
    """What autograd has saved of one sample must survive puts of others into the same segment."""
    pool, reader = owner_of_segment("local"), Reader("local")
    pair = Pair(pool, reader)
    handle = pool.handle()
    assert handle is not None
    reader.attach({5: handle})
    features = reader.pool.get(pair.put(0, [torch.full((3,), 2.0)]))[0].detach().requires_grad_()
    loss = (features * features).sum()
    pair.put(1, [torch.ones(3)])
    loss.backward()
    assert features.grad is not None
    assert torch.equal(features.grad, torch.full((3,), 4.0))
    pool.close()


@pytest.mark.parametrize("transport", HERE)
def test_checksums_find_stray_writes(transport: str) -> None:
    pool, reader = owner_of_segment(transport, checksum=True), Reader(transport)
    handle = pool.handle()
    assert handle is not None
    reader.attach({5: handle})
    ref = Pair(pool, reader).put(0, [torch.ones(3)])
    reader.pool.get(ref)[0][1] = 7.0
    with pytest.raises(BlockError, match="checksum is"):
        reader.pool.get(ref)
    reader.drop()
    pool.close()


@pytest.mark.parametrize("transport", HERE)
def test_impossible_segments_are_refused(transport: str) -> None:
    for num_bytes in (0, (1 << 40) + 1):
        with pytest.raises(PlanError, match=r"change pool\.bytes"):
            owner_of_segment(transport, num_bytes)


def test_a_block_used_after_its_release_is_told_by_its_generation(pair: Pair) -> None:
    ref = pair.put(7, [torch.ones(32)])
    pair.owner.free([ref.address])
    other = pair.put(7, [torch.ones(32)])
    assert offset_of(other.address) == offset_of(ref.address)
    with pytest.raises(BlockError, match="used after its release: its place has generation 1, expected 0"):
        pair.reader.do("get", ref)
    with pytest.raises(BlockError, match="used after its release"):
        pair.reader.do("put_gradient", ref, [torch.ones(32)])
    with pytest.raises(AssertionError, match="its place is now"):
        pair.owner.free([ref.address])
    assert generation_of(other.address) == 1
    assert torch.equal(pair.reader.do("get", other)[0], torch.ones(32))


def test_a_pack_is_read_in_one_call_and_its_bytes_are_counted(pair: Pair) -> None:
    refs = tuple(pair.put(p, [torch.full((16 + p,), float(p))]) for p in range(5))
    assert pair.owner.use().bytes_in == {"own": sum(ref.bytes for ref in refs)}
    pair.reader.do("use")
    got = pair.reader.do("get_all", (*refs[2:], *refs[:2]))
    assert [float(t[0]) for t in got] == [2.0, 3.0, 4.0, 0.0, 1.0]
    use = pair.reader.do("use")
    (transport,) = use.bytes_out
    assert use.bytes_out == {transport: sum(ref.bytes for ref in refs)}
    assert use.bytes_in == {}
    assert 0 < use.seconds < SECONDS
    pair.reader.do("put_gradient", refs[0], [torch.zeros(16)])
    use = pair.reader.do("use")
    assert use.bytes_in == use.bytes_out == {transport: refs[0].bytes}


def test_gradients_are_flushed_before_they_are_released(pair: Pair) -> None:
    ref = pair.put(1, [torch.ones(4)])
    pair.reader.do("put_gradient_later", ref, [torch.zeros(4)])
    with pytest.raises(AssertionError, match=r"gradients are released before they were flushed: .* of owner 5"):
        pair.reader.do("release", ref)


def test_every_member_of_the_protocol_is_there() -> None:
    for name, transport in {**make_transports(HERE), "ray": RayTransport(None, b"here")}.items():
        assert transport.name == name
        assert transport.endpoint is None or isinstance(transport.endpoint, bytes)
        assert transport.pinned_bytes == 0
        transport.close()
        transport.close()
