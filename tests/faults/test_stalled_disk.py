"""The head's disk stalls: every fsync takes longer than the ranks' lease. The training goes on all the same."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.models import RunState
from tests.cluster.cluster import Cluster
from tests.faults.cluster_runs import plan_on, ring_config
from tests.faults.local_runs import SHORT_GRACES, Run, plan_run, ring

STALL_S = 5.0
LEASE = SHORT_GRACES.model_copy(update={"lease_s": 3.0})
STALLING = """
import os, sys, time
from pathlib import Path
from engine.run import supervisor
from engine.run.supervisor_process import take_lock
from engine.store.layout import RunDir

real, stall_s = os.fsync, float(sys.argv[2])

def stalling(descriptor):
    # From the moment that the ranks have been started, nothing is on the disk before its time.
    if os.path.exists(sys.argv[1] + "/launcher.log") and not os.path.exists(sys.argv[1] + "/thawed"):
        os.write(1, b"stalled\\n")
        time.sleep(stall_s)
    real(descriptor)

os.fsync = stalling
sys.exit(supervisor.main([sys.argv[1], "--lock", str(take_lock(RunDir(Path(sys.argv[1]))))]))
"""


@contextmanager
def supervised(run: Run) -> Iterator[subprocess.Popen[str]]:
    """A real supervisor on a disk that stalls."""
    argv = [sys.executable, "-c", STALLING, str(run.dir.path), str(STALL_S)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
            process.wait(60)
        finally:
            process.kill()


def goes_on_through_stalls(run: Run) -> None:
    with supervised(run) as supervisor:
        assert supervisor.stdout is not None and supervisor.stdout.readline().startswith("sleep prevented: ")
        assert supervisor.stdout.readline() == "stalled\n"
        # The launcher's entry; then the state's change to running, when the ranks have begun to train.
        assert supervisor.stdout.readline() == "stalled\n"
        time.sleep(STALL_S)
        (run.dir.path / "thawed").touch()
        run.finish()
        run.wait(lambda: run.record.state.ended)
        assert run.record.state is RunState.SUCCEEDED, run.troubles()


@pytest.mark.slow
def test_ranks_of_this_machine_outlive_a_stalled_disk(home: Path, tmp_path: Path) -> None:
    goes_on_through_stalls(plan_run(home, tmp_path, script=ring(), recovery=LEASE))


@pytest.mark.slow
def test_ranks_on_nodes_outlive_a_stalled_disk(nodes: Cluster, home: Path) -> None:
    goes_on_through_stalls(plan_on(nodes, home, ring_config(nodes, recovery=LEASE)))
