"""`flowtrain packing`: how evenly a data set or a trace of sizes loads the ranks, for policies side by side.

    CONFIG  ─▶ sizes that `flowtrain data scan` wrote, else measured now ─┐
    TRACE   ─▶ rows of the parquet file ──────────────────────────────────┴─▶ Composer, one a policy ─▶ table, picture

Nothing is trained; neither torch nor Ray is loaded, unless rows have to be measured. The room of the pool is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flowtrain.cli.options import Debug, JsonFile, Overrides
from flowtrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from flowtrain.config.schema import Config
    from flowtrain.packing import CompositionSpec, CostModel
    from flowtrain.packing.measure import Measures
    from flowtrain.types import SampleMeta, Step

DEFAULT_RANKS = 8
DEFAULT_PACKS = 4
BASELINE = "arrival"
"""Policy that is shown beside the config's."""

SLACK = 1.25
"""Cap of a trace's packs over its longest row: packs as long as one row cannot be even, whoever makes them."""

NO_POOL = 1 << 50
"""Pool bytes of a pack: more than there are."""


@dataclass(frozen=True, slots=True)
class Found:
    """Figures of a policy, and what no packing of the same rows into as many packs can beat (means over steps)."""

    measures: Measures
    bounds: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        return {**self.measures.to_dict(), "bounds": self.bounds}


@dataclass(frozen=True, slots=True)
class Subject:
    """What is looked at: rows in the run's order, the rules for them, and where both are from."""

    name: str
    rows: Sequence[SampleMeta]
    spec: CompositionSpec
    cost: CostModel
    notes: tuple[str, ...]


def register(app: typer.Typer) -> None:
    app.command("packing", short_help="Show how evenly packs load the ranks.")(packing)


def packing(
    subject: Annotated[Path, typer.Argument(metavar="CONFIG|TRACE", help="YAML file of a run, or sizes as parquet.")],
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policy", help="Policy to show; may be repeated. Default: arrival, and the config's or dynamic."
        ),
    ] = None,
    ranks: Annotated[int | None, typer.Option("--ranks", min=1, help="Consumer ranks.")] = None,
    packs: Annotated[int | None, typer.Option("--packs", min=1, help="Packs a rank and step.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="Most tokens of a pack.")] = None,
    lookahead: Annotated[int | None, typer.Option("--lookahead", min=1, help="Steps of rows to choose from.")] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to compose.")] = 20,
    order: Annotated[
        Literal["random", "blocked", "file"], typer.Option("--order", help="Order of a trace's rows.")
    ] = "random",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of a trace's order.")] = 0,
    high_resolution: Annotated[
        bool, typer.Option("--high-resolution", help="A trace's sizes by its high-resolution rule.")
    ] = False,
    model: Annotated[
        Path | None, typer.Option("--model", help="Model folder whose FLOPs are a trace's costs; default: a 7B model.")
    ] = None,
    overrides: Overrides = None,
    picture: Annotated[Path | None, typer.Option("--picture", metavar="FILE.png", help="Write the picture.")] = None,
    json_file: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Compose steps by each policy; show fill, imbalance against its lower bound, waits and the load of each pack."""
    from flowtrain.cli.packing_picture import show_picture, write_picture
    from flowtrain.packing import POLICIES

    for name in policies or ():
        if name not in POLICIES:
            raise ConfigError(f"--policy {name}: there is none of this name; choose from {', '.join(POLICIES)}")
    changes = {"step_packs": packs, "max_tokens": max_tokens, "lookahead": lookahead}
    if subject.suffix in (".yaml", ".yml"):
        given = _of_config(subject, overrides, ranks, steps, changes)
    else:
        given = _of_trace(subject, ranks or DEFAULT_RANKS, changes, order, seed, model, high_resolution)
    own = given.spec.policy if given.spec.policy != BASELINE else "dynamic"
    names = list(dict.fromkeys(policies or (BASELINE, own)))
    made = {name: compose(given, name, steps) for name in names}
    if not all(made.values()):
        raise DataError(
            f"{subject}: none of its {len(given.rows)} rows fits a pack by packing.max_patches "
            f"({given.spec.max_patches}), packing.max_images ({given.spec.max_images}) and "
            f"packing.max_trained_tokens ({given.spec.max_trained_tokens}): raise them"
        )
    found = {name: _figures(made[name], given, name) for name in names}
    for note in given.notes:
        typer.echo(f"note: {note}", err=True)
    _print(given, found)
    shown = [(name, made[name]) for name in names[:2]]
    show_picture(shown)
    if picture is not None:
        write_picture(picture, shown, given.name)
        typer.echo(f"picture: {picture}")
    if json_file is not None:
        _write_json(json_file, given, found)


# --- what is looked at ------------------------------------------------------------------------------------------------


def _changed(spec: CompositionSpec, ranks: int, changes: dict[str, int | None]) -> CompositionSpec:
    """The same over so many ranks, by what the command line says otherwise."""
    asked: dict[str, Any] = {key: value for key, value in changes.items() if value is not None}
    asked |= {"num_consumers": ranks} | ({"num_producers": ranks} if spec.colocated else {})
    if "step_packs" in asked:
        asked["step_samples"] = None
    return replace(spec, **asked)


def _of_trace(
    path: Path,
    ranks: int,
    changes: dict[str, int | None],
    order: Literal["random", "blocked", "file"],
    seed: int,
    model: Path | None,
    high_resolution: bool,
) -> Subject:
    from flowtrain.config.schema import PackingConfig, StepSize
    from flowtrain.packing import CompositionSpec, CostModel
    from flowtrain.packing.cost import reference_pairs
    from flowtrain.packing.trace import in_order
    from flowtrain.plan import Layout
    from flowtrain.shapes import read_shape
    from flowtrain.sizes import read_trace
    from flowtrain.types import Cut

    if not path.is_file():
        what = "is no file" if path.exists() else "does not exist"
        raise ConfigError(f"{path} {what}: give a config (.yaml) or a trace of row sizes (.parquet)")
    shape = read_shape(model) if model else None
    pairs = shape.vision.attended_pairs if shape else reference_pairs
    rows = in_order(*read_trace(path, high_resolution, pairs=pairs), order=order, seed=seed)
    if not rows:
        raise DataError(f"{path} has no rows: give a file that has some")
    longest = max(row.tokens for row in rows)
    cap = changes["max_tokens"] or -(-int(SLACK * longest) // 1024) * 1024
    usable, notes = _within(rows, cap)
    cost = CostModel.from_shape(shape, frozenset(), Cut.AFTER_PROJECTOR) if shape else CostModel.reference()
    if shape is None:
        notes = (*notes, "costs are those of a 7B model that trains whole; --model FOLDER takes another's")
    spec = CompositionSpec.of(
        PackingConfig(max_tokens=cap),
        "dynamic",
        StepSize(packs=DEFAULT_PACKS),
        consumers=Layout(),
        producers=Layout(),
        colocated=False,
        trainable_encoder=True,
        max_unit_patches=4096,
        max_pack_vision_bytes=NO_POOL,
        block_bytes=lambda tokens, patches: tokens,
        num_rows=len(usable),
        horizon=len(usable),
    )
    return Subject(path.name, usable, _changed(spec, ranks, changes), cost, notes)


def _of_config(
    path: Path, overrides: list[str] | None, ranks: int | None, steps: int, changes: dict[str, int | None]
) -> Subject:
    from flowtrain.allocator.bound import given_layout
    from flowtrain.config.loading import load_config
    from flowtrain.packing import CompositionSpec, CostModel
    from flowtrain.plan import Layout
    from flowtrain.shapes import read_shape
    from flowtrain.types import Role

    config = load_config(path, overrides or []).config
    cost = CostModel.from_shape(
        read_shape(config.model.path), config.frozen, config.cut, config.packing.attention_efficiency
    )
    consumers, producers = (given_layout(config, role) for role in (Role.CONSUMER, Role.PRODUCER))
    ranks = ranks or (consumers.dp_degree if consumers else DEFAULT_RANKS)
    spec = CompositionSpec.of(
        config.packing,
        config.packing_policy,
        config.train.step,
        consumers=consumers or Layout(),
        producers=producers or Layout(),
        colocated=config.placement == "colocated",
        trainable_encoder=config.trainable_encoder,
        max_unit_patches=config.producers.max_unit_patches,
        max_pack_vision_bytes=NO_POOL,
        block_bytes=lambda tokens, patches: tokens,
        num_rows=1,
        horizon=1,
    )
    spec = _changed(spec, ranks, changes)
    ahead = steps + max(spec.lookahead, spec.max_wait_steps)
    wanted = ahead * (spec.step_samples or (spec.step_packs or 1) * ranks * max(1, spec.max_tokens // 64))
    rows, notes = _rows_of(config, wanted)
    packing = config.packing.model_copy(update={"max_tokens": spec.max_tokens})
    usable, more = _within(rows, packing.longest_row(config.data.max_seq_len))
    if not usable:
        raise DataError(f"{config.data.train} has no usable row: run `flowtrain data check`")
    spec = replace(spec, num_rows=len(usable), horizon=len(usable))
    return Subject(path.name, usable, spec, cost, (*notes, *more))


def _rows_of(config: Config, wanted: int) -> tuple[list[SampleMeta], tuple[str, ...]]:
    """Rows of the training data in the run's order: from the sizes that a scan wrote, else the first ones, measured."""
    from flowtrain.data.order import Order
    from flowtrain.shapes import read_shape
    from flowtrain.sizes import read_sizes, sizes_file
    from flowtrain.types import SampleMeta, SkippedRow

    data = config.data.train
    sizes = sizes_file(data)
    if sizes.is_file():
        known = read_sizes(sizes, pairs=read_shape(config.model.path).vision.attended_pairs)
        found = list(islice(Order.of(config, len(known)).rows(known), len(known)))
        notes: tuple[str, ...] = (f"sizes of {sizes}",)
        if sizes.stat().st_mtime < data.stat().st_mtime:
            notes = (f"{sizes} is older than the data: run `flowtrain data scan` again",)
    else:
        from flowtrain.data.survey import open_builder
        from flowtrain.types import Phase

        builder = open_builder(config, Phase.TRAIN)
        order = Order.of(config, len(builder.source))
        count = min(wanted, len(builder.source))
        built = [builder.build(position, order.row(position), 0, 0) for position in range(count)]
        found = [made if isinstance(made, SkippedRow) else made[0] for made in built]
        notes = (f"the first {count} rows were measured now: `flowtrain data scan` keeps the sizes of all",)
    rows = [row for row in found if isinstance(row, SampleMeta)]
    num_skipped = len(found) - len(rows)
    if num_skipped:
        notes = (*notes, f"{num_skipped} rows cannot be used: run `flowtrain data check`")
    return [row._replace(position=position) for position, row in enumerate(rows)], notes


def _within(rows: Sequence[SampleMeta], cap: int) -> tuple[list[SampleMeta], tuple[str, ...]]:
    """Rows that a pack can hold, numbered anew."""
    kept = [row for row in rows if row.tokens <= cap]
    if rows and not kept:
        shortest = min(row.tokens for row in rows)
        raise DataError(
            f"none of the {len(rows)} rows fits a pack of {cap} tokens, the shortest has {shortest}: "
            f"raise --max-tokens or packing.max_tokens"
        )
    notes = (f"{len(rows) - len(kept)} rows of more than {cap} tokens are left out",) if len(kept) < len(rows) else ()
    return [row._replace(position=position) for position, row in enumerate(kept)], notes


# --- steps and their figures ------------------------------------------------------------------------------------------


def compose(subject: Subject, policy: str, num_steps: int) -> list[Step]:
    """The first steps of the rows by this policy."""
    from flowtrain.packing.trace import composed_steps

    spec = replace(subject.spec, policy=policy)
    return list(islice(composed_steps(spec, subject.cost, subject.rows), num_steps))


def _figures(steps: list[Step], subject: Subject, policy: str) -> Found:
    from flowtrain.packing.measure import measure

    # The end of the rows leaves a step short: it says nothing of the policy.
    whole = steps[:-1] if len(steps) > 1 and steps[-1].state["cursor"] >= len(subject.rows) else steps
    found = measure(whole, replace(subject.spec, policy=policy), cost=subject.cost)
    bounds = {
        "step": fmean(_step_bound(step, subject) for step in whole),
        "lock_step": found.lock_step_bound,
        "microbatch": found.microbatch_bound,
        "packs_per_rank": fmean(_fewest_packs(step, subject) for step in whole),
    }
    return Found(found, bounds)


def _step_bound(step: Step, subject: Subject) -> float:
    """Least largest / mean rank: rows on ranks, however they are packed."""
    from flowtrain.packing.bounds import dearest_pack

    ranks, costs = subject.spec.num_consumers, [subject.cost.sample_cost(sample) for sample in step.samples]
    return dearest_pack(costs, ranks) * ranks / sum(costs)


def _fewest_packs(step: Step, subject: Subject) -> int:
    """Least packs of a rank that hold the rows of the step."""
    from flowtrain.packing.bounds import fewest_packs

    cap = subject.spec.max_tokens
    return -(-fewest_packs([min(sample.tokens, cap) for sample in step.samples], cap) // subject.spec.num_consumers)


def _print(subject: Subject, found: dict[str, Found]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    spec = subject.spec
    size = f"{spec.step_samples} rows" if spec.step_samples is not None else f"{spec.step_packs} packs a rank"
    console = Console(highlight=False, markup=False)
    title = f"{subject.name}: {len(subject.rows)} rows, {spec.num_consumers} ranks, steps of {size}"
    console.print(
        Text(f"{title}, packs of at most {spec.max_tokens} tokens, look-ahead {spec.lookahead}"), soft_wrap=True
    )
    table = Table("max / mean load; bound; worst", *found)
    for label, value in (
        ("of ranks, a step", "step"),
        ("of ranks, slot by slot", "lock_step"),
        ("of packs", "microbatch"),
    ):
        cells = []
        for f in found.values():
            worst = getattr(f.measures, f"worst_{value}")
            cells.append(f"{getattr(f.measures, value):.4f}; {f.bounds[value]:.4f}; {worst:.3f}")
        table.add_row(label, *cells)
    measures = [f.measures for f in found.values()]
    if spec.num_producers > 1:
        table.add_row("of producers", *(f"{m.encode_imbalance:.4f}" for m in measures))
    table.add_section()
    table.add_row("fill", *(f"{100 * m.fill:.1f} %" for m in measures))
    packs = (f"{f.measures.packs_per_rank:.2f}; {f.bounds['packs_per_rank']:.2f}" for f in found.values())
    table.add_row("packs a rank; lower bound", *packs)
    table.add_row("steps that a row waits", *(f"{m.mean_wait:.2f}, at most {m.longest_wait}" for m in measures))
    table.add_row("steps", *(str(m.steps) for m in measures))
    console.print(table)


def _write_json(path: Path, subject: Subject, found: dict[str, Found]) -> None:
    from flowtrain.cli.rundir import write_json

    result = {
        "name": subject.name,
        "rows": len(subject.rows),
        "notes": list(subject.notes),
        "composition": subject.spec.to_dict(),
        "cost": subject.cost.to_dict(),
        "policies": {name: figures.to_dict() for name, figures in found.items()},
    }
    write_json(path, result)
