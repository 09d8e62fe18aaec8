"""The producer's half: everything that `get_image_features` needs, up to the cut (contract C4).

    images of a unit's samples ──▶ one encoder call ──▶ features of each sample, in the order of `shape.features(cut)`

A unit's samples share one call, so that small images fill it; the result is split by sample, because that is the unit
of exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from flowtrain.config.schema import Config
from flowtrain.models.features import accepted_inputs, can_share_call, encode_samples, projected
from flowtrain.models.half import Half
from flowtrain.models.playback import playback_of, record
from flowtrain.types import Cut, Module, Playback


class EncoderHalf(Half):
    """
    Example::

        encoder = EncoderHalf.load(config.model.path, weights_dir, config, torch.device("cpu"), "float32")
        features = encoder.encode([{"pixel_values": pixels, "image_grid_thw": grids}])
        features[0][0].shape  # (tokens, width)
    """

    forward_method = "encode"

    @staticmethod
    def part_of(config: Config) -> frozenset[Module]:
        """Also the projector's, where the cut is after it."""
        return config.producer_modules

    def num_calls(self, inputs: Sequence[Mapping[str, torch.Tensor]]) -> int:
        """Times that the encoder is called to encode these samples together."""
        placed = [accepted_inputs(self.model, sample) for sample in inputs]
        return min(len(inputs), 1) if len(inputs) < 2 or can_share_call(placed) else len(inputs)

    def encode(
        self, inputs: Sequence[Mapping[str, torch.Tensor]], alone: Sequence[Mapping[str, torch.Tensor]] = ()
    ) -> list[tuple[torch.Tensor, ...]]:
        """Features of each sample, in the compute dtype, attached to the graph where gradients are enabled.

        (rows, width) each; before a projector that lies behind the encoder as many dims as the encoder's output has.

        Args:
            inputs: for each sample what the processor returns for all its images.
            alone: the same of samples that have a call each; their features come last.
        """
        with self.computing():
            encoded = encode_samples([self._placed(sample) for sample in inputs], self._encode) if inputs else []
            encoded += [self._encode(self._placed(sample)) for sample in alone]
        assert len(encoded) == len(inputs) + len(alone)
        return [tuple(feature.to(self.compute_dtype) for feature in features) for features in encoded]

    def playback(self, inputs: Mapping[str, torch.Tensor], features: Sequence[torch.Tensor]) -> Playback | None:
        """What a consumer needs, beside the features, to run the projector on them; None where that is nothing."""
        if self.cut is Cut.AFTER_PROJECTOR:
            return None
        return playback_of(self.parts, accepted_inputs(self.model, inputs), tuple(features))

    def _placed(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.to(self.device) for name, tensor in accepted_inputs(self.model, inputs).items()}

    def _encode(self, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        pixels = inputs["pixel_values"]
        dtype = torch.float64 if self.compute_dtype is torch.float64 else torch.float32
        inputs = {**inputs, "pixel_values": pixels.to(dtype)}
        if self.cut is Cut.AFTER_PROJECTOR:
            return projected(self.model, inputs)
        return record(self.model, self.parts, inputs)
