"""Reading YAML with places: what a scalar is, where keys stand, what is refused."""

from __future__ import annotations

import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.config.document import Dumper, Place, read_document


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("2E3", 2000),
        ("1.5e-3", 1.5e-3),
        (".5", 0.5),
        ("-3", -3),
        ("0x10", 16),
        ("010", 10),
        ("1e300", 1e300),
        ("true", True),
        ("yes", "yes"),
        ("off", "off"),
        ("NO", "NO"),
        ("12:30", "12:30"),
        ("2024-01-02", "2024-01-02"),
        ("1_000", "1_000"),
        ("~", None),
        ("", None),
        ("'5'", "5"),
        ("[1, a]", [1, "a"]),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    document = read_document(f"key: {text}", "f")
    assert document.issues == []
    assert document.data == {"key": value}
    assert type(document.data["key"]) is type(value)


def test_not_a_number_and_infinity_are_floats() -> None:
    data = read_document("a: .nan\nb: -.inf", "f").data
    assert math.isnan(data["a"])
    assert data["b"] == -math.inf


def test_places_are_those_of_an_editor() -> None:
    places = read_document("# head\na:\n  b: 1\n  c: {d: 2}\nl: [5, 6]\n", "f.yaml").places
    assert places["a", "b"] == Place("f.yaml", 3, 3)
    assert str(places["a", "c", "d"]) == "f.yaml:4:7"
    assert places["l", "1"] == Place("f.yaml", 5, 8)


def test_keys_become_text() -> None:
    assert read_document("m: {0: 1, true: 2}", "f").data == {"m": {"0": 1, "true": 2}}


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("a: 1\na: 2\n", "f:2:1", "twice, first in line 1"),
        ("a: [1, 2", "f:1:9", "not closed"),
        ("a:\n\tb: 1", "f:2:1", "spaces, not tabs"),
        ("a: b: c", "f:1:5", "quotes around a text with a colon"),
        ("a: 1\n---\nb: 2\n", "f:2:1", "one document"),
        ("a: !!python/object:os.system x", "f:1:4", "tag"),
        ("a: !!int x", "f:1:4", "is no int"),
        ("a: \x07", "f:1:4", "U+0007"),
        ("? [a]\n: 1", "f:1:3", "plain text"),
        ("a: &a {b: *a}", "f:1:4", "alias"),
        ("a: *missing", "f:1:4", "undefined alias"),
    ],
)
def test_faults_have_a_place_and_a_hint(text: str, place: str, words: str) -> None:
    issues = [str(issue) for issue in read_document(text, "f").issues]
    assert len(issues) == 1
    assert issues[0].startswith(f"{place}: ")
    assert words in issues[0]


def test_all_faults_of_keys_are_collected() -> None:
    assert len(read_document("a: 1\na: 2\nb: !x 3\nc: {d: 1, d: 2}", "f").issues) == 3


def test_aliases_cannot_multiply_without_end() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    document = read_document("\n".join(lines), "f")
    assert any("repeats too much" in issue.text for issue in document.issues)


def test_deep_nesting_is_refused() -> None:
    assert read_document("[" * 1500 + "]" * 1500, "f").issues


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Cn", "Co"]), max_size=12)
    | st.sampled_from(["1e5", "yes", "off", "null", "~", "1_000", "0o7", "12:30", "2024-01-02", "<<", "=", ".inf"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(plain)
def test_what_is_written_reads_back(value: object) -> None:
    document = read_document(yaml.dump({"key": value}, Dumper=Dumper, allow_unicode=True), "f")
    assert document.issues == []
    assert document.data == {"key": value}


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused_and_never_raises(text: str) -> None:
    read_document(text, "f")
