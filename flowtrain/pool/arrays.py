"""How a process sees the payloads of blocks: the border between the pool, which moves bytes, and those who compute.

| kind | where | a block is |
|---|---|---|
| `torch_arrays()` | producers and consumers | a tensor for each of its specs (`views.py`) |
| `ByteArrays()` | processes without torch | one array of its bytes |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from flowtrain.pool.block import HEADER_BYTES
from flowtrain.types import TensorSpec

Copy = tuple[int, Sequence[Any], Sequence[Any]]
"""Position of a sample, arrays of its block, and as many that are copied over them."""


class OwnArrays(Protocol):
    """Arrays over the blocks of a process's own segment; `start` is a header's first byte."""

    def fill(
        self, start: int, specs: tuple[TensorSpec, ...], payload_bytes: int, tensors: Sequence[Any], position: int
    ) -> None:
        """Copy these into the block."""

    def of(self, start: int, specs: tuple[TensorSpec, ...], payload_bytes: int) -> list[Any]:
        """Views of what is in the block."""

    def close(self) -> None:
        """Let go of the memory."""


class Arrays(Protocol):
    """Arrays over memory that begins with a block's header."""

    def own(self, memory: memoryview) -> OwnArrays:
        """Over a whole segment."""

    def views(self, memory: memoryview, specs: tuple[TensorSpec, ...], payload_bytes: int) -> list[Any]:
        """Views of what is in a block."""

    def copy(self, copies: Iterable[Copy]) -> None:
        """Make these copies; shapes and types must agree."""


def torch_arrays() -> Arrays:
    """The usual kind; loads torch."""
    from flowtrain.pool.views import TorchArrays

    return TorchArrays()


class ByteArrays:
    """Every payload is one array of bytes, whatever its specs say. The same calls as those of torch's."""

    def own(self, memory: memoryview) -> OwnArrays:
        return _OwnBytes(memory)

    def views(self, memory: memoryview, specs: tuple[TensorSpec, ...], payload_bytes: int) -> list[Any]:
        return [np.frombuffer(memory, np.uint8, payload_bytes, HEADER_BYTES)]

    def copy(self, copies: Iterable[Copy]) -> None:
        for position, targets, sources in copies:
            for target, source in zip(targets, sources, strict=True):
                assert target.shape == source.shape, (
                    f"bytes of position {position} are {source.shape}, expected {target.shape}"
                )
                np.copyto(target, source)


class _OwnBytes:
    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def fill(
        self, start: int, specs: tuple[TensorSpec, ...], payload_bytes: int, tensors: Sequence[Any], position: int
    ) -> None:
        ByteArrays().copy([(position, self.of(start, specs, payload_bytes), tensors)])

    def of(self, start: int, specs: tuple[TensorSpec, ...], payload_bytes: int) -> list[Any]:
        return [np.frombuffer(self._memory, np.uint8, payload_bytes, start + HEADER_BYTES)]

    def close(self) -> None:
        self._memory = memoryview(b"")
