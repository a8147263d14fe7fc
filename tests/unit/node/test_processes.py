"""Processes of this machine: identity, nonce, groups; and on a recorded Mac, QoS class and sleep prevention."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.node import processes
from tests.waiting import wait_until


@contextmanager
def sleeper(nonce: str | None = None) -> Iterator[subprocess.Popen[bytes]]:
    environment = dict(os.environ) | ({processes.NONCE_VARIABLE: nonce} if nonce else {})
    child = subprocess.Popen(["sleep", "60"], env=environment, start_new_session=True)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def test_boot_id_is_known_and_stays_the_same() -> None:
    assert processes.boot_id() == processes.boot_id() != ""


def test_a_process_is_alive_only_as_itself() -> None:
    with sleeper() as child:
        start = processes.start_time(child.pid)
        assert start is not None
        assert processes.alive(child.pid, start)
        assert not processes.alive(child.pid, start + "1")


def test_a_zombie_is_not_alive() -> None:
    with sleeper() as child:
        start = processes.start_time(child.pid)
        assert start is not None
        os.kill(child.pid, signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert processes.start_time(child.pid) is None
        assert not processes.alive(child.pid, start)


def test_a_pid_that_is_gone_has_no_start_time() -> None:
    with sleeper() as child:
        pass
    assert processes.start_time(child.pid) is None
    assert processes.start_time(-1) is None


def test_only_the_nonces_own_processes_are_listed() -> None:
    nonce = uuid.uuid4().hex
    with sleeper(nonce) as ours, sleeper(nonce + "0"), sleeper():
        wait_until(lambda: [p.pid for p in processes.with_nonce(nonce)] == [ours.pid])
        assert processes.with_nonce(nonce)[0].command == "sleep 60"
    assert processes.with_nonce(nonce) == []


def test_a_zombie_has_no_nonce() -> None:
    nonce = uuid.uuid4().hex
    with sleeper(nonce) as child:
        os.kill(child.pid, signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert processes.with_nonce(nonce) == []


def test_an_empty_nonce_is_refused() -> None:
    with pytest.raises(ValueError, match="nonce"):
        processes.with_nonce("")


def test_the_file_alone_kills_what_has_the_nonce() -> None:
    nonce = uuid.uuid4().hex
    with sleeper(nonce) as child:
        wait_until(lambda: processes.with_nonce(nonce) != [])
        subprocess.run([sys.executable, "-I", processes.__file__, nonce], check=True)
        assert child.wait() == -signal.SIGKILL


def test_what_cannot_be_killed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "with_nonce", lambda _nonce: [processes.Process(2**22 + 7, "stuck")])
    assert not processes.kill_with_nonce("nonce")


def test_a_group_gets_a_signal_while_it_has_a_member() -> None:
    with sleeper() as child:
        assert processes.kill_group(child.pid, signal.SIGKILL)
        child.wait()
        assert not processes.kill_group(child.pid, signal.SIGKILL)


@pytest.mark.parametrize("pgid", [-1, 0, 1])
def test_process_groups_0_and_1_are_refused(pgid: int) -> None:
    with pytest.raises(ValueError, match="process group"):
        processes.kill_group(pgid, 0)


@pytest.fixture
def as_on_a_mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`ps` instead of /proc, and a `ps` that says when a process has started in the zone of the moment, as macOS's."""
    ps = tmp_path / "ps"
    ps.write_text("#!/bin/sh\necho S $(date -d @1700000000 '+%a %b %d %T %Y')\n")
    ps.chmod(0o700)
    monkeypatch.setattr(processes, "_LINUX", False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return ps


@pytest.mark.usefixtures("as_on_a_mac")
@pytest.mark.needs("linux")
def test_a_mac_that_travels_finds_its_processes_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    start = processes.start_time(os.getpid())
    assert start == "Tue Nov 14 22:13:20 2023"
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    assert processes.alive(os.getpid(), start)


def test_where_ps_does_not_answer_only_a_missing_pid_is_dead(
    as_on_a_mac: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_a_mac.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(processes, "_TOOL_TIMEOUT_S", 0.2)
    assert processes.alive(os.getpid(), "whenever")
    with sleeper() as child:
        pass
    assert not processes.alive(child.pid, "whenever")


def test_everything_with_a_nonce_is_killed_and_nothing_else() -> None:
    nonce = uuid.uuid4().hex
    with sleeper(nonce) as marked, sleeper(nonce + "0") as bystander:
        wait_until(lambda: [p.pid for p in processes.with_nonce(nonce)] == [marked.pid])
        processes.kill_with_nonce(nonce)
        assert marked.wait(timeout=10) == -signal.SIGKILL
        assert bystander.poll() is None


class Recorded:
    def __init__(self, code: int = 0) -> None:
        self.calls: list[tuple[int, int]] = []
        self._code = code

    def pthread_set_qos_class_self_np(self, qos_class: int, relative: int) -> int:
        self.calls.append((qos_class, relative))
        return self._code


@pytest.mark.parametrize(
    ("platform", "code", "calls", "output"),
    [
        ("darwin", 0, [(0x21, 0)], "QOS_CLASS_USER_INTERACTIVE"),
        ("darwin", 22, [(0x21, 0)], "QOS_CLASS_USER_INTERACTIVE was refused with 22"),
        ("linux", 0, [], "not on macOS"),
    ],
)
def test_the_trainer_is_user_interactive_on_a_mac_alone(
    platform: str, code: int, calls: list[tuple[int, int]], output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Recorded(code)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    assert processes.raise_priority() == output
    assert library.calls == calls


@pytest.mark.parametrize(
    ("platform", "argv", "output"),
    [
        ("darwin", ["/usr/bin/caffeinate", "-i", "-w", "77"], "caffeinate -i"),
        ("linux", None, "not on macOS"),
    ],
)
def test_a_mac_stays_awake_while_the_process_lives(
    platform: str, argv: list[str] | None, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def start(argv: list[str], **_: Any) -> None:
        started.append(argv)

    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(subprocess, "Popen", start)
    assert processes.stay_awake(77, "-i") == output
    assert started == ([argv] if argv else [])


def test_a_mac_without_caffeinate_is_reported_and_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(argv: list[str], **_: Any) -> None:
        raise FileNotFoundError(2, "No such file or directory", argv[0])

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(subprocess, "Popen", start)
    assert "caffeinate" in processes.stay_awake(77, "-i")
