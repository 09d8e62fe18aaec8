"""`flowtrain jobs`: the jobs of a Ray cluster, by the dashboard of `--address` or `RAY_ADDRESS`."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Annotated

import typer

from flowtrain.cli.options import Debug, JsonFile
from flowtrain.errors import ConfigError
from flowtrain.telemetry.streams import tell

if TYPE_CHECKING:
    from flowtrain.runtime.jobs import Job, Jobs

JobId = Annotated[str, typer.Argument(metavar="ID", help="Id of a job, as `launch` and `jobs list` tell it.")]
Address = Annotated[
    str | None, typer.Option(metavar="URL", help="Dashboard of the cluster, such as http://head:8265; or RAY_ADDRESS.")
]


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="List, follow and stop the jobs of a cluster.")
    group.command("list")(list_jobs)
    group.command("logs")(logs)
    group.command("stop")(stop)
    app.add_typer(group, name="jobs")


def list_jobs(address: Address = None, json_file: JsonFile = None, debug: Debug = False) -> None:
    """List the jobs that were submitted to a cluster, newest first."""
    from dataclasses import asdict

    jobs = _jobs(address)
    found = jobs.all()
    lines = [("id", "status", "exit", "started", "for", "run.dir"), *(_line(job) for job in found)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines if found else ():
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    if not found:
        typer.echo(f"no job was submitted to {jobs.address}")
    if json_file is not None:
        from flowtrain.cli.rundir import write_json

        write_json(json_file, {"jobs": [asdict(job) for job in found]})


def logs(
    job_id: JobId,
    address: Address = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the job ends, with its exit code.")] = False,
    debug: Debug = False,
) -> None:
    """Print what a job has said."""
    from flowtrain.cli.job import JobLog, watch

    jobs = _jobs(address)
    if follow:
        raise typer.Exit(watch(jobs, job_id))
    log = JobLog()
    typer.echo(log.feed(jobs.logs(job_id)) + log.rest(), nl=False)
    if log.end is not None and log.end["line"]:
        typer.echo(log.end["line"])


def stop(job_id: JobId, address: Address = None, debug: Debug = False) -> None:
    """Ask a job to stop in order: it finishes its step and saves; then print its last line."""
    from flowtrain.cli.job import watch

    jobs = _jobs(address)
    if not jobs.stop(job_id):
        typer.echo(f"job {job_id} had ended before ({jobs.job(job_id).status})")
        return
    tell(f"asked job {job_id} to stop: it finishes its step and saves")
    watch(jobs, job_id, quiet=True)


def _jobs(address: str | None) -> Jobs:
    from flowtrain.cli.job import is_dashboard

    address = (address or os.environ.get("RAY_ADDRESS") or "").strip() or None
    if not is_dashboard(address):
        given = f"{address} is no dashboard" if address else "there is no address"
        raise ConfigError(f"{given}: give the URL of a cluster's dashboard, --address http://HEAD:8265, or RAY_ADDRESS")
    from flowtrain.runtime.jobs import Jobs

    assert address is not None
    return Jobs(address)


def _line(job: Job) -> tuple[str, ...]:
    started = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(job.started)) if job.started else ""
    seconds = (job.ended or time.time()) - job.started if job.started else 0.0
    run_dir = (job.metadata or {}).get("flowtrain_run_dir", "")
    return job.id, job.status, "" if job.code is None else str(job.code), started, f"{seconds:.0f} s", run_dir
