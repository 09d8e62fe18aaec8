"""Sizes of samples, as the plan needs them: from `flowtrain data scan`, from a trace, or assumed and said so.

Both kinds of file are those of `flowtrain.sizes`; of a long one every n-th row is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from flowtrain.allocator.load import Integers
from flowtrain.errors import ConfigError, DataError
from flowtrain.sizes import read_sizes, read_trace, sizes_file
from flowtrain.types import SampleMeta

MAX_SAMPLES = 4096
LONGEST_ASSUMED = 8192
TRAINED_SHARE = 0.5
"""Of the text tokens, where a file does not say which are trained."""


@dataclass(frozen=True, slots=True, eq=False)
class DataStats:
    """Columns by sample, and by image: its tokens and the sample it belongs to."""

    source: str
    text_tokens: Integers
    vision_tokens: Integers
    trained_tokens: Integers
    image_tokens: Integers
    image_sample: Integers
    audio_tokens: Integers

    def __len__(self) -> int:
        return len(self.text_tokens)

    @property
    def lengths(self) -> Integers:
        return self.text_tokens + self.vision_tokens + self.audio_tokens

    def within(self, max_tokens: int) -> DataStats:
        """Without the samples that are longer, which a run skips."""
        kept = self.lengths <= max_tokens
        if not kept.any():
            raise ConfigError(
                f"every sample of {self.source} is longer than {max_tokens} tokens: raise packing.max_tokens or "
                f"data.max_seq_len"
            )
        number = np.cumsum(kept) - 1
        images = kept[self.image_sample]
        return replace(
            self,
            text_tokens=self.text_tokens[kept],
            vision_tokens=self.vision_tokens[kept],
            trained_tokens=self.trained_tokens[kept],
            image_tokens=self.image_tokens[images],
            image_sample=number[self.image_sample[images]],
            audio_tokens=self.audio_tokens[kept],
        )

    def scaled(self, images: float = 1.0, length: float = 1.0) -> DataStats:
        """`images` times as many images a sample (of the same size); everything `length` times as long."""
        taken = _repeated(self.image_tokens, images * length)
        vision = np.zeros_like(self.vision_tokens)
        np.add.at(vision, self.image_sample[taken], self.image_tokens[taken])
        return replace(
            self,
            source=f"{self.source}, scaled",
            text_tokens=np.rint(self.text_tokens * length).astype(np.int64),
            vision_tokens=vision,
            trained_tokens=np.rint(self.trained_tokens * length).astype(np.int64),
            image_tokens=self.image_tokens[taken],
            image_sample=self.image_sample[taken],
            audio_tokens=np.rint(self.audio_tokens * length).astype(np.int64),
        )

    def summary(self) -> str:
        with_images = len(np.unique(self.image_sample)) / len(self)
        text, vision = self.text_tokens.mean(), self.vision_tokens.mean()
        return (
            f"{self.source}: {text:.0f} text and {vision:.0f} vision tokens a sample in "
            f"{len(self.image_tokens) / len(self):.1f} images, {100 * with_images:.0f} % of the samples with images, "
            f"longest {self.lengths.max()} tokens"
        )


def _repeated(tokens: Integers, factor: float) -> Integers:
    """Rows of images, each as often as brings the tokens so far nearest to `factor` times their number."""
    rows: list[int] = []
    wanted = taken = 0.0
    for row, size in enumerate(tokens.tolist()):
        wanted += factor * size
        times = max(0, round((wanted - taken) / size)) if size else 0
        taken += times * size
        rows += [row] * times
    return np.array(rows, dtype=np.int64)


def read_stats(path: Path) -> DataStats:
    """Sizes in a scan, or in a trace (`.parquet`).

    Raises:
        ConfigError: there is no such file.
        DataError: it cannot be read, or has no row with sizes.
    """
    if not path.is_file():
        why = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(f"{path} {why}: give what `flowtrain data scan` writes, or a trace")
    if path.suffix == ".parquet":
        found = read_trace(path, trained_share=TRAINED_SHARE, about=MAX_SAMPLES)[0]
    else:
        found = [row for row in read_sizes(path, about=MAX_SAMPLES) if isinstance(row, SampleMeta)]
    if not found:
        raise DataError(f"{path} has no row with sizes: give what `flowtrain data scan` writes, or a trace")
    rows = [_Row(row.text_tokens, row.trained_tokens, [image.tokens for image in row.images]) for row in found]
    return _stats(path.name, rows)


def known_stats(train: Path) -> DataStats | None:
    """What a scan has written beside these rows; None where there was none."""
    sizes = sizes_file(train)
    return read_stats(sizes) if sizes.is_file() else None


def assumed_stats(most_tokens: int = LONGEST_ASSUMED, audio: bool = False) -> DataStats:
    """Where nothing is known: 15 % text, the rest with one to four images of 256 to 1,280 tokens; stated as assumed.

    `most_tokens`: sizes are in proportion where packs hold less than the longest sample. `audio`: a fifth of the
    samples have 750 tokens of sound, half a minute.
    """
    part = min(1.0, most_tokens / LONGEST_ASSUMED)
    rows = []
    for number in range(240):
        text = int(part * (120, 180, 260, 380, 560, 820, 1200, 1760)[number % 8])
        images = [
            int(part * (256, 512, 729, 1024, 1280)[(number + k) % 5])
            for k in range(0 if number % 20 < 3 else 1 + number % 7 // 2)
        ]
        sound = int(part * 750) if audio and number % 5 == 0 else 0
        rows.append(_Row(max(1, text), max(1, text // 2), [max(1, tokens) for tokens in images], sound))
    return _stats("assumed data", rows)


@dataclass(frozen=True, slots=True)
class _Row:
    text: int
    trained: int
    images: Sequence[int]
    audio: int = 0


def _stats(source: str, rows: Sequence[_Row]) -> DataStats:
    counts = [len(row.images) for row in rows]

    def column(values: Sequence[int]) -> Integers:
        return np.array(values, dtype=np.int64)

    return DataStats(
        source=source,
        text_tokens=column([row.text for row in rows]),
        vision_tokens=column([sum(row.images) for row in rows]),
        trained_tokens=column([row.trained for row in rows]),
        image_tokens=column([tokens for row in rows for tokens in row.images]),
        image_sample=np.repeat(np.arange(len(rows)), counts),
        audio_tokens=column([row.audio for row in rows]),
    )
