"""What is emulated, and which plans the baselines have at their best."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import islice, product
from pathlib import Path
from statistics import fmean, median

from flowtrain.allocator.profile import read_profile
from flowtrain.allocator.solve import Choice
from flowtrain.config.schema import Config
from flowtrain.emulate.case import Case, Variant, write_rows
from flowtrain.emulate.emulation import Emulation
from flowtrain.emulate.modelled import Modelled
from flowtrain.errors import PlanError
from flowtrain.runtime.collector import rare_collection
from flowtrain.simulator import Outcome
from flowtrain.types import Module

ROOT = Path(__file__).resolve().parents[2]
PROFILE = ROOT / "benchmarks/baselines/emoji-profile.yaml"
"""Of `flowtrain profile examples/emoji/emoji.yaml` on two cores: the variance of its packs is that of emulated ones."""

DEVICE = "h100"
FROZEN = frozenset({Module.ENCODER, Module.PROJECTOR})
SKIPPED, STEPS = 1, 4
"""First steps that figures leave out, and steps of a run."""

PACK_SECONDS, DEVICE_SECONDS = 1.25, 0.16
"""Least real time of a step of `flow` for each of its packs one after the other, and for each device: the time scale
follows from it. Two cores do what the hosts of all devices would do, pack by pack and once at the end of a step; it is
to be little beside what is waited for."""


def jitter(profile: Path = PROFILE) -> float:
    """Standard deviation of an order's seconds for its work over their mean: the median of what was measured of real
    encodes, backwards and packs in a process with a core of its own, the other side at rest."""
    stages = [stage for stage in read_profile(profile).stages if not stage.together and not stage.colocated]
    return median(timing.spread for stage in stages for timing in (*stage.forward, *stage.backward))


def cases() -> dict[str, Case]:
    """By name: model, data, freezing. 7B on 32 devices, 72B on 64."""
    found = {}
    for (model, nodes), (trace, tokens, share), frozen in product(
        (("7b", 4), ("72b", 8)), (("sft_8k", 8192, 1.0), ("long_32k", 32768, 0.5)), (True, False)
    ):
        name = f"{model} {trace} {'frozen' if frozen else 'trainable'}"
        folder = ROOT / f"examples/plans/qwen2.5-vl-{model}"
        data = ROOT / f"benchmarks/traces/mix_{trace}.parquet"
        found[name] = Case(folder, data, DEVICE, nodes, FROZEN if frozen else frozenset(), round(256 * share), tokens)
    return found


FLOW = Variant.of_mode("flow")
VARIANTS: dict[str, Variant] = {
    "flow": FLOW,
    "disaggregated": Variant.of_mode("disaggregated"),
    "monolithic": Variant.of_mode("monolithic", composition="arrival"),
    "without_pool": replace(FLOW, exchange="barrier_step"),
    "without_allocator": replace(FLOW, policy="uniform"),
    "without_scheduler": replace(FLOW, composition="arrival"),
}
"""The modes as contract C8 has them, and the ablations of `flow`: one axis each."""

BEST: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "disaggregated_best": (
        "disaggregated",
        ("stage_balanced", "flow_matching", "flops_proportional"),
        ("raw_size", "dynamic", "arrival"),
    ),
    "monolithic_best": ("monolithic", ("uniform",), ("arrival", "dynamic", "raw_size")),
}
"""Baselines at their best: placement and exchange of the mode, the policy and packing that the model finds fastest."""

NAMES = ("flow", "disaggregated", "monolithic", *BEST, *(name for name in VARIANTS if name.startswith("without_")))


@dataclass(slots=True)
class Bench:
    """Runs of a case: rows on disk, plans, and what they take by their schedule alone."""

    case: Case
    folder: Path
    jitter: float
    seed: int
    processes: int = 4
    _modelled: tuple[float, float, int] | None = None
    _plans: dict[tuple[str, str], tuple[Choice, ...] | None] = field(default_factory=dict)

    @property
    def rows(self) -> Path:
        path = self.folder / "rows.jsonl"
        if not path.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_rows(self.case.rows(), path)
        return path

    def choices(self, variant: Variant) -> tuple[Choice, ...] | None:
        """None where the policy finds nothing that fits."""
        key = (variant.placement, variant.policy)
        if key not in self._plans:
            try:
                self._plans[key] = tuple(self.case.solve(variant).choices)
            except PlanError:
                self._plans[key] = None
        return self._plans[key]

    def variant(self, name: str) -> Variant | None:
        """That of a name, the best one by its modelled step; None where none fits."""
        if name in VARIANTS:
            return VARIANTS[name] if self.choices(VARIANTS[name]) is not None else None
        mode, policies, packings = BEST[name]
        best: tuple[float, Variant] | None = None
        for policy, packing in product(policies, packings):
            tried = replace(VARIANTS[mode], policy=policy, composition=packing)
            if self.choices(tried) is not None:
                seconds = self.step_seconds(self.play(tried, 1.0))
                best = (seconds, tried) if best is None or seconds < best[0] else best
        return None if best is None else best[1]

    def scale_of(self, seconds: float) -> float:
        """Real seconds of a modelled one: by it a step of `flow` takes so many."""
        return seconds / self._flow[0]

    @property
    def scale(self) -> float:
        """That by which a step of `flow` takes the time that two cores need to be little beside it."""
        _, slots, devices = self._flow
        return self.scale_of(max(PACK_SECONDS * slots, DEVICE_SECONDS * devices))

    @property
    def _flow(self) -> tuple[float, float, int]:
        """Modelled seconds of a step of `flow`, packs one after the other in it, devices."""
        if self._modelled is None:
            config, emulation = self.setup(FLOW, 1.0)
            modelled = Modelled(config, emulation, emulation.plan(config), config.run.dir)
            slots = [len(step.slots) for step in islice(modelled.steps(), SKIPPED, STEPS)]
            self._modelled = self.step_seconds(self.play(FLOW, 1.0)), fmean(slots), emulation.num_devices
        return self._modelled

    def setup(
        self, variant: Variant, scale: float, name: str = "modelled", steps: int = STEPS
    ) -> tuple[Config, Emulation]:
        choices = self.choices(variant)
        assert choices is not None, variant
        emulation = self.case.emulation(choices, time_scale=scale, jitter=self.jitter, seed=self.seed)
        return self.case.config(emulation, variant, self.rows, self.folder / name, steps), emulation

    def play(self, variant: Variant, scale: float, steps: int = STEPS) -> Outcome:
        """What the schedule alone takes."""
        config, emulation = self.setup(variant, scale, steps=steps)
        with rare_collection():
            return Modelled(config, emulation, emulation.plan(config), config.run.dir).play(steps)

    @staticmethod
    def step_seconds(outcome: Outcome, skipped: int = SKIPPED) -> float:
        """Of the steps behind the first ones."""
        ends = [step.end for step in outcome.steps]
        return (ends[-1] - ends[skipped - 1]) / (len(ends) - skipped)
