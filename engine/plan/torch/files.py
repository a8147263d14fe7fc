"""The input of PyTorch's tools, made from a plan: accelerate_config.yaml, ds_config.json, DeepSpeed's hostfile, the
manifests for Kubernetes, and the commands to paste, each for this job over these machines.

Sources: `accelerate config` of Accelerate 1.15 (commands/config/config_args.py, utils/dataclasses.py), engine.protocol.
deepspeed, torch.distributed.run, and kubeflow.org/v1 of the Training Operator, which OpenShift AI ships."""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from engine.plan.document import ChosenTorchSettings
from engine.protocol.job import AUTO, TorchSettings, deepspeed_config

MASTER_PORT = 29500
"""torchrun's own default."""
ACCELERATE, DEEPSPEED, HOSTFILE, JOB = "accelerate_config.yaml", "ds_config.json", "hostfile", "job.json"
IMAGE = "registry.example.com/torch:latest"
WORKDIR, _DATA, _OUTPUT = "/workspace", "/data", "/output"
"""The last two: where a command finds the volumes."""
PYTORCH_JOB, CONFIG_MAP = "pytorchjob.yaml", "configmap.yaml"
_SHARED_GIB, _LIBRARIES_GIB, _UNKNOWN_GIB = 2, 4, 16
"""For each rank: shared memory, what CUDA and its libraries take, and all where it is not known."""
SCRIPT = "train.py"
"""Stands for a script of the user's own, where the job has none."""
_OF_THE_SCRIPT = (
    "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping",
)  # fmt: skip


@dataclass(frozen=True)
class Machine:
    host: str
    """As ssh knows it."""
    processes: int
    port: int | None = None
    """The port of ssh, where it is not its configuration's."""


@dataclass(frozen=True)
class TorchLaunch:
    """One job over its machines."""

    name: str
    settings: ChosenTorchSettings
    machines: tuple[Machine, ...]
    program: tuple[str, ...]
    """The words after a launcher: a script, "-m" and a module, or "--no_python" and a program; and its arguments."""
    address: str = "localhost"
    """Rank 0's, for the others."""
    on_gpu: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    """Every rank's; without secrets."""
    secrets: tuple[str, ...] = ()
    """Names of the variables of [job] env whose values are written nowhere."""
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
    """That launcher's, before the script: "--mixed_precision=bf16"."""
    elastic: str = ""
    """The least and the most machines of an elastic job, "2:4"."""
    restarts: int = 0
    inputs: Mapping[str, str] = field(default_factory=dict)
    """"model" and "data" -> their paths, as a node has them."""
    memory_bytes: int | None = None
    """The need of a machine's ranks, of its own memory; None where it is not known."""
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
        """`accelerate launch` starts this job's ranks. On the CPU it starts one process, and FSDP becomes DDP."""
        given = self.job is not None or self.launcher == "accelerate"
        return given and self.on_gpu and self.processes is not None and "--cpu" not in self.options

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
        "num_machines": len(launch.machines), "num_processes": launch.ranks, "machine_rank": 0,
        "main_process_ip": launch.address if len(launch.machines) > 1 else None, "main_process_port": MASTER_PORT,
        "main_training_function": "main", "rdzv_backend": "static", "same_network": True, "use_cpu": False,
    }  # fmt: skip
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
            "fsdp_version": 2, "fsdp_reshard_after_forward": settings.sharding == "full",
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            **({"fsdp_transformer_layer_cls_to_wrap": ",".join(launch.blocks)} if launch.blocks else {}),
            "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_activation_checkpointing": settings.grad_checkpoint, "fsdp_offload_params": settings.offload == "cpu",
        }  # fmt: skip
    return config


def deepspeed_file(launch: TorchLaunch) -> dict[str, Any] | None:
    """None for other strategies. Accelerate and transformers replace "auto" by what a script of the user's own does."""
    settings = launch.settings
    if settings.strategy != "deepspeed":
        return None
    configuration = deepspeed_config(
        TorchSettings.from_spec({**dict(settings), "nvme_path": launch.nvme_path}),
        micro_batch=launch.micro_batch or 1,
        accumulation=launch.accumulation,
        world_size=launch.ranks,
        max_grad_norm=launch.max_grad_norm,
    )
    return configuration if launch.job is not None else configuration | dict.fromkeys(_OF_THE_SCRIPT, AUTO)


def files(launch: TorchLaunch) -> dict[str, str]:
    """File name -> its text."""
    texts: dict[str, str] = {}
    if (accelerated := accelerate_config(launch)) is not None:
        texts[ACCELERATE] = _yaml(accelerated)
    if (zero := deepspeed_file(launch)) is not None:
        texts[DEEPSPEED] = json.dumps(zero, indent=2) + "\n"
    if launch.with_deepspeed:
        texts[HOSTFILE] = "".join(f"{machine.host} slots={machine.processes}\n" for machine in launch.machines)
    if launch.job is not None:
        backend = "nccl" if launch.on_gpu else "gloo"
        zero_file = {"deepspeed_config": DEEPSPEED} if zero is not None else {}
        texts[JOB] = json.dumps({"backend": backend, **zero_file, "job": dict(launch.job)}, indent=2) + "\n"
    return texts


class _Dumper(yaml.SafeDumper):
    """Writes a template that two replicas share twice, and quotes a text that is a number in YAML 1.2, as Kubernetes
    reads it, and none in PyYAML: 1e-4."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|0o[0-7]+$")
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))


def _yaml(document: Mapping[str, Any]) -> str:
    values = {key: value for key, value in document.items() if value is not None}
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=120)


def commands(launch: TorchLaunch) -> tuple[dict[str, str], tuple[str, ...]]:
    """(launcher -> its command, notes). Where there are several machines, each is started on all of them, but for
    `deepspeed` and `srun`, which reach the others themselves."""
    lines: dict[str, str] = {}
    machines, processes, program = len(launch.machines), launch.processes, list(launch.program)
    notes: list[str] = []
    # The trainer divides its model itself, and the launchers of Accelerate and DeepSpeed are for scripts that do not.
    script = program if launch.job is None else [SCRIPT]
    before = [f"{name}={shlex.quote(value)}" for name, value in launch.environment.items()]
    before += [f'{name}="${{{name}:?}}"' for name in launch.secrets]
    options = {launch.launcher: launch.options}
    if processes is None:
        numbers = ", ".join(f"{machine.host} {machine.processes}" for machine in launch.machines)
        notes.append(
            f"the machines have different numbers of ranks: set --nproc-per-node on each ({numbers}); srun and a "
            "PyTorchJob have one number for all, and are left out"
        )
    per_machine = str(processes or launch.machines[0].processes)
    size = ["--nnodes", launch.elastic or str(machines), "--nproc-per-node", per_machine]
    lines["torchrun"] = _line(before, ["torchrun", *size, *_rendezvous(launch), *options.get("torchrun", ()), *program])
    if launch.with_accelerate:
        lines["accelerate"] = _line(
            before, ["accelerate", "launch", *_accelerate_options(launch, pasted=True), *script]
        )
    notes += _accelerate_notes(launch)
    if launch.with_deepspeed:
        where = ["--num_gpus", per_machine]
        if machines > 1:
            where = ["--hostfile", HOSTFILE, "--master_addr", launch.address, "--master_port", str(MASTER_PORT)]
            ports = {machine.port for machine in launch.machines}
            where += ["--ssh_port", str(port)] if (port := next(iter(ports))) is not None and len(ports) == 1 else []
            notes.append("deepspeed starts the others by pdsh or ssh, with NCCL_* and the variables in .deepspeed_env")
        module = ["--module", *script[1:]] if script[0] == "-m" else script
        lines["deepspeed"] = _line(before, ["deepspeed", *where, *options.get("deepspeed", ()), *module])
    if processes is not None:
        lines["srun"] = _srun(launch, before, per_machine)
    if launch.secrets:
        notes.append(f"{', '.join(launch.secrets)} of [job] env: the commands take the shell's own variables")
    if machines > 1:
        notes.insert(0, f"torchrun and accelerate launch are started on each of the {machines} machines")
    if launch.job is not None:
        notes.append(
            f"torchrun and srun start the built-in trainer with {JOB}: it resumes nothing, and neither survives a lost "
            "rank nor syncs files as flightdeck launch does; engine must be importable there (PYTHONPATH), and model "
            "and data at the paths of the job"
        )
        if "accelerate" in lines:
            notes.append(f"{SCRIPT} stands for a script of your own with this job's sizes and strategy")
    return lines, tuple(notes)


def _rendezvous(launch: TorchLaunch) -> list[str]:
    options = ["--standalone"]
    if len(launch.machines) > 1:
        options = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{launch.address}:{MASTER_PORT}"]
        options += ["--rdzv-id", _label(launch.name)]
    return [*options, "--max-restarts", str(launch.restarts)] if launch.elastic else options


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
    exported = " ".join(assignment for assignment in before if "IFNAME" not in assignment)
    return f"{exported + ' ' if exported else ''}srun {shlex.join(options)} bash -c {shlex.quote(inner)}"


def _line(before: Sequence[str], words: Sequence[str]) -> str:
    return " ".join([*before, shlex.join(words)])


def manifests(launch: TorchLaunch, files: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """(file name -> its text, notes), beside `files`. The operator sets MASTER_ADDR, MASTER_PORT, RANK and torchrun's
    own variables (PET_NNODES, PET_NPROC_PER_NODE, …), so that the command needs none of them."""
    processes = launch.processes
    if processes is None:
        return {}, ()
    name = _label(launch.name)
    read = {file: text for file, text in files.items() if file in (ACCELERATE, DEEPSPEED, JOB)}
    configuration = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{name}-config"}, "data": read}
    texts = {CONFIG_MAP: _yaml(configuration)} if read else {}
    texts[PYTORCH_JOB] = _yaml(_pytorch_job(launch, name, read, processes))
    return texts, tuple(_notes(launch, name, texts))


def _label(name: str) -> str:
    """A DNS-1035 label, of at most 50 characters, since the operator appends to it."""
    label = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")
    return (label if label[:1].isalpha() else f"job-{label}")[:50].strip("-")


def _pytorch_job(launch: TorchLaunch, name: str, read: Mapping[str, str], processes: int) -> dict[str, Any]:
    """One pod for each machine."""
    volumes: list[dict[str, Any]] = [
        # NCCL and data loaders share memory there; the default is 64 MiB.
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{_SHARED_GIB * processes}Gi"}},
        *({"name": kind, "persistentVolumeClaim": {"claimName": f"{name}-{kind}"}} for kind in ("data", "output")),
        *([{"name": "config", "configMap": {"name": f"{name}-config"}}] if read else []),
    ]
    template = {"spec": {"containers": [_container(launch, name, read, processes)], "volumes": volumes}}
    machines, (least, _, most) = len(launch.machines), launch.elastic.partition(":")
    replicas = {"Worker": machines} if launch.elastic else {"Master": 1, "Worker": machines - 1}
    elastic = {"rdzvBackend": "c10d", "minReplicas": int(least or 0), "maxReplicas": int(most or 0)}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": {
            "nprocPerNode": str(processes),
            **({"elasticPolicy": {**elastic, "maxRestarts": launch.restarts}} if launch.elastic else {}),
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 3},
            "pytorchReplicaSpecs": {
                kind: {"replicas": count, "restartPolicy": "OnFailure", "template": template}
                for kind, count in replicas.items()
                if count > 0
            },
        },
    }


def _container(launch: TorchLaunch, name: str, read: Mapping[str, str], processes: int) -> dict[str, Any]:
    command = ["torchrun", *launch.program]
    if launch.launcher == "accelerate" and launch.on_gpu:
        where = ["--machine_rank=$(RANK)", "--main_process_ip=$(MASTER_ADDR)", "--main_process_port=$(MASTER_PORT)"]
        command = ["accelerate", "launch", *_accelerate_options(launch, pasted=False), *where, *launch.program]
    # Addresses and interfaces are the pods' own. Caches and paths with ~ are below HOME.
    env: list[dict[str, Any]] = [{"name": "HOME", "value": WORKDIR}]
    env += [{"name": key, "value": value} for key, value in launch.environment.items() if "IFNAME" not in key]
    env += [{"name": key, "valueFrom": {"secretKeyRef": {"name": f"{name}-env", "key": key}}} for key in launch.secrets]
    gib_per_rank = _UNKNOWN_GIB if launch.memory_bytes is None else _SHARED_GIB + _LIBRARIES_GIB * launch.on_gpu
    memory = f"{gib_per_rank * processes + -(-(launch.memory_bytes or 0) // 2**30)}Gi"
    container = {
        "name": "pytorch",
        "image": IMAGE,
        "command": command,
        "workingDir": WORKDIR,
        "env": env,
        "resources": {
            "requests": {"cpu": processes, "memory": memory},
            "limits": {"memory": memory, **({"nvidia.com/gpu": processes} if launch.on_gpu else {})},
        },
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, *_mounts(launch, read)],
    }
    if launch.environment.get("NCCL_IB_DISABLE") == "0":
        # Registered memory is locked.
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    return container


def _mounts(launch: TorchLaunch, read: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The job's paths as it names them, and its files one by one beside what else is in the working directory."""
    yield {"name": "output", "mountPath": WORKDIR if launch.job is not None else _OUTPUT}
    for folder, path in launch.inputs.items():
        absolute = posixpath.normpath(posixpath.join(WORKDIR, re.sub(r"^~/?", "", path)))
        yield {"name": "data", "mountPath": absolute, "subPath": folder, "readOnly": True}
    if not launch.inputs:
        yield {"name": "data", "mountPath": _DATA, "readOnly": True}
    if posixpath.isabs(adapters := (launch.job or {}).get("adapter_path") or ""):
        yield {"name": "output", "mountPath": adapters, "subPath": "adapters"}
    for file in read:
        yield {"name": "config", "mountPath": f"{WORKDIR}/{file}", "subPath": file}


def _notes(launch: TorchLaunch, name: str, texts: Mapping[str, str]) -> Iterator[str]:
    has, output = f"PyTorch, and your program in {WORKDIR}", _OUTPUT
    if launch.job is not None:
        has, output = "PyTorch and the package engine", WORKDIR
    yield f"kubectl apply {' '.join(f'-f {file}' for file in texts)}: {IMAGE} stands for an image with {has}"
    holds = " and ".join(f"{path} in its folder {folder}" for folder, path in launch.inputs.items())
    stands = f"the claim {name}-data stands for a volume with {holds or f'the data, mounted at {_DATA}'}"
    yield f"{stands}; {name}-output for one that all pods write, mounted at {output}"
    if launch.secrets:
        values = " ".join(f'--from-literal={key}="${key}"' for key in launch.secrets)
        yield f"kubectl create secret generic {name}-env {values}: the manifest has no values of [job] env"
    if launch.memory_bytes is None:
        yield f"{PYTORCH_JOB}: {_UNKNOWN_GIB}Gi for each rank stand for the script's memory, which is not known"
