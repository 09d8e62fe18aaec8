"""A plan as people read it and as data: layouts, rates, MFU, memory, what binds it, neighbours, sensitivity."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowtrain.allocator.explain import Effect, Explanation
from flowtrain.allocator.hardware import num_devices
from flowtrain.allocator.load import RECOMPUTE
from flowtrain.allocator.solve import Choice, Problem, Solution
from flowtrain.plan import layout_text

BAR = 24
SMALL_PART = 0.005
"""Share of the memory below which a part is not named in the text."""
GIGA = 1e9


@dataclass(frozen=True, slots=True)
class Report:
    """`notes`: what was assumed, in sentences; `parts`: bytes of a device (of a process, on a CPU) by part, for each
    module, without the context."""

    model: str
    problem: Problem
    found: Solution
    explanation: Explanation | None
    notes: tuple[str, ...]
    parts: Mapping[str, Mapping[str, float]]

    @property
    def mfu_percent(self) -> float:
        """Of all devices of the plan; FLOPs by contract C13."""
        flops = self.found.rate * sum(load.train_flops for load in self.problem.loads)
        return 100.0 * flops / self._peak(self.found.choices)

    def _peak(self, choices: Sequence[Choice]) -> float:
        """FLOP/s of the devices that these modules have, shared ones once."""
        groups = {choice.group: choice for choice in choices}
        return sum(
            choice.candidate.devices * self.problem.cluster[choice.pool].node.peak(self.problem.job.dtype)
            for choice in groups.values()
        )

    def module(self, choice: Choice) -> dict[str, Any]:
        node = self.problem.cluster[choice.pool].node
        c = choice.candidate
        # On a CPU the search counts memory by core, and a process has that of its threads.
        parts = {**self.parts[choice.load.name], "context": node.context_bytes}
        return {
            "layout": layout_text(c.layout),
            "devices": c.devices,
            "device": node.name,
            "threads": c.threads,
            "schedule": c.schedule,
            "pack_tokens": c.pack_tokens,
            "recompute": RECOMPUTE[c.recompute],
            "packs_per_step": choice.packs,
            "samples_per_second": 1.0 / choice.seconds if choice.seconds else None,
            "mfu_percent": 100.0 * self.found.rate * choice.load.train_flops / self._peak([choice]),
            "memory_bytes": choice.memory_bytes * c.threads + node.context_bytes,
            "device_memory_bytes": node.memory_bytes * c.threads,
            "memory_parts_bytes": parts,
            "shares_devices": self.found.partition[choice.group] != (self.problem.loads.index(choice.load),),
        }

    def to_dict(self) -> dict[str, Any]:
        """JSON and YAML ready."""
        found, problem = self.found, self.problem
        tokens = sum(load.tokens for load in problem.loads if load.name == "backbone")
        result: dict[str, Any] = {
            "model": self.model,
            "placement": problem.placement(found.partition),
            "samples_per_second": found.rate,
            "tokens_per_second_per_device": found.rate * tokens / found.devices,
            "mfu_percent": self.mfu_percent,
            "devices": found.devices,
            "devices_available": num_devices(problem.cluster),
            "step_samples": problem.job.step_samples,
            "step_seconds": problem.job.step_samples / found.rate,
            "fill_and_drain_seconds": found.fill_seconds * problem.job.step_samples,
            "modules": {choice.load.name: self.module(choice) for choice in found.choices},
            "notes": list(self.notes),
        }
        if self.explanation is not None:
            why = self.explanation
            result["binding"] = why.binding
            result["neighbours"] = [
                {
                    "what": other.what,
                    "samples_per_second": other.rate,
                    "loss_percent": other.loss_percent,
                    "layouts": {c.load.name: layout_text(c.candidate.layout) for c in other.solution.choices},
                }
                for other in why.neighbours
            ]
            result["levers_percent"] = {effect.what: effect.gain_percent for effect in why.levers}
            result["sensitivity_percent"] = {effect.what: effect.gain_percent for effect in why.sensitivity}
        return result

    def text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        found, problem, data = self.found, self.problem, self.to_dict()
        there = " + ".join(f"{pool.num_nodes} x {pool.node.devices} {pool.node.name}" for pool in problem.cluster)
        yield f"{self.model} on {there}: {data['placement']}, {found.devices} of {data['devices_available']} devices"
        yield (
            f"{found.rate:.4g} samples/s, {data['tokens_per_second_per_device']:.4g} tokens/s a device, "
            f"MFU {self.mfu_percent:.1f} %, {data['step_seconds']:.3g} s a step of {problem.job.step_samples} samples"
        )
        yield ""
        yield from _table(self._rows(data["modules"]))
        yield ""
        for choice in found.choices:
            yield self._memory_line(choice)
        if self.explanation is not None:
            why = self.explanation
            yield ""
            yield f"binding: {why.binding}"
            for other in why.neighbours:
                yield f"not {other.what}: {_percent(-other.loss_percent)} ({_layouts(other.solution)})"
            yield f"would change the rate: {_effects(why.levers)}"
            yield f"sensitivity: {_effects(why.sensitivity)}"
        for note in self.notes:
            yield f"note: {note}"

    def _rows(self, modules: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
        yield ("module", "layout", "devices", "pack", "recompute", "packs", "samples/s", "MFU")
        for name, m in modules.items():
            shared = " shared" if m["shares_devices"] else ""
            schedule = "" if m["schedule"] == "none" else f" {m['schedule']}"
            threads = f" x {m['threads']} threads" if m["threads"] > 1 else ""
            rate = "-" if m["samples_per_second"] is None else f"{m['samples_per_second']:.4g}"
            yield (
                name,
                f"{m['layout']}{schedule}",
                f"{m['devices']} {m['device']}{threads}{shared}",
                str(m["pack_tokens"]),
                m["recompute"],
                str(m["packs_per_step"]),
                rate,
                f"{m['mfu_percent']:.1f} %",
            )

    def _memory_line(self, choice: Choice) -> str:
        m = self.module(choice)
        used, there = m["memory_bytes"], m["device_memory_bytes"]
        full = round(BAR * min(1.0, used / there))
        large = {name: size for name, size in m["memory_parts_bytes"].items() if size >= SMALL_PART * there}
        large["others"] = used - sum(large.values())
        parts = ", ".join(f"{name} {size / GIGA:.3g}" for name, size in large.items() if size >= SMALL_PART * used)
        bar = "#" * full + "." * (BAR - full)
        return f"memory  {choice.load.name:<10} [{bar}] {used / GIGA:.3g} of {there / GIGA:.3g} GB: {parts}"


def _table(rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    cells = list(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _layouts(found: Solution) -> str:
    return ", ".join(f"{c.load.name} {layout_text(c.candidate.layout)}" for c in found.choices)


def _effects(effects: Sequence[Effect]) -> str:
    return "; ".join(
        f"{effect.what} {'does not fit' if effect.gain_percent is None else _percent(effect.gain_percent)}"
        for effect in effects
    )


def _percent(value: float) -> str:
    return f"{value + 0.0:+.1f} %"
