"""The producer's half: everything that `get_image_features` needs, up to the cut (contract C4).

    images of a unit's samples ──▶ one encoder call ──▶ features of each sample, in the order of `shape.features(cut)`

A unit's samples share one call, so that small images fill it; the result is split by sample, because that is the unit
of exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from flowtrain.config.schema import Config
from flowtrain.models.half import Half, load_half


class EncoderHalf(Half):
    """
    Example::

        encoder = EncoderHalf.load(config.model.path, weights_dir, config, torch.device("cpu"), "float32")
        features = encoder.encode([{"pixel_values": pixels, "image_grid_thw": grids}])
        features[0][0].shape  # (tokens, width)
    """

    @classmethod
    def load(
        cls, model_dir: Path, weights_dir: Path, config: Config, device: torch.device, dtype: torch.dtype | str
    ) -> EncoderHalf:
        """Read encoder parameters (and the projector's, where the cut is after it) from `weights_dir`.

        `dtype` is that of the parameters; the compute dtype is `config.model.dtype`.

        Raises:
            ConfigError: the folder cannot be used, or its family cannot be cut.
        """
        part = config.producer_modules
        model, family, table, compute_dtype = load_half(model_dir, weights_dir, config, part, device, dtype)
        family.prepare_encoder(model, config.cut)
        return cls(model, family, config.cut, part, table, device, compute_dtype)

    def encode(self, inputs: Sequence[Mapping[str, torch.Tensor]]) -> list[tuple[torch.Tensor, ...]]:
        """Features of each sample, in the compute dtype, attached to the graph where gradients are enabled.

        Args:
            inputs: for each sample what the processor returns for all its images.
        """
        if not inputs:
            return []
        placed = [{name: tensor.to(self.device) for name, tensor in sample.items()} for sample in inputs]
        with self.computing():
            encoded = self.family.encode(self.model, placed, self.cut)
        assert len(encoded) == len(inputs)
        return [tuple(feature.to(self.compute_dtype) for feature in features) for features in encoded]
