"""Which tokens of a row are trained, found by rendering: the reference's own answer, not the runtime's.

    render(messages up to the answer, with generation prompt)   ids 0 … a
    render(messages up to and with the answer)                  ids 0 … b
    trained: a … the last special token before b (the end of the turn), so the line break after it is not

Each rendering goes through the whole processor with its images, and must be a prefix of the row's ids; a chat template
for which that does not hold (one that changes earlier turns) cannot be masked this way and is refused.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from flowtrain.data.sources import RawRow
from flowtrain.errors import DataError
from flowtrain.verify.rows import num_images, pictures

IGNORED = -100


def process(processor: Any, messages: list[dict[str, Any]], images: list[Any], prompt: bool) -> dict[str, torch.Tensor]:
    """Everything that the processor returns for these messages; tensors keep their leading dim of one row."""
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of numpy, inside some processors
        return dict(processor(text=[text], images=[images] if images else None, return_tensors="pt"))


def example(processor: Any, row: RawRow) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The model's inputs for one row, and labels of the same length as its ids (unshifted, -100 where not trained).

    Raises:
        DataError: an image that cannot be decoded, or a template whose answers cannot be told from the rest.
    """
    messages = list(row.messages)
    images = pictures(row)
    inputs = process(processor, messages, images, prompt=False)
    ids = inputs["input_ids"][0]
    labels = torch.full_like(ids, IGNORED)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = _prefix_length(processor, row, messages[:number], images, ids, prompt=True)
        end = _prefix_length(processor, row, messages[: number + 1], images, ids, prompt=False)
        end = _turn_end(processor, ids, start, end)
        labels[start:end] = ids[start:end]
    return inputs, labels


def _prefix_length(
    processor: Any, row: RawRow, messages: list[dict[str, Any]], images: list[Any], ids: torch.Tensor, prompt: bool
) -> int:
    if not messages:
        return 0
    prefix = process(processor, messages, images[: num_images(messages)], prompt)["input_ids"][0]
    if not torch.equal(ids[: len(prefix)], prefix):
        raise DataError(
            f"row {row.id!r}: its first {len(messages)} messages alone are not the beginning of the whole row "
            "under this chat template, so the answer's tokens cannot be told; use one that keeps earlier turns"
        )
    return len(prefix)


def _turn_end(processor: Any, ids: torch.Tensor, start: int, end: int) -> int:
    """Just behind the last special token of the turn; the whole turn when it has none."""
    special = set(processor.tokenizer.all_special_ids)
    for place in range(end, start, -1):
        if int(ids[place - 1]) in special:
            return place
    return end
