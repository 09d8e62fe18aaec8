"""A real tiny model, rows of every shape, and the plain single-process model that the halves are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForImageTextToText

from flowtrain.config.schema import Config
from flowtrain.models.backbone import BackboneHalf, PackSample
from flowtrain.models.encoder import EncoderHalf

MODEL_DIR = Path(__file__).parents[3] / "examples" / "emoji" / "model"
CPU = torch.device("cpu")


@dataclass
class Row:
    """A row as the processor would give it."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    inputs: dict[str, torch.Tensor] | None

    @property
    def grids(self) -> torch.Tensor | None:
        return None if self.inputs is None else self.inputs["image_grid_thw"]


def make_row(seed: int, image_sides: tuple[tuple[int, int], ...], text: int, trained: int) -> Row:
    """`image_sides`: (rows, columns) of patches of each image; an image may be first or last in a row."""
    generator = torch.Generator().manual_seed(seed)
    model_config = AutoConfig.from_pretrained(MODEL_DIR)
    vision = model_config.vision_config
    unit = vision.spatial_merge_size**2
    pieces = []
    for number, (rows, columns) in enumerate(image_sides):
        if number:
            pieces.append(torch.randint(10, 2000, (2,), generator=generator))
        pieces.append(torch.full((rows * columns // unit,), model_config.image_token_id))
    pieces.append(torch.randint(10, 2000, (text,), generator=generator))
    input_ids = torch.cat(pieces)
    labels = torch.full_like(input_ids, -100)
    labels[len(input_ids) - trained :] = input_ids[len(input_ids) - trained :]
    if not image_sides:
        return Row(input_ids, labels, None)
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    patches = sum(rows * columns for rows, columns in image_sides)
    grids = torch.tensor([(1, rows, columns) for rows, columns in image_sides])
    pixels = torch.randn(patches, width, generator=generator, dtype=torch.float64)
    return Row(input_ids, labels, {"pixel_values": pixels, "image_grid_thw": grids})


def load_halves(config: Config, weights_dir: Path) -> tuple[EncoderHalf, BackboneHalf]:
    dtype = torch.float64 if config.model.dtype == "float64" else torch.float32
    return (
        EncoderHalf.load(MODEL_DIR, weights_dir, config, CPU, dtype),
        BackboneHalf.load(MODEL_DIR, weights_dir, config, CPU, dtype),
    )


@dataclass
class Outcome:
    loss: float
    trained: int
    gradients: dict[str, torch.Tensor]


def run_whole(weights_dir: Path, rows: list[Row], dtype: torch.dtype, frozen: tuple[str, ...] = ()) -> Outcome:
    """The plain model, uncut, one row at a time, everything that the processor returns passed in."""
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(MODEL_DIR), dtype=dtype)
    missing = model.load_state_dict(load_file(weights_dir / "model.safetensors"), strict=False)
    assert missing.missing_keys == ["lm_head.weight"]
    assert not missing.unexpected_keys
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    loss_sum, trained = 0.0, 0
    for row in rows:
        extra: dict[str, torch.Tensor] = {}
        if row.inputs is not None:
            types = (row.input_ids == model.config.image_token_id).int()
            extra = {**row.inputs, "mm_token_type_ids": types[None]}
        logits = model(input_ids=row.input_ids[None], **extra).logits[0]
        assert logits.dtype == dtype
        loss = cross_entropy(logits[:-1], row.labels[1:], reduction="sum")
        if loss.requires_grad:
            loss.backward()
        loss_sum += loss.item()
        trained += int((row.labels[1:] != -100).sum())
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Outcome(loss_sum, trained, gradients)


def run_cut(
    encoder: EncoderHalf, backbone: BackboneHalf, packs: list[list[Row]], returns_gradients: bool, **loss_options: Any
) -> Outcome:
    """The two halves with nothing between them but detached features, as through the pool."""
    loss_sum, trained = 0.0, 0
    for pack in packs:
        with_images = [row for row in pack if row.inputs is not None]
        encoded = encoder.encode([row.inputs for row in with_images])
        leaves = [tuple(f.detach().clone().requires_grad_(returns_gradients) for f in fs) for fs in encoded]
        features = dict(zip((id(row) for row in with_images), leaves, strict=True))
        samples = [PackSample(row.input_ids, row.labels, features.get(id(row)), row.grids) for row in pack]
        loss, count = backbone.loss(samples, **loss_options)
        if loss.requires_grad:
            loss.backward()
        loss_sum += loss.item()
        trained += count
        if returns_gradients:
            pairs = [
                (f, leaf.grad) for fs, ls in zip(encoded, leaves, strict=True) for f, leaf in zip(fs, ls, strict=True)
            ]
            torch.autograd.backward([f for f, _ in pairs], [g for _, g in pairs])
    gradients = {
        name: parameter.grad
        for half in (encoder, backbone)
        for name, parameter in half.parameters_by_name().items()
        if parameter.grad is not None
    }
    return Outcome(loss_sum, trained, gradients)
