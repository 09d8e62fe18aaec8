"""`python -m benchmarks.peers CONFIG --json FILE`: FlowTrain and other trainers on the same rows, in turns.

    for each round: flowtrain bench (the modes), then each peer setting in processes of its own ──▶ rows a second
                                                                                  │ medians, best by best
                                                                                  ▼ table, FILE

Figures are of the same rows in all of them: those behind the warm-up. A peer is warmed up by a step of other rows; what
it takes to start is not measured, as for FlowTrain. With `--add` the runs are put behind those that FILE holds. Needs
`pip install -r benchmarks/peers/requirements.txt`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers.settings import LEAST_RATIO, Setting, settings
from benchmarks.record import environment, table
from flowtrain.allocator import local_inventory
from flowtrain.cli.bench_result import RATE
from flowtrain.config.loading import load_config
from flowtrain.telemetry import metrics as m

TIMEOUT_SECONDS = 600


def flowtrain(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    """Rows a second of each mode, and its MFU."""
    record = folder / "flowtrain.json"
    command = [sys.executable, "-m", "flowtrain.cli.main", "bench", str(options.config), "--modes", options.modes]
    command += ["--rounds", "1", "--steps", str(options.steps), "--warmup", str(options.warmup), "--json", str(record)]
    command += ["--set", f"run.dir={folder / 'run'}"]
    run(command, folder / "flowtrain.log", {})
    modes = json.loads(record.read_text(encoding="utf-8"))["modes"]
    return {name: {key: figures[key]["median"] for key in (RATE, m.MFU.name)} for name, figures in modes.items()}


def peer(setting: Setting, options: argparse.Namespace, weights: Path, cores: int, folder: Path) -> float:
    """Rows a second of one setting."""
    out, threads = folder / "peer.json", cores // setting.processes
    launcher = [sys.executable, "-m"]
    if setting.processes > 1:
        launcher += ["torch.distributed.run", "--standalone", f"--nproc-per-node={setting.processes}", "-m"]
    command = [*launcher, "benchmarks.peers.train", str(options.config), "--weights", str(weights)]
    command += ["--trainer", setting.trainer, "--rows", str(setting.rows_per_forward), "--order", setting.order]
    command += ["--threads", str(threads), "--steps", str(options.steps), "--warmup", str(options.warmup)]
    run([*command, "--out", str(out)], folder / "peer.log", {"OMP_NUM_THREADS": str(threads)})
    figures = json.loads(out.read_text(encoding="utf-8"))
    out.unlink()
    return float(figures["rows"] / figures["seconds"])


def run(command: list[str], log: Path, environ: dict[str, str]) -> None:
    """Exit with the end of what it printed when it fails."""
    with log.open("w") as file:
        done = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **environ}, timeout=TIMEOUT_SECONDS
        )
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with exit code {done.returncode}:\n{log.read_text()[-3000:]}")


def weights_of(config_path: Path, folder: Path) -> Path:
    """The whole model's weights, drawn from the config's seed as a run would."""
    from flowtrain.models.loading import ensure_weights

    return ensure_weights(load_config(config_path, (f"run.dir={folder}",)).config)


def summary(runs: dict[str, list[float]], mfu: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, the best mode by the best peer, and the MFU that the ratio wanted would take: `mfu` is by mode."""
    medians = {name: median(rates) for name, rates in runs.items()}
    mode = max(mfu, key=lambda name: medians[name])
    other = max((name for name in runs if name not in mfu), key=lambda name: medians[name])
    ratio, used = medians[mode] / medians[other], median(mfu[mode])
    return {
        "medians": medians,
        "best mode": mode,
        "best peer": other,
        "best mode / best peer": ratio,
        "mfu of the best mode (%)": used,
        "mfu of the best peer (%)": used / ratio,
        "mfu that the limit takes (%)": used / ratio * LEAST_RATIO,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers")
    parser.add_argument("config", type=Path)
    parser.add_argument("--modes", default="flow,monolithic_dynamic")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="warm-up included")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--full", action="store_true", help="peers with 1 to 16 rows a forward, not only 4")
    parser.add_argument("--only", default="", help="peers whose name has this text")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--add", action="store_true", help="put the runs behind those of the file")
    options = parser.parse_args()
    cores = local_inventory().cpus
    step_rows = load_config(options.config).config.train.step.samples
    if step_rows is None:
        sys.exit(f"{options.config}: give train.step in samples: other trainers know no packs")
    chosen = [one for one in settings(cores, step_rows, options.full) if options.only in one.name]
    runs: dict[str, list[float]] = {}
    mfu: dict[str, list[float]] = {}
    if options.add and options.json is not None and options.json.exists():
        before = json.loads(options.json.read_text(encoding="utf-8"))
        runs, mfu = before["runs"], before["mfu(%)"]
    with tempfile.TemporaryDirectory(prefix="peers-") as name:
        folder = Path(name)
        weights = weights_of(options.config, folder / "weights")
        for number in range(1, options.rounds + 1):
            for mode, figures in flowtrain(options, folder).items():
                runs.setdefault(mode, []).append(figures[RATE])
                mfu.setdefault(mode, []).append(figures[m.MFU.name])
            for setting in chosen:
                runs.setdefault(setting.name, []).append(peer(setting, options, weights, cores, folder))
            print(f"round {number}:", {name: round(rates[-1], 2) for name, rates in runs.items()}, flush=True)
    found = summary(runs, mfu)
    print(table([{"who": name, "samples/s": rate} for name, rate in found["medians"].items()]))
    print(f"{found['best mode']} / {found['best peer']}: {found['best mode / best peer']:.2f}")
    if options.json:
        how = {name: str(value) for name, value in vars(options).items() if name not in ("json", "config")}
        how["config"] = options.config.name
        record = {"benchmark": "peers", **environment(), "settings": how, "runs": runs, m.MFU.name: mfu, **found}
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
