"""A job's secrets reach its ranks and nobody else: no argument list, no journal, no cause shown to a person."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from engine.config.models import JobConfig
from engine.models import RunState
from engine.run.events import AttemptFailed, RankLaunched
from engine.run.supervisor_process import adopt_orphans
from tests.faults.local_runs import SHORT_GRACES, kill_and_await, ring, start_run
from tests.waiting import wait_until

SECRET = "hf_" + "Zq7" * 8
TELL = "import os; print('told ' + str(len(os.environ['HF_TOKEN'])), flush=True)\n"


@pytest.mark.needs("ps")
def test_a_secret_is_in_the_ranks_environment_alone(home: Path, tmp_path: Path) -> None:
    job = JobConfig(name="test", command=("python", "script.py"), env={"HF_TOKEN": SECRET})
    fault = "if os.path.exists('now'): raise ValueError('refused: ' + os.environ['HF_TOKEN'])"
    run = start_run(home, tmp_path, script=TELL + ring(fault), job=job)
    run.await_output(f"told {len(SECRET)}")
    listed = subprocess.run(["ps", "-axww", "-o", "command="], capture_output=True, text=True, check=True).stdout
    assert run.nonce in listed, "the launcher's own arguments are in the list"
    assert SECRET not in listed
    (tmp_path / "now").touch()

    record = run.ended()
    assert record.state is RunState.FAILED
    assert record.cause == "exited with code 1: ValueError: refused: [redacted]"
    # The rank's own log is kept as it was printed; spec.json and plan.json hold the secret for their owner alone.
    holders = {path for path in home.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()}
    assert {path.name.removesuffix(".copy") for path in holders} <= {"plan.json", "spec.json", "rank0.log", "rank1.log"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in holders)


def test_an_adopted_run_keeps_the_secrets_of_its_launch_and_redacts_them(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing but its value tells that it is one.
    secret = "blue-whale-4711"
    monkeypatch.setenv("WANDB_API_KEY", secret)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    fault = "if os.path.exists('now'): raise ValueError('refused: ' + os.environ['WANDB_API_KEY'])"
    again = SHORT_GRACES.model_copy(update={"restart_commands": True, "max_restarts": 1})
    run = start_run(home, tmp_path, script=ring(fault), recovery=again)
    run.await_output("step")
    assert run.dir.secrets.stat().st_mode & 0o777 == 0o600
    kill_and_await(run.supervisor)
    monkeypatch.delenv("WANDB_API_KEY")
    assert adopt_orphans(home) == [run.dir.id]
    os.kill(run.identity(1).trainer_pid, signal.SIGKILL)
    run.wait(lambda: len(run.events_of(RankLaunched)) == 4)
    (tmp_path / "now").touch()
    assert run.ended().attempts == 2, run.troubles()
    causes = [event.verdict.cause for event in run.events_of(AttemptFailed)]
    assert causes[-1] == "exited with code 1: ValueError: refused: [redacted]"
    assert secret not in run.dir.journal.read_text()
    wait_until(lambda: not run.dir.secrets.exists())
