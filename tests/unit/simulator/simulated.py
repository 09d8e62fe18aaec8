"""Steps of equal packs, and runs of them: what the tests of the simulator play."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flowtrain.packing import CompositionSpec, CostModel
from flowtrain.packing.trace import composed_steps
from flowtrain.pool.block import block_bytes
from flowtrain.runtime.exchange import exchange_of
from flowtrain.simulator import Control, Disturbances, Simulation, System
from flowtrain.simulator.simulation import Shown
from flowtrain.simulator.timing import StepSeconds
from flowtrain.types import ImageMeta, Role, SampleMeta, Step

TOKENS = 64
BYTES = 48 * TOKENS
AT_ONCE = Control(latency_seconds=0.0, answer_seconds=0.0)


def payload_bytes(sample: SampleMeta) -> int:
    return 48 * sample.vision_tokens


def rows(num: int) -> list[SampleMeta]:
    """Each fills a pack and has one image."""
    image = ImageMeta(8, 8, TOKENS, 4 * TOKENS, (4 * TOKENS) ** 2)
    return [SampleMeta.of(n, n, f"row-{n}", 64, TOKENS, 32, (image,)) for n in range(num)]


def steps(
    num_steps: int, packs: int, consumers: int, producers: int = 1, trainable: bool = True, colocated: bool = False
) -> Sequence[Step]:
    """`packs` a rank and step, of one row each."""
    spec = CompositionSpec(
        num_rows=num_steps * packs * consumers,
        step_samples=packs * consumers,
        step_packs=None,
        policy="arrival",
        max_tokens=2 * TOKENS,
        lookahead=1,
        num_consumers=consumers,
        num_producers=producers,
        trainable_encoder=trainable,
        max_unit_patches=4 * TOKENS,
        max_pack_vision_bytes=1 << 30,
        horizon=num_steps * packs * consumers,
        colocated=colocated,
        block_bytes=lambda tokens, patches: block_bytes(48 * tokens),
    )
    return list(composed_steps(spec, CostModel.reference(), rows(spec.num_rows)))


@dataclass(frozen=True)
class Even:
    """Every unit, backward, pack, reduction and update takes the same."""

    encode: float = 1.0
    backward: float = 0.0
    pack: float = 1.0
    fill: float = 0.0
    reduce: float = 0.0
    update: float = 0.0

    def of(self, step: Step) -> StepSeconds:
        ids = [unit.id for pack in step.packs for unit in pack.units]
        packs = [[self.pack for _ in slot] for slot in step.slots]
        fill = [self.fill] * len(step.slots[0])
        return StepSeconds(dict.fromkeys(ids, self.encode), dict.fromkeys(ids, self.backward), packs, fill)

    def reduce_seconds(self, role: Role) -> float:
        return self.reduce

    def update_seconds(self, role: Role) -> float:
        return self.update


def simulation(
    timing: Even,
    *,
    num_steps: int = 10,
    packs: int = 4,
    producers: int = 1,
    consumers: int = 1,
    trainable: bool = True,
    exchange: str = "pool",
    prefill: int = 0,
    blocks: float = 1000,
    disturbances: Disturbances | None = None,
    shown: Shown | None = None,
    **system: Any,
) -> Simulation:
    """`blocks`: for how many a producer's segment has room."""
    sides = frozenset({Role.PRODUCER, Role.CONSUMER} if trainable else {Role.CONSUMER})
    return Simulation(
        System(
            num_producers=producers,
            num_consumers=consumers,
            num_devices=producers + consumers,
            segment_bytes=int(blocks * block_bytes(BYTES)),
            payload_bytes=payload_bytes,
            trainable_encoder=trainable,
            reduced_roles=sides,
            exchange=exchange_of(exchange, colocated=system.get("colocated", False), prefill=prefill),
            **{"control": AT_ONCE, **system},
        ),
        timing,
        steps(num_steps, packs, consumers, producers, trainable, system.get("colocated", False)),
        disturbances,
        shown,
    )
