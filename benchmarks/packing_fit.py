"""Does the fitted cost predict what packs take? Fitted on some rows and pack sizes, judged on others of both.

    even rows, packs of FIT_SIZES    ─▶ training runs ─▶ times ─▶ CostFit ─▶ fitted.json, on disk
    odd rows,  packs of JUDGED_SIZES ─▶ training runs composed by that file ─▶ times  ⇔  what the file predicts

Runs are ordinary ones of the emoji job in one process with one thread; an executor between the controller and its
stages writes down the answers. Each run is repeated `REPEATS` times, all sizes in turns, and the least time of a pack
counts, to fit and to judge: the speed of a shared machine changes within seconds. A cycle has rows of its own; the
cycle of median error counts.

| column | over the judged packs |
|---|---|
| `error` | mean of abs(predicted - measured) / measured |
| `error_single` | the same of single times, instead of the least of each pack |
| `spread` | mean of largest / least time of one and the same pack, less 1 |
| `drift` | how much slower than predicted all were together |
| `without_drift` | the error once a factor for each size has taken the drift away |
| `refitted` | the error of a line fitted to the judged packs themselves |
| `imbalance_*` | largest / mean time of the packs of a step, as `PACKS` ranks would run them at the same time |

The machine must have nothing else to do.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch

from benchmarks.record import Check, Result, main
from flowtrain.config.loading import load_config
from flowtrain.config.schema import Config
from flowtrain.messages import BackwardOrder, EncodeOrder, PackOrder
from flowtrain.packing import CostModel
from flowtrain.packing.fit import WARM_UP, CostFit
from flowtrain.plan import RankPlan
from flowtrain.runtime.decisions import Choice
from flowtrain.runtime.executor import Answer
from flowtrain.runtime.local import LocalExecutor
from flowtrain.runtime.run import execute
from flowtrain.runtime.signals import StopRequest
from flowtrain.shapes import read_shape
from flowtrain.types import Phase, Role, SampleMeta, UnitId

EXAMPLE = Path(__file__).resolve().parent.parent / "examples/emoji/emoji.yaml"
FIT_SIZES = (320, 640, 1536)
JUDGED_SIZES = (448, 1024)
PACKS = 4
FIT_STEPS = 8
JUDGED_STEPS = 9
REPEATS = 3
CYCLES = 5


class Times(NamedTuple):
    """Calls in order, each with its seconds at the end."""

    packs: list[tuple[int, Sequence[SampleMeta], float]]
    encodes: list[tuple[Sequence[SampleMeta], float]]
    backwards: list[tuple[list[Sequence[SampleMeta]], float]]


class Recorder:
    """An executor that passes everything on and keeps what was asked and how long it took.

    Calls of one process are answered in the order of submission, which pairs answers with orders.
    """

    def __init__(self) -> None:
        self.inner = LocalExecutor()
        self.times = Times([], [], [])
        self._asked: list[Any] = []
        self._units: dict[UnitId, Sequence[SampleMeta]] = {}

    def start(self, ranks: Sequence[RankPlan]) -> None:
        self.inner.start(ranks)

    def add(self, ranks: Sequence[RankPlan]) -> None:
        self.inner.add(ranks)

    def remove(self, role: Role, rank: int) -> None:
        self.inner.remove(role, rank)

    def submit(self, role: Role, rank: int, method: str, *args: Any, payloads: Sequence[Any] = ()) -> None:
        self._asked.append(args[0] if args else None)
        self.inner.submit(role, rank, method, *args, payloads=payloads)

    def next(self, timeout: float) -> Answer | None:
        answer = self.inner.next(timeout)
        if answer is None:
            return None
        match self._asked.pop(0):
            case PackOrder(phase=Phase.TRAIN, pack=pack, step=step) if pack.samples:
                self.times.packs.append((step, pack.samples, answer.value[0].seconds))
            case EncodeOrder(unit=unit):
                self._units[unit.id] = unit.samples
                self.times.encodes.append((unit.samples, answer.value.seconds))
            case BackwardOrder(units=units):
                self.times.backwards.append(([self._units[unit] for unit in units], answer.value.seconds))
        return answer

    def wake(self) -> None:
        self.inner.wake()

    def close(self) -> None:
        self.inner.close()


def split(folder: Path) -> tuple[Path, Path]:
    """Files of the even and of the odd rows."""
    source = load_config(EXAMPLE).config.data.train
    rows: tuple[list[str], list[str]] = ([], [])
    for number, line in enumerate(source.read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        row["images"] = [str(source.parent / image) for image in row.get("images") or []]
        rows[number % 2].append(json.dumps(row))
    paths = folder / "even.jsonl", folder / "odd.jsonl"
    for path, lines in zip(paths, rows, strict=True):
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return paths


def config_of(run_dir: Path, data: Path, max_tokens: int, steps: int, seed: int) -> Config:
    wanted = {
        "run.dir": run_dir,
        "run.seed": seed,
        "mode": "monolithic",
        "data.train": data,
        "data.eval": "null",
        "train.step": f"{{packs: {PACKS}}}",
        "train.max_steps": steps,
        "packing.max_tokens": max_tokens,
        "checkpoint.export": "false",
        "telemetry.progress": "off",
    }
    return load_config(EXAMPLE, [f"{key}={value}" for key, value in wanted.items()]).config


def run(config: Config, replay: Path | None = None) -> Times:
    recorder = Recorder()
    config.run.dir.mkdir(parents=True, exist_ok=True)
    try:
        execute(config, config.run.dir, None, StopRequest(60), executor=recorder, replay=replay)
    finally:
        recorder.close()
    return recorder.times


def least(runs: Sequence[Times]) -> Times:
    """The least time of each call of runs that make the same calls."""
    return Times(*(list(map(_least, zip(*calls, strict=True))) for calls in zip(*runs, strict=True)))


def _least(calls: Sequence[tuple[Any, ...]]) -> Any:
    assert all(call[:-1] == calls[0][:-1] for call in calls), "repeated runs make the same calls"
    return (*calls[0][:-1], min(call[-1] for call in calls))


def fit_to(runs: Sequence[Times], base: CostModel) -> CostFit:
    """Each run is a process of its own to the fit, with its own warm-up."""
    fit = CostFit(base)
    for number, times in enumerate(runs):
        for _, samples, seconds in times.packs:
            fit.trained(number, samples, seconds)
        for samples, seconds in times.encodes:
            fit.encoded(number, samples, seconds)
        for units, seconds in times.backwards:
            fit.returned(number, units, seconds)
    return fit


def errors(times: Sequence[tuple[Sequence[SampleMeta], float]], cost: CostModel) -> list[float]:
    return [abs(cost.real(cost.pack_cost(samples)) / seconds - 1) for samples, seconds in times]


def imbalance(values: Sequence[float]) -> float:
    return max(values) * len(values) / sum(values)


def judged(runs: Sequence[Times], cost: CostModel, base: CostModel) -> dict[str, Any]:
    after = PACKS * -(-WARM_UP // PACKS)
    packs, repeated = least(runs).packs[after:], [run.packs[after:] for run in runs]
    times = [(samples, seconds) for _, samples, seconds in packs]
    single = [(samples, seconds) for run in repeated for _, samples, seconds in run]
    largest = [max(call[-1] for call in calls) for calls in zip(*repeated, strict=True)]
    own = CostFit(base)
    for samples, seconds in [*times[:WARM_UP], *times]:  # the fit leaves out as many at first
        own.trained(0, samples, seconds)
    refitted = own.solve()
    assert refitted is not None, "a judged run has enough packs for a line of its own"
    steps: dict[int, list[tuple[float, float]]] = {}
    for step, samples, seconds in packs:
        steps.setdefault(step, []).append((cost.real(cost.pack_cost(samples)), seconds))
    whole = [step for step in steps.values() if len(step) == PACKS]
    predicted = sum(cost.real(cost.pack_cost(samples)) for samples, _ in times)
    slower = sum(seconds for _, seconds in times) / predicted
    return {
        "packs": len(times),
        "mean_ms": 1000 * fmean(seconds for _, seconds in times),
        "error": fmean(errors(times, cost)),
        "error_single": fmean(errors(single, cost)),
        "spread": fmean(most / seconds - 1 for most, (_, seconds) in zip(largest, times, strict=True)),
        "drift": slower - 1,
        "without_drift": fmean(errors([(samples, seconds / slower) for samples, seconds in times], cost)),
        "refitted": fmean(errors(times, refitted.cost)),
        "imbalance_predicted": fmean(imbalance([predicted for predicted, _ in step]) for step in whole),
        "imbalance_measured": fmean(imbalance([seconds for _, seconds in step]) for step in whole),
    }


def cycle(folder: Path, even: Path, odd: Path, base: CostModel, seed: int) -> list[dict[str, Any]]:
    """A fit and the runs that judge it; one row for each judged size."""
    folder.mkdir()
    logs = [log_of(config_of(folder / f"log-{size}", odd, size, 1, seed)) for size in JUDGED_SIZES]
    runs = [
        [run(config_of(folder / f"fit-{size}-{number}", even, size, FIT_STEPS, seed)) for size in FIT_SIZES]
        for number in range(REPEATS)
    ]
    fitted = fit_to(list(map(least, zip(*runs, strict=True))), base).solve()
    assert fitted is not None, "too few packs to fit"
    file = folder / "fitted.json"
    file.write_text(json.dumps(Choice(fitted.cost, "fitted").to_dict()), encoding="utf-8")
    # From here on the file is all that is known of the fit.
    choice = Choice.from_dict(json.loads(file.read_text(encoding="utf-8")))
    for log in logs:
        rewrite(log, choice)
    runs = [
        [
            run(config_of(folder / f"judged-{size}-{number}", odd, size, JUDGED_STEPS, seed), replay=log)
            for size, log in zip(JUDGED_SIZES, logs, strict=True)
        ]
        for number in range(REPEATS)
    ]
    return [
        {"seed": seed, "max_tokens": size, **judged(of_size, choice.cost, base)}
        for size, of_size in zip(JUDGED_SIZES, zip(*runs, strict=True), strict=True)
    ]


def measure(seed: int) -> Result:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        even, odd = split(folder)
        example = load_config(EXAMPLE).config
        base = CostModel.from_shape(read_shape(example.model.path), example.frozen, example.cut)
        cycles = [
            cycle(folder / f"cycle-{number}", even, odd, base, CYCLES * seed + number) for number in range(CYCLES)
        ]
    settings = {
        "fit_sizes": FIT_SIZES,
        "fit_steps": FIT_STEPS,
        "judged_sizes": JUDGED_SIZES,
        "judged_steps": JUDGED_STEPS,
        "repeats": REPEATS,
        "cycles": CYCLES,
        "packs_a_step": PACKS,
    }
    checks = [
        Check(f"mean error of predicted pack time, {of}, median cycle", median(_of_cycles(cycles, column)), "<=", 0.10)
        for of, column in (("single times", "error_single"), ("least of a pack", "error"))
    ]
    return Result(settings, [row for rows in cycles for row in rows], checks)


def _of_cycles(cycles: Sequence[Sequence[Mapping[str, Any]]], column: str) -> list[float]:
    """Of each cycle, over all of its packs."""
    return [sum(row[column] * row["packs"] for row in rows) / sum(row["packs"] for row in rows) for rows in cycles]


def log_of(config: Config) -> Path:
    """The decision log of a run of one step."""
    run(config)
    return config.run.dir / "decisions.jsonl"


def rewrite(log: Path, choice: Choice) -> None:
    """Make it that of a run composed by `choice`."""
    entries = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    kept = [entry for entry in entries if entry["kind"] != "cost"]
    kept.append({"step": 1, "kind": "cost", **choice.to_dict()})
    log.write_text("".join(json.dumps(entry) + "\n" for entry in kept), encoding="utf-8")


if __name__ == "__main__":
    main("packing_fit", lambda options: measure(options.seed))
