"""A block: 64 bytes of header, then the payload. The header is checked by readers and decides nothing (contract C6).

    offset            offset + 64                                  offset + block_bytes(payload)
      │ header            │ payload: the sample's features, later their gradients      │
      └───────────────────┴────────────────────────────────────────────────────────────┘
                          ▲ the block's address

| state | written by | when |
|---|---|---|
| `EMPTY` | owner | the row was found bad: the block keeps both rings equal and holds nothing |
| `FEATURES` | owner | `put` |
| `GRADIENTS` | the one reader appointed | `put_gradients`, over the same bytes |
| `FREED` | owner | the lease ended and the block's bytes may be used again |
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from typing import NamedTuple

from flowtrain.pool.address import LINE_BYTES, generation_of, make_address, offset_of, owner_of, region_of
from flowtrain.types import Address

ALIGNMENT = LINE_BYTES
"""Blocks and the tensors in them start at multiples of a cache line."""

HEADER_BYTES = 64

_MAGIC = b"FTBLOCK1"
_LAYOUT = struct.Struct("<8sIIQqQQII8x")
assert _LAYOUT.size == HEADER_BYTES
_IDENTITY = struct.Struct("<8sIIQqQQ")
"""What must agree with a reference; the checksum lies behind it."""

_STATE = struct.Struct("<I")
_STATE_AT, _HAS_CHECKSUM_AT = 12, _IDENTITY.size + 4


class BlockError(AssertionError):
    """A block is not what its reference says: a bug of ours, told with object, state and expectation."""


class BlockState(IntEnum):
    EMPTY = 0
    FEATURES = 1
    GRADIENTS = 2
    FREED = 3


_STATES = frozenset(map(int, BlockState))


class Header(NamedTuple):
    """What a block says of itself.

    `address` has the generation of the block: a reference to an earlier block at this place is told by it. `version`
    is the encoder version of the features. `checksum` is a CRC-32 of the payload, None unless the writer was told to
    compute it.
    """

    state: BlockState
    owner: int
    version: int
    position: int
    address: Address
    payload_bytes: int
    checksum: int | None = None


def align(num_bytes: int) -> int:
    """Rounded up to the next multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def block_bytes(payload_bytes: int) -> int:
    """Pool bytes that a payload takes: its header, and itself rounded up."""
    assert payload_bytes >= 0, f"a payload of {payload_bytes} bytes"
    return HEADER_BYTES + align(payload_bytes)


def write_header(memory: memoryview, header: Header, start: int = 0) -> None:
    """The block's first byte is at `start` of `memory`."""
    state, owner, version, position, address, payload_bytes, checksum = header
    has_checksum = checksum is not None
    _LAYOUT.pack_into(
        memory, start, _MAGIC, owner, state, version, position, address, payload_bytes, checksum or 0, has_checksum
    )


def read_header(memory: memoryview, where: str) -> Header:
    """The header at the start of `memory`; `where` names the block if there is none."""
    magic, owner, state, version, position, address, payload_bytes, checksum, has_checksum = _LAYOUT.unpack_from(memory)
    if magic != _MAGIC:
        raise BlockError(f"{where}: no block starts here, found {magic!r} instead of {_MAGIC!r}")
    if state not in _STATES:
        raise BlockError(f"{where}: its header is overwritten, state is {state}, expected one of {sorted(_STATES)}")
    return Header(
        BlockState(state),
        owner,
        version,
        position,
        Address(address),
        payload_bytes,
        checksum if has_checksum else None,
    )


def write_state(memory: memoryview, state: BlockState, start: int = 0) -> None:
    """Change the state of a block whose header is there; its first byte is at `start` of `memory`."""
    _STATE.pack_into(memory, start + _STATE_AT, state)


def agrees(memory: memoryview, expected: Header, start: int = 0) -> bool:
    """Whether a block is what its reference says and has no checksum to compare: the quick way past `check_block`."""
    state, owner, version, position, address, payload_bytes, _ = expected
    found = _IDENTITY.unpack_from(memory, start)
    wanted = (_MAGIC, owner, state, version, position, address, payload_bytes)
    return found == wanted and not memory[start + _HAS_CHECKSUM_AT]


def checksum_of(payload: memoryview) -> int:
    return zlib.crc32(payload)


def check_block(memory: memoryview, expected: Header, where: str) -> None:
    """Compare a block (header and payload in `memory`) with what its reference says; `BlockError` if they differ."""
    found = read_header(memory, where)
    if found._replace(checksum=None) != expected._replace(checksum=None):
        differ = [
            f"{name} is {getattr(found, name)!s}, expected {getattr(expected, name)!s}"
            for name in Header._fields
            if name != "checksum" and getattr(found, name) != getattr(expected, name)
        ]
        if _same_place(found.address, expected.address):
            differ.append(
                f"it was used after its release: its place has generation {generation_of(found.address)}, "
                f"expected {generation_of(expected.address)}"
            )
        raise BlockError(f"{where}, in state {found.state.name}: {'; '.join(differ)}")
    if found.checksum is not None:
        actual = checksum_of(memory[HEADER_BYTES : HEADER_BYTES + found.payload_bytes])
        if actual != found.checksum:
            raise BlockError(
                f"{where}, in state {found.state.name}: checksum is {actual:08x}, expected {found.checksum:08x}"
            )


def _same_place(found: Address, expected: Address) -> bool:
    """Whether two addresses differ in their generation only."""
    if found == expected:
        return False
    moved = make_address(owner_of(found), offset_of(found), generation_of(expected), region_of(found))
    return moved == expected
