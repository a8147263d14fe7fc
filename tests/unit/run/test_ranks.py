"""The state of ranks as their files and keepers show it, with real processes for keepers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from engine.node import processes
from engine.protocol.attempt import ExitRecord, Identity, NodeFiles, read_exit, read_identity, write_atomic
from engine.run.ranks import HostConnections, Ranks
from tests.unit.run.file_host import FileHost


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
    links = HostConnections([FileHost(files, (0,), ("left",))])
    return files, Ranks(links, ["left"])


def test_a_rank_starts_and_ends_once(tmp_path: Path, keeper: subprocess.Popen[bytes]) -> None:
    files, ranks = one_rank(tmp_path)
    assert ranks.poll() == []
    identify(files, keeper)
    assert ranks.poll() == ranks.all
    assert (ranks.all[0].started, ranks.all[0].ended) == (True, False)
    write_atomic(files.exit(0), json.dumps(asdict(ExitRecord(0, 1, 3, None, 0.0, 0))))
    assert ranks.poll() == ranks.all
    assert ranks.all[0].ended and not ranks.all[0].vanished
    assert ranks.poll() == []


def test_a_keeper_that_is_gone_without_a_record_has_vanished(tmp_path: Path, keeper: subprocess.Popen[bytes]) -> None:
    files, ranks = one_rank(tmp_path)
    identify(files, keeper)
    ranks.poll()
    keeper.kill()
    keeper.wait()
    assert ranks.poll() == ranks.all
    assert ranks.all[0].vanished and ranks.all[0].ended


def test_the_record_of_a_keeper_that_has_left_is_what_counts(tmp_path: Path, keeper: subprocess.Popen[bytes]) -> None:
    files, ranks = one_rank(tmp_path)
    identify(files, keeper)
    keeper.kill()
    keeper.wait()
    write_atomic(files.exit(0), json.dumps(asdict(ExitRecord(0, 1, 0, None, 0.0, 0))))
    ranks.poll()
    assert ranks.all[0].record is not None and not ranks.all[0].vanished


def test_a_lost_rank_changes_once_more_when_its_record_comes(tmp_path: Path, keeper: subprocess.Popen[bytes]) -> None:
    files, ranks = one_rank(tmp_path)
    identify(files, keeper)
    ranks.poll()
    assert (ranks.lose([0]), ranks.ends_known) == (ranks.all, 0)
    assert ranks.poll() == []
    write_atomic(files.exit(0), json.dumps(asdict(ExitRecord(0, 1, 0, None, 0.0, 0))))
    assert (ranks.poll(), ranks.ends_known) == (ranks.all, 1)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rank": 0}', "\0\0"])
def test_a_damaged_identity_or_record_is_none(tmp_path: Path, text: str) -> None:
    files = NodeFiles(tmp_path)
    for path in (files.identity(0), files.exit(0)):
        path.write_text(text)
    assert (read_identity(files.identity(0)), read_exit(files.exit(0))) == (None, None)


def test_the_launchers_exit_code_counts_for_ranks_without_a_keeper_only(
    tmp_path: Path, keeper: subprocess.Popen[bytes]
) -> None:
    files, ranks = one_rank(tmp_path)
    assert ranks.fail_to_start([(0, 127), (9, 1)]) == ranks.all
    assert ranks.all[0].ended and ranks.all[0].launcher_code == 127
    _, ranks = one_rank(tmp_path)
    identify(files, keeper)
    ranks.poll()
    assert ranks.fail_to_start([(0, 1)]) == []
    assert not ranks.all[0].ended


def test_a_rank_of_a_lost_node_has_ended_once(tmp_path: Path, keeper: subprocess.Popen[bytes]) -> None:
    files, ranks = one_rank(tmp_path)
    identify(files, keeper)
    ranks.poll()
    assert ranks.lose([0]) == ranks.all
    assert ranks.all[0].ended
    assert ranks.lose([0]) == []
