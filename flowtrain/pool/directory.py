"""Who may use which block: the controller's mirror of all segments (pure, contracts C6 and C10).

    reserve ──▶ RESERVED ──written──▶ WRITTEN ──lease──▶ LEASED ──gradient_written──▶ GRADIENT
                   │                                       │                              │
                   └── row found bad ──────────────────────┴────────── release ───────────┘
                                                                          │
                                   pending ◀──────────────────────────────┘
                                      │ frees(owner): handed out once, to travel in the owner's next order

| bytes are | from | to |
|---|---|---|
| charged | `reserve` | `release` |
| taken in the ring | `reserve` | `frees`, the point at which the owner's next order frees them too |

Invariants: each owner's ring has the blocks of the units reserved and of those released but not handed out; addresses
predicted at `reserve` are those that the owner announces; every block is released once and handed out once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from flowtrain.pool.address import MAX_SEGMENT_BYTES, owner_of
from flowtrain.pool.block import block_bytes
from flowtrain.pool.space import OwnerSpace
from flowtrain.types import Address, EmbeddingRef, UnitId


class Lease(Enum):
    RESERVED = "reserved"
    WRITTEN = "written"
    LEASED = "leased"
    GRADIENT = "gradient"


@dataclass(slots=True)
class _Block:
    unit: UnitId
    payload_bytes: int
    state: Lease = Lease.RESERVED
    position: int | None = None


class Directory:
    """See the module's page. `segments`: bytes of each owner's segment.

    >>> directory = Directory({0: 1 << 20})
    >>> unit = UnitId(Phase.TRAIN, step=1, slot=0, rank=0, number=0)
    >>> directory.room(0, [4096]) and directory.reserve(0, unit, [4096])
    True
    """

    def __init__(self, segments: Mapping[int, int]) -> None:
        for owner, num_bytes in segments.items():
            assert 0 < num_bytes <= MAX_SEGMENT_BYTES, f"segment of owner {owner} has {num_bytes} bytes"
        self._spaces = {owner: OwnerSpace(owner, num_bytes) for owner, num_bytes in segments.items()}
        self._blocks: dict[Address, _Block] = {}
        self._units: dict[UnitId, tuple[Address, ...]] = {}
        self._charged = dict.fromkeys(segments, 0)
        self._pending: dict[int, list[Address]] = {owner: [] for owner in segments}

    def room(self, owner: int, payload_sizes: Sequence[int]) -> bool:
        """Whether one block for each payload can be reserved in the owner's segment now."""
        return self._spaces[owner].room(payload_sizes)

    def reserve(self, owner: int, unit: UnitId, payload_sizes: Sequence[int]) -> bool:
        """Charge a unit's blocks, in the order in which the owner will allocate them; without room False, no change."""
        assert unit not in self._units, f"unit {_unit(unit)} is reserved already"
        if not self.room(owner, payload_sizes):
            return False
        space = self._spaces[owner]
        addresses = []
        for payload_bytes in payload_sizes:
            address = space.allocate(payload_bytes)
            self._blocks[address] = _Block(unit, payload_bytes)
            self._charged[owner] += block_bytes(payload_bytes)
            addresses.append(address)
        self._units[unit] = tuple(addresses)
        return True

    def written(self, refs: Iterable[EmbeddingRef]) -> None:
        """The owner has put these features where the directory expected them."""
        for ref in refs:
            block = self._move(ref, Lease.RESERVED, Lease.WRITTEN)
            assert block.payload_bytes == ref.bytes, (
                f"{_name(ref)} has {ref.bytes} payload bytes, reserved were {block.payload_bytes}"
            )
            block.position = ref.position

    def lease(self, refs: Iterable[EmbeddingRef]) -> None:
        """A pack is about to read these; the lease ends with `release`."""
        for ref in refs:
            self._move(ref, Lease.WRITTEN, Lease.LEASED)

    def gradient_written(self, refs: Iterable[EmbeddingRef]) -> None:
        """The reader has left and the gradients lie over the features."""
        for ref in refs:
            self._move(ref, Lease.LEASED, Lease.GRADIENT)

    def release(self, unit: UnitId) -> None:
        """The last user of the unit's blocks is done; refunds them. Blocks of bad rows were never written."""
        addresses = self._units.pop(unit, None)
        assert addresses is not None, f"unit {_unit(unit)} is released twice, or was never reserved"
        for address in addresses:
            block = self._blocks.pop(address)
            assert block.state is not Lease.WRITTEN, (
                f"block {address:#x} of unit {_unit(unit)} is released before anyone has read it"
            )
            owner = owner_of(address)
            self._charged[owner] -= block_bytes(block.payload_bytes)
            self._pending[owner].append(address)

    def frees(self, owner: int) -> tuple[Address, ...]:
        """Addresses that the owner's next order must free before it allocates; each is handed out once."""
        addresses = tuple(self._pending[owner])
        self._pending[owner].clear()
        for address in addresses:
            self._spaces[owner].free(address)
        return addresses

    def reserved_bytes(self, owner: int) -> int:
        """Bytes charged to the owner's segment, headers included."""
        return self._charged[owner]

    def used_bytes(self) -> int:
        """Bytes charged in all segments; over `capacity()` it is the pool's occupancy."""
        return sum(self._charged.values())

    def capacity(self) -> int:
        return sum(space.arena.capacity for space in self._spaces.values())

    def _move(self, ref: EmbeddingRef, before: Lease, after: Lease) -> _Block:
        block = self._blocks.get(ref.address)
        assert block is not None, f"{_name(ref)} has no block: never reserved, or released"
        assert block.unit == ref.unit, f"{_name(ref)} lies in a block of unit {_unit(block.unit)}"
        assert block.position in (None, ref.position), f"{_name(ref)} lies in the block of position {block.position}"
        assert block.state is before, f"{_name(ref)} is {block.state.value}, expected {before.value}"
        block.state = after
        return block

    def assert_invariants(self) -> None:
        for owner, space in self._spaces.items():
            space.assert_invariants()
            mine = [block for address, block in self._blocks.items() if owner_of(address) == owner]
            charged = sum(block_bytes(block.payload_bytes) for block in mine)
            assert charged == self._charged[owner], f"owner {owner} is charged {self._charged[owner]}, holds {charged}"
            used = space.arena.used
            assert charged <= used, f"owner {owner} is charged {charged} and its ring has {used} in use"
            assert len(space.live) == len(mine) + len(self._pending[owner]), f"owner {owner}: ring and directory differ"
        listed = [address for addresses in self._units.values() for address in addresses]
        assert sorted(listed) == sorted(self._blocks), "units and blocks differ"


def _unit(unit: UnitId) -> str:
    return f"{unit.number} of {unit.phase} step {unit.step}, slot {unit.slot}, rank {unit.rank}"


def _name(ref: EmbeddingRef) -> str:
    return f"embedding of position {ref.position} (unit {_unit(ref.unit)}, address {ref.address:#x})"
