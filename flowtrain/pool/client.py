"""A process's hands in the pool: the owner puts and frees, a reader gets features and leaves gradients (contract C6).

    owner:   put_all ─▶ addresses …                     gradients(refs) ─▶ views …  free(addresses)
    reader:              get_all(refs) ─▶ tensors … put_gradients(refs) … flush() … release(refs)

What a reference announces is there: no call asks whether it is, and where owner and reader share memory none sends
anything. Each call takes all blocks of a unit or a pack: a transport moves them together, and what a call costs is paid
once. `put` and `get` are the same for one block. Headers are checked on every access. What payloads look like in this
process, torch's tensors or plain bytes, is said by `Arrays`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from flowtrain.messages import PoolUse
from flowtrain.pool.address import offset_of, owner_of, place_of
from flowtrain.pool.arrays import Arrays, OwnArrays, torch_arrays
from flowtrain.pool.block import (
    HEADER_BYTES,
    BlockError,
    BlockState,
    Header,
    agrees,
    block_bytes,
    check_block,
    checksum_of,
    write_header,
    write_state,
)
from flowtrain.pool.host import host_identity
from flowtrain.pool.pin import Pinned, pin, unpin
from flowtrain.pool.registry import Registration
from flowtrain.pool.segment import OwnSegment, SegmentHandle
from flowtrain.pool.space import OwnerSpace
from flowtrain.pool.transport import CopiesTransport, Span, Transport, choose_transports
from flowtrain.types import Address, EmbeddingRef, TensorSpec

if TYPE_CHECKING:
    import torch

OWN = "own"
"""The carrier of bytes that a process puts into its own segment, in the counts by transport."""

_NOTHING = memoryview(b"")


class Put(NamedTuple):
    """One sample's features on their way into the pool; `tensors` None: its row was found bad. The block is allocated
    all the same, since the controller's ring has it, and is not written."""

    position: int
    specs: tuple[TensorSpec, ...]
    payload_bytes: int
    tensors: Sequence[Any] | None


class PoolClient:
    """`segment` None: a process that only reads. `transports`: by name, those of this process, preferred first. `host`:
    identity of this machine. `checksum`: write and check a CRC of each payload, to find stray writes. `registration`:
    this process's entry in the registry, told of the bytes in use and taken away by `close`. `arrays`: how payloads are
    seen here, as torch's tensors where nothing is said.

    >>> pool = PoolClient(Segment.create(0, 1 << 20, "pool"), {})
    >>> address = pool.put(position=7, version=0, specs=specs, payload_bytes=4096, tensors=features)
    >>> reader = PoolClient(None, make_transports(["shm"]))
    >>> reader.attach({0: pool.handle()}); reader.get(ref); reader.release([ref])
    """

    def __init__(
        self,
        segment: OwnSegment | None,
        transports: Mapping[str, Transport],
        *,
        host: str | None = None,
        checksum: bool = False,
        timeout_seconds: float = 60.0,
        registration: Registration | None = None,
        arrays: Arrays | None = None,
    ) -> None:
        self.owner = None if segment is None else segment.owner
        self.checksum = checksum
        self.timeout_seconds = timeout_seconds
        self._segment = segment
        self._host = host or host_identity()
        self._transports = transports
        self._chosen: dict[int, tuple[Transport, int]] = {}
        self._held: dict[Address, _Held] = {}
        self._changed: dict[Address, _Held] = {}
        self._pin = Pinned()
        self._timer = _Timer()
        self._registration = registration
        self._bytes_in: Counter[str] = Counter()
        self._bytes_out: Counter[str] = Counter()
        self._space: OwnerSpace | None = None
        self._arrays = arrays or torch_arrays()
        self._own: OwnArrays = self._arrays.own(_NOTHING)
        if segment is not None:
            self._space = OwnerSpace(segment.owner, segment.bytes)
            self._own = self._arrays.own(segment.memory)
            self._pin = pin(segment.memory)

    def handle(self, *, within_machine: bool = False) -> SegmentHandle | None:
        """How others reach this process's segment, or only those of this machine; None without one."""
        if self._segment is None:
            return None
        if within_machine:
            return self._segment.handle(host=self._host)
        endpoints = {name: t.endpoint for name, t in self._transports.items() if t.endpoint is not None}
        return self._segment.handle(endpoints, self._host)

    def attach(self, handles: Mapping[int, SegmentHandle], copies: SegmentHandle | None = None) -> None:
        """Reach the segments of these owners; one's own and those reached before are passed over.

        `copies`: the segment of another reader of this machine. What that one copies, from now on, is seen there.
        """
        for owner, handle in handles.items():
            assert owner == handle.owner, f"handle of owner {handle.owner} given for owner {owner}"
        if copies is not None:
            self._transports = {**self._transports, CopiesTransport.name: CopiesTransport(copies)}
        new = [handle for owner, handle in handles.items() if owner != self.owner and owner not in self._chosen]
        in_use = {transport.name for transport, _ in self._chosen.values()}
        chosen = choose_transports(new, self._host, self._transports, in_use)
        for handle in new:
            transport = self._transports[chosen[handle.owner]]
            transport.attach(handle)
            self._chosen[handle.owner] = (transport, handle.bytes)

    @property
    def sees_copies(self) -> bool:
        """Whether this process sees what another reader copies, and copies nothing."""
        return CopiesTransport.name in self._transports

    def detach(self, owners: Iterable[int]) -> None:
        """Let go of these owners' segments, which hold nothing any more: other processes may then have the numbers."""
        for owner in owners:
            if (chosen := self._chosen.pop(owner, None)) is not None:
                held = [address for address in self._held if owner_of(address) == owner]
                assert not held, f"owner {owner} is let go while {len(held)} of its blocks are in use"
                chosen[0].detach(owner)

    # --- owner --------------------------------------------------------------------------------------------------------

    def put(
        self,
        position: int,
        version: int,
        specs: Sequence[TensorSpec],
        payload_bytes: int,
        tensors: Sequence[torch.Tensor] | None,
    ) -> Address:
        """One sample's features: see `put_all`."""
        return self.put_all(version, [Put(position, tuple(specs), payload_bytes, tensors)])[0]

    def put_all(self, version: int, puts: Sequence[Put]) -> list[Address]:
        """Copy features, cast to the dtype of the pool, into a new block each; returns where their payloads start."""
        with self._timer:
            assert self._space is not None, "this process has no segment to put into"
            assert self._segment is not None
            owner, memory, put_bytes = self._space.owner, self._segment.memory, 0
            addresses = []
            for position, specs, payload_bytes, tensors in puts:
                address = self._space.allocate(payload_bytes)
                addresses.append(address)
                start = offset_of(address) - HEADER_BYTES
                state = BlockState.EMPTY if tensors is None else BlockState.FEATURES
                if tensors is not None:
                    self._own.fill(start, specs, payload_bytes, tensors, position)
                    put_bytes += payload_bytes
                self._write(memory, Header(state, owner, version, position, address, payload_bytes), start)
            self._bytes_in[OWN] += put_bytes
            if self._registration is not None:
                self._registration.used(self._space.arena.used)
            return addresses

    def gradients(self, refs: Sequence[EmbeddingRef]) -> list[list[torch.Tensor]]:
        """Views of the gradients that were left over these samples' features, in their order."""
        with self._timer:
            found = []
            for ref in refs:
                assert owner_of(ref.address) == self.owner, (
                    f"gradients of {place_of(ref.address)} asked of {self.owner}"
                )
                assert self._segment is not None
                start = offset_of(ref.address) - HEADER_BYTES
                _check(self._segment.memory, ref, BlockState.GRADIENTS, start)
                found.append(self._own.of(start, ref.tensors, ref.bytes))
            return found

    def free(self, addresses: Iterable[Address]) -> None:
        """End blocks of this process's own segment, each once."""
        with self._timer:
            for address in addresses:
                assert self._space is not None, f"{place_of(address)} freed in a process without a segment"
                assert self._segment is not None
                self._space.free(address)
                write_state(self._segment.memory, BlockState.FREED, offset_of(address) - HEADER_BYTES)
            if self._registration is not None and self._space is not None:
                self._registration.used(self._space.arena.used)

    # --- reader -------------------------------------------------------------------------------------------------------

    def get(self, ref: EmbeddingRef) -> list[torch.Tensor]:
        """A sample's features: see `get_all`."""
        return self.get_all([ref])[0]

    def get_all(self, refs: Sequence[EmbeddingRef]) -> list[list[torch.Tensor]]:
        """Features of these samples, in their order: views where memory is shared, else copies made in one call for
        each transport. They are valid until `put_gradients` writes over them or `release` ends their use.
        """
        with self._timer:
            self._fetch(refs)
            found = []
            for ref in refs:
                held = self._checked(ref)
                held.views = self._arrays.views(held.memory, ref.tensors, ref.bytes)
                found.append([*held.views])
            return found

    def put_gradients(self, refs: Sequence[EmbeddingRef], grads: Iterable[Sequence[torch.Tensor]]) -> None:
        """Write the gradients of these samples' features over them; `flush` brings them to the owner.

        Tensors from `get_all` show the gradients from here on.
        """
        with self._timer:
            self._fetch(refs)
            copies, written = [], []
            for ref, of_sample in zip(refs, grads, strict=True):
                held = self._checked(ref)
                targets = held.views or self._arrays.views(held.memory, ref.tensors, ref.bytes)
                copies.append((ref.position, targets, of_sample))
                written.append((ref, held))
            self._arrays.copy(copies)
            for ref, held in written:
                self._write(held.memory, _expected(ref, BlockState.GRADIENTS))
                self._changed[ref.address] = held

    def flush(self) -> None:
        """All gradients written since the last call are with their owners on return."""
        with self._timer:
            for transport, spans in _by_transport(self._changed.values()):
                transport.write(spans, self.timeout_seconds)
            for held in self._changed.values():
                self._bytes_in[held.transport.name] += held.payload_bytes
            self._changed.clear()

    def release(self, refs: Iterable[EmbeddingRef]) -> None:
        """This process is done with these samples' features; gradients written must have been flushed."""
        with self._timer:
            ended = [held for ref in refs if (held := self._held.pop(ref.address, None)) is not None]
            unsent = [place_of(held.span.address) for held in ended if held.span.address in self._changed]
            assert not unsent, f"gradients are released before they were flushed: {'; '.join(unsent)}"
            for transport, spans in _by_transport(ended):
                transport.release(spans)

    # --- both ---------------------------------------------------------------------------------------------------------

    def use(self) -> PoolUse:
        """Seconds in these calls and bytes by transport since the last call of this."""
        use = PoolUse(self._timer.seconds, dict(self._bytes_in), dict(self._bytes_out), self.pinned_bytes)
        self._timer.seconds = 0.0
        self._bytes_in.clear()
        self._bytes_out.clear()
        return use

    @property
    def pinned_bytes(self) -> int:
        """Bytes of all segments reached that this process has page-locked."""
        return self._pin.bytes + sum(transport.pinned_bytes for transport in self._transports.values())

    def close(self) -> None:
        """Let go of all segments; idempotent. Memory ends with the last view of it."""
        self._held.clear()
        self._changed.clear()
        self._chosen.clear()
        self._own.close()
        for transport in self._transports.values():
            transport.close()
        unpin(self._pin)
        self._pin = Pinned()
        if self._segment is not None:
            self._segment.close()
        if self._registration is not None:
            self._registration.close()

    def _fetch(self, refs: Iterable[EmbeddingRef]) -> None:
        missing = [self._reach(ref) for ref in refs if ref.address not in self._held]
        for transport, spans in _by_transport(missing):
            memories = transport.read(spans, self.timeout_seconds)
            for held, memory in zip((h for h in missing if h.transport is transport), memories, strict=True):
                held.memory = memory
                self._held[held.span.address] = held
                self._bytes_out[transport.name] += held.payload_bytes

    def _reach(self, ref: EmbeddingRef) -> _Held:
        """How a block is reached; it must lie in a segment that is attached."""
        owner, start, num_bytes = owner_of(ref.address), offset_of(ref.address) - HEADER_BYTES, block_bytes(ref.bytes)
        chosen = self._chosen.get(owner)
        if chosen is None:
            raise BlockError(f"{_where(ref)}: the segment of owner {owner} is not attached, only {[*self._chosen]}")
        transport, segment_bytes = chosen
        if not 0 <= start <= segment_bytes - num_bytes:
            raise BlockError(
                f"{_where(ref)}: {num_bytes} bytes from {start} are outside the segment of {segment_bytes} bytes"
            )
        return _Held(transport, Span(ref.address, num_bytes), ref.bytes)

    def _checked(self, ref: EmbeddingRef) -> _Held:
        """A held block that must have features; what fails the check is not held any longer."""
        held = self._held[ref.address]
        try:
            _check(held.memory, ref, BlockState.FEATURES)
        except BlockError:
            if ref.address not in self._changed:
                del self._held[ref.address]
                held.transport.release([held.span])
            raise
        return held

    def _write(self, memory: memoryview, header: Header, start: int = 0) -> None:
        if self.checksum and header.state is not BlockState.EMPTY:
            payload = start + HEADER_BYTES
            header = header._replace(checksum=checksum_of(memory[payload : payload + header.payload_bytes]))
        write_header(memory, header, start)


class _Timer:
    """Adds up the seconds spent in a `with` of it."""

    __slots__ = ("_start", "seconds")

    def __init__(self) -> None:
        self.seconds = self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *raised: object) -> None:
        self.seconds += time.perf_counter() - self._start


@dataclass(slots=True)
class _Held:
    """A block that this process reads: how it came, what it is, and its header, its payload, its tensors."""

    transport: Transport
    span: Span
    payload_bytes: int
    memory: memoryview = _NOTHING
    views: list[Any] = field(default_factory=list)


def _by_transport(blocks: Iterable[_Held]) -> list[tuple[Transport, list[Span]]]:
    """Spans grouped by how their owners are reached, each group in their order."""
    groups: dict[str, tuple[Transport, list[Span]]] = {}
    for held in blocks:
        name = held.transport.name
        if name not in groups:
            groups[name] = (held.transport, [])
        groups[name][1].append(held.span)
    return list(groups.values())


def _check(memory: memoryview, ref: EmbeddingRef, state: BlockState, start: int = 0) -> None:
    """`BlockError` unless the block is what its reference says."""
    expected = _expected(ref, state)
    if not agrees(memory, expected, start):
        check_block(memory[start : start + block_bytes(ref.bytes)], expected, _where(ref))


def _where(ref: EmbeddingRef) -> str:
    return f"block {ref.address:#x} of position {ref.position}"


def _expected(ref: EmbeddingRef, state: BlockState) -> Header:
    return Header(state, owner_of(ref.address), ref.version, ref.position, ref.address, ref.bytes)
