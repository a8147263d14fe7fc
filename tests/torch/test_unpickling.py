"""A checkpoint or a message that somebody else has made runs nothing; real ones are read as before."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
from pathlib import Path

import pytest

from tests.needs import TORCH
from tests.torch.running import ROOT, run_torch, start_torch
from tests.torch.test_trainings import FSDP, torch_job
from tests.training.tiny import Tiny

pytestmark = [pytest.mark.needs("torch"), pytest.mark.busy]


def test_planted_pickles_run_nothing_and_real_ones_are_read(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    argv = [str(TORCH), "-m", "tests.torch.planted"]
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["ran"]
    assert len(found["planted"]) == 8
    for name, outcomes in found["planted"].items():
        assert outcomes["metadata"].startswith("CheckpointError: .metadata cannot be read: it names "), (name, outcomes)
        assert outcomes["message"].startswith("UnpicklingError: it names "), (name, outcomes)
        assert not any(text.startswith("loaded") for text in outcomes.values()), (name, outcomes)
    state = {"step": 3, "name": "adam"}
    assert found["real"] == {"dcp": [6.0, state], "message": True, "torch.load": state}


class Planted:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.slow
def test_a_state_with_planted_metadata_is_refused_though_its_manifest_vouches_for_it(
    tiny: Tiny, tmp_path: Path
) -> None:
    run_torch(tmp_path, torch_job(tiny, FSDP), fields={"checkpoint_every": 5})
    (metadata,) = tmp_path.rglob("step-000000005/.metadata")
    metadata.write_bytes(content := pickle.dumps(Planted(tmp_path / "ran")))
    manifest = metadata.with_name("manifest-0.json")
    document = json.loads(manifest.read_text())
    (entry,) = (entry for entry in document["files"] if entry["name"] == ".metadata")
    entry |= {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content), "stored_bytes": len(content)}
    manifest.write_text(json.dumps(document))
    for path in tmp_path.rglob("step-000000008"):
        path.rename(path.with_name("aside"))
    refused = start_torch(tmp_path, torch_job(tiny, FSDP), attempt=2, fields={"resume": True, "reached": 5})
    assert refused.wait() == [1]
    assert ".metadata cannot be read: it names posix.system" in refused.events("failure")[0]["message"]
    assert not (tmp_path / "ran").exists()
