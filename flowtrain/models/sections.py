"""A backbone of which a process has some layers: the whole class, with pass-through modules at foreign places.

    hidden states, deep-stack levels of layers to come ──▶ [ · · layer layer · ] ──▶ the same, for the next section
                                                            foreign ones hand through what they are given

So transformers' own `forward` runs with every layer at its index, and whatever goes by index or type of a layer stays
right. Parameters keep the names of the whole model; those of other sections stay on meta, like those of the other half.

| place | belongs to |
|---|---|
| layer i | the section that has it |
| head; modules of the language model behind its layers (the last norm) | the last section |
| all else: embedding, projector | the first section |

A parameter with two places, such as a tied embedding, is in each section that has one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from flowtrain.models.parts import places_of
from flowtrain.models.table import module_of_name
from flowtrain.pipeline import Section
from flowtrain.types import Module

Tensors = tuple[torch.Tensor, ...]


def decoder_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The backbone's transformer layers with their names: the longest list of modules outside the encoder."""
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and module_of_name(name) is Module.BACKBONE and name.endswith("layers")
    ]
    name, layers = max(lists, key=lambda pair: len(pair[1]))
    return [(f"{name}.{index}", layer) for index, layer in enumerate(layers)]


def sections_of_parameters(model: nn.Module, sections: Sequence[Section]) -> dict[str, frozenset[int]]:
    """Numbers of the sections that need each parameter, by its first name."""
    layers = [name for name, _ in decoder_layers(model)]
    text, listed = layers[0].rsplit(".", 2)[:2]
    names = {module: name for name, module in model.named_modules()}
    ends = {
        names[module]: number
        for module, number in ((model.get_input_embeddings(), 0), (model.get_output_embeddings(), -1))
    }

    def section_of(place: str) -> int:
        owner = place.rpartition(".")[0]
        if owner in ends:
            return sections[ends[owner]].number
        if place.startswith(f"{text}.{listed}."):
            layer = int(place[len(text) + len(listed) + 2 :].split(".")[0])
            return next(section.number for section in sections if section.start <= layer < section.stop)
        return sections[-1 if place.startswith(f"{text}.") else 0].number

    return {name: frozenset(map(section_of, places)) for name, places in places_of(model).items()}


class _PassThrough(nn.Module):
    """In place of a module of another section."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states


class SectionRunner:
    """Runs the forwards of one section; `num_levels`: deep-stack levels, added behind the first layers in turn."""

    def __init__(self, model: nn.Module, section: Section, num_levels: int) -> None:
        layers = decoder_layers(model)
        self.section = section
        self.num_levels = num_levels
        self.text_model = model.get_submodule(layers[0][0].rsplit(".", 2)[0])
        self._list_name = layers[0][0].rsplit(".", 2)[1]
        own = range(section.start, section.stop)
        whole = [layer if index in own else _PassThrough() for index, (_, layer) in enumerate(layers)]
        self._replaced: dict[str, nn.Module] = {self._list_name: nn.ModuleList(whole)}
        if not section.is_last:
            self._replaced |= {name: _PassThrough() for name in self._behind_layers(model)}

    def _behind_layers(self, model: Any) -> Iterator[str]:
        embedding = model.get_input_embeddings()
        for name, child in self.text_model.named_children():
            if name != self._list_name and child is not embedding and any(True for _ in child.parameters()):
                yield name

    @property
    def levels_taken(self) -> int:
        """Deep-stack levels that come with the hidden states: those of its own layers and of later ones."""
        return 0 if self.section.is_first else max(0, self.num_levels - self.section.start)

    @contextmanager
    def running(self, levels: Tensors, visual_1T: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """The model computes this section only; yields the levels for the sections to come, filled by its forward.

        Args:
            levels: `levels_taken` tensors (visual tokens, D); none for a pack without images.
            visual_1T: which tokens of the pack are visual.
        """
        later: list[torch.Tensor] = []

        def into(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            given = list(kwargs.get("deepstack_visual_embeds") or ())
            if levels:
                given = [torch.zeros_like(levels[0])] * self.section.start + list(levels)
                kwargs = {**kwargs, "visual_pos_masks": visual_1T}
            if given and not self.section.is_last:
                later.extend(given[self.section.stop :])
                given = given[: self.section.stop]
            return args, {**kwargs, "deepstack_visual_embeds": given} if given else kwargs

        modules: Mapping[str, Any] = self.text_model._modules
        before = {name: modules[name] for name in self._replaced}
        hook = self.text_model.register_forward_pre_hook(into, with_kwargs=True, prepend=True)
        try:
            self.text_model._modules.update(self._replaced)
            yield later
        finally:
            self.text_model._modules.update(before)
            hook.remove()
