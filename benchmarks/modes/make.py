"""Makes the jobs that modes are compared on: `python -m benchmarks.modes.make [OUT]`, default `runs/modes`.

    OUT/JOB/model, OUT/JOB/JOB.yaml ──▶ flowtrain bench OUT/JOB/JOB.yaml ; python -m benchmarks.peers OUT/JOB/JOB.yaml

Rows are those of the emoji example, in the order of the file and one window a step, so that every mode and every other
trainer has the same rows in the same step. Models are of the Qwen3-VL kind; their depths and widths give the loads.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from examples.make_model import EXAMPLES, SIZES, Size, make_model

CONFIG = """\
run:
  dir: ../runs/{name}
  seed: 0
model:
  path: model
  init: random
data:
  train: {rows}
  shuffle: false
train:
  step: {{samples: 96}}
  max_steps: 8
  lr: 1e-4
  freeze: [{freeze}]
producers: {{num: 1, threads: 1}}
consumers: {{num: 1, threads: 1}}
pool: {{bytes: 64MiB, prefill: {prefill}}}
packing: {{max_tokens: 768, lookahead: 1}}
"""

STEP_PACKS = 12
"""About as many as the rows of a step fill: the reserve that a run with a frozen encoder begins with."""
ATTENTION_WEIGHTS = 4
"""Of a layer, by the square of its width: query, key, value, output."""
MLP_MULTIPLE = 8
"""Widths of MLPs are multiples of this."""


@dataclass(frozen=True)
class Job:
    """`loads`: device-seconds of producer and consumer modules to each other, as they are meant to be. `steps` of a
    run, of which `warmup` are not measured: the reserve of a frozen encoder grows only as fast as the loads differ."""

    size: Size
    freeze: tuple[str, ...]
    loads: str
    steps: int
    warmup: int


def _size(vision_layers: int, text_layers: int) -> Size:
    return replace(
        SIZES["emoji"], text_width=256, text_layers=text_layers, vision_width=256, vision_layers=vision_layers
    )


JOBS = {
    "even-frozen": Job(_size(24, 3), ("encoder",), "1:1", steps=10, warmup=4),
    "even-trainable": Job(_size(8, 6), (), "1:1", steps=6, warmup=2),
    "uneven-frozen": Job(_size(8, 3), ("encoder",), "1:3", steps=8, warmup=3),
}


def of_depth(size: Size, vision_layers: float) -> Size:
    """With a vision tower of as many weights as so many layers have: a whole number of them, whose MLPs make up for the
    rest."""
    layers, width = max(1, round(vision_layers)), size.vision_width
    each = vision_layers / layers * (ATTENTION_WEIGHTS + 2 * 3) * width  # weights of a layer, by its width
    mlp = (each - ATTENTION_WEIGHTS * width) / 2
    return replace(size, vision_layers=layers, vision_mlp=MLP_MULTIPLE * round(mlp / MLP_MULTIPLE))


def make_job(name: str, out: Path, vision_layers: float | None = None) -> Path:
    """Writes the model folder and the config of a job; returns the config's path.

    `vision_layers` takes the place of the depth that the job has, which gave its loads on the machine it was made on.
    """
    job, folder = JOBS[name], out / name
    make_model(of_depth(job.size, vision_layers or job.size.vision_layers), folder / "model")
    path = folder / f"{name}.yaml"
    rows = EXAMPLES / "emoji/data/train.jsonl"
    prefill = STEP_PACKS if "encoder" in job.freeze else 0
    text = CONFIG.format(name=name, rows=rows, freeze=", ".join(job.freeze), prefill=prefill)
    path.write_text(text, encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.modes.make", description="Make the jobs of the modes.")
    parser.add_argument("out", type=Path, nargs="?", default=Path("runs/modes"))
    for name in JOBS:
        print(f"wrote {make_job(name, parser.parse_args().out)}")


if __name__ == "__main__":
    main()
