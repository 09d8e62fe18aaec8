"""Values of one word: amounts that a config file may write with a unit, and paths that it may write as a URL."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, PlainSerializer

from flowtrain.mirror import is_url, local_path, shown

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{end}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for end, base in (("iB", 1024), ("B", 1000))
}


def _byte_size(value: object) -> object:
    """`64MiB` as a number of bytes; what is no such text is left to pydantic."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", value.strip())
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise ValueError("expected a number of bytes such as 67108864, 64MiB or 2GB")
    return round(float(match[1]) * units[match[2].lower()])


ByteSize = Annotated[int, BeforeValidator(_byte_size), Field(gt=0)]
"""Bytes, written as a whole number or with a unit: `64MiB` (1024s) or `64MB` (1000s)."""


def _place(value: object) -> object:
    return str(local_path(value)) if isinstance(value, str) and is_url(value) else value


ReadPath = Annotated[Path, BeforeValidator(_place), PlainSerializer(shown, when_used="json")]
"""A file or folder that is only read: a path, or an fsspec URL. Here it is the path of the local copy (`mirror`), and
the URL again where a config is written down or sent."""
