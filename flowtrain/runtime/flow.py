"""Flow control: which unit is encoded next, which pack runs next, which gradients go home (pure, contract C10).

    Step ──add──▶ ┌───────────────── Flow ─────────────────┐ ──orders()──▶ EncodeOrder, PackOrder, BackwardOrder,
    answers ────▶ │ units in the order of need · packs ready │              ReduceOrder
                  └──────────────────────────────────────────┘

| waits | for | woken by |
|---|---|---|
| a round | room; the update before it (trainable encoder); the exchange | `trained`, `returned`, `update_sent` |
| a pack | all its units; the packs of its rank before it; the first: a reserve, or all that there is | `encoded` |
| a backward | the packs that use the units, of a group all of the slot; the rounds before it there | `trained` |
| a reduce | all orders of the step to that rank being sent | any of the above |
| everything of a held step | another number of producers (`hold`, `drained`, `resize`) | `resize` |

Invariants: orders to one rank are executed in the order in which they are sent; a rank has at most `DEPTH` orders of
each kind in flight, and of packs as many more as a pipeline has under way; a unit is reserved in the order of need and
never past one that does not fit; every block reserved is released once; orders of a round (`rounds.py`) are sent at
once, so a whole group has the same order of rounds.

An event costs what it changes, however many ranks there are: `orders` looks at those whom it has woken, and no others.
"""

from __future__ import annotations

import heapq
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
from flowtrain.runtime.flow_producers import DEPTH, READY_AHEAD, Producers
from flowtrain.runtime.flow_state import PackState, StepKey, StepState, Woken, expired_text, waiting_text
from flowtrain.runtime.rounds import Round, RoundQueue, ranks_of, rounds_of
from flowtrain.types import Phase, Role, SampleMeta, SkippedRow, Step, UnitId

Order = EncodeOrder | PackOrder | BackwardOrder | ReduceOrder


class Flow:
    """See the page above. `payload_bytes(sample)`: size of a sample's block; `directory` mirrors the segments;
    `owners`: the pool's owner id of each producer, its rank where nothing is said; `shards`: producers of a group;
    `packs_held`: packs that a consumer must have before its oldest is done (`Layout.packs_held`); `colocated`: both
    sides of a rank share a process, which computes all its gradients before it waits for others."""

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
        packs_held: int = 1,
        colocated: bool = False,
    ) -> None:
        self.shards, self.packs_held, self.colocated = shards, packs_held, colocated
        self.directory, self.num_consumers = directory, num_consumers
        self.producers = Producers(directory, owners if owners is not None else range(num_producers), shards)
        self.trainable_encoder, self.reduced_roles, self.version = trainable_encoder, reduced_roles, version
        self.exchange, self.payload_bytes = exchange, payload_bytes
        self._held_from: int | None = None
        self._steps: dict[StepKey, StepState] = {}
        self._rounds, self._woken = RoundQueue(), Woken()
        self._num_ready, self._reserve = 0, 0 if trainable_encoder else exchange.prefill * num_consumers
        self._packs: list[deque[PackState]] = [deque() for _ in range(num_consumers)]
        self._pack_of_unit: dict[UnitId, PackState] = {}
        self._pack_in_flight: dict[tuple[StepKey, int, int], PackState] = {}
        self._owner: dict[UnitId, int] = {}
        self._to_return: list[deque[tuple[UnitId, ...]]] = [deque() for _ in self.producers.groups]
        self._returnable: set[UnitId] = set()
        self._packs_in_flight = [0] * num_consumers

    # --- events -------------------------------------------------------------------------------------------------------

    def add(self, step: Step) -> None:
        """Append a step (or an evaluation pass) to the order of need."""
        key = (step.phase, step.index)
        if self.exchange.whole_steps:
            sizes = [block_bytes(self.payload_bytes(sample)) for sample in step.samples if sample.vision_tokens]
            check_room(step.index, sizes, min(map(self.directory.capacity_of, self.producers.owners)))
        self._steps[key] = StepState.of(step)
        for pack in step.packs:
            state = PackState(pack, key, {unit.id for unit in pack.units})
            self._packs[pack.rank].append(state)
            self._num_ready += not state.missing
            for unit in pack.units:
                self._pack_of_unit[unit.id] = state
        self._rounds.extend(rounds_of(step, len(self.producers), self.shards, self.payload_bytes))
        self._wake_all()

    def encoded(self, answer: UnitEncoded) -> None:
        state = self._pack_of_unit[answer.unit]
        self.producers.encodes_in_flight[answer.producer] -= 1
        self.directory.written(answer.refs)
        for ref in answer.refs:
            state.refs[ref.position] = ref
        step = self._steps[state.key]
        step.units_to_encode -= 1
        step.bad |= {row.position: row for row in answer.bad}
        state.missing.discard(answer.unit)
        self._num_ready += not state.missing
        self._wake_producer(answer.producer)
        whole = self.exchange.whole_steps and not step.units_to_encode
        self._woken.packs.update(range(self.num_consumers) if whole else (state.pack.rank,))

    def trained(self, answer: PackTrained) -> int:
        """A pack is done; returns the bytes of the features it read."""
        key = (answer.phase, answer.step)
        state = self._pack_in_flight.pop((key, answer.slot, answer.rank))
        self._packs_in_flight[answer.rank] -= 1
        step = self._steps[key]
        step.pack_done(answer.slot)
        self._num_ready -= 1
        self._woken.packs.add(answer.rank)
        if self.shards > 1 and not step.slots_left[answer.slot]:
            self._woken.returns.update(self.producers.groups)
        if not step.packs_left:
            self._wake_all()
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
            self._wake_producer(self._owner[unit.id])
        return sum(ref.bytes for ref in state.refs.values())

    def returned(self, answer: UnitsReturned) -> None:
        self.producers.backwards_in_flight[answer.producer] -= 1
        self._wake_producer(answer.producer)
        for unit in answer.units:
            self._release(self._pack_of_unit[unit].key, unit)

    def update_sent(self, step: int) -> None:
        """The update of a step is on its way to every rank: what comes behind it sees the new version."""
        self.version = step
        self._wake_all()

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
        self._wake_all()
        for pack in state.step.packs:
            for unit in pack.units:
                del self._pack_of_unit[unit.id], self._owner[unit.id]
        return state.step

    @property
    def units_waiting(self) -> bool:
        """Whether a unit has not been sent yet: its producer is busy, or the pool has no room."""
        return len(self._rounds) > 0

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
        return 1 + max((self.version, *(index for (_, index), state in self._steps.items() if state.begun)))

    @property
    def drained(self) -> bool:
        """Whether all that comes before the held step is done: no block is in use, no order in flight."""
        if self._held_from != self.version + 1 or not all(map(self._is_held, self._steps)):
            return False
        return self.producers.idle and not any(self._packs_in_flight)

    def resize(self, owners: Sequence[int]) -> None:
        """Go on with the producers of these owner ids; the directory has their segments, and no others'."""
        assert self.drained, f"producers change while work is under way: {self.waiting()}"
        assert not any(self._to_return), "a gradient has not been returned"
        assert self.shards == 1, "producers that share an encoder's parameters do not come and go"
        self.producers.resize(owners)
        self._to_return = [deque() for _ in self.producers.groups]
        self._woken = Woken(frees={rank for rank in self._woken.frees if rank < len(owners)})
        self._held_from = None
        self._wake_all()

    # --- commands -----------------------------------------------------------------------------------------------------

    def orders(self) -> Iterator[tuple[Role, int, Order]]:
        """Everything that may be sent now, in the order in which to send it."""
        if self._reserve:
            yield from self._encode_orders()
            if not self._steps or (self._num_ready < self._reserve and not self.producers.idle):
                return
            self._reserve = 0
        yield from self._pack_orders()
        yield from self._backward_orders()
        yield from self._encode_orders()
        yield from self._backward_orders(only_if_encoded_enough=False)
        yield from self._reduce_orders()

    def _pack_orders(self) -> Iterator[tuple[Role, int, Order]]:
        """A pack to each rank in turn, so that all have one before any has all that it may hold."""
        ranks, self._woken.packs = sorted(self._woken.packs), set()
        while ranks := [rank for rank in ranks if self._may_get_pack(rank)]:
            for rank in ranks:
                self._packs_in_flight[rank] += 1
                self._woken.reduces[Role.CONSUMER].add(rank)
                yield Role.CONSUMER, rank, self._pack_order(rank, self._packs[rank].popleft())

    def _may_get_pack(self, rank: int) -> bool:
        packs = self._packs[rank]
        if not packs or packs[0].missing or self._packs_in_flight[rank] >= DEPTH + self.packs_held - 1:
            return False
        return self._may_run(packs[0].key) and not self._waits_for_encoder(packs[0].key)

    def _pack_order(self, rank: int, state: PackState) -> PackOrder:
        key, pack = state.key, state.pack
        step, returning = self._steps[key], self._returns_gradients(key)
        step.begun = True
        refs = tuple(state.refs[s.position] for s in pack.samples if s.position in state.refs)
        self.directory.lease(refs, (Role.CONSUMER, rank), gradient=returning)
        self._pack_in_flight[key, pack.slot, pack.rank] = state
        masked = tuple(s.position for s in pack.samples if s.position in step.bad)
        return PackOrder(*key, pack, refs, masked, returning, len(step.step.slots))

    def _encode_orders(self) -> Iterator[tuple[Role, int, Order]]:
        self.producers.take_frees(self._woken.frees)
        self._woken.frees.clear()
        heads = self._rounds.heads(self._may_start)
        while heads:
            place = heapq.heappop(heads)
            round_ = self._rounds.at(place)
            if not self._may_start(round_):
                self._rounds.close(place, heads)
                return
            blocked = self._rounds.before(place) if place.group is None else ()
            group = self.producers.choose(round_, blocked)
            if group is not None:
                self._rounds.take(place, heads)
                yield from self._encode_round(round_, group)
            elif place.group is not None:
                self._rounds.block(place.group)
            else:
                return  # the oldest unit fits nowhere: nothing may pass it

    def _encode_round(self, round_: Round, group: int) -> Iterator[tuple[Role, int, Order]]:
        self._steps[round_.key].begun = True
        keep_graph = self._returns_gradients(round_.key)
        if keep_graph:
            self._to_return[group].append(tuple(unit.id for unit in round_.units))
        for rank, unit, sizes in zip(ranks_of(group, self.shards), round_.units, round_.sizes, strict=True):
            free = self.producers.reserve(rank, unit.id, sizes)
            self._owner[unit.id] = rank
            yield Role.PRODUCER, rank, EncodeOrder(unit, self.version, keep_graph, free)

    def _backward_orders(self, only_if_encoded_enough: bool = True) -> Iterator[tuple[Role, int, Order]]:
        if only_if_encoded_enough and self._num_ready < READY_AHEAD * self.num_consumers:
            return
        for group in sorted(self._woken.returns):
            waiting = self._to_return[group]
            if not self.producers.may_return(group):
                continue
            rounds: list[tuple[UnitId, ...]] = []
            while waiting and self._returnable.issuperset(waiting[0]) and not self._waits_to_return(waiting[0][0]):
                rounds.append(waiting.popleft())
            if rounds:
                for rank, units in zip(ranks_of(group, self.shards), zip(*rounds, strict=True), strict=True):
                    self._returnable.difference_update(units)
                    self.producers.backwards_in_flight[rank] += 1
                    self._woken.reduces[Role.PRODUCER].add(rank)
                    yield Role.PRODUCER, rank, BackwardOrder(units)
        if not only_if_encoded_enough:
            self._woken.returns.clear()

    def _reduce_orders(self) -> Iterator[tuple[Role, int, Order]]:
        key = self._current_train_step()
        if key is None:
            return
        state = self._steps[key]
        for role in (Role.CONSUMER, Role.PRODUCER):
            if role not in self.reduced_roles or (state.packs_left and (role is Role.PRODUCER or self.colocated)):
                continue
            woken, self._woken.reduces[role] = self._woken.reduces[role], set()
            for rank in sorted(woken):
                sent = (role, rank) in state.reduce_sent
                if not sent and not self._unsent(key, role, rank):
                    state.reduce_sent.add((role, rank))
                    yield role, rank, ReduceOrder(state.step.index)

    def _unsent(self, key: StepKey, role: Role, rank: int) -> bool:
        """Whether orders of the current step to this rank are to come; they come before those of later steps."""
        if role is Role.CONSUMER:
            packs = self._packs[rank]
            return bool(packs) and packs[0].key == key
        waiting = self._to_return[rank // self.shards]
        return bool(waiting) and self._pack_of_unit[waiting[0][0]].key == key

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

    def _may_start(self, round_: Round) -> bool:
        return self._may_encode(round_.key) and not self._waits_for_backbone(round_)

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
        ahead, first = self.exchange.slots_ahead, self._steps[key].first_open_slot
        return ahead is not None and round_.units[0].id.slot >= first + ahead + self.packs_held

    def _waits_to_return(self, unit: UnitId) -> bool:
        """Gradients wait until all packs of the step are done; those of a group, which meets at calls, of the slot."""
        if self.exchange.whole_steps:
            return self._steps[unit.phase, unit.step].packs_left > 0
        return self.shards > 1 and self._steps[unit.phase, unit.step].slots_left[unit.slot] > 0

    def _is_held(self, key: StepKey) -> bool:
        return self._held_from is not None and key[1] >= self._held_from

    def _release(self, key: StepKey, unit: UnitId) -> None:
        self.directory.release(unit)
        self._steps[key].units_left -= 1
        self._woken.frees.add(self._owner[unit])

    def _wake_producer(self, rank: int) -> None:
        """It has an order less in flight, blocks to free, or a gradient to return."""
        self._rounds.wake(rank // self.shards)
        self._woken.returns.add(rank // self.shards)

    def _wake_all(self) -> None:
        self._woken.all(self.num_consumers, len(self.producers), len(self.producers.groups))

    def waiting(self) -> str:
        """Who waits for whom, for the message of a time-out."""
        oldest = self._rounds.oldest()
        unsent = None if oldest is None else (oldest.key, oldest.units[0], self._may_encode(oldest.key))
        encodes, backwards = self.producers.encodes_in_flight, self.producers.backwards_in_flight
        in_flight = {"producer": encodes, "producer (backward)": backwards, "consumer": self._packs_in_flight}
        return waiting_text(unsent, [packs[0] if packs else None for packs in self._packs], self._owner, in_flight)
