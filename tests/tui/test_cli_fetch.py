"""`flightdeck fetch` and the result in `show`, as a shell sees them."""

from __future__ import annotations

import hashlib
import json
from datetime import timedelta
from pathlib import Path

import pytest

from engine.protocol.task import Task
from engine.run.events import SavedFiles, StateSaved, TrainingStarted, WeightsSaved
from tests.tui.commands import flightdeck
from tests.unit.run.run_maker import START, MadeRun, make_run_config


@pytest.fixture
def run(home: Path, tmp_path: Path) -> MadeRun:
    """It has left an adapter on this machine."""
    node = tmp_path / "node"
    node.mkdir()
    (node / "adapters.safetensors").write_bytes(b"weights")
    digest = hashlib.sha256(b"weights").hexdigest()
    saved = SavedFiles(folder=str(node), iteration=60, files=(("adapters.safetensors", 7, digest),))
    run = MadeRun(home).state("preflight", "launching").attempt().state("running")
    run.append(
        TrainingStarted(attempt=1, versions={"mlx": "0.32.4"}, inputs={"train.jsonl": "crc32 1"}, from_base=True)
    )
    run.append(WeightsSaved(rank=0, node="node0", attempt=1, holds="adapter", saved=saved))
    run.metrics(
        {"kind": "val", "attempt": 1, "iteration": step, "val_loss": loss} for step, loss in ((0, 5.0), (59, 2.0))
    )
    run.metrics([{"kind": "train", "attempt": 1, "iteration": 60, "trained_tokens": 1234, "train_loss": 2.1}])
    return run.state("finishing", "succeeded", reason="completed")


def test_the_adapter_is_fetched_and_the_command_says_where(run: MadeRun, home: Path, tmp_path: Path) -> None:
    done = flightdeck(home, "fetch", "last", cwd=tmp_path)
    folder = tmp_path / run.id
    assert done.code == 0, done
    assert done.out == f"{folder}: 1 file of iteration 60, 7 B, each with the SHA-256 that it was saved with\n"
    assert (folder / "adapters.safetensors").read_bytes() == b"weights"
    report = json.loads(flightdeck(home, "fetch", run.id, str(folder), "--json").out)
    assert (report["folder"], [file["name"] for file in report["files"]]) == (str(folder), ["adapters.safetensors"])


def test_last_is_the_newest_training_where_a_task_came_after_it(run: MadeRun, home: Path, tmp_path: Path) -> None:
    config = make_run_config(1)
    config = config.model_copy(update={"job": config.job.model_copy(update={"task": Task("evaluate", run.id)})})
    task = MadeRun(home, created=START + timedelta(hours=1), name="job-evaluate", config=config)
    task.state("failed", reason="rank_failed").close()
    assert flightdeck(home, "fetch", "last", cwd=tmp_path).out.startswith(str(tmp_path / run.id))
    assert json.loads(flightdeck(home, "metrics", "last", "--json").out)
    assert f"{run.id} has succeeded" in flightdeck(home, "resume", "last").err
    assert f"{task.id} has trained nothing" in flightdeck(home, "resume", task.id).err


def test_a_file_is_no_folder_to_fetch_to(run: MadeRun, home: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"kept")
    done = flightdeck(home, "fetch", run.id, str(tmp_path / "file"))
    assert done.code == 2 and f"{tmp_path / 'file'} is a file" in done.err
    assert (tmp_path / "file").read_bytes() == b"kept"


def test_what_cannot_be_fetched_is_refused_in_one_line_as_bad_usage(run: MadeRun, home: Path, tmp_path: Path) -> None:
    for option, why in (("--best", "no best weights were saved"), ("--checkpoint", "no checkpoint has been saved")):
        done = flightdeck(home, "fetch", "last", str(tmp_path / "here"), option)
        assert flightdeck(home, "fetch", "last", option, str(tmp_path / "here")) == done, "in any order"
        assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1) and why in done.err
    assert flightdeck(home, "fetch", "last", "--best", "--checkpoint").code == 2
    assert flightdeck(home, "fetch", "nobody").code == 2


def test_a_file_that_was_replaced_since_is_a_failure(run: MadeRun, home: Path, tmp_path: Path) -> None:
    (tmp_path / "node" / "adapters.safetensors").write_bytes(b"WEIGHTS")
    done = flightdeck(home, "fetch", "last", str(tmp_path / "here"))
    assert done.code == 1 and "is not what was saved" in done.err and len(done.err.splitlines()) == 1
    assert list((tmp_path / "here").iterdir()) == []


def test_show_names_the_option_that_fetches_a_checkpoint_alone(home: Path, tmp_path: Path) -> None:
    saved = SavedFiles(folder=str(tmp_path), iteration=4, files=(("weights.safetensors", 7, "0" * 64),))
    run = MadeRun(home).state("preflight", "launching").attempt().state("running")
    run.append(StateSaved(rank=0, node="node0", state="4.0", manifest="0" * 64, saved=saved))
    run.state("failed", reason="rank_failed")
    assert (
        f"  {'fetch':<10} flightdeck fetch {run.id} --checkpoint" in flightdeck(home, "show", "last").out.splitlines()
    )


def test_show_says_what_the_run_came_to(run: MadeRun, home: Path) -> None:
    lines = flightdeck(home, "show", "last").out.splitlines()
    (text,) = [line.split(maxsplit=1)[1] for line in lines if line.startswith("  result ")]
    assert text.startswith("val loss 5.000 to 2.000; 1,234 tokens in 0:0")
    assert f"  {'fetch':<10} flightdeck fetch {run.id}" in lines
    result = json.loads(flightdeck(home, "show", "last", "--json").out)["result"]
    assert (result["base"], result["best"], result["energy"]) == (5.0, {"iteration": 59, "loss": 2.0}, None)
    assert result["versions"] == {"mlx": "0.32.4"}
