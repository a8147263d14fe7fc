"""Every save reports its files, so that they can be fetched and verified: names, bytes and SHA-256 as on the disk."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine.trainer.saver import CONFIG_FILE, write_model
from engine.trainer.weights import WeightStream
from engine.training.checkpoint_files import MANIFEST_NAME
from engine.training.reporting import Files
from tests.training.states import events, periodic, snapshot
from tests.training.test_update import train
from tests.training.tiny import Tiny


def on_disk(folder: Path, files: Files) -> Files:
    contents = [(name, (folder / name).read_bytes()) for name, *_ in files]
    return [(name, len(content), hashlib.sha256(content).hexdigest()) for name, content in contents]


def reported(event: Mapping[str, Any]) -> Files:
    return [(name, size, digest) for name, size, digest in event["files"]]


@pytest.mark.parametrize(("kind", "holds"), [("lora", "adapter"), ("full", "weights")])
def test_of_trained_weights(tiny: Tiny, tmp_path: Path, kind: str, holds: str) -> None:
    keys = {"iters": 4, "save_every": 2, "save_best": True, "steps_per_eval": 2, "val_batches": 1}
    # As `run_and_test` writes it before the first iteration.
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / CONFIG_FILE).write_text("{}")
    trained = train(tiny, tmp_path, fine_tune_type=kind, **keys)
    saves = [event for event in trained.of("checkpoint") if event["phase"] == "committed"]
    assert {event["holds"] for event in saves} == {holds}
    numbered, *_, last = [event for event in saves if "val_loss" not in event]
    names = [[name for name, *_ in reported(event)] for event in (numbered, last)]
    assert names == [
        ["0000002_adapters.safetensors", CONFIG_FILE],
        [CONFIG_FILE, "adapters.safetensors"],
    ]
    best = [event for event in saves if "val_loss" in event][-1]
    for event in (numbered, last, best):
        assert event["folder"] == str(trained.job.adapter_path)
        assert reported(event) == on_disk(trained.job.adapter_path, reported(event))


def test_of_a_whole_model(tiny: Tiny, tmp_path: Path) -> None:
    saved = write_model(tmp_path / "model", tiny.model, WeightStream.of({"a": mx.zeros(3), "b": mx.ones((2, 2))}))
    assert saved.files == on_disk(saved.folder, saved.files)
    assert {name for name, *_ in saved.files} == {path.name for path in (tmp_path / "model").iterdir()}
    assert saved.bytes == 28, "of weights"


def test_of_a_state(tmp_path: Path) -> None:
    checkpoints = periodic(tmp_path)
    checkpoints.begin(snapshot(2))
    checkpoints.finish(None)
    event = events(tmp_path / "e0")[-1]
    files = reported(event)
    assert files == on_disk(Path(event["folder"]), files)
    assert {name for name, *_ in files} == {path.name for path in Path(event["folder"]).iterdir()}
    assert (files[-1][0], files[-1][2], event["parts"]) == (MANIFEST_NAME, event["manifest"], 1)
