"""Calibrations for these tests."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from engine.config.models import CalibrationConfig, ClusterConfig, Config, JobConfig, NodeConfig
from engine.measurements import Calibration, LinkMeasure, NodeMeasure

TAKEN = datetime(2026, 11, 21, 12, tzinfo=UTC)


def config(names: list[str], *, batch: int = 8, fixed: Mapping[str, float] | None = None, **calibration: Any) -> Config:
    fixed = fixed or {}
    nodes = tuple(
        NodeConfig(name=name, ssh=f"{name}.local", python=sys.executable, workdir="/w", share=fixed.get(name))
        for name in names
    )
    job = JobConfig(name="job", model="m", data="d", mlx_lm={"batch_size": batch, "grad_accumulation_steps": 1})
    cluster = ClusterConfig(name="studio")
    return Config(cluster=cluster, nodes=nodes, job=job, calibration=CalibrationConfig(**calibration))


def measure(node: str, speed: float | None, *, batch: int = 4, **fields: Any) -> NodeMeasure:
    step = batch / speed if speed else None
    tokens = None if speed is None else speed * 100
    return NodeMeasure(
        node=node, host=f"{node}.local", examples_per_s=speed, batch=batch, step_s=step, tokens_per_s=tokens, **fields
    )


def calibration(speeds: Mapping[str, float | None], **fields: Any) -> Calibration:
    nodes = tuple(measure(node, speed) for node, speed in speeds.items())
    all_ranks = LinkMeasure(nodes=tuple(speeds), latency_s=0.001, bandwidth_bytes_per_s=1e9)
    known = {"cluster": "studio", "job": "job", "fingerprint": "f", "taken_at": TAKEN, "nodes": nodes}
    known["connected_as"] = ("data", "local")
    return Calibration.model_validate({**known, "all_ranks": all_ranks, "gradient_bytes": 4_000_000, **fields})
