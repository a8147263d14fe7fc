"""The launch as typed by hand: each rank's shell picks its own arguments, whatever they contain."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engine.config.mlx_lm_keys import with_defaults
from engine.config.models import ClusterConfig, Config, JobConfig, NodeConfig
from engine.launch.manual_launch import JobSizes, manual_launch
from engine.plan.document import Launching
from engine.plan.network import NetworkPlan
from tests.unit.launch.host_layouts import configured_network

HOSTFILE = Path("/state/plans/here.hostfile.json")


def config(*nodes: NodeConfig, settings: dict[str, Any] | None = None, **job: Any) -> Config:
    keys = {"name": "job", "model": "~/model", "data": "~/data", "mlx_lm": with_defaults(settings or {})}
    return Config(cluster=ClusterConfig(), nodes=nodes, job=JobConfig(**{**keys, **job}))


def typed(job_config: Config, backend: str = "ring", **sizes: Any) -> Launching:
    network: NetworkPlan = configured_network(job_config.nodes, backend)
    return manual_launch(job_config, network, HOSTFILE, JobSizes(**sizes))


def of_rank(launch: Launching, rank: int, home: Path) -> list[str]:
    """What the shell of a rank becomes: its program's arguments."""
    assert launch.mlx_launch_command is not None
    argv = shlex.split(launch.mlx_launch_command)
    program = argv[argv.index("--") + 1 :]
    (home / "show").write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\0" "$word"; done\n')
    (home / "show").chmod(0o755)
    assert program[:2] == ["/bin/sh", "-c"]
    done = subprocess.run(
        program,
        env={"MLX_RANK": str(rank), "HOME": str(home), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        check=True,
    )
    return done.stdout.decode().split("\0")[:-1]


def node(name: str, home: Path) -> NodeConfig:
    """One whose python shows what it is given."""
    return NodeConfig(name=name, ssh=f"{name}.local", ips=("10.0.0.1",), python="~/show", workdir=str(home))


def test_data_that_mlx_lm_cannot_read_is_named_as_it_is_converted(tmp_path: Path, home: Path) -> None:
    here = node("a", tmp_path).model_copy(update={"ssh": "127.0.0.1"})
    nodes = here, node("b", tmp_path)
    launch = typed(config(*nodes, settings={"batch_size": 8}, data="~/qa.csv"), converted="0123abc")
    argvs = [of_rank(launch, rank, tmp_path) for rank in (0, 1)]
    folders = [argv[argv.index("--data") + 1] for argv in argvs]
    assert folders == [f"{home}/node/data/0123abc", f"{tmp_path}/.flightdeck/data/0123abc"]
    assert any("flightdeck preflight" in note for note in launch.launch_notes)


def test_each_rank_becomes_its_own_nodes_python_with_its_own_paths(tmp_path: Path) -> None:
    first = node("a", tmp_path).model_copy(update={"model": "~/my models/it's"})
    launch = typed(config(first, node("b", tmp_path), settings={"batch_size": 8}))
    argv = of_rank(launch, 0, tmp_path)
    assert argv[:5] == ["-m", "mlx_lm", "lora", "--train", "--model"]
    assert argv[5] == f"{tmp_path}/my models/it's"
    other = of_rank(launch, 1, tmp_path)
    assert other[other.index("--model") + 1] == f"{tmp_path}/model"
    assert other[other.index("--batch-size") + 1] == "8"


def test_hostile_arguments_of_a_command_stay_arguments(tmp_path: Path) -> None:
    hostile = ["$(touch made)", "a;b", "it's", "{rank}", "two\nlines", "", "{workdir}/x y"]
    launch = typed(config(node("a", tmp_path), node("b", tmp_path), command=("python", *hostile), mlx_lm={}))
    assert of_rank(launch, 1, tmp_path) == ["$(touch made)", "a;b", "it's", "1", "two\nlines", "", f"{tmp_path}/x y"]
    assert not (tmp_path / "made").exists()


def test_what_mlx_lm_would_refuse_is_made_acceptable_and_noted(tmp_path: Path) -> None:
    launch = typed(config(node("a", tmp_path), node("b", tmp_path), settings={"batch_size": 5}), layers=2)
    argv = of_rank(launch, 0, tmp_path)
    assert argv[argv.index("--batch-size") + 1] == "6" and argv[argv.index("--num-layers") + 1] == "2"
    assert any("must divide by the 2 ranks" in note for note in launch.launch_notes)
    assert any("mlx-lm refuses more" in note for note in launch.launch_notes)


def test_keys_that_mlx_lm_does_not_have_are_left_out_and_noted(tmp_path: Path) -> None:
    """The batch of 5 is 6 here, for two ranks: 100 examples fill 16 of them."""
    keys = {"epochs": 1.5, "save_best": True, "patience": 3, "batch_size": 5}
    launch = typed(config(node("a", tmp_path), node("b", tmp_path), settings=keys), examples=100)
    argv = of_rank(launch, 0, tmp_path)
    assert argv[argv.index("--iters") + 1] == "24"
    assert not {"--epochs", "--save-best", "--patience"} & {*argv}
    for note in ("no epochs: iters is 24 here", "no save_best", "no patience"):
        assert any(note in each for each in launch.launch_notes)


@pytest.mark.parametrize(("report_to", "kept"), [("tensorboard", None), ("wandb, tensorboard", "wandb")])
def test_mlx_lm_does_not_report_to_tensorboard(tmp_path: Path, report_to: str, kept: str | None) -> None:
    launch = typed(config(node("a", tmp_path), settings={"report_to": report_to}))
    argv = of_rank(launch, 0, tmp_path)
    assert (argv[argv.index("--report-to") + 1] if "--report-to" in argv else None) == kept
    assert any("tensorboard" in note.lower() for note in launch.launch_notes)


def test_epochs_of_an_unknown_number_of_examples_are_left_to_the_reader(tmp_path: Path) -> None:
    launch = typed(config(node("a", tmp_path), settings={"epochs": 2}))
    assert "--iters" not in of_rank(launch, 0, tmp_path)
    assert any("add --iters" in note for note in launch.launch_notes)


@pytest.mark.parametrize(("layers", "flag", "noted"), [("auto", 0, 0), (False, 0, 0), (True, 1, 0), (3, 1, 1)])
def test_mlx_lm_recomputes_all_layers_or_none(tmp_path: Path, layers: object, flag: int, noted: int) -> None:
    launch = typed(config(node("a", tmp_path), settings={"grad_checkpoint": layers}))
    assert of_rank(launch, 0, tmp_path).count("--grad-checkpoint") == flag
    assert sum("grad_checkpoint" in note for note in launch.launch_notes) == noted


def test_keys_without_an_option_travel_as_a_file(tmp_path: Path) -> None:
    lora = {"rank": 4, "dropout": 0.0, "scale": 10.0, "keys": ["self_attn.q_proj"]}
    launch = typed(config(node("a", tmp_path), settings={"lora_parameters": lora}))
    assert launch.mlx_launch_command is not None and "--config /dev/stdin" in launch.mlx_launch_command
    assert json.dumps({"lora_parameters": lora}) in shlex.split(launch.mlx_launch_command)[-1]


def test_a_lone_rank_has_no_empty_hostfile(tmp_path: Path) -> None:
    launch = typed(config(node("a", tmp_path)))
    assert launch.mlx_launch_command is not None and "unset MLX_HOSTFILE" in launch.mlx_launch_command


def test_secrets_never_show(tmp_path: Path) -> None:
    launch = typed(
        config(node("a", tmp_path), env={"HF_TOKEN": "hf_secret", "DATABASE": "pg://a:b@c", "NCCL_DEBUG": "3"})
    )
    assert launch.mlx_launch_command is not None
    assert "hf_secret" not in launch.mlx_launch_command and "--env NCCL_DEBUG=3" in launch.mlx_launch_command
    assert any(
        note.startswith("DATABASE, HF_TOKEN of [job] env: write NAME=value lines") for note in launch.launch_notes
    )


def test_withheld_variables_are_read_from_a_file_on_the_node(tmp_path: Path) -> None:
    env = {"HF_TOKEN": "hf_secret", "OMP_NUM_THREADS": "2"}
    command = ("/bin/sh", "-c", 'printf "%s\\0" "$HF_TOKEN" "$OMP_NUM_THREADS"')
    launch = typed(config(node("a", tmp_path), node("b", tmp_path), env=env, command=command, mlx_lm={}))
    file = tmp_path / ".flightdeck" / "by-hand" / "job.env"
    with pytest.raises(subprocess.CalledProcessError):
        of_rank(launch, 1, tmp_path)
    file.parent.mkdir(parents=True)
    file.write_text("HF_TOKEN='a b'\nOMP_NUM_THREADS=2\n")
    assert of_rank(launch, 1, tmp_path) == ["a b", "2"]
    assert any("~/.flightdeck/by-hand/job.env" in note for note in launch.launch_notes)


def test_the_variables_of_nccl_are_in_the_command_and_the_jobs_own_win(tmp_path: Path) -> None:
    job_config = config(node("a", tmp_path), node("b", tmp_path), env={"NCCL_DEBUG": "WARN"})
    command = typed(job_config, backend="nccl").mlx_launch_command or ""
    assert "--env NCCL_IB_DISABLE=1" in command and "--env NCCL_DEBUG=WARN" in command
    assert " 0|1) export CUDA_VISIBLE_DEVICES=0 && cd " in command, "the first one of each machine"
    assert "NCCL_IB" not in (typed(job_config).mlx_launch_command or "")
    network = configured_network(job_config.nodes, "nccl")
    hosts = tuple(host.model_copy(update={"interface": "eth0"}) for host in network.hosts)
    network = network.model_copy(update={"hosts": hosts})
    for env, exported in (({}, True), ({"NCCL_SOCKET_IFNAME": "ib0"}, False)):
        other = config(*job_config.nodes, env=env)
        command = manual_launch(other, network, HOSTFILE, JobSizes()).mlx_launch_command or ""
        assert ("export NCCL_SOCKET_IFNAME=eth0" in command) is exported
