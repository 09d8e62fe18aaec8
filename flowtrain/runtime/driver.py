"""The process that runs the controller: `python -m flowtrain.runtime.driver --config RUN_DIR/config.yaml`.

    launcher ──starts, signals──▶ driver ──▶ Ray node ──▶ readers, producers, consumers
       ▲                            │
       └── exit code, error.json ───┘

The launcher stays light and outlives this process, so that the last line is right and nothing is left however this one
ends. When the launcher dies, the kernel sends SIGHUP and the run ends at once.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from flowtrain.config.loading import load_config
from flowtrain.runtime.guard import inside, signal_on_parent_death
from flowtrain.runtime.nodes import listen_on_loopback
from flowtrain.runtime.run import execute
from flowtrain.runtime.signals import ECHO_SECONDS, StopRequest
from flowtrain.telemetry.fatal import clear_error, write_error
from flowtrain.telemetry.streams import escape_letters, tell


def main(argv: list[str] | None = None) -> int:
    """Run one training run; returns the exit code of contract C11."""
    parser = argparse.ArgumentParser(prog="flowtrain.runtime.driver")
    parser.add_argument("--config", type=Path, required=True, help="resolved config; its folder is the run's folder")
    parser.add_argument("--resume", type=Path, help="checkpoint folder step-N to continue from")
    parser.add_argument("--replay", type=Path, help="decision log of a run to repeat")
    parser.add_argument("--verify", action="store_true", help="write gradients and parameters of every step")
    parser.add_argument("--profile", type=Path, help="measure the modules and write this file, instead of a run")
    parser.add_argument("--limit-seconds", type=float, default=90.0, help="most time to measure for")
    parser.add_argument("--spare", type=int, help="open file descriptor for error.json where its folder takes none")
    arguments = parser.parse_args(argv)
    run_dir = arguments.config.resolve().parent

    def run(stop: StopRequest) -> None:
        config = load_config(arguments.config).config
        stop.deadline_seconds = config.run.stop_deadline_seconds
        if config.cluster.address is None:
            listen_on_loopback()
        if arguments.profile is not None:
            from flowtrain.runtime.profile_run import measure_to

            measure_to(config, run_dir, arguments.profile, arguments.limit_seconds, stop)
            return
        execute(config, run_dir, arguments.resume, stop, dump=arguments.verify, replay=arguments.replay)

    return ended(run_dir, run, arguments.spare)


def ended(run_dir: Path, run: Callable[[StopRequest], None], spare: int | None = None) -> int:
    """Do what a driver is for, under its handlers of signals, and leave its error in `run_dir`, else in the descriptor
    `spare`; returns the exit code of contract C11."""
    stop = StopRequest(deadline_seconds=25.0, echo_seconds=ECHO_SECONDS if inside() else 0.0)
    try:
        signal_on_parent_death(signal.SIGHUP)
        stop.install()
        stop.leave = lambda error: os._exit(write_error(run_dir, error, spare).exit_code)
        clear_error(run_dir)
        run(stop)
    except BaseException as error:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        return write_error(run_dir, error, spare).exit_code
    return 0


if __name__ == "__main__":
    escape_letters()
    code = main()
    for stream in (sys.stdout, sys.stderr):
        tell("", end="", stream=stream)  # what is still buffered
    os._exit(code)
