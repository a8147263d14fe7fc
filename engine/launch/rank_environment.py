"""The environment variables of a rank, ours and those that mlx.launch or torchrun sets for each backend, and the
trainer's job."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from engine.cluster.staging import HostLayout
from engine.config.models import Config, JobConfig, NodeConfig, on_node
from engine.job.traits import FRAMEWORKS
from engine.launch.hostfile import RING, ports_of
from engine.plan.network import NetworkPlan, nccl_environment
from engine.protocol.attempt import RankSpec
from engine.protocol.launchers import with_settings

RANK_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
"""Set for every rank, whatever the backend; the job's own variables win."""
SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "SWANLAB_API_KEY")
"""Variables of the supervisor's environment that the ranks of every node get."""
_NCCL = "NCCL_"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
NEEDED_FILE = {RING: "MLX_HOSTFILE", "jaccl": "MLX_IBV_DEVICES", "jaccl-ring": "MLX_IBV_DEVICES"}
"""The variable that names the file without which MLX silently makes a group of size 1."""


@dataclass(frozen=True)
class RankEnvironment:
    """The variables and files of an attempt's ranks, as mlx.launch or torchrun would make them."""

    network: NetworkPlan
    common: dict[str, str]
    """The variables that all ranks have."""
    named: dict[str, str] = field(default_factory=dict)
    """Variable → content of the file that it names, in a folder of the attempt on each node."""

    @property
    def files(self) -> dict[str, str]:
        """Name → content."""
        return {_file_name(variable): content + "\n" for variable, content in self.named.items()}

    def of_rank(self, rank: int, folder: PurePath) -> dict[str, str]:
        """The variables of one rank, whose files are in `folder`."""
        by_mlx = FRAMEWORKS[self.network.framework].by_mlx_launch
        as_torchrun = {} if by_mlx else torch_rank_variables(self.network, rank)
        paths = {variable: str(folder / _file_name(variable)) for variable in self.named}
        return {**self.common, "MLX_RANK": str(rank), **as_torchrun, **paths}


def _file_name(variable: str) -> str:
    return f"{variable.lower()}.json"


def common_environment(
    network: NetworkPlan | None, variables: Mapping[str, str], *, gradient_bytes: int | None = None
) -> dict[str, str]:
    """Our variables and the job's (`variables`, which win); with NCCL also its settings, for all_sums of
    `gradient_bytes` where that is known."""
    if network is not None and any(host.gpu for host in network.hosts):
        # Each rank has its own: gpu_environment.
        variables = {name: text for name, text in variables.items() if name != _VISIBLE}
    return {**RANK_ENVIRONMENT, **_nccl(network, gradient_bytes), **variables}


def gpu_environment(network: NetworkPlan, rank: int, common: Container[str] = ()) -> dict[str, str]:
    """The variables of one rank of MLX on CUDA beside those of all ranks in `common`, which win: its GPU, of which
    NCCL would take another one than MLX if it saw several, and between machines the interface that NCCL is to use."""
    host, machines = network.hosts[rank], [host.ssh for host in network.hosts]
    of_nccl = network.framework == "mlx" and network.backend == "nccl"
    gpu = str(machines[:rank].count(host.ssh)) if of_nccl and host.gpu is None else host.gpu
    variables = {_VISIBLE: gpu, "NCCL_SOCKET_IFNAME": host.interface if of_nccl and len(set(machines)) > 1 else None}
    return {name: text for name, text in variables.items() if text and name not in common}


def network_environment(network: NetworkPlan, variables: Mapping[str, str]) -> dict[str, str]:
    """The part of `common_environment` that NCCL reads, for a program that is not the job."""
    return {**_nccl(network, None), **{name: text for name, text in variables.items() if name.startswith(_NCCL)}}


def _nccl(network: NetworkPlan | None, gradient_bytes: int | None) -> dict[str, str]:
    if network is None or network.backend != "nccl":
        return {}
    return nccl_environment(infiniband=network.infiniband, gradient_bytes=gradient_bytes)


def rank_environment(network: NetworkPlan, starting_port: int, environment: Mapping[str, str]) -> RankEnvironment:
    """The variables and files of mlx.launch with this --starting-port (and --nccl-port), when run in `environment`; or
    of torchrun (torch/distributed/elastic/agent/server/local_elastic_agent.py), with PyTorch's store on that port."""
    size, terminal = len(network.hosts), _terminal(environment)
    if not FRAMEWORKS[network.framework].by_mlx_launch:
        variables = {"MASTER_ADDR": network.hosts[0].ips[0], "MASTER_PORT": str(starting_port), "WORLD_SIZE": str(size)}
        return RankEnvironment(network, variables)
    if network.backend == RING:
        addresses = [
            [f"{ip}:{port}" for ip, port in zip(host.ips, ports_of(rank, network, starting_port), strict=True)]
            for rank, host in enumerate(network.hosts)
        ]
        return RankEnvironment(network, terminal, {"MLX_HOSTFILE": json.dumps(addresses) if size > 1 else ""})
    first = network.hosts[0].ips[0]
    if network.backend == "nccl":
        variables = {"NCCL_HOST_IP": first, "NCCL_PORT": str(starting_port), "MLX_WORLD_SIZE": str(size)}
        return RankEnvironment(network, terminal | variables)
    variables = {"MLX_JACCL_COORDINATOR": f"{first}:{starting_port}"}
    if network.backend == "jaccl-ring":
        variables["MLX_JACCL_RING"] = "1"
    devices = json.dumps([host.rdma for host in network.hosts])
    return RankEnvironment(network, terminal | variables, {"MLX_IBV_DEVICES": devices})


def torch_rank_variables(network: NetworkPlan, rank: int) -> dict[str, str]:
    """The variables that torchrun sets for one worker, and the interface that its backend is to use where the ranks are
    on several machines."""
    hosts = [host.ssh for host in network.hosts]
    machines = list(dict.fromkeys(hosts))
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(hosts[:rank].count(hosts[rank])),
        "LOCAL_WORLD_SIZE": str(hosts.count(hosts[rank])),
        "GROUP_RANK": str(machines.index(hosts[rank])),
        "GROUP_WORLD_SIZE": str(len(machines)),
    }
    interface = network.hosts[rank].interface
    if interface is not None and len(machines) > 1:
        # gloo also beside nccl, for what is on the CPU.
        variables["GLOO_SOCKET_IFNAME"] = interface
        if network.backend == "nccl":
            variables["NCCL_SOCKET_IFNAME"] = interface
    return variables


def _terminal(environment: Mapping[str, str]) -> dict[str, str]:
    """The terminal size that mlx.launch passes on: it has no terminal as we run it, but may inherit these variables."""
    size = {name: environment.get(name, "") for name in ("COLUMNS", "LINES")}
    numbers = {name: str(int(text)) if text.isdecimal() else "0" for name, text in size.items()}
    return numbers if numbers["COLUMNS"] != "0" else {}


def trainer_job(config: Config, layer_split: str | None = None) -> dict[str, Any] | None:
    """mlx-lm's keys with [job]'s own; None for a job with a command of its own. Paths are as written. `layer_split`
    applies where the job names none."""
    job = config.job
    if job.command is not None:
        return None
    named = {
        "model": job.model,
        "data": job.data,
        "fine_tune_type": job.fine_tune_type,
        "strategy": job.strategy,
        "layer_split": job.layer_split or layer_split,
    }
    ours: dict[str, Any] = {"chunking": job.chunking, "chunk_size": job.chunk_size}
    if config.data.options:
        ours["data_options"] = config.data.options
    if job.framework == "torch":
        ours["framework"] = job.framework
    if "report_to" in job.mlx_lm:
        ours["report_to"] = ",".join(job.node_reporters) or None
    return {**job.mlx_lm, **ours, **{key: value for key, value in named.items() if value is not None}}


def job_command(job: JobConfig) -> list[str] | None:
    """The job's own command; None for a training."""
    return with_settings(job.words, job.strategy, job.mlx_lm) or None


def rank_spec(config: Config, rank: int, layout: HostLayout, share: float) -> RankSpec:
    """A rank with what its training needs, and nothing of its checkpoints."""
    node, job = config.nodes[rank], config.job
    return RankSpec(
        rank=rank,
        node=node.name,
        python=layout.expanded(node.python),
        workdir=layout.expanded(node.workdir),
        model=path_there(config, node, layout, node.model or job.model),
        data=path_there(config, node, layout, node.data or job.data),
        resume_adapter_file=path_there(config, node, layout, job.mlx_lm.get("resume_adapter_file")),
        share=share,
        processes=node.processes,
    )


def path_there(config: Config, node: NodeConfig, layout: HostLayout, path: str | None) -> str | None:
    """A path of [job] as a rank of `node` has it, absolute."""
    return layout.expanded(on_node(path, node, config.folder)) if path is not None else None
