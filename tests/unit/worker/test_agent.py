"""The agent, as a process with its two pipes: what it passes on, what it sees, what it sends, and when it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from engine.worker import agent, processes
from engine.worker.agent import Agent
from engine.worker.frames import Decoder, Message, encode
from engine.worker.wire import NONCE_ENV, ExitRecord, Identity, NodeFiles, write_atomic
from tests.machine import WATCHED
from tests.unit.worker.kept import stage_bundle


class Head:
    """The other end of an agent's pipes."""

    def __init__(self, directory: Path) -> None:
        self.files = NodeFiles(directory / "attempt")
        self.nonce = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, "-m", "worker.agent", "--attempt", str(self.files.directory)],
            cwd=stage_bundle(directory / "bundle"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._decoder = Decoder()
        self._heard: list[tuple[Message, bytes]] = []
        self.data: dict[str, bytes] = {}

    def say(self, kind: str, **fields: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(encode({"kind": kind, **fields}))

    def watch(self, *ranks: int, known: dict[str, Any] | None = None) -> Message:
        self.say("watch", nonce=self.nonce, ranks=list(ranks), known=known or {})
        return self.hear("hello")

    def hear(self, kind: str) -> Message:
        """Awaits the next message of that kind; data that come before it are kept."""
        assert self.process.stdout is not None
        while True:
            for at, (message, body) in enumerate(self._heard):
                if message["kind"] == "data":
                    name = message["file"]
                    self.data[name] = self.data.get(name, b"") + body
                    self._heard[at] = ({"kind": "taken", "was": message}, b"")
                    if kind == "data":
                        return message
                elif message["kind"] == kind:
                    del self._heard[: at + 1]
                    return message
            self._heard = [each for each in self._heard if each[0]["kind"] != "taken"]
            chunk = os.read(self.process.stdout.fileno(), 65_536)
            assert chunk, f"the agent has left before {kind}"
            self._heard += list(self._decoder.feed(chunk))

    def hear_all_of(self, name: str, size: int) -> bytes:
        while len(self.data.get(name, b"")) < size:
            self.hear("data")
        return self.data[name]

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
    assert hello["boot_id"] == processes.boot_id()
    head.say("list", n=1, kill=False)
    assert head.hear("listed")["left"] == [], "neither is it found itself"
    assert head.close() == 0


def test_beats_and_words_reach_the_keepers_fifo(head: Head) -> None:
    head.files.directory.mkdir()
    os.mkfifo(head.files.control(0))
    fifo = os.open(head.files.control(0), os.O_RDWR)
    head.watch(0)
    head.say("beat", n=1, heard=0)
    assert head.hear("pong")["n"] == 1
    assert os.read(fifo, 100) == b"beat\n"
    head.say("word", rank=0, word="stop")
    assert os.read(fifo, 100) == b"stop\n"
    head.say("word", rank=7, word="stop")
    head.say("beat", n=20, heard=1)
    assert head.hear("pong")["n"] == 20
    os.set_blocking(fifo, False)
    with pytest.raises(BlockingIOError):
        # A head that has not heard nineteen pongs believes that the lease runs.
        os.read(fifo, 100)
    os.close(fifo)


def test_a_rank_is_seen_to_start_and_to_end(head: Head, sleeper: subprocess.Popen[bytes]) -> None:
    head.watch(0)
    head.files.directory.mkdir()
    identity = identity_of(sleeper, head.nonce)
    write_atomic(head.files.identity(0), json.dumps(asdict(identity)))
    assert head.hear("started")["identity"] == asdict(identity)
    head.files.log(0).write_bytes(b"its last words\n\xff")
    head.files.events(0).write_text('{"event": "end", "rank": 0, "completed": true}\n')
    record = ExitRecord(0, 1, 3, None, 0.0, 16)
    write_atomic(head.files.exit(0), json.dumps(asdict(record)))
    ended = head.hear("ended")
    assert ended["record"] == asdict(record)
    assert ended["words"]["log"] == "its last words\n�"
    assert ended["words"]["end"]["completed"] is True


def test_a_keeper_that_is_gone_has_vanished_also_when_the_host_has_lost_its_files(
    head: Head, sleeper: subprocess.Popen[bytes]
) -> None:
    identity = identity_of(sleeper, head.nonce)
    sleeper.kill()
    sleeper.wait()
    head.watch(0, known={"0": asdict(identity)})
    assert head.hear("ended")["record"] is None


def test_what_is_left_is_listed_and_killed_and_nothing_starts_any_more(
    head: Head, sleeper: subprocess.Popen[bytes]
) -> None:
    head.files.directory.mkdir()
    head.watch(0)
    head.say("list", n=1, kill=False)
    assert [pid for pid, _ in head.hear("listed")["left"]] == [sleeper.pid]
    assert sleeper.poll() is None and not head.files.fenced.exists()
    head.say("list", n=2, kill=True)
    assert head.hear("listed")["left"] != []
    sleeper.wait(20)
    assert head.files.fenced.exists()
    head.say("list", n=3, kill=True)
    assert head.hear("listed")["left"] == []


def test_a_file_comes_as_far_as_it_was_ordered_and_byte_for_byte(head: Head) -> None:
    head.files.directory.mkdir()
    content = bytes(range(256)) * 2000
    head.watch(0)
    head.say("send", file="rank0.log", **{"from": 0}, until=100_000)
    assert head.hear("data")["end"] is True, "there is nothing yet"
    head.files.log(0).write_bytes(content)
    assert head.hear_all_of("rank0.log", 100_000) == content[:100_000]
    head.say("beat", n=1, heard=0)
    head.hear("pong")
    head.say("send", file="rank0.log", until=10_000_000)
    assert head.hear_all_of("rank0.log", len(content)) == content
    with head.files.log(0).open("ab") as log:
        log.write(b"more")
    assert head.hear_all_of("rank0.log", len(content) + 4) == content + b"more"


def test_a_flood_in_one_file_does_not_starve_another(head: Head) -> None:
    head.files.directory.mkdir()
    head.files.log(0).write_bytes(b"x" * 30_000_000)
    head.files.events(0).write_bytes(b"e" * 1000)
    head.watch(0)
    head.say("send", file="rank0.log", **{"from": 0}, until=30_000_000)
    head.say("send", file="rank0.events.jsonl", **{"from": 0}, until=1_000_000)
    head.hear_all_of("rank0.events.jsonl", 1000)
    assert len(head.data["rank0.log"]) < 2_000_000


def test_a_head_that_takes_nothing_does_not_keep_the_agent_from_its_keepers(head: Head) -> None:
    head.files.directory.mkdir()
    os.mkfifo(head.files.control(0))
    fifo = os.open(head.files.control(0), os.O_RDWR)
    head.files.log(0).write_bytes(b"x" * 10_000_000)
    head.watch(0)
    head.say("send", file="rank0.log", **{"from": 0}, until=10_000_000)
    time.sleep(0.5)
    head.say("beat", n=1, heard=0)
    assert os.read(fifo, 100) == b"beat\n"
    os.close(fifo)


@pytest.mark.parametrize("name", ["spec.json", "../1/spec.json", "rank0.in", "/etc/passwd", "rank0.log/../spec.json"])
def test_only_the_ranks_output_can_be_ordered(head: Head, name: str) -> None:
    head.files.directory.mkdir()
    (head.files.directory / "spec.json").write_text("secret")
    head.watch(0)
    head.say("send", file=name, **{"from": 0}, until=1000)
    head.say("beat", n=1, heard=0)
    head.hear("pong")
    assert head.data == {}


def test_it_leaves_when_nothing_is_heard_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "SILENCE_S", 0.3)
    hear, speak = os.pipe()
    listen, say = os.pipe()
    begun = time.monotonic()
    assert Agent(NodeFiles(tmp_path), hear, say).run() == 0
    assert 0.2 < time.monotonic() - begun < 5
    for descriptor in (hear, speak, listen, say):
        os.close(descriptor)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_idle_it_costs_next_to_nothing(head: Head, sleeper: subprocess.Popen[bytes]) -> None:
    head.files.directory.mkdir()
    write_atomic(head.files.identity(0), json.dumps(asdict(identity_of(sleeper, head.nonce))))
    head.watch(0)
    for name in ("rank0.log", "rank0.events.jsonl"):
        head.say("send", file=name, **{"from": 0}, until=1_000_000)

    def cpu_s() -> float:
        fields = Path(f"/proc/{head.process.pid}/schedstat").read_text().split()
        return int(fields[0]) / 1e9

    head.hear("started")
    begun, before = time.monotonic(), cpu_s()
    for number in range(1, 5):
        head.say("beat", n=number, heard=number - 1)
        head.hear("pong")
        time.sleep(0.5)
    share = (cpu_s() - before) / (time.monotonic() - begun)
    assert share < 0.02, f"{share:.2%} of a core"
