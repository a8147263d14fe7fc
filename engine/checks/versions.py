"""versions_match: python, mlx and mlx-lm can be imported on every node, are recent enough, and are the same
everywhere.

Ranks with different mlx versions may disagree on what an all_sum is; mlx.launch does not check this.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
from pathlib import Path, PurePosixPath

from engine.checks import connectivity
from engine.checks.check import Check, Findings
from engine.checks.context import CheckContext, once
from engine.checks.fixes import Fix, posix
from engine.checks.interpreter import HOME_ENVIRONMENT, IMPORT_LIMIT_S, Interpreter, environment_of, probe_mlx_lm
from engine.cluster.transport.base import quoted
from engine.config.models import Config, NodeConfig
from engine.errors import LaunchError
from engine.models import CheckResult

NAME = "versions_match"
MLX_MINIMUM = (0, 32, 1)
MLX_LM_MINIMUM = (0, 32, 0)
_MLX_NAMES = {"jaccl-ring": "jaccl"}
"""Backend of a network plan → MLX's name for it, where that differs."""
_LIMIT_S = 2 * IMPORT_LIMIT_S + 5


async def run(context: CheckContext) -> CheckResult:
    interpreters, backend = await asyncio.gather(node_versions(context), planned_backend(context))
    return evaluate(context.config, interpreters, backend)


@once
async def node_versions(context: CheckContext) -> dict[str, Interpreter]:
    """Node name → its interpreter, with mlx-lm."""
    found = await context.interpreters()
    # A job with a command of its own may never import it.
    imported = context.config.job.command is None
    return await context.of_interpreters(
        lambda node: probe_mlx_lm(context.agent(node), found[node.name], imported=imported)
    )


async def planned_backend(context: CheckContext) -> str:
    """The network plan's backend; "ring" where there is none, which hostfile_valid reports."""
    try:
        return (await context.network_plan()).backend
    except LaunchError:
        return "ring"


def mlx_name(backend: str) -> str:
    """MLX's name for the backend of a network plan."""
    return _MLX_NAMES.get(backend, backend)


def evaluate(config: Config, interpreters: dict[str, Interpreter], backend: str = "ring") -> CheckResult:
    """Rank 0's versions are what the others are compared with; another patch version of Python only warns."""
    first = interpreters[config.nodes[0].name]
    found = Findings(NAME, config)
    for node in config.nodes:
        interpreter = interpreters[node.name]
        found.evidence[node.name] = interpreter.describe()
        if (problem := _problem(interpreter, first, backend)) is not None:
            fault, wanted = problem
            advice, fix = _fix(node, interpreter, first, wanted)
            found.fault(node, f"{fault}{advice}", fix)
        elif first.python not in (None, interpreter.python):
            found.warn(node, f"python {interpreter.python}, rank 0 has {first.python}")
    return found.verdict(f"the same on all nodes: {first.describe()}")


def _problem(seen: Interpreter, first: Interpreter, backend: str) -> tuple[str, dict[str, str]] | None:
    """A message, and the packages that would fix it as name → requirement; None when there is no problem."""
    mlx = f"=={first.mlx}" if new_enough(first.mlx, MLX_MINIMUM) else f">={dotted(MLX_MINIMUM)}"
    mlx_lm = f"=={first.mlx_lm}" if new_enough(first.mlx_lm, MLX_LM_MINIMUM) else f">={dotted(MLX_LM_MINIMUM)}"
    both = {"mlx": mlx, "mlx-lm": mlx_lm}
    needed = mlx_name(backend)
    problem: tuple[str, dict[str, str]] | None = None
    if seen.python is None:
        problem = seen.problem or "the interpreter did not answer", both
    elif first.python is not None and _minor(first.python) != _minor(seen.python):
        problem = f"python {seen.python}, rank 0 has {first.python}", both
    elif seen.problem:
        missing = {"mlx": seen.mlx, "mlx-lm": seen.mlx_lm}
        problem = seen.problem, {name: both[name] for name, version in missing.items() if version is None}
    elif not new_enough(seen.mlx, MLX_MINIMUM):
        problem = f"mlx {seen.mlx} is older than {dotted(MLX_MINIMUM)}", {"mlx": mlx}
    elif not new_enough(seen.mlx_lm, MLX_LM_MINIMUM):
        problem = f"mlx-lm {seen.mlx_lm} is older than {dotted(MLX_LM_MINIMUM)}", {"mlx-lm": mlx_lm}
    elif needed not in seen.backends:
        problem = f"this build of mlx has no {needed} backend", {"mlx": mlx}
    elif first.mlx not in (None, seen.mlx):
        problem = f"mlx {seen.mlx}, rank 0 has {first.mlx}", {"mlx": mlx}
    elif first.mlx_lm not in (None, seen.mlx_lm):
        problem = f"mlx-lm {seen.mlx_lm}, rank 0 has {first.mlx_lm}", {"mlx-lm": mlx_lm}
    return problem


def _fix(node: NodeConfig, seen: Interpreter, first: Interpreter, wanted: dict[str, str]) -> tuple[str, Fix | None]:
    """Advice for the message, and a command to be pasted on the node.

    Packages are installed into the environment that is there, but not into the one that Flight Deck runs from. Another
    interpreter, and what that one lacks, is put into a new environment, never into one that exists: `mkdir` refuses.
    """
    if seen.python is None and not seen.absent:
        return "", None
    minor = _minor(first.python or "")
    if node.local and Path(environment_of(node.python)).expanduser() == Path(sys.prefix):
        kept = {"mlx": seen.mlx, "mlx-lm": seen.mlx_lm}
        wanted = {name: f"=={version}" for name, version in kept.items() if version is not None} | wanted
    elif seen.python is not None and (first.python is None or _minor(seen.python) == minor):
        return "", install_fix(node.python, seen, wanted)
    path, environment = PurePosixPath(node.python), environment_of(node.python)
    beside = seen.beside if seen.python is None else environment if seen.venv else HOME_ENVIRONMENT
    if beside is not None:
        environment = beside.with_name(f"{beside.name}-{minor or 'new'}")
    python, advice = node.python, ""
    if path not in (environment / "bin" / name for name in ("python", "python3", f"python{minor}")):
        python = f"{environment}/bin/python"
        advice = f': the fix makes {environment} and changes nothing else; then set python = "{python}" in its [[node]]'
    make = f"mkdir -p {quoted(environment.parent)} && mkdir {quoted(environment)}"
    version = f"--python {minor} " if minor else ""
    install = install_command(python, wanted, linux=seen.linux)
    fill = f"uv venv {version}{quoted(environment)} && {install} || {{ rm -r {quoted(environment)}; false; }}"
    return advice, Fix(f"{make} && {posix(fill)}", f"makes {environment}, and changes nothing else; rm -r removes it")


def install_fix(python: str, seen: Interpreter, wanted: dict[str, str]) -> Fix:
    """`install_command`, and as its effect the commands back to what was there."""
    known = {"mlx": seen.mlx, "mlx-lm": seen.mlx_lm}
    before = {name: f"=={known[name]}" for name in wanted if known[name] is not None}
    added = " ".join(name for name in wanted if name not in before)
    back = [install_command(python, before, linux=seen.linux)] if before else []
    back += [f"uv pip uninstall --python {quoted(python)} {added}"] if added else []
    effect = f"changes packages in the environment of {python}; `{' && '.join(back)}` takes back all but dependencies"
    return Fix(install_command(python, wanted, linux=seen.linux), effect)


def _minor(version: str) -> str:
    """For example "3.11"; "" where that is not how it begins. Nothing else of a node's text enters a command."""
    found = re.match(r"[0-9]{1,3}\.[0-9]{1,3}(?![0-9])", version)
    return found[0] if found else ""


def install_command(python: str, wanted: dict[str, str], *, linux: bool = sys.platform.startswith("linux")) -> str:
    """The command that puts `wanted` (package → version condition) into the environment of `python`; on Linux mlx
    without an extra has no backend at all."""
    extra = "[cpu]" if linux else ""
    requirements = (shlex.quote(f"{name}{extra if name == 'mlx' else ''}{need}") for name, need in wanted.items())
    return f"uv pip install --python {quoted(python)} {' '.join(requirements)}"


def new_enough(version: str | None, minimum: tuple[int, ...]) -> bool:
    if version is None:
        return False
    return tuple(map(int, re.findall(r"\d+", version)))[: len(minimum)] >= minimum


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


CHECK = Check(
    NAME,
    "python, mlx and mlx-lm: importable, new enough, the same",
    run,
    time_limit_s=_LIMIT_S,
    needs=(connectivity.NAME,),
)
