"""The state of ranks as their files and keepers show it, with real processes for keepers."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from engine.cluster.host_connection import LocalConnection
from engine.node import processes
from engine.protocol.attempt import HEARTBEAT, ExitRecord, Identity, NodeFiles, write_atomic
from engine.run.ranks import HostConnections, Ranks
from engine.run.run_plan import PlannedRank


@pytest.fixture
def keeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def identify(files: NodeFiles, keeper: subprocess.Popen[bytes]) -> None:
    start = processes.start_time(keeper.pid) or ""
    identity = Identity(0, "r", 1, "n", processes.boot_id(), keeper.pid, start, keeper.pid, keeper.pid, start, 0.0)
    write_atomic(files.identity(0), json.dumps(asdict(identity)))


def one_rank(directory: Path) -> tuple[NodeFiles, Ranks]:
    files = NodeFiles(directory)
    links = HostConnections([LocalConnection(files, "nonce", (0,), ("left",))])
    return files, Ranks(links, [PlannedRank(rank=0, node="left", host="h")])


def test_a_rank_starts_and_ends_once(tmp_path: Path, keeper: subprocess.Popen[bytes]) -> None:
    files, ranks = one_rank(tmp_path)
    assert ranks.poll(check_pids=True) == []
    identify(files, keeper)
    assert ranks.poll(check_pids=True) == ranks.all
    assert (ranks.all[0].started, ranks.all[0].ended) == (True, False)
    write_atomic(files.exit(0), json.dumps(asdict(ExitRecord(0, 1, 3, None, 0.0, 0))))
    assert ranks.poll(check_pids=False) == ranks.all
    assert ranks.all[0].ended and not ranks.all[0].vanished
    assert ranks.poll(check_pids=True) == []


def test_a_keeper_that_is_gone_without_a_record_has_vanished(tmp_path: Path, keeper: subprocess.Popen[bytes]) -> None:
    files, ranks = one_rank(tmp_path)
    identify(files, keeper)
    ranks.poll(check_pids=True)
    keeper.kill()
    keeper.wait()
    ranks.poll(check_pids=False)
    assert not ranks.all[0].vanished
    assert ranks.poll(check_pids=True) == ranks.all
    assert ranks.all[0].vanished and ranks.all[0].ended


def test_the_record_of_a_keeper_that_has_left_is_what_counts(tmp_path: Path, keeper: subprocess.Popen[bytes]) -> None:
    files, ranks = one_rank(tmp_path)
    identify(files, keeper)
    keeper.kill()
    keeper.wait()
    write_atomic(files.exit(0), json.dumps(asdict(ExitRecord(0, 1, 0, None, 0.0, 0))))
    ranks.poll(check_pids=True)
    assert ranks.all[0].record is not None and not ranks.all[0].vanished


def test_the_launchers_exit_code_counts_for_ranks_without_a_keeper_only(
    tmp_path: Path, keeper: subprocess.Popen[bytes]
) -> None:
    files, ranks = one_rank(tmp_path)
    assert ranks.fail_to_start([(0, 127), (9, 1)]) == ranks.all
    assert ranks.all[0].ended and ranks.all[0].launcher_code == 127
    _, ranks = one_rank(tmp_path)
    identify(files, keeper)
    ranks.poll(check_pids=True)
    assert ranks.fail_to_start([(0, 1)]) == []
    assert not ranks.all[0].ended


def test_a_rank_of_a_lost_node_has_ended_once(tmp_path: Path, keeper: subprocess.Popen[bytes]) -> None:
    files, ranks = one_rank(tmp_path)
    identify(files, keeper)
    ranks.poll(check_pids=True)
    assert ranks.lose([0]) == ranks.all
    assert ranks.all[0].ended
    assert ranks.lose([0]) == []


def test_a_keeper_that_does_not_listen_blocks_nobody(tmp_path: Path) -> None:
    files, ranks = one_rank(tmp_path)
    ranks.send_command(HEARTBEAT)
    os.mkfifo(files.control(0))
    for _ in range(100_000):
        ranks.send_command(HEARTBEAT)
