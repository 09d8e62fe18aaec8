"""Reading the backbone's section: one table of what the kinds of language models do without saying so in config.json.

`defaults` are the values of transformers' configuration class, which stand for absent keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from flowtrain.errors import ConfigError
from flowtrain.shapes.keys import Keys
from flowtrain.shapes.text import Mixer, MoeShape, RecurrentShape, TextShape


@dataclass(frozen=True, slots=True)
class TextKind:
    """What a kind of backbone does. A rule is fixed, or the name of the key that decides.

    Attributes:
        norms: of the backbone's width, a layer.
        head_norms: queries and keys of a head are normed.
        windows: which layers attend within `sliding_window` where `layer_types` is absent: all; those from
            `max_window_layers` on if `use_sliding_window`; all but each n-th; none.
        interval: the key that holds this n.
        recurrent: layers that `windows` singles out have a gated delta rule in place of attention.
        output_gate: attention's output is gated by a projection.
    """

    defaults: Mapping[str, Any]
    qkv_bias: str | bool = "attention_bias"
    out_bias: str | bool = "attention_bias"
    mlp_bias: str | bool = False
    norms: int = 2
    head_norms: bool = False
    windows: Literal["none", "all", "late", "but each"] = "none"
    interval: str = "sliding_window_pattern"
    recurrent: bool = False
    output_gate: bool = False


def _sizes(
    hidden: int, layers: int, heads: int, kv_heads: int | None, mlp_width: int, vocab: int, **others: Any
) -> Mapping[str, Any]:
    return MappingProxyType(
        {
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": mlp_width,
            "vocab_size": vocab,
            **others,
        }
    )


_QWEN2_VL = _sizes(8192, 80, 64, 8, 29568, 152064, sliding_window=4096, max_window_layers=80)
_QWEN_MOE = {"decoder_sparse_step": 1}
_GATED_DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}

TEXT_KINDS: Mapping[str, TextKind] = MappingProxyType(
    {
        "llama": TextKind(_sizes(4096, 32, 32, None, 11008, 32000), mlp_bias="mlp_bias"),
        "granite": TextKind(_sizes(4096, 32, 32, None, 11008, 32000), mlp_bias="mlp_bias"),
        "smollm3": TextKind(
            _sizes(2048, 36, 16, 4, 11008, 128256, max_window_layers=28), mlp_bias="mlp_bias", windows="late"
        ),
        "mistral": TextKind(_sizes(4096, 32, 32, 8, 14336, 32000, sliding_window=4096), False, False, windows="all"),
        "ministral3": TextKind(_sizes(4096, 34, 32, 8, 14336, 131072, head_dim=128), False, False, windows="all"),
        "phi3": TextKind(_sizes(3072, 32, 32, None, 8192, 32064), False, False, windows="all"),
        "internlm2": TextKind(_sizes(4096, 32, 32, None, 11008, 103168), "bias", "bias"),
        "qwen2": TextKind(
            _sizes(4096, 32, 32, 32, 22016, 151936, sliding_window=4096, max_window_layers=28),
            True,
            False,
            windows="late",
        ),
        "qwen2_vl_text": TextKind(_QWEN2_VL, True, False, windows="late"),
        "qwen2_5_vl_text": TextKind(_QWEN2_VL, True, False, windows="late"),
        "qwen2_5_omni_text": TextKind(
            _sizes(3584, 28, 28, 4, 18944, 152064, sliding_window=32768, max_window_layers=28),
            True,
            False,
            windows="late",
        ),
        "qwen3": TextKind(
            _sizes(4096, 32, 32, 32, 22016, 151936, head_dim=128, sliding_window=4096, max_window_layers=28),
            head_norms=True,
            windows="late",
        ),
        "qwen3_vl_text": TextKind(_sizes(4096, 32, 32, 32, 22016, 151936, head_dim=128), head_norms=True),
        "qwen3_moe": TextKind(
            _sizes(
                2048,
                24,
                32,
                4,
                6144,
                151936,
                **_QWEN_MOE,
                num_experts=128,
                num_experts_per_tok=8,
                moe_intermediate_size=768,
            ),
            head_norms=True,
        ),
        "qwen3_vl_moe_text": TextKind(
            _sizes(
                2048,
                24,
                16,
                16,
                5632,
                151936,
                **_QWEN_MOE,
                num_experts=60,
                num_experts_per_tok=4,
                moe_intermediate_size=1408,
            ),
            head_norms=True,
        ),
        "qwen3_5_text": TextKind(
            _sizes(4096, 32, 16, 4, 12288, 248320, head_dim=256, **_GATED_DELTA),
            head_norms=True,
            windows="but each",
            interval="full_attention_interval",
            recurrent=True,
            output_gate=True,
        ),
        "qwen3_5_moe_text": TextKind(
            _sizes(
                2048,
                40,
                16,
                2,
                512,
                248320,
                head_dim=256,
                **_GATED_DELTA,
                num_experts=256,
                num_experts_per_tok=8,
                moe_intermediate_size=512,
                shared_expert_intermediate_size=512,
            ),
            head_norms=True,
            windows="but each",
            interval="full_attention_interval",
            recurrent=True,
            output_gate=True,
        ),
        "gemma": TextKind(_sizes(3072, 28, 16, 16, 24576, 256000, head_dim=256)),
        "gemma2": TextKind(
            _sizes(2304, 26, 8, 4, 9216, 256000, head_dim=256, sliding_window=4096, sliding_window_pattern=2),
            norms=4,
            windows="but each",
        ),
        "gemma3_text": TextKind(
            _sizes(2304, 26, 8, 4, 9216, 262208, head_dim=256, sliding_window=4096, sliding_window_pattern=6),
            norms=4,
            head_norms=True,
            windows="but each",
        ),
        "cohere2": TextKind(
            _sizes(8192, 40, 64, None, 22528, 256000, sliding_window=4096, sliding_window_pattern=4),
            norms=1,
            windows="but each",
        ),
        "glm4v_text": TextKind(_sizes(4096, 40, 32, 2, 13696, 151552), True, False, norms=4),
        "glm4v_moe_text": TextKind(
            _sizes(
                4096,
                46,
                96,
                8,
                10944,
                151424,
                attention_bias=True,
                n_routed_experts=128,
                n_shared_experts=1,
                num_experts_per_tok=8,
                moe_intermediate_size=1408,
                first_k_dense_replace=1,
            ),
            out_bias=False,
        ),
    }
)

GENERIC_TEXT = TextKind(MappingProxyType({}), mlp_bias="mlp_bias", windows="all")
"""For a kind that the table lacks: every size must be in the file."""


def read_text(keys: Keys, kind: TextKind, tied: bool) -> TextShape:
    """The backbone of this section; `tied`: its head is its embedding."""
    keys = keys.over(kind.defaults)
    hidden, heads, layers = (keys.size(name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    kv_heads = keys.size("num_key_value_heads", default=heads)
    head_dim = keys.size("head_dim", default=max(1, hidden // heads))
    moe = _experts(keys, layers)
    width = keys.size("intermediate_size", default=moe.expert_width if moe else None)
    mixers, window = _mixers(keys, kind, layers)
    queries = heads * head_dim * (2 if kind.output_gate else 1)
    biases = queries + 2 * kv_heads * head_dim if keys.says(kind.qkv_bias) else 0
    biases += hidden if keys.says(kind.out_bias) else 0
    return TextShape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=width,
        vocab=keys.size("vocab_size"),
        tied=tied,
        norm_vectors=kind.norms * hidden,
        attention_vectors=biases + (2 * head_dim if kind.head_norms else 0),
        mlp_vectors=2 * width + hidden if keys.says(kind.mlp_bias) else 0,
        outer_vectors=hidden,
        mixers=mixers,
        window=window,
        output_gate=kind.output_gate,
        head_norms=kind.head_norms,
        moe=moe,
        recurrent=_gated_delta(keys, hidden) if Mixer.RECURRENT in mixers else None,
    )


def _mixers(keys: Keys, kind: TextKind, layers: int) -> tuple[tuple[Mixer, ...], int | None]:
    """How each layer attends, and within which window; empty where all attend to the whole sample."""
    window = keys.get("sliding_window")
    window = window if isinstance(window, int) and window > 0 else None
    if kind.windows == "late" and not keys.flag("use_sliding_window"):
        window = None
    names = keys.get("layer_types")
    if isinstance(names, (list, tuple)):
        if len(names) != layers:
            raise ConfigError(
                f"{keys.file}: `{keys.path}layer_types` has {len(names)} entries for {layers} layers: give one each"
            )
        mixers = tuple(_MIXERS.get(str(name), Mixer.FULL) for name in names)
        if Mixer.RECURRENT in mixers and not kind.recurrent:
            raise ConfigError(
                f"{keys.file}: `{keys.path}layer_types` has layers without attention, whose sizes are not known for "
                f"this kind of model: choose another model"
            )
    elif kind.windows == "none":
        mixers = ()
    elif kind.windows == "but each":
        interval = keys.size(kind.interval)
        special = Mixer.RECURRENT if kind.recurrent else Mixer.WINDOW
        mixers = tuple(special if (layer + 1) % interval else Mixer.FULL for layer in range(layers))
    else:
        first = keys.size("max_window_layers") if kind.windows == "late" and window else 0
        mixers = tuple(Mixer.WINDOW if window and layer >= first else Mixer.FULL for layer in range(layers))
    if window is None:
        mixers = tuple(Mixer.FULL if mixer is Mixer.WINDOW else mixer for mixer in mixers)
    return mixers, window if Mixer.WINDOW in mixers else None


_MIXERS = {
    "sliding_attention": Mixer.WINDOW,
    "chunked_attention": Mixer.WINDOW,
    "linear_attention": Mixer.RECURRENT,
    "recurrent": Mixer.RECURRENT,
    "conv": Mixer.RECURRENT,
    "mamba": Mixer.RECURRENT,
}


def _experts(keys: Keys, layers: int) -> MoeShape | None:
    counts = [keys.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")]
    if not any(counts):
        others = [name for name, value in keys.values.items() if "num_experts" in name and _is_many(value)]
        if others:
            raise ConfigError(
                f"{keys.file}: `{keys.path}{others[0]}` tells of experts in a form that is not known: "
                "choose another model"
            )
        return None
    experts = keys.size("num_experts", "num_local_experts", "n_routed_experts")
    width = keys.size("moe_intermediate_size", "intermediate_size")
    first = keys.get("first_k_dense_replace") or 0
    step, dense = keys.size("decoder_sparse_step", default=1), keys.indexes("mlp_only_layers", ())
    with_experts = tuple(
        layer for layer in range(layers) if layer >= first and layer not in dense and (layer + 1) % step == 0
    )
    gated_shared = keys.get("shared_expert_intermediate_size") or 0
    shared = gated_shared or (keys.get("n_shared_experts") or 0) * width
    top_k = keys.size("num_experts_per_tok")
    if top_k > experts:
        raise ConfigError(f"{keys.file}: `{keys.path}num_experts_per_tok` is {top_k}, of {experts} experts: lower it")
    return MoeShape(experts, top_k, width, with_experts, shared, shared_gate=bool(gated_shared))


def _is_many(value: object) -> bool:
    return any(isinstance(one, int) and one > 1 for one in (value if isinstance(value, (list, tuple)) else [value]))


def _gated_delta(keys: Keys, hidden: int) -> RecurrentShape:
    """Linear attention with a decayed, corrected state of key width × value width a head."""
    key_width, value_width = keys.size("linear_key_head_dim"), keys.size("linear_value_head_dim")
    key_heads, value_heads = keys.size("linear_num_key_heads"), keys.size("linear_num_value_heads")
    keys_all, values_all = key_heads * key_width, value_heads * value_width
    convolved = 2 * keys_all + values_all
    projections = hidden * (convolved + values_all + 2 * value_heads) + values_all * hidden
    return RecurrentShape(
        weights=projections + convolved * keys.size("linear_conv_kernel_dim"),
        vectors=2 * value_heads + value_width,
        # A token reads the state with its key, corrects it by an outer product, and reads it with its query.
        state_flops=3 * 2 * value_heads * key_width * value_width,
    )
