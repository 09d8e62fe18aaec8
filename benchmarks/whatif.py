"""What would happen if: simulated runs for the tables of docs/what-if.md.

    python -m benchmarks.whatif --json FILE [--pages NAME,…] && python scripts/whatif_page.py FILE

| page | runs |
|---|---|
| paper | configurations of arXiv 2606.23087 (those of `allocator_paper`), by the three modes |
| scaling | a 72B model on 256 to 16,384 H100, 0.4 packs a device and step |
| swing | a 7B model on 64 H100; from images / 2.84 to the trace's own; with the old plan and with a new one |
| small | backbones of 0.5 to 7 B, colocated and split |
| checkpoints | a 72B model on 40 H100 that fails every so often; intervals of checkpoints |

Nothing is measured: the seconds are those of the allocator's throughput model, the decisions those of a run.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from benchmarks.allocator_paper import PACK_TOKENS as PAPER_TOKENS
from benchmarks.allocator_paper import PACKS, REPORTED
from benchmarks.allocator_paper import shape as paper_shape
from benchmarks.record import Check, Result, main
from benchmarks.simulated import FROZEN, Case, case, public_model, question, scaling_samples, trace_rows, trace_stats
from flowtrain.config.modes import ModeName
from flowtrain.shapes import EncoderShape, ModelShape, ProjectorShape, TextShape
from flowtrain.simulator import Disturbances, Outcome
from flowtrain.simulator.planned import with_images

MODES: tuple[ModeName, ...] = ("flow", "disaggregated", "monolithic")
PAPER_NAMES = {"flow": "flow", "disaggregated": "stage_balanced", "monolithic": "monolithic"}
STEPS = 6
SCALES = (256, 1024, 4096, 16384)
SWING = 2.84
SMALL = {"0.5B": (896, 24, 14, 2, 4864), "1.5B": (1536, 28, 12, 2, 8960), "7B": (3584, 28, 28, 4, 18944)}
"""Hidden, layers, heads, kv heads and MLP width of Qwen2.5's models of these sizes."""
INTERVALS = (5, 10, 20, 40, 80)
MINUTES_BETWEEN = (5.0, 25.0)
"""Mean, between two failures of the whole run."""
SAVE_SECONDS, RESTART_SECONDS = 15.0, 120.0
FAILING_STEPS = 1200


def row(page: str, name: str, of: Case, outcome: Outcome, **more: Any) -> dict[str, Any]:
    found = outcome.figures(of.planned.peak_flops)
    return {
        "page": page,
        "case": name,
        "devices": outcome.num_devices,
        "layouts": of.layouts,
        "samples/s": found["samples_per_second"],
        "tokens/s a device": found["tokens_per_second_per_device"],
        "MFU %": found["mfu_percent"],
        "step s": found["step_seconds"],
        "starved %": found["starvation_percent"],
        "stalled %": found["stall_percent"],
        "lost %": found["lost_percent"],
        "controller %": found["control_percent"],
        "answers a step": found["answers_per_step"],
        "beside": "-",
        **more,
    }


def paper() -> Iterator[dict[str, Any]]:
    """MFU beside what the paper reports."""
    tokens = float(trace_stats().within(PAPER_TOKENS).lengths.mean())
    step = round(PACKS * PAPER_TOKENS * 0.95 / tokens)
    for name, devices in REPORTED:
        for mode in MODES:
            asked = question(paper_shape(name), devices, FROZEN, "ascend910b", step)
            of = case(asked, mode, **({"composition": "arrival"} if mode == "monolithic" else {}))
            reported = REPORTED[name, devices][PAPER_NAMES[mode]]
            yield row("paper", f"{name}, {devices}, {mode}", of, of.play(STEPS), beside=f"{reported} reported")


def scaling() -> Iterator[dict[str, Any]]:
    shape = public_model("qwen2.5-vl-72b")
    for devices in SCALES:
        of = case(question(shape, devices, FROZEN, step_samples=scaling_samples(devices)))
        yield row("scaling", f"72B, {devices} devices", of, of.play(STEPS), beside=f"{of.predicted:.4g} by the plan")


def swing() -> Iterator[dict[str, Any]]:
    shape = public_model("qwen2.5-vl-7b")
    few, many = with_images(trace_rows(shape), 1 / SWING), trace_rows(shape)
    before = question(shape, 64, step_samples=2048, stats=trace_stats().scaled(images=1 / SWING))
    after = question(shape, 64, step_samples=2048)
    old = case(before, rows=few)
    yield row("swing", "before", old, old.play(STEPS))
    choices = [old.planned.timing.encoder.choice, old.planned.timing.backbone.choice]  # type: ignore[union-attr]
    kept = case(after, rows=many, choices=choices)
    yield row("swing", "after, old plan", kept, kept.play(STEPS))
    new = case(after, rows=many)
    yield row("swing", "after, new plan", new, new.play(STEPS))


def small_shape(name: str) -> ModelShape:
    """A Qwen2.5 backbone behind the encoder of Qwen2.5-VL."""
    hidden, layers, heads, kv_heads, width = SMALL[name]
    like = public_model("qwen2.5-vl-7b")
    text = TextShape(
        hidden, layers, heads, kv_heads, hidden // heads, width, 151_936, tied=False, norm_vectors=2 * hidden,
        outer_vectors=hidden,
    )  # fmt: skip
    merger = like.projector.patches_per_token * like.vision.hidden
    projector = ProjectorShape(1, like.projector.patches_per_token, hidden, merger * (merger + hidden), merger)
    vision: EncoderShape = like.vision
    return ModelShape("small", text, (replace(vision, projector=projector),), 0)


def small() -> Iterator[dict[str, Any]]:
    for name in SMALL:
        for mode in ("flow", "monolithic"):
            of = case(question(small_shape(name), 16, step_samples=1024), mode)
            yield row("small", f"{name}, {'split' if mode == 'flow' else 'colocated'}", of, of.play(STEPS))


def checkpoints() -> Iterator[dict[str, Any]]:
    """Beside each: failures, and the interval of least expected loss by Young's formula, √(2 · save · between)."""
    asked = question(public_model("qwen2.5-vl-72b"), 40, FROZEN, step_samples=256)
    plain = case(asked)
    steps = list(islice(plain.steps(), FAILING_STEPS))
    step = plain.play(STEPS, steps=steps).figures()["step_seconds"]
    for minutes in MINUTES_BETWEEN:
        device_hours = minutes / 60 * plain.planned.system.num_devices
        failing = Disturbances(device_hours=device_hours, restart_seconds=RESTART_SECONDS, seed=1)
        for every in INTERVALS:
            of = case(asked, save_every=every, save_seconds=SAVE_SECONDS)
            outcome = of.play(FAILING_STEPS, failing, steps)
            best = math.sqrt(2 * SAVE_SECONDS * 60 * minutes) / step
            name = f"a failure every {minutes:g} min, a checkpoint every {every} steps"
            yield row("checkpoints", name, of, outcome, beside=f"{outcome.failures} failures; best every {best:.0f}")


PAGES = {"paper": paper, "scaling": scaling, "swing": swing, "small": small, "checkpoints": checkpoints}


def measure(options: argparse.Namespace) -> Result:
    wanted = options.pages.split(",")
    assert set(wanted) <= set(PAGES), f"--pages {options.pages}: choose among {', '.join(PAGES)}"
    rows = [row for name in wanted for row in PAGES[name]()]
    rate = {row["case"]: row["samples/s"] for row in rows}
    checks = []
    if "swing" in wanted:
        gain = rate["after, new plan"] / rate["after, old plan"]
        checks.append(Check("samples/s after the swing, new plan over old", gain, ">=", 1))
    if "scaling" in wanted:
        mfu = [row["MFU %"] for row in rows if row["page"] == "scaling"]
        checks.append(Check("points of MFU lost to 16,384 devices", max(mfu) - min(mfu), "<=", 10.0))
    return Result({"steps": STEPS, "device": "h100, ascend910b", "trace": "mix_sft_8k"}, rows, checks)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--pages", default=",".join(PAGES), help="tables to make, separated by commas")
    main("whatif", measure, parser)
