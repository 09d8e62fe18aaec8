"""`flowtrain doctor`: what this machine, or every node of a cluster, is like for a run, and what to change."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowtrain.cli.options import Debug, JsonFile, Overrides

if TYPE_CHECKING:
    from flowtrain.config.schema import Config
    from flowtrain.runtime.checkup import Finding, NodeFacts, PairFacts

EXIT_WRONG = 4


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG]", help="YAML of a run: its paths and pool are looked at too."),
    ] = None,
    overrides: Overrides = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="URL|HOST:PORT", help="Dashboard of a Ray cluster, or one that this machine is part of."),
    ] = None,
    bench: Annotated[bool, typer.Option(help="Send bytes between nodes, over each transport.")] = True,
    json_file: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Check this machine or the nodes of a cluster for a run, and say what to change."""
    from flowtrain.cli.job import check_head, is_dashboard
    from flowtrain.config.loading import load_config
    from flowtrain.runtime.guard import inside

    config = load_config(path, overrides or (), check_files=False).config if path is not None else None
    given = (address or os.environ.get("RAY_ADDRESS") or "").strip() or None
    address = given or (config.cluster.address if config is not None else None)
    if address is not None and is_dashboard(address) and inside():
        address = "auto"
    if address is not None and is_dashboard(address):
        raise typer.Exit(_as_job(address, config, bench, json_file))
    if address is not None:
        check_head(address)
    pairs: list[PairFacts] = []
    if address is None:
        from flowtrain.runtime.doctor import examine_here

        nodes = examine_here(config)
    else:
        from flowtrain.runtime.doctor import examine

        nodes, pairs = examine(address, config, bench)
    from flowtrain.runtime.checkup import findings

    found = findings(nodes, pairs, config.pool.bytes if config is not None else 0)
    result = _result(nodes, pairs, found)
    _print(nodes, pairs, found)
    if json_file is not None:
        from flowtrain.cli.rundir import write_json

        write_json(json_file, result)
    num_wrong = sum(finding.level == "wrong" for finding in found)
    _end(num_wrong, len(nodes), result)
    raise typer.Exit(EXIT_WRONG if num_wrong else 0)


def _as_job(address: str, config: Config | None, bench: bool, json_file: Path | None) -> int:
    """On the cluster, by a job: this machine may be none of its nodes."""
    from flowtrain.cli.job import follow, submit

    arguments = ["doctor", *(["config.yaml"] if config is not None else []), *([] if bench else ["--no-bench"])]
    jobs, job_id = submit(address, arguments, config, {}, {}, 0.0)
    return follow(jobs, job_id, "it ends at once", json_file)


def _result(nodes: list[NodeFacts], pairs: list[PairFacts], found: list[Finding]) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "nodes": [asdict(node) for node in nodes],
        "pairs": [asdict(pair) for pair in pairs],
        "findings": [asdict(finding) for finding in found],
    }


def _print(nodes: list[NodeFacts], pairs: list[PairFacts], found: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table

    from flowtrain.runtime.checkup import NO_GPU

    console = Console(width=None if os.isatty(1) else 140, highlight=False, markup=False)
    table = Table(title="nodes", title_justify="left")
    for name in ("node", "address", "host", "Python", "torch", "Ray", "transformers", "GPUs"):
        table.add_column(name)
    for name in ("cores", "NUMA", "memory", "/dev/shm", "locked", "files", "clock"):
        table.add_column(name, justify="right")
    for node in nodes:
        gpus = f"{len(node.gpus)} {node.gpus[0][0]}" if node.gpus else "none"
        table.add_row(
            str(node.number),
            node.address,
            node.name,
            node.python,
            *(node.packages.get(name, "none") for name in ("torch", "ray", "transformers")),
            gpus,
            str(node.cpus),
            ", ".join(map(str, node.core_numa)),
            *(_bytes(number) for number in (node.memory_bytes, node.shm_bytes, node.locked_bytes)),
            "no limit" if node.open_files < 0 else str(node.open_files),
            f"{1000 * node.clock_seconds:+.0f} ms",
        )
    console.print(table)
    if pairs:
        table = Table(title="between nodes", title_justify="left")
        names = sorted({name for pair in pairs for name in (*pair.gigabytes_per_second, *pair.failed)})
        for name in ("from", "to", "ports", *(f"{name}, GB/s" for name in names)):
            table.add_column(name)
        for pair in pairs:
            speeds = [f"{speed:.2f}" if (speed := pair.gigabytes_per_second.get(n)) else "fails" for n in names]
            table.add_row(str(pair.owner), str(pair.reader), "open" if pair.refused is None else "closed", *speeds)
        console.print(table)
    for reason in NO_GPU:
        if numbers := ", ".join(str(node.number) for node in nodes if not node.gpus and node.gpu_reason == reason):
            typer.echo(f"no GPU on node {numbers}: {reason}")
    for finding in found:
        typer.echo(str(finding))


def _bytes(number: int) -> str:
    from flowtrain.telemetry.tables import format_bytes

    return "no limit" if number < 0 else format_bytes(number)


def _end(num_wrong: int, num_nodes: int, result: dict[str, Any]) -> None:
    from flowtrain.cli import failure

    where = f"{num_nodes} nodes" if num_nodes > 1 else "this machine"
    if num_wrong:
        things = "1 thing" if num_wrong == 1 else f"{num_wrong} things"
        failure.last_line(f"doctor: {things} on {where} would end a run: see above", EXIT_WRONG, result)
    else:
        typer.echo(f"nothing on {where} would end a run")
        failure.last_line(None, 0, result)
