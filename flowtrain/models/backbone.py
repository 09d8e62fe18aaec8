"""The consumer's half: language model, head, and the projector where the cut is before it (contracts C3, C4, C5).

    token ids of a pack's samples ──▶ one long row ─┐
    features of each sample ──▶ (projector) ────────┴──▶ model.forward(pack_lengths=…) ──▶ logits at labels ──▶ Σ loss

Invariants
1. The first token of a sample is never predicted, the last predicts nothing: no label crosses a border.
2. Rotary positions of a sample start at 0, whatever lies before it in the pack.
3. The loss is the *sum* over trained tokens; the division is done once a step, by the controller's scale.

In a pipeline a process runs sections of the layers (`sections.py`): hidden states, and the deep-stack levels of layers
to come, go in and out; tokens and borders are known to all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from flowtrain.config.schema import Config
from flowtrain.models.attention import ImageBlocks, Lengths
from flowtrain.models.families import block_numbers, ordinary_ids, positions_of
from flowtrain.models.features import encoder_outputs
from flowtrain.models.half import Half
from flowtrain.models.playback import play
from flowtrain.models.sections import SectionRunner, Tensors, sections_of_parameters
from flowtrain.models.share import ALONE, Share
from flowtrain.pipeline import Section
from flowtrain.types import Cut, Module, Playback

IGNORED_LABEL = -100
EVERYTHING = Section(0, 0)
"""The running section where there is no pipeline: it has both ends."""


@dataclass(frozen=True, slots=True)
class PackSample:
    """One sample of a pack, on the backbone's device.

    Attributes:
        input_ids: (T,) token ids, image placeholders expanded.
        labels: (T,) unshifted, -100 where nothing is trained.
        features: in the order of `shape.features(cut)`; None for a row without images.
        grids: (images, 3) patches of each image; None for a row without images, and where the family has no grids.
        playback: how the projector runs on the features, where the cut is before it and features alone do not tell.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    features: tuple[torch.Tensor, ...] | None = None
    grids: torch.Tensor | None = None
    playback: Playback | None = None


class BackboneHalf(Half):
    """
    Attributes:
        one_by_one: set by the load-time leak test where a model's layers mix tokens across samples (contract C5).
        share: how other ranks take part in each forward.
        sections: those of a pipeline that are computed here; none outside of one.
        first_trained: number of the first section of the pipeline in which something trains.
        running: the section of the forward that runs, or ran last.
    """

    forward_method = "run"
    one_by_one: bool = False
    share: Share = ALONE
    sections: tuple[SectionRunner, ...] = ()
    first_trained: int = 0
    running: Section = EVERYTHING

    @staticmethod
    def part_of(config: Config) -> frozenset[Module]:
        """Also the projector's, where the cut is before it."""
        return frozenset(Module) - config.producer_modules

    def run_sections_of(self, all_sections: Sequence[Section], own: Sequence[Section]) -> None:
        """Be those sections `own` of a pipeline; before parameters are cut and loaded."""
        numbers = {section.number for section in own}
        needed = sections_of_parameters(self.model, all_sections)
        self.hold(name for name, of_name in needed.items() if of_name & numbers)
        trained = [min(needed[name]) for name in self.trainable_names()]
        self.first_trained = min(trained, default=len(all_sections))
        levels = len(getattr(self.model.config.vision_config, "deepstack_visual_indexes", None) or ())
        self.sections = tuple(SectionRunner(self.model, section, levels) for section in own)

    def loss(
        self,
        samples: Sequence[PackSample],
        neighbours_visible: bool = False,
        section: SectionRunner | None = None,
        carried: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, int]:
        """Sum of the token losses and number of trained tokens of one pack.

        Cross entropy in the compute dtype, float32 for 16 bit. An empty pack costs nothing and has no graph.
        `neighbours_visible` plants a fault: samples see those before them. `section`: the last one of a pipeline, with
        what was carried to it.
        """
        total = torch.zeros((), dtype=self.stream_dtype, device=self.device)
        groups = [[sample] for sample in samples] if self.one_by_one else [list(samples)]
        for group in groups:
            if group:
                logits_KV, targets_K = self.run(group, neighbours_visible, section, carried)
                total = total + self.share.cross_entropy(logits_KV.to(self.stream_dtype), targets_K)
        num_trained = sum(int((sample.labels[1:] != IGNORED_LABEL).sum()) for sample in samples)
        return self.share.total(total), num_trained

    def run(
        self,
        samples: Sequence[PackSample],
        neighbours_visible: bool = False,
        section: SectionRunner | None = None,
        carried: torch.Tensor | None = None,
    ) -> Tensors:
        """The forward of everything, or of one section.

        Where ranks share the forward: of this rank's places, and of the rows of the vocabulary that it holds.

        Returns:
            (K, vocabulary) logits of the K places whose next token is trained, and the (K,) ids of those tokens; of a
            section that is not the last one, the one tensor that it carries to the next (`carried_shape`).
        """
        self.running = EVERYTHING if section is None else section.section
        samples = self._padded(samples)
        ids_1T = torch.cat([sample.input_ids for sample in samples])[None]
        given = {"position_ids": self._positions(samples), "use_cache": False}
        given |= self._borders(samples, neighbours_visible)
        with self.computing():
            if self.running.is_first:
                given |= {"input_ids": ids_1T, "mm_encoder_outputs": self._encoder_outputs(samples)}
            if section is None:
                return self._ending(samples, given)
            levels: Sequence[torch.Tensor] = ()
            visual_1T = ids_1T == self.model.config.image_token_id
            if carried is not None:
                hidden, *levels = carried.split(self._carried_rows(samples, section.levels_taken))
                given["inputs_embeds"] = hidden[None]
            with section.running(tuple(levels), visual_1T) as later:
                if self.running.is_last:
                    return self._ending(samples, given)
                hidden = self.model.model(**given).last_hidden_state
                return (torch.cat([hidden[0], *later]).to(self.stream_dtype),)

    def _ending(self, samples: Sequence[PackSample], given: dict[str, Any]) -> Tensors:
        """Logits and targets."""
        num_tokens = sum(len(sample.input_ids) for sample in samples)
        places, targets = self.share.places(*self._targets(samples), num_tokens)
        return self.model(logits_to_keep=places, **given).logits[0], targets

    def carried_shape(self, samples: Sequence[PackSample], num_levels: int) -> tuple[int, int]:
        """(rows, D) of what goes from a section to the next: hidden states of this rank's tokens, and for each of
        `num_levels` deep-stack levels a row for each visual token of the pack. Of `stream_dtype`."""
        rows = self._carried_rows(self._padded(samples), num_levels)
        return sum(rows), self.model.config.get_text_config().hidden_size

    def _carried_rows(self, samples: Sequence[PackSample], num_levels: int) -> list[int]:
        image = self.model.config.image_token_id
        tokens = sum(len(sample.input_ids) for sample in samples) // self.share.multiple
        visual = sum(int((sample.input_ids == image).sum()) for sample in samples)
        return [tokens] + ([visual] * num_levels if visual else [])

    @property
    def stream_dtype(self) -> torch.dtype:
        """Of hidden states between layers: that of the parameters, also under autocast."""
        return torch.float64 if self.compute_dtype is torch.float64 else torch.float32

    def stand_in(self, num_tokens: int = 2) -> PackSample:
        """Tokens of text of which none is trained: they add exact zeros to loss and gradients."""
        token = ordinary_ids(self.model.config)[0]
        input_ids = torch.full((num_tokens,), token, device=self.device)
        return PackSample(input_ids, torch.full_like(input_ids, IGNORED_LABEL))

    def _padded(self, samples: Sequence[PackSample]) -> list[PackSample]:
        """The samples, and a stand-in where their number of tokens is no multiple of what it must be."""
        missing = -sum(len(sample.input_ids) for sample in samples) % self.share.multiple
        return [*samples, self.stand_in(missing)] if missing else list(samples)

    def _borders(self, samples: Sequence[PackSample], neighbours_visible: bool) -> dict[str, Any]:
        """Keywords of `forward` that the attention function reads: lengths, their running sum, image blocks."""
        lengths = [len(sample.input_ids) for sample in samples]
        lengths = [sum(lengths)] if neighbours_visible else lengths
        offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self.device)
        blocks: tuple[torch.Tensor | None, ...] | None = None
        if self.family.image_blocks:
            image = self.model.config.image_token_id
            if neighbours_visible:
                blocks = (block_numbers(torch.cat([sample.input_ids for sample in samples]) == image),)
            else:
                blocks = tuple(block_numbers(sample.input_ids == image) for sample in samples)
        return {"pack_lengths": Lengths(lengths), "pack_offsets": offsets, "pack_blocks": ImageBlocks(blocks)}

    def _targets(self, samples: Sequence[PackSample]) -> tuple[torch.Tensor, torch.Tensor]:
        """Places in the pack, and what they predict: the next token of the same sample, where it has a label."""
        places, targets, start = [], [], 0
        for sample in samples:
            following = sample.labels[1:]
            trained = (following != IGNORED_LABEL).nonzero()[:, 0]
            places.append(trained + start)
            targets.append(following[trained])
            start += len(sample.labels)
        return torch.cat(places), torch.cat(targets)

    def _positions(self, samples: Sequence[PackSample]) -> torch.Tensor:
        """(3, 1, T) or (1, T): rotary positions of every sample, each from 0."""
        positions = [
            positions_of(self.model, s.input_ids.cpu(), None if s.grids is None else s.grids.cpu()) for s in samples
        ]
        return torch.cat(positions, dim=-1).to(self.device)

    def _encoder_outputs(self, samples: Sequence[PackSample]) -> Any:
        """Features of all samples in pack order, or None where no sample has images."""
        of_samples = [
            self._projected(tuple(map(self.share.features, sample.features)), sample.playback)
            for sample in samples
            if sample.features is not None
        ]
        if not of_samples:
            return None
        return encoder_outputs(tuple(torch.cat(tensors) for tensors in zip(*of_samples, strict=True)))

    def _projected(self, features: tuple[torch.Tensor, ...], playback: Playback | None) -> tuple[torch.Tensor, ...]:
        """Features as they are after the projector, which runs here where the cut is before it."""
        if self.cut is Cut.AFTER_PROJECTOR:
            return features
        return play(self.model, self.parts, features, playback)
