"""A whole vision-language model: its backbone, its encoders, and what crosses the cut between them."""

from __future__ import annotations

from dataclasses import dataclass

from flowtrain.errors import ConfigError
from flowtrain.shapes.encoder import EncoderShape, ProjectorShape
from flowtrain.shapes.text import TextShape
from flowtrain.types import Cut, FeatureSpec, Module

QWEN3_VL = "qwen3_vl"

CUT_FAMILIES = frozenset(
    {
        "gemma3",
        "glm4v",
        "glm4v_moe",
        "idefics3",
        "internvl",
        "llava",
        "llava_next",
        "llava_onevision",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_5",
        "qwen3_5_moe",
        QWEN3_VL,
        "qwen3_vl_moe",
        "smolvlm",
    }
)
"""`model_type` of the families that can be cut in two, so that others are refused without loading torch."""


JOINED_BEFORE = frozenset({"glm4v", "glm4v_moe"})
"""Families whose encoder joins patches to tokens itself: its projector is given tokens, as wide as those it makes."""


CUT_OFF_BEHIND = frozenset({"llava_next", "llava_onevision"})
"""Families that encode padded tiles and cut the padding off behind the projector: patches may be many, tokens few."""

UNPROVEN = "their halves are not proven equal to the uncut model"
REFUSED = {
    "internvl_chat": "their code is not part of transformers (convert the folder to the form `internvl`)",
    "mllama": "images enter their backbone by cross attention, not as tokens",
    "qwen2_5_omni": "sound is not supported",
    "qwen2_5_omni_thinker": "sound is not supported",
}
"""Why families that one might expect are refused."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A whole model. `family` is the `model_type` of its config; the first encoder is a vision encoder.

    Attributes:
        generic: the family is read by the names that configs share: parameters and FLOPs are estimates.
    """

    family: str
    text: TextShape
    encoders: tuple[EncoderShape, ...]
    image_token_id: int | None
    generic: bool = False

    def __post_init__(self) -> None:
        assert self.encoders, self
        assert self.encoders[0].modality == "vision", self

    @property
    def vision(self) -> EncoderShape:
        """The first vision encoder."""
        return self.encoders[0]

    @property
    def projector(self) -> ProjectorShape:
        """That of the first vision encoder."""
        return self.encoders[0].projector

    def features(self, cut: Cut) -> tuple[FeatureSpec, ...]:
        """The tensors of one sample that cross the cut, in order; Qwen3-VL: last level, then each deep-stack one.

        Before the projector these are what the projector is given, or what the encoder gives out: class tokens too.
        """
        if cut is Cut.AFTER_PROJECTOR or self.family in JOINED_BEFORE:
            spec = FeatureSpec("token", self.projector.width_out)
        else:
            vision = self.vision
            spec = FeatureSpec("patch", vision.hidden, vision.class_tokens, vision.tile_patches or 1)
        return (spec,) * self.projector.num_mergers

    def bounds_features(self, cut: Cut) -> bool:
        """Whether what crosses the cut is bounded by a row's tokens; else it can be larger, up to all of an image."""
        return cut is Cut.AFTER_PROJECTOR or self.family not in CUT_OFF_BEHIND

    def parameters(self, module: Module) -> int:
        """Number of parameters of a module, tied ones once; several encoders together."""
        if module is Module.BACKBONE:
            return self.text.parameters
        if module is Module.ENCODER:
            return sum(encoder.parameters for encoder in self.encoders)
        return sum(encoder.projector.parameters for encoder in self.encoders)


def check_family(family: str) -> None:
    """ConfigError, naming the family and the reason, unless its models can be cut in two."""
    if family not in CUT_FAMILIES:
        raise ConfigError(
            f"model.path: models of the family {family!r} cannot be cut in two yet: {REFUSED.get(family, UNPROVEN)}; "
            f"supported: {', '.join(sorted(CUT_FAMILIES))}"
        )
