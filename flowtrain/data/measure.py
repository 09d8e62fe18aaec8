"""What a row's images become in the model, told from their sizes alone: text, tokens and patches (contract C4).

    sizes of a row's images ─▶ Measure.images ─▶ for each: the text that stands for it, its tokens, its patches

| processor | how a row is measured |
|---|---|
| gives grids of patches, and writes image tokens and nothing else | by its own count, image by image |
| anything else: tiles, markers around an image, images that depend on their neighbours | by preparing the row |

A row is prepared without pixels: the processor's own code runs on tensors of torch's `meta` device, which have sizes
only; a processor that looks at values is given black pictures. Sizes met before are not prepared again. Which way holds
is found out at load, by trying (`flowtrain.data.sample.check_expansion` proves it against the processor itself).

An image's text keeps one image token for each run of them, and the length of the run: ids are repeated after
tokenising, which gives the same ids, since tokenizers split at special tokens.
"""

from __future__ import annotations

import re
import warnings
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from flowtrain.config.schema import Config
from flowtrain.data.processor import count_image, load_processor
from flowtrain.data.spans import Span
from flowtrain.errors import ConfigError
from flowtrain.shapes import ModelShape, read_shape
from flowtrain.types import ImageMeta

Size = tuple[int, int]
"""(height, width) of a picture."""

KEPT_ROWS = 4096
"""Rows whose measures are kept."""


@dataclass(frozen=True, slots=True)
class ImageText:
    """What stands for one image in a row.

    Attributes:
        text: replaces the placeholder of the chat template; every run of image tokens is written as one.
        runs: length of each run.
        patches: vision-encoder patches, without class tokens.
    """

    text: str
    runs: tuple[int, ...]
    patches: int

    @property
    def tokens(self) -> int:
        return sum(self.runs)


def prepare(processor: Any, pictures: Sequence[Any]) -> tuple[Mapping[str, Any], list[str]]:
    """What the processor makes of one row's images, and the text it puts in the place of each."""
    placeholders = [processor.image_token * len(pictures)]
    images = processor.prepare_inputs_layout(images=[list(pictures)], text=placeholders)[0]
    prepared, texts = processor._process_images(images, **_image_options(processor))
    return prepared, [str(text) for text in texts]


@lru_cache(maxsize=4)
def _image_options(processor: Any) -> Mapping[str, Any]:
    """The same for every row; to merge and validate them takes a quarter of the time of a small row's images."""
    options = processor._merge_kwargs(tokenizer_init_kwargs=processor.tokenizer.init_kwargs, return_tensors="pt")
    return MappingProxyType(options["images_kwargs"])


def expand(
    pieces: Sequence[str], placeholder_length: int, spans: Sequence[Span], images: Sequence[ImageText]
) -> tuple[str, list[Span]]:
    """A text, cut at its placeholders, with the images' texts in their places; `spans` of the text move along.

    >>> expand(["a", "bc"], 3, [(4, 6)], [ImageText("<<i>>", (7,), 28)])
    ('a<<i>>bc', [(6, 8)])
    """
    assert len(pieces) == len(images) + 1, f"{len(images)} images for {len(pieces)} pieces of text"
    ends, growths = [0], [0]
    for piece, image in zip(pieces, images, strict=False):
        ends.append(ends[-1] + len(piece) + placeholder_length)
        growths.append(growths[-1] + len(image.text) - placeholder_length)

    def moved(place: int) -> int:
        return place + growths[bisect_right(ends, place) - 1]

    whole = pieces[0] + "".join(image.text + piece for image, piece in zip(images, pieces[1:], strict=True))
    return whole, [(moved(start), moved(end)) for start, end in spans]


def open_measure(config: Config) -> Measure:
    """The model folder's processor and shape, ready to measure rows."""
    return Measure(load_processor(config.model.path, config), read_shape(config.model.path))


@dataclass(slots=True)
class Measure:
    """Measures rows for one processor and model.

    Example:
        >>> measure = Measure(processor, read_shape(model_dir))       # doctest: +SKIP
        >>> [image.tokens for image in measure.images([(40, 72)])]    # doctest: +SKIP
        [20]
    """

    processor: Any
    shape: ModelShape
    image_token: str = field(init=False)
    _by_count: bool = field(init=False)
    _device: str = field(init=False, default="meta")
    _kept: OrderedDict[tuple[Size, ...], tuple[ImageText, ...]] = field(init=False, default_factory=OrderedDict)

    def __post_init__(self) -> None:
        number = self.shape.image_token_id
        token = None if number is None else self.processor.tokenizer.convert_ids_to_tokens(number)
        if token is None:
            raise ConfigError(f"model.path: config.json names image token {number}, which the tokenizer lacks")
        self.image_token = str(token)
        self._by_count = self._counts_alone()

    def images(self, sizes: Sequence[Size]) -> tuple[ImageText, ...]:
        """In order; ValueError for sizes that the processor refuses."""
        if self._by_count:
            counts = [count_image(self.processor, height, width) for height, width in sizes]
            return tuple(ImageText(self.image_token, (tokens,), patches) for tokens, patches in counts)
        key = tuple(sizes)
        if key not in self._kept:
            self._kept[key] = self._by_row(key)
            if len(self._kept) > KEPT_ROWS:
                self._kept.popitem(last=False)
        return self._kept[key]

    def patches(self, prepared: Mapping[str, Any], images: Sequence[ImageMeta]) -> list[int]:
        """Patches of each image of a prepared row; `images` tells the tokens and the size of each."""
        sizes = [(image.height, image.width) for image in images]
        return self._patches(prepared, sizes, [image.tokens for image in images])

    def _counts_alone(self) -> bool:
        """Whether the processor's own count is true, and all there is to say."""
        if not hasattr(self.processor, "_get_num_multimodal_tokens"):
            return False
        size = (64, 96)
        try:
            prepared, texts = self._prepare([size, size])
            tokens, patches = count_image(self.processor, *size)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError):
            return False
        grids = prepared.get("image_grid_thw")
        if grids is None or any(text != self.image_token * tokens for text in texts):
            return False
        return [int(count) for count in grids.prod(-1)] == [patches, patches]

    def _by_row(self, sizes: tuple[Size, ...]) -> tuple[ImageText, ...]:
        prepared, texts = self._prepare(sizes)
        run = re.compile(f"(?:{re.escape(self.image_token)})+")
        runs = [tuple(len(found) // len(self.image_token) for found in run.findall(text)) for text in texts]
        short = [run.sub(lambda _: self.image_token, text) for text in texts]
        patches = self._patches(prepared, sizes, [sum(lengths) for lengths in runs])
        return tuple(ImageText(*image) for image in zip(short, runs, patches, strict=True))

    def _prepare(self, sizes: Sequence[Size]) -> tuple[Mapping[str, Any], list[str]]:
        """Without pixels; from the first time that this fails, with black ones."""
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self._device == "meta":
                try:
                    return self._prepared(sizes, torch.device("meta"))
                except (NotImplementedError, RuntimeError, TypeError):
                    pass
            found = self._prepared(sizes, torch.device("cpu"))
            self._device = "cpu"
            return found

    def _prepared(self, sizes: Sequence[Size], device: Any) -> tuple[Mapping[str, Any], list[str]]:
        import torch
        from transformers.utils import logging

        pictures = [torch.zeros(3, height, width, dtype=torch.uint8, device=device) for height, width in sizes]
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()
        try:
            return prepare(self.processor, pictures)
        finally:
            logging.set_verbosity(verbosity)

    def _patches(self, prepared: Mapping[str, Any], sizes: Sequence[Size], tokens: Sequence[int]) -> list[int]:
        grids = prepared.get("image_grid_thw")
        if grids is not None:
            return [int(count) for count in grids.prod(-1)]
        tile = self.shape.vision.tile_patches
        if tile is None:
            raise ConfigError(
                f"model.path: {type(self.processor).__name__} gives neither grids of patches nor tiles of one size, so "
                "the patches of an image are not known before it is encoded; this model family is not supported"
            )
        pixels = prepared["pixel_values"].shape
        if len(pixels) == 5 and pixels[0] == len(sizes) > 1 and pixels[1] > 1:
            # Tiles are padded to the most of any image: each image alone has just its own.
            return [tile * _tiles(self._prepare([size])[0]) for size in sizes]
        total = tile * _tiles(prepared)
        shares = [total * count // sum(tokens) for count in tokens]
        shares[-1] += total - sum(shares)
        return shares


def _tiles(prepared: Mapping[str, Any]) -> int:
    """Pieces of (channels, height, width) among the pixels."""
    return int(prepared["pixel_values"].shape[:-3].numel())
