"""The queue's start with the machine: only its own file or line changes."""

from __future__ import annotations

import contextlib
import plistlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.api import Engine
from engine.errors import StateError
from engine.queue import autostart
from engine.queue.autostart import Autostart, install, uninstall

CRONTAB = """#!/bin/sh
[ -e "$0.broken" ] && { echo "permission denied" >&2; exit 1; }
case "$1" in
-l) [ -e "$0.kept" ] || { echo "no crontab for me" >&2; exit 1; }; cat "$0.kept" ;;
-) cat > "$0.kept" ;;
esac
"""


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the crontab holds."""
    program = tmp_path / "crontab"
    program.write_text(CRONTAB)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(autostart, "_succeeds", lambda *_: False)
    return tmp_path / "crontab.kept"


def test_a_crontab_keeps_its_other_lines(kept: Path, home: Path) -> None:
    made = autostart.autostart(home)
    install(made)
    assert kept.read_text() == f"{made.text}\n" and made.text.startswith("@reboot env FLIGHTDECK_HOME=")
    kept.write_text("0 1 * * * backup\n" + kept.read_text())
    install(made)
    assert kept.read_text() == f"0 1 * * * backup\n{made.text}\n", "once"
    uninstall(made)
    assert kept.read_text() == "0 1 * * * backup\n"


def test_a_crontab_that_cannot_be_read_is_not_taken_for_an_empty_one(kept: Path, home: Path) -> None:
    kept.write_text("0 1 * * * backup\n")
    kept.with_name("crontab.broken").touch()
    with pytest.raises(StateError, match="permission denied"):
        install(autostart.autostart(home))
    assert kept.read_text() == "0 1 * * * backup\n"


def test_an_agent_and_a_unit_leave_supervisors_alone_and_are_removed(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(autostart, "_run", lambda command, given="": commands.append(command))
    monkeypatch.setattr(autostart, "_succeeds", lambda *_: True)
    for platform, holds in (("darwin", "AbandonProcessGroup"), ("linux", "KillMode=process")):
        monkeypatch.setattr(sys, "platform", platform)
        made = autostart.autostart(home, tmp_path)
        assert made.file is not None and holds in made.text
        install(made)
        assert made.file.read_text() == made.text
        assert platform != "darwin" or plistlib.loads(made.text.encode())["RunAtLoad"] is True
        uninstall(made)
        uninstall(made)
        assert not made.file.exists()
    assert [command[:3] for command in commands][-1] == ("systemctl", "--user", "disable")


def test_an_agent_that_is_loaded_is_unloaded_before_it_is_loaded_again(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []

    def launchctl(command: tuple[str, ...], given: str = "") -> None:
        name = command[-1].rpartition("/")[2].removesuffix(".plist")
        if (command[1] == "bootstrap") == (name in loaded):
            raise StateError("`launchctl` failed", why="5: Input/output error")
        loaded[:] = [name] if command[1] == "bootstrap" else []

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(autostart, "_run", launchctl)
    made = autostart.autostart(home, tmp_path)
    install(made)
    install(made)
    loaded.clear()
    install(made)
    assert len(loaded) == 1, "also one that somebody has unloaded"


def test_an_agent_is_loaded_once_the_one_before_has_ended(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, refused, refusals = [1e3], list[float](), 1

    def launchctl(command: tuple[str, ...], given: str = "") -> None:
        if command[1] == "bootstrap" and len(refused) < refusals:
            refused.append(now[0])
            raise StateError("`launchctl bootstrap` failed", why="37: Operation already in progress")

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(autostart, "_run", launchctl)
    monkeypatch.setattr(autostart, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    made = autostart.autostart(home, tmp_path)
    with pytest.raises(StateError, match="already in progress"):
        install(made)
    assert now == [1e3], "none was loaded"
    refusals = 4
    install(made)
    assert len(refused) == 4
    refusals = 10**6
    with pytest.raises(StateError, match="already in progress"):
        install(made)
    assert now[0] < 1e3 + 15


@pytest.mark.parametrize("refused", [False, True])
def test_the_queue_goes_on_when_its_agent_was_loaded_again(
    home: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    def load(_: Autostart) -> None:
        if refused:
            raise StateError("`launchctl bootstrap` failed")

    started: list[Path] = []
    monkeypatch.setattr("engine.api.queue.install", load)
    monkeypatch.setattr("engine.api.queue.start_runner", started.append)
    with contextlib.suppress(StateError):
        Engine(home).queue.install(Autostart("launchd", ""))
    assert started == [home]


def test_a_unit_has_its_paths_as_systemd_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys, "executable", "/opt/$v/python 3")
    monkeypatch.setattr(autostart, "_succeeds", lambda *_: True)
    made = autostart.autostart(Path('/h/a b/$HOME/50%/"q"/c\\d'), tmp_path)
    assert 'ExecStart="/opt/$v/python 3" "-P" "-m" "engine.api.queue_runner" ' in made.text
    assert ' "/h/a b/$$HOME/50%%/\\"q\\"/c\\\\d"\n' in made.text
    assert 'Environment="FLIGHTDECK_HOME=/h/a b/$HOME/50%%/\\"q\\"/c\\\\d"\n' in made.text


def test_an_agent_that_somebody_has_unloaded_is_removed_all_the_same(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(command: tuple[str, ...], given: str = "") -> None:
        raise StateError("`launchctl bootout` failed", why="No such process")

    monkeypatch.setattr(sys, "platform", "darwin")
    made = autostart.autostart(home, tmp_path)
    assert made.file is not None
    made.file.parent.mkdir(parents=True)
    made.file.write_text(made.text)
    monkeypatch.setattr(autostart, "_run", refuse)
    with pytest.raises(StateError, match="No such process"):
        uninstall(made)
    assert not made.file.exists()
