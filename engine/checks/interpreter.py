"""A node's Python interpreter: its version, and whether it can import mlx and mlx-lm."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from engine.cluster.agent_client import AgentClient, InterpreterBroken, InterpreterMissing
from engine.cluster.probe_results import MlxLmReport, MlxReport
from engine.errors import LaunchError
from engine.models import NoValue

HOME_ENVIRONMENT = PurePosixPath("~/.venv")
"""Where an environment is made for a python that belongs to the system."""
_READ_ONLY = 3
_OCCUPIED = f'[ -e "$1" ] || exit 1; [ -w "$2" ] || exit {_READ_ONLY}'
IMPORT_LIMIT_S = 60.0
"""For mlx-lm from a cold disk; from a warm one it takes one or two."""


@dataclass(frozen=True)
class Interpreter:
    """One node's python; a version of None is "not importable", with the reason in `problem`."""

    python: str | None = None
    mlx: str | None = None
    mlx_lm: str | None = None
    backends: tuple[str, ...] = ()
    """The distributed backends that this build of MLX has."""
    problem: str | None = None
    absent: bool = False
    """There is no such interpreter, or it cannot be run."""
    beside: PurePosixPath | None = None
    """The environment beside which another one is made, since a new one may not be put into a folder that is there."""
    venv: bool = False
    linux: bool = sys.platform.startswith("linux")
    """The head's own system where the interpreter has not answered."""

    def describe(self) -> str:
        versions = {"python": self.python, "mlx": self.mlx, "mlx-lm": self.mlx_lm}
        seen = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        return "; ".join(filter(None, (seen, self.problem)))


async def probe_interpreter(agent: AgentClient) -> Interpreter:
    """Import mlx on a node (a tenth of a second), mlx-lm not. Raises NodeUnreachable."""
    try:
        report = await agent.probe("mlx", result_type=MlxReport, timeout_s=IMPORT_LIMIT_S)
    except LaunchError as error:
        problem = f"{error.what}: {error.why}" if error.why else error.what
        if isinstance(error, InterpreterMissing):
            problem = f"no such interpreter: {agent.node.python}"
        absent = isinstance(error, InterpreterBroken)
        return Interpreter(problem=problem, absent=absent, beside=await _occupied(agent) if absent else None)
    return as_interpreter(report, agent.node.python)


def environment_of(python: str) -> PurePosixPath:
    """The environment of an interpreter; for one outside of a `bin`, or in that of a home, a place for one."""
    path = PurePosixPath(python)
    environment = path.parent.parent if path.parent.name == "bin" else path.parent / ".venv"
    return environment if environment.name not in ("", "~") else HOME_ENVIRONMENT


async def _occupied(agent: AgentClient) -> PurePosixPath | None:
    """For `Interpreter.beside` without a python: asked by the node's shell. Raises NodeUnreachable."""
    environment = environment_of(agent.node.python)
    ask = ["/bin/sh", "-c", _OCCUPIED, "sh", str(environment), str(environment.parent)]
    code = (await agent.transport.run(ask, timeout_s=IMPORT_LIMIT_S)).code
    return environment if code == 0 else HOME_ENVIRONMENT if code == _READ_ONLY else None


async def probe_mlx_lm(agent: AgentClient, seen: Interpreter, *, imported: bool) -> Interpreter:
    """`seen`, and whether that interpreter can also import mlx-lm: seconds of work where nothing proves it; not
    `imported`, it is only looked for. Raises NodeUnreachable, LaunchError."""
    if seen.python is None:
        return seen
    how = "import" if imported else "find"
    return with_mlx_lm(seen, await agent.probe("mlx_lm", how, result_type=MlxLmReport, timeout_s=IMPORT_LIMIT_S))


def as_interpreter(report: MlxReport | NoValue, python: str) -> Interpreter:
    if isinstance(report, NoValue):
        return Interpreter(problem=f"{python}: {report}")
    return Interpreter(
        report.python,
        report.mlx,
        backends=tuple(report.backends),
        problem=f"mlx cannot be imported: {report.mlx_error}" if report.mlx_error is not None else None,
        venv=report.venv,
        linux=report.linux,
    )


def with_mlx_lm(seen: Interpreter, report: MlxLmReport | NoValue) -> Interpreter:
    if isinstance(report, MlxLmReport) and report.mlx_lm_error is None:
        return replace(seen, mlx_lm=report.mlx_lm)
    why = report.mlx_lm_error if isinstance(report, MlxLmReport) else report
    return replace(seen, problem="; ".join(filter(None, (seen.problem, f"mlx-lm cannot be imported: {why}"))))
