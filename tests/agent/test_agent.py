"""The agent, as a process with its two pipes: its requests, the ranks it watches, the files it sends, and its end."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar
from unittest.mock import ANY, Mock

import pytest

from engine.node import agent, processes
from engine.node.agent import Agent
from engine.node.attempt_watch import AttemptWatch, WatchedRank
from engine.protocol.attempt import (
    NONCE_ENV,
    ExitRecord,
    Identity,
    NodeFiles,
    heartbeat,
    heartbeat_time,
    lease_clock,
    write_atomic,
)
from engine.protocol.messages import (
    CancelRequest,
    CommandRequest,
    Decoder,
    FileData,
    Heartbeat,
    HeartbeatAck,
    Hello,
    ListProcesses,
    Message,
    ProbeRequest,
    ProcessList,
    RankCommand,
    RankEnded,
    RankStarted,
    ReadFile,
    RequestEnded,
    RequestInput,
    RequestOutput,
    Watch,
    encode,
)
from tests.agent.keeper_runner import stage_bundle
from tests.damage import stalled
from tests.machine import WATCHED
from tests.waiting import wait_until

Kind = TypeVar("Kind")


def read_within(descriptor: int, limit_s: float, size: int = 65_536) -> bytes:
    """The next bytes of a pipe; AssertionError when none come in time."""
    assert select.select([descriptor], [], [], limit_s)[0], f"nothing within {limit_s:g} s"
    return os.read(descriptor, size)


class Head:
    """The other end of an agent's pipes."""

    def __init__(self, directory: Path) -> None:
        self.files = NodeFiles(directory / "attempt")
        self.nonce = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engine.node.agent"],
            cwd=stage_bundle(directory / "bundle"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._decoder = Decoder()
        self._received: list[Message] = []
        self.data: dict[str, bytes] = {}

    def send(self, *messages: Message) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"".join(map(encode, messages)))

    def watch(self, *ranks: int, known: tuple[Identity, ...] = ()) -> Hello:
        self.send(Watch(str(self.files.directory), self.nonce, list(ranks), list(known)))
        return self.receive(Hello)

    def receive(self, *kinds: type[Kind]) -> Kind:
        """Await the next message of these kinds; data that come before it are kept."""
        assert self.process.stdout is not None
        while True:
            while self._received:
                message = self._received.pop(0)
                if isinstance(message, FileData):
                    self.data[message.file] = self.data.get(message.file, b"") + message.data
                if isinstance(message, kinds):
                    return message
            chunk = read_within(self.process.stdout.fileno(), 60)
            assert chunk, f"the agent has left before {kinds}"
            self._received += list(self._decoder.feed(chunk))

    def receive_all_of(self, name: str, size: int) -> bytes:
        while len(self.data.get(name, b"")) < size:
            self.receive(FileData)
        return self.data[name]

    def list_processes(self, number: int, *, kill: bool = False) -> ProcessList:
        self.send(ListProcesses(number, kill=kill))
        listed = self.receive(ProcessList)
        assert listed.number == number
        return listed

    def close(self) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        code = self.process.wait(20)
        self.process.stdout.close()
        return code


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    head = Head(tmp_path)
    yield head
    if head.process.poll() is None:
        head.process.kill()
    head.process.wait()
    for pipe in (head.process.stdin, head.process.stdout):
        if pipe is not None:
            pipe.close()


@pytest.fixture
def fifo(head: Head) -> Iterator[int]:
    """A keeper's FIFO in the attempt's folder, open for reading; nobody keeps."""
    head.files.directory.mkdir()
    os.mkfifo(head.files.control(0))
    opened = os.open(head.files.control(0), os.O_RDWR)
    yield opened
    os.close(opened)


@pytest.fixture
def sleeper(head: Head) -> Iterator[subprocess.Popen[bytes]]:
    """A process with the attempt's nonce that leads its group."""
    environment = {**os.environ, NONCE_ENV: head.nonce}
    argv = [sys.executable, "-c", "import time; time.sleep(60)", WATCHED]
    process = subprocess.Popen(argv, env=environment, start_new_session=True)
    yield process
    process.kill()
    process.wait()


def identity_of(process: subprocess.Popen[bytes], nonce: str) -> Identity:
    start = processes.start_time(process.pid) or ""
    return Identity(
        0, "r", 1, nonce, processes.boot_id(), process.pid, start, process.pid, process.pid, start, time.time()
    )


def test_it_leaves_when_its_stdin_ends_and_has_no_nonce(head: Head) -> None:
    hello = head.watch(0)
    assert hello.boot_id == processes.boot_id()
    assert head.list_processes(1).processes == [], "neither is it found itself"
    assert head.close() == 0


def test_heartbeats_and_commands_reach_the_keepers_fifo(head: Head, fifo: int) -> None:
    head.watch(0)
    head.send(Heartbeat(1, 0))
    assert head.receive(HeartbeatAck).number == 1
    assert heartbeat_time(read_within(fifo, 20)) == pytest.approx(lease_clock(), abs=2.0)
    head.send(RankCommand(0, "stop"))
    assert read_within(fifo, 20) == b"stop\n"
    head.send(RankCommand(7, "stop"), Heartbeat(20, 1))
    assert head.receive(HeartbeatAck).number == 20
    os.set_blocking(fifo, False)
    with pytest.raises(BlockingIOError):
        # A head that has missed nineteen acknowledgements believes that the lease runs out.
        os.read(fifo, 100)


def test_heartbeats_that_lay_unread_while_the_node_slept_renew_no_lease(head: Head, fifo: int) -> None:
    head.watch(0)
    head.send(Heartbeat(1, 0))
    assert head.receive(HeartbeatAck).number == 1
    head.process.send_signal(signal.SIGSTOP)
    # On a busy machine the signal may take a while.
    status = ["ps", "-o", "stat=", "-p", str(head.process.pid)]
    wait_until(lambda: subprocess.run(status, capture_output=True, check=True).stdout.startswith(b"T"))
    slept_at = lease_clock()
    head.send(Heartbeat(2, 1, 1))
    time.sleep(2.5)
    head.process.send_signal(signal.SIGCONT)
    # Sent before the head can know that the node is awake.
    head.send(Heartbeat(3, 1, 1), Heartbeat(4, 2, 1))
    assert [head.receive(HeartbeatAck).number for _ in range(3)] == [2, 3, 4]
    head.send(RankCommand(0, "stop"))
    received = b""
    while not received.endswith(b"stop\n"):
        received += read_within(fifo, 20)
    renewed = [heartbeat_time(line) for line in received.splitlines()[:-1]]
    # To the millisecond, as a heartbeat is written.
    assert renewed and all(at is not None and at <= slept_at + 0.001 for at in renewed), (renewed, slept_at)
    head.send(Heartbeat(5, 4, 4))
    renewed_at = heartbeat_time(read_within(fifo, 20))
    assert renewed_at is not None and renewed_at > slept_at + 2.5


def test_a_rank_is_seen_to_start_and_to_end(head: Head, sleeper: subprocess.Popen[bytes]) -> None:
    head.watch(0)
    head.files.directory.mkdir()
    identity = identity_of(sleeper, head.nonce)
    write_atomic(head.files.identity(0), json.dumps(asdict(identity)))
    assert head.receive(RankStarted).identity == identity
    head.files.log(0).write_bytes(b"its last words\n\xff")
    head.files.events(0).write_text('{"event": "end", "rank": 0, "completed": true}\n')
    record = ExitRecord(0, 1, 3, None, 0.0, 16)
    write_atomic(head.files.exit(0), json.dumps(asdict(record)))
    ended = head.receive(RankEnded)
    assert ended.record == record
    assert ended.output.log == "its last words\n�"
    assert ended.output.end is not None and ended.output.end["completed"] is True


def test_a_keeper_that_is_gone_has_vanished_also_when_the_host_has_lost_its_files(
    head: Head, sleeper: subprocess.Popen[bytes]
) -> None:
    identity = identity_of(sleeper, head.nonce)
    sleeper.kill()
    sleeper.wait()
    head.watch(0, known=(identity,))
    assert head.receive(RankEnded).record is None


def test_what_is_left_is_listed_and_killed_and_nothing_starts_any_more(
    head: Head, sleeper: subprocess.Popen[bytes]
) -> None:
    head.files.directory.mkdir()
    head.watch(0)
    assert [pid for pid, _ in head.list_processes(1).processes] == [sleeper.pid]
    assert sleeper.poll() is None and not head.files.fenced.exists()
    assert head.list_processes(2, kill=True).processes != []
    sleeper.wait(20)
    assert head.files.fenced.exists()
    assert head.list_processes(3, kill=True).processes == []


def test_what_shows_no_nonce_is_listed_by_its_ranks_session(head: Head, sleeper: subprocess.Popen[bytes]) -> None:
    hidden = subprocess.Popen(["sleep", "60"], env={}, start_new_session=True)
    known = replace(identity_of(hidden, head.nonce), keeper_pid=sleeper.pid)
    known = replace(known, keeper_start=processes.start_time(sleeper.pid) or "")
    head.watch(0, known=(known,))
    assert {pid for pid, _ in head.list_processes(1).processes} == {sleeper.pid, hidden.pid}
    head.list_processes(2, kill=True)
    assert hidden.wait(20) == -signal.SIGKILL and sleeper.wait(20) == -signal.SIGKILL
    assert head.list_processes(3).processes == []


@pytest.mark.needs("linux")
def test_a_program_whose_keeper_could_not_tell_its_start_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a Mac that hides every environment."""
    ps = tmp_path / "ps"
    ps.write_text('#!/bin/sh\n[ "$1" != -axEww ] || set -- axww -o pid=,stat=,command=\nexec /bin/ps "$@"\n')
    ps.chmod(0o700)
    monkeypatch.setattr(processes, "_LINUX", False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    hidden = subprocess.Popen(["sleep", "60"], env={}, start_new_session=True)
    try:
        # Linux's ps may be wrong by a second.
        known = replace(identity_of(hidden, "nonce"), keeper_start="", trainer_start="", started_at=time.time() + 2.0)
        sent: list[Message] = []
        watch = AttemptWatch(Watch(str(tmp_path), "nonce", [0], [known]), known.boot_id, sent.append)
        watch.list_processes(ListProcesses(1, kill=False))
        assert [[pid for pid, _ in each.processes] for each in sent if isinstance(each, ProcessList)] == [[hidden.pid]]
    finally:
        hidden.kill()
        hidden.wait()


def test_where_a_leader_may_be_anothers_only_what_is_marked_is_killed_and_nothing_proved(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = identity_of(sleeper, "nonce")
    marked = processes.Process(sleeper.pid, "sleep 60")
    monkeypatch.setattr(processes, "with_nonce", Mock(return_value=[marked]))
    monkeypatch.setattr(processes, "start_time", Mock(side_effect=subprocess.TimeoutExpired("ps", 10)))
    sent: list[Message] = []
    watch = AttemptWatch(Watch(str(tmp_path), "nonce", [0], [known]), known.boot_id, sent.append)
    watch.list_processes(ListProcesses(1, kill=True))
    assert sleeper.wait(20) == -signal.SIGKILL
    assert sent == []


def test_a_file_comes_as_far_as_was_requested_and_byte_for_byte(head: Head) -> None:
    head.files.directory.mkdir()
    content = bytes(range(256)) * 2000
    head.watch(0)
    head.send(ReadFile("rank0.log", 100_000, 0))
    assert head.receive(FileData).end is True, "there is nothing yet"
    head.files.log(0).write_bytes(content)
    assert head.receive_all_of("rank0.log", 100_000) == content[:100_000]
    head.send(Heartbeat(1, 0))
    head.receive(HeartbeatAck)
    head.send(ReadFile("rank0.log", 10_000_000))
    assert head.receive_all_of("rank0.log", len(content)) == content
    with head.files.log(0).open("ab") as log:
        log.write(b"more")
    assert head.receive_all_of("rank0.log", len(content) + 4) == content + b"more"


def test_a_flood_in_one_file_does_not_starve_another(head: Head) -> None:
    head.files.directory.mkdir()
    head.files.log(0).write_bytes(b"x" * 30_000_000)
    head.files.events(0).write_bytes(b"e" * 1000)
    head.watch(0)
    head.send(ReadFile("rank0.log", 30_000_000, 0), ReadFile("rank0.events.jsonl", 1_000_000, 0))
    head.receive_all_of("rank0.events.jsonl", 1000)
    assert len(head.data["rank0.log"]) < 2_000_000


def test_a_head_that_takes_nothing_does_not_keep_the_agent_from_its_keepers(head: Head, fifo: int) -> None:
    head.files.log(0).write_bytes(b"x" * 10_000_000)
    head.watch(0)
    head.send(ReadFile("rank0.log", 10_000_000, 0))
    time.sleep(0.5)
    head.send(Heartbeat(1, 0))
    assert heartbeat_time(read_within(fifo, 20)) == pytest.approx(lease_clock(), abs=2.0)


def test_a_disk_that_stalls_ends_no_lease(head: Head, fifo: int) -> None:
    """A log that is a FIFO nobody writes: opening it never ends."""
    os.mkfifo(head.files.log(0))
    head.watch(0)
    head.list_processes(0)
    head.send(ReadFile("rank0.log", 1000, 0))
    time.sleep(0.5)
    for number in range(1, 4):
        head.send(ListProcesses(number, kill=False), Heartbeat(number, number - 1))
        assert head.receive(HeartbeatAck, ProcessList) == HeartbeatAck(number, ANY)
        assert heartbeat_time(read_within(fifo, 20)) == pytest.approx(lease_clock(), abs=2.0)


@pytest.mark.parametrize("name", ["spec.json", "../1/spec.json", "rank0.in", "/etc/passwd", "rank0.log/../spec.json"])
def test_only_the_ranks_output_can_be_read(head: Head, name: str) -> None:
    head.files.directory.mkdir()
    (head.files.directory / "spec.json").write_text("secret")
    head.watch(0)
    head.send(ReadFile(name, 1000, 0), ListProcesses(1, kill=False))
    assert head.receive(ProcessList).sizes == {}
    # Files are read after the messages have been served: only in a second round would their data have come.
    head.list_processes(2)
    assert head.data == {}


def test_a_size_that_is_not_known_is_not_reported(head: Head) -> None:
    head.files.directory.mkdir()
    head.files.log(0).symlink_to(head.files.log(0))
    head.watch(0)
    head.send(ReadFile("rank0.log", 1000, 0), ListProcesses(1, kill=False))
    assert head.receive(ProcessList).sizes == {}


def test_it_leaves_when_nothing_is_received_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "SILENCE_S", 0.3)
    receive, speak = os.pipe()
    listen, send = os.pipe()
    begun = time.monotonic()
    assert Agent(receive, send).run() == 0
    assert 0.2 < time.monotonic() - begun < 5
    os.close(speak)
    wait_until(lambda: all(thread.name != "receive" for thread in threading.enumerate()))
    for descriptor in (receive, listen, send):
        os.close(descriptor)


@pytest.mark.needs("linux")
def test_idle_it_costs_next_to_nothing(head: Head, sleeper: subprocess.Popen[bytes]) -> None:
    head.files.directory.mkdir()
    write_atomic(head.files.identity(0), json.dumps(asdict(identity_of(sleeper, head.nonce))))
    head.watch(0)
    for name in ("rank0.log", "rank0.events.jsonl"):
        head.send(ReadFile(name, 1_000_000, 0))

    def cpu_s() -> float:
        threads = Path(f"/proc/{head.process.pid}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9

    head.receive(RankStarted)
    begun, before = time.monotonic(), cpu_s()
    for number in range(1, 5):
        head.send(Heartbeat(number, number - 1))
        head.receive(HeartbeatAck)
        time.sleep(0.5)
    share = (cpu_s() - before) / (time.monotonic() - begun)
    assert share < 0.02, f"{share:.2%} of a core"


def output_of(head: Head, *requests: Message) -> dict[int, tuple[bytes, RequestEnded]]:
    """What these requests print, and how they end."""
    head.send(*requests)
    output: dict[int, bytes] = {}
    ended: dict[int, RequestEnded] = {}
    while len(ended) < len(requests):
        message = head.receive(RequestOutput, RequestEnded)
        if isinstance(message, RequestOutput):
            output[message.request] = output.get(message.request, b"") + message.data
        elif isinstance(message, RequestEnded):
            ended[message.request] = message
    return {number: (output.get(number, b""), end) for number, end in ended.items()}


def test_probes_run_side_by_side_and_one_that_fails_says_how(head: Head) -> None:
    found = output_of(
        head,
        ProbeRequest(1, "addresses", ["127.0.0.1"]),
        ProbeRequest(2, "model", []),
        ProbeRequest(3, "../keeper", []),
    )
    assert json.loads(found[1][0]) == {"problems": [None]}
    assert (found[1][1].exit_code, found[2][1].exit_code, found[3][1].exit_code) == (0, 1, 2)
    assert found[2][1].stderr.startswith("TypeError")
    assert found[3][1].stderr == "there is no probe '../keeper'"


def test_a_command_has_no_input_and_runs_in_the_home(head: Head) -> None:
    found = output_of(
        head,
        CommandRequest(1, ["/bin/sh", "-c", "cat; pwd; echo no >&2; exit 3"]),
        CommandRequest(2, ["/no/such/program"]),
    )
    assert found[1] == (f"{Path.home()}\n".encode(), RequestEnded(1, 3, "no\n"))
    assert found[2][1].exit_code == 127


def test_a_cancelled_command_ends_with_its_children(head: Head) -> None:
    head.send(CommandRequest(1, ["/bin/sh", "-c", "sleep 600 & echo $!; wait"]))
    child = int(head.receive(RequestOutput).data)
    head.send(CancelRequest(1))
    assert head.receive(RequestEnded).exit_code == -9
    wait_until(lambda: processes.start_time(child) is None)


def test_a_probe_that_goes_on_reads_its_stdin_and_ends_with_it(head: Head) -> None:
    head.send(ProbeRequest(1, "lease", [f"nonce-{os.getpid()}", "60"]))
    assert json.loads(head.receive(RequestOutput).data) == {"held": True}
    head.send(RequestInput(1, b"end\n"))
    assert json.loads(head.receive(RequestOutput).data) == {"left": []}
    assert head.receive(RequestEnded).exit_code == 0
    head.send(ProbeRequest(2, "listen", ["60", "127.0.0.1"]))
    head.receive(RequestOutput)
    head.send(CancelRequest(2))
    assert head.receive(RequestEnded) == RequestEnded(2, 0, "")


def test_a_probe_that_hangs_holds_up_nothing_else(head: Head, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").touch()
    with stalled(tmp_path / "train.jsonl"):
        head.watch(0)
        head.send(ProbeRequest(1, "examples", [str(tmp_path / "train.jsonl"), "{}"]))
        started = time.monotonic()
        # In two rounds: the first may be served in one go with the probe's start.
        for number in (1, 2):
            head.list_processes(number)
        assert time.monotonic() - started < 5
        head.send(CancelRequest(1))
        assert head.receive(RequestEnded).exit_code == -9


def test_a_command_that_has_closed_its_output_and_goes_on_holds_up_nothing_else(head: Head) -> None:
    closed, pipe = (head.files.directory.parent / name for name in ("closed", "pipe"))
    os.mkfifo(pipe)
    goes_on = os.open(pipe, os.O_RDWR)
    head.watch(0)
    script = 'exec >&- 2>&-; : >"$1"; read _ <"$2"; exit 7'
    head.send(CommandRequest(1, ["/bin/sh", "-c", script, "sh", str(closed), str(pipe)]))
    wait_until(closed.exists)
    for number in (1, 2):
        head.list_processes(number)
    os.write(goes_on, b"\n")
    assert head.receive(RequestEnded).exit_code == 7
    os.close(goes_on)


def test_its_end_is_the_end_of_what_it_has_started(head: Head) -> None:
    head.send(CommandRequest(1, ["/bin/sh", "-c", "echo $$; sleep 600"]), ProbeRequest(2, "telemetry", ["1"]))
    pid = int(head.receive(RequestOutput).data)
    assert head.close() == 0
    wait_until(lambda: processes.start_time(pid) is None, within_s=10)


def suspended_listener(head: Head) -> int:
    """The pid of a probe that streams and does not react to the end of its stdin."""
    head.send(ProbeRequest(1, "listen", ["60", "127.0.0.1"]))
    head.receive(RequestOutput)
    agent_pid = head.process.pid
    pid = int(Path(f"/proc/{agent_pid}/task/{agent_pid}/children").read_text())
    os.kill(pid, signal.SIGSTOP)
    return pid


@pytest.mark.needs("linux")
def test_a_probe_that_hangs_though_its_stdin_has_ended_is_killed(head: Head) -> None:
    suspended_listener(head)
    head.send(CancelRequest(1))
    assert head.receive(RequestEnded) == RequestEnded(1, -signal.SIGKILL, "")


@pytest.mark.needs("linux")
def test_no_probe_that_hangs_outlives_the_agent(head: Head) -> None:
    pid = suspended_listener(head)
    assert head.close() == 0
    wait_until(lambda: processes.start_time(pid) is None, within_s=10)


def test_what_a_command_has_started_ends_also_with_an_agent_that_is_killed(head: Head) -> None:
    head.send(CommandRequest(1, ["/bin/sh", "-c", "sleep 600 & echo $$ $!; wait"]))
    pids = [int(pid) for pid in head.receive(RequestOutput).data.split()]
    head.process.kill()
    for pid in pids:
        wait_until(lambda pid=pid: processes.start_time(pid) is None, within_s=10)  # type: ignore[misc]


def test_what_a_command_leaves_behind_stays(head: Head) -> None:
    """As a shell of the user would have it."""
    head.send(CommandRequest(1, ["/bin/sh", "-c", "sleep 600 >&- 2>&- & echo $!"]))
    pid = int(head.receive(RequestOutput).data)
    assert head.receive(RequestEnded).exit_code == 0
    assert head.close() == 0
    assert processes.start_time(pid) is not None
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("known", [True, False])
def test_a_group_whose_leader_may_be_anothers_by_now_is_not_killed(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    rank = WatchedRank(0, NodeFiles(tmp_path), identity_of(sleeper, "nonce"))
    monkeypatch.setattr(processes, "kill_group", killed := Mock())
    if not known:
        monkeypatch.setattr(processes, "start_time", Mock(side_effect=subprocess.TimeoutExpired("ps", 10)))
    rank.kill()
    assert killed.called is known


def test_a_keeper_that_does_not_read_blocks_nobody(tmp_path: Path) -> None:
    rank = WatchedRank(0, NodeFiles(tmp_path), None)
    rank.open_fifo()
    rank.send_command(heartbeat(1.0))
    os.mkfifo(NodeFiles(tmp_path).control(0))
    rank.open_fifo()
    for _ in range(100_000):
        rank.send_command(heartbeat(1.0))
