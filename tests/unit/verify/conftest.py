"""Configs, weights and references on the emoji example for the tests of `verify`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from flowtrain.config.schema import Config
from flowtrain.data.sources import RawRow, open_source
from flowtrain.verify.reference import Reference

NUM_STEPS = 3


@pytest.fixture(scope="session")
def weights_dir(emoji: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights of the emoji model, as a complete Hugging Face folder."""
    folder = tmp_path_factory.mktemp("weights")
    torch.manual_seed(5)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(emoji / "model"))
    save_file({name: p.detach().clone() for name, p in model.named_parameters()}, folder / "model.safetensors")
    for file in (emoji / "model").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="session")
def make_config(emoji: Path, weights_dir: Path) -> Callable[..., Config]:
    def make(dtype: str = "float64", run_dir: Path | None = None, **train: Any) -> Config:
        return Config.model_validate(
            {
                "run": {"dir": run_dir or weights_dir},
                "model": {"path": weights_dir, "dtype": dtype},
                "data": {"train": emoji / "data/train.jsonl"},
                "train": {"max_steps": NUM_STEPS, "lr": 1e-3, "weight_decay": 0.01, **train},
            }
        )

    return make


@pytest.fixture(scope="session")
def make_reference(make_config: Callable[..., Config], weights_dir: Path) -> Callable[..., Reference]:
    def make(dtype: str = "float64", **train: Any) -> Reference:
        return Reference(make_config(dtype, **train), weights_dir, NUM_STEPS)

    return make


@pytest.fixture(scope="session")
def processor(emoji: Path) -> Any:
    return AutoProcessor.from_pretrained(emoji / "model")


@pytest.fixture(scope="session")
def rows(emoji: Path) -> list[RawRow]:
    """Two rows with one image, two with several, two of text only: short ones."""
    source = open_source(emoji / "data/train.jsonl")
    wanted: dict[str, list[RawRow]] = {"one": [], "several": [], "text": []}
    for index in range(400):
        row = source.row(index)
        kind = {0: "text", 1: "one"}.get(len(row.images), "several")
        if len(wanted[kind]) < 2 and len(row.images) < 4 and len(str(row.messages)) < 600:
            wanted[kind].append(row)
    return [*wanted["one"], *wanted["several"], *wanted["text"]]
