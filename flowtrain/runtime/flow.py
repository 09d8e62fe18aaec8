"""Flow control: which unit is encoded next, which pack runs next, which gradients go home (pure, contract C10).

    Step ──add──▶ ┌───────────────── Flow ─────────────────┐ ──orders()──▶ EncodeOrder, PackOrder, BackwardOrder,
    answers ────▶ │ units in the order of need · packs ready │              ReduceOrder
                  └──────────────────────────────────────────┘

| waits | for | woken by |
|---|---|---|
| a round | room; the update before it (trainable encoder); the exchange | `trained`, `returned`, `update_sent` |
| a pack | all its units; the packs of its rank before it | `encoded` |
| a backward | the packs that use the round's units; the rounds before it in that group | `trained` |
| a reduce | all orders of the step to that rank being sent | any of the above |
| everything of a held step | another number of producers (`hold`, `drained`, `resize`) | `resize` |

Invariants: orders to one rank are executed in the order in which they are sent; a rank has at most `DEPTH` orders of
each kind in flight; a unit is reserved in the order of need and never past one that does not fit; every block reserved
is released once; orders of a round (`rounds.py`) are sent at once, so a whole group has the same order of rounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from flowtrain.messages import (
    BackwardOrder,
    EncodeOrder,
    PackOrder,
    PackTrained,
    ReduceOrder,
    UnitEncoded,
    UnitsReturned,
)
from flowtrain.pool.block import block_bytes
from flowtrain.pool.directory import Directory
from flowtrain.runtime.exchange import EXCHANGES, Exchange, check_room
from flowtrain.runtime.flow_state import PackState, StepKey, StepState, busy_text, expired_text, missing_text
from flowtrain.runtime.rounds import Round, ranks_of, rounds_of
from flowtrain.types import Address, Phase, Role, SampleMeta, SkippedRow, Step, UnitId

DEPTH = 2
"""Orders in flight to one rank: one running and one waiting hides the round trip of a call."""

READY_AHEAD = 2
"""Packs ready per consumer rank beyond which a producer prefers returning gradients to encoding more."""

Order = EncodeOrder | PackOrder | BackwardOrder | ReduceOrder


class Flow:
    """See the page above. `payload_bytes(sample)`: size of a sample's block; `directory` mirrors the segments;
    `owners`: the pool's owner id of each producer, its rank where nothing is said; `shards`: producers of a group;
    `colocated`: both sides of a rank share a process, which computes all its gradients before it waits for others."""

    def __init__(
        self,
        directory: Directory,
        *,
        num_producers: int,
        num_consumers: int,
        trainable_encoder: bool,
        reduced_roles: frozenset[Role],
        exchange: Exchange = EXCHANGES["pool"],
        payload_bytes: Callable[[SampleMeta], int],
        version: int = 0,
        owners: Sequence[int] | None = None,
        shards: int = 1,
        colocated: bool = False,
    ) -> None:
        self.shards, self.colocated = shards, colocated
        self.directory = directory
        self.num_producers, self.num_consumers = num_producers, num_consumers
        self.trainable_encoder = trainable_encoder
        self.reduced_roles = reduced_roles
        self.exchange = exchange
        self.payload_bytes = payload_bytes
        self.version = version
        self.owners = tuple(owners) if owners is not None else tuple(range(num_producers))
        self._held_from: int | None = None
        self._steps: dict[StepKey, StepState] = {}
        self._rounds: deque[Round] = deque()
        self._packs: list[deque[PackState]] = [deque() for _ in range(num_consumers)]
        self._pack_of_unit: dict[UnitId, PackState] = {}
        self._pack_in_flight: dict[tuple[StepKey, int, int], PackState] = {}
        self._owner: dict[UnitId, int] = {}
        self._to_return: list[deque[tuple[UnitId, ...]]] = [deque() for _ in range(num_producers // shards)]
        self._returnable: set[UnitId] = set()
        self._encodes_in_flight = [0] * num_producers
        self._backwards_in_flight = [0] * num_producers
        self._packs_in_flight = [0] * num_consumers
        self._frees: list[list[Address]] = [[] for _ in range(num_producers)]

    # --- events -------------------------------------------------------------------------------------------------------

    def add(self, step: Step) -> None:
        """Append a step (or an evaluation pass) to the order of need."""
        key = (step.phase, step.index)
        units = [unit for pack in step.packs for unit in pack.units]
        if self.exchange.whole_steps:
            sizes = [block_bytes(self.payload_bytes(sample)) for sample in step.samples if sample.vision_tokens]
            check_room(step.index, sizes, min(map(self.directory.capacity_of, self.owners)))
        self._steps[key] = StepState(step, len(step.packs), len(units), units_to_encode=len(units))
        for pack in step.packs:
            state = PackState(pack, key, {unit.id for unit in pack.units})
            self._packs[pack.rank].append(state)
            for unit in pack.units:
                self._pack_of_unit[unit.id] = state
        self._rounds.extend(rounds_of(step, self.num_producers, self.shards))

    def encoded(self, answer: UnitEncoded) -> None:
        state = self._pack_of_unit[answer.unit]
        self._encodes_in_flight[answer.producer] -= 1
        self.directory.written(answer.refs)
        for ref in answer.refs:
            state.refs[ref.position] = ref
        step = self._steps[state.key]
        step.units_to_encode -= 1
        step.bad.update({row.position: row for row in answer.bad})
        state.missing.discard(answer.unit)

    def trained(self, answer: PackTrained) -> int:
        """A pack is done; returns the bytes of the features it read."""
        key = (answer.phase, answer.step)
        state = self._pack_in_flight.pop((key, answer.slot, answer.rank))
        self._packs_in_flight[answer.rank] -= 1
        step = self._steps[key]
        step.packs_left -= 1
        returning = self._returns_gradients(key)
        for unit in state.pack.units:
            refs = [state.refs[s.position] for s in unit.samples if s.position in state.refs]
            if returning and (refs or self.shards > 1):
                self.directory.gradient_written(refs, (Role.CONSUMER, answer.rank))
                self._returnable.add(unit.id)
            else:
                if returning:
                    self._to_return[self._owner[unit.id]].remove((unit.id,))
                self._release(key, unit.id)
        return sum(ref.bytes for ref in state.refs.values())

    def returned(self, answer: UnitsReturned) -> None:
        self._backwards_in_flight[answer.producer] -= 1
        for unit in answer.units:
            self._release(self._pack_of_unit[unit].key, unit)

    def update_sent(self, step: int) -> None:
        """The update of a step is on its way to every rank: what comes behind it sees the new version."""
        self.version = step

    def finished(self, key: StepKey) -> bool:
        """Whether every pack, gradient and reduce order of the step is done or sent."""
        state = self._steps[key]
        return state.packs_left == 0 and state.units_left == 0

    def lost(self, role: Role, rank: int) -> str | None:
        """A process died: its leases expire. What that leaves in the pool, in words; None when it had none."""
        return expired_text(role, rank, self.directory.expire((role, rank)))

    def forget(self, key: StepKey) -> Step:
        """Drop a finished step; returns it."""
        assert self.finished(key), f"step {key} is not finished: {self.waiting()}"
        state = self._steps.pop(key)
        for pack in state.step.packs:
            for unit in pack.units:
                del self._pack_of_unit[unit.id], self._owner[unit.id]
        return state.step

    @property
    def units_waiting(self) -> bool:
        """Whether a unit has not been sent yet: its producer is busy, or the pool has no room."""
        return bool(self._rounds)

    def begun(self, key: StepKey) -> bool:
        """Whether any order of the step has been sent."""
        return key in self._steps and self._steps[key].begun

    def bad_rows(self, key: StepKey) -> Mapping[int, SkippedRow]:
        """Rows of the step found bad at decode, by position."""
        return self._steps[key].bad

    # --- another number of producers ----------------------------------------------------------------------------------

    def hold(self, step: int) -> None:
        """Nothing of train step `step`, or of what comes behind it, is sent before `resize`."""
        assert self._held_from is None, f"step {self._held_from} is held already"
        assert step >= self.first_unbegun, f"step {step} is to be held and {self.first_unbegun - 1} has begun"
        self._held_from = step

    @property
    def first_unbegun(self) -> int:
        """The first train step of which nothing has been sent, nor of any behind it."""
        begun = (index for (_, index), state in self._steps.items() if state.begun)
        return 1 + max((self.version, *begun))

    @property
    def drained(self) -> bool:
        """Whether all that comes before the held step is done: no block is in use, no order in flight."""
        held = self._held_from
        return (
            held is not None
            and self.version == held - 1
            and all(self._is_held(key) for key in self._steps)
            and not any((*self._encodes_in_flight, *self._backwards_in_flight, *self._packs_in_flight))
        )

    def resize(self, owners: Sequence[int]) -> None:
        """Go on with the producers of these owner ids; the directory has their segments, and no others'."""
        assert self.drained, f"producers change while work is under way: {self.waiting()}"
        assert not any(self._to_return), "a gradient has not been returned"
        assert self.shards == 1, "producers that share an encoder's parameters do not come and go"
        self.owners = tuple(owners)
        self.num_producers = num_producers = len(self.owners)
        self._to_return = [deque() for _ in range(num_producers)]
        self._encodes_in_flight = [0] * num_producers
        self._backwards_in_flight = [0] * num_producers
        staying = self._frees[:num_producers]
        self._frees = [*staying, *([] for _ in range(num_producers - len(staying)))]
        self._held_from = None

    # --- commands -----------------------------------------------------------------------------------------------------

    def orders(self) -> Iterator[tuple[Role, int, Order]]:
        """Everything that may be sent now, in the order in which to send it."""
        yield from self._pack_orders()
        yield from self._backward_orders()
        yield from self._encode_orders()
        yield from self._backward_orders(only_if_encoded_enough=False)
        yield from self._reduce_orders()

    def _pack_orders(self) -> Iterator[tuple[Role, int, Order]]:
        for rank, packs in enumerate(self._packs):
            while packs and not packs[0].missing and self._packs_in_flight[rank] < DEPTH:
                state = packs[0]
                if not self._may_run(state.key) or self._waits_for_encoder(state.key):
                    break
                packs.popleft()
                self._packs_in_flight[rank] += 1
                self._steps[state.key].begun = True
                pack, bad = state.pack, self._steps[state.key].bad
                refs = tuple(state.refs[s.position] for s in pack.samples if s.position in state.refs)
                self.directory.lease(refs, (Role.CONSUMER, rank), gradient=self._returns_gradients(state.key))
                self._pack_in_flight[state.key, pack.slot, pack.rank] = state
                phase, index = state.key
                masked = tuple(s.position for s in pack.samples if s.position in bad)
                yield (
                    Role.CONSUMER,
                    rank,
                    PackOrder(phase, index, pack, refs, masked, return_gradients=self._returns_gradients(state.key)),
                )

    def _encode_orders(self) -> Iterator[tuple[Role, int, Order]]:
        for rank, frees in enumerate(self._frees):
            frees.extend(self.directory.frees(self.owners[rank]))
        blocked: set[int] = set()
        kept: list[Round] = []
        while self._rounds and len(blocked) < len(self._to_return):
            round_ = self._rounds[0]
            if not self._may_encode(round_.key) or self._waits_for_backbone(round_):
                break
            sizes = [[self.payload_bytes(sample) for sample in unit.samples] for unit in round_.units]
            group = self._choose_group(round_, sizes, blocked)
            if group is None:
                if round_.group is None:
                    break  # the oldest unit fits nowhere: nothing may pass it
                blocked.add(round_.group)
                kept.append(self._rounds.popleft())
                continue
            self._rounds.popleft()
            self._steps[round_.key].begun = True
            keep_graph = self._returns_gradients(round_.key)
            if keep_graph:
                self._to_return[group].append(tuple(unit.id for unit in round_.units))
            for rank, unit, of_unit in zip(ranks_of(group, self.shards), round_.units, sizes, strict=True):
                reserved = self.directory.reserve(self.owners[rank], unit.id, of_unit)
                assert reserved, "room was checked before"
                free, self._frees[rank] = tuple(self._frees[rank]), []
                self._owner[unit.id] = rank
                self._encodes_in_flight[rank] += 1
                yield Role.PRODUCER, rank, EncodeOrder(unit, self.version, keep_graph, free)
        self._rounds.extendleft(reversed(kept))

    def _choose_group(self, round_: Round, sizes: list[list[int]], blocked: set[int]) -> int | None:
        """The fixed group, or the one with the fewest orders in flight; None when the round must wait."""
        busy = self._encodes_in_flight

        def fits(group: int) -> bool:
            owners = [self.owners[rank] for rank in ranks_of(group, self.shards)]
            return all(self.directory.room(owner, of_unit) for owner, of_unit in zip(owners, sizes, strict=True))

        candidates = {round_.group} if round_.group is not None else set(range(len(self._to_return)))
        free = [group for group in candidates - blocked if self._busy(group, busy) < DEPTH and fits(group)]
        return min(free, key=lambda group: (self._busy(group, busy), group), default=None)

    def _busy(self, group: int, in_flight: Sequence[int]) -> int:
        """Orders in flight to that rank of the group which has most."""
        return max(in_flight[rank] for rank in ranks_of(group, self.shards))

    def _backward_orders(self, only_if_encoded_enough: bool = True) -> Iterator[tuple[Role, int, Order]]:
        if only_if_encoded_enough and self._ready_packs() < READY_AHEAD * self.num_consumers:
            return
        for group, waiting in enumerate(self._to_return):
            if self._busy(group, self._backwards_in_flight) + self._busy(group, self._encodes_in_flight) >= DEPTH:
                continue
            rounds: list[tuple[UnitId, ...]] = []
            while waiting and self._returnable.issuperset(waiting[0]) and not self._waits_to_return(waiting[0][0]):
                rounds.append(waiting.popleft())
            if rounds:
                for rank, units in zip(ranks_of(group, self.shards), zip(*rounds, strict=True), strict=True):
                    self._returnable.difference_update(units)
                    self._backwards_in_flight[rank] += 1
                    yield Role.PRODUCER, rank, BackwardOrder(units)

    def _reduce_orders(self) -> Iterator[tuple[Role, int, Order]]:
        key = self._current_train_step()
        if key is None:
            return
        state = self._steps[key]
        for rank in range(self.num_consumers):
            if not (any(pack.key == key for pack in self._packs[rank]) or (self.colocated and state.packs_left)):
                yield from self._reduce_once(state, Role.CONSUMER, rank)
        if state.packs_left:
            return
        for rank in range(self.num_producers):
            waiting = self._to_return[rank // self.shards]
            unsent = any(self._pack_of_unit[unit].key == key for units in waiting for unit in units)
            if not unsent:
                yield from self._reduce_once(state, Role.PRODUCER, rank)

    def _reduce_once(self, state: StepState, role: Role, rank: int) -> Iterator[tuple[Role, int, Order]]:
        if role in self.reduced_roles and (role, rank) not in state.reduce_sent:
            state.reduce_sent.add((role, rank))
            yield role, rank, ReduceOrder(state.step.index)

    # --- rules --------------------------------------------------------------------------------------------------------

    def _returns_gradients(self, key: StepKey) -> bool:
        return self.trainable_encoder and key[0] is Phase.TRAIN

    def _current_train_step(self) -> StepKey | None:
        """The oldest step whose update has not been sent, unless an evaluation pass comes before it."""
        for key in self._steps:
            if key[0] is Phase.TRAIN and key[1] > self.version:
                return key
            if not self.finished(key):
                return None
        return None

    def _may_run(self, key: StepKey) -> bool:
        """A pack runs only when every update before its step has been sent to its rank."""
        phase, index = key
        return self.version >= (index if phase is Phase.EVAL else index - 1) and not self._is_held(key)

    def _may_encode(self, key: StepKey) -> bool:
        return self._may_run(key) if self.trainable_encoder else not self._is_held(key)

    def _waits_for_encoder(self, key: StepKey) -> bool:
        """Packs of the step wait until all of it is encoded."""
        return self.exchange.whole_steps and self._steps[key].units_to_encode > 0

    def _waits_for_backbone(self, round_: Round) -> bool:
        """The round waits: the exchange lets no encoder run so far ahead of the packs."""
        key = round_.key
        if not self.exchange.within_step:
            return False
        if key != next(iter(self._steps)) or not self._may_run(key):
            return True
        ahead = self.exchange.slots_ahead
        return ahead is not None and round_.units[0].id.slot > self._first_open_slot(key) + ahead

    def _waits_to_return(self, unit: UnitId) -> bool:
        """Gradients of the step wait until all its packs are done."""
        return self.exchange.whole_steps and self._steps[self._pack_of_unit[unit].key].packs_left > 0

    def _first_open_slot(self, key: StepKey) -> int:
        """The first slot of which a pack is not done."""
        running = (slot for of, slot, _ in self._pack_in_flight if of == key)
        return min((*(s.pack.slot for packs in self._packs for s in packs if s.key == key), *running), default=0)

    def _is_held(self, key: StepKey) -> bool:
        return self._held_from is not None and key[1] >= self._held_from

    def _ready_packs(self) -> int:
        return sum(1 for packs in self._packs for state in packs if not state.missing) + sum(self._packs_in_flight)

    def _release(self, key: StepKey, unit: UnitId) -> None:
        self.directory.release(unit)
        self._steps[key].units_left -= 1

    def waiting(self) -> str:
        """Who waits for whom, for the message of a time-out."""
        parts = []
        if self._rounds:
            key, unit = self._rounds[0].key, self._rounds[0].units[0]
            why = "room in the pool" if self._may_encode(key) else f"the update of step {key[1] - 1}"
            where = f"{unit.id.phase} step {unit.id.step}, slot {unit.id.slot}, rank {unit.id.rank}"
            parts.append(f"unit {unit.id.number} of {where} waits for {why}")
        parts += [missing_text(rank, packs[0], self._owner) for rank, packs in enumerate(self._packs) if packs]
        encodes, backwards = self._encodes_in_flight, self._backwards_in_flight
        in_flight = {"producer": encodes, "producer (backward)": backwards, "consumer": self._packs_in_flight}
        return "; ".join((*filter(None, parts), busy_text(in_flight)))
