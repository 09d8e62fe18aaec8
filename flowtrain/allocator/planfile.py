"""`plan.yaml`: what `flowtrain plan` writes, a person may edit, and `flowtrain launch --plan` obeys.

    placement: disaggregated
    producers: {layout: r2, threads: 1}
    consumers: {layout: r4, threads: 1}
    expected: {...}                          # for the reader; launch does not look at it

The plan that a run writes into its own folder is read as well: its ranks say the threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowtrain.allocator.layout import check_layout
from flowtrain.allocator.report import Report
from flowtrain.config.document import Dumper, read_document
from flowtrain.config.schema import Config
from flowtrain.errors import ConfigError, PlanError
from flowtrain.plan import Layout, layout_of, layout_text
from flowtrain.shapes import ModelShape
from flowtrain.types import Role

SIDES = {"producers": Role.PRODUCER, "consumers": Role.CONSUMER}
KEYS = {"placement", "producers", "consumers", "expected", "readers", "cpus", "pool_bytes"}
SIDE_KEYS = {"layout", "threads", "ranks", "modules"}


@dataclass(frozen=True, slots=True)
class PlanFile:
    """`places`: file:line:column of each key, for what is told about it."""

    placement: str
    layouts: Mapping[Role, str]
    threads: Mapping[Role, int | None]
    places: Mapping[str, str]


def plan_file_text(report: Report) -> str:
    """The text of a plan file."""
    data = report.to_dict()
    content: dict[str, Any] = {"placement": data["placement"]}
    for name, role in SIDES.items():
        chosen = [choice for choice in report.found.choices if choice.load.role is role]
        if not chosen:
            continue
        first = chosen[0].candidate
        content[name] = {"layout": layout_text(first.layout), "threads": first.threads}
        if len(chosen) > 1:
            content[name]["modules"] = {c.load.name: layout_text(c.candidate.layout) for c in chosen}
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
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a plan: {error}; write one with `flowtrain plan --out`") from None
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
    for name, role in SIDES.items():
        side = data.get(name)
        if not isinstance(side, dict) or not isinstance(side.get("layout"), str):
            raise wrong(name, "a plan says the layout of this side, such as {layout: r2, threads: 1}")
        for key in side:
            if key not in SIDE_KEYS:
                raise wrong(f"{name}.{key}", f"a side of a plan has no such key: it has {', '.join(sorted(SIDE_KEYS))}")
        count = side.get("threads")
        if count is None and isinstance(side.get("ranks"), list) and side["ranks"]:
            count = side["ranks"][0].get("threads")
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise wrong(f"{name}.threads", f"{count!r} is no number of threads: write a whole number from 1")
        layouts[role], threads[role] = side["layout"], count
    return PlanFile(data["placement"], layouts, threads, places)


def obey(config: Config, plan: PlanFile, shape: ModelShape) -> Config:
    """The config with the plan's placement, layouts and threads.

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
    for name, role in SIDES.items():
        side = getattr(config, name)
        layout, key = plan.layouts[role], f"{name}.layout"
        place = plan.places.get(key, "")
        try:
            planned = layout_of(layout)
        except ValueError as error:
            raise PlanError(f"{place}: {key}: {error}") from None
        asked = layout_of(side.layout) if side.layout else Layout(dp_replicate=side.num) if side.num else planned
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
        count = plan.threads[role] or side.threads
        if side.threads is not None and count != side.threads:
            at = plan.places.get(f"{name}.threads", place)
            raise PlanError(f"{at}: {name}.threads: the plan says {count} and the config {side.threads}: change one")
        update[name] = side.model_copy(update={"num": None, "layout": layout, "threads": count})
    return config.model_copy(update=update)
