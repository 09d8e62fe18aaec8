"""One row as the model reads it: token ids with every image expanded, labels, and sizes from image headers.

    row ─▶ chat template ─▶ text, one place an image ─▶ each place the image's text ─▶ tokenizer ─▶ ids ─▶ SampleTokens
                              └──▶ answer spans ──────────── moved along ────────────────────────▶ labels
            images ─▶ headers ─▶ text, tokens and patches of each (`measure.py`) ─▶ SampleMeta

An image's text has one image token for each run of them, and ids are repeated: the image token is a special token, at
which every tokenizer splits; this is checked once against the processor itself. No pixel is decoded.

Invariants: an image span is never cut (a row that is too long is skipped whole); no image token and no prompt token has
a label; the first token has none either, because nothing predicts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from flowtrain.config.schema import DataConfig
from flowtrain.data.blocks import SampleTokens
from flowtrain.data.errors import BadRow
from flowtrain.data.measure import ImageText, Measure, expand
from flowtrain.data.pictures import picture_size
from flowtrain.data.sources.base import RawRow, Source
from flowtrain.data.spans import Messages, Span, marks_generation, spans_by_prefix, trained_mask
from flowtrain.errors import ConfigError, DataError
from flowtrain.types import ImageMeta, SampleMeta, SkippedRow

Policy = Literal["skip", "error"]


class SampleBuilder:
    """Builds samples of one source with one processor."""

    def __init__(
        self, measure: Measure, source: Source, config: DataConfig, max_row_tokens: int, on_long_row: Policy
    ) -> None:
        self.measure = measure
        self.processor = processor = measure.processor
        self.source = source
        self.config = config
        self.max_row_tokens = max_row_tokens
        self.on_long_row = on_long_row
        self._tokenizer = processor.tokenizer
        self._marks = marks_generation(self._template)
        self._special = [str(token) for token in self._tokenizer.all_special_tokens]

    def build(self, position: int, row: int, block: int, index: int) -> tuple[SampleMeta, SampleTokens] | SkippedRow:
        """The sample of `row`; a SkippedRow says why it cannot be used, or DataError where the policy is to stop."""
        row_id = f"row-{row}"
        try:
            raw = self.source.row(row)
            row_id = raw.id
            tokens, images = self.read(raw)
            trained = int((tokens.labels >= 0).sum())
            vision = sum(image.tokens for image in images)
            self._check_length(raw, len(tokens.input_ids), vision)
            if trained == 0:
                raise BadRow("no-trained-token", f"the chat template leaves no answer in {raw.where}")
        except BadRow as error:
            return self._skipped(position, row, error.row_id or row_id, error)
        text = len(tokens.input_ids) - vision
        return SampleMeta.of(position, row, row_id, text, vision, trained, images, block, index), tokens

    def read(self, raw: RawRow) -> tuple[SampleTokens, tuple[ImageMeta, ...]]:
        """Token ids, labels and image sizes of a row of any length; BadRow when it cannot be read."""
        images, texts = self._images(raw)
        text = self._render(raw.messages, False, raw)
        text, spans = self._expanded(raw, text, self._spans(raw, text), texts)
        encoded = self._tokenizer(
            text,
            add_special_tokens=not self._begins_with_bos(text),
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        ids = np.asarray(encoded["input_ids"], dtype=np.int64)
        trained = np.asarray(trained_mask(encoded["offset_mapping"], spans), dtype=np.bool_)
        self._refuse_other_media(raw, ids)
        places = ids == self.measure.shape.image_token_id
        runs = [length for text in texts for length in text.runs]
        if int(places.sum()) != len(runs):
            raise BadRow("image-count", f"the text of {raw.where} holds {self.measure.image_token!r}")
        repeats = np.ones(len(ids), dtype=np.int64)
        repeats[places] = runs
        trained &= ~places
        if len(trained):
            trained[0] = False
        return SampleTokens.of(np.repeat(ids, repeats), np.repeat(trained, repeats)), images

    @property
    def _template(self) -> str:
        template = self.processor.chat_template
        chosen = template.get("default") if isinstance(template, dict) else template
        if not chosen:
            raise ConfigError("model.path: the processor has several chat templates and none is named `default`")
        return str(chosen)

    def _images(self, raw: RawRow) -> tuple[tuple[ImageMeta, ...], tuple[ImageText, ...]]:
        """Sizes from the headers, and what stands for each image in this row."""
        sizes = [picture_size(ref, self.config.max_image_pixels) for ref in raw.images]
        if not sizes:
            return (), ()
        try:
            texts = self.measure.images(sizes)
        except (ValueError, ZeroDivisionError) as error:
            named = ", ".join(f"{ref.label} of {w}×{h}" for ref, (h, w) in zip(raw.images, sizes, strict=True))
            raise BadRow("image-shape", f"the processor refuses {named} pixels: {error}") from error
        for ref, (height, width), text in zip(raw.images, sizes, texts, strict=True):
            self._check_pixels(ref.label, height, width, text.patches)
        pairs = self.measure.shape.vision.attended_pairs
        images = [
            ImageMeta(height, width, text.tokens, text.patches, pairs(text.patches))
            for (height, width), text in zip(sizes, texts, strict=True)
        ]
        return tuple(images), texts

    def _check_pixels(self, label: str, height: int, width: int, patches: int) -> None:
        prepared = patches * int(self.processor.image_processor.patch_size) ** 2 if self.config.max_pixels else 0
        if self.config.max_pixels and prepared > self.config.max_pixels:
            raise BadRow(
                "image-shape",
                f"{label} of {width}×{height} pixels is so narrow that the processor makes {prepared} of it, "
                f"more than data.max_pixels ({self.config.max_pixels})",
            )

    def _expanded(
        self, raw: RawRow, text: str, spans: list[Span], texts: Sequence[ImageText]
    ) -> tuple[str, list[Span]]:
        """The text with every image's place taken by the image's text, and the spans moved along."""
        placeholder = str(self.processor.image_token)
        pieces = text.split(placeholder)
        if len(pieces) - 1 != len(texts):
            raise BadRow(
                "image-count",
                f"{raw.where} has {len(texts)} images and {len(pieces) - 1} image tokens once rendered: "
                f"its text holds {placeholder!r}, or the chat template leaves images out",
            )
        return expand(pieces, len(placeholder), spans, texts)

    def _render(self, messages: Messages, prompt: bool, raw: RawRow) -> str:
        from jinja2 import TemplateError

        try:
            text = self.processor.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)
        except (TemplateError, ValueError, TypeError, KeyError, IndexError) as error:
            raise BadRow("template", f"the chat template refuses {raw.where}: {error}") from error
        return str(text)

    def _spans(self, raw: RawRow, text: str) -> list[Span]:
        answers = [message["content"] for message in raw.messages if message["role"] == "assistant"]
        if not any(part.get("text", "").strip() for content in answers for part in content):
            what = f"{len(answers)} empty turns" if answers else "no turn"
            raise BadRow("no-trained-token", f"{raw.where} has {what} of the assistant, so nothing to train")
        if not self._marks:
            return spans_by_prefix(
                lambda messages, prompt: self._render(messages, prompt, raw),
                raw.messages,
                text,
                self._special,
                raw.where,
            )
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered, spans = render_jinja_template(
            conversations=[list(raw.messages)],
            chat_template=self._template,
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        if rendered[0] != text:
            raise BadRow(
                "template", f"the chat template renders {raw.where} in two ways, so its answers cannot be told"
            )
        return [(int(start), int(end)) for start, end in spans[0]]

    def _begins_with_bos(self, text: str) -> bool:
        bos = self._tokenizer.bos_token
        return bos is not None and text.startswith(bos)

    def _refuse_other_media(self, raw: RawRow, ids: npt.NDArray[np.int64]) -> None:
        """A video or audio token in the text would have the model look for inputs that nobody makes."""
        for kind in ("video", "audio"):
            token_id = getattr(self.processor, f"{kind}_token_id", None)
            if token_id is not None and token_id != self.measure.shape.image_token_id and (ids == token_id).any():
                token = getattr(self.processor, f"{kind}_token", kind)
                raise BadRow("bad-messages", f"the text of {raw.where} holds {token!r}, and {kind} is not supported")

    def _check_length(self, raw: RawRow, tokens: int, vision: int) -> None:
        if tokens > self.max_row_tokens:
            raise BadRow(
                "too-long",
                f"{raw.where} has {tokens} tokens ({vision} of images), a row may have {self.max_row_tokens} "
                "(packing.max_tokens, data.max_seq_len)",
            )

    def _skipped(self, position: int, row: int, row_id: str, error: BadRow) -> SkippedRow:
        too_long = error.reason == "too-long"
        policy = self.on_long_row if too_long else self.config.on_bad_sample
        if policy == "error":
            key = "packing.on_long_row" if too_long else "data.on_bad_sample"
            raise DataError(f"row {row_id}: {error.detail} ({error.reason}); repair it, or set {key}: skip") from error
        return SkippedRow(position, row, row_id, error.reason, error.detail)


def check_expansion(measure: Measure) -> None:
    """ConfigError unless rows measured from sizes have exactly the ids that the processor gives for real pictures.

    Tried with one image, and with two of different sizes, amid text.
    """
    from PIL import Image

    processor = measure.processor
    side = 4 * _patch_side(processor)
    probes = ([(side, side)], [(side, side), (side, 3 * side)])
    for sizes in probes:
        text = "a\n" + "".join(f"{processor.image_token}\nb" for _ in sizes)
        try:
            pictures = [Image.new("RGB", (width, height), (90, 60, 30)) for height, width in sizes]
            whole = list(processor(text=[text], images=[pictures])["input_ids"][0])
            ours = _probe_ids(measure, text, sizes)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise ConfigError(f"model.path: {type(processor).__name__} cannot prepare an image: {error}") from error
        if whole != ours:
            raise ConfigError(
                f"model.path: {type(processor).__name__} expands images in a form of its own ({len(whole)} tokens "
                f"instead of {len(ours)} for a probe of {len(sizes)}); this model family is not supported yet"
            )


def _patch_side(processor: Any) -> int:
    side = getattr(processor.image_processor, "patch_size", None)
    return side if isinstance(side, int) else 16


def _probe_ids(measure: Measure, text: str, sizes: Sequence[tuple[int, int]]) -> list[int]:
    images = measure.images(sizes)
    placeholder = measure.processor.image_token
    whole, _ = expand(text.split(placeholder), len(placeholder), [], images)
    runs = iter([length for image in images for length in image.runs])
    ids: list[int] = []
    for token in measure.processor.tokenizer(whole)["input_ids"]:
        ids.extend([token] * (next(runs, 1) if token == measure.shape.image_token_id else 1))
    return ids
