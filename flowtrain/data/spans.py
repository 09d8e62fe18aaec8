"""Which characters of a rendered conversation are trained: what the assistant says and the end of its turn.

1. A template with `{% generation %}` says so itself; its spans are taken as they are.
2. Any other template is rendered turn by turn. What is added between "the conversation so far plus the generation
   prompt" and "the same with the assistant's turn" is that turn; it ends after its last special token (the end of the
   turn) or, in a template without one, after its last character that is not white space.

The second way holds only if each rendering begins with the one before. A template that rewrites earlier turns, or the
prompt, does not show which tokens are the answer: `BadRow("template")`, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from flowtrain.data.errors import BadRow

Span = tuple[int, int]
Messages = Sequence[dict[str, Any]]
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def marks_generation(template: str) -> bool:
    """Whether a chat template names the assistant's part itself."""
    return _GENERATION.search(template) is not None


def spans_by_prefix(
    render: Callable[[Messages, bool], str], messages: Messages, text: str, special_tokens: Sequence[str], where: str
) -> list[Span]:
    """`render(messages, add_generation_prompt)`; `text` is the whole conversation rendered. Spans are [start, end)."""
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if number == 0:
            raise BadRow(
                "template", f"{where} begins with the assistant, and the chat template does not mark its answers"
            )
        prompt = render(messages[:number], True)
        so_far = render(messages[: number + 1], False)
        if not so_far.startswith(prompt) or not text.startswith(so_far):
            raise BadRow(
                "template",
                f"the chat template renders turn {number} of {where} in another way once more turns follow, so "
                "the tokens of the answer cannot be told; add {% generation %} to the template",
            )
        spans.append((len(prompt), len(prompt) + _turn_end(so_far[len(prompt) :], special_tokens)))
    return spans


def _turn_end(turn: str, special_tokens: Sequence[str]) -> int:
    """Length of an assistant's turn up to the end-of-turn token."""
    ends = [place + len(token) for token in special_tokens if token and (place := turn.rfind(token)) >= 0]
    return max(ends, default=len(turn.rstrip()))


def trained_mask(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Per token, whether its characters lie within one span. Both are ascending; an empty token is not trained.

    A token that reaches over the border of a span holds some of the prompt and is not trained.
    """
    mask = []
    current = 0
    for start, end in offsets:
        while current < len(spans) and spans[current][1] < end:
            current += 1
        mask.append(end > start and current < len(spans) and spans[current][0] <= start)
    return mask
