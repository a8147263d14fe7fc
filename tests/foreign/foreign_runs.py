"""Runs of foreign programs on two nodes, in a folder that both have."""

from __future__ import annotations

import json
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config.models import ClusterConfig, Config, JobConfig, PreflightConfig, RecoveryConfig
from tests.cluster.cluster import Cluster
from tests.cluster.command import command
from tests.cluster.machine import SHARED
from tests.cluster.specs import FIRST_UID
from tests.cluster.system import VOLUME
from tests.demo_copies import made_demo
from tests.faults.cluster_runs import ClusterRun, nodes_of, start_on
from tests.faults.local_runs import SHORT_GRACES
from tests.foreign.table import SCRIPTS, Losses, Program
from tests.needs import FOREIGN, TORCH
from tests.tui.commands import flightdeck

ENDLESS = 100_000
"""Steps of a program that is not to end by itself."""
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "MLX_DISABLE_COMPILE": "1"}
"""The nodes reach no hub, and the kernels that MLX compiles on a CPU take a stock mlx-lm minutes."""
_CONSOLE_SCRIPT = """#!/bin/sh
'''exec' "{python}" "$0" "$@"
' '''
import sys
from {module} import main
sys.exit(main())
"""
"""As pip writes it for a path with a space."""


@dataclass
class ForeignRun:
    """One run of a program, and what the commands say of it."""

    program: Program
    run: ClusterRun
    folder: Path
    """Its working directory, as this machine sees it."""
    home: Path

    def command(self, *words: str) -> Any:
        done = flightdeck(self.home, *words, "--json")
        assert done.code == 0, done.err
        return json.loads(done.out)

    def shown(self) -> Any:
        return self.command("show", self.run.dir.id)

    def losses(self) -> Losses:
        rows = self.command("metrics", self.run.dir.id)
        return {row["iteration"]: row["train_loss"] for row in rows if "train_loss" in row}

    def losses_of(self, attempt: int) -> Losses:
        rows = map(json.loads, self.run.dir.metrics.read_text().splitlines())
        return {
            row["iteration"]: row["train_loss"] for row in rows if row["kind"] == "train" and row["attempt"] == attempt
        }

    def own(self) -> Losses:
        return self.program.own(self.folder, self.run.dir.log(0).read_text(errors="replace"))

    def has_saved(self) -> bool:
        return self.program.saved is not None and any(self.folder.glob(self.program.saved))


def foreign_config(cluster: Cluster, program: Program, steps: int, recovery: RecoveryConfig) -> tuple[Config, Path]:
    """Its configuration, and its folder, which is on both nodes."""
    folder = cluster.folder / SHARED / uuid.uuid4().hex[:8]
    shutil.copytree(SCRIPTS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    if {"model", "data"} <= set(program.command):
        for name in ("model", "data"):
            shutil.copytree(made_demo() / name, folder / name)
    command("chown", "-R", f"{FIRST_UID}:{FIRST_UID}", str(folder))
    nodes = nodes_of(cluster, f"{VOLUME}/{folder.name}")
    if program.framework == "torch":
        python = str(FOREIGN if program.needs == "foreign" else TORCH)
        nodes = tuple(node.model_copy(update={"python": python}) for node in nodes)
    for node in cluster.nodes if program.command[0].startswith("mlx_lm.") else ():
        python = node.python.replace("~", node.home)
        script = _CONSOLE_SCRIPT.format(python=python, module=program.command[0])
        node.write(str(Path(node.python).with_name(program.command[0])), script, mode=0o755)
    job = JobConfig.model_validate(
        {
            "name": "foreign",
            "framework": program.framework,
            "command": program.words(steps),
            "env": ENVIRONMENT,
            **program.job,
        }
    )
    config = Config(
        cluster=ClusterConfig(),
        nodes=nodes,
        job=job,
        preflight=PreflightConfig(all_sum_s=0.3),
        recovery=recovery,
    )
    return config, folder


def start_program(
    cluster: Cluster, home: Path, program: Program, *, steps: int, recovery: RecoveryConfig = SHORT_GRACES
) -> ForeignRun:
    config, folder = foreign_config(cluster, program, steps, recovery)
    return ForeignRun(program, start_on(cluster, home, config), folder, home)
