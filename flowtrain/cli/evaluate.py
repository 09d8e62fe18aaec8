"""`flowtrain evaluate`: let a Hugging Face folder answer held-out rows, and count the exact matches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flowtrain.cli.options import Debug, JsonFile

if TYPE_CHECKING:
    from flowtrain.verify.evaluate import Score

MAX_SHOWN = 10
MAX_CELL = 60


def register(app: typer.Typer) -> None:
    app.command("evaluate", short_help="Answer held-out rows and count exact matches.")(evaluate)


def evaluate(
    export: Annotated[Path, typer.Argument(metavar="EXPORT", help="Hugging Face folder, such as RUN_DIR/export.")],
    data: Annotated[Path, typer.Option("--data", metavar="FILE", help="Held-out rows; the last turn is the answer.")],
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer in tokens.")] = 128,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first rows.")] = None,
    group_rows: Annotated[int, typer.Option("--group-rows", min=1, help="Rows answered together.")] = 32,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option("--device", help="Where to compute; auto: cuda if there.")
    ] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code from the folder.")
    ] = False,
    json_file: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Answer held-out rows by greedy generation and count exact matches."""
    from transformers.utils import logging

    from flowtrain.verify.evaluate import Answerer
    from flowtrain.verify.evaluate import evaluate as answer_all

    logging.disable_progress_bar()
    answerer = Answerer(export, device, trust_remote_code)
    with _progress() as progress:
        score = answer_all(answerer, data, max_new_tokens, limit, group_rows, progress)
    if json_file is not None:
        from flowtrain.cli.rundir import write_json

        write_json(json_file, score.to_json())
    _report(score)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal; elsewhere a line at each tenth."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task("answering", total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    told = -1

    def tell(done: int, total: int) -> None:
        nonlocal told
        if done * 10 // total > told:
            told = done * 10 // total
            print(f"answered {done} of {total} rows", file=sys.stderr, flush=True)

    yield tell


def _report(score: Score) -> None:
    """A table of some wrong answers, why rows could not be answered, and the score as the last line."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 140)
    wrong = [answer for answer in score.answers if answer.given is not None and not answer.right]
    if wrong:
        table = Table(title=f"{min(len(wrong), MAX_SHOWN)} of {len(wrong)} wrong answers", title_justify="left")
        for name in ("row", "expected", "answer"):
            table.add_column(name)
        for answer in wrong[:MAX_SHOWN]:
            table.add_row(*(Text(_short(text)) for text in (answer.id, answer.expected, answer.given or "")))
        console.print(table)
    for answer in score.unanswered[:MAX_SHOWN]:
        console.print(Text(f"not answered: {answer.reason}"), soft_wrap=True)
    total = len(score.answers)
    unanswered = f", {len(score.unanswered)} not answered" if score.unanswered else ""
    typer.echo(f"exact match {100 * score.exact_match:.2f} % ({score.num_right} of {total} rows{unanswered})")


def _short(text: str) -> str:
    flat = " ⏎ ".join(text.strip().splitlines())
    return flat if len(flat) <= MAX_CELL else flat[: MAX_CELL - 1] + "…"
