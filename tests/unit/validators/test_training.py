"""The whole of a training in one verdict, and what other tools may import from `engine`."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import engine
from engine import validate_distributed_training

LAYERS = ("hardware", "worker", "checkpoint", "gradient", "performance", "health")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    workers = ["ultra", "max"]
    return {
        "checkpoints": ["a.safetensors"],
        "gradient_updates": [{"worker_id": name, "gradients": [1.0], "gradient_norm": 1.0} for name in workers],
        "performance_metrics": {
            "throughput": 1.7,
            "latency_ms": 20,
            "gpu_utilization": 0.93,
            "memory_utilization": 0.6,
        },
        "health_config": {"workers": [{"worker_id": name, "gpu_count": 1} for name in workers]},
    }


def flags(report: Any) -> dict[str, bool]:
    return {layer: getattr(report, f"{layer}_valid") for layer in LAYERS}


def test_a_sound_training_is_valid_in_every_layer(config: dict[str, Any]) -> None:
    report = validate_distributed_training(config)
    assert report.overall_valid and report.is_valid and report.validation_issues == ()
    assert flags(report) == dict.fromkeys(LAYERS, True)


@pytest.mark.parametrize("wrong", [None, [], "config", 7])
def test_another_type_is_a_type_error(wrong: Any) -> None:
    with pytest.raises(TypeError):
        validate_distributed_training(wrong)


@pytest.mark.parametrize("part", ["checkpoints", "gradient_updates", "performance_metrics", "health_config"])
def test_a_missing_part_is_named_and_an_empty_one_is_skipped_and_not_valid(config: dict[str, Any], part: str) -> None:
    empty = validate_distributed_training({**config, part: type(config[part])()})
    layers = {"checkpoints": ["checkpoint"], "gradient_updates": ["gradient"], "performance_metrics": ["performance"]}
    skipped = layers.get(part, ["hardware", "worker", "health"])
    assert [layer for layer in LAYERS if empty.statuses[layer] == "skip"] == skipped
    assert flags(empty) == {layer: layer not in skipped for layer in LAYERS}
    assert not empty.overall_valid
    assert [issue.split(":")[0] for issue in empty.validation_issues] == skipped
    del config[part]
    with pytest.raises(ValueError, match=part):
        validate_distributed_training(config)


@pytest.mark.parametrize(
    ("part", "value", "failing"),
    [
        ("checkpoints", ["missing.safetensors"], ["checkpoint"]),
        ("checkpoints", ["../../etc/passwd"], ["checkpoint"]),
        ("checkpoints", 7, ["checkpoint"]),
        ("gradient_updates", [{"worker_id": "max", "gradients": [math.nan], "gradient_norm": 1.0}], ["gradient"]),
        ("gradient_updates", [{"worker_id": "who", "gradients": [1.0], "gradient_norm": 1.0}], ["worker"]),
        ("gradient_updates", "text", ["gradient"]),
        ("performance_metrics", {"throughput": 0}, ["performance"]),
        ("health_config", {"workers": [{"worker_id": "max", "gpu_count": 0}]}, ["hardware", "worker", "health"]),
        ("health_config", {"workers": 3}, ["hardware", "worker", "health"]),
    ],
)
def test_a_fault_fails_its_layer_and_is_reported_by_it(
    config: dict[str, Any], part: str, value: Any, failing: list[str]
) -> None:
    report = validate_distributed_training({**config, part: value})
    assert [layer for layer, good in flags(report).items() if not good] == failing
    assert {issue.split(":")[0] for issue in report.validation_issues} == set(failing)


def test_a_running_training_is_checked_by_its_heartbeats(config: dict[str, Any]) -> None:
    workers = [{"worker_id": name, "gpu_count": 1, "last_heartbeat": 0} for name in ("ultra", "max")]
    report = validate_distributed_training({**config, "health_config": {"mode": "runtime", "workers": workers}})
    assert [layer for layer, good in flags(report).items() if not good] == ["health"]
    assert "ultra" in report.validation_issues[0]


def test_every_public_name_is_there_and_costs_nothing_until_it_is_used() -> None:
    for name in engine.__all__:
        assert getattr(engine, name).__module__.startswith("engine.")
    probe = "import engine, sys; print([name for name in sys.modules if name.startswith('engine.')])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        engine.nothing  # noqa: B018
