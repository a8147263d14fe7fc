"""The files and commands for PyTorch's own tools. tests/torch/test_plan_files.py gives them to the tools' parsers."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
import yaml

from engine.config.models import CheckpointConfig, ClusterConfig, DataConfig, RecoveryConfig
from engine.plan.document import ChosenTorchSettings, Disabled
from tests.data import DATA
from tests.unit.plan.clusters import LLAMA_70B, QWEN3_4B
from tests.unit.plan.torch.boxes import FULL, TINY, box, infiniband, plan, section

A100 = "NVIDIA A100-SXM4-80GB"
CLUSTER = infiniband("a", 8, A100, 1) + infiniband("b", 8, A100, 2)
_CRD = json.loads((DATA / "pytorchjob_crd.json").read_text())


def check_pytorch_job(manifest: dict[str, Any]) -> dict[str, Any]:
    """The operator's own schema, and what its webhook wants besides (pkg/webhooks/pytorch/pytorchjob_webhook.go).
    Returns the container of the first replica."""
    jsonschema.validate(manifest, _CRD)
    assert (manifest["apiVersion"], manifest["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", manifest["metadata"]["name"])
    replicas = manifest["spec"]["pytorchReplicaSpecs"]
    assert replicas.keys() <= {"Master", "Worker"} and replicas.get("Master", {"replicas": 1})["replicas"] == 1
    assert "elasticPolicy" not in manifest["spec"] or "Worker" in replicas
    for replica in replicas.values():
        pod = replica["template"]["spec"]
        [container] = pod["containers"]
        assert container["name"] == "pytorch" and container["image"]
        # What is mounted is a volume, each path once.
        paths = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert len(paths) == len({*paths}) and all(path.startswith("/") for path in paths)
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    found: dict[str, Any] = next(iter(replicas.values()))["template"]["spec"]["containers"][0]
    return found


@pytest.mark.parametrize("nodes", [box("127.0.0.1", 2), box("h", 8, "NVIDIA H100 80GB HBM3"), CLUSTER])
def test_the_manifest_is_a_pytorchjob(nodes: Any) -> None:
    made = section(plan(nodes, FULL, model=TINY, job={"name": "Support: v2"}))
    manifest = yaml.safe_load(made.files["pytorchjob.yaml"])
    check_pytorch_job(manifest)
    machines = len({node.host for node in nodes})
    replicas = manifest["spec"]["pytorchReplicaSpecs"]
    assert sum(each["replicas"] for each in replicas.values()) == machines
    assert int(manifest["spec"]["nprocPerNode"]) * machines == len(nodes)
    with pytest.raises(jsonschema.ValidationError):
        check_pytorch_job({**manifest, "spec": {**manifest["spec"], "replicas": 2}})


def test_two_machines_with_infiniband() -> None:
    made = section(plan(CLUSTER, FULL, model=LLAMA_70B))
    assert made.infiniband and set(made.interfaces.values()) == {"eth0"} and made.backend == "nccl"
    assert made.files["hostfile"] == "a slots=8\nb slots=8\n"
    zero = json.loads(made.files["ds_config.json"])
    assert (zero["zero_optimization"]["stage"], zero["train_batch_size"]) == (3, 16)
    assert zero["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert (zero["bf16"], zero["communication_data_type"]) == ({"enabled": True}, "bf16")
    torchrun = shlex.split(made.commands["torchrun"])
    assert {"NCCL_IB_DISABLE=0", "NCCL_SOCKET_IFNAME=eth0", "GLOO_SOCKET_IFNAME=eth0"} <= set(torchrun)
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
    assert set(made.files) == {"job.json", "configmap.yaml", "pytorchjob.yaml"} and set(made.commands) == {
        "torchrun",
        "srun",
    }
    assert made.commands["torchrun"].startswith("GLOO_SOCKET_IFNAME=eth0 torchrun --nnodes 2 --nproc-per-node 1 ")
    assert any(note.startswith("accelerate launch starts one process") for note in made.notes)
    assert any("fully_shard" in note for note in made.notes)


def test_the_files_of_fsdp_wrap_the_blocks_of_the_model() -> None:
    made = section(plan(box("h", 8, "NVIDIA H100 80GB HBM3"), FULL, model=QWEN3_4B))
    config = yaml.safe_load(made.files["accelerate_config.yaml"])["fsdp_config"]
    assert made.wrap_classes == ("Qwen3DecoderLayer",) == (config["fsdp_transformer_layer_cls_to_wrap"],)
    assert (config["fsdp_version"], config["fsdp_reshard_after_forward"]) == (2, False)
    assert config["fsdp_state_dict_type"] == "SHARDED_STATE_DICT"


def test_the_job_file_has_the_budget_and_how_the_data_is_read() -> None:
    data = {"data": DataConfig(valid=0.2)}
    made = plan(box("h", 2), {"batch_tokens": 8_192}, model=TINY, lengths={300: 50}, examples=50, config=data)
    job = json.loads(section(made).files["job.json"])["job"]
    assert job["batch_tokens"] == 8_192 and "batch_size" not in job
    assert job["data_options"] == {"valid": 0.2}


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
        (["./train.sh"], "--no_python ./train.sh"),
        (["bash", "run.sh"], "--no_python bash run.sh"),
        # torchrun starts python without its options.
        (["python", "-u", "train.py"], "--no_python python -u train.py"),
        (["python3", "train.py"], "train.py"),
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


def test_arguments_that_kubernetes_would_read_as_numbers_are_quoted() -> None:
    command = ("torchrun", "train.py", "1e-4", "0o17", ".5", "3", "-1.5E3", "1e", "v1.2")
    job = {"command": command, "strategy": "ddp", "model": None, "data": None}
    made = section(plan(box("h", 8, H100), job=job, model=None, model_source="not read"))
    lines = [line.strip() for line in made.files["pytorchjob.yaml"].splitlines()]
    assert [f"- {word}" for word in ("'1e-4'", "'0o17'", "'.5'", "'3'", "'-1.5E3'", "1e", "v1.2")] == [
        line for line in lines if line.removeprefix("- ").strip("'") in command[2:]
    ]


H100 = "NVIDIA H100 80GB HBM3"


def command_section(nodes: Any, *words: str, planned: Mapping[str, Any] | None = None, **job: Any) -> Any:
    keys = job.pop("mlx_lm", {})
    own = {"command": words, "model": None, "data": None, "mlx_lm": keys, **job}
    return section(plan(nodes, job=own, **{"model": None, "model_source": "not read", **(planned or {})}))


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("Support: v2", "support-v2"),
        ("4b-lora", "job-4b-lora"),
        ("---", "job"),
        ("a" * 49 + "-tail", "a" * 49),
        ("Überprüfung", "berpr-fung"),
    ],
)
def test_the_manifests_name_is_a_dns_label(name: str, label: str) -> None:
    made = section(plan(box("h", 2, H100), FULL, model=TINY, job={"name": name}))
    manifest = yaml.safe_load(made.files["pytorchjob.yaml"])
    check_pytorch_job(manifest)
    assert manifest["metadata"]["name"] == label


def test_what_has_one_number_of_ranks_for_all_machines_is_left_out_where_they_differ() -> None:
    made = section(plan(box("a", 8, H100) + box("b", 4, H100, number=2), FULL, model=TINY))
    assert "pytorchjob.yaml" not in made.files and set(made.commands) == {"torchrun"}
    assert any("a 8, b 4" in note and "srun and a PyTorchJob" in note for note in made.notes)
    assert not any("pytorchjob.yaml" in note for note in made.notes)


@pytest.mark.parametrize(
    "words",
    [
        ("torchrun", "train.py", "--hf_token", "hf_abcdefghijklmnopqrst"),
        ("python", "train.py", "--wandb_api_key", "0123456789abcdef"),
        ("accelerate", "launch", "train.py", "--api_key=0123456789abcdef"),
        ("deepspeed", "train.py", "--data", "https://me:0123456789abcdef@host/data"),
    ],
)
def test_credentials_of_the_command_are_written_nowhere(words: tuple[str, ...]) -> None:
    made = command_section(box("h", 2, H100), *words)
    document = made.model_dump_json()
    assert "hf_abc" not in document and "0123456789" not in document
    assert "[redacted]" in made.commands["torchrun"] and "[redacted]" in made.files["pytorchjob.yaml"]
    assert any("credentials are left out" in note for note in made.notes)
    kept = command_section(box("h", 2, H100), "torchrun", "train.py", "--lr", "1e-4")
    assert not any("credentials" in note for note in kept.notes)


def test_a_placeholder_that_no_other_launcher_fills_in_is_said() -> None:
    made = command_section(box("h", 2, H100), "python", "{workdir}/train.py", "--out", "out.{rank}", "--end", "{x}")
    assert any(note.startswith("{rank}, {workdir} in the command") for note in made.notes)


def test_a_script_has_its_own_strategy_and_precision() -> None:
    nodes = box("h", 8, H100)
    job: dict[str, Any] = {"command": ("torchrun", "train.py"), "model": None, "data": None, "mlx_lm": {}}
    made = plan(nodes, job=job, model=None, model_source="not read")
    own = "strategy and precision are the script's own"
    assert isinstance(made.settings, Disabled) and made.settings.reason == own
    assert made.strategy.parallelism == "the script's own"
    found = section(made)
    assert (found.strategy, found.precision, found.activation_checkpointing) == (None, None, None)
    assert own in found.notes and set(found.commands) == {"torchrun", "srun"}
    assert set(found.files) == {"pytorchjob.yaml"}
    text = json.dumps(made.document())
    assert "bf16" not in text and "ddp" not in text


def test_a_configuration_file_of_the_users_own_is_kept() -> None:
    words = ("accelerate", "launch", "--config_file", "fsdp.yaml", "--mixed_precision", "bf16", "-m", "my.train")
    made = command_section(CLUSTER, *words, strategy="fsdp", mlx_lm={"precision": "auto"})
    assert "accelerate_config.yaml" not in made.files and made.strategy is None
    assert made.commands["accelerate"].endswith(
        "accelerate launch --config_file=fsdp.yaml --mixed_precision=bf16 --num_machines=2 --num_processes=16 "
        "--main_process_ip 10.0.0.1 --main_process_port 29500 --machine_rank 0 -m my.train"
    )
    assert "strategy and precision are those of the command's --config_file" in made.notes
    manifest = yaml.safe_load(made.files["pytorchjob.yaml"])
    started = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["command"]
    assert started[:3] == ["accelerate", "launch", "--config_file=fsdp.yaml"]
    assert "--machine_rank=$(RANK)" in started and "--num_processes=16" in started


def test_without_keys_of_the_job_accelerate_leaves_the_precision_to_the_script() -> None:
    made = command_section(box("h", 8, H100), "accelerate", "launch", "train.py")
    config = yaml.safe_load(made.files["accelerate_config.yaml"])
    assert config["distributed_type"] == "MULTI_GPU" and "mixed_precision" not in config
    made = command_section(box("h", 8, H100), "accelerate", "launch", "train.py", mlx_lm={"precision": "auto"})
    # As the launch passes it on.
    assert yaml.safe_load(made.files["accelerate_config.yaml"])["mixed_precision"] == "bf16"


@pytest.mark.parametrize(
    ("nodes", "words", "command"),
    [
        (box("h", 8, H100), ["train.py", "--lr", "1"], "deepspeed --num_gpus 8 train.py --lr 1"),
        (box("h", 8, H100), ["--module", "my.train"], "deepspeed --num_gpus 8 --module my.train"),
        (CLUSTER, ["train.py"], "--hostfile hostfile --master_addr 10.0.0.1 --master_port 29500 train.py"),
    ],
)
def test_a_command_of_deepspeeds_is_printed_as_one(nodes: Any, words: list[str], command: str) -> None:
    made = command_section(nodes, "deepspeed", *words)
    assert made.commands["deepspeed"].endswith(command)
    # Its configuration is the script's own.
    assert "hostfile" in made.files and "ds_config.json" not in made.files


def test_what_only_the_script_knows_is_auto_in_deepspeeds_file() -> None:
    keys = {"precision": "bf16", "zero_stage": 3, "offload": "none"}
    made = command_section(box("h", 8, H100), "accelerate", "launch", "t.py", strategy="deepspeed", mlx_lm=keys)
    found = json.loads(made.files["ds_config.json"])
    assert {key for key, value in found.items() if value == "auto"} == {
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "train_batch_size",
        "gradient_clipping",
    }
    assert found["zero_optimization"]["stage"] == 3
    # Accelerate's launcher alone gives the script its DeepSpeed plugin.
    assert set(made.commands) == {"torchrun", "accelerate", "srun"}


@pytest.mark.parametrize(
    ("command", "strategy", "imports"),
    [
        (None, "ddp", "import torch, accelerate, transformers, peft; "),
        (None, "deepspeed", "import torch, accelerate, transformers, peft, deepspeed; "),
        (("torchrun", "train.py"), "auto", "import torch; "),
        (("accelerate", "launch", "train.py"), "fsdp", "import torch, accelerate; "),
        (("accelerate", "launch", "train.py"), "deepspeed", "import torch, accelerate, deepspeed; "),
        (("deepspeed", "train.py"), "auto", "import torch, deepspeed; "),
    ],
)
def test_the_steps_of_verification_are_those_of_the_job(
    command: tuple[str, ...] | None, strategy: str, imports: str
) -> None:
    given: dict[str, Any] = {"command": command, "model": None, "data": None} if command else {}
    made = plan(box("h", 2, H100), FULL, model=TINY, job={"strategy": strategy, **given})
    steps = made.verification_steps
    assert any(imports in step for step in steps)
    assert [step for step in steps if "calibrate" in step] == (
        [] if command else ["flightdeck calibrate --scaling --quick"]
    )


SECRETS = {"HF_TOKEN": "hf_abcdefghijklmnopqrst", "OMP_NUM_THREADS": "4", "NCCL_DEBUG": "WARN"}


UNPROBED: dict[str, Any] = {"facts": {}, "network": None, "network_problem": "not probed"}


@pytest.mark.parametrize("machines", [1, 2])
def test_gpus_are_asked_for_where_no_node_was_probed_and_it_is_said(machines: int) -> None:
    nodes = [each for number in range(machines) for each in box(f"h{number}", 8, number=number + 1)]
    made = command_section(nodes, "torchrun", "train.py", planned=UNPROBED)
    assert "--gpus-per-node 8" in made.commands["srun"]
    container = check_pytorch_job(yaml.safe_load(made.files["pytorchjob.yaml"]))
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert sum("not probed, a GPU for each rank is assumed" in note for note in made.notes) == 1
    # Not where the configuration says so, nor beside a node that is known to have none.
    for known in ({"cluster": ClusterConfig(backend="gloo")}, None):
        facts = {} if known else {nodes[0].node: nodes[0]}
        planned = {**UNPROBED, "facts": facts, "config": known or {}}
        on_cpu = command_section(nodes, "torchrun", "train.py", planned=planned)
        assert "--cpus-per-task" in on_cpu.commands["srun"]
        assert "nvidia.com/gpu" not in on_cpu.files["pytorchjob.yaml"]


def test_the_ranks_meet_at_a_host_without_user_and_port() -> None:
    nodes = [
        each.model_copy(update={"host": f"ana@{host}:2222"})
        for number, host in enumerate(("one", "two"))
        for each in box(host, 2, number=number + 1)
    ]
    made = command_section(nodes, "deepspeed", "--no_local_rank", "train.py", planned=UNPROBED)
    assert "--rdzv-endpoint one:29500" in made.commands["torchrun"]
    assert "--master_addr one --master_port 29500 --ssh_port 2222 --no_local_rank" in made.commands["deepspeed"]
    assert made.files["hostfile"] == "ana@one slots=2\nana@two slots=2\n"


def test_the_jobs_variables_are_everywhere_and_their_values_nowhere() -> None:
    made = command_section(CLUSTER, "accelerate", "launch", "t.py", env=SECRETS)
    assert "hf_abc" not in made.model_dump_json()
    for launcher, command in made.commands.items():
        assert 'HF_TOKEN="${HF_TOKEN:?}" OMP_NUM_THREADS="${OMP_NUM_THREADS:?}"' in command, launcher
        assert "NCCL_DEBUG=WARN" in command
    # The shell takes them from its own environment, and says what is missing.
    line = made.commands["torchrun"].partition(" torchrun ")[0] + " env"
    shell = ["/bin/sh", "-c", line]
    run = subprocess.run(shell, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False)
    assert run.returncode != 0 and "HF_TOKEN" in run.stderr
    env = {"PATH": "/usr/bin:/bin", "HF_TOKEN": "a b", "OMP_NUM_THREADS": "4"}
    assert "HF_TOKEN=a b\n" in subprocess.run(shell, env=env, capture_output=True, text=True, check=True).stdout
    container = check_pytorch_job(yaml.safe_load(made.files["pytorchjob.yaml"]))
    variables = {each["name"]: each for each in container["env"]}
    assert variables["NCCL_DEBUG"] == {"name": "NCCL_DEBUG", "value": "WARN"}
    reference = {"secretKeyRef": {"name": f"{made_name(made)}-env", "key": "HF_TOKEN"}}
    assert variables["HF_TOKEN"] == {"name": "HF_TOKEN", "valueFrom": reference}
    assert any(f"kubectl create secret generic {made_name(made)}-env" in note for note in made.notes)


def made_name(made: Any) -> str:
    return str(yaml.safe_load(made.files["pytorchjob.yaml"])["metadata"]["name"])


@pytest.mark.parametrize(
    ("nodes", "job"),
    [
        (CLUSTER, {"model": "/models/llama", "data": "~/data", "strategy": "deepspeed"}),
        (box("h", 8, H100), {"model": "models/llama", "data": "data", "strategy": "ddp"}),
        (box("h", 2), {"model": "/m", "data": "/d", "strategy": "fsdp"}),
    ],
)
def test_the_pytorchjob_has_files_volumes_and_memory(nodes: Any, job: dict[str, Any]) -> None:
    made = section(plan(nodes, {**FULL, "adapter_path": "/out/adapters"}, model=TINY, job=job))
    manifest, config = (yaml.safe_load(made.files[name]) for name in ("pytorchjob.yaml", "configmap.yaml"))
    container = check_pytorch_job(manifest)
    # The files that the command reads lie in its working directory, which can be written.
    assert config["data"] == {name: made.files[name] for name in config["data"]}
    assert {"job.json", *(["ds_config.json"] if job["strategy"] == "deepspeed" else [])} <= config["data"].keys()
    request = json.loads(config["data"]["job.json"])
    assert request.get("deepspeed_config") == ("ds_config.json" if job["strategy"] == "deepspeed" else None)
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert container["workingDir"] == "/workspace" and "readOnly" not in mounts["/workspace"]
    for name in config["data"]:
        assert mounts[f"/workspace/{name}"]["subPath"] == name
    home = {"/models/llama": "/models/llama", "~/data": "/workspace/data"}
    for key in ("model", "data"):
        path = home.get(job[key], f"/workspace/{job[key]}" if not job[key].startswith("/") else job[key])
        assert mounts[path] == {"name": "data", "mountPath": path, "subPath": key, "readOnly": True}
    assert mounts["/out/adapters"]["name"] == "output"
    volumes = {
        each["name"]: each for each in manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["volumes"]
    }
    assert volumes["config"]["configMap"]["name"] == config["metadata"]["name"]
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory" and volumes["shm"]["emptyDir"]["sizeLimit"].endswith("Gi")
    claims = {volumes[name]["persistentVolumeClaim"]["claimName"] for name in ("data", "output")}
    assert all(any(claim in note for note in made.notes) for claim in claims)
    resources = container["resources"]
    assert int(resources["limits"]["memory"].removesuffix("Gi")) >= 4 and resources["requests"]["cpu"] > 0


def test_an_elastic_job_is_one_of_the_operators() -> None:
    nodes = box("a", 1, H100) + box("b", 1, H100, number=2)
    recovery = {"config": {"recovery": RecoveryConfig(min_nodes=1, max_restarts=2)}}
    made = command_section(nodes, "torchrun", "t.py", elastic=True, planned=recovery)
    manifest = yaml.safe_load(made.files["pytorchjob.yaml"])
    check_pytorch_job(manifest)
    policy = {"rdzvBackend": "c10d", "minReplicas": 1, "maxReplicas": 2, "maxRestarts": 2}
    assert manifest["spec"]["elasticPolicy"] == policy
    assert {kind: each["replicas"] for kind, each in manifest["spec"]["pytorchReplicaSpecs"].items()} == {"Worker": 2}


def test_sixteen_ranks_that_do_not_answer_are_one_warning() -> None:
    nodes = box("one", 8) + box("two", 8, number=2)
    job: dict[str, Any] = {"command": ("torchrun", "t.py"), "model": None, "data": None}
    problems = {each.node: "refused" for each in nodes}
    made = plan(nodes, job=job, model=None, model_source="not read", problems=problems)
    [found] = [issue.text for issue in made.warnings if issue.name == "nodes"]
    assert found.startswith("one.0 to one.7, two.0 to two.7 do not respond (refused): their facts from")


def test_advice_about_checkpoints_is_for_whoever_writes_them() -> None:
    job: dict[str, Any] = {"command": ("torchrun", "t.py"), "model": None, "data": None}
    unused = {"config": {"checkpoint": CheckpointConfig(every=10, compression="zstd")}}
    made = plan(box("h", 2, H100), job=job, model=None, model_source="not read", **unused)
    texts = [issue.text for issue in made.warnings if issue.name == "checkpoint_strategy"]
    assert texts == ["[checkpoint] is unused: the job runs a custom command, which saves by itself"]
    assert made.checkpoint_strategy.retention == "the command's own"
    own = plan(box("h", 2, H100), FULL, model=TINY, **unused)
    assert own.checkpoint_strategy.retention == "last_3_checkpoints"
