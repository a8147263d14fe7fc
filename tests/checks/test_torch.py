"""The checks of a PyTorch job: on nodes with PyTorch alone, and by recorded reports of machines with NVIDIA GPUs."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from engine.checks import dataset, gradient, hardware, health, hostfile, model_files, versions, workers
from engine.checks.interpreter import Interpreter
from engine.cluster.probe_results import StaleProcesses, SystemLoad, TorchBuild
from engine.cluster.topology import topology
from engine.config.mlx_lm_keys import with_defaults
from engine.config.models import ClusterConfig, Config, JobConfig, NodeConfig, PreflightConfig
from engine.models import CheckResult, CheckStatus, Interface, Late, NodeFacts, NvidiaGpu
from engine.plan.network import LaunchHost, NetworkPlan, plan_network
from engine.protocol.job import Framework, Strategy
from tests.checks.conftest import make_config, run_check
from tests.checks.recorded import mac, studio
from tests.demo_copies import made_demo
from tests.needs import TORCH

BUILD = TorchBuild(cuda="12.8", nccl="2.27.3", gpus=2, cuda_problem=None, nvidia_smi=None)
CPU = BUILD.model_copy(update={"cuda": None, "nccl": None, "gpus": 0})
SEEN = Interpreter("3.12.4", {"torch": "2.8.0+cu128"}, ("gloo", "nccl"), venv=True, build=BUILD)
OWN = JobConfig(name="job", framework="torch", command=("torchrun", "train.py"))


def torch_config(*, job: JobConfig = OWN, **cluster: object) -> Config:
    return studio(**cluster).model_copy(update={"job": job})


def both(seen: Interpreter, second: Interpreter | None = None) -> dict[str, Interpreter]:
    return {"ultra": seen, "max": second or seen}


@pytest.mark.parametrize(
    ("job", "packages"),
    [
        ({"command": ("torchrun", "a.py"), "strategy": "deepspeed"}, ("torch",)),
        ({"command": ("accelerate", "launch", "a.py")}, ("torch", "accelerate")),
        ({"command": ("accelerate", "launch", "a.py"), "strategy": "deepspeed"}, ("torch", "accelerate", "deepspeed")),
        ({"command": ("deepspeed", "a.py")}, ("torch", "deepspeed")),
        ({}, ("torch", "accelerate", "transformers", "peft")),
        ({"strategy": "deepspeed"}, ("torch", "accelerate", "transformers", "peft", "deepspeed")),
    ],
)
def test_a_job_needs_the_packages_that_its_ranks_import(job: dict[str, object], packages: tuple[str, ...]) -> None:
    read = JobConfig.model_validate({"name": "job", "framework": "torch", **job})
    assert read.kind.packages(read.words) == packages


def test_another_torch_is_installed_from_the_index_of_rank_0s_build() -> None:
    other = replace(SEEN, packages={"torch": "2.7.1+cu128"})
    result = versions.evaluate(torch_config(), both(SEEN, other), "gloo")
    assert (result.status, result.blames) == (CheckStatus.FAIL, (1, "max"))
    install = 'uv pip install --torch-backend cu128 --reinstall-package torch --python "$HOME"/venv/bin/python torch=='
    assert (f"{install}2.8.0" == result.fixes["max"], f"`{install}2.7.1` takes back" in result.effects["max"]) == (
        True,
        True,
    )


def test_a_cpu_build_beside_a_cuda_build_trains_over_gloo_and_not_over_nccl() -> None:
    without = replace(SEEN, packages={"torch": "2.8.0+cpu"}, backends=("gloo",), build=CPU)
    assert versions.evaluate(torch_config(), both(SEEN, without), "gloo").status is CheckStatus.PASS
    assert "no nccl backend" in versions.evaluate(torch_config(), both(SEEN, without), "nccl").summary


@pytest.mark.parametrize(("first", "label"), [("2.8.0+cpu", "auto"), ("2.8.0", "auto"), ("2.8.0+cu128", "cu128")])
def test_a_cpu_build_is_replaced_by_one_with_cuda(first: str, label: str) -> None:
    without = replace(SEEN, packages={"torch": "2.8.0+cpu"}, backends=("gloo",), build=CPU)
    result = versions.evaluate(torch_config(), both(replace(SEEN, packages={"torch": first}), without), "nccl")
    install = (
        'uv pip install --torch-backend {} --reinstall-package torch --python "$HOME"/venv/bin/python torch==2.8.0'
    )
    assert result.fixes["max"] == install.format(label)
    assert f"`{install.format('cpu')}` takes back" in result.effects["max"]


@pytest.mark.parametrize(
    ("build", "summary"),
    [
        ({"nvidia_smi": "| NVIDIA-SMI 470.1  Driver Version: 470.1  CUDA Version: 11.4 |"}, "update the driver"),
        ({"gpus": 0, "cuda_problem": "CUDA unknown error"}, "torch can use none of its GPUs: CUDA unknown error"),
        ({"cuda": "12.6"}, "torch is built for CUDA 12.6, rank 0's for 12.8"),
        ({"nccl": "2.21.5"}, "torch has NCCL 2.21.5, rank 0's 2.27.3"),
    ],
)
def test_nccl_needs_the_same_cuda_and_a_driver_for_it(build: dict[str, object], summary: str) -> None:
    other = replace(SEEN, build=BUILD.model_copy(update=build))
    result = versions.evaluate(torch_config(), both(SEEN, other), "nccl")
    assert (result.blames, summary in result.summary) == ((1, "max"), True), result.summary
    assert versions.evaluate(torch_config(), both(SEEN, other), "gloo").status is CheckStatus.PASS


def test_the_recipe_refuses_a_torch_without_fully_shard_and_says_why() -> None:
    job = JobConfig(name="job", framework="torch")
    old = replace(SEEN, packages={"torch": "2.5.1", "accelerate": "1.10.0", "transformers": "4.57.0", "peft": "0.17.0"})
    result = versions.evaluate(torch_config(job=job), both(old), "gloo")
    assert "torch 2.5.1 is older than 2.6, the first with torch.distributed.fsdp.fully_shard" in result.summary


NO_ANSWER = Late(command="nvidia-smi", after_s=4.0)


def gpu_facts(*gpus: int, unknown: dict[str, Late] | None = None) -> dict[str, NodeFacts]:
    """Linux machines on which nvidia-smi lists so many GPUs."""
    gpu, found = NvidiaGpu(name="NVIDIA H100 80GB HBM3"), {}
    for rank, (name, count) in enumerate(zip(("ultra", "max"), gpus, strict=True), start=1):
        ethernet = Interface(name="eth0", ipv4=(f"10.0.0.{rank}/24",), active=True)
        seen = {"system": "Linux", "gpus": (gpu,) * count, "unknown": unknown or {}, "interfaces": (ethernet,)}
        found[name] = mac(name, pmset_batt=None, ibv_devices=None).model_copy(update=seen)
    return found


def gpus_checked(config: Config, facts: dict[str, NodeFacts], build: TorchBuild) -> CheckResult:
    need = dict.fromkeys(facts, "the job runs a command of its own")
    network = plan_network(config, list(facts.values()), topology(list(facts.values())))
    seen = both(replace(SEEN, build=build))
    return hardware.evaluate(config, facts, need, {}, torch=seen, network=network)


@pytest.mark.parametrize(
    ("build", "backend", "listed", "status", "text"),
    [
        (CPU, "auto", 0, CheckStatus.PASS, "torch sees the CPU alone, for 1 rank"),
        (BUILD, "auto", 2, CheckStatus.PASS, "torch sees 2 GPUs for 1 rank"),
        (BUILD, "gloo", 0, CheckStatus.PASS, "torch sees 2 GPUs for 1 rank"),
        (CPU, "nccl", 0, CheckStatus.FAIL, "and nccl, which is planned, needs one for each"),
        # nvidia-smi lists two, and CUDA_VISIBLE_DEVICES hides them.
        (CPU, "auto", 2, CheckStatus.FAIL, "torch sees 0 GPUs for 1 rank, and nccl, which is planned"),
        (CPU.model_copy(update={"nvidia_smi": "x"}), "auto", 0, CheckStatus.WARN, "none of its NVIDIA GPUs"),
    ],
)
def test_the_gpus_that_torch_sees_are_compared_with_the_ranks_of_their_machine(
    build: TorchBuild, backend: str, listed: int, status: CheckStatus, text: str
) -> None:
    config, facts = torch_config(backend=backend), gpu_facts(listed, listed)
    result = gpus_checked(config, facts, build)
    assert (result.status, text in result.evidence["max"] + result.summary) == (status, True), result
    ready = workers.evaluate(
        config, dict.fromkeys(facts, StaleProcesses(stale=[], marked_seen=True)), both(SEEN), facts, "gloo"
    )
    assert "gloo available, torch sees 2 GPUs" in ready.evidence["max"] and "mlx" not in ready.evidence["max"]


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (gpu_facts(2, 0), "max (no nvidia-smi found, or it lists no GPU)"),
        (gpu_facts(2, 0, unknown={"nvidia_smi": NO_ANSWER}), "max (nvidia-smi gave no answer within 4 s)"),
    ],
)
def test_gpus_that_the_plan_does_not_use_are_warned_of(facts: dict[str, NodeFacts], why: str) -> None:
    result = gpus_checked(torch_config(), facts, BUILD)
    used = "torch sees 2 GPUs for 1 rank, and the plan uses none of them, but gloo"
    todo = 'mend that, or set backend in [cluster]: "nccl", or "gloo" to train on the CPU'
    assert result.status is CheckStatus.WARN
    assert f"{used}: not known to have an NVIDIA GPU for each rank: {why}; {todo}" in result.summary


def test_each_process_of_an_elastic_node_needs_a_gpu() -> None:
    config = torch_config(job=OWN.model_copy(update={"elastic": True}))
    nodes = tuple(node.model_copy(update={"processes": 4}) for node in config.nodes)
    result = gpus_checked(config.model_copy(update={"nodes": nodes}), gpu_facts(2, 2), BUILD)
    assert "torch sees 2 GPUs for 4 ranks, and the plan uses none of them, but gloo" in result.summary
    assert "(nvidia-smi lists 2 GPUs for 4 ranks); fewer ranks on this machine would use them" in result.summary


def here(tmp_path: Path, python: str, *command: str, ranks: int = 2) -> Config:
    nodes = tuple(NodeConfig(name=f"node{rank}", python=python, workdir=str(tmp_path)) for rank in range(ranks))
    job = JobConfig(name="job", framework="torch", command=command)
    return Config(cluster=ClusterConfig(), nodes=nodes, job=job, preflight=PreflightConfig(all_sum_s=0.2))


def test_each_machine_connects_to_every_other_one_and_ranks_of_one_machine_need_not() -> None:
    hosts = tuple(LaunchHost(ssh=ssh, ips=("10.0.0.1",)) for ssh in ("a", "a", "b", "b", "c"))
    network = NetworkPlan(backend="gloo", framework="torch", hosts=hosts)
    assert hostfile.connections(network) == [{0: 2, 2: 4, 4: 0}, {0: 4, 2: 0, 4: 2}]
    alone = network.model_copy(update={"hosts": hosts[:2]})
    assert hostfile.connections(alone) == []


def test_little_shared_memory_and_a_limit_of_locked_memory_warn_with_their_fixes() -> None:
    config, facts = torch_config(), {name: mac(name, pmset_batt=None) for name in ("ultra", "max")}
    heartbeats: dict[str, health.HeartbeatResult] = dict.fromkeys(facts, (0.001, time.monotonic()))
    load = SystemLoad(processes=[], memory_bytes=1 << 36, caffeinate=True, shm_bytes=64 << 20, memlock_bytes=8 << 20)
    result = health.evaluate(config, facts, heartbeats, dict.fromkeys(facts, load))
    assert "/dev/shm has 64 MB" in result.summary and "ulimit -l" in result.summary, result.summary
    assert "mount -o remount,size=8g /dev/shm && printf " in result.fixes["max"]
    assert f"size={64 << 20} /dev/shm` takes that back" in result.effects["max"]
    assert "/dev/shm" not in health.evaluate(studio(), facts, heartbeats, dict.fromkeys(facts, load)).summary


@pytest.mark.parametrize(("framework", "status"), [("torch", CheckStatus.FAIL), ("mlx", CheckStatus.PASS)])
async def test_a_model_that_mlx_has_quantized_is_refused_for_pytorch(
    model: Path, config: Config, framework: Framework, status: CheckStatus
) -> None:
    known = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**known, "quantization": {"bits": 4, "group_size": 64}}))
    job = config.job.model_copy(update={"framework": framework})
    result = await run_check(model_files.run, config.model_copy(update={"job": job}))
    assert (result.status, "quantized by MLX" in result.summary) == (status, framework == "torch"), result


@pytest.mark.needs("torch")
async def test_rows_that_the_chat_template_refuses_are_found_with_transformers(data: Path, tmp_path: Path) -> None:
    """On nodes without mlx-lm."""
    model = tmp_path / "templated"
    shutil.copytree(made_demo() / "model", model)
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}{{ raise_exception('never') if m.role == 'system' else m.content }}{% endfor %}"
    (model / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "chat_template": template}))
    rows = [[{"role": role, "content": "hi"}, {"role": "assistant", "content": "yes"}] for role in ("user", "system")]
    (data / "train.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows * 4))
    config = make_config(model, data, tmp_path, pythons=(str(TORCH),) * 2)
    job = config.job.model_copy(update={"framework": "torch"})
    result = await run_check(dataset.run, config.model_copy(update={"job": job}))
    assert "line 2 is refused by the model's chat template (never), and 3 more lines" in result.summary, result


@pytest.mark.needs("torch")
@pytest.mark.parametrize("recipe", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_the_preflight_of_a_torch_job_passes_on_nodes_without_mlx(
    tmp_path: Path, data: Path, home: Path, recipe: bool
) -> None:
    job = f'model = "{made_demo() / "model"}"\ndata = "{data}"\n' if recipe else 'command = ["torchrun", "train.py"]\n'
    (tmp_path / "train.py").write_text("import torch\n")
    file = tmp_path / "flightdeck.toml"
    file.write_text(
        f'[[node]]\nname = "box"\nprocesses = 2\npython = "{TORCH}"\nworkdir = "{tmp_path}"\n'
        f'[job]\nname = "job"\nframework = "torch"\n{job}[preflight]\nall_sum_s = 0.5\n'
    )
    command = [str(Path(sys.executable).with_name("flightdeck")), "preflight", "--accept", "-c", str(file)]
    ended = await asyncio.to_thread(
        subprocess.run, command, check=False, capture_output=True, text=True, cwd=tmp_path, timeout=170
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "2 ranks, exact" in ended.stdout


async def test_a_node_without_torch_gets_the_command_that_installs_it(tmp_path: Path) -> None:
    """As the console's own environment is."""
    config = here(tmp_path, sys.executable, "torchrun", "train.py")
    result = await run_check(versions.run, config)
    assert (result.status, "torch cannot be imported: ModuleNotFoundError" in result.summary) == (
        CheckStatus.FAIL,
        True,
    )
    assert "torch>=2.0" in (result.fix_command or "")
    assert "not run: no rank can start" in (await run_check(gradient.run, config)).summary


@pytest.mark.needs("torch")
@pytest.mark.slow
async def test_a_real_all_reduce_over_gloo_on_nodes_without_mlx(tmp_path: Path) -> None:
    result = await run_check(gradient.run, here(tmp_path, str(TORCH), "torchrun", "train.py"))
    assert (result.status, result.summary.startswith("2 ranks, exact")) == (CheckStatus.PASS, True), result


@pytest.mark.needs("torch")
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_what_accelerate_replaces_silently_is_a_fault_in_words(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "fsdp.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\nuse_cpu: true\n"
    )
    command = ("accelerate", "launch", "--config_file", "fsdp.yaml", "train.py")
    result = await run_check(gradient.run, here(tmp_path, str(TORCH), *command, ranks=ranks))
    assert result.status is CheckStatus.FAIL
    assert "Accelerate chose NO with 1 process in place of FSDP" in result.summary, result


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    ("strategy", "chosen"),
    [
        pytest.param("deepspeed", "Accelerate chose DEEPSPEED with 2 processes", marks=pytest.mark.slow),
        pytest.param("fsdp", "2 processes; the recipe calls fully_shard itself", marks=pytest.mark.slow),
    ],
)
async def test_accelerate_makes_what_the_recipe_asks_it_for(tmp_path: Path, strategy: Strategy, chosen: str) -> None:
    config = here(tmp_path, str(TORCH))
    job = JobConfig(name="job", framework="torch", strategy=strategy, mlx_lm=with_defaults({"zero_stage": 3}))
    result = await run_check(gradient.run, config.model_copy(update={"job": job}))
    assert (result.status, chosen in result.evidence["node1"]) == (CheckStatus.PASS, True), result


@pytest.mark.needs("torch")
@pytest.mark.slow
async def test_a_launched_deepspeed_on_the_cpu_sees_one_process_and_compiles_nothing(tmp_path: Path) -> None:
    """Accelerate then divides no data."""
    (tmp_path / "zero.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nmixed_precision: 'no'\nnum_machines: 1\n"
        "num_processes: 2\nuse_cpu: false\ndeepspeed_config:\n  zero_stage: 2\n  gradient_accumulation_steps: 1\n"
    )
    config = here(tmp_path, str(TORCH), "accelerate", "launch", "--config_file", "zero.yaml", "train.py")
    operators = tmp_path / "operators"
    job = config.job.model_copy(update={"env": {"TORCH_EXTENSIONS_DIR": str(operators)}})
    result = await run_check(gradient.run, config.model_copy(update={"job": job}))
    assert "Accelerate chose DEEPSPEED with 1 process, where 2 were asked for" in result.summary, result
    assert not operators.exists()


@pytest.mark.needs("torch")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "chosen"),
    [
        ("fsdp", "Accelerate chose NO with 1 process in place of FSDP"),
        ("deepspeed", "Accelerate chose DEEPSPEED with 1 process, where 2 were asked for"),
    ],
)
async def test_the_strategy_of_the_job_is_an_option_of_accelerate_launch(
    tmp_path: Path, strategy: Strategy, chosen: str
) -> None:
    config = here(tmp_path, str(TORCH), "accelerate", "launch", "train.py")
    job = config.job.model_copy(update={"strategy": strategy})
    result = await run_check(gradient.run, config.model_copy(update={"job": job}))
    assert chosen in result.summary, result


@pytest.mark.needs("torch")
@pytest.mark.slow
async def test_a_configuration_file_of_another_strategy_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "ddp.yaml").write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: NO\nuse_cpu: true\n")
    config = here(tmp_path, str(TORCH), "accelerate", "launch", "--config_file", "ddp.yaml", "train.py")
    job = config.job.model_copy(update={"strategy": "fsdp"})
    result = await run_check(gradient.run, config.model_copy(update={"job": job}))
    assert "Accelerate chose MULTI_CPU with 2 processes in place of FSDP" in result.summary, result


def test_the_consoles_start_imports_nothing_of_the_nodes_frameworks() -> None:
    ask = "import sys, tui.cli; print(sorted({name.partition('.')[0] for name in sys.modules}))"
    found = subprocess.run([sys.executable, "-c", ask], check=True, capture_output=True, text=True).stdout
    assert "'tui'" in found
    for name in ("torch", "accelerate", "transformers", "peft", "deepspeed"):
        assert f"'{name}'" not in found
