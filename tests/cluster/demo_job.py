"""The demo's job on a test cluster: its model and data on every node, and a flightdeck.toml for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from engine.demo import ensure_made
from tests.cluster.cluster import Cluster

MODEL, DATA = "~/models/demo", "~/data/demo"
"""The same below every node's ~, so a different absolute path on each."""
JOB: dict[str, str | int | float] = {
    "name": "demo",
    "model": MODEL,
    "data": DATA,
    "fine_tune_type": "full",
    "batch_size": 8,
    "iters": 60,
    "learning_rate": 3e-3,
    "steps_per_report": 1,
    "steps_per_eval": 20,
    "val_batches": 2,
    "save_every": 20,
    "max_seq_length": 256,
}
"""As in engine.demo's configuration."""
TOML_NAME = "flightdeck.toml"


def install_demo(cluster: Cluster, home: Path) -> None:
    """Copy the demo's model and data to every node, made below `home` first when they are not there (seconds)."""
    made = ensure_made(home)
    for node in cluster.nodes:
        node.copy_in(made / "model", MODEL)
        node.copy_in(made / "data", DATA)


def flightdeck_toml(cluster: Cluster, names: Sequence[str] = (), **job: str | int | float) -> str:
    """A configuration of the demo's training on the cluster's nodes, or on those of `names`; `job` wins over JOB."""
    lines = ["[cluster]", 'name = "test-cluster"', 'backend = "ring"']
    for node in [node for node in cluster.nodes if not names or node.name in names]:
        keys: dict[str, str | list[str]] = {"name": node.name, "ssh": node.ssh, "python": node.python}
        if cluster.names_addresses:
            keys["ips"] = [node.ip]
        # What JSON writes for these strings, lists and numbers is TOML, too.
        lines += ["", "[[node]]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    lines += ["", "[job]", *(f"{key} = {json.dumps(value)}" for key, value in {**JOB, **job}.items())]
    return "\n".join(lines) + "\n"


def write_toml(cluster: Cluster) -> Path:
    """Write the cluster's flightdeck.toml into its folder."""
    file = cluster.folder / TOML_NAME
    file.write_text(flightdeck_toml(cluster))
    return file
