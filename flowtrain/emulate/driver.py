"""The process of an emulated run: `python -m flowtrain.emulate.driver --config RUN_DIR/config.yaml`.

As `flowtrain.runtime.driver`, with emulated devices in place of real ones: RUN_DIR/emulation.json says which.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from flowtrain.config.loading import load_config
from flowtrain.emulate.emulation import Emulation
from flowtrain.emulate.executor import EmulatedExecutor, own_cluster
from flowtrain.emulate.run import emulate
from flowtrain.runtime.driver import ended
from flowtrain.runtime.nodes import listen_on_loopback
from flowtrain.runtime.signals import StopRequest


def main(argv: list[str] | None = None) -> int:
    """Run one emulated training run; returns the exit code of contract C11."""
    parser = argparse.ArgumentParser(prog="flowtrain.emulate.driver")
    parser.add_argument("--config", type=Path, required=True, help="resolved config; its folder is the run's folder")
    parser.add_argument("--resume", type=Path, help="checkpoint folder step-N to continue from")
    parser.add_argument("--processes", type=int, default=4, help="most processes of either side")
    arguments = parser.parse_args(argv)
    run_dir = arguments.config.resolve().parent

    def run(stop: StopRequest) -> None:
        config = load_config(arguments.config).config
        stop.deadline_seconds = config.run.stop_deadline_seconds
        listen_on_loopback()
        with stop.held():
            cluster = own_cluster(config.cluster)
        with cluster:
            executor = EmulatedExecutor(cluster, arguments.processes)
            try:
                emulate(config, Emulation.read(run_dir), executor, resume=arguments.resume, stop=stop)
            finally:
                executor.close()

    return ended(run_dir, run)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
