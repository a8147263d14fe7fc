"""A name is letters, digits, - and _; all else is refused, and shown harmlessly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InputError
from engine.security.identifiers import is_identifier, make_identifier, safe_repr, validate_identifier


@pytest.mark.parametrize("name", ["ultra", "node_1", "Mac-Studio-2", "7", "_x", "a" * 64])
def test_a_name_comes_back_unchanged(name: str) -> None:
    assert validate_identifier(name, "node") == name


@pytest.mark.parametrize(
    "name", ["", "-rf", "a\n", "\na", "a b", "a;id", "$(id)", "a/b", "..", "a\0", "é", "１", "a" * 65, "a\u202e"]
)
def test_anything_else_is_refused_in_one_printable_line(name: str) -> None:
    with pytest.raises(InputError) as refused:
        validate_identifier(name, "node name")
    assert str(refused.value).isprintable()
    assert "node name" in str(refused.value)


@given(st.text())
def test_a_made_name_is_a_name(text: str) -> None:
    assert is_identifier(make_identifier(text, "job"))


def test_a_made_name_keeps_what_can_be_kept() -> None:
    assert make_identifier("Qwen3.5 4B (mlx)", "job") == "Qwen3-5-4B-mlx"


@given(
    st.recursive(st.none() | st.text() | st.integers(), lambda kids: st.lists(kids) | st.dictionaries(st.text(), kids))
)
def test_any_value_is_shown_in_80_printable_characters(value: object) -> None:
    text = safe_repr(value)
    assert len(text) <= 80
    assert text.isprintable()


def test_a_bomb_of_references_and_a_giant_number_are_shown_at_once() -> None:
    bomb: list[object] = ["lol"] * 10
    for _ in range(60):
        bomb = [bomb] * 10
    assert len(safe_repr(bomb)) <= 80
    assert safe_repr(1 << 100_000) == "<int>"
