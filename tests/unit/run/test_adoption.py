"""Adoption: no rank started only counts where none can start any more; the last kill reaches all."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from engine.cluster.host_connection import HostConnection, RankObservation
from engine.cluster.staging import HostLayout
from engine.cluster.transport.base import Completed
from engine.cluster.transport.fleet import Fleet
from engine.cluster.transport.local import LocalTransport
from engine.config.models import NodeConfig
from engine.node import processes
from engine.node.processes import Process
from engine.run.attempt_hosts import any_rank_started, find_launcher
from engine.run.events import LauncherStarted
from engine.run.journal import RunRecorder
from engine.run.run_context import HostConnections
from engine.run.shutdown import kill_everywhere
from tests.machine import NOBODY
from tests.unit.run.run_maker import MadeRun


@dataclass
class Somewhere:
    """A host on which a shell is not seen yet at the first poll."""

    late: bool = False
    ranks: tuple[int, ...] = (0,)
    asked: list[bool] = field(default_factory=list)

    def request_processes(self, *, kill: bool) -> None:
        self.asked.append(kill)

    def processes(self) -> list[Process]:
        return [Process(7, "sh start.sh")] if self.late and len(self.asked) > 1 else []

    def observe(self, rank: int) -> RankObservation:
        return RankObservation()


async def came(host: Somewhere) -> bool:
    return await any_rank_started(HostConnections([cast(HostConnection, host)]))


async def test_nobody_came_counts_once_the_host_is_fenced() -> None:
    nobody = Somewhere()
    assert not await came(nobody)
    assert nobody.asked == [False, True]


async def test_a_shell_that_was_still_starting_at_the_first_poll_counts() -> None:
    assert await came(Somewhere(late=True))


def test_an_earlier_attempts_launcher_is_not_this_ones(tmp_path: Path) -> None:
    run = MadeRun(tmp_path).attempt(1)
    run.append(LauncherStarted(pid=NOBODY, start="then"))
    assert found_launcher(run, 1) == NOBODY
    run.attempt(2).close()
    assert found_launcher(run, 2) is None


@pytest.mark.parametrize("fault", [OSError("ps"), subprocess.TimeoutExpired("ps", 10)])
@pytest.mark.parametrize("late", ["with_nonce", "start_time"])
def test_a_launcher_that_ps_does_not_show_in_time_is_left_to_the_proof_of_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: str, fault: Exception
) -> None:
    run = MadeRun(tmp_path).attempt(1).close()
    monkeypatch.setattr(processes, "with_nonce", lambda _nonce: [Process(os.getpgrp(), "mlx.launch")])
    monkeypatch.setattr(processes, late, Mock(side_effect=fault))
    assert found_launcher(run, 1) is None


def test_a_launcher_whose_start_is_not_known_cannot_be_told_from_another_process(tmp_path: Path) -> None:
    run = MadeRun(tmp_path).attempt(1).append(LauncherStarted(pid=os.getpid(), start="")).close()
    assert found_launcher(run, 1) is None


def found_launcher(run: MadeRun, number: int) -> int | None:
    """The pid of the launcher that an adopter takes for the attempt's."""
    recorder = RunRecorder(run.directory.journal, run.plan, lambda _record: None)
    launcher = find_launcher(run.directory, recorder.history.attempt(number))
    recorder.close()
    return launcher.pid if launcher is not None else None


class Told(LocalTransport):
    """A host that records its commands."""

    def __init__(self) -> None:
        self.argv: list[tuple[str, ...]] = []

    async def run(self, argv: Sequence[str], **options: Any) -> Completed:
        self.argv.append(tuple(argv))
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
    layouts = [HostLayout(node.ssh, (rank,), "/", "/", "/bundle", "/python") for rank, node in enumerate(nodes)]
    there = Told()

    class OneHost:
        def to(self, node: NodeConfig) -> Told:
            return there

    assert await kill_everywhere(cast(Fleet, OneHost()), nodes, layouts, "0badcafe") == ("head",)
    assert there.argv == [("/python", "/bundle/engine/node/processes.py", "0badcafe")]
