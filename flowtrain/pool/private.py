"""A segment of a process that is producer and consumer at once: private memory, found by number within the process."""

from __future__ import annotations

import itertools
import mmap
import os
from typing import Literal

from flowtrain.errors import PlanError
from flowtrain.pool.host import host_identity
from flowtrain.pool.pages import HugePages, reserve_pages
from flowtrain.pool.segment import Endpoints, OwnSegment, Segment, SegmentHandle, check_segment_bytes, remember

_numbers = itertools.count(1)


class PrivateSegment:
    """Anonymous memory of fixed size, all of it reserved. The same calls as `Segment`."""

    def __init__(
        self, owner: int, num_bytes: int, huge_pages: Literal["auto", "off"] = "auto", near: int | None = None
    ) -> None:
        check_segment_bytes(owner, num_bytes)
        self.owner = owner
        self.bytes = num_bytes
        self._number = -next(_numbers)
        try:
            mapping = mmap.mmap(-1, num_bytes)
        except OSError as error:
            raise PlanError(
                f"a pool segment of {num_bytes} bytes cannot be mapped ({error.strerror}): "
                f"lower pool.bytes, or raise the memory limit of the process (ulimit -v)"
            ) from error
        reserve_pages(mapping, -1, num_bytes, huge_pages, f"the segment of pool owner {owner}", near)
        self._mapping: mmap.mmap | None = mapping
        self.memory = memoryview(self._mapping)
        remember(self._number, self)

    def handle(self, endpoints: Endpoints | None = None, host: str | None = None) -> SegmentHandle:
        """For other clients of this process; others reach it by an endpoint, or not at all."""
        here = host or host_identity()
        return SegmentHandle(self.owner, os.getpid(), -1, self.bytes, self._number, here, endpoints=endpoints or {})

    def close(self) -> None:
        """Let go of the memory; idempotent. It ends with the last view of it."""
        self._mapping = None
        self.memory = memoryview(b"")


def make_segment(
    owner: int, num_bytes: int, huge_pages: HugePages, near: int | None = None, *, shared: bool
) -> OwnSegment:
    """A process's own segment: memory that others can map, or private where nobody else will.

    Explicit huge pages come as a file in either case. `near`: the NUMA node to lie on.
    """
    if not shared and huge_pages != "explicit":
        return PrivateSegment(owner, num_bytes, huge_pages, near)
    return Segment.create(owner, num_bytes, f"flowtrain-pool-{owner}", huge_pages, near)
