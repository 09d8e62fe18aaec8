"""A plan as a table for people, and as plain data for `plan.yaml` and the decision log."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flowtrain.allocator.forecast import Forecast
from flowtrain.config.schema import Config
from flowtrain.plan import ModulePlan, Plan, RankPlan, layout_text
from flowtrain.types import Role


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """JSON and YAML ready; `spare` is there where producers may come."""
    return {
        "placement": plan.placement,
        "producers": _side_to_dict(plan.producers),
        "consumers": _side_to_dict(plan.consumers),
        "readers": plan.readers,
        "cpus": plan.cpus,
        "pool_bytes": plan.pool_bytes,
        **({"spare": _ranks_to_list(plan.spare)} if plan.spare else {}),
    }


def run_plan_to_dict(config: Config, plan: Plan, expected: Forecast | None) -> dict[str, Any]:
    """What a run writes into its folder: the plan, recomputation of each side where it is said, what is expected."""
    found = plan_to_dict(plan)
    for role in (Role.PRODUCER, Role.CONSUMER):
        if (again := config.recompute(role)) is not None:
            found[f"{role}s"] = {**found[f"{role}s"], "gradient_checkpointing": again}
    return found if expected is None else {**found, "expected": expected.to_dict()}


def describe_plan(plan: Plan) -> str:
    """One line for each kind of process."""
    rows = [("role", "processes", "layout", "device", "threads each", "pool segment each", "nodes")]
    rows.append(("reader", str(plan.readers), "", "cpu", "1", "", "0"))
    for side in (plan.producers, plan.consumers):
        first = side.ranks[0]
        segment = _mebibytes(first.segment_bytes) if first.segment_bytes else ""
        nodes = ", ".join(map(str, sorted({rank.node for rank in side.ranks})))
        layout, threads = layout_text(side.layout), str(first.threads)
        rows.append((side.role.value, str(len(side.ranks)), layout, first.device, threads, segment, nodes))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    title = f"plan: {plan.placement}, {plan.cpus} cores, pool of {_mebibytes(plan.pool_bytes)}"
    return "\n".join([title, *lines])


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.4g} MiB"


def _side_to_dict(side: ModulePlan) -> dict[str, Any]:
    return {"layout": layout_text(side.layout), "ranks": _ranks_to_list(side.ranks)}


def _ranks_to_list(ranks: Iterable[RankPlan]) -> list[dict[str, Any]]:
    return [{"device": r.device, "threads": r.threads, "segment_bytes": r.segment_bytes, "node": r.node} for r in ranks]
