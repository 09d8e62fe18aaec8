"""Checkpoints of one side: bit-exact, whole, strict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from update_reference import MODULE_OF, TRAIN, make_parameters, make_updater, train_steps

from flowtrain.config.schema import TrainConfig
from flowtrain.errors import ConfigError, FlowTrainError
from flowtrain.parallel.groups import Groups
from flowtrain.parallel.holding import Holding
from flowtrain.parallel.pieces import region_of
from flowtrain.plan import Layout
from flowtrain.types import Module
from flowtrain.update.storage import Piece, SavedState, save_parameters, write_pieces, write_state
from flowtrain.update.updater import Updater


def whole_piece(tensor: torch.Tensor) -> list[Piece]:
    return [Piece(tensor, region_of(tensor), tuple(tensor.shape))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_six_steps_equal_three_and_three_with_a_save_between(tmp_path: Path, dtype: torch.dtype) -> None:
    whole, first, second = (make_updater(dtype=dtype) for _ in range(3))
    train_steps(whole, range(1, 7))
    train_steps(first, range(1, 4))
    first.save(tmp_path / "side")
    with torch.no_grad():
        for parameter in second.parameters.values():
            parameter.zero_()
    second.load([tmp_path / "side"])
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
    loaded.load([tmp_path / "side"])
    assert torch.equal(loaded.parameters["model.visual.norm.weight"], torch.full((5,), 7.0))


def test_a_parameter_never_reached_has_no_moments_after_a_load(tmp_path: Path) -> None:
    saved, loaded = make_updater(), make_updater()
    train_steps(saved, range(3, 4))
    saved.save(tmp_path / "side")
    loaded.load([tmp_path / "side"])
    reached = {name for name, parameter in loaded.parameters.items() if parameter in loaded.optimizer.state}
    assert reached == {"model.language_model.embed_tokens.weight", "lm_head.weight"}


def test_only_plain_files_are_written_and_a_second_save_replaces_the_first(tmp_path: Path) -> None:
    updater = make_updater()
    updater.save(tmp_path / "side")
    train_steps(updater, range(1, 2))
    updater.save(tmp_path / "side")
    assert {path.name for path in tmp_path.rglob("*")} == {
        "side",
        "parameters-0.safetensors",
        "optimizer-0.safetensors",
        "updater.json",
    }
    assert json.loads((tmp_path / "side" / "updater.json").read_text())["step"] == 1


def test_with_another_freeze_set_what_trains_anew_has_no_moments(tmp_path: Path) -> None:
    saved, loaded = make_updater(TrainConfig(freeze=("projector",))), make_updater(TRAIN)
    train_steps(saved, range(1, 3))
    saved.save(tmp_path / "side")
    loaded.load([tmp_path / "side"])
    for name, parameter in loaded.parameters.items():
        assert torch.equal(parameter, saved.parameters[name]), name
        trained = MODULE_OF[name] is not Module.PROJECTOR
        assert (parameter in loaded.optimizer.state) == trained, name


def test_what_the_other_side_has_written_is_found(tmp_path: Path) -> None:
    """The projector trains on the other side now, and the encoder, of which nothing was written, stays as it is."""
    saved, loaded = make_updater(), make_updater()
    train_steps(saved, range(1, 3))
    for side, modules in (("consumer", {Module.BACKBONE}), ("producer", {Module.PROJECTOR})):
        of_side = {name: p for name, p in saved.parameters.items() if MODULE_OF[name] in modules}
        save_parameters(tmp_path / side, of_side, Holding(Groups(Layout(), 0)), 2)
    write_state(tmp_path / "consumer", SavedState(2, (), ()))
    before = {name: p.detach().clone() for name, p in loaded.parameters.items()}
    loaded.load([tmp_path / "producer", tmp_path / "consumer"])
    for name, parameter in loaded.parameters.items():
        expected = before if MODULE_OF[name] is Module.ENCODER else saved.parameters
        assert torch.equal(parameter, expected[name]), name


def test_a_side_that_did_not_train_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no state of a side is there"):
        make_updater().load([tmp_path / "side"])


def test_another_name_is_refused_before_anything_changes(tmp_path: Path) -> None:
    updater = make_updater()
    updater.save(tmp_path / "side")
    tensors = load_file(tmp_path / "side" / "parameters-0.safetensors")
    tensors["other.weight"] = tensors.pop("lm_head.weight")
    write_pieces(tmp_path / "side", "parameters", 0, {name: whole_piece(t) for name, t in tensors.items()})
    fresh = make_updater()
    before = {name: parameter.detach().clone() for name, parameter in fresh.parameters.items()}
    with pytest.raises(ConfigError, match=r"only there: other.weight; only here: lm_head.weight"):
        fresh.load([tmp_path / "side"])
    assert all(torch.equal(before[name], parameter) for name, parameter in fresh.parameters.items())


def test_another_dtype_is_refused(tmp_path: Path) -> None:
    make_updater(dtype=torch.float64).save(tmp_path / "side")
    with pytest.raises(ConfigError, match=r"torch.float64 there and .* torch.float32 in this run"):
        make_updater().load([tmp_path / "side"])


def test_another_shape_of_a_moment_is_refused(tmp_path: Path) -> None:
    updater = make_updater()
    train_steps(updater, range(1, 2))
    updater.save(tmp_path / "side")
    tensors = load_file(tmp_path / "side" / "optimizer-0.safetensors")
    tensors["exp_avg/lm_head.weight"] = torch.zeros(2, 2)
    write_pieces(tmp_path / "side", "optimizer", 0, {name: whole_piece(t) for name, t in tensors.items()})
    with pytest.raises(ConfigError, match=r"lm_head.weight is \[2, 2\]"):
        make_updater().load([tmp_path / "side"])


def test_a_torn_file_is_refused(tmp_path: Path) -> None:
    make_updater().save(tmp_path / "side")
    path = tmp_path / "side" / "parameters-0.safetensors"
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(ConfigError, match="cannot be read"):
        make_updater().load([tmp_path / "side"])


def test_numbers_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    updater = make_updater()
    with torch.no_grad():
        updater.parameters["lm_head.weight"][0, 0] = float("nan")
    with pytest.raises(FlowTrainError, match=r"lm_head.weight .* not finite"):
        updater.save(tmp_path / "side")
    assert list(tmp_path.iterdir()) == []


NO_GROUPS = {("dp_replicate",): None}


def test_ranks_other_than_the_first_write_nothing(tmp_path: Path) -> None:
    Updater(make_parameters(), MODULE_OF, TRAIN, Groups(Layout(dp_replicate=2), 1, NO_GROUPS)).save(tmp_path / "side")
    assert list(tmp_path.iterdir()) == []
