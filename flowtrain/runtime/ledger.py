"""The run's books: what each step did, what the whole run did, and what the user sees of it.

Everything is added when it happens and written when the step's record is due, in step order; no decision reads it.

    composed, encoded, trained, updated, evaluated ──▶ StepBook ──record──▶ metrics.jsonl, samples.jsonl, progress
                                                                  └──────▶ Totals ──close──▶ summary.json
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowtrain.allocator.drift import Proposal
from flowtrain.config.schema import Config
from flowtrain.errors import EXIT_DONE
from flowtrain.flops import section_costs
from flowtrain.messages import PackTrained, UnitEncoded, UnitsReturned, UpdateReport
from flowtrain.packing.fit import Fitted
from flowtrain.pipeline import cut_sections, sections_text
from flowtrain.plan import Plan
from flowtrain.runtime.decisions import Choice
from flowtrain.runtime.executor import StageReport
from flowtrain.runtime.pace import Pace
from flowtrain.runtime.step_book import StepBook
from flowtrain.runtime.step_end import StepResult
from flowtrain.runtime.unreached import STEPS, Unreached
from flowtrain.shapes import ModelShape
from flowtrain.telemetry.console import Progress, format_seconds
from flowtrain.telemetry.fatal import exit_code_of
from flowtrain.telemetry.metrics import LAST_STEP
from flowtrain.telemetry.mfu import Fleet
from flowtrain.telemetry.registry import Metric
from flowtrain.telemetry.run_files import RunFiles
from flowtrain.telemetry.sinks import Sink
from flowtrain.telemetry.tables import startup_tables
from flowtrain.telemetry.totals import Totals
from flowtrain.types import Module, Pack, Phase, Role, SkippedRow, Step

NAMED_IDS = 3
"""Skipped rows named for each reason at the end of a run; summary.json names more."""


class Ledger:
    """`state`: the checkpoint's, to count on from; `total`: steps of the whole run; `sinks`: those that take records
    beside metrics.jsonl and the progress line."""

    def __init__(
        self,
        config: Config,
        shape: ModelShape,
        plan: Plan,
        files: RunFiles,
        state: Mapping[str, Any] | None,
        total: int,
        sinks: Sequence[Sink] = (),
    ) -> None:
        self.config = config
        self.shape = shape
        self.plan = plan
        self.files = files
        self.totals = Totals.from_state(state["totals"]) if state else Totals()
        self.progress = Progress(config.telemetry.progress, total)
        self._write = (files.metrics.write, self.progress.write, *(sink.write for sink in sinks))
        self._telemetry_seconds: float | None = None
        self.fleet: Fleet | None = None
        self._rest: tuple[SkippedRow, ...] = ()
        self._books: dict[int, StepBook] = {}
        self._total = total
        self._pace = Pace()
        self._told_fit = False
        self._unreached = Unreached(())
        self._before_seconds = self.totals.wall_seconds
        self._started = self._step_start = time.monotonic()

    # --- events -------------------------------------------------------------------------------------------------------

    def starting(self) -> None:
        """The first sign of life: processes that load libraries and weights take a while."""
        if self.config.telemetry.progress != "off":
            numbers = {
                "reader": self.plan.readers,
                "producer": len(self.plan.producers.ranks),
                "consumer": len(self.plan.consumers.ranks),
            }
            told = ", ".join(f"{number} {role}{'s' if number > 1 else ''}" for role, number in numbers.items())
            self.line(f"starting {told} ({self.plan.placement})")

    def started(self, reports: Mapping[tuple[Role, int], StageReport], sample_text: str | None) -> None:
        """All stages stand: say what they are."""
        sides: dict[Role, list[StageReport]] = {Role.PRODUCER: [], Role.CONSUMER: []}
        for (role, _), report in sorted(reports.items()):
            if role in sides:
                sides[role].append(report)
        peaks = {role: tuple(report.peak for report in side if report.peak) for role, side in sides.items()}
        colocated = self.plan.placement == "colocated"
        self.fleet = Fleet(peaks[Role.PRODUCER], peaks[Role.CONSUMER], self.config.cut, colocated)
        if unknown := self.fleet.unknown:
            self.line(f"warning: MFU is left out where it needs a peak that is {unknown}")
        rows = [row for side in sides.values() for row in side[0].parameters]
        self._unreached = Unreached(dict.fromkeys(row.module for row in rows if row.trainable))
        if self.config.telemetry.progress != "off":
            self.line(startup_tables(rows, self.plan, sample_text))
            layout = self.plan.consumers.layout
            if layout.pp > 1:
                self.line(sections_text(cut_sections(*section_costs(self.shape.text), layout.num_sections), layout.pp))
        self._step_start = time.monotonic()

    def composed(self, step: Step, skipped: Iterable[SkippedRow], choice: Choice) -> None:
        """A step of training was composed by the cost model of `choice`."""
        self._books[step.index] = StepBook(step, tuple(skipped), choice)

    def cost_changed(self, step: int, choice: Choice, fitted: Fitted | None) -> None:
        """Another cost model holds from `step` on; `fitted`: the lines behind it."""
        worth = {} if fitted is None else {"calls": fitted.packs.num_calls, "error": fitted.packs.error}
        self.files.decision(step, "cost", **choice.to_dict(), **worth)
        if fitted is not None and not self._told_fit:
            self._told_fit = True
            packs = fitted.packs
            self.line(
                f"step {step}: packs are composed by measured times from here on "
                f"(error {100 * packs.error:.1f} % over {packs.num_calls} packs)"
            )

    def ended(self, skipped: Iterable[SkippedRow]) -> None:
        """There will be no more steps; `skipped`: rows behind the last one."""
        self._rest = tuple(skipped)

    def unusable(self, skipped: Iterable[SkippedRow]) -> None:
        """The rows end the run; `skipped`: those behind the last step. Those of unrecorded steps count as well."""
        unrecorded = [row for book in self._books.values() for row in (*book.skipped, *book.bad.values())]
        for row in (*unrecorded, *self._rest, *skipped):
            self.totals.skip(row)

    def encoded(self, answer: UnitEncoded, occupancy: float) -> None:
        """`occupancy`: used share of the pool right now."""
        if answer.unit.phase is Phase.TRAIN and (book := self._books.get(answer.unit.step)) is not None:
            book.encoded(answer, occupancy)

    def trained(self, answer: PackTrained, num_bytes: int) -> None:
        """`num_bytes`: features that the pack got from the pool."""
        if answer.phase is Phase.TRAIN and (book := self._books.get(answer.step)) is not None:
            book.trained(answer, num_bytes)

    def returned(self, answer: UnitsReturned) -> None:
        """A producer has run backwards; all its units are of one step."""
        if (book := self._books.get(answer.units[0].step)) is not None:
            book.returned(answer)

    def updated(
        self, step: Step, result: StepResult, lr: Mapping[Module, float], bad: Mapping[int, SkippedRow]
    ) -> None:
        """The update of a step is on its way."""
        book = self._books[step.index]
        book.result, book.lr, book.bad = result, lr, dict(bad)
        now = time.monotonic()
        book.seconds, self._step_start = now - self._step_start, now

    def held_out(self, num_rows: int, skipped: Sequence[SkippedRow]) -> None:
        """The held-out rows have been read; called once."""
        if skipped:
            first = skipped[0]
            self.line(
                f"warning: {len(skipped)} of {num_rows} held-out rows cannot be used (first: row {first.id}: "
                f"{first.detail}, {first.reason}); `flowtrain data check` tells what to change"
            )

    def evaluated(self, index: int, loss: float | None) -> None:
        """The evaluation pass behind update `index` is done; its time belongs to no step. None: no usable row."""
        self._step_start = time.monotonic()
        if loss is None:
            self.line(f"step {index}: no evaluation loss, because no held-out row can be used")
            return
        self.totals.evaluated(loss)
        if index in self._books:
            self._books[index].eval_loss = loss
        self.line(f"step {index}: evaluation loss {loss:.4f}")

    def record(
        self, index: int, updates: Mapping[tuple[Role, int], UpdateReport], of_run: Mapping[Metric, Any]
    ) -> None:
        """Write what one step did; called once a step, in order. `of_run`: what is known beside the step."""
        book = self._books.pop(index)
        start = time.thread_time()
        metrics = book.metrics(self.config, self.shape, self.plan, self._pace, updates)
        metrics = replace(metrics, fleet=self.fleet, telemetry_seconds=self._telemetry_seconds)
        metrics = replace(metrics, of_run={LAST_STEP: self._total, **of_run})
        if self.config.run.trace_samples:
            for pack in book.step.packs:
                ids = [sample.id for sample in pack.samples if sample.position not in book.bad]
                self.files.samples(index, pack.rank, pack.slot, ids)
        if metrics.trained_tokens:
            for module in self._unreached.saw(metrics.module_norms, metrics.vision_tokens > 0):
                self.line(
                    f"warning: step {index}: the {module.value} trains, and its gradient has been 0 in the last "
                    f"{STEPS} steps that reach it: look for what cuts it off, or name it in train.freeze"
                )
        for row in (*book.skipped, *book.bad.values()):
            if row.reason not in self.totals.skipped:
                self.line(f"skipped row {row.id}: {row.detail} ({row.reason}); summary.json counts others like it")
            self.totals.skip(row)
        for pack in book.step.packs:
            if pack.tokens > self.config.packing.max_tokens:
                self._own_pack(pack)
        self.totals.wall_seconds = self._before_seconds + time.monotonic() - self._started
        record = self.totals.step(metrics)
        for write in self._write:
            write(record)
        self._telemetry_seconds = time.thread_time() - start

    def saved(self, folder: Path) -> None:
        self.line(f"checkpoint {folder}")

    def stopping(self, step: int) -> None:
        """A signal was received: say what will still be done."""
        saves = "; a checkpoint is written" if self.config.checkpoint.at_end else ""
        self.line(f"stopping after step {step}{saves} (again: stop at once)")
        self.files.decision(step, "stop")

    def proposed(self, step: int, producers: int, proposal: Proposal, drift_percent: float) -> None:
        """The data have drifted from what the plan was made for, and another number of producers would do better."""
        gain, now = proposal.gain_percent, f"{producers} producer{'s' if producers > 1 else ''}"
        what = (
            f"would gain {gain:.0f} % samples/s over {now}"
            if proposal.producers > producers
            else f"would do as well as {now}"
        )
        self.line(f"step {step}: the load has drifted by {drift_percent:.0f} %: {proposal.producers} {what}")
        self.files.decision(step, "proposal", producers=proposal.producers, drift=drift_percent, gain=gain)

    def replanning(self, step: int, before: int, after: int) -> None:
        """The number of producers will change."""
        self.line(f"from step {step} on {after} instead of {before} producers")
        self.files.decision(step, "replan", producers=after)

    def replanned(self, producers: int, reports: Mapping[tuple[Role, int], StageReport]) -> None:
        """It has changed; `reports`: what new ones tell of themselves."""
        assert self.fleet is not None, "a plan changes after the start"
        new = tuple(report.peak for _, report in sorted(reports.items()) if report.peak)
        self.fleet = replace(self.fleet, producers=(*self.fleet.producers, *new)[:producers])
        self.line(f"{producers} producers run now")

    def line(self, text: str) -> None:
        self.progress.line(text)

    # --- ends ---------------------------------------------------------------------------------------------------------

    def totals_state(self) -> dict[str, Any]:
        return self.totals.state()

    def close(self, error: BaseException | None) -> None:
        """Write the summary, whatever ended the run."""
        self.progress.close()
        self.totals.wall_seconds = self._before_seconds + time.monotonic() - self._started
        for row in self._rest if error is None else ():
            self.totals.skip(row)
        if error is None and self.config.telemetry.progress != "off":
            done, took = self.totals, format_seconds(self.totals.wall_seconds)
            self.line(f"done: {done.steps} steps, {done.rows_trained} rows trained, {took} in all; see summary.json")
        if error is None and self.totals.steps < self._total:
            self.line(
                f"the run ended after {self.totals.steps} of {self._total} steps: epochs count rows, and "
                f"{self.totals.rows_skipped} of {self.totals.rows_read} were skipped"
            )
        if error is None and self.totals.rows_skipped:
            self.line(f"warning: {skipped_text(self.totals)}; `flowtrain data check` tells what to change")
        self.files.summary(self.totals.summary(EXIT_DONE if error is None else exit_code_of(error)))

    def _own_pack(self, pack: Pack) -> None:
        row = pack.samples[0]
        if not self.totals.own_packs.count:
            most = self.config.packing.max_tokens
            self.line(
                f"row {row.id} has {row.tokens} tokens, packs {most}: trained in a pack of its own "
                f"(packing.on_long_row); summary.json counts others like it"
            )
        self.totals.own_pack(row.id)


def skipped_text(totals: Totals) -> str:
    """`2 of 40 rows were skipped: image-missing 1 (cat-7), too-long 1 (cat-9)`."""
    kinds = []
    for reason, rows in sorted(totals.skipped.items(), key=lambda pair: (-pair[1].count, pair[0])):
        some = ", ".join(rows.ids[:NAMED_IDS]) + (", …" if rows.count > NAMED_IDS else "")
        kinds.append(f"{reason} {rows.count} ({some})")
    return f"{totals.rows_skipped} of {totals.rows_read} rows were skipped: {', '.join(kinds)}"
