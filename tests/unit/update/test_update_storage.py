"""Checkpoints of one side: bit-exact, whole, strict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from update_reference import TRAIN, make_updater, train_steps

from flowtrain.config.schema import TrainConfig
from flowtrain.errors import ConfigError, FlowTrainError


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_six_steps_equal_three_and_three_with_a_save_between(tmp_path: Path, dtype: torch.dtype) -> None:
    whole, first, second = (make_updater(dtype=dtype) for _ in range(3))
    train_steps(whole, range(1, 7))
    train_steps(first, range(1, 4))
    first.save(tmp_path / "side")
    with torch.no_grad():
        for parameter in second.parameters.values():
            parameter.zero_()
    second.load(tmp_path / "side")
    assert second.step == 3
    train_steps(second, range(4, 7))
    for name, parameter in whole.parameters.items():
        assert torch.equal(parameter, second.parameters[name]), name
        for moment, tensor in whole.optimizer.state[parameter].items():
            again = second.optimizer.state[second.parameters[name]][moment]
            assert torch.equal(tensor, again), (name, moment)
            assert tensor.dtype == again.dtype, (name, moment)


def test_frozen_parameters_are_saved_and_come_back(tmp_path: Path) -> None:
    train = TrainConfig(freeze=("encoder",))
    saved, loaded = make_updater(train), make_updater(train)
    with torch.no_grad():
        saved.parameters["model.visual.norm.weight"].fill_(7.0)
    saved.save(tmp_path / "side")
    loaded.load(tmp_path / "side")
    assert torch.equal(loaded.parameters["model.visual.norm.weight"], torch.full((5,), 7.0))


def test_a_parameter_never_reached_has_no_moments_after_a_load(tmp_path: Path) -> None:
    saved, loaded = make_updater(), make_updater()
    train_steps(saved, range(3, 4))
    saved.save(tmp_path / "side")
    loaded.load(tmp_path / "side")
    reached = {name for name, parameter in loaded.parameters.items() if parameter in loaded.optimizer.state}
    assert reached == {"model.language_model.embed_tokens.weight", "lm_head.weight"}


def test_only_plain_files_are_written_and_a_second_save_replaces_the_first(tmp_path: Path) -> None:
    updater = make_updater()
    updater.save(tmp_path / "side")
    train_steps(updater, range(1, 2))
    updater.save(tmp_path / "side")
    assert {path.name for path in tmp_path.rglob("*")} == {
        "side",
        "parameters.safetensors",
        "optimizer.safetensors",
        "updater.json",
    }
    assert json.loads((tmp_path / "side" / "updater.json").read_text())["step"] == 1


def test_another_freeze_set_is_refused_and_named(tmp_path: Path) -> None:
    make_updater(TrainConfig(freeze=("projector",))).save(tmp_path / "side")
    with pytest.raises(ConfigError, match=r"train.freeze was \[projector\] .* is \[\] now"):
        make_updater(TRAIN).load(tmp_path / "side")


def test_a_side_that_did_not_train_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did not train"):
        make_updater().load(tmp_path / "side")


def test_another_name_is_refused_before_anything_changes(tmp_path: Path) -> None:
    updater = make_updater()
    updater.save(tmp_path / "side")
    path = tmp_path / "side" / "parameters.safetensors"
    tensors = load_file(path)
    tensors["other.weight"] = tensors.pop("lm_head.weight")
    save_file(tensors, path)
    fresh = make_updater()
    before = {name: parameter.detach().clone() for name, parameter in fresh.parameters.items()}
    with pytest.raises(ConfigError, match=r"only there: other.weight; only here: lm_head.weight"):
        fresh.load(tmp_path / "side")
    assert all(torch.equal(before[name], parameter) for name, parameter in fresh.parameters.items())


def test_another_dtype_is_refused(tmp_path: Path) -> None:
    make_updater(dtype=torch.float64).save(tmp_path / "side")
    with pytest.raises(ConfigError, match=r"torch.float64 there and .* torch.float32 in this run"):
        make_updater().load(tmp_path / "side")


def test_another_shape_of_a_moment_is_refused(tmp_path: Path) -> None:
    updater = make_updater()
    train_steps(updater, range(1, 2))
    updater.save(tmp_path / "side")
    path = tmp_path / "side" / "optimizer.safetensors"
    tensors = load_file(path)
    tensors["exp_avg/lm_head.weight"] = torch.zeros(2, 2)
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=r"lm_head.weight is \[2, 2\]"):
        make_updater().load(tmp_path / "side")


def test_a_torn_file_is_refused(tmp_path: Path) -> None:
    make_updater().save(tmp_path / "side")
    path = tmp_path / "side" / "parameters.safetensors"
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(ConfigError, match="cannot be read"):
        make_updater().load(tmp_path / "side")


def test_numbers_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    updater = make_updater()
    with torch.no_grad():
        updater.parameters["lm_head.weight"][0, 0] = float("nan")
    with pytest.raises(FlowTrainError, match=r"lm_head.weight .* not finite"):
        updater.save(tmp_path / "side")
    assert list(tmp_path.iterdir()) == []


def test_ranks_other_than_the_first_write_nothing(tmp_path: Path) -> None:
    from update_reference import MODULE_OF, make_parameters

    from flowtrain.parallel.groups import Groups
    from flowtrain.plan import Layout
    from flowtrain.update.updater import Updater

    Updater(make_parameters(), MODULE_OF, TRAIN, Groups(Layout(), 1)).save(tmp_path / "side")
    assert list(tmp_path.iterdir()) == []
