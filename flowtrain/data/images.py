"""The encoder's inputs of one sample: its images decoded and prepared by the model's own processor.

Runs on producers. All images of a row go through one call, because some families prepare an image differently when it
has neighbours (contract C4). What comes out must have the sizes that composition counted on from the headers.
"""

from __future__ import annotations

import warnings

import torch
from PIL import Image

from flowtrain.config.schema import DataConfig
from flowtrain.data.errors import BadImage, BadRow
from flowtrain.data.measure import Measure, prepare
from flowtrain.data.pictures import load_picture
from flowtrain.data.sources.base import ImageRef, Source
from flowtrain.telemetry.spans import Span, no_span
from flowtrain.types import ImageMeta, SampleMeta

__all__ = ["BadImage", "EncoderInputs"]

BLANK_SIDE = 56
"""Pixels: what processors ask for at least, and no more."""


class EncoderInputs:
    """Loads the images of samples of one source.

    >>> inputs = EncoderInputs(measure, source, config.data).load(sample)      # doctest: +SKIP
    >>> inputs["pixel_values"].shape, inputs["image_grid_thw"].shape                      # doctest: +SKIP
    (torch.Size([patches, 384]), torch.Size([images, 3]))
    """

    def __init__(self, measure: Measure, source: Source, config: DataConfig, span: Span = no_span) -> None:
        self.measure = measure
        self.span = span
        self.source = source
        self.config = config

    def load(self, sample: SampleMeta) -> dict[str, torch.Tensor]:
        """What the processor returns for the row's images; BadImage(reason, detail) when one cannot be used."""
        assert sample.images, f"sample {sample.id} has no image to encode"
        try:
            refs = self.source.row(sample.row).images
        except BadRow as error:
            raise BadImage(error.reason, error.detail, error.row_id) from error
        if len(refs) != len(sample.images):
            raise BadImage(
                "image-count", f"row {sample.id} has {len(refs)} images now, and had {len(sample.images)} before"
            )
        with self.span("decode"):
            pictures = [self._picture(ref, told) for ref, told in zip(refs, sample.images, strict=True)]
        try:
            with self.span("preprocess"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                prepared, _ = prepare(self.measure.processor, pictures)
        except ValueError as error:
            raise BadImage(
                "image-shape", f"the images of row {sample.id} are refused by the processor: {error}"
            ) from error
        inputs = {name: value for name, value in prepared.items() if isinstance(value, torch.Tensor)}
        self._check(sample, inputs)
        return inputs

    def _picture(self, ref: ImageRef, told: ImageMeta) -> Image.Image:
        picture = load_picture(ref, self.config.max_image_pixels)
        if picture.size != (told.width, told.height):
            raise BadImage(
                "image-shape",
                f"{ref.label} has {picture.width}×{picture.height} pixels, and its header said "
                f"{told.width}×{told.height}",
            )
        return picture

    def blank(self) -> dict[str, torch.Tensor]:
        """The same for a small picture of one grey, for a call of the encoder that nothing depends on."""
        prepared, _ = prepare(self.measure.processor, [Image.new("RGB", (BLANK_SIDE, BLANK_SIDE), (127, 127, 127))])
        return {name: value for name, value in prepared.items() if isinstance(value, torch.Tensor)}

    def _check(self, sample: SampleMeta, inputs: dict[str, torch.Tensor]) -> None:
        """The row takes the patches that its headers promised: packs and blocks in the pool were sized by them."""
        patches = self.measure.patches(inputs, sample.images)
        told = [image.patches for image in sample.images]
        if patches != told:
            raise BadImage(
                "image-shape", f"the images of row {sample.id} take {patches} patches, their headers promised {told}"
            )
