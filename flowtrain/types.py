"""The nouns that every part shares: samples, images, encode units, packs, steps, addresses and embeddings.

Plain frozen data, no behaviour that depends on time, threads, torch or Ray (contract C10).

    order ──▶ SampleMeta ──▶ Pack ─┬─▶ EncodeUnit ──▶ EmbeddingRef (what a producer announces)
                                   └─▶ Step (slots of packs, one pack a rank)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, NamedTuple, NewType, TypeVar

Address = NewType("Address", int)
"""A place in the pool's 64-bit address space; `flowtrain.pool.address` takes it apart."""


class Role(StrEnum):
    PRODUCER = "producer"
    CONSUMER = "consumer"
    READER = "reader"


class Module(StrEnum):
    """The three parts of a vision-language model; every parameter belongs to exactly one (contract C4)."""

    ENCODER = "encoder"
    PROJECTOR = "projector"
    BACKBONE = "backbone"


class Phase(StrEnum):
    TRAIN = "train"
    EVAL = "eval"


class Cut(StrEnum):
    """Where the model is cut in two (C4): `BEFORE_PROJECTOR` when a frozen encoder feeds a trainable projector."""

    AFTER_PROJECTOR = "after-projector"
    BEFORE_PROJECTOR = "before-projector"

    @classmethod
    def of(cls, frozen: Collection[Module]) -> Cut:
        """Before a projector that trains on a frozen encoder: the flow stays one-way.

        >>> Cut.of({Module.ENCODER}), Cut.of({Module.ENCODER, Module.PROJECTOR})
        (<Cut.BEFORE_PROJECTOR: 'before-projector'>, <Cut.AFTER_PROJECTOR: 'after-projector'>)
        """
        before = Module.ENCODER in frozen and Module.PROJECTOR not in frozen
        return cls.BEFORE_PROJECTOR if before else cls.AFTER_PROJECTOR


class FeatureSpec(NamedTuple):
    """One tensor that crosses the cut: one row of `width` numbers for each visual token, or for each patch.

    With a class token, every `tile_patches` patches have `class_rows` rows more.
    """

    rows: Literal["token", "patch"]
    width: int
    class_rows: int = 0
    tile_patches: int = 1

    def num_rows(self, tokens: int, patches: int) -> int:
        """Rows for a sample of so many tokens and patches.

        >>> FeatureSpec("patch", 8, class_rows=1, tile_patches=16).num_rows(tokens=8, patches=32)
        34
        """
        if self.rows == "token":
            return tokens
        return patches + self.class_rows * -(-patches // self.tile_patches)


class ImageMeta(NamedTuple):
    """One image of a sample as its header tells it, before any pixel is decoded.

    Attributes:
        height: pixels of the stored image.
        width: pixels of the stored image.
        tokens: LLM tokens that stand for it (its placeholders).
        patches: vision-encoder patches.
        patch_pairs: pairs of patches that attend to each other, over the encoder's layers
            (`EncoderShape.attended_pairs`).
    """

    height: int
    width: int
    tokens: int
    patches: int
    patch_pairs: int


class SampleMeta(NamedTuple):
    """One training row without its payload. `of` makes one and adds up its images, where it is read, once.

    Attributes:
        position: place in the run's global order (epoch · rows + index in the epoch's permutation).
        row: index of the row in the source; a producer reads the images of this row.
        id: the row's own id, or `row-N`.
        text_tokens: tokens that are not image placeholders.
        vision_tokens: image placeholders.
        trained_tokens: tokens with a label (assistant tokens and the end token).
        images: one entry per image, in the order of their placeholders.
        block: number of the payload block that holds this sample's token ids.
        place: of the sample within that block.
        patches: of all images.
        patch_pairs: of all images.
    """

    position: int
    row: int
    id: str
    text_tokens: int
    vision_tokens: int
    trained_tokens: int
    images: tuple[ImageMeta, ...]
    block: int
    place: int
    patches: int
    patch_pairs: int

    @classmethod
    def of(
        cls,
        position: int,
        row: int,
        id: str,
        text_tokens: int,
        vision_tokens: int,
        trained_tokens: int,
        images: tuple[ImageMeta, ...] = (),
        block: int = 0,
        place: int = 0,
    ) -> SampleMeta:
        patches, patch_pairs = sum(image.patches for image in images), sum(image.patch_pairs for image in images)
        counts = text_tokens, vision_tokens, trained_tokens
        return cls(position, row, id, *counts, images, block, place, patches, patch_pairs)

    @property
    def tokens(self) -> int:
        """LLM-side sequence length: text and vision tokens."""
        return self.text_tokens + self.vision_tokens


class SkippedRow(NamedTuple):
    """A row that is read and not trained: counted under `reason` and named in the summary (contract C11)."""

    position: int
    row: int
    id: str
    reason: str
    detail: str


Row = TypeVar("Row", SampleMeta, SkippedRow, SampleMeta | SkippedRow)


class UnitId(NamedTuple):
    """An encode unit's place in the global order of need: step, slot, rank, then its number within the pack."""

    phase: Phase
    step: int
    slot: int
    rank: int
    number: int


class EncodeUnit(NamedTuple):
    """Whole samples of one pack that share one encoder call, in this order.

    Attributes:
        id: place in the global order of need.
        samples: the samples, each with at least one image.
        patches: encoder patches in all.
        bytes: pool bytes that the unit's blocks take, headers included.
        producer: the rank that must run it (trainable encoder), or None when any producer may (frozen encoder).
    """

    id: UnitId
    samples: tuple[SampleMeta, ...]
    patches: int
    bytes: int
    producer: int | None


class Pack(NamedTuple):
    """One microbatch of whole samples for one consumer rank.

    Attributes:
        slot: packs of one slot run together on all ranks.
        rank: consumer rank (data-parallel index).
        samples: in the order in which they are laid out; empty for a zero-weight pack.
        units: the encode units of its images, in the order of need.
        cost: predicted backbone time in the cost model's unit, a whole number.
        encode_cost: predicted encoder time in the same unit.
    """

    slot: int
    rank: int
    samples: tuple[SampleMeta, ...]
    units: tuple[EncodeUnit, ...]
    cost: int
    encode_cost: int

    @property
    def tokens(self) -> int:
        return sum(sample.tokens for sample in self.samples)


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer update, or one evaluation pass: `slots[k][r]` is rank r's pack of slot k.

    Attributes:
        phase: whether the packs are trained or only evaluated.
        index: number of the update, from 1; for an evaluation pass, the update after which it runs.
        slots: packs by slot and rank; every slot has one pack for each consumer rank.
        rows: samples in all.
        epoch: epoch of the step's last row, from 0.
        state: state of composition after the step (JSON-ready), from which a resumed run goes on.
    """

    phase: Phase
    index: int
    slots: tuple[tuple[Pack, ...], ...]
    rows: int
    epoch: int
    state: Mapping[str, Any]

    @property
    def cursor(self) -> int:
        """Positions below this one were all read when the step was composed."""
        return int(self.state["cursor"])

    @property
    def packs(self) -> tuple[Pack, ...]:
        """All packs in the global order of need: slot by slot, rank by rank."""
        return tuple(pack for slot in self.slots for pack in slot)

    @property
    def samples(self) -> tuple[SampleMeta, ...]:
        return tuple(sample for pack in self.packs for sample in pack.samples)


class ImageInput(NamedTuple):
    """One tensor that a sample's encoder was called with, as plain data: of pixels and masks only the shape."""

    name: str
    shape: tuple[int, ...]
    values: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Playback:
    """What a consumer needs to run the projector on recorded features, where the cut is before it.

    Attributes:
        inputs: what the encoder was called with.
        shapes: of each feature tensor before it was laid out in rows.
    """

    inputs: tuple[ImageInput, ...]
    shapes: tuple[tuple[int, ...], ...]


class TensorSpec(NamedTuple):
    """A tensor inside a block: `offset` in bytes from the block's first payload byte, dtype by torch's name."""

    offset: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class EmbeddingRef:
    """All visual features of one sample, as announced by the producer that holds them (contract C4).

    Attributes:
        position: the sample (checked against the sample that the consumer expects).
        unit: the unit that made it.
        address: where the block's payload starts in the pool.
        bytes: length of the payload.
        tensors: the features, in the order in which the model's cut names them.
        grids: (frames, rows, columns) of patches of each image, for rotary positions.
        version: encoder version it was made with (number of updates applied).
        playback: how the projector runs on the features, where the cut is before it and the features alone do not tell.
    """

    position: int
    unit: UnitId
    address: Address
    bytes: int
    tensors: tuple[TensorSpec, ...]
    grids: tuple[tuple[int, int, int], ...]
    version: int
    playback: Playback | None = None
