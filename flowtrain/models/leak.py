"""The load-time test that samples of a pack do not see each other (contract C5).

    alone:   A        B
    packed: [A B]   [A' B]   [A B']      A', B': other tokens and features, same lengths

1. The logits of A and of B, packed, equal those alone, within the rounding of the compute dtype (positions, features,
   borders).
2. B is the same after A and after A', and A the same before B and before B'. The shapes are equal, so this comparison
   is sharp in 16 bit too.

A ends and B begins with an image, so that anything that mixes neighbouring tokens shows at the border. When a check
fails, the first decoder layer whose output differs is found: a layer that mixes tokens by other means than attention
(convolution, recurrent state) makes the samples of a pack go through one by one; anything else is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from flowtrain.errors import PlanError
from flowtrain.models.backbone import BackboneHalf, PackSample
from flowtrain.models.families import has_image_axes, ordinary_ids
from flowtrain.models.sections import SectionRunner, Tensors, decoder_layers
from flowtrain.types import Cut

TEXT_TOKENS = 5
IMAGE_SIDE = 2
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest ‖packed - alone‖ / ‖alone‖ that is rounding; a leak measures 1e-2 and more."""

Mode = Literal["packed", "one-by-one"]


@dataclass(frozen=True, slots=True)
class _Run:
    """Output of every decoder layer and the logits, for each sample of one forward: [name][sample] → tensor."""

    outputs: dict[str, list[torch.Tensor]]


def check_packing(backbone: BackboneHalf) -> Mode:
    """Test the model once, and set `backbone.one_by_one` where its samples cannot share a forward.

    Raises:
        PlanError: samples leak into each other and the model has no other token mixer that explains it.
    """
    culprit = find_leak(backbone, backbone.run)
    if culprit is None:
        return "packed"
    if not _mixes_tokens_otherwise(backbone.model):
        raise PlanError(
            f"{type(backbone.model).__name__}: samples of a pack see each other, first at {culprit}; this model cannot "
            "be trained in packs: use another model, or model.attention: sdpa if a flash kernel was in use"
        )
    warnings.warn(
        f"{type(backbone.model).__name__}: {culprit} mixes neighbouring tokens, so the samples of a pack run "
        "one by one (slower)",
        stacklevel=2,
    )
    backbone.one_by_one = True
    return "one-by-one"


def find_leak(backbone: BackboneHalf, forward: Callable[..., Tensors]) -> str | None:
    """Name of the first layer where a sample differs from itself alone or with another neighbour; None if none.

    Features are made as they are after the projector, which sees one sample at a time wherever the cut is. A rank of a
    pipeline tests its own layers, by itself.
    """
    a, b = _sample(backbone, 0, image_last=True), _sample(backbone, 1, image_last=False)
    other_a, other_b = _altered(backbone, a, 2), _altered(backbone, b, 3)
    limit = ROUNDING[backbone.compute_dtype]
    training, cut = backbone.training, backbone.cut
    backbone.eval()
    backbone.cut = Cut.AFTER_PROJECTOR
    try:
        with torch.no_grad():
            packed, alone = _run(backbone, forward, [a, b]), [_run(backbone, forward, [s]) for s in (a, b)]
            after_other, before_other = _run(backbone, forward, [other_a, b]), _run(backbone, forward, [a, other_b])
    finally:
        backbone.train(training)
        backbone.cut = cut
    for name, (of_a, of_b) in packed.outputs.items():
        pairs = (
            (of_a, alone[0].outputs[name][0], limit),
            (of_b, alone[1].outputs[name][0], limit),
            (of_a, before_other.outputs[name][0], limit * 1e-2),
            (of_b, after_other.outputs[name][1], limit * 1e-2),
        )
        if any(_differ(*pair) for pair in pairs):
            return name
    return None


def _differ(one: torch.Tensor, other: torch.Tensor, limit: float) -> bool:
    distance = float((one.double() - other.double()).norm())
    return not distance <= limit * float(other.double().norm())


# --- synthetic samples ------------------------------------------------------------------------------------------------


def _sample(backbone: BackboneHalf, seed: int, image_last: bool) -> PackSample:
    """Five text tokens and one square image at the border; every token has a label, so that all logits are compared."""
    generator = torch.Generator().manual_seed(seed)
    grids, shapes = _example_image(backbone.model)
    text = _text_ids(backbone, TEXT_TOKENS, generator)
    image = torch.full((IMAGE_SIDE * IMAGE_SIDE,), backbone.model.config.image_token_id)
    input_ids = torch.cat([text, image] if image_last else [image, text])
    features = tuple(torch.randn(shape, generator=generator) for shape in shapes)
    device = backbone.device
    return PackSample(
        input_ids.to(device),
        input_ids.clone().to(device),
        tuple(feature.to(device, backbone.compute_dtype) for feature in features),
        None if grids is None else grids.to(device),
    )


def _example_image(model: Any) -> tuple[torch.Tensor | None, list[tuple[int, int]]]:
    """Grid of a square image where the family has grids, and the (rows, width) of each of its features."""
    vision, width = model.config.vision_config, model.config.get_text_config().hidden_size
    levels = 1 + len(getattr(vision, "deepstack_visual_indexes", None) or ())
    grids = None
    if has_image_axes(model):
        side = IMAGE_SIDE * vision.spatial_merge_size
        grids = torch.tensor([[1, side, side]])
    return grids, [(IMAGE_SIDE * IMAGE_SIDE, width)] * levels


def _altered(backbone: BackboneHalf, sample: PackSample, seed: int) -> PackSample:
    """Other text and other features, same lengths; labels stay, so that the same places are compared."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = sample.input_ids.clone()
    is_text = input_ids != backbone.model.config.image_token_id
    input_ids[is_text] = _text_ids(backbone, int(is_text.sum()), generator).to(input_ids.device)
    assert sample.features is not None
    features = tuple(torch.randn(f.shape, generator=generator).to(f) for f in sample.features)
    return replace(sample, input_ids=input_ids, features=features)


def _text_ids(backbone: BackboneHalf, count: int, generator: torch.Generator) -> torch.Tensor:
    """Ordinary tokens, drawn at random."""
    plain = torch.tensor(ordinary_ids(backbone.model.config))
    return plain[torch.randint(0, len(plain), (count,), generator=generator)]


# --- observing layers -------------------------------------------------------------------------------------------------


def _run(backbone: BackboneHalf, forward: Callable[..., Tensors], samples: Sequence[PackSample]) -> _Run:
    lengths = [len(sample.input_ids) for sample in samples]
    outputs: dict[str, list[torch.Tensor]] = {}
    for section in backbone.sections or (None,):
        carried = None if section is None or section.section.is_first else _carried(backbone, section, samples)
        with _watching(backbone, lengths, outputs):
            found = forward(samples, section=section, carried=carried)
        if section is None or section.section.is_last:
            outputs["logits"] = list(found[0].split([length - 1 for length in lengths]))
    return _Run(outputs)


def _carried(backbone: BackboneHalf, section: SectionRunner, samples: Sequence[PackSample]) -> torch.Tensor:
    """What a section of a pipeline might be given for these samples: of each its own, whatever is beside it."""
    image, hidden = backbone.model.config.image_token_id, []
    for sample in samples:
        assert sample.features is not None
        phases = torch.arange(1, sample.features[0].shape[1] + 1, device=backbone.device)
        states = torch.sin(0.7 * sample.input_ids[:, None] * phases).to(backbone.stream_dtype)
        hidden.append(states.masked_scatter((sample.input_ids == image)[:, None], sample.features[0].to(states)))
    whole = torch.cat(hidden)
    padded = torch.cat([whole, whole.new_zeros(-len(whole) % backbone.share.multiple, whole.shape[1])])
    levels = zip(*(sample.features[1 + section.section.start :] for sample in samples if sample.features), strict=True)
    return torch.cat([backbone.share.own_tokens(padded[None])[0], *(torch.cat(level).to(whole) for level in levels)])


@contextmanager
def _watching(backbone: BackboneHalf, lengths: list[int], outputs: dict[str, list[torch.Tensor]]) -> Iterator[None]:
    """Keep the output of every decoder layer, split by sample."""

    def watch(name: str) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            outputs[name] = list(backbone.share.whole_tokens(hidden)[0][: sum(lengths)].split(lengths))

        return keep

    handles = [layer.register_forward_hook(watch(name)) for name, layer in decoder_layers(backbone.model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _mixes_tokens_otherwise(model: Any) -> bool:
    """Whether the backbone has a token mixer besides attention, by its config or by its modules."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if kinds - {"full_attention", "sliding_attention", "chunked_attention"}:
        return True
    return any(isinstance(m, nn.Conv1d) for _, layer in decoder_layers(model) for m in layer.modules())
