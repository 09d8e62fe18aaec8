"""The export is an ordinary Hugging Face folder: complete, tied as the source has it, finite, and it answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models_reference import MODEL_DIR, load_halves
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from flowtrain.config.schema import Config
from flowtrain.errors import ConfigError
from flowtrain.models import export
from flowtrain.models.backbone import BackboneHalf
from flowtrain.models.encoder import EncoderHalf
from flowtrain.models.export import finish_export, write_part
from flowtrain.models.loading import ensure_weights

Halves = tuple[EncoderHalf, BackboneHalf]


@pytest.fixture
def halves(make_config: Callable[..., Config], weights_dir: Path) -> Halves:
    return load_halves(make_config("float64", freeze=("encoder",)), weights_dir)


def export_to(folder: Path, halves: Halves, model_dir: Path = MODEL_DIR) -> Path:
    for half, part in zip(halves, ("producer", "consumer"), strict=True):
        write_part(half.parameters_by_name(), folder, part)
    finish_export(model_dir, folder, ("producer", "consumer"))
    return folder


@pytest.mark.parametrize("shard_bytes", [export.SHARD_BYTES, 500_000])
def test_loads_with_the_auto_classes_and_generates(
    shard_bytes: int, halves: Halves, weights_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "SHARD_BYTES", shard_bytes)
    with torch.no_grad():
        halves[1].parameters_by_name()["model.language_model.norm.weight"].mul_(1.5)
    folder = export_to(tmp_path / "export", halves)
    model, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    stored = load_file(weights_dir / "model.safetensors")
    for name, parameter in model.named_parameters():
        factor = 1.5 if name == "model.language_model.norm.weight" else 1.0
        assert torch.equal(parameter, stored[name] * factor), name
    processor = AutoProcessor.from_pretrained(folder)
    content = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(text=[prompt], images=[Image.new("RGB", (40, 32), "red")], return_tensors="pt")
    answer = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert answer.shape[1] > inputs["input_ids"].shape[1]


def test_holds_all_that_the_model_folder_holds_and_no_leftovers(halves: Halves, tmp_path: Path) -> None:
    folder = export_to(tmp_path / "export", halves)
    names = {path.name for path in folder.iterdir()}
    assert {path.name for path in MODEL_DIR.iterdir() if not path.name.startswith(".")} <= names
    assert not any(name.endswith(".tmp") or name == "parts" for name in names)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(
        t.numel() * t.itemsize
        for shard in set(index["weight_map"].values())
        for t in load_file(folder / shard).values()
    )
    again = export_to(folder, halves)
    assert {path.name for path in again.iterdir()} == names


@pytest.mark.parametrize("tied", [True, False])
def test_head_is_stored_as_the_source_has_it(tied: bool, make_config: Callable[..., Config], tmp_path: Path) -> None:
    model_dir = _changed_model(tmp_path / "model", tie_word_embeddings=tied)
    config = make_config("float32")
    config = config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": model_dir}),
            "run": config.run.model_copy(update={"dir": tmp_path / "run"}),
        }
    )
    folder = ensure_weights(config)
    cpu = torch.device("cpu")
    halves = (
        EncoderHalf.load(model_dir, folder, config, cpu, "float32"),
        BackboneHalf.load(model_dir, folder, config, cpu, "float32"),
    )
    exported = export_to(tmp_path / "export", halves, model_dir)
    names = json.loads((exported / "model.safetensors.index.json").read_text())["weight_map"]
    assert ("lm_head.weight" in names) == (not tied)
    model, info = AutoModelForImageTextToText.from_pretrained(exported, output_loading_info=True)
    assert not info["missing_keys"]
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied


def test_weights_have_the_dtype_that_the_config_names(halves: Halves, tmp_path: Path) -> None:
    model_dir = _changed_model(tmp_path / "model", dtype="bfloat16")
    folder = export_to(tmp_path / "export", halves, model_dir)
    tensors = [t for shard in folder.glob("model-*.safetensors") for t in load_file(shard).values()]
    assert {t.dtype for t in tensors} == {torch.bfloat16}
    assert AutoModelForImageTextToText.from_pretrained(folder).dtype is torch.bfloat16


def test_weights_that_are_not_finite_are_refused(halves: Halves, tmp_path: Path) -> None:
    with torch.no_grad():
        halves[1].parameters_by_name()["model.language_model.norm.weight"][3] = float("nan")
    with pytest.raises(ConfigError, match=r"model\.language_model\.norm\.weight holds numbers that are not finite"):
        export_to(tmp_path / "export", halves)
    assert not list((tmp_path / "export").glob("model*.safetensors"))


def test_parts_that_are_not_the_whole_model_are_refused(halves: Halves, tmp_path: Path) -> None:
    write_part(halves[1].parameters_by_name(), tmp_path / "export", "consumer")
    with pytest.raises(ConfigError, match=r"parameters were not written"):
        finish_export(MODEL_DIR, tmp_path / "export", ("producer", "consumer"))


@pytest.mark.parametrize("writers", [("consumer-0", "producer-0"), ("consumer-0", "consumer-3")])
def test_a_tensor_that_two_wrote_is_told_with_both(writers: tuple[str, str], halves: Halves, tmp_path: Path) -> None:
    folder, name = tmp_path / "export.tmp", "model.language_model.norm.weight"
    for half, part in zip(halves, ("producer-0", "consumer-0"), strict=True):
        write_part(half.parameters_by_name(), folder, part)
    twice = {name: halves[1].parameters_by_name()[name]}
    if "producer-0" in writers:
        twice |= halves[0].parameters_by_name()
    write_part(twice, folder, next(part for part in writers if part != "consumer-0"))
    with pytest.raises(ConfigError) as raised:
        finish_export(MODEL_DIR, folder, ("producer", "consumer"))
    told = str(raised.value)
    assert f"{name} was written by {writers[0]} and by {writers[1]}, and each tensor has one writer" in told
    assert f"remove {folder}" in told
    assert not list(folder.glob("model*.safetensors"))


def _changed_model(folder: Path, **changes: object) -> Path:
    shutil.copytree(MODEL_DIR, folder)
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    if "tie_word_embeddings" in changes:
        config["text_config"]["tie_word_embeddings"] = changes["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder
