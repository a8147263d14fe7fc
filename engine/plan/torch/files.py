"""The input of PyTorch's tools, made from a plan: accelerate_config.yaml, ds_config.json, DeepSpeed's hostfile, a
PyTorchJob for Kubernetes, and the commands to paste, each for this job over these machines.

Sources: `accelerate config` of Accelerate 1.15 (commands/config/config_args.py, utils/dataclasses.py), engine.protocol.
deepspeed, torch.distributed.run, and kubeflow.org/v1 of the Training Operator, which OpenShift AI ships.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from engine.plan.document import ChosenTorchSettings
from engine.protocol.deepspeed import deepspeed_config
from engine.protocol.job import AUTO, TorchSettings

MASTER_PORT = 29500
"""torchrun's own default."""
ACCELERATE, DEEPSPEED, HOSTFILE, PYTORCH_JOB = "accelerate_config.yaml", "ds_config.json", "hostfile", "pytorchjob.yaml"
JOB = "job.json"
SCRIPT = "train.py"
"""Stands for a script of the user's own, where the job has none."""
IMAGE = "registry.example.com/torch:latest"
"""Stands for the user's own image."""
_NOT_OF_A_NAME = re.compile(r"[^a-z0-9-]+")
_OF_THE_SCRIPT = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
    "gradient_clipping",
)


@dataclass(frozen=True)
class Machine:
    host: str
    """As ssh knows it."""
    processes: int


@dataclass(frozen=True)
class TorchLaunch:
    """One job over its machines."""

    name: str
    settings: ChosenTorchSettings
    machines: tuple[Machine, ...]
    program: tuple[str, ...]
    """The words after a launcher: a script, "-m" and a module, or "--no_python" and another program, with its
    arguments."""
    address: str = "localhost"
    """Rank 0's, for the others."""
    on_gpu: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    """Every rank's; without secrets."""
    blocks: tuple[str, ...] = ()
    """Classes that FSDP wraps; (): those that the model names itself."""
    micro_batch: int | None = None
    """Sequences per rank; None for a command."""
    accumulation: int = 1
    max_grad_norm: float | None = None
    nvme_path: str | None = None
    planned: bool = True
    """False: strategy and precision are the script's own, and `settings` have the defaults."""
    launcher: str | None = None
    """The one that the job's own command begins with: "accelerate"."""
    options: tuple[str, ...] = ()
    """Options of that `accelerate launch`, before its script: "--mixed_precision=bf16"."""
    elastic: str = ""
    """The least and the most machines of an elastic job, "2:4"."""
    restarts: int = 0
    job: Mapping[str, Any] | None = None
    """The keys of a job of the built-in trainer, which divides its model itself; None for a command."""

    @property
    def ranks(self) -> int:
        return sum(machine.processes for machine in self.machines)

    @property
    def own_file(self) -> bool:
        """The user's `accelerate launch` names a configuration file."""
        return any(option.startswith("--config_file") for option in self.options)

    @property
    def with_accelerate(self) -> bool:
        """`accelerate launch` starts this job's ranks. On the CPU it starts one process whatever is asked, and FSDP
        becomes DDP there."""
        given = self.job is not None or self.launcher == "accelerate"
        return given and self.on_gpu and self.processes is not None

    @property
    def with_deepspeed(self) -> bool:
        given = self.settings.strategy == "deepspeed" if self.job is not None else self.launcher == "deepspeed"
        return given and self.on_gpu

    @property
    def processes(self) -> int | None:
        """On each machine; None where they differ."""
        counts = {machine.processes for machine in self.machines}
        return counts.pop() if len(counts) == 1 else None


def accelerate_config(launch: TorchLaunch) -> dict[str, Any] | None:
    """None where Accelerate does not start the job, or with a file of the user's own."""
    settings = launch.settings
    if not launch.with_accelerate or launch.own_file:
        return None
    kind = {"ddp": "MULTI_GPU", "fsdp": "FSDP", "deepspeed": "DEEPSPEED"}[settings.strategy]
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind if launch.ranks > 1 or settings.strategy != "ddp" else "NO",
        "num_machines": len(launch.machines),
        "num_processes": launch.ranks,
        "machine_rank": 0,
        "main_process_ip": launch.address if len(launch.machines) > 1 else None,
        "main_process_port": MASTER_PORT,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    if settings.strategy == "deepspeed":
        # The precision is the file's.
        config["deepspeed_config"] = {
            "deepspeed_config_file": DEEPSPEED,
            "deepspeed_multinode_launcher": "standard",
            "zero3_init_flag": settings.zero_stage == 3,
        }
        return config
    if launch.planned:
        config["mixed_precision"] = "no" if settings.precision == "fp32" else settings.precision
    if settings.strategy == "fsdp":
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": settings.sharding == "full",
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            **({"fsdp_transformer_layer_cls_to_wrap": ",".join(launch.blocks)} if launch.blocks else {}),
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_activation_checkpointing": settings.grad_checkpoint,
            "fsdp_offload_params": settings.offload == "cpu",
        }
    return config


def deepspeed_file(launch: TorchLaunch) -> dict[str, Any] | None:
    """None for other strategies. Accelerate and transformers replace "auto" by what a script of the user's own does."""
    settings = launch.settings
    if settings.strategy != "deepspeed":
        return None
    found = deepspeed_config(
        TorchSettings(
            zero_stage=settings.zero_stage,
            offload=settings.offload,
            nvme_path=launch.nvme_path,
            precision=settings.precision,
        ),
        micro_batch=launch.micro_batch or 1,
        accumulation=launch.accumulation,
        world_size=launch.ranks,
        max_grad_norm=launch.max_grad_norm,
    )
    return found if launch.job is not None else found | dict.fromkeys(_OF_THE_SCRIPT, AUTO)


def pytorch_job(launch: TorchLaunch) -> dict[str, Any] | None:
    """A manifest of kubeflow.org/v1, one pod for each machine; None where their numbers of ranks differ. The operator
    sets MASTER_ADDR, MASTER_PORT, RANK and torchrun's own variables (PET_NNODES, PET_NPROC_PER_NODE, …), so that the
    command needs none of them."""
    processes = launch.processes
    if processes is None:
        return None
    gpus = {"limits": {"nvidia.com/gpu": processes}} if launch.on_gpu else {"requests": {"cpu": processes}}
    command = ["torchrun", *launch.program]
    if launch.launcher == "accelerate" and launch.on_gpu:
        where = ["--machine_rank=$(RANK)", "--main_process_ip=$(MASTER_ADDR)", "--main_process_port=$(MASTER_PORT)"]
        command = ["accelerate", "launch", *_accelerate_options(launch, pasted=False), *where, *launch.program]
    container: dict[str, Any] = {
        "name": "pytorch",
        "image": IMAGE,
        "command": command,
        # Addresses and interfaces are the pods' own.
        "env": [{"name": name, "value": value} for name, value in launch.environment.items() if "IFNAME" not in name],
        "resources": gpus,
        # NCCL and data loaders share memory there; the default is 64 MiB.
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    if "NCCL_IB_DISABLE" in launch.environment and launch.environment["NCCL_IB_DISABLE"] == "0":
        # Registered memory is locked.
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    template = {"spec": {"containers": [container], "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}]}}
    replicas = {"Master": 1, "Worker": len(launch.machines) - 1}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": _label(launch.name)},
        "spec": {
            "nprocPerNode": str(processes),
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 3},
            "pytorchReplicaSpecs": {
                name: {"replicas": count, "restartPolicy": "OnFailure", "template": template}
                for name, count in replicas.items()
                if count > 0
            },
        },
    }


def _label(name: str) -> str:
    """A DNS-1035 label, of at most 50 characters, since the operator appends to it."""
    found = _NOT_OF_A_NAME.sub("-", name.lower()).strip("-")
    return (found if found[:1].isalpha() else f"job-{found}")[:50].strip("-")


def files(launch: TorchLaunch) -> dict[str, str]:
    """File name -> its text."""
    found: dict[str, str] = {}
    if (accelerated := accelerate_config(launch)) is not None:
        found[ACCELERATE] = _yaml(accelerated)
    if (zero := deepspeed_file(launch)) is not None:
        found[DEEPSPEED] = json.dumps(zero, indent=2) + "\n"
    if launch.with_deepspeed:
        found[HOSTFILE] = "".join(f"{machine.host} slots={machine.processes}\n" for machine in launch.machines)
    if launch.job is not None:
        backend = "nccl" if launch.on_gpu else "gloo"
        found[JOB] = json.dumps({"backend": backend, "job": dict(launch.job)}, indent=2) + "\n"
    if (manifest := pytorch_job(launch)) is not None:
        found[PYTORCH_JOB] = _yaml(manifest)
    return found


def _yaml(document: Mapping[str, Any]) -> str:
    class Plain(yaml.SafeDumper):
        """Writes a template that two replicas share twice."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    values = {key: value for key, value in document.items() if value is not None}
    return yaml.dump(values, Dumper=Plain, sort_keys=False, width=120)


def commands(launch: TorchLaunch) -> tuple[dict[str, str], tuple[str, ...]]:
    """(launcher -> its command, notes). Where there are several machines, each is started on all of them, but for
    `deepspeed` and `srun`, which reach the others themselves."""
    found: dict[str, str] = {}
    machines, processes, program = len(launch.machines), launch.processes, list(launch.program)
    notes: list[str] = []
    # The trainer divides its model itself, and the launchers of Accelerate and DeepSpeed are for scripts that do not.
    script = program if launch.job is None else [SCRIPT]
    before = [f"{name}={shlex.quote(value)}" for name, value in launch.environment.items()]
    elsewhere = "" if machines == 1 else f"on each of the {machines} machines: "
    if processes is None:
        each = ", ".join(f"{machine.host} {machine.processes}" for machine in launch.machines)
        notes.append(
            f"the machines have different numbers of ranks: set --nproc-per-node on each ({each}); srun and a "
            "PyTorchJob have one number for all, and are left out"
        )
    per_machine = str(processes or launch.machines[0].processes)
    rendezvous = ["--standalone"]
    if machines > 1:
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{launch.address}:{MASTER_PORT}"]
        rendezvous += ["--rdzv-id", _word(launch.name)]
    rendezvous += ["--max-restarts", str(launch.restarts)] if launch.elastic else []
    words = [
        "torchrun",
        "--nnodes",
        launch.elastic or str(machines),
        "--nproc-per-node",
        per_machine,
        *rendezvous,
        *program,
    ]
    found["torchrun"] = _line(before, words)
    if launch.with_accelerate:
        found["accelerate"] = _line(
            before, ["accelerate", "launch", *_accelerate_options(launch, pasted=True), *script]
        )
    notes += _accelerate_notes(launch)
    if launch.with_deepspeed:
        where = ["--num_gpus", per_machine]
        if machines > 1:
            where = ["--hostfile", HOSTFILE, "--master_addr", launch.address, "--master_port", str(MASTER_PORT)]
            notes.append(
                "deepspeed starts the others by pdsh or ssh, and exports NCCL_* and the variables in .deepspeed_env"
            )
        module = ["--module", *script[1:]] if script[0] == "-m" else script
        found["deepspeed"] = _line(before, ["deepspeed", *where, *module])
    if processes is not None:
        found["srun"] = _srun(launch, before, per_machine)
        notes.append(f"{PYTORCH_JOB}: {IMAGE} stands for an image with PyTorch, your program, its data and the model")
    if elsewhere:
        notes.insert(0, f"torchrun and accelerate launch are started {elsewhere.removesuffix(': ')}")
    if launch.job is not None:
        notes.append(
            f"torchrun and srun start the built-in trainer with {JOB}: it resumes nothing, and neither survives a lost "
            "rank nor syncs files as flightdeck launch does; engine must be importable there (PYTHONPATH), and model "
            "and data at the paths of the job"
        )
        if "accelerate" in found:
            notes.append(f"{SCRIPT} stands for a script of your own with this job's sizes and strategy")
    return found, tuple(notes)


def _accelerate_options(launch: TorchLaunch, *, pasted: bool) -> list[str]:
    """Its configuration; with a file of the user's own, whose ranks may be others, also this job's. `pasted`: on the
    first of the machines, with rank 0's address."""
    options = ["--config_file", ACCELERATE, *launch.options]
    address = ["--main_process_ip", launch.address, "--main_process_port", str(MASTER_PORT)]
    if launch.own_file:
        options = [*launch.options, f"--num_machines={len(launch.machines)}", f"--num_processes={launch.ranks}"]
    if not pasted or len(launch.machines) == 1:
        return options
    return [*options, *(address if launch.own_file else []), "--machine_rank", "0"]


def _accelerate_notes(launch: TorchLaunch) -> Iterator[str]:
    if launch.with_accelerate and len(launch.machines) > 1:
        yield f"accelerate launch: --machine_rank 0 on {launch.machines[0].host}, then 1, 2, … on the others"
    elif not launch.with_accelerate and (launch.job is not None or launch.launcher == "accelerate"):
        why = "starts one process, and replaces FSDP by DDP, where there is no GPU"
        yield f"accelerate launch {'wants as many ranks on each machine' if launch.on_gpu else why}"
    if launch.launcher == "accelerate":
        yield "torchrun and srun start the script without what accelerate launch sets for it"


def _srun(launch: TorchLaunch, before: Sequence[str], per_machine: str) -> str:
    """One torchrun on each node of the allocation, which find each other at its first node."""
    first = '"$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"'
    inner = (
        f'torchrun --nnodes "$SLURM_NNODES" --nproc-per-node {per_machine} --rdzv-backend c10d '
        f'--rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint {first}:{MASTER_PORT} {shlex.join(launch.program)}'
    )
    gpus = ["--gpus-per-node", per_machine] if launch.on_gpu else ["--cpus-per-task", per_machine]
    options = ["--nodes", str(len(launch.machines)), "--ntasks-per-node", "1", *gpus, "--kill-on-bad-exit=1"]
    # The interfaces of that cluster are its own.
    own = " ".join(each for each in before if "IFNAME" not in each)
    return f"{own + ' ' if own else ''}srun {shlex.join(options)} bash -c {shlex.quote(inner)}"


def _line(before: Sequence[str], words: Sequence[str]) -> str:
    return " ".join([*before, shlex.join(words)])


def _word(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)
