"""A checkpoint or a message that somebody else has made runs nothing, and is not used in place of what was saved; real
ones are read as before."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.torch.running import output_of, run_torch, start_torch
from tests.torch.test_trainings import DDP, FSDP, torch_job
from tests.training.states import tamper
from tests.training.tiny import Tiny

pytestmark = [pytest.mark.needs("torch"), pytest.mark.busy]


def test_planted_pickles_run_nothing_and_real_ones_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    found = output_of("tests.torch.planted", environment=environment)
    assert not found["ran"]
    assert len(found["planted"]) == 8
    for name, outcomes in found["planted"].items():
        assert outcomes["metadata"].startswith("CheckpointError: .metadata cannot be read: it names "), (name, outcomes)
        assert outcomes["message"].startswith("UnpicklingError: it names "), (name, outcomes)
        assert outcomes["ZeRO"].startswith("CheckpointError: DeepSpeed cannot read it: Unpickl"), (name, outcomes)
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
    refused = start_torch(
        tmp_path, torch_job(tiny, FSDP), attempt=2, fields={"resume": True, "needs_state": "it has saved one"}
    )
    assert refused.wait() == [1]
    assert ".metadata cannot be read: it names posix.system" in refused.events("failure")[0]["message"]
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize("division", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_weights_changed_together_with_their_manifest_are_refused_by_what_the_journal_recorded(
    tiny: Tiny, tmp_path: Path, division: dict[str, Any]
) -> None:
    """On both nodes; the state before is used, also of a node that has been sent it."""
    job, homes = torch_job(tiny, division), ["a", "b"]
    before = run_torch(tmp_path, job, ranks=2, homes=homes, fields={"checkpoint_every": 2})
    saved = [event for rank in (0, 1) for event in before.events("checkpoint", rank) if "manifest" in event]
    fields = {
        "resume": True,
        "needs_state": "it has saved one",
        "manifests": [(event["state"], event["manifest"]) for event in saved],
    }
    for manifest in tmp_path.glob("*/runs/run/checkpoints/step-000000008/manifest-*.json"):
        files = [entry["name"] for entry in json.loads(manifest.read_text())["files"]]
        tamper(
            manifest.parent, next(name for name in files if name.endswith((".distcp", ".safetensors"))), manifest.name
        )
    after = run_torch(tmp_path, job, ranks=3, attempt=2, homes=[*homes, "c"], fields=fields)
    (resumed,) = after.events("resumed")
    assert (resumed["update"], resumed["refused"]) == (6, 1)
    assert "not recorded" not in after.log()
    warnings = [event["message"] for event in after.events("warning")]
    (refusal,) = [message for message in warnings if "step-000000008 is not used" in message]
    newest = {event["manifest"] for event in saved if event["update"] == 8}
    assert "its manifest is not the one that it was saved with" in refusal
    assert any(digest[:12] in refusal for digest in newest)
    recorded = {event["manifest"] for event in saved if event["update"] == 6}
    sent = {
        hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.glob("c/**/step-000000006/manifest-*.json")
    }
    assert sent and sent <= recorded
