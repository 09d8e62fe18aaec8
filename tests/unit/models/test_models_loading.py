"""Weights: made once from the seed, each half loads only its own, nothing missing passes unseen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models_reference import CPU, MODEL_DIR, load_halves
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from flowtrain.config.schema import Config
from flowtrain.errors import ConfigError, PlanError
from flowtrain.models.backbone import BackboneHalf
from flowtrain.models.encoder import EncoderHalf
from flowtrain.models.loading import ensure_weights
from flowtrain.models.weights import weight_files, write_json, write_tensors
from flowtrain.types import Module


def with_model(config: Config, model_dir: Path, run_dir: Path, init: str = "auto", seed: int = 3) -> Config:
    model = config.model.model_copy(update={"path": model_dir, "init": init})
    return config.model_copy(
        update={"model": model, "run": config.run.model_copy(update={"dir": run_dir, "seed": seed})}
    )


@pytest.mark.parametrize("freeze", [(), ("encoder",), ("encoder", "projector")], ids="+".join)
def test_halves_hold_every_parameter_once_and_nothing_else(
    freeze: tuple[str, ...], make_config: Callable[..., Config], weights_dir: Path
) -> None:
    encoder, backbone = load_halves(make_config("float32", freeze=freeze), weights_dir)
    stored = load_file(weights_dir / "model.safetensors")
    mine, theirs = encoder.parameters_by_name(), backbone.parameters_by_name()
    assert not mine.keys() & theirs.keys()
    assert mine.keys() | theirs.keys() == stored.keys()
    for name, parameter in {**mine, **theirs}.items():
        assert torch.equal(parameter.detach(), stored[name]), name
    for half, own in ((encoder, mine), (backbone, theirs)):
        allocated = {id(p) for p in half.parameters() if not p.is_meta}
        assert allocated == {id(p) for p in own.values()}
        assert not any(buffer.is_meta for buffer in half.buffers())
        assert half.module_of().keys() == own.keys()


@pytest.mark.parametrize(
    "freeze", [("encoder",), ("encoder", "projector"), ("backbone",), ("projector",)], ids="+".join
)
def test_frozen_modules_do_not_train(
    freeze: tuple[str, ...], make_config: Callable[..., Config], weights_dir: Path
) -> None:
    for half in load_halves(make_config("float32", freeze=freeze), weights_dir):
        for name, parameter in half.parameters_by_name().items():
            assert parameter.requires_grad == (half.module_of()[name] not in {Module(f) for f in freeze})


def test_the_projector_lies_on_the_side_where_it_trains(make_config: Callable[..., Config], weights_dir: Path) -> None:
    for freeze, side in (((), 0), (("encoder",), 1), (("encoder", "projector"), 0), (("projector",), 0)):
        halves = load_halves(make_config("float32", freeze=freeze), weights_dir)
        owners = [Module.PROJECTOR in half.module_of().values() for half in halves]
        assert owners == [side == 0, side == 1], freeze


def test_buffers_are_those_of_the_plain_model(make_config: Callable[..., Config], weights_dir: Path) -> None:
    plain = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(MODEL_DIR), dtype=torch.float32)
    expected = dict(plain.named_buffers())
    assert expected
    for half in load_halves(make_config("float32"), weights_dir):
        buffers = dict(half.model.named_buffers())
        assert buffers.keys() == expected.keys()
        for name, buffer in buffers.items():
            assert torch.equal(buffer, expected[name]), name


def test_tied_head_is_one_tensor(make_config: Callable[..., Config], weights_dir: Path) -> None:
    _, backbone = load_halves(make_config("float32"), weights_dir)
    model = backbone.model
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight
    assert "lm_head.weight" not in backbone.parameters_by_name()


def test_random_weights_come_from_the_seed_and_are_made_once(
    make_config: Callable[..., Config], tmp_path: Path
) -> None:
    config = make_config()
    state = torch.get_rng_state()
    first = load_file(ensure_weights(with_model(config, MODEL_DIR, tmp_path / "a")) / "model.safetensors")
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    second = load_file(ensure_weights(with_model(config, MODEL_DIR, tmp_path / "b")) / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.manual_seed(3)
    plain = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(MODEL_DIR), dtype=torch.float32)
    assert all(torch.equal(first[name], parameter) for name, parameter in plain.named_parameters())

    file = tmp_path / "a" / "init" / "model.safetensors"
    made = file.stat().st_mtime_ns
    assert ensure_weights(with_model(config, MODEL_DIR, tmp_path / "a")) == file.parent
    assert file.stat().st_mtime_ns == made
    ensure_weights(with_model(config, MODEL_DIR, tmp_path / "a", seed=4))
    assert not torch.equal(load_file(file)["model.visual.pos_embed.weight"], first["model.visual.pos_embed.weight"])
    assert not (tmp_path / "a" / "init.tmp").exists()


def test_weights_of_the_folder_are_used_in_place(
    make_config: Callable[..., Config], weights_dir: Path, tmp_path: Path
) -> None:
    folder = _folder_with(tmp_path / "model", load_file(weights_dir / "model.safetensors"))
    config = with_model(make_config("float32"), folder, tmp_path / "run")
    assert ensure_weights(config) == folder
    assert not (tmp_path / "run").exists()
    random = ensure_weights(with_model(config, folder, tmp_path / "run", init="random"))
    assert random == tmp_path / "run" / "init"


def test_weights_under_older_names_are_converted_once(
    make_config: Callable[..., Config], weights_dir: Path, tmp_path: Path
) -> None:
    tensors = load_file(weights_dir / "model.safetensors")
    older = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    folder = _folder_with(tmp_path / "model", older)
    config = with_model(make_config("float32"), folder, tmp_path / "run")
    converted = ensure_weights(config)
    assert converted == tmp_path / "run" / "init"
    stored = load_file(converted / "model.safetensors")
    assert stored.keys() == tensors.keys()
    assert all(torch.equal(stored[name], tensors[name]) for name in tensors)
    made = (converted / "model.safetensors").stat().st_mtime_ns
    assert ensure_weights(config) == converted
    assert (converted / "model.safetensors").stat().st_mtime_ns == made
    save_file({name: tensor + 1 for name, tensor in older.items()}, folder / "model.safetensors", {"format": "pt"})
    stored = load_file(ensure_weights(config) / "model.safetensors")
    assert all(torch.equal(stored[name], tensors[name] + 1) for name in tensors)


def test_a_head_stored_beside_its_tied_embedding_is_accepted(
    make_config: Callable[..., Config], weights_dir: Path, tmp_path: Path
) -> None:
    tensors = load_file(weights_dir / "model.safetensors")
    head = tensors.pop("model.language_model.embed_tokens.weight")
    folder = _folder_with(tmp_path / "model", {**tensors, "lm_head.weight": head})
    config = with_model(make_config("float32"), folder, tmp_path / "run")
    assert ensure_weights(config) == folder
    backbone = BackboneHalf.load(folder, folder, config, CPU, "float32")
    assert torch.equal(backbone.parameters_by_name()["model.language_model.embed_tokens.weight"], head)


def test_shards_are_read_through_their_index(
    make_config: Callable[..., Config], weights_dir: Path, tmp_path: Path
) -> None:
    tensors = load_file(weights_dir / "model.safetensors")
    folder = _folder_with(tmp_path / "model", tensors, num_shards=3)
    config = with_model(make_config("float32"), folder, tmp_path / "run")
    encoder = EncoderHalf.load(folder, ensure_weights(config), config, CPU, "float32")
    for name, parameter in encoder.parameters_by_name().items():
        assert torch.equal(parameter.detach(), tensors[name])
    (folder / "shard-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"shard-1\.safetensors is missing"):
        EncoderHalf.load(folder, folder, config, CPU, "float32")


def test_what_is_missing_wrong_or_left_over_stops_the_load(
    make_config: Callable[..., Config], weights_dir: Path, tmp_path: Path
) -> None:
    tensors = load_file(weights_dir / "model.safetensors")
    config = make_config("float32")
    lacking = {n: t for n, t in tensors.items() if n != "model.visual.pos_embed.weight"}
    folder = _folder_with(tmp_path / "lacking", lacking)
    with pytest.raises(ConfigError, match=r"lack model\.visual\.pos_embed\.weight"):
        EncoderHalf.load(folder, folder, config, CPU, "float32")
    reshaped = {**tensors, "model.visual.pos_embed.weight": torch.zeros(3, 3)}
    folder = _folder_with(tmp_path / "reshaped", reshaped)
    with pytest.raises(ConfigError, match="has shape"):
        EncoderHalf.load(folder, folder, config, CPU, "float32")
    folder = _folder_with(tmp_path / "extra", {**tensors, "model.visual.unknown.weight": torch.zeros(2)})
    with pytest.raises(ConfigError, match=r"unexpected keys .* model\.visual\.unknown\.weight"):
        ensure_weights(with_model(config, folder, tmp_path / "run"))
    (folder / "model.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        EncoderHalf.load(folder, folder, config, CPU, "float32")


def test_a_folder_that_is_no_model_is_a_config_error(make_config: Callable[..., Config], tmp_path: Path) -> None:
    config = make_config()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        ensure_weights(with_model(config, tmp_path, tmp_path / "run"))
    with pytest.raises(ConfigError, match="no safetensors weights"):
        ensure_weights(with_model(config, MODEL_DIR, tmp_path / "run", init="pretrained"))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ConfigError, match="'bert' is not an image-text-to-text model"):
        ensure_weights(with_model(config, tmp_path, tmp_path / "run"))


def _folder_with(folder: Path, tensors: dict[str, torch.Tensor], num_shards: int = 0) -> Path:
    shutil.copytree(MODEL_DIR, folder)
    if not num_shards:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = sorted(tensors)
    shards = {name: f"shard-{i % num_shards}.safetensors" for i, name in enumerate(names)}
    for shard in set(shards.values()):
        save_file({n: tensors[n] for n in names if shards[n] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    return folder


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/hosts", "a/b.safetensors"])
def test_an_index_names_files_beside_it_only(shard: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_file({"x": torch.zeros(1)}, tmp_path / "secret.safetensors")
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": shard}}))
    with pytest.raises(ConfigError, match="is not the name of a file beside it"):
        weight_files(tmp_path / "model")


def test_a_disk_that_refuses_is_told_with_what_to_change(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("where a folder should be")
    for write in (lambda path: write_tensors({"x": torch.zeros(1)}, path), lambda path: write_json({}, path)):
        with pytest.raises(PlanError, match=r"cannot write .*; free disk space or change run.dir"):
            write(tmp_path / "file" / "x")
