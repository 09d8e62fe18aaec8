"""`debug.*`: delays and faults planted on purpose, and the pool's journal."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from flowtrain.config.section import Section

Fault = Literal[
    "encoder_gradient_doubled",
    "encoder_gradient_divided_by_producers",
    "denominator_plus_one",
    "denominator_minus_one",
    "image_gradient_dropped",
    "images_swapped",
    "module_not_clipped",
    "sample_sees_neighbour",
    "stale_encoder",
    "text_only_step_decays_encoder",
]


class DelayConfig(Section):
    producer_unit_ms: dict[int, Annotated[float, Field(ge=0)]] = Field(
        default_factory=dict, description="Sleep of a producer rank before each unit."
    )
    consumer_pack_ms: dict[int, Annotated[float, Field(ge=0)]] = Field(
        default_factory=dict, description="Sleep of a consumer rank before each pack."
    )


class DebugConfig(Section):
    delays: DelayConfig = DelayConfig()
    pool_journal: bool = Field(False, description="Write every reservation and release to RUN_DIR/pool.csv.")
    faults: tuple[Fault, ...] = Field((), description="Faults planted on purpose, to prove that `verify` sees them.")
