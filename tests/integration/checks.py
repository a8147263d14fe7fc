"""A configuration of the test cluster for preflight, and what a person would do with what it finds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from engine.checks.check import CheckFunction
from engine.checks.context import CheckContext
from engine.cluster.transport.fleet import Fleet
from engine.config.mlx_lm_keys import with_defaults
from engine.config.models import ClusterConfig, Config, JobConfig, NodeConfig, PreflightConfig
from engine.models import CheckResult
from tests.cluster.cluster import Cluster
from tests.cluster.node import Node
from tests.model_files import llama_files

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
CONFIGURATION = {"model_type": "llama", **SIZES, "vocab_size": 256, "rms_norm_eps": 1e-6}
LINES = "".join(json.dumps({"text": f"line {number}"}) + "\n" for number in range(12))
LISTEN = """
import socket, time
listener = socket.socket()
listener.bind(("0.0.0.0", {port}))
listener.listen()
print("up", flush=True)
time.sleep(60)
"""
PORT = 23456


def config_of(cluster: Cluster, *, starting_port: int | None = None, command: bool = False) -> Config:
    nodes = tuple(
        NodeConfig(
            name=node.name,
            ssh=node.ssh,
            ips=(node.ip,),
            python=node.python,
            workdir="~",
            model="~/models/tiny",
            data="~/data",
        )
        for node in cluster.nodes
    )
    job = JobConfig(name="job", mlx_lm=with_defaults({"batch_size": 4, "iters": 10}))
    if command:
        job = JobConfig(name="job", command=("python", "mine.py"))
    return Config(
        cluster=ClusterConfig(starting_port=starting_port),
        nodes=nodes,
        job=job,
        preflight=PreflightConfig(all_sum_s=0.3),
    )


def furnish(node: Node) -> None:
    """A model and data where the configuration says."""
    for name, content in llama_files(CONFIGURATION).items():
        node.write(f"~/models/tiny/{name}", content)
    for name in ("train", "valid"):
        # Rows of one in the other would be warned of.
        node.write(f"~/data/{name}.jsonl", LINES.replace("line", "line" if name == "train" else "row"))


def is_idle(node: Node) -> bool:
    return not [process for process in node.processes() if "engine." in process.command]


def unheard(event: str, status: str, context: dict[str, object]) -> None:
    """An audit log that is looked at by another test."""


def assert_nothing_left(node: Node) -> None:
    """Nothing of a preflight is left; other tests of the session have left their runs there."""
    assert node.run(["/bin/sh", "-c", "ls ~/.flightdeck/runs | grep ^preflight"]).stdout == ""
    left = [process.command for process in node.processes() if "engine." in process.command]
    # The fleet's own agent stays as long as its connection; a probe would be a second process of that name.
    assert len(left) <= 1 and all("engine.node.agent" in command for command in left), left


def as_user(cluster: Cluster, line: str) -> subprocess.CompletedProcess[str]:
    """What a person has pasted into a shell of this machine, with the cluster's own ssh configuration."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("ssh", "scp"):
            program = Path(folder) / name
            program.write_text(f'#!/bin/sh\nexec {shutil.which(name)} -F {cluster.ssh_config} "$@"\n')
            program.chmod(0o755)
        environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
        return subprocess.run(["/bin/sh", "-c", line], env=environment, capture_output=True, text=True, check=False)


async def run_check_on(check: CheckFunction, config: Config, fleet: Fleet) -> CheckResult:
    context = CheckContext(config, fleet)
    try:
        return await check(context)
    finally:
        await context.close()
