"""Processes of this machine: identity, nonce, groups; and on a recorded Mac, QoS class and sleep prevention."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


@pytest.mark.parametrize("linux", [True, False])
@pytest.mark.needs("linux")
def test_the_cpu_time_of_a_family_is_that_of_all_its_members(linux: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    child = "import subprocess as s; s.run(['sleep', '600'], start_new_session=True)"
    with subprocess.Popen([sys.executable, "-c", child], start_new_session=True) as leader:
        monkeypatch.setattr(processes, "_LINUX", linux)
        deadline = time.monotonic() + 30
        while len(processes.family_activity(leader.pid)[0]) < 2:
            assert time.monotonic() < deadline
        os.kill(leader.pid, signal.SIGSTOP)
        while not processes.family_activity(leader.pid)[1]:
            assert time.monotonic() < deadline
        used, _ = processes.family_activity(leader.pid)
        assert leader.pid in used and os.getpid() not in used and all(0 <= each < 60 for each in used.values())
        for pid in used:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.needs("linux")
def test_the_cpu_time_of_programs_that_have_ended_counts() -> None:
    child = "import time\nwhile time.process_time() < 0.2: pass"
    parent = f"import subprocess as s, sys; s.run([sys.executable, '-c', {child!r}]); print(flush=True); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", parent], stdin=pipe, stdout=pipe, start_new_session=True) as leader:
        assert leader.stdout is not None and leader.stdout.readline()
        own = sum(map(int, processes.linux_stat(leader.pid)[11:13])) / os.sysconf("SC_CLK_TCK")
        assert processes.family_activity(leader.pid)[0][leader.pid] >= own + 0.15
        leader.communicate(b"\n")


@pytest.mark.parametrize(
    ("text", "seconds"), [("0:01.50", 1.5), ("75:00.25", 4500.25), ("01:02:03", 3723.0), ("2-00:00:01", 172_801.0)]
)
def test_cpu_times_of_both_systems_are_read(text: str, seconds: float) -> None:
    assert processes.ps_time_s(text) == seconds


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


HIDDEN = """
import os, subprocess, sys, time
# As a shell with job control starts it, without environment: a group of its own in the same session.
child = subprocess.Popen(["sleep", "60"], env={}, process_group=0)
print(child.pid, flush=True)
child.wait() if sys.argv[1:] == ["stay"] else os._exit(0)
"""


@contextmanager
def hidden_child(nonce: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str, int]]:
    """A marked leader of a session, when it started, and the pid of its child, whose environment is empty."""
    argv = [sys.executable, "-c", HIDDEN, *arguments]
    environment = {**os.environ, processes.NONCE_VARIABLE: nonce}
    with subprocess.Popen(argv, env=environment, start_new_session=True, stdout=subprocess.PIPE) as leader:
        assert leader.stdout is not None
        start = processes.start_time(leader.pid) or ""
        child = int(leader.stdout.readline())
        try:
            yield leader, start, child
        finally:
            for pid in (leader.pid, child):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_a_child_without_environment_is_found_by_its_parent() -> None:
    nonce = uuid.uuid4().hex
    with hidden_child(nonce, "stay") as (leader, _, child):
        wait_until(lambda: processes.start_time(child) is not None)
        assert [each.pid for each in processes.with_nonce(nonce)] == [leader.pid]
        assert {each.pid for each in processes.with_family(processes.with_nonce(nonce), {})} == {leader.pid, child}
        assert processes.kill_with_nonce(nonce)
        wait_until(lambda: processes.start_time(child) is None)


def test_an_orphan_without_environment_is_found_by_the_session_that_its_leader_led() -> None:
    nonce = uuid.uuid4().hex
    with hidden_child(nonce) as (leader, start, child):
        assert leader.wait(20) == 0
        assert processes.with_nonce(nonce) == []
        assert [each.pid for each in processes.with_family(processes.with_nonce(nonce), {leader.pid: start})] == [child]


def test_a_pid_that_is_anothers_by_now_leads_nothing() -> None:
    with sleeper() as bystander:
        assert processes.with_family(processes.with_nonce(uuid.uuid4().hex), {bystander.pid: "another start"}) == []


@pytest.mark.needs("linux")
def test_on_a_mac_that_hides_every_environment_the_session_is_followed(as_on_a_mac: Path) -> None:
    as_on_a_mac.write_text(
        '#!/bin/sh\ncase "$1" in -axEww) exec /bin/ps axww -o pid=,stat=,command= ;; *) exec /bin/ps "$@" ;; esac\n'
    )
    nonce = uuid.uuid4().hex
    with hidden_child(nonce, "stay") as (leader, start, child):
        assert processes.with_nonce(nonce) == []
        found = processes.with_family(processes.with_nonce(nonce), {leader.pid: start})
        assert {each.pid for each in found} == {leader.pid, child}
        assert any("sleep 60" in each.command for each in found)


@pytest.mark.needs("linux")
@pytest.mark.parametrize("later_s", [60.0, -60.0])
def test_a_leader_whose_start_was_not_known_is_the_process_that_was_there_then(
    as_on_a_mac: Path, later_s: float
) -> None:
    as_on_a_mac.write_text('#!/bin/sh\nexec /bin/ps "$@"\n')
    with sleeper() as hidden:
        found = processes.with_family([], {hidden.pid: time.time() + later_s})
        assert [each.pid for each in found] == ([hidden.pid] if later_s > 0 else []), "a later one is another's"
    assert processes.with_family([], {hidden.pid: time.time() + later_s}) == []


@pytest.mark.parametrize("state", ["?E", "?Es", "U+", "Ss"])
def test_a_process_that_is_stuck_on_its_way_out_has_a_start(as_on_a_mac: Path, state: str) -> None:
    as_on_a_mac.write_text(f"#!/bin/sh\necho '{state:4} Sat Nov  1 10:00:01 2025    '\n")
    assert processes.start_time(os.getpid()) == "Sat Nov 1 10:00:01 2025"


@pytest.mark.parametrize("answer", ["", "exit 1", "echo 1 S launchd", "echo '1 S launchd'; exit 1"])
def test_a_list_without_the_asker_is_no_proof(as_on_a_mac: Path, answer: str) -> None:
    as_on_a_mac.write_text(f"#!/bin/sh\n{answer}\n")
    with pytest.raises(OSError, match="has not listed all processes"):
        processes.with_nonce("nonce")
    with pytest.raises(OSError, match="has not listed all processes"):
        processes.with_family([], {})


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
