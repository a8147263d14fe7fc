"""What a plan writes is accepted by the parsers of Accelerate, DeepSpeed and torchrun, and means what was planned."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.plan.torch.strategy import BLOCKS
from tests.needs import TORCH
from tests.torch.running import output_of
from tests.training.tiny import make_tiny
from tests.unit.plan.clusters import LLAMA_70B, QWEN3_4B
from tests.unit.plan.torch.boxes import FULL, TINY, box, infiniband, plan, section

pytestmark = pytest.mark.needs("torch")
H100, A100, V100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "Tesla V100-SXM2-32GB"
CLUSTER = infiniband("a", 8, A100, 1) + infiniband("b", 8, A100, 2)
NVME = {**FULL, "offload": "nvme", "nvme_path": "/nvme"}
COMMAND = {"command": ("accelerate", "launch", "train.py"), "model": None, "data": None, "strategy": "fsdp"}
ZERO_3 = {"strategy": "deepspeed", "mlx_lm": {"precision": "bf16", "zero_stage": 3, "offload": "cpu"}}
OWN_FILE = {"command": ("accelerate", "launch", "--config_file", "own.yaml", "--mixed_precision", "bf16", "train.py")}
DEEPSPEED = {"command": ("deepspeed", "--module", "my.train"), "model": None, "data": None, "strategy": "auto"}
PLANS: dict[str, tuple[Any, ...]] = {
    "cpu": (box("127.0.0.1", 2), FULL, TINY, {}),
    "cpu, two machines": (box("a", 1) + box("b", 1, number=2), FULL, TINY, {"strategy": "fsdp"}),
    "ddp": (box("h", 8, H100), FULL, TINY, {}),
    "fsdp grad_op": (box("h", 8, H100), FULL, QWEN3_4B, {}),
    "fsdp offload": (box("v", 4, V100, 32), FULL, QWEN3_4B, {}),
    "zero 1": (box("v", 4, V100, 32), {**FULL, "zero_stage": 1}, TINY, {"strategy": "deepspeed"}),
    "zero 2": (box("h", 8, H100), {**FULL, "zero_stage": 2, "max_grad_norm": 1.0}, TINY, {"strategy": "deepspeed"}),
    "zero 3": (CLUSTER, FULL, LLAMA_70B, {}),
    "zero 3, nvme": (CLUSTER, NVME, TINY, {"strategy": "deepspeed"}),
    "command": (box("h", 8, H100), {}, None, COMMAND),
    "command, zero 3": (box("h", 8, H100), {}, None, {**COMMAND, **ZERO_3}),
    "command, own file": (CLUSTER, {}, None, {**COMMAND, **OWN_FILE}),
    "command, script's own": (box("h", 8, H100), {}, None, {**COMMAND, "strategy": "auto", "mlx_lm": {}}),
    "command, deepspeed": (box("h", 8, H100), {}, None, DEEPSPEED),
    "command, python's options": (box("h", 8, H100), {}, None, {**COMMAND, "command": ("python", "-u", "train.py")}),
    "one gpu": (box("l", 1, "NVIDIA L4", 24), FULL, TINY, {}),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the tools made of each plan, from one process that imports them all."""
    folders = []
    for name, (nodes, settings, model, job) in PLANS.items():
        made = section(plan(nodes, settings, model=model, job=dict(job)))
        folder = tmp_path_factory.mktemp(name.replace(", ", "-").replace(" ", "-"))
        for file, text in made.files.items():
            (folder / file).write_text(text)
        (folder / "own.yaml").write_text("distributed_type: FSDP\nmixed_precision: fp16\nnum_processes: 4\n")
        (folder / "commands.json").write_text(json.dumps({**made.commands, "world_size": len(nodes)}))
        folders.append(str(folder))
    own = {
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
        "PATH": "/usr/bin:/bin",
        "HF_HOME": folders[0],
        # torchrun leaves its folder of logs there.
        "TMPDIR": folders[0],
    }
    found = output_of("tests.torch.plan_files", *folders, environment=own)
    return {"blocks": found["blocks"], **dict(zip(PLANS, found["plans"], strict=True))}


@pytest.mark.parametrize(
    ("name", "nodes", "processes"), [("cpu", 1, 2), ("cpu, two machines", 2, 1), ("ddp", 1, 8), ("zero 3", 2, 8)]
)
def test_torchrun_starts_the_planned_ranks(answers: dict[str, Any], name: str, nodes: int, processes: int) -> None:
    *found, program = answers[name]["torchrun"]
    # On one machine torchrun turns the rendezvous of --standalone into its own static one.
    assert found == [nodes, processes, "c10d" if nodes > 1 else "static"]
    assert program == ["engine.torch_trainer.standalone", "job.json"]


def test_the_launchers_take_what_a_command_has(answers: dict[str, Any]) -> None:
    # python, -u and the script.
    assert answers["command, python's options"]["torchrun"][-1] == ["-u", "train.py"]
    assert answers["command, own file"]["accelerate"]["machines"] == 2
    assert answers["command, deepspeed"]["deepspeed"] == "my.train"


@pytest.mark.parametrize(
    ("name", "kind", "processes", "precision"),
    [
        ("ddp", "MULTI_GPU", 8, "bf16"),
        ("fsdp grad_op", "FSDP", 8, "bf16"),
        ("fsdp offload", "FSDP", 4, "fp16"),
        ("zero 3", "DEEPSPEED", 16, "no"),
        ("one gpu", "NO", 1, "bf16"),
        ("command", "FSDP", 8, "bf16"),
        ("command, zero 3", "DEEPSPEED", 8, "no"),
        ("command, own file", "FSDP", 16, "bf16"),
        ("command, script's own", "MULTI_GPU", 8, "no"),
    ],
)
def test_accelerate_launch_starts_what_was_planned(
    answers: dict[str, Any], name: str, kind: str, processes: int, precision: str
) -> None:
    found = answers[name]["accelerate"]
    assert (found["kind"], found["processes"], found["precision"]) == (kind, processes, precision)
    assert found["script"] == "train.py"


def test_accelerate_takes_the_keys_of_fsdp2(answers: dict[str, Any]) -> None:
    kept, freed = (answers[name]["accelerate"]["fsdp"] for name in ("fsdp grad_op", "fsdp offload"))
    assert {found["fsdp_version"] for found in (kept, freed)} == {2}
    assert [found["fsdp_reshard_after_forward"] for found in (kept, freed)] == [False, True]
    assert [found["fsdp_offload_params"] for found in (kept, freed)] == [False, True]
    assert freed["fsdp_activation_checkpointing"] is True
    assert kept["fsdp_transformer_layer_cls_to_wrap"] == "Qwen3DecoderLayer"
    assert kept["fsdp_state_dict_type"] == "SHARDED_STATE_DICT"


@pytest.mark.parametrize(
    ("name", "stage", "precision", "offload"),
    [
        ("zero 1", 1, "fp16", "None"),
        ("zero 2", 2, "bf16", "None"),
        ("zero 3", 3, "bf16", "cpu"),
        ("zero 3, nvme", 3, "bf16", "nvme"),
    ],
)
def test_deepspeed_reads_its_configuration_as_it_was_meant(
    answers: dict[str, Any], name: str, stage: int, precision: str, offload: str
) -> None:
    found = answers[name]["zero"]
    assert (found["stage"], found["batch"], found["offload"]) == (stage, 16, offload)
    assert [each for each in ("bf16", "fp16") if found[each]] == [precision]
    assert found["communication"] == {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[precision]
    assert answers[name]["deepspeed"] == "train.py"
    assert sum(answers[name]["hosts"].values()) == len(PLANS[name][0])


def test_what_a_script_knows_is_filled_in_by_accelerate_and_transformers(answers: dict[str, Any]) -> None:
    found = answers["command, zero 3"]["filled"]
    assert found == {"accelerate": [8 * 2 * 4, 1.0], "transformers": [8 * 2 * 4, 0.5], "zero.Init": 3}


def test_the_blocks_are_those_that_transformers_names(answers: dict[str, Any]) -> None:
    known = answers["blocks"]
    # A block is wrapped whole, with the mixer within it.
    differing = {
        kind: known.get(kind) for kind, names in BLOCKS.items() if not set(names) <= set(known.get(kind) or ())
    }
    assert differing == {}


@pytest.mark.slow
def test_the_printed_torchrun_command_trains_with_the_written_job(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path)
    keys = {key: value for key, value in tiny.job(iters=4, batch_size=4).items() if key not in ("model", "data")}
    job = {"model": str(tiny.model), "data": str(tiny.text)}
    config = json.loads((tiny.model / "config.json").read_text())
    made = section(plan(box("127.0.0.1", 2), keys, model=config, job=job))
    (tmp_path / "job.json").write_text(made.files["job.json"])
    own = {
        "PATH": f"{TORCH.parent}:/usr/bin:/bin",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path),
    }
    command = ["/bin/sh", "-c", made.commands["torchrun"]]
    done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [json.loads(line) for line in (tmp_path / "standalone/attempts/1/events.1.jsonl").read_text().splitlines()]
    assert [event["iteration"] for event in steps if event["event"] == "step"] == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "deepspeed"])
def test_the_container_command_trains_with_just_what_the_configmap_gives(tmp_path: Path, strategy: str) -> None:
    tiny = make_tiny(tmp_path / "volume")
    keys = {key: value for key, value in tiny.job(iters=4, batch_size=4).items() if key not in ("model", "data")}
    job = {"model": str(tiny.model), "data": str(tiny.text), "strategy": strategy}
    config = json.loads((tiny.model / "config.json").read_text())
    made = section(plan(box("127.0.0.1", 2), keys | {"precision": "fp32", "zero_stage": 2}, model=config, job=job))
    manifest, files = (yaml.safe_load(made.files[name]) for name in ("pytorchjob.yaml", "configmap.yaml"))
    container = manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
    environment = {
        # The image's.
        "PATH": f"{TORCH.parent}:/usr/bin:/bin",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path),
        **{each["name"]: each["value"] for each in container["env"]},
        # The operator's (pkg/controller.v1/pytorch/envvar.go).
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "23456",
        "WORLD_SIZE": "2",
        "RANK": "0",
        "PET_NNODES": "1",
        "PET_NODE_RANK": "0",
        "PET_NPROC_PER_NODE": manifest["spec"]["nprocPerNode"],
    }

    def run(folder: Path, given: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        folder.mkdir()
        for name, text in given.items():
            (folder / name).write_text(text)
        own, command = {**environment, "HOME": str(folder)}, container["command"]
        return subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, check=False)

    done = run(tmp_path / "workspace", files["data"])
    assert done.returncode == 0, done.stderr[-3000:]
    events = (tmp_path / "workspace/standalone/attempts/1/events.1.jsonl").read_text().splitlines()
    steps = [event["iteration"] for event in map(json.loads, events) if event["event"] == "step"]
    assert steps == [1, 2, 3, 4]
    if strategy == "deepspeed":
        # The file is what counts.
        zero = json.loads(files["data"]["ds_config.json"]) | {"train_batch_size": 6}
        done = run(tmp_path / "edited", files["data"] | {"ds_config.json": json.dumps(zero)})
        assert done.returncode != 0 and "train_batch_size is not equal to" in done.stderr
