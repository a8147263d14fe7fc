"""What an earlier supervisor has left: nobody came only where nobody can come any more; a last kill reaches all."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import cast

import pytest

from engine.config.models import NodeConfig
from engine.launch.place import Place
from engine.launch.staging import Ways
from engine.runs.journal import Journal, read_journal
from engine.supervision.attempt import Attempt
from engine.supervision.inheritance import anybody_came, kill_everywhere, old_launcher
from engine.supervision.links.base import NodeLink, Sighting
from engine.supervision.links.links import Links
from engine.supervision.logbook import Logbook
from engine.transport.base import Completed
from engine.transport.local import LocalTransport
from engine.worker import processes
from engine.worker.processes import Process
from tests.unit.watch.run_maker import MadeRun

NOBODY = 2**22 + 7
"""A pid above Linux's highest."""


@dataclass
class Somewhere:
    """A host on which a shell is not to be seen yet at the first look."""

    late: bool = False
    ranks: tuple[int, ...] = (0,)
    asked: list[bool] = field(default_factory=list)

    def ask_left(self, *, kill: bool) -> None:
        self.asked.append(kill)

    def left(self) -> list[Process]:
        return [Process(7, "sh start.sh")] if self.late and len(self.asked) > 1 else []

    def sight(self, rank: int, *, thorough: bool) -> Sighting:
        return Sighting()


async def came(host: Somewhere) -> bool:
    return await anybody_came(Links([cast(NodeLink, host)]))


async def test_nobody_came_counts_once_the_host_is_fenced() -> None:
    nobody = Somewhere()
    assert not await came(nobody)
    assert nobody.asked == [False, True]


async def test_a_shell_that_was_still_starting_at_the_first_look_came() -> None:
    assert await came(Somewhere(late=True))


def test_an_earlier_attempts_launcher_is_not_this_ones(tmp_path: Path) -> None:
    run = MadeRun(tmp_path).attempt(1)
    run.journal.append("launcher", pid=NOBODY, start="then")
    run.close()
    assert inherited(run, 1) == NOBODY
    again = Journal(run.directory.journal, lambda: datetime.now(UTC))
    again.append("attempt", **{**attempt_of(run, 1).entry(), "attempt": 2, "nonce": "n.2"})
    again.close()
    assert inherited(run, 2) is None


def attempt_of(run: MadeRun, number: int) -> Attempt:
    entries = read_journal(run.directory.journal)
    return Attempt.from_entry(next(each for each in entries if each.get("attempt") == number), "n")


def inherited(run: MadeRun, number: int) -> int | None:
    """The pid of the launcher that an adopter takes for the attempt's."""
    logbook = Logbook(run.directory.journal, lambda _record: None, lambda: datetime.now(UTC))
    try:
        launcher = old_launcher(run.directory, logbook, attempt_of(run, number))
    finally:
        logbook.close()
    return launcher.pid if launcher is not None else None


class Told(LocalTransport):
    """A host that does what it is told."""

    def __init__(self) -> None:
        self.argv: list[tuple[str, ...]] = []

    async def run(
        self, argv: object, *, timeout_s: float, stdin: bytes = b"", directory: PurePath | None = None
    ) -> Completed:
        self.argv.append(tuple(cast(list[str], argv)))
        return Completed(0, b"", b"")


@pytest.mark.parametrize("fault", [PermissionError("no"), subprocess.TimeoutExpired("ps", 5)])
async def test_a_kill_that_fails_here_is_named_and_stops_none_elsewhere(
    monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    def fails(nonce: str) -> None:
        raise fault

    monkeypatch.setattr(processes, "kill_with_nonce", fails)
    nodes = [
        NodeConfig(name="head", python="python", workdir="/"),
        NodeConfig(name="ana", ssh="ana.local", python="python", workdir="/"),
    ]
    places = [Place(node.ssh, (rank,), "/", "/", "/bundle", "/python") for rank, node in enumerate(nodes)]
    there = Told()

    class Fleet:
        def to(self, node: NodeConfig) -> Told:
            return there

    assert await kill_everywhere(cast(Ways, Fleet()), nodes, places, "0badcafe") == ("head",)
    assert there.argv == [("/python", "/bundle/worker/processes.py", "--kill", "0badcafe")]
