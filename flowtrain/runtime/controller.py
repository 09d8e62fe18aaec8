"""The training loop: takes answers, asks the deciders, sends orders. It waits in one place only.

         ┌──────────── RowFeed, Composer ── next Step ──▶ Flow ── orders ──┐
    loop │                                                                 ▼
         └─ answer ◀── Executor.next ◀── readers, producers, consumers ◀── Executor.submit
               │
               └──▶ Flow, StepEnd ── packs, gradients, norms all in ──▶ UpdateOrder ──▶ save, evaluation, record

| event | what follows |
|---|---|
| `read` | rows to the composer; steps are composed ahead of those that run (`ahead.py`) |
| `encode`, `train`, `backward` | `Flow` frees, leases and sends what became possible |
| last `reduce` of a step | one norm, one factor, `UpdateOrder` to every rank that trains, a `save` behind it if due |
| last `update` (and evaluation) of a step | its record is written, then its checkpoint is completed |
| a change of the plan is due | `Replan` carries it out, nothing of a step being in flight |
| a signal | the step that runs ends, a checkpoint is written (`at_end`), nothing more is begun |

Invariants: orders to a rank are executed in the order sent, so a `save` behind an update holds exactly that update;
records are written in step order; a checkpoint is complete only after the record of its step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flowtrain.config.schema import Config
from flowtrain.errors import DataError, FlowTrainError, LostProcessError
from flowtrain.messages import BackwardOrder, EncodeOrder, PackOrder, ReduceOrder
from flowtrain.runtime.ahead import may_compose
from flowtrain.runtime.checkpoints import CheckpointWriter
from flowtrain.runtime.controller_trace import ControllerTrace
from flowtrain.runtime.decisions import Costs
from flowtrain.runtime.device_watch import DeviceWatch
from flowtrain.runtime.executor import Answer, Executor
from flowtrain.runtime.failure import true_cause
from flowtrain.runtime.flow import Flow
from flowtrain.runtime.flow_state import StepKey
from flowtrain.runtime.inputs import Schedule
from flowtrain.runtime.ledger import Ledger
from flowtrain.runtime.peers import Peers
from flowtrain.runtime.replan import Calls, Rank, Replan
from flowtrain.runtime.rows import EvalRows, RowFeed
from flowtrain.runtime.signals import StopRequest
from flowtrain.runtime.step_end import StepEnd
from flowtrain.types import Phase, Role, Step
from flowtrain.update.schedule import learning_rates

POLL_SECONDS = 1.0

WORK = EncodeOrder | PackOrder | BackwardOrder

METHODS = {EncodeOrder: "encode", PackOrder: "train", BackwardOrder: "backward", ReduceOrder: "reduce"}


class Controller:
    """Runs one training run over started, configured stages; see the page above.

    `compose_eval(index)` is the evaluation pass after update `index`; `data_order`: what the order of rows depends
    on; `trace`: of the controller; `devices`: of the nodes; `restored_roles`: sides of the checkpoint gone on from,
    saved even if they do not train; `dump_to`: folder for gradients and parameters of every step (`flowtrain
    verify`).
    """

    def __init__(
        self,
        config: Config,
        executor: Executor,
        flow: Flow,
        feed: RowFeed,
        costs: Costs,
        eval_rows: EvalRows | None,
        compose_eval: Callable[[int], Step],
        ledger: Ledger,
        checkpoints: CheckpointWriter,
        schedule: Schedule,
        stop: StopRequest,
        replan: Replan,
        peers: Peers,
        data_order: Mapping[str, Any],
        trace: ControllerTrace,
        devices: DeviceWatch,
        restored_roles: frozenset[Role] = frozenset(),
        dump_to: Path | None = None,
    ) -> None:
        self.config = config
        self.executor = executor
        self.flow = flow
        self.feed = feed
        self.costs = costs
        self.eval_rows = eval_rows
        self.compose_eval = compose_eval
        self.ledger = ledger
        self.checkpoints = checkpoints
        self.schedule = schedule
        self.stop = stop
        self.replan = replan
        self.peers = peers
        self.data_order = data_order
        self.trace = trace
        self.devices = devices
        self.restored_roles, self.dump_to = restored_roles, dump_to
        self._ends: dict[StepKey, StepEnd] = {}
        self._updating: dict[int, StepEnd] = {}
        self._composed = schedule.first_step
        self._last_step: int | None = None
        self._stop_step: int | None = None
        self._eval_due: int | None = None
        self._eval_composed: int | None = None
        self._newest: Step | None = None
        self._nonfinite = 0
        self._in_flight = 0
        self._answered: dict[tuple[Role, int, str], Any] = {}
        self._last_answer = time.monotonic()

    def train(self) -> None:
        """Train until the last step, its evaluation and its checkpoint are done, or to the orderly end of a signal."""
        self.stop.orderly, self.stop.wake = True, self.executor.wake
        self.trace.step_ended(self.schedule.first_step)
        self.send(self.devices.due())
        try:
            self._until(self._trained)
            if not self.stop.requested:
                self.feed.bad_share.ended()
            at_end = self.config.checkpoint.at_end
            if at_end and self._newest is not None and self.checkpoints.newest != self._newest.index:
                self._save(self._newest)
            self._until(lambda: not self.checkpoints.pending and not self._updating)
        except DataError:
            self.ledger.unusable(self.feed.skipped_rest())
            raise
        finally:
            self.stop.orderly = False

    def send(self, calls: Calls) -> None:
        """Make these calls; nobody waits for them."""
        for (role, rank), (method, *args) in sorted(calls.items()):
            self._answered.pop((role, rank, method), None)
            self._submit(role, rank, method, *args)

    def ask(self, calls: Calls) -> dict[Rank, Any]:
        """Make these calls and wait for all answers."""
        self.send(calls)
        wanted = {(role, rank, method) for (role, rank), (method, *_) in calls.items()}
        self._until(lambda: wanted <= self._answered.keys())
        return {(role, rank): self._answered.pop((role, rank, method)) for role, rank, method in wanted}

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _until(self, done: Callable[[], bool]) -> None:
        while True:
            with self.trace.span("orders"):
                self._send()
            if done():
                return
            if not self.stop.requested and self.replan.due(self, self._composed, bool(self._updating)):
                self.replan.carry_out(self)
                continue
            assert self._in_flight, f"nothing runs and nothing can: {self.flow.waiting()}"
            with self.trace.span("wait"):
                answer = self.executor.next(POLL_SECONDS)
            if answer is not None:
                with self.trace.span("answers"):
                    self._take(answer)
            elif time.monotonic() - self._last_answer > self.config.run.timeout_seconds:
                raise LostProcessError(
                    f"no process answered for {self.config.run.timeout_seconds:g} s ({self.flow.waiting()}); "
                    f"if work takes that long, raise run.timeout_seconds"
                )
            if self.stop.requested and self.stop.overdue:
                error = self.stop.error()
                limit = f"run.stop_deadline_seconds, {self.stop.deadline_seconds:g} s"
                raise type(error)(f"{error}, and the step did not end in time ({limit})")

    def _send(self) -> None:
        """What is ready goes before another step is composed: ranks that were just updated wait for their packs."""
        if self._stop_step is not None and self.flow.version >= self._stop_step:
            return
        self._order()
        if not self.stop.requested and self._compose():
            self._order()

    def _order(self) -> None:
        for role, dp, order in self.flow.orders():
            payloads = self.feed.payloads.handles(order.blocks) if isinstance(order, PackOrder) else ()
            for rank in self.peers.ranks(role, dp):
                self._submit(role, rank, METHODS[type(order)], order, payloads=payloads)

    def _submit(self, role: Role, rank: int, method: str, *args: Any, payloads: Any = ()) -> None:
        self._in_flight += 1
        self.trace.sent(role, rank, method, *(order.slots for order in args[:1] if isinstance(order, WORK)))
        self.executor.submit(role, rank, method, *args, payloads=payloads)

    def _take(self, answer: Answer) -> None:
        if answer.error is not None:
            failure = true_cause(answer, self.executor)
            if failure.dead is not None and (left := self.flow.lost(*failure.dead)) is not None:
                failure.error.add_note(left)
            raise failure.error
        self._in_flight -= 1
        self._last_answer = time.monotonic()
        if answer.method == "devices":  # no step waits for it, so that no critical path leads over it
            for news in self.devices.answered(answer.role, answer.rank, answer.value):
                self.ledger.line(news)
            return
        self.trace.taken(answer.role, answer.rank, answer.method)
        self._answered[answer.role, answer.rank, answer.method] = answer.value
        for value in self.peers.answered(answer.role, answer.rank, answer.method, answer.value):
            self._tell(answer, value)
        self._advance()

    def _tell(self, answer: Answer, value: Any) -> None:
        """Those who decide hear of an answer; `value` is its own, or that of the peer who answers for all."""
        self.replan.saw(answer, value)
        match answer.method:
            case "read":
                rows = self.feed if value.phase is Phase.TRAIN else self.eval_rows
                assert rows is not None, "held-out rows arrived that nobody asked for"
                rows.add(value, answer.payload)
            case "encode":
                self.flow.encoded(value)
                self.costs.encoded(self._ends[value.unit.phase, value.unit.step].step, value)
                directory = self.flow.directory
                self.ledger.encoded(value, directory.used_bytes() / directory.capacity())
            case "train":
                num_bytes = self.flow.trained(value)
                key = (value.phase, value.step)
                self._ends[key].trained(value)
                self.costs.trained(self._ends[key].step, value, self.flow.bad_rows(key))
                self.ledger.trained(value, num_bytes)
            case "backward":
                self.flow.returned(value)
                self.costs.returned(self._ends[Phase.TRAIN, value.units[0].step].step, value)
                self.ledger.returned(value)
            case "reduce":
                self._ends[Phase.TRAIN, value.step].reduced(answer.role, answer.rank, value)
            case "update":
                self._updating[value.step].updated(answer.role, answer.rank, value)
            case "save":
                self.checkpoints.saved(answer.role, answer.rank)

    # --- composition --------------------------------------------------------------------------------------------------

    def _compose(self) -> bool:
        """Ask for rows, and append steps and the evaluation passes due between them to the order of need; whether there
        are any."""
        before = self._composed, self._eval_composed
        self._append()
        for phase, rows in ((Phase.TRAIN, self.feed), (Phase.EVAL, self.eval_rows)):
            for request in rows.requests() if rows is not None else ():
                read = (phase, request.start, request.count, request.block)
                self._submit(Role.READER, request.reader, "read", *read)
        return before != (self._composed, self._eval_composed)

    def _append(self) -> None:
        while self._last_step is None and may_compose(self.flow, self._composed):
            if self._eval_due is not None:
                if self.eval_rows is None or not self.eval_rows.ready:
                    return
                if self._eval_composed is None:
                    self.ledger.held_out(self.eval_rows.num_rows, self.eval_rows.skipped)
                self._add(self.compose_eval(self._eval_due))
                self._eval_composed, self._eval_due = self._eval_due, None
                continue
            over = self._composed >= self.schedule.total_steps
            step = None if over else self._next_step()
            if step is not None:
                self._composed = step.index
                self._add(step)
                self._eval_due = step.index if self.schedule.evaluates(step.index) else None
            elif not over and not self.feed.exhausted:
                return
            elif self.schedule.has_eval and self._composed != self._eval_composed:
                self._eval_due = self._composed
            else:
                self._last_step = self._composed
                self.ledger.ended(self.feed.skipped_rest() if self.feed.exhausted else ())
                if self._composed == 0:
                    raise DataError(f"no row of {self.config.data.train} can be trained: run `flowtrain data check`")

    def _next_step(self) -> Step | None:
        """The next step of training, composed by the cost model that holds for it."""
        index = self._composed + 1
        self.feed.composer.cost = self.costs.of(index).cost
        self.replan.composing(index)
        step = self.feed.next_step()
        if step is not None:
            self.costs.composed(step)
            if (choice := self.costs.to_log(index)) is not None:
                self.ledger.cost_changed(index, choice, self.costs.fitted)
        return step

    def _add(self, step: Step) -> None:
        key = (step.phase, step.index)
        planted = self.config.debug.faults
        offset = ("denominator_plus_one" in planted) - ("denominator_minus_one" in planted)
        self._ends[key] = StepEnd(step, self.replan.ranks_at(step.index), self.config.train.clip_norm, offset)
        self.replan.composed(step)
        if step.phase is Phase.TRAIN:
            self.ledger.composed(step, self.feed.skipped_before(step), self.costs.of(step.index))
        self.flow.add(step)

    # --- ends of steps ------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Whatever has become complete: updates, evaluation passes, records, checkpoints."""
        for key, end in list(self._ends.items()):
            phase, index = key
            if not self.flow.finished(key):
                continue
            if phase is Phase.EVAL:
                self.ledger.evaluated(index, end.loss() if end.trained_tokens else None)
                self._forget(key)
            elif index == self.flow.version + 1 and end.ready:
                self._update(key, end)
        for index, end in sorted(self._updating.items()):
            if not end.done or not self._may_record(index):
                break
            self.ledger.record(index, end.updates, self.replan.recorded(index, self) | self.devices.measured())
            self.send(self.devices.due())
            del self._updating[index]
            self._note_recorded(index)
            self.costs.recorded(index)
        for folder in self.checkpoints.complete():
            self.ledger.saved(folder)

    def _may_record(self, index: int) -> bool:
        """A record waits for the evaluation behind its step, which is known once composition went on or ended."""
        if self.stop.requested:
            return True
        known = self._composed > index or self._last_step is not None
        return known and (Phase.EVAL, index) not in self._ends and self._eval_due != index

    def _update(self, key: StepKey, end: StepEnd) -> None:
        step, result = end.step, end.result()
        self._nonfinite = 0 if result.finite else self._nonfinite + 1
        if self._nonfinite > self.config.train.max_nonfinite_steps:
            raise FlowTrainError(
                f"step {step.index}: loss {result.loss} and gradient norm {result.grad_norm} are not finite for the "
                f"{self._nonfinite}th step in a row; lower train.lr, or look at the rows of this step in samples.jsonl"
            )
        lr = learning_rates(self.config.train, step.index, self.schedule.total_steps)
        folder = None if self.dump_to is None else self.dump_to / f"step-{step.index}"
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        order = end.order(result, lr, None if folder is None else str(folder))
        for role, rank in sorted(end.ranks):
            self._submit(role, rank, "update", order)
        bad = self.flow.bad_rows(key)
        self.ledger.updated(step, result, lr, bad)
        self.trace.step_ended(step.index)
        self.flow.update_sent(step.index)
        self._forget(key)
        self._updating[step.index] = end
        self._newest = step
        self.feed.bad_share.decoded(len(step.samples), bad.values())
        if self.schedule.saves(step.index):
            self._save(step)

    def _forget(self, key: StepKey) -> None:
        step = self.flow.forget(key)
        del self._ends[key]
        if step.phase is Phase.TRAIN:
            self.feed.payloads.done(step.samples)

    def _save(self, step: Step) -> None:
        """Send a save behind the update just sent; the folder is completed when it and the record are done."""
        ranks = self.replan.ranks_at(step.index, self.restored_roles)
        folder = self.checkpoints.begin(step, ranks)
        for role, rank in sorted(ranks):
            self._submit(role, rank, "save", str(folder))
        if step.index not in self._updating:
            self._note_recorded(step.index)

    def _note_recorded(self, index: int) -> None:
        """The books of a step are closed: what a checkpoint of it needs to know of them."""
        state = {
            "totals": self.ledger.totals_state(),
            "total_steps": self.schedule.total_steps,
            "producers": self.replan.producers_at(index + 1),
            "data": dict(self.data_order),
            "freeze": sorted(self.config.train.freeze),
            "costs": self.costs.state(index),
        }
        self.checkpoints.recorded(index, state)

    def _trained(self) -> bool:
        if not self.stop.requested:
            return self._last_step is not None and self.flow.version >= self._last_step and not self._ends
        if self._stop_step is None:
            begun = self.flow.begun((Phase.TRAIN, self.flow.version + 1))
            self._stop_step = self.flow.version + begun
            self.ledger.stopping(self._stop_step)
        return self.flow.version >= self._stop_step
