"""What an earlier supervisor has left: nobody came only where nobody can come any more; a last kill reaches all."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import cast

import pytest

from engine.config.models import NodeConfig
from engine.launch.place import Place
from engine.launch.staging import Ways
from engine.supervision.inheritance import anybody_came, kill_everywhere
from engine.supervision.links.base import NodeLink, Sighting
from engine.supervision.links.links import Links
from engine.transport.base import Completed
from engine.transport.local import LocalTransport
from engine.worker import processes
from engine.worker.processes import Process


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
