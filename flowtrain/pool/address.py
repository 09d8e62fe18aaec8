"""The pool's one 64-bit address space: an address is taken apart by arithmetic, never looked up (contract C6).

     62        53 52     51          40 39        34 33                                0
    ┌────────────┬────────┬──────────────┬────────────┬─────────────────────────────────┐
    │ generation │ region │   machine    │ local owner│ offset in lines of 64 bytes     │
    │ 10 bits    │ 1 bit  │   12 bits    │ 6 bits     │ 34 bits                         │
    └────────────┴────────┴──────────────┴────────────┴─────────────────────────────────┘
                           └─────── owner id ────────┘

| part | says |
|---|---|
| generation | how many blocks the owner had allocated before this one, modulo 1024: two blocks at one place differ |
| region | whether the segment is memory of the host or of a device |
| owner id | whose segment: the machine's number in the plan, and the owner's number on that machine |
| offset | the place in the segment: up to 1 TiB of it |

Invariant: the parts of `make_address(…)` are what it was made from. Addresses are non-negative signed 64-bit numbers,
so that they fit into any message or header field.
"""

from __future__ import annotations

from enum import IntEnum

from flowtrain.types import Address

LINE_BYTES = 64
"""Blocks start at multiples of a cache line."""

_OFFSET_BITS, _LOCAL_BITS, _MACHINE_BITS, _REGION_BITS, _GENERATION_BITS = 34, 6, 12, 1, 10
_LOCAL_SHIFT = _OFFSET_BITS
_REGION_SHIFT = _LOCAL_SHIFT + _LOCAL_BITS + _MACHINE_BITS
_GENERATION_SHIFT = _REGION_SHIFT + _REGION_BITS
assert _GENERATION_SHIFT + _GENERATION_BITS == 63

MAX_SEGMENT_BYTES = LINE_BYTES << _OFFSET_BITS
"""One tebibyte for each owner and region."""

MAX_LOCAL_OWNERS = 1 << _LOCAL_BITS
"""Owners of one machine."""

MAX_MACHINES = 1 << _MACHINE_BITS
MAX_OWNERS = MAX_MACHINES * MAX_LOCAL_OWNERS
NUM_GENERATIONS = 1 << _GENERATION_BITS


class Region(IntEnum):
    """What kind of memory a segment is."""

    HOST = 0
    DEVICE = 1


def make_owner(machine: int, local: int) -> int:
    """The owner id of the `local`-th owner on a machine."""
    assert 0 <= machine < MAX_MACHINES, f"machine {machine} is outside 0…{MAX_MACHINES - 1}"
    assert 0 <= local < MAX_LOCAL_OWNERS, f"owner {local} of machine {machine} is outside 0…{MAX_LOCAL_OWNERS - 1}"
    return (machine << _LOCAL_BITS) | local


def machine_of_owner(owner: int) -> int:
    return owner >> _LOCAL_BITS


def make_address(owner: int, offset: int, generation: int = 0, region: Region = Region.HOST) -> Address:
    """The address of the line at byte `offset` in the segment of `owner`.

    >>> hex(make_address(make_owner(machine=1, local=2), offset=128, generation=3))
    '0x60004800000002'
    """
    assert 0 <= owner < MAX_OWNERS, f"owner {owner} is outside 0…{MAX_OWNERS - 1}"
    assert 0 <= offset < MAX_SEGMENT_BYTES, f"offset {offset} of owner {owner} is outside its address range"
    assert offset % LINE_BYTES == 0, f"offset {offset} of owner {owner} is not a multiple of {LINE_BYTES}"
    assert 0 <= generation < NUM_GENERATIONS, f"generation {generation} is outside 0…{NUM_GENERATIONS - 1}"
    return Address(
        (generation << _GENERATION_SHIFT) | (region << _REGION_SHIFT) | (owner << _LOCAL_SHIFT) | (offset // LINE_BYTES)
    )


def generation_of(address: Address) -> int:
    return address >> _GENERATION_SHIFT


def region_of(address: Address) -> Region:
    return Region((address >> _REGION_SHIFT) & 1)


def owner_of(address: Address) -> int:
    return (address >> _LOCAL_SHIFT) & (MAX_OWNERS - 1)


def machine_of(address: Address) -> int:
    return machine_of_owner(owner_of(address))


def offset_of(address: Address) -> int:
    """Bytes from the start of the owner's segment."""
    return (address & ((1 << _OFFSET_BITS) - 1)) * LINE_BYTES


def place_of(address: Address) -> str:
    """The address in words, for messages."""
    device = " (device)" if region_of(address) is Region.DEVICE else ""
    return (
        f"{address:#x}: byte {offset_of(address)} of owner {owner_of(address)} on machine {machine_of(address)}{device}"
        f", generation {generation_of(address)}"
    )
