"""Loading a processor: pixel limits hold, and folders that cannot be used are told in one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flowtrain.config.schema import Config
from flowtrain.data.processor import count_image, load_processor
from flowtrain.errors import ConfigError


def limited(config: Config, **data: Any) -> Any:
    return load_processor(config.model.path, config.model_copy(update={"data": config.data.model_copy(update=data)}))


def pixels(processor: Any, width: int, height: int) -> int:
    return count_image(processor, height, width)[1] * 8 * 8


def test_the_cap_holds_for_every_shape(emoji: Config, processor: Any) -> None:
    capped = limited(emoji, max_pixels=16384)
    for width, height in ((4000, 3000), (200, 8000), (131, 130), (16, 500)):
        assert pixels(capped, width, height) <= 16384
    assert pixels(processor, 4000, 3000) > 16384
    assert pixels(capped, 64, 64) == pixels(processor, 64, 64)


def test_the_floor_holds(emoji: Config) -> None:
    assert pixels(limited(emoji, min_pixels=4096), 16, 16) >= 4096


def test_a_cap_below_the_models_own_floor_lowers_the_floor(emoji: Config) -> None:
    assert pixels(limited(emoji, max_pixels=256), 640, 480) <= 256


def test_limits_that_contradict(emoji: Config) -> None:
    with pytest.raises(ConfigError, match=r"data\.min_pixels: 5000 is more than the cap of 4096"):
        limited(emoji, max_pixels=4096, min_pixels=5000)


def test_a_cap_that_whole_patches_cannot_keep(emoji: Config) -> None:
    with pytest.raises(ConfigError, match="against the limit of 100"):
        limited(emoji, max_pixels=100)


@pytest.fixture
def folder(emoji: Config, tmp_path: Path) -> Path:
    return Path(shutil.copytree(emoji.model.path, tmp_path / "model"))


def test_a_folder_without_what_is_needed(emoji: Config, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gone is not a folder"):
        load_processor(tmp_path / "gone", emoji)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="has no chat template"):
        load_processor(folder, emoji)
    (folder / "processor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"model\.path: the processor of .* cannot be loaded"):
        load_processor(folder, emoji)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"model\.path: .* has no tokenizer"):
        load_processor(folder, emoji)


def test_a_processor_without_pixel_limits(emoji: Config, folder: Path) -> None:
    path = folder / "processor_config.json"
    settings = json.loads(path.read_text())
    settings["image_processor"] |= {"image_processor_type": "CLIPImageProcessor", "size": {"height": 32, "width": 32}}
    path.write_text(json.dumps(settings))
    config = emoji.model_copy(update={"data": emoji.data.model_copy(update={"max_pixels": 4096})})
    with pytest.raises(ConfigError, match="has no pixel limits"):
        load_processor(folder, config)


def test_code_in_the_folder_runs_only_when_asked(emoji: Config, folder: Path) -> None:
    path = folder / "processor_config.json"
    settings = json.loads(path.read_text())
    settings["auto_map"] = {"AutoProcessor": "own.OwnProcessor"}
    settings["processor_class"] = "OwnProcessor"
    path.write_text(json.dumps(settings))
    (folder / "own.py").write_text("raise SystemExit('the code of the folder ran')\n")
    with pytest.raises(ConfigError, match=r"needs Python code of its own: .*model\.trust_remote_code: true"):
        load_processor(folder, emoji)
