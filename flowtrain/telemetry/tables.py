"""The tables printed at start: what trains, where it runs, and one row as the model sees it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from flowtrain.plan import Plan, RankPlan
from flowtrain.types import Module

WIDTH = 100


@dataclass(frozen=True, slots=True)
class ParameterRow:
    """Parameters of one module that share trainability and dtype; `bytes` of the parameters alone."""

    module: Module
    trainable: bool
    count: int
    bytes: int
    dtype: str


def format_count(number: float) -> str:
    """`1234567` as `1.23 M`."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.2f} {unit}"
    return f"{number:g}"


def format_bytes(num_bytes: float) -> str:
    """`1572864` as `1.5 MiB`."""
    for exponent, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**exponent:
            return f"{num_bytes / 1024**exponent:.1f} {unit}"
    return f"{num_bytes:g} B"


def startup_tables(parameters: Sequence[ParameterRow], plan: Plan, sample_text: str | None) -> str:
    """Three tables as plain text: parameters per module, processes, and one decoded sample (none when None)."""
    target = io.StringIO()
    console = Console(file=target, width=WIDTH, color_system=None, highlight=False, markup=False, emoji=False)
    console.print(_parameter_table(parameters))
    console.print(_process_table(plan))
    if sample_text is not None:
        console.print(Panel(Text(sample_text), title="one sample; ⟦ ⟧ marks what is trained", width=WIDTH))
    return "\n".join(line.rstrip() for line in target.getvalue().splitlines())


def _parameter_table(parameters: Sequence[ParameterRow]) -> Table:
    order = list(Module)
    table = Table(title="parameters", title_justify="left")
    for name in ("module", "trains", "dtype"):
        table.add_column(name)
    for name in ("count", "bytes"):
        table.add_column(name, justify="right")
    for row in sorted(parameters, key=lambda row: (order.index(row.module), not row.trainable, row.dtype)):
        trains = "yes" if row.trainable else "frozen"
        table.add_row(row.module.value, trains, row.dtype, format_count(row.count), format_bytes(row.bytes))
    table.add_section()
    total = sum(row.count for row in parameters)
    trained = sum(row.count for row in parameters if row.trainable)
    total_bytes = sum(row.bytes for row in parameters)
    table.add_row("all", f"{format_count(trained)} train", "", format_count(total), format_bytes(total_bytes))
    return table


def _process_table(plan: Plan) -> Table:
    table = Table(title=f"processes ({plan.placement}, {plan.cpus} cores)", title_justify="left")
    for name in ("role", "device"):
        table.add_column(name)
    for name in ("number", "threads each", "pool segment each"):
        table.add_column(name, justify="right")
    table.add_row("reader", "cpu", str(plan.readers), "1", "")
    for side in (plan.producers, plan.consumers):
        for like, ranks in _alike(side.ranks).items():
            device, threads, segment_bytes = like
            segment = format_bytes(segment_bytes) if segment_bytes else ""
            table.add_row(side.role.value, device, str(len(ranks)), str(threads), segment)
    table.add_section()
    table.add_row("pool", "", "", "", format_bytes(plan.pool_bytes))
    return table


@dataclass(frozen=True, slots=True)
class PlaceRow:
    """Processes of one role on one node: `ranks` such as `0-3, 6`."""

    node: int
    address: str
    role: str
    ranks: str
    device: str
    threads: int


def placement_table(rows: Sequence[PlaceRow]) -> str:
    """Who runs where, as plain text."""
    target = io.StringIO()
    console = Console(file=target, width=WIDTH, color_system=None, highlight=False, markup=False, emoji=False)
    table = Table(title="nodes", title_justify="left")
    for name in ("node", "address", "role", "ranks", "device"):
        table.add_column(name)
    table.add_column("threads each", justify="right")
    for row in rows:
        table.add_row(str(row.node), row.address, row.role, row.ranks, row.device, str(row.threads))
    console.print(table)
    return "\n".join(line.rstrip() for line in target.getvalue().splitlines())


def _alike(ranks: Sequence[RankPlan]) -> dict[tuple[str, int, int], list[RankPlan]]:
    groups: dict[tuple[str, int, int], list[RankPlan]] = {}
    for rank in ranks:
        groups.setdefault((rank.device, rank.threads, rank.segment_bytes), []).append(rank)
    return groups
