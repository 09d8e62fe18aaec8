"""What a config has set of its sides binds every search: `launch` and `plan` look here (pure, contract C14).

| key of a side | binds |
|---|---|
| `num`, `layout` | the layout |
| `gradient_checkpointing`, also of `train` | whether layers run again in the backward |
| `threads` | cores of a process; colocated, where both sides are one process, the larger of the two. Nothing on a GPU |
"""

from __future__ import annotations

from flowtrain.allocator.candidates import Scope, Side
from flowtrain.allocator.layout import parse_layout
from flowtrain.config.schema import Config, SideConfig
from flowtrain.plan import Layout
from flowtrain.types import Role

SIDES = (Role.PRODUCER, Role.CONSUMER)


def side_of(config: Config, role: Role) -> SideConfig:
    return config.producers if role is Role.PRODUCER else config.consumers


def given_layout(config: Config, role: Role) -> Layout | None:
    """What `layout` or `num` says; None where it is open."""
    side = side_of(config, role)
    if side.layout is not None:
        return parse_layout(side.layout, f"{role}s.layout")
    return Layout(dp_replicate=side.num) if side.num else None


def has_open_sizes(config: Config) -> bool:
    """Whether the policy is to choose how many processes a side has."""
    return config.policy != "uniform" and any(given_layout(config, role) is None for role in SIDES)


def given_threads(config: Config, role: Role, placement: str) -> int | None:
    """CPU threads that the config gives a process of this side; None where they are open."""
    if placement != "colocated":
        return side_of(config, role).threads
    asked = (config.producers.threads, config.consumers.threads)
    return max((threads for threads in asked if threads is not None), default=None)


def bound_side(config: Config, role: Role, most: int | None = None) -> Side:
    """The side as the config binds it, and at most so many copies of what is open."""
    placement = "auto" if config.allocation.placement == "auto" else config.placement
    return Side(given_layout(config, role), given_threads(config, role, placement), most, config.recompute(role))


def bound_scope(config: Config) -> Scope:
    """All candidates that the config leaves."""
    return Scope(producers=bound_side(config, Role.PRODUCER), consumers=bound_side(config, Role.CONSUMER))


def bound_note(config: Config) -> list[str]:
    """The sentence on what is set; none where all is open."""
    keys = [
        f"{role}s.{name}: {str(value).lower()}"
        for role in SIDES
        for name in ("num", "layout", "threads", "gradient_checkpointing")
        if (value := getattr(side_of(config, role), name)) is not None
    ]
    if (value := config.train.gradient_checkpointing) is not None:
        keys.append(f"train.gradient_checkpointing: {str(value).lower()}")
    if not keys:
        return []
    first = keys[0].partition(":")[0]
    return [f"the config sets {', '.join(keys)}, which binds the plan (--set {first}=null leaves it open)"]
