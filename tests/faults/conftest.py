"""Every fault test leaves nothing behind, also when it fails."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from engine.run import supervisor_process
from tests.bundles import link_bundle
from tests.cluster.cluster import Cluster
from tests.faults.local_runs import PLANNED
from tests.forked import Forked, ForkServer


@functools.cache
def supervisors() -> ForkServer:
    return ForkServer(sys.executable, "engine.run.supervisor")


@pytest.fixture(autouse=True)
def forked_supervisors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Supervisors are forked from a process that has imported the engine. Those that commands start are not."""

    def forked(argv: Sequence[str], folder: Path, output: IO[bytes], **more: Any) -> Forked:
        (lock,) = more["pass_fds"]
        place = argv.index("--lock") + 1
        assert argv[1:4] == ["-P", "-m", "engine.run.supervisor"] and argv[place] == str(lock)
        return Forked(
            supervisors(),
            argv[3],
            *(*argv[4:place], "LOCK", *argv[place + 1 :]),
            environment=os.environ,
            output=output.fileno(),
            handed={"LOCK": lock},
            folder=folder,
            session=True,
        )

    monkeypatch.setattr(supervisor_process, "start_session", forked)


@pytest.fixture(autouse=True)
def cleared_away() -> Iterator[None]:
    """End whatever a test has started and not ended."""
    yield
    while PLANNED:
        PLANNED.pop().clear_away()


@pytest.fixture
def home(home: Path) -> Path:
    """A FLIGHTDECK_HOME of the test's own; this machine has the node bundle."""
    link_bundle(home / "node")
    return home


@pytest.fixture
def nodes(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The test cluster, reached by whatever a test starts."""
    monkeypatch.setenv("FLIGHTDECK_SSH_CONFIG", str(cluster.ssh_config))
    return cluster
