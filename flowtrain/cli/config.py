"""`flowtrain config`: check a config file, and show it as it will be used."""

from __future__ import annotations

import typer

from flowtrain.cli.options import ConfigFile, Debug, JsonFile, Overrides


def register(app: typer.Typer) -> None:
    app.command("config", short_help="Check a config file, or show all its values.")(config)


def config(
    path: ConfigFile,
    overrides: Overrides = None,
    show: bool = typer.Option(False, "--show", help="Print every key with its value and what it is for."),
    json_file: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Check a config file: every fault with its line and column."""
    from flowtrain.config.loading import config_to_json, dump_resolved, load_config

    loaded = load_config(path, overrides or ())
    if json_file is not None:
        from flowtrain.cli.rundir import writing
        from flowtrain.telemetry.files import write_atomic

        with writing(json_file):
            write_atomic(json_file, config_to_json(loaded.config) + "\n")
    typer.echo(dump_resolved(loaded.config, comments=True) if show else f"{path}: valid", nl=not show)
