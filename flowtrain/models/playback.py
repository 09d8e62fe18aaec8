"""The cut before the projector: the producer records what the projector will need, the consumer plays it back.

| projector | families | recorded | played back by |
|---|---|---|---|
| inside the encoder | Qwen-VL, GLM-V kinds | what every merger is given, in the order of the image | the mergers |
| behind the encoder | all others | the encoder's outputs that are used | `get_image_features` itself |

Behind the encoder, transformers' own function runs on both sides: on the producer up to the projector, on the consumer
with an encoder that hands out what was recorded. So whatever lies between (a class token dropped, layers joined, pixels
shuffled, padding cut, newlines added) is neither copied nor guessed. It looks at shapes of pixels only: the consumer
gives it ones of that shape.

Inside the encoder, a tap in place of a merger passes on row numbers. What comes out tells how the model orders the
merged rows afterwards (windows), and what is kept gets that order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flowtrain.errors import ConfigError
from flowtrain.models.features import PIXELS, Features, Inputs, projected
from flowtrain.models.table import module_of_name
from flowtrain.types import ImageInput, Module, Playback


@dataclass(frozen=True, slots=True)
class Parts:
    """The largest modules that are wholly encoder, and wholly projector; the latter in their order."""

    encoders: tuple[nn.Module, ...]
    projectors: tuple[nn.Module, ...]
    inside: bool


def find_parts(model: nn.Module) -> Parts:
    """Raises: ConfigError where projector parameters lie both inside the encoder and behind it."""
    encoders = largest(model, Module.ENCODER)
    projectors = largest(model, Module.PROJECTOR)
    names = [name for name, _ in model.named_parameters() if module_of_name(name) is Module.PROJECTOR]
    inside = [_inside_encoder(name) for name in names]
    if any(inside) and not all(inside):
        raise ConfigError(
            f"{type(model).__name__}: its projector lies partly inside the encoder ({names[inside.index(True)]}) and "
            f"partly behind it ({names[inside.index(False)]}), so it cannot train while the encoder is frozen: "
            "add `projector` to train.freeze, or train the encoder too"
        )
    return Parts(tuple(m for _, m in encoders), tuple(m for _, m in projectors), all(inside))


def largest(model: nn.Module, module: Module) -> list[tuple[str, nn.Module]]:
    """Modules that are called, whose parameters all belong to `module`, and that lie in no other such."""
    found: list[tuple[str, nn.Module]] = []
    for path, part in model.named_modules():
        names = [f"{path}.{name}" for name, _ in part.named_parameters()]
        if not names or isinstance(part, nn.ModuleList) or any(path.startswith(f"{other}.") for other, _ in found):
            continue
        if all(module_of_name(name) is module for name in names):
            found.append((path, part))
    return found


def _inside_encoder(name: str) -> bool:
    """Whether the module that holds this projector parameter's module also holds encoder parameters by name."""
    components = name.split(".")
    return any(module_of_name(".".join(components[:end])) is Module.ENCODER for end in range(1, len(components)))


# --- recording, on the producer ---------------------------------------------------------------------------------------


def record(model: Any, parts: Parts, inputs: Inputs) -> Features:
    """What crosses the cut for these inputs: (rows, width) tensors, or (tiles, rows, width) behind an encoder."""
    return _record_mergers(model, parts, inputs) if parts.inside else _record_encoder(model, parts, inputs)


def playback_of(parts: Parts, inputs: Inputs, features: Features) -> Playback | None:
    """What the consumer needs beside the features, as plain data; None where the mergers need nothing."""
    if parts.inside:
        return None
    return Playback(
        tuple(
            ImageInput(name, tuple(t.shape), None if t.is_floating_point() or name.endswith("mask") else _values(t))
            for name, t in inputs.items()
        ),
        tuple(tuple(feature.shape) for feature in features),
    )


def _values(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(value) for value in tensor.flatten())


def _record_mergers(model: Any, parts: Parts, inputs: Inputs) -> Features:
    kept: list[tuple[int, torch.Tensor]] = []

    def tap(number: int, merger: nn.Module) -> Any:
        def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            kept.append((number, hidden))
            rows, width = merger_output(merger, hidden, args, kwargs).shape
            marks = torch.zeros(rows, width, dtype=torch.float64, device=hidden.device)
            marks[:, 0] = number
            marks[:, 1] = torch.arange(rows, device=hidden.device)
            return marks

        return forward

    with _replaced(parts.projectors, tap):
        outputs = projected(model, inputs)
    features: list[torch.Tensor] = []
    for number, marks in enumerate(outputs):
        found = [hidden for owner, hidden in kept if owner == number]
        order = marks[:, 1].long()
        sound = len(found) == 1 and bool((marks[:, 0] == number).all())
        if not sound or not torch.equal(order.sort().values, torch.arange(len(order), device=order.device)):
            raise ConfigError(
                f"{type(model).__name__}: its merger {number} cannot be run apart from its encoder; "
                "add `projector` to train.freeze, or train the encoder too"
            )
        grouped = found[0].unflatten(0, (len(order), -1))
        features.append(grouped[order].flatten(0, 1))
    return tuple(features)


def merger_output(merger: nn.Module, hidden: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
    """The merger's output without its values: on a producer its parameters are on `meta`, so the input is put there."""
    output = type(merger).forward(merger, hidden.to("meta"), *args, **kwargs)
    assert isinstance(output, torch.Tensor)
    return output


class _Reached(Exception):
    """The projector is called: all that it needs of the encoder is recorded."""


class _Recorded:
    """An encoder's output that notes which of its tensors are used; each is noted once."""

    def __init__(self, output: Any, kept: list[torch.Tensor]) -> None:
        self._output = output
        self._kept = kept

    def _note(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if not any(value is other for other in self._kept):
                self._kept.append(value)
            return value
        return value if value is None or isinstance(value, int) else _Recorded(value, self._kept)

    def __getattr__(self, name: str) -> Any:
        return self._note(getattr(self._output, name))

    def __getitem__(self, key: Any) -> Any:
        return self._note(self._output[key])


def _record_encoder(model: Any, parts: Parts, inputs: Inputs) -> Features:
    kept: list[torch.Tensor] = []

    def watched(number: int, encoder: nn.Module) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return _Recorded(type(encoder).forward(encoder, *args, **kwargs), kept)

        return forward

    def reached(number: int, projector: nn.Module) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            raise _Reached

        return forward

    with _replaced(parts.encoders, watched), _replaced(parts.projectors, reached):
        try:
            model.get_image_features(**inputs)
        except _Reached:
            return tuple(kept)
    raise ConfigError(
        f"{type(model).__name__}: its projector is never called, so the cut cannot lie before it; "
        "add `projector` to train.freeze, or train the encoder too"
    )


# --- playing back, on the consumer ------------------------------------------------------------------------------------


class _Played:
    """Hands out recorded tensors in the order in which the recording noted them, whatever it is asked for."""

    def __init__(self, features: Iterator[torch.Tensor]) -> None:
        self._features = features
        self._given: dict[Any, torch.Tensor] = {}

    def _give(self, key: Any) -> torch.Tensor:
        if key not in self._given:
            tensor = next(self._features, None)
            if tensor is None:
                raise AttributeError(f"{key} of the encoder's output was not recorded")
            self._given[key] = tensor
        given: torch.Tensor = self._given[key]
        return given

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _PlayedStates(self) if name == "hidden_states" else self._give(name)

    def __getitem__(self, key: Any) -> torch.Tensor:
        return self._give(key)


@dataclass(frozen=True, slots=True)
class _PlayedStates:
    """The hidden states of all layers, of which only those used were recorded."""

    played: _Played

    def __getitem__(self, key: Any) -> torch.Tensor:
        return self.played._give(("hidden_states", key))


def play(model: Any, parts: Parts, features: Features, playback: Playback | None) -> Features:
    """The projector's output for one sample: (T, D) tensors."""
    if parts.inside:
        return tuple(merger(hidden) for merger, hidden in zip(parts.projectors, features, strict=True))
    assert playback is not None, "features of a sample without what plays them back"
    shaped = iter([f.reshape(shape) for f, shape in zip(features, playback.shapes, strict=True)])
    like = features[0]

    def recorded(number: int, encoder: nn.Module) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return _Played(shaped)

        return forward

    with _replaced(parts.encoders, recorded):
        output = projected(model, {given.name: _tensor(given, like) for given in playback.inputs})
    assert next(shaped, None) is None, "recorded features were left over"
    return output


def _tensor(given: ImageInput, like: torch.Tensor) -> torch.Tensor:
    """Whole numbers as they are; pixels and masks as ones, of which only the shape counts."""
    if given.values is None:
        dtype = like.dtype if given.name == PIXELS else torch.bool
        return torch.ones(1, dtype=dtype, device=like.device).expand(given.shape)
    return torch.tensor(given.values, dtype=torch.long, device=like.device).reshape(given.shape)


@contextmanager
def _replaced(modules: Sequence[nn.Module], make: Any) -> Iterator[None]:
    """These modules do something else when called; names, attributes and parameters stay."""
    places: Mapping[int, nn.Module] = dict(enumerate(modules))
    for number, module in places.items():
        module.__dict__["forward"] = make(number, module)
    try:
        yield
    finally:
        for module in places.values():
            module.__dict__.pop("forward", None)
