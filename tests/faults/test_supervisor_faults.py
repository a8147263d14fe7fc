"""A fault in the supervisor's own code: what it launched is adopted, or ended and reported; never left alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from engine.models import Reason, RunState
from engine.node import processes
from tests.faults.local_runs import Run, plan_run

FAULTY = """
import sys
from pathlib import Path
from engine.run import driver, supervisor
from engine.run.journal import RunRecorder
from engine.run.state import Phase
from engine.run.supervisor_process import take_lock
from engine.store.layout import RunDir

left, step = int(sys.argv[2]), driver.step

def faulty(state, seen):
    global left
    if left and state.phase is Phase.RUNNING:
        left -= 1
        raise RuntimeError("boom")
    return step(state, seen)

driver.step = faulty
sys.exit(supervisor.main([sys.argv[1], "--lock", str(take_lock(RunDir(Path(sys.argv[1]))))]))
"""


def supervise(run: Run, faults: int) -> None:
    """A real supervisor that fails `faults` times while it monitors what it has launched."""
    argv = [sys.executable, "-c", FAULTY, str(run.dir.path), str(faults)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("RuntimeError: boom") == faults


def test_after_a_fault_the_run_is_adopted(home: Path, tmp_path: Path) -> None:
    run = plan_run(home, tmp_path, script="print('done')")
    supervise(run, faults=1)
    assert run.ended().state is RunState.SUCCEEDED, run.troubles()
    assert run.notes == ["a fault in the supervisor: RuntimeError: boom"]


def test_after_two_faults_nothing_is_left_and_the_cause_is_recorded(home: Path, tmp_path: Path) -> None:
    run = plan_run(home, tmp_path, script="import time; time.sleep(60)")
    supervise(run, faults=2)
    assert (run.record.state, run.record.reason) == (RunState.FAILED, Reason.SUPERVISOR_LOST)
    assert run.record.cause == "the supervisor failed: RuntimeError: boom"
    run.wait(lambda: processes.with_nonce(run.nonce) == [], within_s=30, after_end=True)


def test_a_journal_that_takes_nothing_more_keeps_nobody_alive(home: Path, tmp_path: Path) -> None:
    run = plan_run(home, tmp_path, script="import time; time.sleep(60)")
    broken = FAULTY.replace(
        'raise RuntimeError("boom")',
        """def refused(*_, **__): raise OSError(28, "No space left on device")
        RunRecorder.append = refused
        raise RuntimeError("boom")""",
    )
    assert broken != FAULTY
    argv = [sys.executable, "-c", broken, str(run.dir.path), "2"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert "RuntimeError: boom" in done.stderr
    run.wait(lambda: processes.with_nonce(run.nonce) == [], within_s=30, after_end=True)
