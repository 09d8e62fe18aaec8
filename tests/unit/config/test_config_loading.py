"""From file and overrides to a config, or to every fault at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from flowtrain.config.loading import config_from_json, config_to_json, dump_resolved, load_config
from flowtrain.config.schema import Config
from flowtrain.errors import ConfigError
from flowtrain.types import Cut, Module

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A config file in a folder that has a model and data; `{}` gives a valid one."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text("")

    def to(text: str, head: str = "model: {path: model}\ndata: {train: rows.jsonl}\n") -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(head + text)
        return path

    return to


def faults(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert caught.value.exit_code == 2
    return [line.removeprefix(str(path)) for line in str(caught.value).splitlines()]


def test_a_small_config_has_defaults_and_absolute_paths(write: Write, tmp_path: Path) -> None:
    loaded = load_config(write("train: {lr: 1e-5}\n"))
    assert loaded.config.train.lr == 1e-5
    assert loaded.config.train.step.samples == 32
    assert loaded.config.model.path == tmp_path / "model"
    assert loaded.config.run.dir == tmp_path / "runs/default"
    assert loaded.origins["train.lr"] == f"{tmp_path}/run.yaml:3:9"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("trian: {lr: 1}", ":3:1: trian: unknown key; did you mean 'train'?"),
        ("train: {learning_rat: 1}", ":3:9: train.learning_rat: unknown key"),
        ("leraning_rate: 1e-4", ":3:1: leraning_rate: unknown key; did you mean 'train.lr'?"),
        ("train: {step: {samples:4}}", "train.step.samples:4: unknown key; write a space after the colon"),
        ("train: {learning_rate: 1}", ":3:9: train.learning_rate: unknown key; did you mean 'train.lr'?"),
        ("lr: 1e-4", ":3:1: lr: unknown key; it does not belong here, did you mean 'train.lr'?"),
        ("run: {max_tokens: 8}", "it does not belong here, did you mean 'packing.max_tokens'?"),
        ("producers: {laiout: r2}", ":3:13: producers.laiout: unknown key; did you mean 'layout'?"),
        ("train: {step: {sample: 4}}", ":3:16: train.step.sample: unknown key; did you mean 'samples'?"),
        ("train: {lr: fast}", ":3:9: train.lr: expected a number, found the text 'fast'"),
        ("train: {lr: '1e-4'}", ":3:9: train.lr: expected a number, found the text '1e-4'"),
        ("train: {lr: true}", ":3:9: train.lr: expected a number, found true"),
        ("train: {lr: .nan}", ":3:9: train.lr: must be a finite number"),
        ("train: {lr: 0}", ":3:9: train.lr: must be more than 0"),
        ("train: {lr:}", ":3:9: train.lr: expected a number, found nothing (null)"),
        ("train: {max_steps: 2.5}", ":3:9: train.max_steps: expected a whole number, found 2.5"),
        ("train: {freeze: encoder}", ":3:9: train.freeze: expected a list such as [a, b], found the text 'encoder'"),
        (
            "train: {freeze: [encodr]}",
            "train.freeze.0: the text 'encodr' is not one of encoder, projector, backbone; did",
        ),
        ("train: {module_lr: {encoda: 1}}", "train.module_lr.encoda: the text 'encoda' is not one of encoder"),
        ("train: {betas: [0.9]}", "train.betas.1: entry 2 of the list is missing"),
        ("train: {betas: [0.9, 1.0]}", "train.betas.1: must be less than 1"),
        ("train: 5", ":3:1: train: expected a mapping of keys, found 5"),
        ("run: {trace: yes}", ":3:7: run.trace: expected true or false, found the text 'yes'; did you mean 'true'?"),
        ("mode: flaw", "the text 'flaw' is not one of flow, disaggregated, monolithic; did you mean 'flow'?"),
        ("pool: {bytes: 64Mib/s}", ":3:8: pool.bytes: expected a number of bytes such as 67108864, 64MiB or 2GB"),
        ("pool: {bytes: 0MiB}", ":3:8: pool.bytes: must be more than 0"),
        ("producers: {num: 2, layout: r2}", ":3:13: producers.num: give only one of `num` and `layout`"),
        (
            "producers: {layout: x2}",
            ":3:13: producers.layout: `layout`: 'x2' is no layout",
        ),
        ("train: {max_steps: 1, epochs: 1}", ":3:9: train.max_steps: give only one of"),
        ("train: {warmup_steps: 1, warmup_ratio: 0.1}", ":3:9: train.warmup_steps: give only one of"),
        ("packing: {on_long_row: own_pack}", "`packing.on_long_row` own_pack needs `data.max_seq_len`"),
        ("train: {max_lag: 1}", ":3:9: train.max_lag: `max_lag` above 0 is not supported yet"),
        ("train: {freeze: [encoder, projector, backbone]}", ":3:9: train.freeze: `freeze` names every module"),
        (
            "train: {eval_every: 5}",
            ":3:9: train.eval_every: `train.eval_every` asks for evaluation losses: give `data.eval`",
        ),
        ("mode: monolithic\nproducers: {num: 2}", ":4:13: producers.num: `producers.num` and `consumers.num`"),
        ("pool: {prefill: 2}", "`pool.prefill` is for a frozen encoder"),
        ("pool: {transport: local}", ":3:8: pool.transport: `pool.transport` local is for one process"),
        ("run: {dir: ''}", ":3:7: run.dir: a path must not be empty"),
        (
            "run: {dir: 's3://runs/one'}",
            ":3:7: run.dir: s3://runs/one is a URL, and what is written needs a file system",
        ),
        ("debug: {delays: {producer_unit_ms: {x: 1}}}", "debug.delays.producer_unit_ms.x: "),
        ("seed: 1\nseed: 2", ":4:1: seed: this key stands twice, first in line 3; keep one of them"),
    ],
)
def test_a_fault_is_told_with_its_place_and_what_to_change(write: Write, text: str, fault: str) -> None:
    lines = faults(write(text))
    assert any(fault in line for line in lines), lines
    assert all(line.startswith(":") for line in lines)


def test_all_faults_come_at_once_in_the_order_of_the_file(write: Write) -> None:
    lines = faults(write("train: {lr: x}\nrun: {sed: 1}\ntrain2: 1\npool: {bytes: -1}\n"))
    assert [line.split(":")[1] for line in lines] == ["3", "4", "5", "6"]


@pytest.mark.parametrize(
    ("head", "fault"),
    [
        ("data: {train: rows.jsonl}\n", "model.path: this key is missing: Hugging Face model folder"),
        ("model: {path: model}\ndata: {eval: rows.jsonl}\n", ":2:1: data.train: this key is missing"),
        ("model:\ndata:\n", ":1:1: model.path: this key is missing"),
        ("model: {path: modle}\ndata: {train: rows.jsonl}\n", "modle does not exist; did you mean 'model'?"),
        ("model: {path: .}\ndata: {train: rows.jsonl}\n", "is no Hugging Face model folder: it has no config.json"),
        ("model: {path: model}\ndata: {train: row.jsonl}\n", ":2:8: data.train: "),
        ("[1, 2]", ":1:1: expected a mapping"),
        ("just text", ":1:1: expected a mapping"),
        ("", ": the config is empty"),
        ("# only a comment\n", ": the config is empty"),
    ],
)
def test_what_must_be_there(write: Any, head: str, fault: str) -> None:
    lines = faults(write("", head=head))
    assert any(fault in line for line in lines), lines


def test_a_section_with_nothing_in_it_is_an_empty_one(write: Write) -> None:
    assert load_config(write("train:\n  # lr: 1\npool:\n")).config.train.lr == 2e-5


def test_files_that_are_no_config(write: Write, tmp_path: Path) -> None:
    write("")
    assert "there is no such config file; did you mean" in faults(tmp_path / "rum.yaml")[0]
    assert "this is a folder" in faults(tmp_path)[0]
    (tmp_path / "latin.yaml").write_bytes(b"run: {dir: \xe9}")
    assert "not UTF-8" in faults(tmp_path / "latin.yaml")[0]


def test_a_byte_order_mark_is_no_part_of_the_first_key(write: Write) -> None:
    path = write("")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load_config(path).config.model.path.name == "model"


def test_overrides_are_yaml_and_win(write: Write) -> None:
    path = write("train: {lr: 1, freeze: [encoder], step: {samples: 4}}\nproducers:\n")
    config = load_config(
        path,
        [
            "train.lr=2e-5",
            "train.freeze=[]",
            "train.step={packs: 3}",
            "producers.num=2",
            "pool.bytes=1MiB",
            "train.clip_norm=null",
            "debug.delays.producer_unit_ms.0=100",
            "run.seed=1",
            "run.seed=7",
        ],
    ).config
    assert (config.train.lr, config.train.freeze, config.train.step.packs) == (2e-5, (), 3)
    assert (config.producers.num, config.pool.bytes, config.train.clip_norm) == (2, 2**20, None)
    assert config.debug.delays.producer_unit_ms == {0: 100.0}
    assert config.run.seed == 7


def test_paths_of_overrides_are_relative_to_the_current_folder(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    config = load_config(write("run: {dir: here}"), ["run.dir=there"]).config
    assert config.run.dir == elsewhere / "there"
    assert load_config(write("run: {dir: here}")).config.run.dir == tmp_path / "here"


def test_an_override_of_one_of_two_exclusive_keys_drops_the_other(write: Write) -> None:
    path = write("train: {epochs: 8, step: {samples: 4}}\nproducers: {num: 2}\n")
    config = load_config(path, ["train.max_steps=5", "train.step.packs=2", "producers.layout=r1"]).config
    assert (config.train.max_steps, config.train.epochs) == (5, None)
    assert (config.train.step.packs, config.train.step.samples) == (2, None)
    assert (config.producers.layout, config.producers.num) == ("r1", None)
    assert any("give only one of" in line for line in faults(path, "train.max_steps=5", "train.epochs=1"))


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("train.lr", "--set train.lr: write an override as section.key=value"),
        ("=5", "--set =5: write an override"),
        ("train..lr=5", "--set train..lr=5: write an override"),
        ("train.lr=abc", "--set train.lr=abc: train.lr: expected a number, found the text 'abc'"),
        ("trian.lr=1", "--set trian.lr=1: trian: unknown key; did you mean 'train'?"),
        ("train.lrr=1", "--set train.lrr=1: train.lrr: unknown key; did you mean 'lr'?"),
        ("train.lr.x=1", "--set train.lr.x=1: train.lr: expected a number, found a mapping"),
        ("train.freeze=[a", "--set train.freeze=[a: train.freeze: this is not YAML"),
        ("data.train=nothing.jsonl", "--set data.train=nothing.jsonl: data.train: "),
        ("train=5", "--set train=5: train: expected a mapping of keys"),
    ],
)
def test_faults_of_overrides_name_the_override(write: Write, override: str, fault: str) -> None:
    lines = faults(write("train: {lr: 1}"), override)
    assert any(line.startswith(fault) for line in lines), lines


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4096", 4096),
        ("64MiB", 64 * 2**20),
        ("64 mib", 64 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("512B", 512),
        ("1TiB", 2**40),
    ],
)
def test_byte_sizes_may_have_a_unit(write: Write, text: str, num_bytes: int) -> None:
    assert load_config(write(f"pool: {{bytes: {text}}}")).config.pool.bytes == num_bytes


def test_resolved_yaml_reads_back_to_the_same_config(write: Write, tmp_path: Path) -> None:
    path = write(
        "train: {lr: 3.1e-7, epochs: 2, module_lr: {encoder: 1e-5}, freeze: [projector], clip_norm: null}\n"
        "debug: {delays: {consumer_pack_ms: {1: 0.1}}, faults: [stale_encoder]}\npool: {bytes: 3GB}\n"
    )
    config = load_config(path).config
    for comments in (False, True):
        resolved = tmp_path / "run/config.yaml"
        resolved.parent.mkdir(exist_ok=True)
        resolved.write_text(dump_resolved(config, comments))
        assert load_config(resolved).config == config
    assert config_from_json(config_to_json(config)) == config


def test_resolved_yaml_means_the_same_to_other_readers(write: Write) -> None:
    plain = yaml.safe_load(dump_resolved(load_config(write("")).config))
    assert plain["allocation"]["profile"] == "off"
    assert plain["train"]["eps"] == 1e-8


@given(st.floats(min_value=0, exclude_min=True, max_value=1e30), st.integers(0, 2**62))
def test_numbers_keep_every_bit(lr: float, seed: int) -> None:
    config = Config.model_validate(
        {"model": {"path": "m"}, "data": {"train": "d"}, "train": {"lr": lr}, "run": {"seed": seed}}
    )
    plain = yaml.safe_load(dump_resolved(config))
    assert (float(plain["train"]["lr"]), plain["run"]["seed"]) == (lr, seed)
    assert config_from_json(config_to_json(config)) == config


def test_a_config_does_not_change(write: Write) -> None:
    config = load_config(write("")).config
    with pytest.raises(ValidationError):
        config.train.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("name", ["digits", "emoji"])
def test_examples_are_valid(repository: Path, name: str) -> None:
    config = load_config(repository / f"examples/{name}/{name}.yaml").config
    assert config.run.dir == repository / f"runs/{name}"
    assert config.pool.bytes == 64 * 2**20


E_, P, B = Module.ENCODER, Module.PROJECTOR, Module.BACKBONE


@pytest.mark.parametrize(
    ("freeze", "cut", "producer_modules", "trainable"),
    [
        ("[]", Cut.AFTER_PROJECTOR, {E_, P}, True),
        ("[encoder]", Cut.BEFORE_PROJECTOR, {E_}, False),
        ("[encoder, projector]", Cut.AFTER_PROJECTOR, {E_, P}, False),
        ("[encoder, backbone]", Cut.BEFORE_PROJECTOR, {E_}, False),
        ("[projector, backbone]", Cut.AFTER_PROJECTOR, {E_, P}, True),
        ("[backbone]", Cut.AFTER_PROJECTOR, {E_, P}, True),
    ],
)
def test_what_is_frozen_decides_the_cut(
    write: Write, freeze: str, cut: Cut, producer_modules: set[Module], trainable: bool
) -> None:
    config = load_config(write(f"train: {{freeze: {freeze}}}")).config
    assert config.cut is cut
    assert config.producer_modules == producer_modules
    assert config.trainable_encoder is trainable
