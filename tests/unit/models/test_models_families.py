"""Every family at the cut: rows measured from sizes, features as planned, and projectors played back (contract C4)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tiny_families import RECIPES, make_family
from transformers import AutoModelForImageTextToText, AutoProcessor

from flowtrain.config.schema import Config
from flowtrain.data.measure import Measure, prepare
from flowtrain.data.sample import check_expansion
from flowtrain.errors import ConfigError
from flowtrain.models.backbone import BackboneHalf
from flowtrain.models.encoder import EncoderHalf
from flowtrain.models.export import finish_export, write_part
from flowtrain.models.families import FAMILIES
from flowtrain.models.loading import ensure_weights
from flowtrain.shapes import CUT_FAMILIES, read_shape
from flowtrain.types import Cut, ImageMeta
from flowtrain.verify.compare import FLOAT32_INSIDE

CPU = torch.device("cpu")
ROWS = [[(40, 72)], [(50, 20), (64, 64), (30, 30)], [(33, 57), (40, 40)], [(100, 30)], [(8, 200)]]
"""(height, width) of each image of a row."""


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a family, made once."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = make_family(family, tmp_path_factory.mktemp(family))
        return made[family]

    return folder


def pictures(sizes: list[tuple[int, int]], seed: int) -> list[Image.Image]:
    generator = torch.Generator().manual_seed(seed)
    noise = [torch.randint(0, 256, (*size, 3), generator=generator, dtype=torch.uint8) for size in sizes]
    return [Image.fromarray(values.numpy()) for values in noise]


def config_of(folder: Path, run_dir: Path, freeze: tuple[str, ...]) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": str(run_dir), "seed": 5},
            "model": {"path": str(folder), "init": "random", "dtype": "float64"},
            "data": {"train": "unused.jsonl"},
            "train": {"max_steps": 1, "freeze": list(freeze)},
        }
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of numpy, inside the processor of GLM-4V
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_rows_are_measured_from_sizes_alone(family: str, folder_of: Callable[[str], Path]) -> None:
    processor = AutoProcessor.from_pretrained(folder_of(family))
    measure = Measure(processor, read_shape(folder_of(family)))
    check_expansion(measure)
    for number, sizes in enumerate(ROWS):
        images = measure.images(sizes)
        text = "a".join([processor.image_token] * len(sizes))
        whole = processor(text=[text], images=[pictures(sizes, number)], return_tensors="pt")
        assert int((whole["input_ids"] == measure.shape.image_token_id).sum()) == sum(image.tokens for image in images)
        for image in images if measure.shape.bounds_features(Cut.BEFORE_PROJECTOR) else ():
            assert image.patches <= image.tokens * measure.shape.projector.patches_per_token, "what the pool counts on"
        prepared, _ = prepare(processor, pictures(sizes, number))
        metas = [ImageMeta(h, w, image.tokens, image.patches, 0) for (h, w), image in zip(sizes, images, strict=True)]
        assert measure.patches(prepared, metas) == [image.patches for image in images]
        given = {name: value for name, value in prepared.items() if name in whole}
        assert given
        assert all(torch.equal(value, whole[name]) for name, value in given.items())


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_projectors_play_back_what_encoders_recorded(
    family: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Cut before the projector and after it: the same features, in the rows that the plan has, row by row or not."""
    folder = folder_of(family)
    frozen, trained = config_of(folder, tmp_path, ("encoder", "backbone")), config_of(folder, tmp_path, ())
    weights = ensure_weights(frozen)
    recorder = EncoderHalf.load(folder, weights, frozen, CPU, "float64")
    player = BackboneHalf.load(folder, weights, frozen, CPU, "float64")
    whole = EncoderHalf.load(folder, weights, trained, CPU, "float64")
    processor = AutoProcessor.from_pretrained(folder)
    measure = Measure(processor, read_shape(folder))
    inputs = [
        {name: value for name, value in prepare(processor, pictures(sizes, number))[0].items() if _is_tensor(value)}
        for number, sizes in enumerate(ROWS)
    ]
    with torch.no_grad():
        recorded, expected = recorder.encode(inputs), whole.encode(inputs)
        alone = [whole.encode([row])[0] for row in inputs]
        played = [
            player._projected(tuple(f.flatten(0, -2) for f in features), recorder.playback(row, features))
            for row, features in zip(inputs, recorded, strict=True)
        ]
    for number, sizes in enumerate(ROWS):
        images = measure.images(sizes)
        tokens, patches = sum(i.tokens for i in images), sum(i.patches for i in images)
        for cut, features in ((Cut.BEFORE_PROJECTOR, recorded[number]), (Cut.AFTER_PROJECTOR, expected[number])):
            planned = [(spec.num_rows(tokens, patches), spec.width) for spec in measure.shape.features(cut)]
            assert [tuple(f.flatten(0, -2).shape) for f in features] == planned, cut
        for one, together, again in zip(alone[number], expected[number], played[number], strict=True):
            torch.testing.assert_close(together, one, rtol=1e-6, atol=1e-6 if family in FLOAT32_INSIDE else 1e-12)
            torch.testing.assert_close(again, one, rtol=1e-6, atol=1e-6 if family in FLOAT32_INSIDE else 1e-12)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def test_families_that_can_be_cut_are_those_that_are_tried() -> None:
    assert FAMILIES.keys() == CUT_FAMILIES == RECIPES.keys()


def test_a_backbone_whose_attention_packs_cannot_do_is_refused(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = make_family("gemma3", tmp_path / "capped")
    path = folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    values["text_config"]["attn_logit_softcapping"] = 30.0
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(ConfigError, match="attn_logit_softcapping"):
        ensure_weights(config_of(folder, tmp_path, ()))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_an_export_loads_whole(family: str, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder, out = folder_of(family), tmp_path / "export"
    config = config_of(folder, tmp_path, ())
    weights = ensure_weights(config)
    halves = {
        "producer": EncoderHalf.load(folder, weights, config, CPU, "float32"),
        "consumer": BackboneHalf.load(folder, weights, config, CPU, "float32"),
    }
    for name, half in halves.items():
        write_part(half.tensors_by_name(), out, name)
    finish_export(folder, out, list(halves))
    model, info = AutoModelForImageTextToText.from_pretrained(out, local_files_only=True, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours = {name: p for half in halves.values() for name, p in half.parameters_by_name().items()}
    theirs = dict(model.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], parameter) for name, parameter in theirs.items())
    AutoProcessor.from_pretrained(out, local_files_only=True)
