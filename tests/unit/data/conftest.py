"""The example jobs' real rows and processors, and small files made for one test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data_rows import EXAMPLES, png

from flowtrain.config.schema import Config, DataConfig, ModelConfig
from flowtrain.data.measure import Measure
from flowtrain.data.processor import load_processor
from flowtrain.data.sample import SampleBuilder
from flowtrain.data.sources import open_source
from flowtrain.shapes import read_shape


@pytest.fixture(scope="session")
def emoji() -> Config:
    folder = EXAMPLES / "emoji"
    return Config(
        model=ModelConfig(path=folder / "model"),
        data=DataConfig(train=folder / "data" / "train.jsonl", eval=folder / "data" / "test.jsonl"),
    )


@pytest.fixture(scope="session")
def digits() -> Config:
    folder = EXAMPLES / "digits"
    return Config(
        model=ModelConfig(path=folder / "model"),
        data=DataConfig(train=folder / "data" / "train.parquet", eval=folder / "data" / "test.parquet"),
    )


@pytest.fixture(scope="session")
def processor(emoji: Config) -> Any:
    return load_processor(emoji.model.path, emoji)


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows (objects, or raw text) as JSON lines beside a picture `a.png` of 32 × 32 pixels."""
    (tmp_path / "a.png").write_bytes(png())

    def write(*rows: Any, name: str = "rows.jsonl") -> Path:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path = tmp_path / name
        path.write_text("\n".join(lines) + "\n")
        return path

    return write


@pytest.fixture
def builder_of(processor: Any, emoji: Config) -> Callable[..., SampleBuilder]:
    def build(path: Path, max_row_tokens: int = 1024, on_long_row: Any = "skip", **data: Any) -> SampleBuilder:
        config = emoji.data.model_copy(update=data)
        measure = Measure(processor, read_shape(emoji.model.path))
        return SampleBuilder(measure, open_source(path), config, max_row_tokens, on_long_row)

    return build
