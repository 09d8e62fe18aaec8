"""A process's hands in the pool: the owner puts and frees, a reader gets views and leaves gradients (contract C6).

    owner:   put ─▶ address …                 gradients(ref) ─▶ views … free(addresses)
    reader:              get(ref) ─▶ views … put_gradient(ref)

No call sends anything or waits: what a reference announces is there. Headers are checked on every access.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import torch

from flowtrain.errors import PlanError
from flowtrain.pool.address import MAX_SEGMENT_BYTES, make_address, offset_of, owner_of
from flowtrain.pool.arena import RingArena
from flowtrain.pool.block import (
    HEADER_BYTES,
    BlockError,
    BlockState,
    Header,
    block_bytes,
    check_block,
    checksum_of,
    read_header,
    write_header,
)
from flowtrain.pool.pin import pin, unpin
from flowtrain.pool.segment import SegmentHandle
from flowtrain.pool.transport import Transport
from flowtrain.types import Address, EmbeddingRef, TensorSpec


class PoolClient:
    """`owner` None: a process that only reads. `checksum`: write and check a CRC of each payload, to find stray writes.

    >>> pool = PoolClient(make_transport("shm"), owner=0, segment_bytes=1 << 20)
    >>> address = pool.put(position=7, version=0, specs=specs, payload_bytes=4096, tensors=features)
    >>> reader.attach({0: pool.handle()}); reader.get(ref)
    """

    def __init__(self, transport: Transport, owner: int | None, segment_bytes: int, *, checksum: bool = False) -> None:
        self.owner = owner
        self.checksum = checksum
        self.pinned_bytes = 0
        self._transport = transport
        self._pins: list[int] = []
        self._handle: SegmentHandle | None = None
        self._segment_bytes: dict[int, int] = {}
        self._arena = RingArena(0)
        if owner is not None:
            if not 0 < segment_bytes <= MAX_SEGMENT_BYTES:
                raise PlanError(
                    f"a pool segment must have 1 to {MAX_SEGMENT_BYTES} bytes, owner {owner} is given {segment_bytes}: "
                    f"change pool.bytes"
                )
            self._handle = transport.open(owner, segment_bytes)
            self._arena = RingArena(segment_bytes)
            self._reached(owner, segment_bytes)

    def handle(self) -> SegmentHandle | None:
        """How others reach this process's segment; None without one."""
        return self._handle

    def attach(self, handles: Mapping[int, SegmentHandle]) -> None:
        """Reach the segments of these owners; one's own and those reached before are passed over."""
        for owner, handle in handles.items():
            assert owner == handle.owner, f"handle of owner {handle.owner} given for owner {owner}"
            if owner not in self._segment_bytes:
                self._transport.attach(handle)
                self._reached(owner, handle.bytes)

    def put(
        self,
        position: int,
        version: int,
        specs: Sequence[TensorSpec],
        payload_bytes: int,
        tensors: Sequence[torch.Tensor] | None,
    ) -> Address:
        """Copy a sample's features, cast to the pool's dtype, into a new block; returns where its payload starts.

        `tensors` None: the row was found bad. Its block is allocated, since the controller's ring has it, and not
        written.
        """
        assert self.owner is not None, "this process has no segment to put into"
        num_bytes = block_bytes(payload_bytes)
        offset = self._arena.allocate(num_bytes)
        address = make_address(self.owner, offset + HEADER_BYTES)
        memory = self._transport.view(self.owner, offset, num_bytes)
        if tensors is None:
            write_header(memory, Header(BlockState.EMPTY, self.owner, version, position, address, payload_bytes))
            return address
        _copy(memory, specs, payload_bytes, tensors, f"features of position {position}")
        self._write(memory, Header(BlockState.FEATURES, self.owner, version, position, address, payload_bytes))
        return address

    def get(self, ref: EmbeddingRef) -> list[torch.Tensor]:
        """Views of a sample's features, no copy: valid until `put_gradient` or until the block's lease ends."""
        return _views(self._block(ref, BlockState.FEATURES), ref.tensors, ref.bytes)

    def put_gradient(self, ref: EmbeddingRef, grads: Sequence[torch.Tensor]) -> None:
        """Write the gradients of a sample's features over them. Views from `get` show the gradients from here on."""
        memory = self._block(ref, BlockState.FEATURES)
        for grad, spec in zip(grads, ref.tensors, strict=True):
            assert grad.dtype == _dtype(spec), (
                f"gradient of position {ref.position} is {grad.dtype}, expected {spec.dtype}"
            )
        _copy(memory, ref.tensors, ref.bytes, grads, f"gradients of position {ref.position}")
        self._write(memory, _expected(ref, BlockState.GRADIENTS))

    def gradients(self, ref: EmbeddingRef) -> list[torch.Tensor]:
        """Views of the gradients that were left over a sample's features."""
        return _views(self._block(ref, BlockState.GRADIENTS), ref.tensors, ref.bytes)

    def free(self, addresses: Iterable[Address]) -> None:
        """End blocks of this process's own segment, each once."""
        for address in addresses:
            assert owner_of(address) == self.owner, (
                f"owner {self.owner} is told to free {address:#x} of {owner_of(address)}"
            )
            offset = offset_of(address) - HEADER_BYTES
            self._arena.free(offset)
            assert self.owner is not None
            memory = self._transport.view(self.owner, offset, HEADER_BYTES)
            header = read_header(memory, f"block {address:#x}")
            write_header(memory, header._replace(state=BlockState.FREED, checksum=None))

    def page_bytes(self) -> int:
        """Bytes of this process's segment that were touched so far; 0 without one."""
        return 0 if self.owner is None else self._transport.page_bytes(self.owner)

    def close(self) -> None:
        """Let go of all segments; idempotent. Memory ends with the last view of it."""
        while self._pins:
            unpin(self._pins.pop())
        self.pinned_bytes = 0
        self._segment_bytes.clear()
        self._transport.close()

    def _reached(self, owner: int, num_bytes: int) -> None:
        self._segment_bytes[owner] = num_bytes
        pinned = pin(self._transport.view(owner, 0, num_bytes))
        if pinned is not None:
            self._pins.append(pinned)
            self.pinned_bytes += num_bytes

    def _block(self, ref: EmbeddingRef, state: BlockState) -> memoryview:
        owner, offset, num_bytes = owner_of(ref.address), offset_of(ref.address) - HEADER_BYTES, block_bytes(ref.bytes)
        where = f"block {ref.address:#x} of position {ref.position}"
        reached = self._segment_bytes.get(owner)
        if reached is None:
            raise BlockError(
                f"{where}: the segment of owner {owner} is not attached, only {sorted(self._segment_bytes)}"
            )
        if not 0 <= offset <= reached - num_bytes:
            raise BlockError(f"{where}: {num_bytes} bytes from {offset} are outside the segment of {reached} bytes")
        memory = self._transport.view(owner, offset, num_bytes)
        check_block(memory, _expected(ref, state), where)
        return memory

    def _write(self, memory: memoryview, header: Header) -> None:
        if self.checksum:
            payload = memory[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
            header = header._replace(checksum=checksum_of(payload))
        write_header(memory, header)


def _expected(ref: EmbeddingRef, state: BlockState) -> Header:
    return Header(state, owner_of(ref.address), ref.version, ref.position, ref.address, ref.bytes)


def _copy(
    memory: memoryview, specs: Sequence[TensorSpec], payload_bytes: int, tensors: Sequence[torch.Tensor], what: str
) -> None:
    for view, tensor, spec in zip(_views(memory, specs, payload_bytes), tensors, specs, strict=True):
        assert tensor.shape == view.shape, f"{what} have shape {tuple(tensor.shape)}, expected {spec.shape}"
        view.copy_(tensor.detach())


def _views(memory: memoryview, specs: Sequence[TensorSpec], payload_bytes: int) -> list[torch.Tensor]:
    """One tensor for each spec over the block's bytes.

    Each has a storage of its own, so that a write into one block does not count as a change of another that autograd
    has saved.
    """
    tensors = []
    for spec in specs:
        dtype, count = _dtype(spec), prod(spec.shape)
        assert spec.offset + count * dtype.itemsize <= payload_bytes, (
            f"{spec} ends past its payload of {payload_bytes} bytes"
        )
        if not count:
            tensors.append(torch.empty(spec.shape, dtype=dtype))
            continue
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=HEADER_BYTES + spec.offset)
        tensors.append(flat.view(spec.shape))
    return tensors


def _dtype(spec: TensorSpec) -> torch.dtype:
    dtype = getattr(torch, spec.dtype, None)
    assert isinstance(dtype, torch.dtype), f"{spec.dtype!r} is no dtype of torch"
    return dtype
