"""Times the orders of real stages, each side alone and both at once, on real rows (for `flowtrain profile`).

    alone      e c b   e c b   e c b                        one order in flight; e: encode, c: pack, b: backward
    together   e e ┌ e b e b ┐  b b                         both sides have an order in flight within the box
                   └ c c c c ┘

Steps are composed as in a run, of packs of a given size, and end with the reduction and the update of a run: the
stages train. What is timed is what the stages report of themselves; the way of an order to another process and back is
what the clock shows beyond that. A first step is not noted: processes are warming up.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Literal

from flowtrain.config.schema import Config
from flowtrain.data.stream import BLOCK_ROWS, SampleStream
from flowtrain.errors import DataError, LostProcessError, PlanError
from flowtrain.messages import BackwardOrder, EncodeOrder, PackOrder, ReduceOrder, UpdateOrder
from flowtrain.packing import Composer, CompositionSpec, CostModel
from flowtrain.pool.directory import Directory
from flowtrain.runtime.executor import Answer, Executor
from flowtrain.runtime.failure import true_cause
from flowtrain.runtime.inputs import Inputs
from flowtrain.runtime.rows import Payloads
from flowtrain.runtime.signals import StopRequest
from flowtrain.types import EmbeddingRef, Pack, Phase, Role, SampleMeta, SkippedRow, Step
from flowtrain.update.schedule import learning_rates

Kind = Literal["encode", "train", "backward"]
POLL_SECONDS = 0.5

AHEAD = 2
"""Packs encoded before the first is trained, where both sides are to be busy."""

MOST_PASSED = 4096
"""Rows one after another that are of no use, after which a measurement is given up: rows come without end."""

HOLDER = (Role.CONSUMER, 0)
SIDES = (Role.PRODUCER, Role.CONSUMER)


KINDS: tuple[Kind, ...] = ("encode", "train", "backward")


Orders = list[tuple[float, float]]
"""(work, seconds) of the orders of one step."""


def _by_kind() -> dict[Kind, list[Orders]]:
    return {kind: [] for kind in KINDS}


@dataclass(slots=True)
class Observed:
    """Orders of each step by kind; and seconds of updates, of the way of an order, and of reading a row."""

    alone: dict[Kind, list[Orders]] = field(default_factory=_by_kind)
    together: dict[Kind, list[Orders]] = field(default_factory=_by_kind)
    updates: dict[Role, list[float]] = field(default_factory=lambda: {role: [] for role in SIDES})
    calls: list[float] = field(default_factory=list)
    reads: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Job:
    """A pack on its way."""

    pack: Pack
    encode_work: float
    train_work: float
    refs: list[EmbeddingRef] = field(default_factory=list)
    masked: set[int] = field(default_factory=set)
    encoded: bool = False

    def __post_init__(self) -> None:
        self.encoded = not self.pack.units


@dataclass(slots=True)
class _Busy:
    """Orders of one pack in flight to one side; `both`: the other side has been busy all the time."""

    kind: Kind
    job: _Job
    left: int
    both: bool = True
    seconds: float | None = None

    def took(self, seconds: float) -> None:
        self.seconds = (self.seconds or 0.0) + seconds
        self.left -= 1


class Bench:
    """One producer, one consumer and one reader that are configured; `start`: position of the first row read."""

    def __init__(
        self,
        inputs: Inputs,
        executor: Executor,
        spec: CompositionSpec,
        cost: CostModel,
        owner: int,
        start: int,
        stop: StopRequest,
    ) -> None:
        self.inputs = inputs
        self.config: Config = inputs.config
        self.executor = executor
        self.spec = replace(spec, horizon=None, num_producers=1, num_consumers=1)
        self.cost = cost
        self.owner = owner
        self.stop = stop
        self.observed = Observed()
        self.rows: list[SampleMeta] = []
        self.position = start
        self._roles = {role for role in SIDES if role in inputs.reduced_roles}
        self._directory = Directory({owner: inputs.plan.producers.ranks[0].segment_bytes})
        self._payloads = Payloads()
        self._stream = SampleStream(len(inputs.train), BLOCK_ROWS, 1, start=start)
        self._waiting: deque[SampleMeta | SkippedRow] = deque()
        self._step = 0
        self._trained_tokens = 0
        self._most_passed = min(MOST_PASSED, len(inputs.train))

    # --- rows and packs -----------------------------------------------------------------------------------------------

    def read(self, num_rows: int) -> list[SampleMeta]:
        """The next rows that can be used, their token ids kept for the packs.

        Raises:
            DataError: none of many rows can be.
        """
        found: list[SampleMeta] = []
        num_passed = 0
        while len(found) < num_rows:
            if not self._waiting:
                self._stream.want(BLOCK_ROWS)
                for request in self._stream.requests():
                    began = time.perf_counter()
                    self.executor.submit(
                        Role.READER, 0, "read", Phase.TRAIN, request.start, request.count, request.block
                    )
                    answer = self._next()
                    self.observed.reads.append((time.perf_counter() - began) / request.count)
                    kept = sum(isinstance(r, SampleMeta) for r in answer.value.rows)
                    self._payloads.add(answer.value.block, answer.payload, kept)
                    self._stream.add(answer.value)
                self._waiting += self._stream.take()
                continue
            row = self._waiting.popleft()
            self.position = row.position + 1
            if isinstance(row, SkippedRow):
                num_passed += 1
                if num_passed >= self._most_passed:
                    raise DataError(
                        f"none of {num_passed} rows of {self.config.data.train} can be used: run `flowtrain data check`"
                    )
                continue
            num_passed = 0
            found.append(row)
        self.rows += found
        return found

    def step_of(self, num_packs: int, max_tokens: int) -> Step:
        """A step of packs of at most `max_tokens`; rows that are longer are passed over.

        Raises:
            DataError: many rows one after another are longer.
        """
        spec = replace(self.spec, step_samples=None, step_packs=num_packs, max_tokens=max_tokens, lookahead=1)
        composer = Composer(spec, self.cost)
        composer.step = self._step
        position = num_passed = 0
        while (step := composer.next()) is None:
            for row in self.read(max(1, composer.wants())):
                fits = not composer.add([row._replace(position=position)])
                num_passed = 0 if fits else num_passed + 1
                if num_passed >= self._most_passed:
                    raise DataError(
                        f"none of {num_passed} rows of {self.config.data.train} fits a pack of {max_tokens} tokens, "
                        f"the size to be measured: raise packing.max_tokens, or plan without a profile"
                    )
                if not fits:
                    self._payloads.done([row])
                position += 1
        self._step = step.index
        return step

    # --- a step, both ways --------------------------------------------------------------------------------------------

    def alone(self, step: Step, record: bool = True) -> None:
        """One order at a time, pack by pack. Without `record` nothing is noted: a warm-up."""
        jobs = self._jobs(step)
        into = _begin(self.observed.alone if record else _by_kind())
        calls = list(self.observed.calls)
        for job in jobs:
            self._note(into, "encode", job, self._encode(job))
            self._note(into, "train", job, self._train(job, step))
            if self._returns(job):
                self._note(into, "backward", job, self._backward(job))
        if not record:
            self.observed.calls = calls
        self._update(step, record)

    def together(self, step: Step) -> None:
        """The first packs are encoded; while they train, the others are, and gradients return."""
        jobs = self._jobs(step)
        into = _begin(self.observed.together)
        for job in jobs[:AHEAD]:
            self._encode(job)
        to_encode = deque(job for job in jobs[AHEAD:] if not job.encoded)  # packs without images need no producer
        to_train, to_return = deque(jobs), deque[_Job]()
        busy: dict[Role, _Busy] = {}
        while to_encode or to_train or to_return or busy:
            if Role.PRODUCER not in busy and (to_encode or to_return):
                kind: Kind = "encode" if to_encode else "backward"
                job = (to_encode or to_return).popleft()
                busy[Role.PRODUCER] = _Busy(kind, job, self._send_producer(kind, job))
            if Role.CONSUMER not in busy and to_train and to_train[0].encoded:
                job = to_train.popleft()
                self._send_train(job, step)
                busy[Role.CONSUMER] = _Busy("train", job, 1)
            if len(busy) < len(SIDES):
                for order in busy.values():
                    order.both = False
            answer = self._next()
            order = busy[answer.role]
            order.took(self._took(order.job, answer))
            if order.left:
                continue
            del busy[answer.role]
            if order.both and order.seconds is not None:
                self._note(into, order.kind, order.job, order.seconds)
            if order.kind == "encode":
                order.job.encoded = True
            elif order.kind == "train" and self._returns(order.job):
                to_return.append(order.job)
        self._update(step, record=False)

    # --- orders -------------------------------------------------------------------------------------------------------

    def _jobs(self, step: Step) -> list[_Job]:
        self._trained_tokens = 0
        return [
            _Job(
                pack,
                self.cost.real(self.cost.encode_cost(pack.samples)),
                self.cost.real(self.cost.pack_cost(pack.samples)),
            )
            for pack in step.packs
        ]

    def _encode(self, job: _Job) -> float | None:
        return self._wait(job, Role.PRODUCER, self._send_producer("encode", job), "encode")

    def _train(self, job: _Job, step: Step) -> float | None:
        self._send_train(job, step)
        return self._wait(job, Role.CONSUMER, 1, "train")

    def _backward(self, job: _Job) -> float | None:
        return self._wait(job, Role.PRODUCER, self._send_producer("backward", job), "backward")

    def _wait(self, job: _Job, role: Role, num_orders: int, kind: Kind) -> float | None:
        """All answers of a job's orders; the clock's time beyond the work is that of the orders' way."""
        began = time.perf_counter()
        order = _Busy(kind, job, num_orders)
        while order.left:
            order.took(self._took(job, self._next()))
        if kind == "encode":
            job.encoded = True
        if order.seconds and num_orders:
            self.observed.calls.append(max(0.0, time.perf_counter() - began - order.seconds) / num_orders)
        return order.seconds

    def _send_producer(self, kind: Kind, job: _Job) -> int:
        """All units of the pack, or their backwards in one order; returns the number of orders."""
        if kind == "backward":
            units = tuple(unit.id for unit in job.pack.units if any(ref.unit == unit.id for ref in job.refs))
            self.executor.submit(Role.PRODUCER, 0, "backward", BackwardOrder(units))
            return 1
        for unit in job.pack.units:
            sizes = [self.inputs.sample_bytes(sample) for sample in unit.samples]
            free = self._directory.frees(self.owner)
            if not self._directory.reserve(self.owner, unit.id, sizes):
                raise PlanError(
                    f"the pool of {self._directory.capacity()} bytes cannot hold the packs of a measurement: raise "
                    f"pool.bytes, or lower packing.max_tokens"
                )
            order = EncodeOrder(unit, self._step - 1, self.config.trainable_encoder, free)
            self.executor.submit(Role.PRODUCER, 0, "encode", order)
        return len(job.pack.units)

    def _send_train(self, job: _Job, step: Step) -> None:
        self._directory.lease(job.refs, HOLDER, gradient=self.config.trainable_encoder)
        refs, masked = tuple(job.refs), tuple(job.masked)
        returning, alone = self.config.trainable_encoder, job.pack.slot + 1
        order = PackOrder(Phase.TRAIN, step.index, job.pack, refs, masked, returning, alone)
        payloads = self._payloads.handles(order.blocks)
        self.executor.submit(Role.CONSUMER, 0, "train", order, payloads=payloads)

    def _took(self, job: _Job, answer: Answer) -> float:
        """Seconds of the work; the books of the pool follow the answer."""
        value = answer.value[0] if answer.method == "train" else answer.value
        if answer.method == "encode":
            self._directory.written(value.refs)
            job.refs += value.refs
            job.masked |= {row.position for row in value.bad}
        elif answer.method == "train":
            self._trained_tokens += value.trained_tokens
            if self._returns(job):
                self._directory.gradient_written(job.refs, HOLDER)
            else:
                self._release(job)
        else:
            self._release(job)
        return float(value.seconds)

    def _release(self, job: _Job) -> None:
        for unit in job.pack.units:
            self._directory.release(unit.id)

    def _returns(self, job: _Job) -> bool:
        return self.config.trainable_encoder and bool(job.refs)

    def _update(self, step: Step, record: bool) -> None:
        """Reduce and update each side that trains, as at the end of a step."""
        lr = learning_rates(self.config.train, step.index, max(step.index, self.config.train.max_steps or step.index))
        order = UpdateOrder(step.index, 1.0 / max(self._trained_tokens, 1), 1.0, lr, self._trained_tokens > 0)
        for role in sorted(self._roles):
            began = time.perf_counter()
            for method, of_method in (("reduce", ReduceOrder(step.index)), ("update", order)):
                self.executor.submit(role, 0, method, of_method)
                self._next()
            if record:
                self.observed.updates[role].append(time.perf_counter() - began)
        self._payloads.done(step.samples)

    def _note(self, into: dict[Kind, Orders], kind: Kind, job: _Job, seconds: float | None) -> None:
        work = job.train_work if kind == "train" else job.encode_work
        if work > 0 and seconds:
            into[kind].append((work, seconds))

    def _next(self) -> Answer:
        deadline = time.monotonic() + self.config.run.timeout_seconds
        while (answer := self.executor.next(POLL_SECONDS)) is None:
            if self.stop.requested:
                raise self.stop.error()
            if time.monotonic() > deadline:
                raise LostProcessError(
                    f"no process answered for {self.config.run.timeout_seconds:g} s while it was measured; if work "
                    f"takes that long, raise run.timeout_seconds"
                )
        if answer.error is not None:
            raise true_cause(answer, self.executor).error
        if self.stop.requested:
            raise self.stop.error()
        return answer


def _begin(of_steps: dict[Kind, list[Orders]]) -> dict[Kind, Orders]:
    """Orders of one more step."""
    for steps in of_steps.values():
        steps.append([])
    return {kind: steps[-1] for kind, steps in of_steps.items()}
