"""A job's secrets reach its ranks and nobody else: no argument list, no journal, no cause shown to a person."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from engine.config.models import JobConfig
from engine.models import RunState
from tests.faults.local_runs import ring, start_run

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
