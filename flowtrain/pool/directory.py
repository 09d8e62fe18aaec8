"""Who may use which block: the controller's mirror of all segments (pure, contracts C6 and C10).

    reserve ─▶ RESERVED ─written─▶ WRITTEN ─lease─▶ LEASED ──────────────────────────┐
                  │                   │ ▲              │ expire, last holder          │
                  │                   │ └──────────────┘                              ├─ release ─▶ RELEASED ─▶ frees
                  │                   └─lease for a gradient─▶ PENDING ─written─▶ GRADIENT ─┤
                  │                                               └─expire─▶ LOST ───┤
                  └── row found bad ─────────────────────────────────────────────────┘

| state | the block's bytes are | next |
|---|---|---|
| reserved | the owner's to fill; never filled where the row is found bad | written, released |
| written | features, nobody reads them | leased, gradient pending |
| leased | features, read by the holders named | leased (one more holder), written (its holders died), released |
| gradient pending | features that one holder reads and then overwrites | gradient written, lost (its holder died) |
| gradient written | a gradient for the owner to read | released |
| lost | neither features nor a gradient | released |
| released | nobody's; the owner's next order frees them | – |

Bytes are charged from `reserve` to `release`, and taken in the owner's ring from `reserve` to `frees`, the point at
which the owner's next order frees them too. `frees` hands each address out once.

Invariants: each owner's arena has the blocks of the units reserved and of those released but not handed out; addresses
predicted at `reserve` are those that the owner announces; every block is released once and handed out once; a block has
a holder exactly when it is leased or its gradient is pending.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flowtrain.pool.address import MAX_SEGMENT_BYTES, owner_of
from flowtrain.pool.block import block_bytes
from flowtrain.pool.lease import LEGAL, Event, Holder, IllegalTransition, Lease, holder_name, unit_name
from flowtrain.pool.space import OwnerSpace
from flowtrain.types import Address, EmbeddingRef, UnitId

STORIES_KEPT = 1024
"""Released blocks whose story is still told when somebody uses them."""

Journal = Callable[[str, Address, int], None]
"""Called with `reserve`, `release` or `free`, the block's address and its bytes, in the order of the events."""


@dataclass(slots=True)
class _Block:
    unit: UnitId
    payload_bytes: int
    state: Lease = Lease.RESERVED
    position: int | None = None
    holders: set[Holder] = field(default_factory=set)
    story: list[str] = field(default_factory=list)


class Expired(NamedTuple):
    """What the leases of a dead process leave: features that can be leased again, and blocks with half a gradient."""

    readable: tuple[Address, ...]
    lost: tuple[Address, ...]


class Directory:
    """See the module's page. `segments`: bytes of each owner's segment; `journal`: told of every event.

    >>> directory = Directory({0: 1 << 20})
    >>> unit = UnitId(Phase.TRAIN, step=1, slot=0, rank=0, number=0)
    >>> directory.room(0, [4096]) and directory.reserve(0, unit, [4096])
    True
    """

    def __init__(self, segments: Mapping[int, int], journal: Journal | None = None) -> None:
        self._spaces: dict[int, OwnerSpace] = {}
        self._blocks: dict[Address, _Block] = {}
        self._units: dict[UnitId, tuple[Address, ...]] = {}
        self._charged: dict[int, int] = {}
        self._pending: dict[int, list[Address]] = {}
        self._journal = journal or (lambda event, address, num_bytes: None)
        self._released: deque[tuple[Address, list[str]]] = deque(maxlen=STORIES_KEPT)
        self._num_events = 0
        for owner, num_bytes in segments.items():
            self.add(owner, num_bytes)

    def add(self, owner: int, num_bytes: int) -> None:
        """One more owner, with an untouched segment."""
        assert owner not in self._spaces, f"owner {owner} has a segment already"
        assert 0 < num_bytes <= MAX_SEGMENT_BYTES, f"segment of owner {owner} has {num_bytes} bytes"
        self._spaces[owner] = OwnerSpace(owner, num_bytes)
        self._charged[owner] = 0
        self._pending[owner] = []

    def remove(self, owner: int) -> None:
        """An owner that holds nothing leaves; what it has not been told to free goes with its segment."""
        assert not self._charged[owner], f"owner {owner} leaves with {self._charged[owner]} bytes in use"
        for of_owner in (self._spaces, self._charged, self._pending):
            del of_owner[owner]

    def room(self, owner: int, payload_sizes: Sequence[int]) -> bool:
        """Whether one block for each payload can be reserved in the owner's segment now."""
        return self._spaces[owner].room(payload_sizes)

    def reserve(self, owner: int, unit: UnitId, payload_sizes: Sequence[int]) -> bool:
        """Charge a unit's blocks, in the order in which the owner will allocate them; without room False, no change."""
        assert unit not in self._units, f"unit {unit_name(unit)} is reserved already"
        if not self.room(owner, payload_sizes):
            return False
        space = self._spaces[owner]
        addresses = []
        for payload_bytes in payload_sizes:
            address = space.allocate(payload_bytes)
            block = self._blocks[address] = _Block(unit, payload_bytes)
            self._charged[owner] += block_bytes(payload_bytes)
            self._tell(block, f"reserved for unit {unit_name(unit)}")
            self._journal("reserve", address, block_bytes(payload_bytes))
            addresses.append(address)
        self._units[unit] = tuple(addresses)
        return True

    def written(self, refs: Iterable[EmbeddingRef]) -> None:
        """The owner has put these features where the directory expected them."""
        for ref in refs:
            block = self._find(ref, Event.WRITE)
            if block.payload_bytes != ref.bytes:
                raise self._illegal(ref, block, f"has {ref.bytes} payload bytes, reserved were {block.payload_bytes}")
            self._move(ref, block, Event.WRITE, "written")
            block.position = ref.position

    def lease(self, refs: Iterable[EmbeddingRef], holder: Holder, gradient: bool = False) -> None:
        """A pack of `holder` is about to read these, and with `gradient` to overwrite them with their gradients."""
        for ref in refs:
            event = Event.LEASE_FOR_GRADIENT if gradient else Event.LEASE
            block = self._find(ref, event)
            if holder in block.holders:
                raise self._illegal(ref, block, f"is leased by {holder_name(holder)} already")
            self._move(ref, block, event, f"leased by {holder_name(holder)}{' for a gradient' if gradient else ''}")
            block.holders.add(holder)

    def gradient_written(self, refs: Iterable[EmbeddingRef], holder: Holder) -> None:
        """The reader has left and the gradients lie over the features."""
        for ref in refs:
            block = self._find(ref, Event.WRITE_GRADIENT)
            if block.state is Lease.PENDING and holder not in block.holders:
                raise self._illegal(ref, block, f"has a gradient from {holder_name(holder)}, who holds no lease")
            self._move(ref, block, Event.WRITE_GRADIENT, f"gradient written by {holder_name(holder)}")
            block.holders.clear()

    def expire(self, holder: Holder) -> Expired:
        """A process died: end its leases. Features that only it was reading are there for another; a gradient that it
        was to write may be half there, so those blocks are lost and their units must be encoded again."""
        readable: list[Address] = []
        lost: list[Address] = []
        for address, block in self._blocks.items():
            if holder not in block.holders:
                continue
            block.holders.discard(holder)
            self._tell(block, f"lease of {holder_name(holder)} expired")
            if not block.holders:
                event, fates = {
                    Lease.LEASED: (Event.LOSE_READERS, readable),
                    Lease.PENDING: (Event.LOSE_WRITER, lost),
                }[block.state]
                block.state = LEGAL[event][1]
                fates.append(address)
        return Expired(tuple(readable), tuple(lost))

    def release(self, unit: UnitId) -> None:
        """The last user of the unit's blocks is done; refunds them. Blocks of bad rows were never written."""
        addresses = self._units.get(unit)
        assert addresses is not None, f"unit {unit_name(unit)} is released twice, or was never reserved"
        for address in addresses:
            block = self._blocks[address]
            if block.state not in LEGAL[Event.RELEASE][0]:
                raise IllegalTransition(address, f"is {block.state.value} and cannot be released", block.story)
        del self._units[unit]
        for address in addresses:
            block = self._blocks.pop(address)
            self._tell(block, "released")
            owner = owner_of(address)
            self._charged[owner] -= block_bytes(block.payload_bytes)
            self._pending[owner].append(address)
            self._released.append((address, block.story))
            self._journal("release", address, block_bytes(block.payload_bytes))

    def frees(self, owner: int) -> tuple[Address, ...]:
        """Addresses that the owner's next order must free before it allocates; each is handed out once."""
        addresses = tuple(self._pending[owner])
        self._pending[owner].clear()
        for address in addresses:
            self._spaces[owner].free(address)
            self._journal("free", address, 0)
        return addresses

    def used_bytes(self) -> int:
        """Bytes charged in all segments, headers included; over `capacity()` it is the pool's occupancy."""
        return sum(self._charged.values())

    def capacity_of(self, owner: int) -> int:
        return self._spaces[owner].arena.capacity

    def capacity(self) -> int:
        return sum(space.arena.capacity for space in self._spaces.values())

    def addresses(self, unit: UnitId) -> tuple[Address, ...]:
        """Where the owner will find each block of a unit that is reserved."""
        return self._units[unit]

    def _find(self, ref: EmbeddingRef, event: Event) -> _Block:
        block = self._blocks.get(ref.address)
        if block is None:
            story = next((story for address, story in reversed(self._released) if address == ref.address), [])
            was = "was released" if story else "was never reserved"
            raise IllegalTransition(ref.address, f"is to {event.value} for position {ref.position} and {was}", story)
        if block.unit != ref.unit:
            raise self._illegal(ref, block, f"lies in a block of unit {unit_name(block.unit)}")
        if block.position not in (None, ref.position):
            raise self._illegal(ref, block, f"lies in the block of position {block.position}")
        return block

    def _move(self, ref: EmbeddingRef, block: _Block, event: Event, told: str) -> None:
        before, after = LEGAL[event]
        if block.state not in before:
            raise self._illegal(ref, block, f"is {block.state.value} and cannot {event.value}")
        block.state = after
        self._tell(block, told)

    def _illegal(self, ref: EmbeddingRef, block: _Block, what: str) -> IllegalTransition:
        what = f"of position {ref.position} (unit {unit_name(ref.unit)}) {what}"
        return IllegalTransition(ref.address, what, block.story)

    def _tell(self, block: _Block, event: str) -> None:
        self._num_events += 1
        block.story.append(f"{self._num_events}: {event}")

    def assert_invariants(self) -> None:
        for owner, space in self._spaces.items():
            space.assert_invariants()
            mine = {address: block for address, block in self._blocks.items() if owner_of(address) == owner}
            charged = sum(block_bytes(block.payload_bytes) for block in mine.values())
            assert charged == self._charged[owner], f"owner {owner} is charged {self._charged[owner]}, holds {charged}"
            used = space.arena.used
            assert charged <= used, f"owner {owner} is charged {charged} and its arena has {used} in use"
            pending = self._pending[owner]
            assert len(set(pending)) == len(pending), f"owner {owner}: a block is released twice"
            assert space.live == mine.keys() | set(pending), f"owner {owner}: arena and directory differ"
        listed = [address for addresses in self._units.values() for address in addresses]
        assert sorted(listed) == sorted(self._blocks), "units and blocks differ"
        for address, block in self._blocks.items():
            held = block.state in (Lease.LEASED, Lease.PENDING)
            assert held == bool(block.holders), f"block {address:#x} is {block.state.value}, holders {block.holders}"
            assert block.state is not Lease.PENDING or len(block.holders) == 1, f"block {address:#x}: two writers"
