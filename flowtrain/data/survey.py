"""All rows of a split, one after another: what each measures, what is wrong with the others.

`flowtrain data check` decodes images too and counts reasons; `flowtrain data scan` keeps the sizes. Both see exactly
what a run would see: the same builder, with every policy set to "skip" so that one pass finds everything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from flowtrain.config.schema import Config
from flowtrain.data.errors import BadImage
from flowtrain.data.measure import Measure, open_measure
from flowtrain.data.sample import SampleBuilder, check_expansion
from flowtrain.data.sources import open_source
from flowtrain.errors import ConfigError, DataError
from flowtrain.types import Phase, SampleMeta, SkippedRow

NUM_EXAMPLES = 5
"""Rows named for each reason."""


@dataclass(slots=True)
class Survey:
    """Counts of one split; `examples` has the first (id, detail) of each reason."""

    rows: int = 0
    usable: int = 0
    text_tokens: int = 0
    vision_tokens: int = 0
    trained_tokens: int = 0
    images: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    def add(self, row: SampleMeta | SkippedRow) -> None:
        self.rows += 1
        if isinstance(row, SkippedRow):
            self.reasons[row.reason] = self.reasons.get(row.reason, 0) + 1
            examples = self.examples.setdefault(row.reason, [])
            if len(examples) < NUM_EXAMPLES:
                examples.append((row.id, row.detail))
            return
        self.usable += 1
        self.text_tokens += row.text_tokens
        self.vision_tokens += row.vision_tokens
        self.trained_tokens += row.trained_tokens
        self.images += len(row.images)

    @property
    def bad(self) -> int:
        return self.rows - self.usable

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "usable": self.usable,
            "tokens": {"text": self.text_tokens, "vision": self.vision_tokens, "trained": self.trained_tokens},
            "images": self.images,
            "reasons": {
                reason: {
                    "count": count,
                    "examples": [{"id": row_id, "detail": detail} for row_id, detail in self.examples[reason]],
                }
                for reason, count in sorted(self.reasons.items())
            },
        }


def open_builder(config: Config, phase: Phase, measure: Measure | None = None) -> SampleBuilder:
    """The builder of a split in which nothing stops at a bad row; `measure`: one that is open already."""
    path = config.data.train if phase is Phase.TRAIN else config.data.eval
    if path is None:
        raise ConfigError("data.eval is not set, so there are no held-out rows: set it, or leave out --split eval")
    source = open_source(path)
    if not len(source):
        raise DataError(f"{path} has no rows: give a file that has some")
    if measure is None:
        measure = open_measure(config)
        check_expansion(measure)
    data = config.data.model_copy(update={"on_bad_sample": "skip"})
    return SampleBuilder(measure, source, data, config.max_row_tokens, "skip")


def survey_rows(builder: SampleBuilder, decode: bool) -> Iterator[SampleMeta | SkippedRow]:
    """Every row in the order of the file. `decode`: prepare the images as well, as a producer would."""
    inputs = None
    if decode:
        from flowtrain.data.images import EncoderInputs

        inputs = EncoderInputs(builder.measure, builder.source, builder.config)
    for row in range(len(builder.source)):
        built = builder.build(row, row, 0, 0)
        if isinstance(built, SkippedRow):
            yield built
            continue
        sample = built[0]
        if inputs is not None and sample.images:
            try:
                inputs.load(sample)
            except BadImage as error:
                yield SkippedRow(row, row, sample.id, error.reason, error.detail)
                continue
        yield sample


def percentile(ordered: list[int], share: float) -> int:
    """The smallest value that at least `share` of the ascending values do not exceed."""
    assert ordered, "a percentile needs values"
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
