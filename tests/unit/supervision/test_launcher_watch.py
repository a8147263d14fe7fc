"""mlx.launch's words are read once, a little at a time, and its group is signalled only while it is its own."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from engine.supervision.launcher_watch import LauncherWatch, tail
from engine.worker import processes


def watch(log: Path, pid: int = 2**22 + 5, start: str = "1", offset: int = 0) -> LauncherWatch:
    return LauncherWatch(pid, start, log.with_name("in"), log, offset)


def test_each_end_is_told_once_also_when_its_line_comes_in_pieces(tmp_path: Path) -> None:
    log = tmp_path / "launcher.log"
    log.write_text("[WARN] Node with rank 7 exited with code 1\n")
    launcher = watch(log, offset=log.stat().st_size)
    told = []
    for piece in ("noise\n[WARN] Node with ra", "nk 1 exited with code 127 \x1b[0m", "\nmore"):
        with log.open("a") as file:
            file.write(piece)
        told.append(launcher.rank_ends())
    assert told == [[], [], [(1, 127)]]
    assert launcher.tail() == "noise\n[WARN] Node with rank 1 exited with code 127 \x1b[0m\nmore"


def test_no_log_yet_is_no_word(tmp_path: Path) -> None:
    assert watch(tmp_path / "launcher.log").rank_ends() == []
    assert watch(tmp_path / "launcher.log").tail() == ""


def test_a_tail_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"x" * 10_000 + b"\xff end")
    assert tail(tmp_path / "log", size=5) == "\ufffd end"


def test_a_later_process_with_its_pid_is_not_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        other = watch(tmp_path / "log", sleeper.pid, "another start")
        assert not other.alive()
        sent: list[int] = []
        monkeypatch.setattr(processes, "kill_group", lambda pgid, _number: sent.append(pgid))
        other.signal_group(signal.SIGKILL)
        assert sent == []
        own = watch(tmp_path / "log", sleeper.pid, processes.start_time(sleeper.pid) or "")
        assert own.alive() and own.alive(thorough=False)
        own.signal_group(signal.SIGKILL)
        assert sent == [sleeper.pid]
    finally:
        os.killpg(sleeper.pid, signal.SIGKILL)
        sleeper.wait()
