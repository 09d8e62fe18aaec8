"""Faults that a producer plants on purpose (`debug.faults`), so that `flowtrain verify` can be seen to find them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from flowtrain.models.encoder import EncoderHalf
from flowtrain.types import EmbeddingRef, Module


def swap_images(inputs: Sequence[Mapping[str, torch.Tensor]]) -> bool:
    """Exchange the pixels of two different images (or tiles) of the same size; returns whether there were such two."""
    seen: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for sample in inputs:
        for kind, pixels in _images(sample):
            for other in seen.setdefault(kind, []):
                if not torch.equal(other, pixels):
                    kept = other.clone()
                    other.copy_(pixels)
                    pixels.copy_(kept)
                    return True
            seen[kind].append(pixels)
    return False


def _images(sample: Mapping[str, torch.Tensor]) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Pixels of each image with a grid, or of each tile, and what another must share to stand in its place."""
    pixels = sample["pixel_values"]
    grids = sample.get("image_grid_thw")
    if grids is None:
        for tile in pixels.flatten(0, -4):
            yield tuple(tile.shape), tile
        return
    start = 0
    for grid in grids.tolist():
        patches = int(grid[0] * grid[1] * grid[2])
        yield tuple(grid), pixels[start : start + patches]
        start += patches


def drop_image_gradient(ref: EmbeddingRef, gradients: Sequence[torch.Tensor]) -> None:
    """Zero the gradient of the first image of a sample, in place."""
    patches = [frames * rows * columns for frames, rows, columns in ref.grids] or [1]
    for gradient in gradients:
        gradient[: gradient.shape[0] * patches[0] // sum(patches)] = 0


def double_encoder_gradient(encoder: EncoderHalf) -> None:
    modules = encoder.module_of()
    for name, parameter in encoder.parameters_by_name().items():
        if modules[name] is Module.ENCODER and parameter.grad is not None:
            parameter.grad.mul_(2)


@contextmanager
def stale_parameters(encoder: EncoderHalf, stale: Mapping[str, torch.Tensor] | None) -> Iterator[None]:
    """Run with the parameters of the version before; does nothing when `stale` is None."""
    if stale is None:
        yield
        return
    current = {name: parameter.data for name, parameter in encoder.parameters_by_name().items()}
    for name, parameter in encoder.parameters_by_name().items():
        parameter.data = stale[name]
    try:
        yield
    finally:
        for name, parameter in encoder.parameters_by_name().items():
            parameter.data = current[name]
