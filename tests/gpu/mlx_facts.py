"""What MLX says of the GPU beside nvidia-smi and our probe, and sums over the groups that one machine can form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from engine.api import Engine
from engine.models import NodeFacts
from tests.gpu.head import write_config
from tests.gpu.mlx_models import Asked, ask
from tests.gpu.part import Visit
from tests.machine import LOOPBACK, free_port

_QUERY: Final = ("name", "uuid", "memory.total", "driver_version")
_SUM_LIMIT_S: Final = 12.0
_MIB: Final = 2**20


def facts(visit: Visit) -> None:
    asked = ask(visit, "facts", {}, limit_s=20.0)
    if not asked.answers:
        visit.result("mlx computes", "no", target="yes", ok=False, note=asked.failure or "")
        return
    answer = asked.answers[0]
    visit.record("mlx.device_info", json.dumps(answer, indent=1))
    visit.result("mlx computes", "yes", target="yes", ok=answer["sum"] == 4950.0, note=answer["default_device"])
    visit.result("mlx", answer["mlx"])
    visit.result("backends", ", ".join(name for name, there in answer["backends"].items() if there))
    for name, value in answer["device_info"].items():
        visit.result(f"device_info.{name}", value)
    if not visit.dry:
        there = answer["backends"]["nccl"]
        visit.result("nccl is there", "yes" if there else "no", target="yes", ok=there)
    probed(visit, asyncio.run(probe(visit)), answer["device_info"])
    groups(visit)


async def probe(visit: Visit) -> NodeFacts:
    path = write_config(visit, "probed", 1, job={"name": "visit", "command": ["true"]})
    async with Engine() as engine:
        (node,) = await engine.nodes.probe(engine.load_config(path))
    return node


def probed(visit: Visit, node: NodeFacts, info: Mapping[str, str]) -> None:
    """Our probe beside nvidia-smi and MLX."""
    expected = "CPU" if visit.dry else "CUDA"
    device = node.mlx_device or "not known"
    visit.result(
        "our probe: MLX computes on", device, target=expected, ok=device == expected, note=node.mlx_problem or ""
    )
    if visit.dry:
        return
    done = visit.call(["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"])
    visit.record("nvidia-smi", done.output + done.errors)
    if done.code != 0 or not node.gpus:
        what = f"{len(node.gpus)} GPUs by our probe; nvidia-smi: exit code {done.code}"
        visit.result("our probe beside nvidia-smi", what, target="the same", ok=False)
        return
    name, uuid, memory, driver = (part.strip() for part in done.output.splitlines()[0].split(","))
    gpu = node.gpus[0]
    pairs: dict[str, tuple[Any, Any]] = {
        "name": (gpu.name, name),
        "uuid": (gpu.uuid, uuid),
        "driver": (node.nvidia_driver, driver),
        "name by MLX": (info.get("device_name"), name),
    }
    for what, (ours, theirs) in pairs.items():
        visit.result(f"our probe: {what}", str(ours), target=theirs, ok=ours == theirs)
    ours_mib, theirs_mib = (gpu.memory_bytes or 0) / _MIB, float(memory)
    near = abs(ours_mib / theirs_mib - 1) < 0.03
    visit.result("our probe: memory", round(ours_mib), unit="MiB", target=f"{theirs_mib:.0f} MiB ± 3%", ok=near)
    limit = node.gpu_limit_bytes
    visit.result("our probe: the GPU's limit", round(limit / _MIB) if limit else "none", unit="MiB")


@dataclass(frozen=True)
class Group:
    """Ranks of this machine, all on its one GPU. `known`: their sum has to be right; else it is kept what they do."""

    name: str
    backend: str
    size: int
    env: Mapping[str, str] = field(default_factory=dict)
    known: bool = False


def groups(visit: Visit) -> None:
    hostfile = visit.scratch / "hostfile.json"
    hostfile.write_text(json.dumps([[f"{LOOPBACK}:{number}"] for number in (free_port(), free_port())]))
    summed(visit, Group("2 ranks by ring on one GPU", "ring", 2, {"MLX_HOSTFILE": str(hostfile)}, known=True))
    one = {} if visit.dry else {"CUDA_VISIBLE_DEVICES": "0"}
    for size in (1, 2):
        env = {"NCCL_HOST_IP": LOOPBACK, "NCCL_PORT": str(free_port()), "NCCL_DEBUG": "WARN", **one}
        summed(visit, Group(f"{size} rank{'s' * (size > 1)} by nccl on one GPU", "nccl", size, env))


def summed(visit: Visit, group: Group) -> None:
    """A sum over the group; what its ranks print is kept."""

    def rank(number: int) -> Asked:
        own = {**group.env, "MLX_RANK": str(number), "MLX_WORLD_SIZE": str(group.size)}
        return ask(visit, "all_sum", {"backend": group.backend}, limit_s=_SUM_LIMIT_S, env=own)

    with ThreadPoolExecutor(group.size) as pool:
        ranks = list(pool.map(rank, range(group.size)))
    right = float(sum(10**number for number in range(group.size)))
    sums = [asked.answers[0]["sum"] for asked in ranks if asked.answers]
    exact = sums == [right] * group.size
    value = "exact" if exact else f"{len(sums)} of {group.size} ranks: {sums}" if sums else "no sum"
    note = "; ".join(dict.fromkeys(asked.failure for asked in ranks if asked.failure))
    name, target = f"all_sum, {group.name}", "exact" if group.known else ""
    visit.result(name, value, target=target, ok=exact if group.known else None, note=note)
    for number, asked in enumerate(ranks):
        visit.record(f"{name}: rank {number}", asked.completed.output + asked.completed.errors)
