"""`flowtrain profile`: measures the modules of a config on this machine and makes the profile of them.

    one process, all threads ──▶ alone ──────────────────────────┐
    one of each, as a plan places them ──▶ alone, both at once ──┼──▶ curves ──▶ Profile
    sizes of many rows ──▶ steps as a run composes them ─────────┘

Rows are real, and from the end of the first epoch's order: not those that a run begins with. Packs are of several
sizes, none of them that of the config, so that whatever is predicted for it is predicted. A setting is measured in
rounds until its share of the time is used up, at least once.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median

from flowtrain.allocator import local_inventory, make_plan
from flowtrain.allocator.inventory import cpu_name
from flowtrain.allocator.profile import (
    Measured,
    PackWork,
    Profile,
    Provenance,
    Timing,
    dump_profile,
    profile_key,
    timing,
)
from flowtrain.config.schema import Config
from flowtrain.data.sources import open_source
from flowtrain.errors import DataError
from flowtrain.packing import Composer, CostModel
from flowtrain.plan import ModulePlan, Plan
from flowtrain.runtime.executor import Executor
from flowtrain.runtime.inputs import Inputs, composition
from flowtrain.runtime.owners import producer_owners
from flowtrain.runtime.profile_bench import Bench, Kind, Orders
from flowtrain.runtime.run import make_executor
from flowtrain.runtime.signals import StopRequest
from flowtrain.runtime.start import start_stages
from flowtrain.shapes import read_shape
from flowtrain.telemetry.files import write_atomic
from flowtrain.types import Role, SampleMeta

SIZES = (0.4, 0.65, 0.9)
"""Sizes of packs, as shares of `packing.max_tokens`."""

PACKS_ALONE, PACKS_TOGETHER = 6, 10
MOST_ROUNDS = 6
ROWS_COMPOSED = 1024
"""Rows whose sizes make the steps that a rate is predicted for."""

ROWS_APART = 4096
"""Rows before the end of the first epoch at which measuring begins."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where one measurement runs."""

    name: str
    config: Config
    colocated: bool


def measure_to(config: Config, run_dir: Path, out: Path, limit_seconds: float, stop: StopRequest) -> None:
    """Measure and write the profile; progress goes to stdout, one line a setting."""
    profile = measure(config, run_dir, limit_seconds, stop, lambda text: print(text, flush=True))
    write_atomic(out, dump_profile(profile))


def measure(
    config: Config,
    run_dir: Path,
    limit_seconds: float,
    stop: StopRequest,
    tell: Callable[[str], None],
    executor: Executor | None = None,
) -> Profile:
    """See the module's page. `run_dir`: folder of weights and logs; `limit_seconds`: most time, starting included.

    `executor`: started by the caller, who will close it, for one process of each side and a reader.
    """
    began = time.monotonic()
    source = open_source(config.data.train)
    if not len(source):
        raise DataError(f"{config.data.train} has no rows: give a file that has some")
    start = max(0, len(source) - ROWS_APART)
    settings = _settings(config)
    stages: list[Measured] = []
    benches: list[Bench] = []
    for number, setting in enumerate(settings):
        left = limit_seconds - (time.monotonic() - began)
        tell(f"{number + 1}/{len(settings)} {setting.name}: starting")
        share = left / (len(settings) - number)
        bench, plan = _measure_setting(setting, run_dir, start, share, stop, tell, executor)
        stages += _stages(bench, plan, setting.colocated)
        benches.append(bench)
        start = bench.position
    together = next((bench for bench in benches if any(bench.observed.together["train"])), benches[-1])
    rows = [row for bench in benches for row in bench.rows]
    steps, compose_seconds = _steps(together, rows)
    cost = together.cost
    in_one = benches[0].observed
    inputs = together.inputs
    return Profile(
        made=Provenance(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            flowtrain=version("flowtrain"),
            python=platform.python_version(),
            torch=version("torch"),
            transformers=version("transformers"),
            device=device_name(stages[-1].device),
            cores=inputs.plan.cpus,
            config=profile_key(config),
            model=str(config.model.path),
            dtype=config.model.dtype,
            freeze=config.train.freeze,
            data=str(config.data.train),
            rows_measured=(max(0, len(source) - ROWS_APART), start - 1),
            rows_composed=(max(0, len(source) - ROWS_APART), start - 1),
            took_seconds=time.monotonic() - began,
        ),
        trainable_encoder=config.trainable_encoder,
        consumers=1,
        read_seconds=median(in_one.reads[1:] or in_one.reads),
        call_seconds=median(together.observed.calls),
        overhead_seconds=compose_seconds + median(in_one.calls) * 3 * len(steps[0]),
        stages=tuple(stages),
        steps=tuple(
            tuple(
                PackWork(
                    rows=len(pack),
                    encode=cost.real(cost.encode_cost(pack)),
                    train=cost.real(cost.pack_cost(pack)),
                )
                for pack in step
            )
            for step in steps
        ),
    )


def device_name(device: str) -> str:
    """The device as its maker calls it."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(torch.device(device))
    return cpu_name()


def _settings(config: Config) -> list[Setting]:
    """One process, and one of each side. Keys that the config sets for the sides hold where they can."""
    allocation = config.allocation.model_copy(update={"replan": "off"})
    data = config.data.model_copy(update={"eval": None, "readers": 1})
    common = config.model_copy(update={"allocation": allocation, "data": data})

    def with_sides(placement: str, threads: bool) -> Config:
        sides = {}
        for name in ("producers", "consumers"):
            side = getattr(config, name)
            update = {"num": 1, "layout": None} | ({} if threads else {"threads": None})
            sides[name] = side.model_copy(update=update)
        placed = common.allocation.model_copy(update={"placement": placement})
        return common.model_copy(update={**sides, "allocation": placed})

    return [
        Setting("one process, encoder and backbone in turn", with_sides("colocated", threads=False), True),
        Setting("one producer and one consumer, alone and both at once", with_sides("disaggregated", True), False),
    ]


def _measure_setting(
    setting: Setting,
    run_dir: Path,
    start: int,
    limit_seconds: float,
    stop: StopRequest,
    tell: Callable[[str], None],
    shared: Executor | None,
) -> tuple[Bench, Plan]:
    began = time.monotonic()
    config, shape = setting.config, read_shape(setting.config.model.path)
    with ExitStack() as stack:
        plan = make_plan(config, shape, local_inventory())
        inputs = Inputs(config, run_dir, shape, plan, open_source(config.data.train), None, None, None, None)
        spec = composition(inputs)
        cost = CostModel.from_shape(shape, config.frozen, config.cut)
        executor = shared if shared is not None and not setting.colocated else None
        executor = executor or make_executor(config, plan, None, stop, stack)
        start_stages(config, plan, executor, run_dir, None, stop)
        bench = Bench(inputs, executor, spec, cost, producer_owners(plan)[0], start, stop)
        sizes = [max(1, round(share * spec.max_tokens)) for share in SIZES]
        bench.alone(bench.step_of(2, sizes[-1]), record=False)
        num_rounds = 0
        while num_rounds < MOST_ROUNDS:
            round_began = time.monotonic()
            for size in sizes:
                bench.alone(bench.step_of(PACKS_ALONE, size))
                if not setting.colocated:
                    bench.together(bench.step_of(PACKS_TOGETHER, size))
            num_rounds += 1
            now = time.monotonic()
            if now - began + (now - round_began) > limit_seconds:
                break
        rows = len(bench.rows)
        if setting.colocated and rows < ROWS_COMPOSED:
            bench.read(ROWS_COMPOSED - rows)
        tell(f"   {num_rounds} rounds over {len(bench.rows)} rows in {time.monotonic() - began:.0f} s")
    return bench, plan


def _stages(bench: Bench, plan: Plan, colocated: bool) -> list[Measured]:
    """Curves of both sides, alone and, where it was measured, with the other side busy."""
    seen = bench.observed
    found = []
    of_sides: tuple[tuple[Role, tuple[Kind, ...], ModulePlan], ...] = (
        (Role.PRODUCER, ("encode", "backward"), plan.producers),
        (Role.CONSUMER, ("train",), plan.consumers),
    )
    for role, kinds, side in of_sides:
        rank = side.ranks[0]
        for together, by_kind in ((False, seen.alone), (True, seen.together)):
            curves = [_curve(by_kind[kind]) for kind in kinds]
            if not curves[0]:
                continue
            if together and len(curves) > 1 and not curves[1]:
                curves[1] = _curve(seen.alone["backward"])
            updates = seen.updates[role]
            found.append(
                Measured(
                    role=role.value,
                    device=rank.device,
                    threads=rank.threads,
                    together=together,
                    colocated=colocated,
                    forward=curves[0],
                    backward=curves[1] if len(curves) > 1 else (),
                    update_seconds=median(updates) if updates else 0.0,
                )
            )
    return found


def _curve(steps: Sequence[Orders]) -> tuple[Timing, ...]:
    """A point for each size of packs: of its steps, one a round, that in which orders went fastest.

    What else the machine does comes in bursts and makes a step slower, never faster.
    """
    points = []
    for number in range(len(SIZES)):
        rounds = [timing(orders) for orders in steps[number :: len(SIZES)] if orders]
        if rounds:
            points.append(min(rounds, key=lambda found: found.seconds / found.work))
    return tuple(sorted(points, key=lambda point: point.work))


def _steps(bench: Bench, rows: Sequence[SampleMeta]) -> tuple[list[list[tuple[SampleMeta, ...]]], float]:
    """Packs of the steps that a run would compose of these rows, and the seconds that a step takes to compose."""
    spec = replace(bench.spec, horizon=len(rows))
    composer = Composer(spec, bench.cost)
    composer.add([row._replace(position=position) for position, row in enumerate(rows)])
    began = time.perf_counter()
    steps = []
    while (step := composer.next()) is not None:
        steps.append([pack.samples for pack in step.packs])
    seconds = (time.perf_counter() - began) / len(steps)
    whole = steps[: max(1, len(steps) - spec.lookahead)]
    return whole, seconds
