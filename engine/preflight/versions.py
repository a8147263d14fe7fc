"""versions_match: python, mlx and mlx-lm can be imported on every node, are new enough, and are the same everywhere.

A different mlx on two nodes is two different all_sums; the launcher would not say so.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import PurePosixPath

from engine.config.models import FlightConfig
from engine.models import CheckResult, CheckStatus
from engine.preflight import connectivity
from engine.preflight.check import Check, ranks_of, verdict
from engine.preflight.scene import Scene
from engine.transport.base import Transport, quoted

NAME = "versions_match"
MLX_MINIMUM = (0, 32, 1)
MLX_LM_MINIMUM = (0, 32, 0)
_IMPORT_LIMIT_S = 60.0

_ASK = """
import json, platform, sys
said = {"python": platform.python_version(), "linux": sys.platform.startswith("linux")}
said["venv"] = sys.prefix != sys.base_prefix
try:
    import mlx.core as mx
    said["mlx"] = mx.__version__
    said["ring"] = bool(mx.distributed.is_available("ring"))
except Exception as error:
    said["mlx_error"] = f"{type(error).__name__}: {error}"
try:
    import mlx_lm
    said["mlx_lm"] = mlx_lm.__version__
except Exception as error:
    said["mlx_lm_error"] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""


@dataclass(frozen=True)
class Interpreter:
    """What one node's python says of itself; None is "not importable", with the reason in `problem`."""

    python: str | None = None
    mlx: str | None = None
    mlx_lm: str | None = None
    ring: bool = False
    problem: str | None = None
    absent: bool = False
    """There is no such interpreter."""
    venv: bool = False
    linux: bool = sys.platform.startswith("linux")
    """The head's own system stands for that of an interpreter which did not say."""

    def words(self) -> str:
        seen = ", ".join(
            f"{name} {version}"
            for name, version in (("python", self.python), ("mlx", self.mlx), ("mlx-lm", self.mlx_lm))
            if version
        )
        return "; ".join(part for part in (seen, self.problem) if part)


async def look(scene: Scene) -> CheckResult:
    # Several ranks of a host may share an interpreter: it is asked once.
    asked = {(node.ssh, node.python): node for node in scene.config.nodes}
    answers = await asyncio.gather(*(ask(scene.transport(node), node.python) for node in asked.values()))
    found = dict(zip(asked, answers, strict=True))
    return judge(scene.config, {node.name: found[node.ssh, node.python] for node in scene.config.nodes})


async def ask(transport: Transport, python: str) -> Interpreter:
    """Import mlx and mlx_lm with `python` on a node and read their versions."""
    try:
        finished = await transport.run([python, "-c", _ASK], timeout_s=_IMPORT_LIMIT_S)
    except FileNotFoundError:
        return Interpreter(problem=f"no such interpreter: {python}", absent=True)
    except OSError as error:
        return Interpreter(problem=f"{python} cannot be run: {error.strerror}")
    if finished.code is None:
        return Interpreter(problem=f"{python} did not answer in {_IMPORT_LIMIT_S:.0f} s")
    return parse(finished.stdout.decode(errors="replace"), finished.code, finished.last_words)


def parse(stdout: str, code: int, last_line: str) -> Interpreter:
    """From what the interpreter printed to what it is. Other lines around ours are passed over."""
    for line in reversed(stdout.splitlines()):
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if isinstance(said, dict) and "python" in said:
            problems = [
                f"{label} cannot be imported: {said[key]}"
                for key, label in (("mlx_error", "mlx"), ("mlx_lm_error", "mlx-lm"))
                if key in said
            ]
            return Interpreter(
                said.get("python"),
                said.get("mlx"),
                said.get("mlx_lm"),
                bool(said.get("ring")),
                "; ".join(problems) or None,
                venv=bool(said.get("venv")),
                linux=bool(said.get("linux")),
            )
    return Interpreter(problem=f"the interpreter ended with {code}: {last_line or 'it said nothing'}")


def judge(config: FlightConfig, found: dict[str, Interpreter]) -> CheckResult:
    """The verdict over all nodes; rank 0's versions are what the others are compared with."""
    first = found[config.nodes[0].name]
    faults: dict[str, str] = {}
    fixes: dict[str, str] = {}
    blames: tuple[int, str] | None = None
    for rank, node in ranks_of(config):
        fault, wanted = _fault(found[node.name], first)
        if fault is None:
            continue
        faults[node.name] = fault
        blames = blames or (rank, node.name)
        fix = _fix(node.python, found[node.name], wanted)
        if fix is not None:
            fixes[node.name] = fix
    evidence = {node.name: found[node.name].words() for node in config.nodes}
    if not faults:
        return verdict(NAME, CheckStatus.PASS, f"the same on all nodes: {first.words()}", evidence=evidence)
    summary = "; ".join(f"{node}: {fault}" for node, fault in faults.items())
    return verdict(NAME, CheckStatus.FAIL, summary, evidence=evidence, fixes=fixes, blames=blames)


def _fault(seen: Interpreter, first: Interpreter) -> tuple[str | None, dict[str, str]]:
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
    if not seen.ring:
        return "this build of mlx has no ring backend", {"mlx": mlx}
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
    time_limit_s=_IMPORT_LIMIT_S + 5,
    needs=(connectivity.NAME,),
)
