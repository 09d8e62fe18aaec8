"""The pool's one 64-bit address space: an address is taken apart by arithmetic, never looked up (contract C6).

    63                40 39                        0
    ┌───────────────────┬───────────────────────────┐
    │ owner             │ offset in owner's segment │
    └───────────────────┴───────────────────────────┘

Invariant: `make_address(owner_of(a), offset_of(a)) == a`. Addresses are non-negative signed 64-bit numbers, so that
they fit into any message or header field.
"""

from __future__ import annotations

from flowtrain.types import Address

OFFSET_BITS = 40

MAX_SEGMENT_BYTES = 1 << OFFSET_BITS
"""One tebibyte for each owner."""

MAX_OWNERS = 1 << (63 - OFFSET_BITS)


def make_address(owner: int, offset: int) -> Address:
    """The address of byte `offset` in the segment of `owner`."""
    assert 0 <= owner < MAX_OWNERS, f"owner {owner} is outside 0…{MAX_OWNERS - 1}"
    assert 0 <= offset < MAX_SEGMENT_BYTES, f"offset {offset} of owner {owner} is outside its address range"
    return Address((owner << OFFSET_BITS) | offset)


def owner_of(address: Address) -> int:
    return address >> OFFSET_BITS


def offset_of(address: Address) -> int:
    return address & (MAX_SEGMENT_BYTES - 1)
