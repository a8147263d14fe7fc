"""The files and commands for PyTorch's own tools. tests/torch/test_plan_files.py gives them to the tools' parsers."""

from __future__ import annotations

import json
import shlex
from typing import Any

import jsonschema
import pytest
import yaml

from engine.config.models import RecoveryConfig
from engine.plan.document import ChosenTorchSettings
from tests.unit.plan.clusters import LLAMA_70B, QWEN3_4B
from tests.unit.plan.torch.boxes import FULL, TINY, box, infiniband, plan, section

A100 = "NVIDIA A100-SXM4-80GB"
CLUSTER = infiniband("a", 8, A100, 1) + infiniband("b", 8, A100, 2)
_STRING, _COUNT, _FLAG, _ANY = (
    {"type": "string"},
    {"type": "integer", "minimum": 0},
    {"type": "boolean"},
    {"type": "object"},
)


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


_CONTAINER = _object(
    {
        "name": {"const": "pytorch"},
        "image": {"type": "string", "minLength": 1},
        "command": {"type": "array", "items": _STRING},
        "args": {"type": "array", "items": _STRING},
        "env": {"type": "array", "items": _object({"name": _STRING, "value": _STRING}, "name")},
        "resources": _object({"limits": _ANY, "requests": _ANY}),
        "volumeMounts": {
            "type": "array",
            "items": _object({"name": _STRING, "mountPath": _STRING}, "name", "mountPath"),
        },
        "securityContext": _ANY,
    },
    "name",
    "image",
)
_REPLICA = _object(
    {
        "replicas": {"type": "integer", "minimum": 1},
        "restartPolicy": {"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
        "template": _object(
            {
                "metadata": _ANY,
                "spec": _object(
                    {"containers": {"type": "array", "minItems": 1, "items": _CONTAINER}, "volumes": {"type": "array"}},
                    "containers",
                ),
            },
            "spec",
        ),
    },
    "template",
)
PYTORCH_JOB = _object(
    {
        "apiVersion": {"const": "kubeflow.org/v1"},
        "kind": {"const": "PyTorchJob"},
        "metadata": _object({"name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}}, "name"),
        "spec": _object(
            {
                "elasticPolicy": _ANY,
                "nprocPerNode": {"type": "string", "pattern": "^(auto|cpu|gpu|[1-9][0-9]*)$"},
                "pytorchReplicaSpecs": _object({"Master": _REPLICA, "Worker": _REPLICA}, "Master"),
                "runPolicy": _object(
                    {
                        "activeDeadlineSeconds": _COUNT,
                        "backoffLimit": _COUNT,
                        "cleanPodPolicy": {"enum": ["Running", "All", "None"]},
                        "managedBy": _STRING,
                        "schedulingPolicy": _ANY,
                        "suspend": _FLAG,
                        "ttlSecondsAfterFinished": _COUNT,
                    }
                ),
            },
            "pytorchReplicaSpecs",
        ),
    },
    "apiVersion",
    "kind",
    "metadata",
    "spec",
)
"""Fields and types of kubeflow-training 1.9.4 (KubeflowOrgV1PyTorchJob and what it has), those of a pod that are used
here, and what the operator's webhook wants: a container called pytorch, and one Master."""


@pytest.mark.parametrize("nodes", [box("127.0.0.1", 2), box("h", 8, "NVIDIA H100 80GB HBM3"), CLUSTER])
def test_the_manifest_is_a_pytorchjob(nodes: Any) -> None:
    made = section(plan(nodes, FULL, model=TINY, job={"name": "Support: v2"}))
    manifest = yaml.safe_load(made.files["pytorchjob.yaml"])
    jsonschema.validate(manifest, PYTORCH_JOB)
    machines = len({node.host for node in nodes})
    replicas = manifest["spec"]["pytorchReplicaSpecs"]
    assert sum(each["replicas"] for each in replicas.values()) == machines
    assert int(manifest["spec"]["nprocPerNode"]) * machines == len(nodes)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**manifest, "spec": {**manifest["spec"], "replicas": 2}}, PYTORCH_JOB)


def test_two_machines_with_infiniband() -> None:
    made = section(plan(CLUSTER, FULL, model=LLAMA_70B))
    assert made.infiniband and set(made.interfaces.values()) == {"eth0"} and made.backend == "nccl"
    assert made.files["hostfile"] == "a slots=8\nb slots=8\n"
    zero = json.loads(made.files["ds_config.json"])
    assert (zero["zero_optimization"]["stage"], zero["train_batch_size"]) == (3, 16)
    assert zero["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert (zero["bf16"], zero["communication_data_type"]) == ({"enabled": True}, "bf16")
    torchrun = shlex.split(made.commands["torchrun"])
    assert {"NCCL_IB_DISABLE=0", "NCCL_SOCKET_IFNAME=eth0"} <= set(torchrun)
    assert torchrun[torchrun.index("--rdzv-endpoint") + 1] == "10.0.0.1:29500"
    assert torchrun[torchrun.index("--nproc-per-node") + 1] == "8"
    assert "--hostfile hostfile --master_addr 10.0.0.1" in made.commands["deepspeed"]
    # The interface of these machines is not that of another cluster's.
    assert "IFNAME" not in made.commands["srun"] + made.files["pytorchjob.yaml"]
    manifest = yaml.safe_load(made.files["pytorchjob.yaml"])
    container = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}


def test_on_the_cpu_accelerate_would_start_something_else_and_it_is_said() -> None:
    made = section(plan(box("a", 1) + box("b", 1, number=2), FULL, model=TINY, job={"strategy": "fsdp"}))
    assert set(made.files) == {"job.json", "pytorchjob.yaml"} and set(made.commands) == {"torchrun", "srun"}
    assert made.commands["torchrun"].startswith("GLOO_SOCKET_IFNAME=eth0 torchrun --nnodes 2 --nproc-per-node 1 ")
    assert any("accelerate launch starts one process" in note for note in made.notes)
    assert any("fully_shard" in note for note in made.notes)


def test_the_files_of_fsdp_wrap_the_blocks_of_the_model() -> None:
    made = section(plan(box("h", 8, "NVIDIA H100 80GB HBM3"), FULL, model=QWEN3_4B))
    config = yaml.safe_load(made.files["accelerate_config.yaml"])["fsdp_config"]
    assert made.wrap_classes == ("Qwen3DecoderLayer",) == (config["fsdp_transformer_layer_cls_to_wrap"],)
    assert (config["fsdp_version"], config["fsdp_reshard_after_forward"]) == (2, False)
    assert config["fsdp_state_dict_type"] == "SHARDED_STATE_DICT"


def test_the_job_file_has_nothing_left_to_choose() -> None:
    made = plan(box("h", 8, "NVIDIA H100 80GB HBM3"), FULL, model=QWEN3_4B)
    found = json.loads(section(made).files["job.json"])
    left = [key for key in ChosenTorchSettings.model_fields if found["job"][key] == "auto"]
    assert found["backend"] == "nccl" and left == []
    assert (found["job"]["framework"], found["job"]["strategy"], found["job"]["sharding"]) == (
        "torch",
        "fsdp",
        "grad_op",
    )


def test_an_elastic_job_names_its_least_and_most_machines() -> None:
    recovery = {"recovery": RecoveryConfig(min_nodes=1, max_restarts=2)}
    nodes = box("a", 1) + box("b", 1, number=2)
    job = {"command": ("torchrun", "train.py"), "elastic": True, "strategy": "ddp", "model": None, "data": None}
    made = section(plan(nodes, job=job, config=recovery, model=None, model_source="not read"))
    assert "torchrun --nnodes 1:2 --nproc-per-node 1 " in made.commands["torchrun"]
    assert "--max-restarts 2 train.py" in made.commands["torchrun"]


@pytest.mark.parametrize(
    ("command", "program"),
    [
        (["torchrun", "train.py", "--lr", "1e-4"], "train.py --lr 1e-4"),
        (["python", "-m", "trainer.main"], "-m trainer.main"),
        (["accelerate", "launch", "train.py"], "train.py"),
        (["./train.sh"], "--no-python ./train.sh"),
    ],
)
def test_a_command_of_the_users_own_is_what_is_started(command: list[str], program: str) -> None:
    job = {"command": tuple(command), "strategy": "ddp", "model": None, "data": None}
    made = section(plan(box("h", 8, "NVIDIA H100 80GB HBM3"), job=job, model=None, model_source="not read"))
    assert made.commands["torchrun"].endswith(f"--standalone {program}")
    assert "job.json" not in made.files
    manifest = yaml.safe_load(made.files["pytorchjob.yaml"])
    started = manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["command"]
    assert started[0] == ("accelerate" if command[0] == "accelerate" else "torchrun")
    assert " ".join(started).endswith(program)
