"""What the tests of plans start from: a config of the emoji job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowtrain.config.schema import Config


def config(emoji: Path, **sections: Any) -> Config:
    """The schema's own values but for these sections; only model and data are there."""
    required = {"model": {"path": emoji / "model"}, "data": {"train": emoji / "data/train.jsonl"}}
    return Config.model_validate({**required, **sections})
