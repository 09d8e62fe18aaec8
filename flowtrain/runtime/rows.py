"""Rows on their way from readers to steps: metadata to the composer, payload blocks to the packs that need them.

    readers ──BlockRead──▶ SampleStream (order) ──rows──▶ Composer ──▶ Step
       └──payload handle──▶ kept here by block number until the last sample of the block is trained

Skipped rows are counted with the step whose rows they stood among, so that a resumed run counts each once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from flowtrain.data.reader import BlockRead
from flowtrain.data.stream import ReadRequest, SampleStream
from flowtrain.errors import DataError
from flowtrain.packing.compose import Composer
from flowtrain.types import SampleMeta, SkippedRow, Step

PROBED_ROWS = 100
"""Rows among which the share of bad ones is checked against `data.max_bad_share`."""


class Payloads:
    """Handles of payload blocks, dropped with the last sample of each."""

    def __init__(self) -> None:
        self._handles: dict[int, Any] = {}
        self._left: Counter[int] = Counter()

    def add(self, block: int, handle: Any, num_samples: int) -> None:
        if num_samples:
            self._handles[block] = handle
            self._left[block] = num_samples

    def handles(self, blocks: Sequence[int]) -> list[Any]:
        return [self._handles[block] for block in blocks]

    def done(self, samples: Sequence[SampleMeta]) -> None:
        for sample in samples:
            self._left[sample.block] -= 1
            if self._left[sample.block] == 0:
                del self._handles[sample.block], self._left[sample.block]

    def __len__(self) -> int:
        return len(self._handles)


class BadShare:
    """Stops a run whose rows are mostly unusable: most often the config is wrong, not the rows (D07, D25, D28).

    | rule | looked at |
    |---|---|
    | more than `limit` of the first rows | told by readers; images that producers cannot decode |
    | no usable row in a whole pass | told by readers; else an endless run would read for ever |
    | no row trained | at the end |
    """

    def __init__(self, limit: float, num_rows: int) -> None:
        self.limit = limit
        self.num_rows = num_rows
        self.probe = min(PROBED_ROWS, num_rows)
        self.seen = 0
        self.composed = 0
        self.reasons: Counter[str] = Counter()
        self.first: dict[str, SkippedRow] = {}
        self._any_usable = self._any_trained = False

    def add(self, rows: Sequence[SampleMeta | SkippedRow]) -> None:
        """The next rows were read."""
        before, self.seen = self.seen, self.seen + len(rows)
        self._any_usable = self._any_usable or any(isinstance(row, SampleMeta) for row in rows)
        if before < self.probe:
            for row in rows[: self.probe - before]:
                if isinstance(row, SkippedRow):
                    self._count(row)
            if self.seen >= self.probe:
                self._judge()
        if self.seen >= self.num_rows and not self._any_usable:
            raise self._error(f"none of the {self.num_rows} rows can be used", "")

    def decoded(self, num_rows: int, bad: Iterable[SkippedRow]) -> None:
        """A step of `num_rows` was trained, all but those found bad at decode."""
        bad = tuple(bad)
        self._any_trained |= len(bad) < num_rows
        if self.composed < self.probe:
            for row in bad[: self.probe - self.composed]:
                self._count(row)
            self._judge()
        self.composed += num_rows

    def ended(self) -> None:
        """There are no more steps."""
        if self.composed and not self._any_trained:
            raise self._error(f"none of the {self.composed} rows of the run could be trained", "")

    def _count(self, row: SkippedRow) -> None:
        self.reasons[row.reason] += 1
        self.first.setdefault(row.reason, row)

    def _judge(self) -> None:
        bad = self.reasons.total()
        if bad > self.limit * self.probe:
            raise self._error(f"{bad} of the first {self.probe} rows cannot be used", ", or raise data.max_bad_share")

    def _error(self, what: str, way_out: str) -> DataError:
        reason, count = self.reasons.most_common(1)[0]
        first = self.first[reason]
        return DataError(
            f"{what}, {count} of them for `{reason}` (first: row {first.id}: {first.detail}); "
            f"run `flowtrain data check`{way_out}"
        )


class RowFeed:
    """Training rows: what to read next, and the next step once its rows are here."""

    def __init__(self, stream: SampleStream, composer: Composer, payloads: Payloads, bad_share: BadShare) -> None:
        self.stream = stream
        self.composer = composer
        self.payloads = payloads
        self.bad_share = bad_share
        self._skipped: list[SkippedRow] = []
        self._ended = False

    def requests(self) -> Iterator[ReadRequest]:
        """Blocks to ask the readers for now."""
        self.stream.want(self.composer.wants())
        yield from self.stream.requests()

    def add(self, read: BlockRead, handle: Any) -> None:
        """A block arrived, in any order."""
        self.payloads.add(read.block, handle, sum(isinstance(row, SampleMeta) for row in read.rows))
        self.stream.add(read)
        self._drain()

    def next_step(self) -> Step | None:
        """The next step, or None when rows are missing; then `exhausted` tells whether more can come."""
        self._drain()
        return self.composer.next()

    @property
    def exhausted(self) -> bool:
        return self._ended

    def skipped_before(self, step: Step) -> list[SkippedRow]:
        """Rows skipped among those read for this step and the ones before it, each told once."""
        told = [row for row in self._skipped if row.position < step.cursor]
        self._skipped = [row for row in self._skipped if row.position >= step.cursor]
        return told

    def skipped_rest(self) -> list[SkippedRow]:
        """Rows skipped behind the last step, once there are no more rows."""
        rest, self._skipped = self._skipped, []
        return rest

    def _drain(self) -> None:
        if rows := self.stream.take():
            if too_big := {row.position: row for row in self.composer.add(rows)}:
                self.payloads.done([row for row in rows if isinstance(row, SampleMeta) and row.position in too_big])
                rows = [too_big.get(row.position, row) for row in rows]
            self._skipped += [row for row in rows if isinstance(row, SkippedRow)]
            self.bad_share.add(rows)
        if self.stream.exhausted and not self._ended:
            self._ended = True
            self.composer.end()


class EvalRows:
    """The held-out rows, read once in source order and kept for every evaluation pass.

    `too_big`: tells of rows which ones no pack can hold (`Composer.too_big`).
    """

    def __init__(
        self,
        num_rows: int,
        block_rows: int,
        num_readers: int,
        payloads: Payloads,
        too_big: Callable[[Sequence[SampleMeta]], Sequence[SkippedRow]],
    ) -> None:
        self.too_big = too_big
        self.stream = SampleStream(num_rows, block_rows, num_readers, end=num_rows)
        self.payloads = payloads
        self.samples: list[SampleMeta] = []
        self.skipped: list[SkippedRow] = []
        self.num_rows = num_rows

    def requests(self) -> Iterator[ReadRequest]:
        self.stream.want(self.num_rows - len(self.samples) - len(self.skipped))
        yield from self.stream.requests()

    def add(self, read: BlockRead, handle: Any) -> None:
        self.payloads.add(read.block, handle, sum(isinstance(row, SampleMeta) for row in read.rows))
        self.stream.add(read)
        rows = self.stream.take()
        samples = [row for row in rows if isinstance(row, SampleMeta)]
        too_big = {row.position: row for row in self.too_big(samples)}
        self.payloads.done([row for row in samples if row.position in too_big])
        for row in rows:
            found = too_big.get(row.position, row)
            if isinstance(found, SampleMeta):
                self.samples.append(found)
            else:
                self.skipped.append(found)

    @property
    def ready(self) -> bool:
        return len(self.samples) + len(self.skipped) == self.num_rows
