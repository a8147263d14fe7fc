"""`flightdeck doctor`: what this machine lacks for a run: mlx, its backends, mlx.launch, ssh, RDMA, disk space."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import shutil
import sys
from pathlib import Path

from engine.checks.check import verdict
from engine.checks.interpreter import IMPORT_LIMIT_S, as_interpreter, with_modules
from engine.checks.versions import MLX_MINIMUM, dotted, install_fix, new_enough
from engine.cluster.network_interfaces import rdma_device_names, whole_rdma_table
from engine.cluster.probe_results import PackagesReport, probe_here
from engine.cluster.transport.local import LocalTransport
from engine.errors import ENABLE_RDMA, LaunchError, size_text
from engine.failures.explanation import explained
from engine.launch.mlx_launch import executable
from engine.models import CheckResult, CheckStatus
from engine.security.sanitise import plain

_FREE_BYTES = 1_000_000_000
"""For logs and checkpoints."""
_LIMIT_S = 30.0
_LIST_BACKENDS = """
import mlx.core as mx
names = ("ring", "jaccl", "nccl", "mpi")
print(mx.default_device().type.name, *(name for name in names if mx.distributed.is_available(name)))
"""


async def examine_machine(home: Path) -> list[CheckResult]:
    """All results, collected concurrently. FAIL is what a local run needs; WARN is what some clusters need."""
    return list(await asyncio.gather(_mlx(), _backends(), _launcher(), _ssh(), _rdma(), _disk(home)))


async def _mlx() -> CheckResult:
    report = await probe_here("mlx", "import", "mlx", result_type=PackagesReport, timeout_s=IMPORT_LIMIT_S)
    seen = as_interpreter(report, ["mlx"], sys.executable)
    if seen.python is not None:
        mlx_lm = await probe_here("mlx_lm", "import", "mlx_lm", result_type=PackagesReport, timeout_s=IMPORT_LIMIT_S)
        seen = with_modules(seen, mlx_lm, {"mlx_lm": "mlx-lm"})
    if seen.problem or not new_enough(mlx := seen.packages.get("mlx"), MLX_MINIMUM):
        summary = seen.problem or f"mlx {mlx} is older than {dotted(MLX_MINIMUM)}"
        wanted = {"mlx": f">={dotted(MLX_MINIMUM)}", "mlx-lm": ""}
        fix = install_fix(sys.executable, seen, wanted) if seen.python is not None and not seen.unknown else None
        return verdict("mlx", CheckStatus.FAIL, summary, fix=fix)
    return verdict("mlx", CheckStatus.PASS, f"{seen.describe()}, {platform.system()} {platform.machine()}")


async def _backends() -> CheckResult:
    finished = await LocalTransport().run([sys.executable, "-c", _LIST_BACKENDS], timeout_s=_LIMIT_S)
    if finished.code != 0 or not re.fullmatch(rb"[a-z]+( [a-z]+)*\n", finished.stdout):
        return verdict("backends", CheckStatus.FAIL, explained(finished.exit_output) or "MLX did not answer")
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
    finished = await LocalTransport().run([tool], timeout_s=_LIMIT_S)
    table = finished.stdout.decode(errors="replace")
    if finished.code != 0 or not whole_rdma_table(table):
        return verdict("rdma", CheckStatus.WARN, f"its devices are not known: {plain(finished.exit_output, 200)}")
    devices = rdma_device_names(table)
    if not devices:
        return verdict("rdma", CheckStatus.WARN, f"no devices: {ENABLE_RDMA}")
    return verdict("rdma", CheckStatus.PASS, ", ".join(devices))


async def _disk(home: Path) -> CheckResult:
    folder = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        why = f"{folder} cannot be written; set FLIGHTDECK_HOME to a folder that can"
        return verdict("disk", CheckStatus.FAIL, why)
    summary = f"{size_text(free)} free for {home}"
    return verdict("disk", CheckStatus.PASS if free > _FREE_BYTES else CheckStatus.WARN, summary)
