"""A profile: how long the real modules take on the real devices, as `flowtrain profile` measured it (no torch).

    measured orders ──groups by size──▶ curve of (work, seconds) ──between and beyond──▶ seconds of any order
                                                                                             │
    composed steps of the data ─────────────── pipeline of a plan (`predict`) ◀──────────────┘

| kept for | of |
|---|---|
| each side, number of threads, the other side busy or not | encode or pack, backward of an encode, update |
| the run | reading a row, the way of an order to a process and back, steps as they are composed |

Work is in FLOPs of the cost model (`packing.cost`), so a curve carries over to other sizes of packs and rows; what does
not grow with FLOPs is in the curve's start. A file is checked when it is read; a fault names the file and the key.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from flowtrain.allocator.inventory import Inventory, cpu_name
from flowtrain.config.schema import Config
from flowtrain.errors import ConfigError
from flowtrain.types import Role

FORMAT = 1
"""Raised with `Profile.format` when the meaning of a key changes."""

Part = Literal["forward", "backward"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Timing(Section):
    """Orders of about one size: `spread` is the standard deviation of their seconds per work over its mean."""

    work: float = Field(gt=0, description="Mean FLOPs of an order.")
    seconds: float = Field(gt=0, description="Mean seconds of an order.")
    spread: float = Field(ge=0)
    num: int = Field(gt=0, description="Orders measured.")


class Measured(Section):
    """One side in one setting. A consumer's `forward` is a whole pack, its backward included.

    Attributes:
        threads: CPU threads of the process.
        together: measured while a process of the other side was busy, too.
        colocated: measured in the process that holds the other side.
        update_seconds: from the order to reduce until the update has been answered for; 0 where nothing trains.
    """

    role: Literal["producer", "consumer"]
    device: str
    threads: int = Field(gt=0)
    together: bool
    colocated: bool
    forward: tuple[Timing, ...] = Field(min_length=1)
    backward: tuple[Timing, ...] = ()
    update_seconds: float = Field(ge=0)


class PackWork(Section):
    """One pack of the data as the composer makes them: rows, and FLOPs on either side."""

    rows: int = Field(ge=0)
    encode: float = Field(ge=0)
    train: float = Field(ge=0)


class Provenance(Section):
    """Where the figures come from."""

    date: str
    flowtrain: str
    python: str
    torch: str
    transformers: str
    device: str
    cores: int = Field(gt=0)
    config: str = Field(description="Hash of the keys of the config that the figures depend on.")
    model: str
    dtype: str
    freeze: tuple[str, ...]
    data: str
    rows_measured: tuple[int, int] = Field(description="First and last position of the rows whose orders were timed.")
    rows_composed: tuple[int, int] = Field(description="The same of the rows whose sizes make `steps`.")
    took_seconds: float = Field(gt=0)


class Profile(Section):
    """See the page above.

    >>> profile = read_profile(Path("profile.yaml"))
    >>> profile.seconds(Role.CONSUMER, "forward", 2.5e9, threads=1)
    0.0931
    """

    format: Literal[1] = 1
    made: Provenance
    trainable_encoder: bool
    consumers: int = Field(gt=0, description="Packs of a slot in `steps`.")
    read_seconds: float = Field(ge=0, description="Of a row: read, tokenise, measure its images.")
    call_seconds: float = Field(ge=0, description="An order to another process and its answer, beside the work.")
    overhead_seconds: float = Field(ge=0, description="Of a step in one process, beside the stages.")
    stages: tuple[Measured, ...]
    steps: tuple[tuple[PackWork, ...], ...] = Field(min_length=1, description="In the order in which packs run.")

    @model_validator(mode="after")
    def _both_sides(self) -> Profile:
        for role in (Role.PRODUCER, Role.CONSUMER):
            if not any(stage.role == role for stage in self.stages):
                raise ValueError(f"`stages` has no {role}")
        if not any(pack.rows for step in self.steps for pack in step):
            raise ValueError("`steps` holds no row")
        return self

    @property
    def rows_per_step(self) -> float:
        return sum(pack.rows for step in self.steps for pack in step) / len(self.steps)

    def measured(self, role: Role, colocated: bool = False, together: bool = False) -> tuple[Measured, ...]:
        """Settings of one side, by threads; the nearest kind where this one was not measured."""
        mine = [stage for stage in self.stages if stage.role == role]
        kinds = ((colocated, together), (colocated, False), (False, False), (False, True), (True, False))
        for kind in kinds:
            found = [stage for stage in mine if (stage.colocated, stage.together) == kind]
            if found:
                return tuple(sorted(found, key=lambda stage: stage.threads))
        raise AssertionError(f"a profile without {role} was read")

    def seconds(
        self,
        role: Role,
        part: Part,
        work: float,
        *,
        threads: int,
        colocated: bool = False,
        together: bool = False,
    ) -> float:
        """Seconds of one order of `work` FLOPs; no work takes no time."""
        if work <= 0:
            return 0.0
        points = [
            (stage.threads, on_curve(curve, work))
            for stage in self.measured(role, colocated, together)
            if (curve := stage.forward if part == "forward" else stage.backward)
        ]
        return over_threads(points, threads) if points else 0.0

    def update_seconds(self, role: Role, threads: int, colocated: bool = False) -> float:
        points = [(stage.threads, stage.update_seconds) for stage in self.measured(role, colocated)]
        return over_threads(points, threads)


def on_curve(curve: Sequence[Timing], work: float) -> float:
    """Seconds at `work`: on the line between the two neighbours, beyond the ends on the line of the last two.

    A curve never falls: where noise makes a larger order faster than a smaller one, it is level. With one point,
    seconds are in proportion to work.
    """
    points: list[tuple[float, float]] = []
    for timing in sorted(curve, key=lambda timing: timing.work):
        seconds = max(timing.seconds, points[-1][1]) if points else timing.seconds
        if points and timing.work <= points[-1][0] * (1 + 1e-9):
            points[-1] = (points[-1][0], seconds)
        else:
            points.append((timing.work, seconds))
    if len(points) == 1:
        return points[0][1] * work / points[0][0]
    place = next((n for n, (at, _) in enumerate(points) if at >= work), len(points) - 1)
    (w0, s0), (w1, s1) = points[max(place, 1) - 1], points[max(place, 1)]
    start = max(0.0, s0 - (s1 - s0) * w0 / (w1 - w0))
    if work < points[0][0]:  # towards the part that no work takes, which is not negative
        return start + (points[0][1] - start) * work / points[0][0]
    return s0 + (s1 - s0) * (work - w0) / (w1 - w0)


def over_threads(points: Sequence[tuple[int, float]], threads: int) -> float:
    """Seconds with `threads`, from measured (threads, seconds): a part that divides among them and one that does not.

    Fewer threads than measured take longer in proportion; more than measured are no faster than the most measured.
    """
    points = sorted(points)
    (t0, s0), (t1, s1) = points[0], points[-1]
    if threads <= t0:
        return s0 * t0 / threads
    if threads >= t1:
        return s1
    for (low, s_low), (high, s_high) in pairwise(points):
        if low <= threads <= high:
            share = (1 / low - 1 / threads) / (1 / low - 1 / high)
            return s_low + (s_high - s_low) * share
    raise AssertionError(f"{threads} threads between {points}")


def timing(observed: Sequence[tuple[float, float]]) -> Timing:
    """One point of a curve from (work, seconds) of orders of about one size."""
    assert observed, "a timing needs orders"
    num = len(observed)
    work = math.fsum(w for w, _ in observed) / num
    seconds = math.fsum(s for _, s in observed) / num
    paces = [s / w for w, s in observed]
    mean = math.fsum(paces) / num
    spread = math.sqrt(math.fsum((pace - mean) ** 2 for pace in paces) / num) / mean
    return Timing(work=work, seconds=seconds, spread=spread, num=num)


def profile_key(config: Config) -> str:
    """A hash of what the seconds of a module depend on: a profile is of use to configs with the same."""
    content = {
        "model": [str(config.model.path), config.model.dtype, config.model.attention],
        "freeze": sorted(config.train.freeze),
        "recompute": [
            *(bool(config.recompute(role)) for role in (Role.PRODUCER, Role.CONSUMER)),
            config.producers.backward,
        ],
        "pixels": [config.data.max_pixels, config.data.min_pixels],
        "unit": config.producers.max_unit_patches,
        "devices": [config.producers.device, config.consumers.device],
    }
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def check_profile(profile: Profile, config: Config, path: Path) -> None:
    """`ConfigError` when the profile was measured for another model or way of training it."""
    if profile.made.config == profile_key(config):
        return
    made = profile.made
    theirs = {"model.path": made.model, "model.dtype": made.dtype, "train.freeze": sorted(made.freeze)}
    ours = {
        "model.path": str(config.model.path),
        "model.dtype": config.model.dtype,
        "train.freeze": sorted(config.train.freeze),
    }
    what = [f"{key} {theirs[key]} (here {ours[key]})" for key in theirs if theirs[key] != ours[key]]
    told = ", ".join(what) or "other settings of model, recomputation, pixels, units or devices"
    raise ConfigError(f"{path} was measured with {told}; measure again with `flowtrain profile`")


def other_machine(profile: Profile, inventory: Inventory) -> str | None:
    """What is different here from where a profile was made; None where nothing is."""
    on_gpu = profile.stages[-1].device.startswith("cuda")
    here = cpu_name() if not on_gpu else inventory.devices[0].name if inventory.devices else "no GPU"
    made = profile.made
    if (made.device, made.cores) == (here, inventory.cpus):
        return None
    return f"{made.device} with {made.cores} cores, and this machine is {here} with {inventory.cpus}"


def given_profile(config: Config) -> Profile | None:
    """The profile in the file that the config names."""
    return read_profile(config.allocation.profile) if isinstance(config.allocation.profile, Path) else None


def read_profile(path: Path) -> Profile:
    """The profile in a file; `ConfigError` naming file and key when it is none."""
    again = "measure again with `flowtrain profile`"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such profile; make one with `flowtrain profile`") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{path} cannot be read as a profile ({' '.join(str(error).split())[:200]}); {again}"
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is no profile: it holds no mapping; {again}")
    if content.get("format") != FORMAT:
        raise ConfigError(f"{path}: format is {content.get('format')!r}, this release reads {FORMAT}; {again}")
    try:
        return Profile.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ConfigError(f"{path}: {key}: {first['msg']}; {again}") from None


def dump_profile(profile: Profile) -> str:
    """The text of a profile file; `read_profile` gives the same profile back."""
    content: dict[str, Any] = profile.model_dump(mode="json")
    return "# Written by `flowtrain profile`.\n" + yaml.safe_dump(content, sort_keys=False, default_flow_style=None)
