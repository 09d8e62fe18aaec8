"""Reading a model's shape from its `config.json`.

family known     sections by its rules (`families.py`), kinds of backbone and tower by theirs: exact
family unknown   a text and a vision section by the names that configs share, of known kinds where they say so,
                 and a projector of two linear layers: an estimate, marked `generic`
"""

from __future__ import annotations

from pathlib import Path

from flowtrain.errors import ConfigError
from flowtrain.shapes.backbones import GENERIC_TEXT, TEXT_KINDS, TextKind, read_text
from flowtrain.shapes.families import FAMILIES, Family, Part
from flowtrain.shapes.keys import Keys
from flowtrain.shapes.model import ModelShape
from flowtrain.shapes.projectors import generic, idle_layers
from flowtrain.shapes.towers import (
    AUDIO_DEFAULTS,
    GENERIC_TOWER,
    TOWER_KINDS,
    TowerKind,
    read_audio_tower,
    read_tower,
)

TEXT_SECTIONS = ("text_config", "llm_config")


def read_shape(model_dir: Path) -> ModelShape:
    """Shape of the model in a Hugging Face folder.

    Raises:
        ConfigError: `config.json` is missing, is not JSON, or lacks a size; the sentence names file and key.
    """
    top = Keys.of_file(Path(model_dir) / "config.json")
    name = top.word("model_type")
    family = FAMILIES.get(name)
    return _generic(name, top) if family is None else _known(name, family, top)


def _known(name: str, family: Family, top: Keys) -> ModelShape:
    if family.inside:
        top = top.section(family.inside)
    text_keys = top.find(*family.text_sections)
    if text_keys is None:
        text_keys = top if family.flat else top.absent(family.text_sections[0], family.text.when_absent)
    tied = top.flag("tie_word_embeddings", family.tied) or (
        family.tied_by_text and text_keys.flag("tie_word_embeddings")
    )
    text = read_text(text_keys, _text_kind(family.text, text_keys), tied)
    tower_keys = top.find("vision_config") or top.absent("vision_config", family.vision.when_absent)
    kind = _tower_kind(family.vision, tower_keys)
    tower_keys = tower_keys.over(kind.defaults)
    idle = idle_layers(top, tower_keys, family.feature_layer)
    encoders = [read_tower("vision", tower_keys, kind, family.projector(top, tower_keys, text), idle)]
    if family.audio:
        audio = top.find("audio_config") or top.absent("audio_config", {})
        encoders.append(read_audio_tower("audio", audio.over(AUDIO_DEFAULTS)))
    return ModelShape(name, text, tuple(encoders), _image_token(top, family.image_token_id))


def _generic(name: str, top: Keys) -> ModelShape:
    text_keys = top.section(*TEXT_SECTIONS)
    tied = top.flag("tie_word_embeddings", text_keys.flag("tie_word_embeddings"))
    text = read_text(text_keys, TEXT_KINDS.get(text_keys.word("model_type"), GENERIC_TEXT), tied)
    tower_keys = top.section("vision_config")
    kind = TOWER_KINDS.get(tower_keys.word("model_type"), GENERIC_TOWER)
    tower_keys = tower_keys.over(kind.defaults)
    encoder = read_tower("vision", tower_keys, kind, generic(top, tower_keys, text), 0)
    return ModelShape(name, text, (encoder,), _image_token(top, None), generic=True)


def _text_kind(part: Part, keys: Keys) -> TextKind:
    said = keys.word("model_type")
    if part.fixed or not said:
        return TEXT_KINDS[part.kind]
    return TEXT_KINDS.get(said, GENERIC_TEXT)


def _tower_kind(part: Part, keys: Keys) -> TowerKind:
    said = keys.word("model_type")
    if part.fixed or not said:
        return TOWER_KINDS[part.kind]
    return TOWER_KINDS.get(said, GENERIC_TOWER)


def _image_token(top: Keys, default: int | None) -> int | None:
    for name in ("image_token_id", "image_token_index"):
        value = top.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if value is not None:
            raise ConfigError(f"{top.file}: `{top.path}{name}` is {value!r}: expected the id of the image token")
    return default
