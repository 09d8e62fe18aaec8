"""What every kind of data file offers: rows by number, each with its conversation and references to its images.

A source is opened by each process that needs it (readers: text and image headers; producers: pixels), so it keeps
little in memory and reads a row when it is asked for.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from flowtrain import mirror
from flowtrain.data.errors import BadImage
from flowtrain.errors import DataError


@dataclass(frozen=True, slots=True)
class ImageRef:
    """One image of a row, not yet read: `value` is its bytes, a file (for a URL its place in the mirror), or a
    `data:` URI. `label` names it."""

    value: bytes | Path | str
    label: str

    def read(self) -> bytes:
        """The stored bytes; BadImage when there are none."""
        if isinstance(self.value, bytes):
            return self.value
        if isinstance(self.value, Path):
            try:
                mirror.fetch_once(self.value)
                return self.value.read_bytes()
            except mirror.AbsentError as error:
                raise BadImage("image-missing", f"{self.label}: {error}") from error
            except mirror.FetchError as error:  # not the row's fault, and which rows are trained must not depend on it
                raise DataError(f"{self.label}: {error}") from error
            except OSError as error:
                raise BadImage("image-missing", f"{self.label} cannot be read: {error.strerror or error}") from error
        return self._decode(self.value)

    def _decode(self, uri: str) -> bytes:
        head, comma, data = uri.partition(",")
        if not comma or not head.endswith(";base64"):
            raise BadImage("image-undecodable", f"{self.label} is a data URI without base64 content")
        try:
            return base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError) as error:
            raise BadImage("image-undecodable", f"{self.label} is a data URI with broken base64: {error}") from error


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as the file has it, in one form.

    Attributes:
        index: number of the row in the source, from 0.
        id: the row's own `id`, or `row-N`.
        messages: `{"role": …, "content": [{"type": "text", "text": …} | {"type": "image"}, …]}`, as chat templates
            take them.
        images: in the order of their places in the messages, as many as there are places.
        where: file and line or row, for messages.
    """

    index: int
    id: str
    messages: tuple[dict[str, Any], ...]
    images: tuple[ImageRef, ...]
    where: str


class Source(Protocol):
    """Rows of one file, or of a folder of files. `row` raises `BadRow` for a row that cannot be used."""

    @property
    def path(self) -> Path: ...

    @property
    def fingerprint(self) -> str:
        """Changes when the rows change; the same for a copy of the files elsewhere."""
        ...

    def __len__(self) -> int: ...

    def row(self, index: int) -> RawRow: ...


_SAMPLE_BYTES = 1 << 16


def file_fingerprint(path: Path) -> str:
    """Size, and content of both ends of the file: reading terabytes to know a file again would cost too much."""
    size = path.stat().st_size
    digest = hashlib.blake2b(f"{path.name}:{size}".encode(), digest_size=8)
    with path.open("rb") as file:
        digest.update(file.read(_SAMPLE_BYTES))
        file.seek(max(0, size - _SAMPLE_BYTES), os.SEEK_SET)
        digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
