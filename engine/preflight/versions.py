"""versions_match: python, mlx and mlx-lm can be imported on every node, are new enough, and are the same everywhere.

A different mlx on two nodes is two different all_sums; the launcher would not say so.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
from pathlib import PurePosixPath

from engine.config.models import FlightConfig
from engine.errors import LaunchError
from engine.models import CheckResult
from engine.preflight import connectivity
from engine.preflight.check import Check, Findings
from engine.preflight.interpreter import IMPORT_LIMIT_S, Interpreter, with_mlx_lm
from engine.preflight.scene import Scene
from engine.transport.base import quoted

NAME = "versions_match"
MLX_MINIMUM = (0, 32, 1)
MLX_LM_MINIMUM = (0, 32, 0)
_MLX_NAMES = {"jaccl-ring": "jaccl"}
"""Backend of a wiring → what MLX calls it, where that differs."""
_LIMIT_S = 2 * IMPORT_LIMIT_S + 5


async def look(scene: Scene) -> CheckResult:
    seen, wiring = await asyncio.gather(versions(scene), backend(scene))
    return judge(scene.config, seen, wiring)


async def versions(scene: Scene) -> dict[str, Interpreter]:
    """Node name → its interpreter, mlx-lm asked for; once for all checks."""
    return await scene.shared(NAME, lambda: _versions(scene))


async def _versions(scene: Scene) -> dict[str, Interpreter]:
    found = await scene.interpreters()
    # Several ranks of a host may share an interpreter: it is asked once.
    asked = {(node.ssh, node.python): node for node in scene.config.nodes}
    # A job with a command of its own may never import it.
    imported = scene.config.job.command is None
    answers = await asyncio.gather(
        *(
            with_mlx_lm(scene.transport(node), node.python, found[node.name], imported=imported)
            for node in asked.values()
        )
    )
    whole = dict(zip(asked, answers, strict=True))
    return {node.name: whole[node.ssh, node.python] for node in scene.config.nodes}


async def backend(scene: Scene) -> str:
    """What the ranks are to speak; where that cannot be told, hostfile_valid says why."""
    try:
        return (await scene.wiring()).backend
    except LaunchError:
        return "ring"


def without_mlx(seen: dict[str, Interpreter], backend: str) -> list[str]:
    """The nodes on which no rank could begin, whatever else differs."""
    return [name for name, each in seen.items() if each.mlx is None or mlx_name(backend) not in each.backends]


def mlx_name(backend: str) -> str:
    """What MLX calls the backend of a wiring."""
    return _MLX_NAMES.get(backend, backend)


def judge(config: FlightConfig, seen: dict[str, Interpreter], backend: str = "ring") -> CheckResult:
    """The verdict over all nodes; rank 0's versions are what the others are compared with."""
    first = seen[config.nodes[0].name]
    found = Findings(NAME, config)
    for node in config.nodes:
        found.evidence[node.name] = seen[node.name].words()
        fault, wanted = _fault(seen[node.name], first, backend)
        if fault is not None:
            found.fault(node, fault, _fix(node.python, seen[node.name], wanted))
    return found.verdict(f"the same on all nodes: {first.words()}")


def _fault(seen: Interpreter, first: Interpreter, backend: str) -> tuple[str | None, dict[str, str]]:
    """What is wrong with `seen` in words, and the packages that would mend it as name → requirement."""
    mlx = f"=={first.mlx}" if new_enough(first.mlx, MLX_MINIMUM) else f">={dotted(MLX_MINIMUM)}"
    mlx_lm = f"=={first.mlx_lm}" if new_enough(first.mlx_lm, MLX_LM_MINIMUM) else f">={dotted(MLX_LM_MINIMUM)}"
    if seen.python is None:
        return seen.problem or "the interpreter said nothing", {"mlx": mlx, "mlx-lm": mlx_lm}
    if seen.problem:
        missing = {name: need for name, have, need in _packages(seen, mlx, mlx_lm) if have is None}
        return seen.problem, missing
    if not new_enough(seen.mlx, MLX_MINIMUM):
        return f"mlx {seen.mlx} is older than {dotted(MLX_MINIMUM)}", {"mlx": mlx}
    if not new_enough(seen.mlx_lm, MLX_LM_MINIMUM):
        return f"mlx-lm {seen.mlx_lm} is older than {dotted(MLX_LM_MINIMUM)}", {"mlx-lm": mlx_lm}
    needed = mlx_name(backend)
    if needed not in seen.backends:
        return f"this build of mlx has no {needed} backend", {"mlx": mlx}
    if seen.mlx != first.mlx and first.mlx is not None:
        return f"mlx {seen.mlx}, rank 0 has {first.mlx}", {"mlx": mlx}
    if seen.mlx_lm != first.mlx_lm and first.mlx_lm is not None:
        return f"mlx-lm {seen.mlx_lm}, rank 0 has {first.mlx_lm}", {"mlx-lm": mlx_lm}
    if seen.python != first.python and first.python is not None:
        return f"python {seen.python}, rank 0 has {first.python}", {
            "python": first.python,
            "mlx": mlx,
            "mlx-lm": mlx_lm,
        }
    return None, {}


def _packages(seen: Interpreter, mlx: str, mlx_lm: str) -> list[tuple[str, str | None, str]]:
    return [("mlx", seen.mlx, mlx), ("mlx-lm", seen.mlx_lm, mlx_lm)]


def _fix(python: str, seen: Interpreter, wanted: dict[str, str]) -> str | None:
    """A command that mends it, to be pasted on the node; uv makes the interpreter where there is none."""
    environment = quoted(str(PurePosixPath(python).parent.parent))
    version = wanted.pop("python", None)
    install = install_command(python, wanted, linux=seen.linux)
    if version is not None:
        # Another interpreter under the same path: only a venv can be made anew without touching the system's.
        return f"uv venv --clear --python {version} {environment} && {install}" if seen.venv else None
    if seen.python is None:
        return f"uv venv {environment} && {install}" if seen.absent else None
    return install


def install_command(python: str, wanted: dict[str, str], *, linux: bool = sys.platform.startswith("linux")) -> str:
    """The command that puts `wanted` (package → version condition) into the environment of `python`; on Linux mlx
    without an extra has no backend at all."""
    extra = "[cpu]" if linux else ""
    requirements = (shlex.quote(f"{name}{extra if name == 'mlx' else ''}{need}") for name, need in wanted.items())
    return f"uv pip install --python {quoted(python)} {' '.join(requirements)}"


def new_enough(version: str | None, minimum: tuple[int, ...]) -> bool:
    if version is None:
        return False
    numbers = []
    for part in version.split(".")[: len(minimum)]:
        digits = "".join(character for character in part if character.isdigit())
        numbers.append(int(digits or 0))
    return tuple(numbers) >= minimum


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


CHECK = Check(
    NAME,
    "python, mlx and mlx-lm: importable, new enough, the same",
    look,
    time_limit_s=_LIMIT_S,
    needs=(connectivity.NAME,),
)
