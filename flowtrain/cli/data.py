"""`flowtrain data`: look at rows before training on them.

| command | answers |
|---|---|
| `show` | what does the model see of this row, and what is trained |
| `check` | which rows cannot be used, and why |
| `scan` | how long are the rows; writes their sizes for planning |
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowtrain.cli.options import ConfigFile, Debug, JsonFile, Overrides
from flowtrain.errors import DataError
from flowtrain.types import Phase, SampleMeta, SkippedRow

if TYPE_CHECKING:
    from rich.console import Console

    from flowtrain.config.schema import Config
    from flowtrain.data.survey import Survey

Split = Annotated[Phase, typer.Option("--split", help="Training or held-out rows.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Look at the rows: show, check and scan.", no_args_is_help=True, rich_markup_mode=None)
    group.command(short_help="Show rows as the model sees them.")(show)
    group.command(short_help="Read every row and count what cannot be used.")(check)
    group.command(short_help="Write the size of every row, for planning.")(scan)
    app.add_typer(group, name="data")


def show(
    config_path: ConfigFile,
    row: Annotated[
        str, typer.Option("--row", metavar="N|ID", help="Number of the first row (from 0), or an id.")
    ] = "0",
    count: Annotated[int, typer.Option("--count", min=1, help="Rows to show.")] = 1,
    split: Split = Phase.TRAIN,
    overrides: Overrides = None,
    json_file: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Show rows as the model sees them: text with the trained tokens marked, pictures, token counts."""
    from flowtrain.cli.data_row import find_row, show_row
    from flowtrain.data.survey import open_builder

    builder = open_builder(_load(config_path, overrides), split)
    first = find_row(builder, row)
    console = _console()
    shown = [show_row(builder, number, console) for number in range(first, min(first + count, len(builder.source)))]
    _write_json(json_file, shown)


def check(
    config_path: ConfigFile, overrides: Overrides = None, json_file: JsonFile = None, debug: Debug = False
) -> None:
    """Read and decode every training and held-out row; count what cannot be used, and say what to change."""
    from flowtrain.data.survey import Survey, open_builder, survey_rows

    config = _load(config_path, overrides)
    console = _console()
    surveys: dict[str, Survey] = {}
    measure = None
    for phase, path in ((Phase.TRAIN, config.data.train), (Phase.EVAL, config.data.eval)):
        if path is None:
            continue
        builder = open_builder(config, phase, measure)
        measure = builder.measure
        survey = surveys[phase.value] = Survey()
        for found in _progress(survey_rows(builder, decode=True), len(builder.source), f"checking {path.name}"):
            survey.add(found)
        _print_survey(console, f"{phase.value} ({path})", survey)
    _write_json(json_file, {name: survey.to_dict() for name, survey in surveys.items()})
    _judge(config, surveys)


def scan(
    config_path: ConfigFile,
    out: Annotated[Path | None, typer.Option("--out", help="File to write; default: <data>.sizes.jsonl.")] = None,
    split: Split = Phase.TRAIN,
    overrides: Overrides = None,
    json_file: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Measure every row from its text and image headers, and write the sizes as JSON lines for planning."""
    from flowtrain.data.survey import Survey, open_builder, survey_rows
    from flowtrain.sizes import row_sizes, sizes_file

    config = _load(config_path, overrides)
    builder = open_builder(config, split)
    path = builder.source.path
    out = out or sizes_file(path)
    survey, kept = Survey(), []
    aside = out.with_name(f"{out.name}.part")
    try:
        with aside.open("w") as file:
            for found in _progress(survey_rows(builder, decode=False), len(builder.source), f"measuring {path.name}"):
                survey.add(found)
                file.write(json.dumps(row_sizes(found)) + "\n")
                if isinstance(found, SampleMeta):
                    kept.append(found)
        aside.replace(out)
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror or error}; choose another file by --out") from error
    finally:
        aside.unlink(missing_ok=True)
    console = _console()
    _print_survey(console, f"{split.value} ({path})", survey)
    sizes = _percentiles(kept)
    _print_percentiles(console, sizes)
    console.print(f"sizes of {survey.rows} rows: {out}", soft_wrap=True)
    _write_json(json_file, {"file": str(out), **survey.to_dict(), "percentiles": sizes})
    if survey.rows and not survey.usable:
        raise DataError(f"none of the {survey.rows} rows of {path} can be used: run `flowtrain data check`")


# --- check and scan ---------------------------------------------------------------------------------------------------


def _print_survey(console: Console, title: str, survey: Survey) -> None:
    from rich.table import Table
    from rich.text import Text

    from flowtrain.data.errors import ADVICE

    console.print(
        Text(
            f"{title}: {survey.rows} rows, {survey.usable} can be used; {survey.images} images; tokens: "
            f"{survey.text_tokens} text, {survey.vision_tokens} image, {survey.trained_tokens} trained"
        ),
        soft_wrap=True,
    )
    if not survey.reasons:
        return
    table = Table("reason", "rows", "first rows", "what to change")
    for reason, count in sorted(survey.reasons.items(), key=lambda pair: (-pair[1], pair[0])):
        ids = ", ".join(row_id for row_id, _ in survey.examples[reason])
        table.add_row(reason, str(count), Text(ids), Text(ADVICE[reason]))
    console.print(table)
    for reason, examples in sorted(survey.examples.items()):
        row_id, detail = examples[0]
        console.print(Text(f"{reason}, row {row_id}: {detail}"), soft_wrap=True)


def _judge(config: Config, surveys: dict[str, Survey]) -> None:
    """DataError (exit 3) where a run would stop: nothing to train, or a bad row under `on_bad_sample: error`."""
    train = surveys[Phase.TRAIN.value]
    if not train.usable:
        raise DataError(f"none of the {train.rows} rows of {config.data.train} can be used: repair them as told above")
    for name, survey in surveys.items():
        num_long = survey.reasons.get("too-long", 0)
        for key, policy, num_stopping in (
            ("data.on_bad_sample", config.data.on_bad_sample, survey.bad - num_long),
            ("packing.on_long_row", config.packing.on_long_row, num_long),
        ):
            if policy == "error" and num_stopping:
                raise DataError(
                    f"{num_stopping} of the {survey.rows} {name} rows cannot be used: repair them, or set {key}: skip"
                )


def _percentiles(samples: list[SampleMeta]) -> dict[str, dict[str, int]]:
    from flowtrain.data.survey import percentile

    columns = {
        "tokens": [sample.tokens for sample in samples],
        "text_tokens": [sample.text_tokens for sample in samples],
        "vision_tokens": [sample.vision_tokens for sample in samples],
        "trained_tokens": [sample.trained_tokens for sample in samples],
        "images": [len(sample.images) for sample in samples],
        "patches": [sample.patches for sample in samples],
    }
    shares = {"p1": 0.01, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {
        name: {key: percentile(sorted(values), share) for key, share in shares.items()} if values else {}
        for name, values in columns.items()
    }


def _print_percentiles(console: Console, sizes: dict[str, dict[str, int]]) -> None:
    from rich.table import Table

    names = next(iter(sizes.values()))
    if not names:
        return
    table = Table("a row", *names)
    for name, values in sizes.items():
        table.add_row(name.replace("_", " "), *(str(value) for value in values.values()))
    console.print(table)


# --- shared -----------------------------------------------------------------------------------------------------------


def _load(path: Path, overrides: list[str] | None) -> Config:
    from flowtrain.config.loading import load_config

    return load_config(path, overrides or []).config


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, markup=False)


def _progress(rows: Iterable[SampleMeta | SkippedRow], total: int, title: str) -> Iterator[SampleMeta | SkippedRow]:
    """A progress bar on stderr, on a terminal only."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    yield from track(rows, description=title, total=total, console=console, disable=not console.is_terminal)


def _write_json(path: Path | None, result: object) -> None:
    if path is None:
        return
    from flowtrain.cli.rundir import write_json

    write_json(path, result)
