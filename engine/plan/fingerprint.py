"""Fingerprints of everything that calibration results depend on: they apply only if the fingerprint is unchanged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, TypeVar

from engine.config.mlx_lm_keys import TORCH_KEYS
from engine.config.models import Config, NodeConfig
from engine.measurements import Calibration, Scaling
from engine.models import NodeFacts

Measured = TypeVar("Measured", Calibration, Scaling)
STEP_KEYS = (
    "batch_size", "batch_tokens", "compile_on_cpu", "grad_accumulation_steps", "grad_checkpoint", "lora_parameters",
    "mask_prompt", "max_grad_norm", "max_seq_length", "num_layers", "optimizer", "optimizer_config",
    "optimizer_precision", "moments", "sequence_tiling", "wire",
)  # fmt: skip
"""The mlx-lm keys that affect the time or memory of a step."""


def fingerprint(config: Config, facts: Iterable[NodeFacts]) -> str:
    """SHA-256, hexadecimal, of the job's model, data and settings, and the nodes' hosts, chips and versions as last
    reported (empty for a node that was never probed)."""
    seen = {(fact.node, fact.host): fact for fact in facts}
    job = config.job
    what = {
        "job": {
            **{key: getattr(job, key) for key in ("command", "model", "fine_tune_type", "layer_split", "env")},
            # A step of one rank alone is as of "data"; for the links there is Calibration.connected_as.
            "strategy": "data" if job.kind.strategy.averages else job.strategy,
            **{key: job.mlx_lm.get(key) for key in STEP_KEYS},
        },
        "backend": config.cluster.backend,
        "nodes": [_node(node, seen.get((node.name, node.ssh))) for node in config.nodes],
    }
    return _digest(what)


def scaling_fingerprint(config: Config, facts: Iterable[NodeFacts]) -> str:
    """As `fingerprint`, and of how the ranks work together, PyTorch's versions and NVIDIA's drivers and GPUs."""
    seen = {(fact.node, fact.host): fact for fact in facts}
    settings = {key: config.job.mlx_lm.get(key) for key in ("local_steps", *TORCH_KEYS)}
    if config.job.framework == "torch":
        settings["machines"] = [
            (fact.torch, fact.nvidia_driver, [gpu.name for gpu in fact.gpus])
            for node in config.nodes
            if (fact := seen.get((node.name, node.ssh))) is not None
        ]
    return _digest({"job on nodes": fingerprint(config, seen.values()), "strategy": config.job.strategy, **settings})


def node_fingerprints(config: Config, facts: Iterable[NodeFacts]) -> dict[str, str]:
    """SHA-256, hexadecimal, by node of its part of the fingerprint, for nodes with facts."""
    seen = {(fact.node, fact.host): fact for fact in facts if fact.problem is None}
    return {
        node.name: _digest(_node(node, seen[node.name, node.ssh]))
        for node in config.nodes
        if (node.name, node.ssh) in seen
    }


def changed_nodes(config: Config, facts: Iterable[NodeFacts], calibration: Calibration) -> tuple[str, ...]:
    """Nodes whose chip, python, mlx, mlx-lm or address changed since they were calibrated. A node that does not respond
    does not count as changed."""
    now, then = node_fingerprints(config, facts), calibration.machines
    return tuple(name for name, digest in now.items() if then.get(name, digest) != digest)


def latest_matching(config: Config, facts: Iterable[NodeFacts], taken: Iterable[Measured]) -> Measured | None:
    """The newest of `taken` of this job on these nodes, however old."""
    seen = list(facts)
    matching = {fingerprint(config, seen), scaling_fingerprint(config, seen)}
    of_these = (measured for measured in taken if measured.fingerprint in matching)
    return max(of_these, key=lambda measured: measured.taken_at, default=None)


def age_days(calibration: Calibration | Scaling, now: datetime) -> float:
    """At least 0, even if the clock was set back."""
    return max(0.0, (now - calibration.taken_at).total_seconds() / 86_400)


def is_stale(config: Config, calibration: Calibration | Scaling, now: datetime) -> bool:
    return age_days(calibration, now) > config.calibration.max_age_days


def _digest(what: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()


def _node(node: NodeConfig, facts: NodeFacts | None) -> dict[str, Any]:
    identity = {key: getattr(node, key) for key in ("name", "ssh", "ips", "model", "data")}
    identity |= {name: getattr(facts, name, None) for name in ("chip", "python", "mlx", "mlx_lm")}
    if facts is None or facts.mlx_cuda is None:
        return identity
    return identity | {"mlx_cuda": facts.mlx_cuda, "gpus": [gpu.name for gpu in facts.gpus]}
