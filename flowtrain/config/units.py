"""Amounts that a config file may write with a unit."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field

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
