"""`flowtrain simulate`: a run on devices that need not be here, played event by event.

    CONFIG | MODEL_DIR ─▶ the mode's policy ─▶ plan ┐
    PLAN (of `flowtrain plan --out`) ───────────────┴─▶ Simulation over rows of --trace ─▶ table, picture, --json

Nothing is trained; neither torch nor Ray is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowtrain.cli.options import (
    ComputeDtype,
    Debug,
    DevicesPerNode,
    Freeze,
    JsonFile,
    Nodes,
    Overrides,
    PackTokens,
    Policy,
    StepSamples,
)
from flowtrain.errors import ConfigError, DataError, PlanError

if TYPE_CHECKING:
    from flowtrain.allocator.problem import Question
    from flowtrain.data.order import Order
    from flowtrain.simulator import Disturbances, Outcome
    from flowtrain.simulator.planned import Options, Planned
    from flowtrain.types import SampleMeta, SkippedRow

PICTURE_RANKS = 8
PICTURE_STEPS = 3
VARIANTS = ("half as many images", "half as many again", "jitter 0.1", "jitter 0.3", "three failures", "ten failures")
"""What `--sensitivity` plays beside the run itself, on the same plan."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is played: the plan as a simulation, and the rows of a run with their order.

    Attributes:
        sizes: rows as the scan or trace has them; `rows` are the same as the run finds them (`Planned.judged`).
    """

    name: str
    layouts: str
    planned: Planned
    sizes: Sequence[SampleMeta | SkippedRow]
    rows: Sequence[SampleMeta | SkippedRow]
    order: Order
    disturbances: Disturbances


def register(app: typer.Typer) -> None:
    app.command("simulate", short_help="Play a run on devices that need not be here.")(simulate)


def simulate(
    source: Annotated[
        Path, typer.Argument(metavar="CONFIG|MODEL_DIR|PLAN", help="A run's YAML, a model folder, or a plan file.")
    ],
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Row sizes: a scan or a trace; default: the scan.")
    ] = None,
    nodes: Nodes = None,
    devices_per_node: DevicesPerNode = None,
    device: Annotated[
        list[str] | None, typer.Option("--device", metavar="NAME[:NODES]", help="As for `flowtrain plan`.")
    ] = None,
    mode: Annotated[
        str | None, typer.Option("--mode", help="flow, disaggregated or monolithic; default: the config's, or flow.")
    ] = None,
    exchange: Annotated[str | None, typer.Option("--exchange", help="pool, barrier_pipeline or barrier_step.")] = None,
    policy: Policy = None,
    composition: Annotated[str | None, typer.Option("--packing", metavar="NAME", help="Packing policy.")] = None,
    placement: Annotated[str | None, typer.Option("--placement", help="auto, colocated or disaggregated.")] = None,
    freeze: Freeze = None,
    step_samples: StepSamples = None,
    pack_tokens: PackTokens = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to play.")] = 20,
    segment_bytes: Annotated[
        int | None, typer.Option("--segment-bytes", min=1, help="Pool bytes of a producer; default: what launch asks.")
    ] = None,
    jitter: Annotated[float, typer.Option("--jitter", min=0, help="Spread of all seconds (log-normal).")] = 0.0,
    stragglers: Annotated[float, typer.Option("--stragglers", min=0, max=1, help="Share of slow ranks.")] = 0.0,
    slowdown: Annotated[float, typer.Option("--slowdown", min=1, help="How much longer slow ranks take.")] = 1.5,
    device_hours: Annotated[
        float | None, typer.Option("--device-hours", min=1e-6, help="Mean hours between failures of a device.")
    ] = None,
    restart_seconds: Annotated[float, typer.Option("--restart-seconds", min=0, help="From failure to start.")] = 120.0,
    dtype: ComputeDtype = None,
    save_every: Annotated[
        int | None, typer.Option("--save-every", min=1, help="Steps between checkpoints; default: the config's.")
    ] = None,
    save_seconds: Annotated[float, typer.Option("--save-seconds", min=0, help="For which a checkpoint stops.")] = 10.0,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", min=0, help="Of the order of rows and of all that is drawn; default: the config's, or 0."
        ),
    ] = None,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Also play it with other images, jitter, failures.")
    ] = False,
    overrides: Overrides = None,
    picture: Annotated[Path | None, typer.Option("--picture", metavar="FILE.png", help="Write the timeline.")] = None,
    json_file: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Play a run on devices that need not be here: throughput, MFU, who waits for whom, and a timeline."""
    from flowtrain.cli.simulate_report import print_outcome, show_timeline, write_result, write_timeline
    from flowtrain.simulator import Disturbances
    from flowtrain.simulator.planned import Options

    axes = {"mode": mode, "exchange": exchange, "policy": policy, "composition": composition, "placement": placement}
    axes["dtype"] = dtype
    options = Options(segment_bytes=segment_bytes, save_every=save_every, save_seconds=save_seconds)
    disturbances = Disturbances(jitter, stragglers, slowdown, device_hours, restart_seconds)
    devices = (device, nodes, devices_per_node)
    subject = _subject(
        source, trace, devices, axes, (freeze or [], step_samples, pack_tokens), overrides, options, disturbances, seed
    )
    outcome = play(subject, steps)
    effects = dict(_effects(subject, outcome)) if sensitivity else {}
    print_outcome(subject, outcome, effects)
    show_timeline(outcome)
    if picture is not None:
        write_timeline(picture, outcome, subject.name)
        typer.echo(f"picture: {picture}")
    if json_file is not None:
        write_result(json_file, subject, outcome, effects)


def play(subject: Subject, num_steps: int) -> Outcome:
    """The outcome; a line of progress on a terminal."""
    import sys

    from flowtrain.simulator import Simulation
    from flowtrain.simulator.simulation import Shown

    planned = subject.planned
    shown = Shown(PICTURE_RANKS, PICTURE_STEPS)
    steps = planned.steps(subject.rows, subject.order)
    run = Simulation(planned.system, planned.timing, steps, subject.disturbances, shown)
    tell = sys.stderr.isatty()
    for step in run.play(num_steps):
        if tell:
            print(f"\rstep {step} of {num_steps}", end="", file=sys.stderr, flush=True)
    if tell:
        print("\r" + " " * 40 + "\r", end="", file=sys.stderr, flush=True)
    return run.outcome()


def _effects(subject: Subject, outcome: Outcome) -> Iterator[tuple[str, float]]:
    """Percent of samples/s gained by each of `VARIANTS`; failures are as many as are expected within the run."""
    from flowtrain.simulator.disturbances import HOUR
    from flowtrain.simulator.planned import with_images

    before = outcome.figures()["samples_per_second"]
    hours = outcome.seconds * subject.planned.system.num_devices / HOUR
    calm, judged = subject.disturbances, subject.planned.judged
    changes: dict[str, dict[str, Any]] = {
        "half as many images": {"rows": judged(with_images(subject.sizes, 0.5))},
        "half as many again": {"rows": judged(with_images(subject.sizes, 1.5))},
        "jitter 0.1": {"disturbances": replace(calm, jitter=0.1)},
        "jitter 0.3": {"disturbances": replace(calm, jitter=0.3)},
        "three failures": {"disturbances": replace(calm, device_hours=hours / 3)},
        "ten failures": {"disturbances": replace(calm, device_hours=hours / 10)},
    }
    assert tuple(changes) == VARIANTS
    for name, change in changes.items():
        found = play(replace(subject, **change), len(outcome.steps))
        yield name, 100.0 * (found.figures()["samples_per_second"] / before - 1.0)


# --- what is played ---------------------------------------------------------------------------------------------------


def _subject(
    source: Path,
    trace: Path | None,
    devices: tuple[list[str] | None, int | None, int | None],
    axes: dict[str, str | None],
    folder: tuple[list[str], int | None, list[int] | None],
    overrides: list[str] | None,
    options: Options,
    disturbances: Disturbances,
    seed: int | None,
) -> Subject:
    """Flags are laid over the keys of a config; a model folder has what a config has by default."""
    from flowtrain.allocator.candidates import WHOLE
    from flowtrain.allocator.footprint import device_bytes
    from flowtrain.allocator.policies import POLICIES
    from flowtrain.allocator.refuse import refusal
    from flowtrain.cli.plan import DEFAULT_DEVICE
    from flowtrain.cli.question import cluster_of, placements_of, question_for, read_config
    from flowtrain.cli.simulate_plan import plan_in, planned_choices
    from flowtrain.config.modes import MODES
    from flowtrain.data.order import Order
    from flowtrain.plan import layout_text
    from flowtrain.simulator.planned import planned

    written = plan_in(source)
    origin = source if written is None else written.model
    config = None if origin.is_dir() else read_config(origin, overrides)
    if config is not None and axes["mode"] in MODES:
        config = config.model_copy(update={"mode": axes["mode"]})
    freeze, step_samples, pack_tokens = folder
    if config is not None and (freeze or step_samples or pack_tokens):
        raise ConfigError("--freeze, --step-samples and --pack-tokens are for a model folder: use --set with a config")
    names, nodes, per_node = devices
    if written is not None:
        if names or nodes or per_node or axes["policy"] or axes["placement"]:
            raise ConfigError("the devices are those of the plan: leave out --device, --nodes, --policy, --placement")
        names, per_node = written.devices, None
        step_samples = step_samples or (None if config else written.step_samples)
    cluster = cluster_of(names or [DEFAULT_DEVICE], nodes, per_node)
    sizes = trace or _scan(config)
    question, _ = question_for(config, origin, sizes, cluster, freeze, step_samples, pack_tokens)
    name = axes["mode"] or (config.mode if config else "flow")
    mode = {str(known): row for known, row in MODES.items()}.get(name)
    if mode is None:
        raise ConfigError(f"--mode {name}: choose among {', '.join(MODES)}")
    placement = axes["placement"] or (mode.placement if config is None else None)
    dtype = axes["dtype"] or question.dtype
    question = replace(question, dtype=dtype, placements=placements_of(placement, question))
    exchange = axes["exchange"] or (config.exchange if config else mode.exchange)
    composition = axes["composition"] or (config.packing_policy if config else mode.composition)
    _check_names(exchange, composition)
    options = replace(options, exchange=exchange, composition=composition)
    if config is not None:
        options = replace(
            options,
            prefill=config.pool.prefill,
            packing=config.packing,
            step=config.train.step if config.train.step.packs else None,
            max_seq_len=config.data.max_seq_len,
            max_unit_patches=config.producers.max_unit_patches,
            save_every=options.save_every or config.checkpoint.every,
        )
    problem = question.problem()
    policy = axes["policy"] or (config.policy if config else mode.allocation)
    if policy not in POLICIES:
        raise ConfigError(f"--policy {policy}: choose among {', '.join(POLICIES)}")
    if written is not None:
        choices = planned_choices(written, problem)
    else:
        found = POLICIES[policy](problem, device_bytes, WHOLE)
        if found is None:
            raise PlanError(refusal(problem, device_bytes, WHOLE))
        choices = list(found.choices)
    made = planned(question, problem.job, choices, options)
    layouts = ", ".join(f"{choice.load.name} {layout_text(choice.candidate.layout)}" for choice in choices)
    there = " + ".join(f"{pool.num_nodes} x {pool.node.devices} {pool.node.name}" for pool in cluster)
    known = _known(sizes, question)
    order = Order(len(known), seed=0) if config is None else Order.of(config, len(known))
    order = order if seed is None else replace(order, seed=seed)
    rows = made.judged(known)
    if config is not None and config.packing.on_long_row == "error":
        _check_lengths(made, rows)
    made = replace(made, notes=(*made.notes, *_left_out(rows)))
    disturbances = replace(disturbances, seed=order.seed)
    return Subject(f"{origin.name or origin} on {there}, {name}", layouts, made, known, rows, order, disturbances)


def _scan(config: Any) -> Path:
    """The sizes that a scan has written beside the config's rows."""
    from flowtrain.sizes import sizes_file

    found = sizes_file(config.data.train) if config is not None else None
    if found is None or not found.is_file():
        raise ConfigError("there are no sizes of rows: give --trace FILE, or run `flowtrain data scan` on the config")
    return found


def _known(sizes: Path, question: Question) -> Sequence[SampleMeta | SkippedRow]:
    """Rows in the order of the file; those of a trace have the patches that the model would have for their tokens."""
    from flowtrain.allocator.stats import TRAINED_SHARE
    from flowtrain.simulator.planned import with_patches
    from flowtrain.sizes import read_sizes, read_trace
    from flowtrain.types import SampleMeta

    found: Sequence[SampleMeta | SkippedRow]
    if sizes.suffix == ".parquet":
        found = with_patches(read_trace(sizes, trained_share=TRAINED_SHARE)[0], question.shape)
    else:
        found = read_sizes(sizes, pairs=question.shape.vision.attended_pairs)
    if not any(isinstance(row, SampleMeta) for row in found):
        raise DataError(f"{sizes} has no row with sizes: give what `flowtrain data scan` writes, or a trace")
    return found


def _left_out(rows: Sequence[SampleMeta | SkippedRow]) -> Iterator[str]:
    """A note of rows that a run would skip, as long as others are left."""
    from flowtrain.simulator.planned import skipped_reasons

    if found := skipped_reasons(rows):
        counts = ", ".join(f"{count} {reason}" for reason, count in found.most_common())
        yield f"{found.total()} of {len(rows)} rows are left out, as a run would skip them: {counts}"


def _check_lengths(planned: Planned, rows: Sequence[SampleMeta | SkippedRow]) -> None:
    """Where `packing.on_long_row` is `error`."""
    from flowtrain.types import SkippedRow

    long = [row for row in rows if isinstance(row, SkippedRow) and row.reason == "too-long"]
    if long:
        first = min(long, key=lambda row: row.row)
        raise DataError(
            f"{len(long)} of {len(rows)} rows have more than {planned.longest_row} tokens, the first is {first.id}, "
            f"and a run would stop there: raise packing.max_tokens, or set packing.on_long_row"
        )


def _check_names(exchange: str, composition: str) -> None:
    from flowtrain.packing import POLICIES
    from flowtrain.runtime.exchange import EXCHANGES

    for option, name, known in (("--exchange", exchange, EXCHANGES), ("--packing", composition, POLICIES)):
        if name not in known:
            raise ConfigError(f"{option} {name}: choose among {', '.join(known)}")
