"""A comparison as a person reads it: largest difference of each quantity and module by step, then the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from flowtrain.verify.compare import Check
from flowtrain.verify.run import Outcome

MAX_STEP_COLUMNS = 5


def print_outcome(outcome: Outcome, console: Console) -> None:
    """Table, notes of what failed, and the verdict when it is good (a bad one is the caller's last line on stderr)."""
    console.print(table(outcome.checks, outcome.dtype))
    noted = [check for check in outcome.checks if not check.ok and check.note]
    for check in noted[:8]:
        console.print(f"  step {check.step}, {check.name}: {check.note}", highlight=False)
    if outcome.verdict.ok:
        console.print(outcome.verdict.sentence, style="bold green", highlight=False, soft_wrap=True)


def table(checks: Sequence[Check], dtype: str) -> Table:
    """One row a quantity and module, a column for each of the first and last steps, the largest value, its limit."""
    by_name: dict[str, dict[int, Check]] = {}
    for check in checks:
        by_name.setdefault(check.name, {})[check.step] = check
    steps = sorted({check.step for check in checks})
    shown = steps if len(steps) <= MAX_STEP_COLUMNS else [*steps[: MAX_STEP_COLUMNS - 1], steps[-1]]
    result = Table(title=f"difference of the run from the reference, {dtype}", title_justify="left")
    result.add_column("quantity", no_wrap=True)
    for step in shown:
        result.add_column(f"step {step}", justify="right", no_wrap=True)
    for name in ("largest", "limit", ""):
        result.add_column(name, justify="right", no_wrap=True)
    for name, of_steps in sorted(by_name.items(), key=lambda entry: _order(entry[1])):
        cells = [_cell(of_steps[step]) if step in of_steps else "-" for step in shown]
        worst = max(check.shown for check in of_steps.values())
        limits = max(check.limit for check in of_steps.values())
        ok = all(check.ok for check in of_steps.values())
        mark = "[green]ok[/green]" if ok else "[red]FAIL[/red]"
        result.add_row(name, *cells, f"{worst:.1e}", f"{limits:.0e}" if limits else "0", mark)
    return result


def _order(of_steps: dict[int, Check]) -> tuple[int, str]:
    check = next(iter(of_steps.values()))
    return check.quantity, check.name


def _cell(check: Check) -> str:
    text = f"{check.shown:.1e}" if check.shown else "0"
    return text if check.ok else f"[red]{text}[/red]"
