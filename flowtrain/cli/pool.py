"""`flowtrain pool`: what holds pool memory on this machine, what was left over, and how fast it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flowtrain.cli.options import Debug, JsonFile


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Look at, clean up and measure the memory pool.")
    group.command("ls")(ls)
    group.command("sweep")(sweep)
    group.command("bench")(bench)
    app.add_typer(group, name="pool")


def ls(json_file: JsonFile = None, debug: Debug = False) -> None:
    """List the pool segments of this user's runs, and whether their processes live on this machine."""
    from flowtrain.pool.registry import listed, registry_folder

    folder = registry_folder()
    found = [one.to_dict() for one in listed(folder)]
    _print(found, f"no run holds pool memory (registry: {folder})")
    _write(json_file, {"registry": str(folder), "segments": found})


def sweep(json_file: JsonFile = None, debug: Debug = False) -> None:
    """Remove what killed runs of this machine have left; a live process's entry is never touched."""
    from flowtrain.pool.registry import registry_folder
    from flowtrain.pool.registry import sweep as sweep_folder

    folder = registry_folder()
    swept = [one.to_dict() for one in sweep_folder(folder)]
    _print(swept, f"nothing to sweep in {folder}")
    _write(json_file, {"registry": str(folder), "swept": swept})


def bench(
    json_file: JsonFile = None,
    ray: Annotated[bool, typer.Option(help="Also against Ray's object store, between two processes.")] = False,
    address: Annotated[
        str | None, typer.Option(help="Ray cluster whose nodes are measured pair by pair; with --ray.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each figure, of which the best counts.")] = 15,
    debug: Debug = False,
) -> None:
    """Measure the pool on this machine: put + get beside a plain copy, a second reader, reserve + release."""
    from flowtrain.pool.measure import pool_rows

    rows = pool_rows(rounds)
    if ray or address:
        from flowtrain.runtime.nodes import listen_on_loopback

        if address is None:
            listen_on_loopback()
        from flowtrain.runtime.pool_bench import ray_rows

        rows += ray_rows(address, rounds=rounds)
    for row in rows:
        typer.echo(f"{row['figure']:<58} {row['value']:>12.4g} {row['unit']}")
    _write(json_file, {"rows": rows})


def _print(found: list[dict[str, Any]], nothing: str) -> None:
    if not found:
        typer.echo(nothing)
        return
    names = ("run", "role", "owner", "machine", "pid", "life", "used_bytes", "bytes", "run_dir")
    lines = [names, *(tuple(str(one[name]) for name in names) for one in found)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(names))]
    for line in lines:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _write(json_file: Path | None, value: dict[str, Any]) -> None:
    if json_file is None:
        return
    from flowtrain.cli.rundir import write_json

    write_json(json_file, value)
