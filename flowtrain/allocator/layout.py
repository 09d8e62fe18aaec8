"""Whether a module can be laid out as asked: what does not divide is refused with the numbers before a start."""

from __future__ import annotations

from flowtrain.errors import PlanError
from flowtrain.plan import Layout, layout_of
from flowtrain.shapes import Mixer, ModelShape
from flowtrain.types import Role


def parse_layout(text: str, key: str) -> Layout:
    """The layout that `text` writes.

    Raises:
        PlanError: it is no layout; the sentence names `key`, where it stands.
    """
    try:
        return layout_of(text)
    except ValueError as error:
        raise PlanError(f"{key} is {error}") from None


def check_layout(layout: Layout, role: Role, shape: ModelShape, key: str) -> None:
    """PlanError, with the numbers, where the module does not divide as asked."""
    for problem in _problems(layout, role, shape):
        raise PlanError(f"{key}: {problem}")


def _problems(layout: Layout, role: Role, shape: ModelShape) -> list[str]:
    """Sentences on what is wrong, the gravest first."""
    found = []
    name, heads, kv_heads = "backbone", shape.text.heads, shape.text.kv_heads
    if role is Role.PRODUCER:
        name, heads, kv_heads = "encoder", shape.vision.heads, shape.vision.heads
    over = layout.tp * layout.cp
    ways = f"t{layout.tp}" if layout.cp == 1 else f"t{layout.tp}c{layout.cp}"
    if heads % over:
        found.append(f"{ways} divides {heads} attention heads of the {name} by {over}: choose a divisor of {heads}")
    elif kv_heads % over and over % kv_heads:
        found.append(
            f"{ways} spreads {kv_heads} key-value heads of the {name} over {over} ranks: choose a divisor or a "
            f"multiple of {kv_heads}"
        )
    if role is Role.PRODUCER and (layout.cp, layout.pp, layout.ep, layout.vpp) != (1, 1, 1, 1):
        found.append("an encoder is cut by r, f and t only: c, p, v and e are the backbone's")
    elif layout.num_sections > shape.text.layers:
        ways = f"p{layout.pp}" if layout.vpp == 1 else f"p{layout.pp}v{layout.vpp}"
        found.append(
            f"{ways} cuts {shape.text.layers} layers of the {name} into {layout.num_sections} sections: lower it"
        )
    elif layout.vpp > 1 and layout.pp == 1:
        found.append(f"v{layout.vpp} is for the sections of a pipeline's rank, and p is 1: leave it out, or give p")
    recurrent = shape.text.layers_with(Mixer.RECURRENT)
    if role is Role.CONSUMER and recurrent and layout.world_size > layout.dp_replicate:
        found.insert(
            0,
            f"{recurrent} of {shape.text.layers} layers of the {name} mix tokens otherwise than by attention, so its "
            f"samples go through it one by one: use copies, such as r{layout.world_size}",
        )
    experts = shape.text.moe.experts if shape.text.moe else 0
    if role is Role.CONSUMER and layout.ep > 1:
        if not experts:
            found.append(f"e{layout.ep} is for experts, and the {name} has 0: leave it out")
        elif experts % layout.ep:
            found.append(f"e{layout.ep} divides {experts} experts of the {name} by {layout.ep}: choose a divisor")
        elif layout.dp_shard * layout.cp % layout.ep:
            found.append(
                f"e{layout.ep} borrows its ranks from f{layout.dp_shard} and c{layout.cp}, which are "
                f"{layout.dp_shard * layout.cp}: choose a divisor of that"
            )
    return found
