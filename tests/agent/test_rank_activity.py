"""What a keeper sees of a command's processes: real ones that work, wait, are stopped, and connect to one another."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.node import processes, rank_activity
from engine.node.rank_activity import RankActivity, connected, peer_addresses
from engine.protocol.events import EventWriter

WORKS = "while True: pass"
WAITS = "import time; time.sleep(600)"
STARTS = "import os, subprocess as s, sys; s.run([sys.executable, '-c', {program!r}], env={{**os.environ, **{own}}})"
"""A program that starts another one, with some variables of its own, as a launcher does."""
GIVEN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


class WatchedProgram:
    def __init__(self, folder: Path, program: str, **environment: str) -> None:
        self.environment = {**os.environ, **environment}
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], env=self.environment, start_new_session=True, stdin=subprocess.DEVNULL
        )
        self.events = folder / "events.jsonl"
        writer = EventWriter(self.events, 0, 1)
        self.activity = RankActivity(writer, self.process.pid, self.environment, grouped=True)

    def written(self) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.events.read_text().splitlines()]
        return [{key: line[key] for key in ("state", "joined", "own_rank") if key in line} for line in lines]

    def warnings(self) -> list[str]:
        return [line["message"] for line in map(json.loads, self.events.read_text().splitlines()) if "message" in line]

    def await_event(self, **event: Any) -> None:
        deadline = time.monotonic() + 60
        while event not in self.written():
            assert time.monotonic() < deadline, self.written()
            self.activity.poll()
            time.sleep(0.02)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., WatchedProgram]]:
    monkeypatch.setattr(rank_activity, "INTERVAL_S", 0.2)
    monkeypatch.setattr(rank_activity, "FIRST_INTERVAL_S", 0.2)
    started: list[WatchedProgram] = []

    def make(program: str, **environment: str) -> WatchedProgram:
        started.append(WatchedProgram(tmp_path, program, **environment))
        return started[-1]

    yield make
    for each in started:
        os.killpg(each.process.pid, signal.SIGKILL)
        each.process.wait()


def test_one_that_works_is_busy_until_it_is_stopped(start: Callable[..., WatchedProgram]) -> None:
    program = start(WORKS)
    program.await_event(state="busy")
    os.kill(program.process.pid, signal.SIGSTOP)
    program.await_event(state="stopped")
    os.kill(program.process.pid, signal.SIGCONT)
    before = len(program.written())
    program.await_event(state="busy")
    assert program.written()[0] == {"state": "busy"} and len(program.written()) >= before


def test_what_a_program_has_started_counts_too(start: Callable[..., WatchedProgram]) -> None:
    program = start(STARTS.format(program=WORKS, own={}))
    program.await_event(state="busy")
    below = set(processes.family_activity(program.process.pid)[0]) - {program.process.pid}
    while not below:
        below = set(processes.family_activity(program.process.pid)[0]) - {program.process.pid}
    os.kill(below.pop(), signal.SIGSTOP)
    program.await_event(state="stopped")


def test_one_that_waits_is_idle_and_that_is_repeated(
    start: Callable[..., WatchedProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_activity, "REPEAT_S", 0.3)
    program = start(WAITS)
    program.await_event(state="idle")
    while program.written().count({"state": "idle"}) < 3:
        program.await_event(state="idle")
        program.activity.poll()
    assert {"own_rank": 1} not in program.written(), "its own variables are those that it was started with"


@pytest.mark.parametrize(
    ("own", "rank"),
    [
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29400"}, 0),
        ({"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}, 3),
        ({"MLX_RANK": "0", "MLX_HOSTFILE": "/tmp/other.json"}, 0),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, 0),
    ],
)
def test_a_process_of_another_group_is_found_by_its_variables(
    start: Callable[..., WatchedProgram], own: dict[str, str], rank: int
) -> None:
    program = start(STARTS.format(program=WAITS, own=own), **GIVEN, MLX_RANK="1", MLX_HOSTFILE="/tmp/none.json")
    program.await_event(own_rank=rank)


def test_a_rank_that_connects_to_another_has_joined(start: Callable[..., WatchedProgram]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
        program = start(WAITS, **{**GIVEN, "MASTER_PORT": str(port)})
        program.await_event(joined=False)
        with socket.create_connection(("127.0.0.1", port)):
            program.await_event(joined=True)


def test_addresses_in_any_family_are_read_as_they_are_written() -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        port = server.getsockname()[1]
        assert not connected({("127.0.0.1", port)})
        for address in ("127.0.0.1", "::1"):
            with socket.create_connection((address, port)):
                assert connected({(address, port)}), address


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        (GIVEN, {("127.0.0.1", 1)}),
        ({**GIVEN, "RANK": "0"}, set()),
        ({**GIVEN, "MASTER_PORT": "x"}, set()),
        ({"MLX_RANK": "1", "MLX_HOSTFILE": "HOSTS"}, {("10.0.0.1", 5000), ("fd00::1", 5001), ("10.0.0.3", 5003)}),
        ({"MLX_RANK": "1", "MLX_HOSTFILE": "/no/such/file"}, set()),
        ({"MLX_RANK": "1"}, set()),
    ],
)
def test_where_the_other_ranks_listen(tmp_path: Path, environment: dict[str, str], found: set[tuple[str, int]]) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text('[["10.0.0.1:5000", "fd00::1:5001"], ["10.0.0.2:5002"], ["10.0.0.3:5003"]]')
    assert peer_addresses({key: str(hosts) if text == "HOSTS" else text for key, text in environment.items()}) == found


@pytest.mark.needs("linux")
def test_an_idle_rank_is_told_of_the_lock_that_a_killed_build_has_left(
    start: Callable[..., WatchedProgram], tmp_path: Path
) -> None:
    lock = tmp_path / "extensions" / "fused_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    program = start(WAITS, TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"))
    program.await_event(state="idle")
    assert program.warnings() == [f"torch may be waiting for a lock that a killed build has left: rm {lock}"]
