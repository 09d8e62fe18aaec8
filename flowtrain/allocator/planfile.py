"""`plan.yaml`: what `flowtrain plan` writes, a person may edit, and `flowtrain launch --plan` obeys.

    placement: disaggregated
    producers: {layout: r2, threads: 1, gradient_checkpointing: false}
    consumers: {layout: r4, threads: 1, gradient_checkpointing: true}
    expected: {...}                          # for the reader; launch does not look at it

`gradient_checkpointing` is there for a side with a backward: its memory rests on it. `threads` is there where the
devices are cores; a plan for GPUs leaves CPU threads to the config. The plan that a run writes into its own folder is
read as well: its ranks say the threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowtrain.allocator.bound import SIDES, given_layout, given_threads, side_of
from flowtrain.allocator.layout import check_layout
from flowtrain.allocator.report import Report
from flowtrain.config.document import Dumper, read_document
from flowtrain.config.schema import Config
from flowtrain.errors import ConfigError, PlanError
from flowtrain.plan import Layout, layout_of, layout_text
from flowtrain.shapes import ModelShape
from flowtrain.types import Role

KEYS = {"placement", "producers", "consumers", "expected", "readers", "cpus", "pool_bytes", "spare"}
SIDE_KEYS = {"layout", "threads", "gradient_checkpointing", "ranks", "modules"}


@dataclass(frozen=True, slots=True)
class PlanFile:
    """`places`: file:line:column of each key, for what is told about it."""

    placement: str
    layouts: Mapping[Role, str]
    threads: Mapping[Role, int | None]
    recompute: Mapping[Role, bool | None]
    places: Mapping[str, str]


def plan_file_text(report: Report) -> str:
    """The text of a plan file."""
    data = report.to_dict()
    content: dict[str, Any] = {"placement": data["placement"]}
    for role in SIDES:
        chosen = [choice for choice in report.found.choices if choice.load.role is role]
        if not chosen:
            continue
        first = chosen[0]
        side: dict[str, Any] = {"layout": layout_text(first.candidate.layout)}
        if report.problem.cluster[first.pool].node.on_cpu:
            side["threads"] = first.candidate.threads
        if first.load.needs_backward:
            side["gradient_checkpointing"] = bool(first.candidate.recompute)
        if len(chosen) > 1:
            side["modules"] = {c.load.name: layout_text(c.candidate.layout) for c in chosen}
        content[f"{role}s"] = side
    content["expected"] = data
    return document_text(content)


def document_text(content: Mapping[str, Any]) -> str:
    """The text of a plan file of this content."""
    import yaml

    head = "# Written by `flowtrain plan`. Edit it and give it to `flowtrain launch CONFIG --plan FILE`.\n"
    return head + yaml.dump(dict(content), Dumper=Dumper, sort_keys=False, allow_unicode=True)


def read_plan_file(path: Path) -> PlanFile:
    """The plan in a file.

    Raises:
        ConfigError: it is none; with file, line and column.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; write a plan with `flowtrain plan --out`"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text: {error.reason}; write a plan with `flowtrain plan --out`") from None
    document = read_document(text, str(path))
    data = document.data
    if document.issues:
        raise ConfigError(str(document.issues[0]))
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: this is no plan; write one with `flowtrain plan --out`")
    places = {".".join(key): str(place) for key, place in document.places.items()}

    def wrong(key: str, text: str) -> ConfigError:
        return ConfigError(f"{places.get(key, path)}: {key}: {text}")

    for key in data:
        if key not in KEYS:
            raise wrong(key, f"a plan has no such key: it has {', '.join(sorted(KEYS))}")
    if data.get("placement") not in ("colocated", "disaggregated", "mixed"):
        raise wrong("placement", f"{data.get('placement')!r} is neither colocated nor disaggregated")
    layouts: dict[Role, str] = {}
    threads: dict[Role, int | None] = {}
    recompute: dict[Role, bool | None] = {}
    for role in SIDES:
        name = f"{role}s"
        side = data.get(name)
        if not isinstance(side, dict) or not isinstance(side.get("layout"), str):
            raise wrong(name, "a plan says the layout of this side, such as {layout: r2, threads: 1}")
        for key in side:
            if key not in SIDE_KEYS:
                raise wrong(f"{name}.{key}", f"a side of a plan has no such key: it has {', '.join(sorted(SIDE_KEYS))}")
        count = side.get("threads")
        if count is None and "ranks" in side:
            count = _threads_of(side["ranks"])
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise wrong(f"{name}.threads", f"{count!r} is no number of threads of each process: write one whole number")
        again = side.get("gradient_checkpointing")
        if again is not None and not isinstance(again, bool):
            raise wrong(f"{name}.gradient_checkpointing", f"{again!r} is neither true nor false")
        layouts[role], threads[role], recompute[role] = side["layout"], count, again
    return PlanFile(data["placement"], layouts, threads, recompute, places)


def _threads_of(ranks: Any) -> Any:
    """What the plan of a run says of its processes; whatever else stands there is no number of threads."""
    if not isinstance(ranks, list) or not ranks or not all(isinstance(rank, dict) for rank in ranks):
        return ranks
    numbers = [rank.get("threads") for rank in ranks]
    return numbers[0] if all(number == numbers[0] for number in numbers) else numbers


def obey(config: Config, plan: PlanFile, shape: ModelShape) -> Config:
    """The config with the plan's placement, layouts, threads and recomputation.

    Raises:
        PlanError: this release cannot run it, or the config has set something else; with file, line and column.
    """
    update: dict[str, Any] = {}
    if plan.placement == "mixed":
        raise PlanError(
            f"{plan.places['placement']}: placement: mixed placements can be planned, not "
            f"launched: write colocated or disaggregated"
        )
    if config.allocation.placement not in (None, "auto", plan.placement):
        raise PlanError(
            f"{plan.places['placement']}: placement: the plan says {plan.placement} and the config "
            f"{config.allocation.placement}: change one of them"
        )
    update["allocation"] = config.allocation.model_copy(update={"placement": plan.placement})
    for role in SIDES:
        name, side = f"{role}s", side_of(config, role)
        layout, key = plan.layouts[role], f"{name}.layout"
        place = plan.places.get(key, "")
        try:
            planned = layout_of(layout)
        except ValueError as error:
            raise PlanError(f"{place}: {key}: {error}") from None
        asked = given_layout(config, role) or planned
        if asked != planned:
            raise PlanError(
                f"{place}: {key}: the plan says {layout} and the config {layout_text(asked)}: change one of them"
            )
        check_layout(planned, role, shape, f"{place}: {key}")
        if plan.placement == "colocated" and planned != Layout(
            dp_replicate=layout_of(plan.layouts[Role.CONSUMER]).world_size
        ):
            raise PlanError(
                f"{place}: {key}: colocated sides are as many whole copies each, and the plan says {layout}"
            )
        given = given_threads(config, role, plan.placement)
        count = plan.threads[role] or given
        if given is not None and count != given:
            at = plan.places.get(f"{name}.threads", place)
            raise PlanError(f"{at}: {name}.threads: the plan says {count} and the config {given}: change one of them")
        again = _agreed(config, plan, role)
        update[name] = side.model_copy(
            update={"num": None, "layout": layout, "threads": count, "gradient_checkpointing": again}
        )
    return config.model_copy(update=update)


def _agreed(config: Config, plan: PlanFile, role: Role) -> bool | None:
    """Whether a side's layers run again; None where neither config nor plan says it."""
    planned, asked, key = plan.recompute[role], config.recompute(role), f"{role}s.gradient_checkpointing"
    if planned is not None and asked is not None and planned != asked:
        raise PlanError(
            f"{plan.places.get(key, '')}: {key}: the plan says {str(planned).lower()} and the config "
            f"{str(asked).lower()}: change one of them"
        )
    return asked if planned is None else planned
