"""The rules of composition: everything beside the rows and the cost that a step depends on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

from flowtrain.config.schema import PackingConfig, StepSize
from flowtrain.plan import Layout
from flowtrain.types import SampleMeta

Sync = Literal["step", "microbatch", "beat"]
"""Where consumer ranks wait for one another: once a step, in every slot, or in every beat of a pipeline."""

GRACE_STEPS = 2
"""Steps that a row may wait beyond the usual bound where its step would be uneven with it (long runs of one source)."""


def sync_of(layout: Layout) -> Sync:
    """The synchronisation pattern of a backbone's layout.

    >>> sync_of(Layout(dp_replicate=4)), sync_of(Layout(dp_shard=8)), sync_of(Layout(dp_shard=4, pp=2))
    ('step', 'microbatch', 'beat')
    """
    if layout.pp > 1:
        return "beat"
    return "microbatch" if layout.dp_shard > 1 or layout.ep > 1 else "step"


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
        producer_shards: producers that run unit by unit together, because each holds a piece of the encoder.
        trainable_encoder: whether the producer of a unit is fixed here; it is also where producers run together.
        max_unit_patches: most patches of one encoder call; a larger sample goes alone.
        max_pack_vision_bytes: most pool bytes of a pack, headers included.
        horizon: first position that does not exist; None: epochs without end.
        block_bytes: pool bytes of the features of a sample of so many vision tokens and patches, header included.
        max_patches: most encoder patches of a pack; None: any number.
        max_images: most images of a pack; None: any number.
        max_trained_tokens: most trained tokens of a pack; None: any number.
        sync: where ranks wait for one another; follows from the layout (`sync_of`).
        own_pack: whether a row of more than `max_tokens` gets a pack of its own; otherwise it cannot be composed.
        max_wait_steps: most steps between a row's entry into the window and its training, for policies that bound it;
            `GRACE_STEPS` more where a step would else be uneven; a row that alone costs more than a full pack of short
            ones may wait twice as long.
        colocated: a rank's packs are encoded by the producer that shares its process.
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
    block_bytes: Callable[[int, int], int]
    max_patches: int | None = None
    max_images: int | None = None
    max_trained_tokens: int | None = None
    sync: Sync = "step"
    own_pack: bool = False
    max_wait_steps: int = 4
    producer_shards: int = 1
    colocated: bool = False

    def __post_init__(self) -> None:
        assert (self.step_samples is None) != (self.step_packs is None), "give one of step_samples and step_packs"
        assert min(self.num_rows, self.max_tokens, self.lookahead, self.num_consumers, self.num_producers) > 0, self
        assert min(self.max_wait_steps, self.producer_shards) > 0, self
        assert self.num_producers % self.producer_shards == 0, self
        assert not self.colocated or self.num_producers == self.num_consumers, self

    @classmethod
    def of(
        cls,
        packing: PackingConfig,
        policy: str,
        step: StepSize,
        *,
        consumers: Layout,
        producers: Layout,
        colocated: bool,
        trainable_encoder: bool,
        max_unit_patches: int,
        max_pack_vision_bytes: int,
        block_bytes: Callable[[int, int], int],
        num_rows: int,
        horizon: int | None,
    ) -> CompositionSpec:
        """The rules of a run, and of whatever stands for one: what a config says of packs is read here only."""
        return cls(
            num_rows=num_rows,
            step_samples=step.samples,
            step_packs=step.packs,
            policy=policy,
            max_tokens=packing.max_tokens,
            lookahead=packing.lookahead,
            num_consumers=consumers.dp_degree,
            num_producers=producers.dp_degree,
            producer_shards=producers.dp_shard,
            trainable_encoder=trainable_encoder,
            max_unit_patches=max_unit_patches,
            max_pack_vision_bytes=max_pack_vision_bytes,
            horizon=horizon,
            block_bytes=block_bytes,
            max_patches=packing.max_patches,
            max_images=packing.max_images,
            max_trained_tokens=packing.max_trained_tokens,
            sync=sync_of(consumers),
            own_pack=packing.on_long_row == "own_pack",
            max_wait_steps=packing.max_wait_steps,
            colocated=colocated,
        )

    @property
    def num_packs(self) -> int | None:
        """Packs of a step over all ranks, where they are given."""
        return None if self.step_packs is None else self.step_packs * self.num_consumers

    @property
    def wait_steps(self) -> int:
        """The bound in force: a row is in the window for `lookahead` steps even in order of arrival."""
        return max(self.max_wait_steps, self.lookahead)

    def longest_wait(self, heavy: bool) -> int:
        """The bound that nothing exceeds."""
        return max(2 * self.wait_steps, self.wait_steps + GRACE_STEPS) if heavy else self.wait_steps + GRACE_STEPS

    def vision_bytes(self, sample: SampleMeta) -> int:
        """Pool bytes of a sample; a row without images takes none."""
        return self.block_bytes(sample.vision_tokens, sample.patches) if sample.images else 0

    def to_dict(self) -> dict[str, Any]:
        """For the decision log; the size of a block follows from the model and is left out."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "block_bytes"}
