"""Reading an encoder's section: one table of what the kinds of towers do without saying so in config.json.

`defaults` are the values of transformers' configuration class, which stand for absent keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from flowtrain.shapes.encoder import EncoderShape, ProjectorShape
from flowtrain.shapes.keys import Keys


@dataclass(frozen=True, slots=True)
class TowerKind:
    """What a kind of vision tower does. A rule is fixed, or the name of the key that decides.

    Attributes:
        norm_width: vectors of a norm: 2 with a bias, 1 without; `norm_type` in the file overrides it.
        outer_norms: norms before and behind the layers.
        positions: learned ones: one a patch of the square that `image_size` gives, `num_position_embeddings`, or none.
        fixed_size: images are scaled, or cut into tiles, to `image_size`; a class token attends with each.
        scales: vectors that scale what a layer adds, one each for attention and MLP.
        pooled: a pooling head, if `vision_use_head`, that the language model does not read.
        strided: a convolution behind the layers joins the patches of a token.
        mlp_width: the key of the MLP's inner width.
    """

    defaults: Mapping[str, Any]
    gated: bool = False
    norm_width: int = 2
    outer_norms: int = 0
    qkv_bias: str | bool = True
    out_bias: str | bool = True
    mlp_bias: bool = True
    patch_bias: bool = True
    positions: Literal["none", "grid", "key"] = "grid"
    fixed_size: bool = False
    class_token: bool = False
    scales: bool = False
    pooled: bool = False
    strided: bool = False
    mlp_width: str = "intermediate_size"


def _sizes(hidden: int, layers: int, heads: int, mlp_width: int, patch: int, **others: Any) -> Mapping[str, Any]:
    return MappingProxyType(
        {
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "intermediate_size": mlp_width,
            "patch_size": patch,
            "num_channels": 3,
            **others,
        }
    )


_MERGED = {"temporal_patch_size": 2, "spatial_merge_size": 2}
_WINDOWED = _sizes(
    3584,
    32,
    16,
    3420,
    14,
    **_MERGED,
    out_hidden_size=3584,
    window_size=112,
    fullatt_block_indexes=(7, 15, 23, 31),
)
_QWEN3 = _sizes(1152, 27, 16, 4304, 16, **_MERGED, out_hidden_size=3584, num_position_embeddings=2304)
_GLM = _sizes(1536, 24, 12, 13696, 14, **_MERGED, out_hidden_size=4096, image_size=336)

TOWER_KINDS: Mapping[str, TowerKind] = MappingProxyType(
    {
        "clip_vision_model": TowerKind(
            _sizes(768, 12, 12, 3072, 32, image_size=224),
            outer_norms=2,
            patch_bias=False,
            fixed_size=True,
            class_token=True,
        ),
        "siglip_vision_model": TowerKind(
            _sizes(768, 12, 12, 3072, 16, image_size=224, vision_use_head=True),
            outer_norms=1,
            fixed_size=True,
            pooled=True,
        ),
        "idefics3_vision": TowerKind(_sizes(1152, 12, 16, 3072, 32, image_size=224), outer_norms=1, fixed_size=True),
        "pixtral": TowerKind(
            _sizes(1024, 24, 16, 4096, 16),
            gated=True,
            norm_width=1,
            outer_norms=1,
            qkv_bias=False,
            out_bias=False,
            mlp_bias=False,
            patch_bias=False,
            positions="none",
        ),
        "internvl_vision": TowerKind(
            _sizes(1024, 24, 16, 4096, 14, image_size=448),
            qkv_bias="attention_bias",
            fixed_size=True,
            class_token=True,
            scales=True,
        ),
        "intern_vit_6b": TowerKind(
            _sizes(3200, 48, 25, 12800, 14, image_size=224, qkv_bias=False),
            qkv_bias="qkv_bias",
            fixed_size=True,
            class_token=True,
            scales=True,
        ),
        "qwen2_vl_vision": TowerKind(
            MappingProxyType(
                {
                    "embed_dim": 1280,
                    "num_hidden_layers": 32,
                    "num_attention_heads": 16,
                    "mlp_ratio": 4,
                    "patch_size": 14,
                    "num_channels": 3,
                    "hidden_size": 3584,
                    **_MERGED,
                }
            ),
            patch_bias=False,
            positions="none",
        ),
        "qwen2_5_vl_vision": TowerKind(_WINDOWED, gated=True, norm_width=1, patch_bias=False, positions="none"),
        "qwen3_vl_vision": TowerKind(
            MappingProxyType({**_QWEN3, "deepstack_visual_indexes": (8, 16, 24)}), positions="key"
        ),
        "qwen3_5_vision": TowerKind(_QWEN3, positions="key"),
        "glm4v_vision": TowerKind(
            _GLM,
            gated=True,
            norm_width=1,
            outer_norms=2,
            qkv_bias="attention_bias",
            out_bias=False,
            mlp_bias=False,
            strided=True,
            mlp_width="out_hidden_size",
        ),
    }
)

GENERIC_TOWER = TowerKind(MappingProxyType({}))
"""For a kind that the table lacks: every size must be in the file."""


def hidden_of(keys: Keys) -> int:
    """Width of a tower's rows; with `embed_dim`, `hidden_size` is the width behind the projector."""
    return keys.size("embed_dim") if keys.get("embed_dim") is not None else keys.size("hidden_size")


def grid_patches(keys: Keys) -> int | None:
    """Patches of an image scaled to `image_size`; None where no size is set."""
    if keys.get("image_size") is None:
        return None
    return (keys.size("image_size") // keys.size("patch_size")) ** 2


def read_tower(name: str, keys: Keys, kind: TowerKind, projector: ProjectorShape, idle_layers: int) -> EncoderShape:
    """The vision tower of a section that has its kind's defaults."""
    hidden, layers = hidden_of(keys), keys.size("num_hidden_layers", "depth")
    heads = keys.size("num_attention_heads", "num_heads")
    width = keys.size("head_dim", default=max(1, hidden // heads)) * heads
    mlp_width = keys.size(kind.mlp_width, default=round(hidden * keys.ratio("mlp_ratio", 4.0)))
    patch_values = keys.size("num_channels", "in_channels", "in_chans", default=3)
    patch_values *= keys.size("patch_size", "spatial_patch_size") ** 2 * keys.size("temporal_patch_size", default=1)
    grid = grid_patches(keys)
    norm = {"rms_norm": 1, "layer_norm": 2}.get(keys.word("norm_type"), kind.norm_width) * hidden
    vectors = 2 * norm + (2 * hidden if kind.scales else 0)
    vectors += 3 * width if keys.says(kind.qkv_bias) else 0
    vectors += hidden if keys.says(kind.out_bias) else 0
    vectors += mlp_width * (2 if kind.gated else 1) + hidden if kind.mlp_bias else 0
    vectors += 2 * hidden if keys.flag("use_qk_norm") or keys.flag("qk_normalization") else 0
    positions = {"none": 0, "grid": grid or 0, "key": keys.size("num_position_embeddings", default=1)}[kind.positions]
    positions += 1 if kind.class_token and positions else 0
    if not keys.flag("use_absolute_position_embeddings", default=True):
        positions = 0
    outer = (positions + kind.patch_bias + kind.class_token) * hidden + kind.outer_norms * norm
    if keys.get("use_mean_pooling") is False:
        outer += 2 * hidden
    exit_weights = 0
    if kind.strided:
        out = keys.size("out_hidden_size")
        exit_weights, outer = out * hidden * keys.size("spatial_merge_size") ** 2, outer + out
    pooled = kind.pooled and keys.flag("vision_use_head", default=True)
    windowed = keys.get("window_size") and keys.get("fullatt_block_indexes") is not None
    full = keys.indexes("fullatt_block_indexes", ()) if windowed else None
    return EncoderShape(
        name=name,
        modality="vision",
        hidden=hidden,
        layers=layers,
        heads=heads,
        attention_width=width,
        mlp_width=mlp_width,
        gated=kind.gated,
        patch_values=patch_values,
        embed_weights=patch_values * hidden,
        layer_vectors=vectors,
        outer_vectors=outer + (8 * hidden + mlp_width if pooled else 0),
        full_layers=layers if full is None else len([layer for layer in full if layer < layers]),
        projector=projector,
        window_patches=None if full is None else max(1, keys.size("window_size") // keys.size("patch_size")) ** 2,
        tile_patches=grid if kind.fixed_size else None,
        class_tokens=1 if kind.class_token else 0,
        exit_weights=exit_weights,
        idle_layers=idle_layers,
        idle_weights=4 * hidden**2 + 2 * hidden * mlp_width if pooled else 0,
    )


AUDIO_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "num_mel_bins": 128,
        "encoder_layers": 32,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "d_model": 1280,
        "n_window": 100,
        "output_dim": 3584,
    }
)


def read_audio_tower(name: str, keys: Keys) -> EncoderShape:
    """Two convolutions over mel frames, the second halving them; layers that attend within windows; two frames a token.

    A patch is a frame behind the convolutions: two of the processor's mel frames.
    """
    hidden, layers, mels = keys.size("d_model"), keys.size("encoder_layers"), keys.size("num_mel_bins")
    mlp_width, heads, out = keys.size("encoder_ffn_dim"), keys.size("encoder_attention_heads"), keys.size("output_dim")
    kernel = 3
    return EncoderShape(
        name=name,
        modality="audio",
        hidden=hidden,
        layers=layers,
        heads=heads,
        attention_width=hidden,
        mlp_width=mlp_width,
        gated=False,
        patch_values=2 * mels,
        embed_weights=kernel * hidden * (mels + hidden),
        embed_products=kernel * hidden * (2 * mels + hidden),
        # Keys have no bias.
        layer_vectors=4 * hidden + 3 * hidden + mlp_width + hidden,
        # Biases of convolutions and output, the last norm, and the marks of begin and end.
        outer_vectors=2 * hidden + 2 * hidden + out + 2 * out,
        full_layers=0,
        projector=ProjectorShape(1, 2, out, 0, 0),
        window_patches=keys.size("n_window"),
        exit_weights=hidden * out,
    )
