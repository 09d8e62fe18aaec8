"""The shape that the tests of plans share."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowtrain.shapes import ModelShape, read_shape


@pytest.fixture
def shape(emoji: Path) -> ModelShape:
    return read_shape(emoji / "model")
