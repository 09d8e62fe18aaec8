"""A sample as the model reads it: decoded text cut into runs of trained and untrained tokens, images as counts.

Used at the start of a run (one sample with its mask) and by `flowtrain data show`.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

import numpy as np
from PIL import Image

from flowtrain.config.schema import Config
from flowtrain.data.blocks import SampleTokens
from flowtrain.data.measure import Measure
from flowtrain.data.order import Order
from flowtrain.data.sample import SampleBuilder
from flowtrain.types import SkippedRow

_FIRST_ROWS = 100
"""Rows of the run's order among which one to show is looked for."""


class Run(NamedTuple):
    """Neighbouring tokens of one kind; `num_image_tokens` is 0 for text."""

    text: str
    trained: bool
    num_image_tokens: int


def token_runs(measure: Measure, tokens: SampleTokens) -> list[Run]:
    """The whole sample in order; special tokens are shown as they are written."""
    image_id = measure.shape.image_token_id
    kinds = np.stack([tokens.labels >= 0, tokens.input_ids == image_id], axis=1).tolist()
    runs = []
    for (trained, is_image), group in groupby(
        zip(kinds, tokens.input_ids.tolist(), strict=True), key=lambda p: tuple(p[0])
    ):
        ids = [token for _, token in group]
        if is_image:
            runs.append(Run(measure.image_token, trained, len(ids)))
        else:
            runs.append(Run(measure.processor.tokenizer.decode(ids, clean_up_tokenization_spaces=False), trained, 0))
    return runs


def masked_text(measure: Measure, tokens: SampleTokens) -> str:
    """Plain text: trained tokens in ⟦…⟧, a run of image tokens as `<|image_pad|>×16`.

    >>> print(masked_text(measure, tokens))      # doctest: +SKIP
    <|im_start|>user
    <|vision_start|><|image_pad|>×4<|vision_end|>Which digit is this?<|im_end|>
    <|im_start|>assistant
    ⟦7<|im_end|>⟧
    """
    pieces = []
    for run in token_runs(measure, tokens):
        text = f"{run.text}×{run.num_image_tokens}" if run.num_image_tokens else run.text
        pieces.append(f"⟦{text}⟧" if run.trained else text)
    return "".join(pieces)


def half_blocks(picture: Image.Image, max_columns: int, max_rows: int) -> list[list[tuple[str, str]]]:
    """The picture as rows of (upper, lower) colours `#rrggbb`, for cells that show `▀`: two pixels a cell."""
    scale = min(max_columns / picture.width, 2 * max_rows / picture.height, 1.0)
    width = max(1, round(picture.width * scale))
    height = max(2, 2 * round(picture.height * scale / 2))
    pixels = np.asarray(picture.convert("RGB").resize((width, height), Image.Resampling.BILINEAR))
    colours = [["#{:02x}{:02x}{:02x}".format(*pixel) for pixel in line] for line in pixels.tolist()]
    return [list(zip(colours[y], colours[y + 1], strict=True)) for y in range(0, height, 2)]


def first_sample_text(builder: SampleBuilder, order: Order) -> str | None:
    """What the start of a run prints: its first usable sample with the mask, and the share of it that is trained.

    None when none of the first rows can be used; the run itself then tells why.
    """
    for position in range(min(_FIRST_ROWS, order.num_rows)):
        built = builder.build(position, order.row(position), 0, 0)
        if not isinstance(built, SkippedRow):
            sample, tokens = built
            share = 100 * sample.trained_tokens / sample.tokens
            told = f"row {sample.id}: {sample.tokens} tokens, {sample.trained_tokens} of them trained ({share:.0f} %)"
            return f"{told}\n{masked_text(builder.measure, tokens).rstrip()}"
    return None


def sample_text(config: Config) -> str | None:
    """`first_sample_text` of a run; where a reader stage is at hand, its `first_sample` saves loading the processor."""
    from flowtrain.data.reader import ReaderStage

    return ReaderStage(config).first_sample()
