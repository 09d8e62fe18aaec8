"""What one read gives: metadata for the controller, token ids for the consumers that train the rows.

ReaderStage.read ──▶ BlockRead (small: sizes and reasons) ──▶ controller ──▶ composition
                └──▶ PayloadBlock (token ids, label mask) ──▶ kept by handle ──▶ consumers of its samples
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flowtrain.types import Phase, SampleMeta, SkippedRow

IGNORED_LABEL = -100
"""Label of a token that is not trained, as torch's cross entropy has it."""


@dataclass(frozen=True, slots=True)
class BlockRead:
    """Rows of positions `start`, `start + 1`, …; `block` numbers the payload block, over both phases."""

    phase: Phase
    block: int
    start: int
    rows: tuple[SampleMeta | SkippedRow, ...]


class SampleTokens(NamedTuple):
    """Token ids of one sample and their labels, aligned (not shifted): int64 of shape (T,)."""

    input_ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]

    @classmethod
    def of(cls, input_ids: npt.NDArray[np.int64], trained: npt.NDArray[np.bool_]) -> SampleTokens:
        return cls(input_ids, np.where(trained, input_ids, IGNORED_LABEL))


@dataclass(frozen=True, slots=True, eq=False)
class PayloadBlock:
    """Token ids of a block's samples, end to end in arrays without Python objects, five bytes a token.

    `starts` has one entry more than there are samples: sample k lies in [starts[k], starts[k + 1]).
    """

    input_ids: npt.NDArray[np.int32]
    trained: npt.NDArray[np.bool_]
    starts: npt.NDArray[np.int64]

    @classmethod
    def of(cls, samples: Iterable[SampleTokens]) -> PayloadBlock:
        kept = list(samples)
        lengths = [len(sample.input_ids) for sample in kept]
        return cls(
            np.concatenate([np.zeros(0, np.int32), *(sample.input_ids.astype(np.int32) for sample in kept)]),
            np.concatenate([np.zeros(0, np.bool_), *(sample.labels != IGNORED_LABEL for sample in kept)]),
            np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]),
        )

    def __len__(self) -> int:
        return len(self.starts) - 1

    def sample(self, index: int) -> SampleTokens:
        """Arrays of its own, which the caller may keep and write to."""
        assert 0 <= index < len(self), f"sample {index} of a block of {len(self)}"
        place = slice(int(self.starts[index]), int(self.starts[index + 1]))
        return SampleTokens.of(self.input_ids[place].astype(np.int64), self.trained[place])


def payload_number(phase: Phase, block: int) -> int:
    """Number of a payload block over both phases: the blocks of either are kept in one place until they are trained."""
    return 2 * block + (phase is Phase.EVAL)
