"""Projectors: one function a kind, from the sections of the whole model and of its tower, and the backbone.

`t` is the backbone's width, `h` the tower's, `m` the patches that become one token.

| function | matrices, in the order of the data | families |
|---|---|---|
| `merged` | norm; m·h → m·h → out, on one level or, of a deep stack, several | Qwen-VL kinds |
| `two_linear` | h · levels → t → t | LLaVA kinds |
| `shuffled` | norm; m·h → t → t | InternVL |
| `gated_shuffle` | norm; m·h → a, halved by a gate → t | Aya |
| `one_linear` | m·h → t | Idefics3, SmolVLM, PaliGemma |
| `pooled` | mean over m, norm; h → t | Gemma 3 |
| `patch_merger` | norm; m·h → h; h · levels → t → t | Mistral 3 |
| `strided` | (m·h → t in the tower); t → t; norm; gated MLP of t | GLM-V |
"""

from __future__ import annotations

from collections.abc import Callable

from flowtrain.errors import ConfigError
from flowtrain.shapes.encoder import ProjectorShape
from flowtrain.shapes.keys import Keys
from flowtrain.shapes.text import TextShape
from flowtrain.shapes.towers import grid_patches, hidden_of

Projector = Callable[[Keys, Keys, TextShape], ProjectorShape]
"""(the whole model's section, the tower's section, the backbone) → its shape."""


def merged(norm_width: int, width_out: str = "out_hidden_size") -> Projector:
    """`norm_width`: vectors of the last merger's norm; deep-stack levels norm the joined patches."""

    def shape(top: Keys, tower: Keys, text: TextShape) -> ProjectorShape:
        hidden, patches = hidden_of(tower), tower.size("spatial_merge_size", default=2) ** 2
        out = tower.size(width_out, default=text.hidden)
        levels = len(tower.indexes("deepstack_visual_indexes", ()))
        width = hidden * patches
        weights, vectors = width * width + width * out, width + out
        norms = norm_width * hidden + levels * 2 * width
        return ProjectorShape(1 + levels, patches, out, (1 + levels) * weights, (1 + levels) * vectors + norms)

    return shape


def two_linear(separators: int = 0) -> Projector:
    """`separators`: vectors of the backbone's width that stand between rows of an image."""

    def shape(top: Keys, tower: Keys, text: TextShape) -> ProjectorShape:
        out = text.hidden
        biases = 2 * out if top.flag("multimodal_projector_bias", default=True) else 0
        weights = (hidden_of(tower) * feature_levels(top) + out) * out
        return ProjectorShape(1, 1, out, weights, biases + separators * out)

    return shape


def shuffled(top: Keys, tower: Keys, text: TextShape) -> ProjectorShape:
    patches = round(1 / top.ratio("downsample_ratio", 0.5)) ** 2
    width, out = hidden_of(tower) * patches, text.hidden
    return ProjectorShape(1, patches, out, (width + out) * out, 2 * width + 2 * out)


def gated_shuffle(norm: bool, width_between: int | None = None) -> Projector:
    """`norm`: the joined patches are normed; `width_between`: the default of its key, the backbone's if None."""

    def shape(top: Keys, tower: Keys, text: TextShape) -> ProjectorShape:
        patches = top.size("downsample_factor", default=2) ** 2
        width, out = hidden_of(tower) * patches, text.hidden
        between = top.size("alignment_intermediate_size", default=width_between or out)
        weights = width * between + between // 2 * out
        return ProjectorShape(1, patches, out, weights, between + out + (2 * width if norm else 0))

    return shape


def scaled_linear(top: Keys, tower: Keys, text: TextShape) -> ProjectorShape:
    patches = top.size("scale_factor", default=2) ** 2
    return ProjectorShape(1, patches, text.hidden, hidden_of(tower) * patches * text.hidden, 0)


def one_linear(top: Keys, tower: Keys, text: TextShape) -> ProjectorShape:
    out = top.size("projection_dim", default=2048)
    return ProjectorShape(1, 1, out, hidden_of(tower) * out, out)


def pooled(top: Keys, tower: Keys, text: TextShape) -> ProjectorShape:
    patches, tokens = grid_patches(tower), top.size("mm_tokens_per_image", default=256)
    if patches is None or patches % tokens:
        raise ConfigError(
            f"{top.file}: `mm_tokens_per_image` is {tokens}, which does not divide the {patches} patches of an image: "
            "set it, `vision_config.image_size` and `vision_config.patch_size` as the model's own config has them"
        )
    hidden = hidden_of(tower)
    return ProjectorShape(1, patches // tokens, text.hidden, hidden * text.hidden, hidden)


def patch_merger(top: Keys, tower: Keys, text: TextShape) -> ProjectorShape:
    patches, hidden, out = top.size("spatial_merge_size", default=2) ** 2, hidden_of(tower), text.hidden
    merging = hidden * patches * hidden
    biases = 2 * out if top.flag("multimodal_projector_bias", default=False) else 0
    weights = merging + (hidden * feature_levels(top) + out) * out
    return ProjectorShape(1, patches, out, weights, hidden + biases)


def strided(top: Keys, tower: Keys, text: TextShape) -> ProjectorShape:
    out, patches = tower.size("out_hidden_size"), tower.size("spatial_merge_size") ** 2
    return ProjectorShape(1, patches, out, out * out + 3 * out * tower.size("intermediate_size"), 2 * out)


def generic(top: Keys, tower: Keys, text: TextShape) -> ProjectorShape:
    """Two linear layers, of joined patches where the tower's section merges them."""
    patches = tower.size("spatial_merge_size", default=top.size("spatial_merge_size", default=1)) ** 2
    width = hidden_of(tower) * patches
    between = width if patches > 1 else text.hidden
    return ProjectorShape(1, patches, text.hidden, (width + text.hidden) * between, between + text.hidden)


def feature_levels(top: Keys) -> int:
    """Layers of the tower whose outputs are joined."""
    levels = top.get("vision_feature_layer")
    return len(levels) if isinstance(levels, (list, tuple)) else 1


def idle_layers(top: Keys, tower: Keys, default: int) -> int:
    """Layers behind the last one that the projector reads: `vision_feature_layer` -1 is the last layer's output, and
    counts from the embedding at 0 where it is positive. InternVL's chat format calls it `select_layer`."""
    name = "select_layer" if "select_layer" in top.values else "vision_feature_layer"
    chosen, layers = top.get(name), tower.size("num_hidden_layers", "depth")
    outputs = [default] if chosen is None else chosen if isinstance(chosen, (list, tuple)) else [chosen]
    if not all(isinstance(output, int) and -layers - 1 <= output <= layers for output in outputs):
        raise ConfigError(f"{top.file}: `{top.path}{name}` is {chosen!r}: expected outputs of the {layers} layers")
    return layers - max(output % (layers + 1) for output in outputs)
