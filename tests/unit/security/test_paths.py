"""A path from outside is plain, without .., and inside the allowed roots, with its symlinks followed. What others can
change is no state of ours.
"""

from __future__ import annotations

import grp
import os
import pwd
import string
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.api import Engine
from engine.errors import InputError, StateError
from engine.node.bootstrap import access_fault
from engine.security.paths import make_home, validate_path

THEIRS = 65534
"""The id of another user than root."""


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


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o707, 0o1777])
@pytest.mark.parametrize("folder", ["", "outer"])
def test_a_home_that_others_can_write_is_refused_with_the_command_that_closes_it(
    tmp_path: Path, folder: str, mode: int
) -> None:
    home = tmp_path / "outer" / "home"
    home.mkdir(parents=True)
    opened = tmp_path / folder if folder else home
    opened.chmod(mode)
    if folder and mode & 0o1000:
        # As in /tmp, where nobody else can rename it.
        make_home(home)
        return
    for use in (make_home, Engine):
        with pytest.raises(StateError, match=f"other users can write there: chmod go-w {opened} ") as refused:
            use(home)
        assert str(refused.value).isprintable() and str(home) in str(refused.value)
    opened.chmod(mode & ~0o022)
    make_home(Engine(home).home)


@pytest.mark.needs("root")
def test_a_home_of_another_user_is_refused_to_root_too_also_behind_a_link(tmp_path: Path) -> None:
    home, link = tmp_path / "theirs" / "home", tmp_path / "link"
    home.mkdir(parents=True)
    os.chown(home.parent, THEIRS, THEIRS)
    link.symlink_to(home)
    for named in (home, link):
        with pytest.raises(StateError, match="theirs belongs to another user"):
            make_home(named)
    os.chown(home.parent, 0, 0)
    os.chown(link, THEIRS, THEIRS, follow_symlinks=False)
    with pytest.raises(StateError, match="link belongs to another user"):
        make_home(link)
    make_home(home)


@pytest.mark.needs("root")
@pytest.mark.parametrize(
    ("name", "members", "refused"), [("ana", [], False), ("ana", ["bea"], True), ("staff", [], True)]
)
def test_a_group_of_the_users_own_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, members: list[str], refused: bool
) -> None:
    """As many Linux systems have it, where the umask is 002."""
    (home := tmp_path / "home").mkdir()
    home.chmod(0o775)
    for folder in [home, *home.parents][:4]:
        os.chown(folder, THEIRS if folder == home else 0, 0)
    monkeypatch.setattr(os, "geteuid", lambda: THEIRS)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_name="ana"))
    monkeypatch.setattr(grp, "getgrgid", lambda _: SimpleNamespace(gr_name=name, gr_mem=members))
    assert bool(access_fault(home)) == refused
