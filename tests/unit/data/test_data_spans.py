"""Answer spans: by prefix where a template does not mark them, and from characters to tokens."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.data.errors import BadRow
from flowtrain.data.spans import Messages, marks_generation, spans_by_prefix, trained_mask

SPECIAL = ("<s>", "</s>")


def render(messages: Messages, prompt: bool) -> str:
    text = "".join(f"<s>{m['role']}:{m['content']}</s>\n" for m in messages)
    return text + ("<s>assistant:" if prompt else "")


def turns(*contents: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]


@given(st.lists(st.text(alphabet="ab\n é🙂", max_size=6), min_size=1, max_size=6))
def test_spans_are_the_answers_and_their_end(contents: list[str]) -> None:
    messages = turns(*contents)
    text = render(messages, False)
    spans = spans_by_prefix(render, messages, text, SPECIAL, "row 1")
    assert [text[start:end] for start, end in spans] == [content + "</s>" for content in contents[1::2]]


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    def rewriting(messages: Messages, prompt: bool) -> str:
        return render([m if m is messages[-1] else {**m, "content": "…"} for m in messages], prompt)

    messages = turns("question", "answer", "and?", "more")
    with pytest.raises(BadRow, match="in another way") as caught:
        spans_by_prefix(rewriting, messages, rewriting(messages, False), SPECIAL, "row 1")
    assert caught.value.reason == "template"


def test_a_first_turn_of_the_assistant_needs_a_marking_template() -> None:
    messages = [{"role": "assistant", "content": "Hello"}]
    with pytest.raises(BadRow, match="begins with the assistant"):
        spans_by_prefix(render, messages, render(messages, False), SPECIAL, "row 1")


def test_without_special_tokens_the_turn_ends_before_white_space() -> None:
    messages = turns("q", "answer  ")
    plain = "user q\nassistant answer  \n"

    def plainly(some: Messages, prompt: bool) -> str:
        return plain if len(some) == 2 else "user q\nassistant " if prompt else "user q\n"

    ((start, end),) = spans_by_prefix(plainly, messages, plain, (), "row 1")
    assert plain[start:end] == "answer"


@pytest.mark.parametrize(
    ("template", "marks"),
    [("{% generation %}", True), ("{%- generation -%}", True), ("{% if add_generation_prompt %}", False), ("", False)],
)
def test_marks_generation(template: str, marks: bool) -> None:
    assert marks_generation(template) is marks


@given(data=st.data(), length=st.integers(0, 40))
def test_mask_is_what_a_search_of_all_spans_gives(data: st.DataObject, length: int) -> None:
    cuts = st.lists(st.integers(0, length), max_size=12).map(sorted)
    tokens = data.draw(cuts)
    borders = sorted(set(data.draw(cuts)))
    offsets = list(pairwise(tokens))
    spans = list(zip(borders[::2], borders[1::2], strict=False))
    expected = [end > start and any(s <= start and end <= e for s, e in spans) for start, end in offsets]
    assert trained_mask(offsets, spans) == expected
