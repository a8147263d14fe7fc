"""`flightdeck plan` on real nodes with their own homes and pythons: what it prints can be run, and a node that is away
makes it no less a plan."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.node.processes import kill_group
from tests.cluster.cluster import Cluster
from tests.cluster.demo_job import flightdeck_toml, install_demo
from tests.demo_copies import demo_below
from tests.tui.commands import environment, flightdeck

PATIENCE_S = 300.0
RANKS = 2
_ASK_MLX = """
import json, sys
from mlx._distributed_utils.common import Hostfile
print(json.dumps([[host.ssh_hostname, host.ips] for host in Hostfile.from_file(sys.argv[1]).hosts]))
"""


@pytest.fixture
def studio(cluster: Cluster, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a configuration of two of the nodes; the model and the data are on each of them. Stock ranks spin
    while they wait, so more of them than cores would take minutes."""
    monkeypatch.setenv("FLIGHTDECK_SSH_CONFIG", str(cluster.ssh_config))
    install_demo(cluster, demo_below(home))
    head, first, second, *_, job = flightdeck_toml(cluster, iters=4, max_seq_length=64, val_batches=1).split("\n[")
    (tmp_path / "flightdeck.toml").write_text("\n[".join([head, first, second, job]))
    return tmp_path


def planned(home: Path, studio: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    done = flightdeck(home, "plan", "--json", *arguments, cwd=studio)
    assert done.code == code, (done.out, done.err)
    document: dict[str, Any] = json.loads(done.out)
    return document


def users_own_ssh(folder: Path, cluster: Cluster) -> Path:
    """A folder for PATH with an ssh that knows the nodes, as a person's own does by ~/.ssh/config."""
    folder.mkdir()
    script = folder / "ssh"
    script.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {cluster.ssh_config} "$@"\n')
    script.chmod(0o755)
    return folder


def by_hand(command: str, home: Path, path: Path) -> str:
    """What a person sees who pastes the command into a shell."""
    patched = environment(home, PATH=f"{path}{os.pathsep}{os.environ['PATH']}")
    reader, writer = os.pipe()
    with subprocess.Popen(
        ["/bin/sh", "-c", command],
        stdin=reader,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=patched,
        start_new_session=True,
    ) as process:
        try:
            out, _ = process.communicate(timeout=PATIENCE_S)
        finally:
            kill_group(process.pid, signal.SIGKILL)
            os.close(writer)
            os.close(reader)
    return out.decode(errors="replace")


@pytest.mark.slow
def test_the_printed_launch_starts_and_trains_as_one_group(
    cluster: Cluster, home: Path, studio: Path, tmp_path: Path
) -> None:
    plan = planned(home, studio)
    assert plan["strategy"]["world_size"] == RANKS
    output = by_hand(plan["distributed_config"]["mlx_launch_command"], home, users_own_ssh(tmp_path / "bin", cluster))
    # mlx-lm says this once, on rank 0 of the one group: ranks that are alone would say it each.
    assert output.count("Loading pretrained model") == 1, output
    assert "train_loss" in output and "exited with code" not in output, output
    assert (cluster.nodes[0].disk.home / ".flightdeck/by-hand/demo.adapters/adapters.safetensors").exists()


def test_the_printed_launch_of_a_command_has_each_nodes_own_python_and_home(
    cluster: Cluster, home: Path, studio: Path, tmp_path: Path
) -> None:
    # One write for the line: with PYTHONUNBUFFERED, print() writes each of its parts, and mlx.launch mixes the ranks'.
    program = (
        "import os, sys, mlx.core as mx; size = mx.distributed.init(strict=True).size(); "
        "os.write(1, ' '.join(['world', str(size), *sys.argv[1:]]).encode() + b'\\n')"
    )
    text = (studio / "flightdeck.toml").read_text().partition("[job]")[0]
    command = json.dumps(["python", "-c", program, "{rank}", "{python}", "it's {workdir}"])
    (studio / "flightdeck.toml").write_text(f'{text}[job]\nname = "mine"\ncommand = {command}\n')
    plan = planned(home, studio)
    output = by_hand(plan["distributed_config"]["mlx_launch_command"], home, users_own_ssh(tmp_path / "bin", cluster))
    for rank, node in enumerate(cluster.nodes[:RANKS]):
        python = str(node.python).replace("~", str(node.home), 1)
        assert f"world {RANKS} {rank} {python} it's {node.home}" in output, output


def test_the_hostfile_is_the_one_that_mlx_reads(cluster: Cluster, home: Path, studio: Path) -> None:
    hostfile = planned(home, studio)["distributed_config"]["hostfile"]
    assert json.loads(Path(hostfile["path"]).read_text()) == hostfile["document"]
    done = subprocess.run([sys.executable, "-c", _ASK_MLX, hostfile["path"]], stdout=subprocess.PIPE, check=True)
    assert json.loads(done.stdout) == [[node.ssh, [node.ip]] for node in cluster.nodes[:RANKS]]


def test_the_verification_steps_can_be_run(cluster: Cluster, home: Path, studio: Path, tmp_path: Path) -> None:
    steps = planned(home, studio)["verification_steps"]
    path = f"{users_own_ssh(tmp_path / 'bin', cluster)}{os.pathsep}{os.environ['PATH']}"
    quick = [step for step in steps if " -c " in step and "flightdeck" not in step.split()[0]]
    assert len(quick) == 1 + RANKS
    for step in quick:
        done = subprocess.run(
            step, shell=True, env=environment(home, PATH=path), capture_output=True, timeout=60, check=False
        )
        assert done.returncode == 0, (step, done.stderr)


def test_a_node_that_is_away_is_planned_by_what_was_last_seen_of_it(cluster: Cluster, home: Path, studio: Path) -> None:
    node = cluster.nodes[1]
    planned(home, studio)
    node.stop_sshd()
    plan = planned(home, studio)
    away = plan["nodes"][1]
    assert away["problem"] and away["facts_age_s"] > 0 and away["memory_bytes"]
    assert plan["distributed_config"]["mlx_launch_command"] and plan["memory"]["ranks"][1]["fits"]
    assert any(warning["name"] == "nodes" and node.name in warning["text"] for warning in plan["warnings"])


def test_a_node_that_nobody_has_ever_seen_leaves_its_part_null(cluster: Cluster, home: Path, studio: Path) -> None:
    cluster.nodes[1].stop_sshd()
    plan = planned(home, studio)
    assert plan["nodes"][1]["memory_bytes"] is None and plan["memory"]["ranks"][1]["fits"] is None
    assert plan["batch_configuration"]["largest_per_gpu_batch_size"] is None
    assert plan["batch_configuration"]["total_batch_size"] == 8
