"""A path from outside is plain, without .., and inside the allowed roots, with its symlinks followed."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import InputError
from engine.security.paths import validate_path


def test_it_is_expanded_made_absolute_and_need_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    resolved = tmp_path.resolve()
    assert validate_path("~/models/Qwen", "model") == resolved / "models" / "Qwen"
    assert validate_path("models/Qwen", "model") == resolved / "models" / "Qwen"


def test_home_the_working_directory_and_the_state_directory_are_roots_by_default(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "me").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.chdir(tmp_path / "here")
    for place in (tmp_path / "me" / "a", tmp_path / "here" / "b", home / "runs"):
        assert validate_path(place, "checkpoint") == place.resolve()
    with pytest.raises(InputError, match="outside of the allowed directories"):
        validate_path(tmp_path / "elsewhere", "checkpoint")


@pytest.mark.parametrize(
    "path",
    [
        "",
        "a/../b",
        "..",
        "-rf",
        "a\0b",
        "a\nb",
        "$HOME/x",
        "$(id)",
        "`id`",
        "a;id",
        "a|b",
        "a" * 4097,
        "a\u202eb",
        "\ud800",
    ],
)
def test_forms_are_refused_in_one_printable_line(tmp_path: Path, path: str) -> None:
    with pytest.raises(InputError) as refused:
        validate_path(path, "sync script", roots=[tmp_path])
    assert str(refused.value).isprintable()
    assert "sync script" in str(refused.value)


def test_spaces_ampersands_and_quotes_are_plain_characters(tmp_path: Path) -> None:
    assert validate_path(tmp_path / "R&D it's" / "my model", "model", roots=[tmp_path]).name == "my model"


def test_a_symlink_that_stays_inside_is_followed_and_one_that_leaves_is_refused(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "real").mkdir()
    (root / "inner").symlink_to(root / "real")
    (root / "outer").symlink_to(outside)
    (root / "loop").symlink_to(root / "loop")
    assert validate_path(root / "inner" / "x", "checkpoint", roots=[root]) == (root / "real" / "x").resolve()
    with pytest.raises(InputError, match="a symlink in it leads to"):
        validate_path(root / "outer" / "x", "checkpoint", roots=[root])
    with pytest.raises(InputError):
        validate_path(root / "loop" / "x", "checkpoint", roots=[root])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(alphabet=string.printable + "\0\u202eé\ud800", max_size=40))
def test_whatever_passes_lies_inside(tmp_path: Path, text: str) -> None:
    try:
        found = validate_path(str(tmp_path / "root") + "/" + text, "model", roots=[tmp_path / "root"])
    except InputError:
        return
    assert found.is_relative_to((tmp_path / "root").resolve())
