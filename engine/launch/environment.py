"""What a rank finds in its environment: what we set for every backend, and what mlx.launch sets for each, for launching
without it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.launch.hostfile import RING, ports_of
from engine.planning import nccl
from engine.planning.wiring import Wiring

RANK_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
"""What every rank has of ours, whatever the backend; the job's own variables win."""
_NCCL = "NCCL_"
NEEDED_FILE = {RING: "MLX_HOSTFILE", "jaccl": "MLX_IBV_DEVICES", "jaccl-ring": "MLX_IBV_DEVICES"}
"""The variable that names the file without which MLX would make a group of size 1 and say nothing."""


@dataclass(frozen=True)
class RankEnvironment:
    """The same for all ranks of an attempt, MLX_RANK apart."""

    variables: dict[str, str]
    files: dict[str, str] = field(default_factory=dict)
    """Variable → content of the file that it names."""


def common_environment(
    wiring: Wiring | None, own: Mapping[str, str], *, gradient_bytes: int | None = None
) -> dict[str, str]:
    """What every rank has of ours and of the job's (`own`, which wins); with NCCL also how it is to talk, given what
    one all_sum carries, where that is known."""
    return {**RANK_ENVIRONMENT, **_nccl(wiring, gradient_bytes), **own}


def network_environment(wiring: Wiring, own: Mapping[str, str]) -> dict[str, str]:
    """Of `common_environment` what decides how the ranks talk: for a program that is not the job."""
    return {**_nccl(wiring, None), **{name: text for name, text in own.items() if name.startswith(_NCCL)}}


def _nccl(wiring: Wiring | None, gradient_bytes: int | None) -> dict[str, str]:
    if wiring is None or wiring.backend != "nccl":
        return {}
    return nccl.environment(infiniband=wiring.infiniband, gradient_bytes=gradient_bytes)


def rank_environment(wiring: Wiring, starting_port: int, environment: Mapping[str, str]) -> RankEnvironment:
    """What mlx.launch would set for the ranks of `wiring`, given this --starting-port (and --nccl-port), when run in
    `environment`."""
    size, terminal = len(wiring.hosts), _terminal(environment)
    if wiring.backend == RING:
        addresses = [
            [f"{ip}:{port}" for ip, port in zip(host.ips, ports_of(rank, wiring, starting_port), strict=True)]
            for rank, host in enumerate(wiring.hosts)
        ]
        return RankEnvironment(terminal, {"MLX_HOSTFILE": json.dumps(addresses) if size > 1 else ""})
    first = wiring.hosts[0].ips[0]
    if wiring.backend == "nccl":
        # CUDA_VISIBLE_DEVICES, which mlx.launch counts by rank, is added there.
        variables = {"NCCL_HOST_IP": first, "NCCL_PORT": str(starting_port), "MLX_WORLD_SIZE": str(size)}
        return RankEnvironment(terminal | variables)
    variables = {"MLX_JACCL_COORDINATOR": f"{first}:{starting_port}"}
    if wiring.backend == "jaccl-ring":
        variables["MLX_JACCL_RING"] = "1"
    return RankEnvironment(terminal | variables, {"MLX_IBV_DEVICES": json.dumps([host.rdma for host in wiring.hosts])})


def of_rank(environment: RankEnvironment, wiring: Wiring, rank: int) -> dict[str, str]:
    """The variables of one rank, those apart that name files."""
    own = {"MLX_RANK": str(rank)}
    if wiring.backend == "nccl":
        own["CUDA_VISIBLE_DEVICES"] = str(rank % ranks_per_host(wiring))
    return environment.variables | own


def ranks_per_host(wiring: Wiring) -> int:
    """How many ranks each host carries, where all carry as many and side by side; else 1, and each rank of nccl takes
    its host's first GPU, as with mlx.launch."""
    hosts = [host.ssh for host in wiring.hosts]
    count = hosts.count(hosts[0])
    blocks = [set(hosts[start : start + count]) for start in range(0, len(hosts), count)]
    even = all(len(block) == 1 for block in blocks) and len(hosts) == count * len(set(hosts))
    return count if even else 1


def file_name(variable: str) -> str:
    """Of the file that a variable names, in the attempt's folder on a node."""
    return f"{variable.lower()}.json"


def _terminal(environment: Mapping[str, str]) -> dict[str, str]:
    """The size of a terminal that mlx.launch would pass on: it has none as we run it, but may hear of one."""
    size = {name: environment.get(name, "") for name in ("COLUMNS", "LINES")}
    numbers = {name: str(int(text)) if text.isdecimal() else "0" for name, text in size.items()}
    return numbers if numbers["COLUMNS"] != "0" else {}
