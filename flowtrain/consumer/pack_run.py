"""One pack on its way through a rank: its forwards and backwards, and what lies between them.

    PackOrder, tokens, features ──▶ PackRun ─ forward(section) … backward(section) ─▶ loss, gradients over the features
                                               │      ▲                │      ▲
                                               ▼      │ hidden states  ▼      │ gradients      (pipeline only: Links)
                                             next section            section before

Without a pipeline there is one section, which is first and last. What a section sends on, and whether a gradient comes
back for it, follows from the order and the freeze setting alone, so that both ends of a link know it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from flowtrain.messages import PackOrder
from flowtrain.models.backbone import BackboneHalf, PackSample
from flowtrain.models.sections import SectionRunner
from flowtrain.parallel.links import Links
from flowtrain.types import EmbeddingRef, Phase, SampleMeta


@dataclass(slots=True)
class PackRun:
    """`samples`: those that take part, beside their `survivors`; an empty pack has none and computes nothing.

    `seconds`: spent on it so far; `kept`: of each own section that waits for its backward, what went in and came out.
    """

    order: PackOrder
    survivors: Sequence[SampleMeta]
    samples: Sequence[PackSample]
    refs: dict[int, EmbeddingRef]
    backbone: BackboneHalf
    links: Links | None = None
    neighbours_visible: bool = False
    loss_sum: float = 0.0
    trained: int = 0
    seconds: float = 0.0
    backwards: int = 0
    kept: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = field(default_factory=dict)

    @property
    def trains(self) -> bool:
        return self.order.phase is Phase.TRAIN

    def forward(self, index: int) -> None:
        """Through the own section of this index."""
        if not self.samples:
            return
        section = self._section(index)
        carried = self._taken(section)
        with torch.set_grad_enabled(self.trains):
            if section is None or section.section.is_last:
                loss, self.trained = self.backbone.loss(self.samples, self.neighbours_visible, section, carried)
                self.loss_sum = float(loss.detach().double())
                output = loss
            else:
                (output,) = self.backbone.run(self.samples, self.neighbours_visible, section, carried)
                self._links.send(output, forward=True)
        if self.trains:
            self.kept[index] = (carried, output)

    def backward(self, index: int) -> None:
        self.backwards += 1
        if not self.samples:
            return
        section = self._section(index)
        carried, output = self.kept.pop(index)
        gradient = None
        if section is not None and not section.section.is_last and self._leaves(section.section.number + 1):
            gradient = self._links.receive(output.shape, output.dtype, forward=False)
        if output.requires_grad:
            torch.autograd.backward(output, gradient)
        if section is not None and self._leaves(section.section.number):
            assert carried is not None
            self._links.send(torch.zeros_like(carried) if carried.grad is None else carried.grad, forward=False)

    def _section(self, index: int) -> SectionRunner | None:
        return self.backbone.sections[index] if self.backbone.sections else None

    def _taken(self, section: SectionRunner | None) -> torch.Tensor | None:
        """What the section before has sent; the first one is sent nothing."""
        if section is None or section.section.is_first:
            return None
        shape = self.backbone.carried_shape(self.samples, section.levels_taken)
        carried = self._links.receive(shape, self.backbone.stream_dtype, forward=True)
        return carried.requires_grad_(self.trains and self._leaves(section.section.number))

    def _leaves(self, section: int) -> bool:
        """Whether the section of this number hands a gradient to the one before it."""
        wanted = self.order.return_gradients or self.backbone.is_sharded
        return section > 0 and (wanted or section > self.backbone.first_trained)

    @property
    def _links(self) -> Links:
        assert self.links is not None, "sections of a pipeline have links"
        return self.links
