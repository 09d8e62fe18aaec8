"""Rows, configs and weights for the tests of the two halves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models_reference import MODEL_DIR, Row, make_row

from flowtrain.config.schema import Config
from flowtrain.models.loading import ensure_weights


@pytest.fixture(scope="session")
def rows() -> list[Row]:
    """One image, none, three of different sizes, none, one large: as in a pack of the emoji rows."""
    return [
        make_row(1, ((4, 4),), 9, 5),
        make_row(2, (), 12, 8),
        make_row(3, ((4, 6), (2, 2), (8, 4)), 20, 11),
        make_row(4, (), 3, 1),
        make_row(5, ((8, 8),), 6, 6),
    ]


@pytest.fixture
def make_config(run_dir: Path) -> Callable[..., Config]:
    def make(dtype: str = "float64", freeze: tuple[str, ...] = (), **train: Any) -> Config:
        return Config.model_validate(
            {
                "run": {"dir": str(run_dir), "seed": 3},
                "model": {"path": str(MODEL_DIR), "init": "random", "dtype": dtype},
                "data": {"train": "unused.jsonl"},
                "train": {"max_steps": 1, "freeze": list(freeze), **train},
            }
        )

    return make


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared, so that the whole model's weights are made once."""
    return tmp_path_factory.mktemp("run")


@pytest.fixture
def weights_dir(make_config: Callable[..., Config]) -> Path:
    return ensure_weights(make_config())
