"""versions_match: python, mlx and mlx-lm can be imported on every node, are new enough, and are the same everywhere.

A different mlx on two nodes is two different all_sums; the launcher would not say so.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from engine.config.models import FlightConfig
from engine.models import CheckResult, CheckStatus
from engine.preflight.check import Check, ranks_of, verdict
from engine.transport.local import LocalTransport

NAME = "versions_match"
MLX_MINIMUM = (0, 32, 1)
MLX_LM_MINIMUM = (0, 32, 0)
_IMPORT_LIMIT_S = 60.0

_ASK = """
import json, platform
said = {"python": platform.python_version()}
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

    def words(self) -> str:
        seen = ", ".join(
            f"{name} {version}"
            for name, version in (("python", self.python), ("mlx", self.mlx), ("mlx-lm", self.mlx_lm))
            if version
        )
        return "; ".join(part for part in (seen, self.problem) if part)


async def look(config: FlightConfig) -> CheckResult:
    paths = list(dict.fromkeys(node.python for node in config.nodes))
    asked = await asyncio.gather(*(ask(path) for path in paths))
    found = dict(zip(paths, asked, strict=True))
    return judge(config, {node.name: found[node.python] for node in config.nodes})


async def ask(python: str) -> Interpreter:
    """Import mlx and mlx_lm with `python` and read their versions."""
    if not Path(python).exists():
        return Interpreter(problem=f"no such interpreter: {python}")
    try:
        finished = await LocalTransport().run([python, "-c", _ASK], timeout_s=_IMPORT_LIMIT_S)
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
    environment = Path(python).parent.parent
    version = wanted.pop("python", None)
    install = install_command(python, wanted)
    if version is not None:
        # Another interpreter under the same path: only a venv can be made anew without touching the system's.
        if not (environment / "pyvenv.cfg").exists():
            return None
        return f"uv venv --clear --python {version} {shlex.quote(str(environment))} && {install}"
    if seen.python is None:
        if Path(python).exists():
            return None
        return f"uv venv {shlex.quote(str(environment))} && {install}"
    return install


def install_command(python: str, wanted: dict[str, str]) -> str:
    """The command that puts `wanted` (package → version condition) into the environment of `python`."""
    return f"uv pip install --python {shlex.quote(python)} {_requirements(wanted)}"


def _requirements(wanted: dict[str, str]) -> str:
    """Quoted for the shell; on Linux mlx without an extra has no backend at all."""
    # The head's system stands for the node's: in this release every node is this machine.
    extra = "[cpu]" if sys.platform.startswith("linux") else ""
    return " ".join(shlex.quote(f"{name}{extra if name == 'mlx' else ''}{need}") for name, need in wanted.items())


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


CHECK = Check(NAME, "python, mlx and mlx-lm: importable, new enough, the same", look, time_limit_s=_IMPORT_LIMIT_S + 5)
