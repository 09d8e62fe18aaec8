"""The rules of composition: everything beside the rows and the cost that a step depends on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from flowtrain.types import SampleMeta


@dataclass(frozen=True, slots=True)
class CompositionSpec:
    """Exactly one of `step_samples` and `step_packs` is given.

    Attributes:
        num_rows: rows of one epoch.
        step_samples: rows of a step; the number of packs follows.
        step_packs: packs of a step for each consumer rank; the number of rows follows.
        policy: a name in `flowtrain.packing.policies.POLICIES`.
        max_tokens: most tokens of a pack.
        lookahead: steps of rows among which a step is chosen.
        num_consumers: packs of a slot.
        num_producers: never enters packs or units; only who encodes a unit of a trainable encoder.
        trainable_encoder: whether the producer of a unit is fixed here.
        max_unit_patches: most patches of one encoder call; a larger sample goes alone.
        max_pack_vision_bytes: most pool bytes of a pack, headers included.
        horizon: first position that does not exist; None: epochs without end.
        block_bytes: pool bytes of one sample's features, header included.
    """

    num_rows: int
    step_samples: int | None
    step_packs: int | None
    policy: str
    max_tokens: int
    lookahead: int
    num_consumers: int
    num_producers: int
    trainable_encoder: bool
    max_unit_patches: int
    max_pack_vision_bytes: int
    horizon: int | None
    block_bytes: Callable[[SampleMeta], int]

    def __post_init__(self) -> None:
        assert (self.step_samples is None) != (self.step_packs is None), "give one of step_samples and step_packs"
        assert min(self.num_rows, self.max_tokens, self.lookahead, self.num_consumers, self.num_producers) > 0, self

    def vision_bytes(self, sample: SampleMeta) -> int:
        """Pool bytes of a sample; a row without images takes none."""
        return self.block_bytes(sample) if sample.images else 0

    def to_dict(self) -> dict[str, Any]:
        """For the decision log; the size of a block follows from the model and is left out."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "block_bytes"}
