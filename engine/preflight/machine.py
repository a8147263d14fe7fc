"""What this machine has and lacks for a run of its own: the findings behind `flightdeck doctor`."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from engine.errors import LaunchError
from engine.launch.mlx_launch import executable
from engine.models import CheckResult, CheckStatus
from engine.preflight.check import verdict
from engine.preflight.interpreter import ask, with_mlx_lm
from engine.preflight.versions import MLX_MINIMUM, dotted, install_command, new_enough
from engine.transport.local import LocalTransport

_ROOM_BYTES = 1_000_000_000
"""Less than this is a warning: logs and checkpoints need room."""
_ASK_LIMIT_S = 30.0
_ASK_BACKENDS = """
import mlx.core as mx
names = ("ring", "jaccl", "nccl", "mpi")
print(mx.default_device().type.name, *(name for name in names if mx.distributed.is_available(name)))
"""


async def examine(home: Path) -> list[CheckResult]:
    """All findings, looked for at once. FAIL is what a local run needs; WARN is what some clusters need."""
    looks: list[Callable[[], Awaitable[CheckResult]]] = [_mlx, _backends, _launcher, _ssh, _rdma, lambda: _disk(home)]
    async with asyncio.TaskGroup() as tasks:
        found = [tasks.create_task(_begin(look)) for look in looks]
    return [finding.result() for finding in found]


async def _begin(look: Callable[[], Awaitable[CheckResult]]) -> CheckResult:
    return await look()


async def _mlx() -> CheckResult:
    here = LocalTransport()
    seen = await with_mlx_lm(here, sys.executable, await ask(here, sys.executable))
    if seen.problem or not new_enough(seen.mlx, MLX_MINIMUM):
        summary = seen.problem or f"mlx {seen.mlx} is older than {dotted(MLX_MINIMUM)}"
        fix = install_command(sys.executable, {"mlx": f">={dotted(MLX_MINIMUM)}", "mlx-lm": ""})
        return verdict("mlx", CheckStatus.FAIL, summary, fix_command=fix)
    return verdict("mlx", CheckStatus.PASS, f"{seen.words()}, {platform.system()} {platform.machine()}")


async def _backends() -> CheckResult:
    finished = await LocalTransport().run([sys.executable, "-c", _ASK_BACKENDS], timeout_s=_ASK_LIMIT_S)
    if finished.code != 0:
        return verdict("backends", CheckStatus.FAIL, finished.last_words or "MLX did not answer")
    device, *backends = finished.stdout.decode().split()
    summary = f"default device {device}, distributed: {', '.join(backends) or 'none'}"
    return verdict("backends", CheckStatus.PASS if "ring" in backends else CheckStatus.FAIL, summary)


async def _launcher() -> CheckResult:
    try:
        return verdict("mlx.launch", CheckStatus.PASS, str(executable()))
    except LaunchError as error:
        return verdict("mlx.launch", CheckStatus.FAIL, str(error))


async def _ssh() -> CheckResult:
    client = shutil.which("ssh")
    if client is None:
        return verdict("ssh", CheckStatus.WARN, "no ssh client: only this machine's own ranks can be run")
    return verdict("ssh", CheckStatus.PASS, client)


async def _rdma() -> CheckResult:
    tool = shutil.which("ibv_devices")
    if tool is None:
        why = "no ibv_devices: RDMA over Thunderbolt needs macOS 26.2 or later on a Thunderbolt 5 Mac"
        return verdict("rdma", CheckStatus.SKIP, why)
    finished = await LocalTransport().run([tool], timeout_s=_ASK_LIMIT_S)
    devices = [line.split()[0] for line in finished.stdout.decode(errors="replace").splitlines()[2:] if line.split()]
    if not devices:
        return verdict("rdma", CheckStatus.WARN, "no devices: RDMA is switched on in Recovery OS by `rdma_ctl enable`")
    return verdict("rdma", CheckStatus.PASS, ", ".join(devices))


async def _disk(home: Path) -> CheckResult:
    place = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(place).free
    summary = f"{free / 1e9:,.1f} GB free for {home}"
    if not os.access(place, os.W_OK):
        return verdict("disk", CheckStatus.FAIL, f"{place} cannot be written; set FLIGHTDECK_HOME to a place that can")
    return verdict("disk", CheckStatus.PASS if free > _ROOM_BYTES else CheckStatus.WARN, summary)
