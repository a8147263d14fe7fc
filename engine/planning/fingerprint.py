"""What a calibration's figures depend on, as one SHA-256: under another one they mean nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from engine.config.models import FlightConfig, NodeConfig
from engine.measured import Calibration
from engine.models import NodeFacts

STEP_KEYS = (
    "batch_size",
    "grad_accumulation_steps",
    "grad_checkpoint",
    "lora_parameters",
    "mask_prompt",
    "max_seq_length",
    "num_layers",
    "optimizer",
    "optimizer_config",
    "optimizer_precision",
)
"""Of mlx-lm's keys those that change how long a step takes or what memory it needs."""


def fingerprint(config: FlightConfig, facts: Iterable[NodeFacts]) -> str:
    """SHA-256, hexadecimal, of the job's model, data and settings, the nodes' hosts, and their chips and versions as
    they were last seen (of a node that was never seen: none)."""
    seen = {(fact.node, fact.host): fact for fact in facts}
    job = config.job
    what = {
        "job": {
            "command": job.command,
            "model": job.model,
            "fine_tune_type": job.fine_tune_type,
            "strategy": job.strategy,
            "env": job.env,
            **{key: job.mlx_lm.get(key) for key in STEP_KEYS},
        },
        "backend": config.cluster.backend,
        "nodes": [_node(node, seen.get((node.name, node.ssh))) for node in config.nodes],
    }
    return _digest(what)


def machines(config: FlightConfig, facts: Iterable[NodeFacts]) -> dict[str, str]:
    """Node → SHA-256, hexadecimal, of its own part of the fingerprint; of those that were ever seen."""
    seen = {(fact.node, fact.host): fact for fact in facts if fact.problem is None}
    return {
        node.name: _digest(_node(node, seen[node.name, node.ssh]))
        for node in config.nodes
        if (node.name, node.ssh) in seen
    }


def changed(config: FlightConfig, facts: Iterable[NodeFacts], calibration: Calibration) -> tuple[str, ...]:
    """Nodes that have another chip, python, mlx, mlx-lm or address now than when they were measured; one that does not
    answer has not."""
    now = machines(config, facts)
    return tuple(
        name for name, digest in now.items() if name in calibration.machines and calibration.machines[name] != digest
    )


def matching(
    config: FlightConfig, facts: Iterable[NodeFacts], calibrations: Iterable[Calibration]
) -> Calibration | None:
    """The newest of `calibrations` that was taken of this job on these nodes, however long ago."""
    wanted = fingerprint(config, facts)
    return max(
        (taken for taken in calibrations if taken.fingerprint == wanted),
        key=lambda taken: taken.taken_at,
        default=None,
    )


def age_days(calibration: Calibration, now: datetime) -> float:
    """Never below 0: a clock that was set back does not make it a future one."""
    return max(0.0, (now - calibration.taken_at).total_seconds() / 86_400)


def stale(config: FlightConfig, calibration: Calibration, now: datetime) -> bool:
    """Whether it is older than [calibration] max_age_days."""
    return age_days(calibration, now) > config.calibration.max_age_days


def _digest(what: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()


def _node(node: NodeConfig, facts: NodeFacts | None) -> dict[str, Any]:
    return {
        "name": node.name,
        "ssh": node.ssh,
        "ips": node.ips,
        "model": node.model,
        "data": node.data,
        "chip": facts.chip if facts else None,
        "python": facts.python if facts else None,
        "mlx": facts.mlx if facts else None,
        "mlx_lm": facts.mlx_lm if facts else None,
    }
