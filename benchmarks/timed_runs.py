"""Real runs of the emoji job, and how long their orders took by their traces (for `benchmarks.simulator`).

    TimedRuns.run(config) ─▶ traces ─▶ a call for each unit and pack, in the order in which the run composed them
                                        │ seconds with 1, 2, … ranks at work
                                        ▼
                     Order: what it holds, how long it took

Processes are started once and stay, so that a run costs its steps. Composition is a function of seed, data and config,
so the steps of a run are composed here again; that they are the same is checked by the ids in samples.jsonl.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

from benchmarks.simulator_lines import Order
from flowtrain.allocator import local_inventory, make_plan
from flowtrain.config.loading import load_config
from flowtrain.config.schema import ClusterConfig, Config
from flowtrain.data.order import Order as RowOrder
from flowtrain.data.survey import open_builder, survey_rows
from flowtrain.packing import CostModel
from flowtrain.packing.fit import pack_features
from flowtrain.packing.trace import composed_steps
from flowtrain.plan import Plan, RankPlan
from flowtrain.runtime.cluster import Cluster
from flowtrain.runtime.inputs import Inputs, composition, costs_of, open_rows
from flowtrain.runtime.ray_executor import RayExecutor
from flowtrain.runtime.run import execute
from flowtrain.runtime.signals import StopRequest
from flowtrain.shapes import read_shape
from flowtrain.simulator.planned import without_long
from flowtrain.telemetry.timeline import Call, Timeline, Track, read_timeline
from flowtrain.types import EncodeUnit, Phase, Role, SampleMeta, SkippedRow, Step

EXAMPLE = Path(__file__).resolve().parent.parent / "examples/emoji/emoji.yaml"


@dataclass(frozen=True)
class TimedRun:
    """A run that is done, or one to come: `rows` are those of its data, in the run's order."""

    config: Config
    plan: Plan
    inputs: Inputs
    rows: Sequence[SampleMeta | SkippedRow]

    @cached_property
    def cost(self) -> CostModel:
        """By which it is composed."""
        return costs_of(self.inputs).of(1).cost

    def steps(self) -> Iterator[Step]:
        return composed_steps(composition(self.inputs), self.cost, self.rows)

    @cached_property
    def trained(self) -> list[Step]:
        """Its steps, as the run says that it has trained them."""
        lines = (self.config.run.dir / "samples.jsonl").read_text(encoding="utf-8").splitlines()
        packs = [(line["step"], line["rank"], tuple(line["ids"])) for line in map(json.loads, lines)]
        steps = list(islice(self.steps(), max(step for step, _, _ in packs)))
        ours = [(step.index, pack.rank, tuple(s.id for s in pack.samples)) for step in steps for pack in step.packs]
        assert sorted(ours) == sorted(packs), f"{self.config.run.dir} has trained other packs than those composed here"
        return steps

    @cached_property
    def timeline(self) -> Timeline:
        found = read_timeline(self.config.run.dir)
        assert found is not None, f"{self.config.run.dir} has no traces"
        return found

    def rate(self, skipped: int) -> float:
        """Rows a second of the middle step, the first ones left out."""
        lines = (self.config.run.dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        steady = [record for record in map(json.loads, lines) if record["step"] > skipped]
        return median(record["rows"] / record["time_metrics/end_to_end(s)"] for record in steady)

    def calls(self, side: str, method: str) -> list[tuple[Track, Call]]:
        return [
            (track, call) for track in self.timeline.tracks if track.side == side for call in track.calls
            if call.method == method
        ]  # fmt: skip

    def num_ranks(self, role: Role) -> int:
        """Of a side."""
        return len((self.plan.producers if role is Role.PRODUCER else self.plan.consumers).leading)

    def packs(self) -> list[Order]:
        """Of the one consumer."""
        packs = [pack for step in self.trained for pack in step.packs]
        calls = self.calls("consumer", "train")
        assert [call.slots for _, call in calls] == [(pack.slot,) for pack in packs], "packs ran in another order"
        return [
            self._order("pack", pack_features(self.cost, pack.samples), track, call)
            for pack, (track, call) in zip(packs, calls, strict=True)
        ]

    def units(self) -> list[Order]:
        """Encodes and backwards of the one producer."""
        units = [unit for step in self.trained for pack in step.packs for unit in pack.units]
        found = []
        for method in ("encode", "backward"):
            waiting = iter(units)
            for track, call in self.calls("producer", method):
                held = list(islice(waiting, len(call.slots)))
                assert [unit.id.slot for unit in held] == list(call.slots), "units ran in another order"
                found.append(self._order(method, _unit_features(held), track, call))
        return found

    def orders(self, method: str, role: Role) -> list[tuple[Order, ...]]:
        """Reads, reductions or updates of a side: the first of every rank, the second, …"""
        by_rank: dict[str, list[Order]] = {}
        for track, call in self.calls(str(role), method):
            by_rank.setdefault(track.name, []).append(self._order(method, (), track, call))
        return list(zip(*by_rank.values(), strict=True))

    def _order(self, kind: str, features: tuple[int, ...], track: Track, call: Call) -> Order:
        seconds = [0.0] * len(self.timeline.tracks)
        others = [(start, end) for name, start, end in self._busy if name != track.name]
        within = [(max(start, call.start), min(end, call.end)) for start, end in others]
        within = [(start, end) for start, end in within if start < end]
        moments = sorted({call.start, call.end, *(moment for span in within for moment in span)})
        for begin, end in pairwise(moments):
            busy = sum(start <= begin and end <= until for start, until in within)
            seconds[busy] += (end - begin) / 1e9
        return Order(kind, features, tuple(seconds))

    @cached_property
    def _busy(self) -> list[tuple[str, int, int]]:
        """When ranks of both sides were at work."""
        tracks = [track for track in self.timeline.tracks if track.side != "reader"]
        return [(track.name, call.start, call.end) for track in tracks for call in track.calls]


def _unit_features(units: Sequence[EncodeUnit]) -> tuple[int, ...]:
    samples = [sample for unit in units for sample in unit.samples]
    return sum(s.patches for s in samples), sum(s.patch_pairs for s in samples), len(units)


class TimedRuns:
    """A context manager: processes for two producers and a consumer, which stay, and runs on them in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._rows: dict[Path, list[SampleMeta | SkippedRow]] = {}
        self._number = 0

    def __enter__(self) -> TimedRuns:
        ranks = [RankPlan(role, 0, "cpu", 1) for role in (Role.READER, Role.PRODUCER, Role.CONSUMER)]
        ranks.append(RankPlan(Role.PRODUCER, 1, "cpu", 1))
        cluster = Cluster(ClusterConfig())
        self._stack.callback(cluster.close)
        cluster.start(ranks)
        self._executor = RayExecutor(cluster, start_timeout_seconds=120)
        self._stack.callback(self._executor.close)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def prepare(self, data: Path, keys: Sequence[str], steps: int, seed: int) -> TimedRun:
        """A run to come."""
        self._number += 1
        run_dir = self.folder / f"run-{self._number}"
        run_dir.mkdir()
        fixed: dict[str, Any] = {
            "run.dir": run_dir,
            "run.seed": seed,
            "run.trace": "true",
            "data.train": data,
            "data.eval": "null",
            "train.max_steps": steps,
            "checkpoint.export": "false",
            "telemetry.progress": "off",
            "cluster.oversubscribe": "true",
        }
        config = load_config(EXAMPLE, [*(f"{key}={value}" for key, value in fixed.items()), *keys]).config
        shape = read_shape(config.model.path)
        plan = make_plan(config, shape, local_inventory())
        inputs = Inputs(config, run_dir, shape, plan, open_rows(data), None, None, None, None)
        return TimedRun(config, plan, inputs, self._rows_of(config))

    def run(self, run: TimedRun) -> None:
        colocated = run.plan.placement == "colocated"
        executor = None if colocated else self._executor
        execute(run.config, run.config.run.dir, None, StopRequest(60), executor=executor)

    def _rows_of(self, config: Config) -> list[SampleMeta | SkippedRow]:
        """In the run's order."""
        data = config.data.train
        if data not in self._rows:
            packing = config.packing.model_copy(update={"max_tokens": 1 << 20})
            whole = open_builder(config.model_copy(update={"packing": packing}), Phase.TRAIN)
            self._rows[data] = list(survey_rows(whole, decode=False))
        known = self._rows[data]
        in_order = islice(RowOrder.of(config, len(known)).rows(known), len(known))
        return without_long(in_order, config.max_row_tokens)
