"""One owner's part of the address space: an arena, and the generation that makes each of its addresses a new one.

    owner's process                         controller's directory
      OwnerSpace.allocate ─▶ address    ==    OwnerSpace.allocate ─▶ address predicted

Both run the same code on the same allocations in the same order, so both see the same addresses, generation included
(contract C6). Generations repeat after 1024 allocations: an address comes again where its place is given away exactly a
multiple of 1024 allocations later. A use after release is then told by the header's position, which no other block of
training has, or its version or size.
"""

from __future__ import annotations

from collections.abc import Iterable

from flowtrain.pool.address import NUM_GENERATIONS, Region, make_address, offset_of, owner_of, place_of
from flowtrain.pool.arena import RingArena
from flowtrain.pool.block import HEADER_BYTES, block_bytes
from flowtrain.types import Address


class OwnerSpace:
    """Allocates blocks by payload size and frees them by address, which points at the payload.

    >>> space = OwnerSpace(owner=0, segment_bytes=1 << 20)
    >>> space.free(space.allocate(4096))
    """

    def __init__(self, owner: int, segment_bytes: int, region: Region = Region.HOST) -> None:
        self.owner = owner
        self.region = region
        self.arena = RingArena(segment_bytes)
        self._num_allocated = 0
        self._live: dict[int, Address] = {}

    def room(self, payload_sizes: Iterable[int]) -> bool:
        """Whether one block for each payload can be allocated now, one after the other."""
        return self.arena.room(map(block_bytes, payload_sizes))

    def allocate(self, payload_bytes: int) -> Address:
        """A new block; `ArenaFullError` without room (callers reserve first)."""
        offset = self.arena.allocate(block_bytes(payload_bytes)) + HEADER_BYTES
        address = make_address(self.owner, offset, self._num_allocated % NUM_GENERATIONS, self.region)
        self._num_allocated += 1
        self._live[offset] = address
        return address

    def free(self, address: Address) -> None:
        """End a live block of this owner."""
        assert owner_of(address) == self.owner, f"owner {self.owner} is told to free {place_of(address)}"
        live = self._live.get(offset_of(address))
        assert live is not None, f"no live block at {place_of(address)}: freed twice, or never allocated"
        assert live == address, f"{place_of(address)} is told to be freed, and its place is now {place_of(live)}"
        self.arena.free(offset_of(address) - HEADER_BYTES)
        del self._live[offset_of(address)]

    @property
    def live(self) -> frozenset[Address]:
        """Addresses of the blocks that are allocated and not freed."""
        return frozenset(self._live.values())

    def assert_invariants(self) -> None:
        self.arena.assert_invariants()
        assert self.arena.num_blocks == len(self._live), "arena and addresses differ"
        assert all(offset_of(address) == offset for offset, address in self._live.items()), "a block is misplaced"
