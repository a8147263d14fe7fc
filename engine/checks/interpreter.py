"""A node's Python interpreter: its version, and whether it can import mlx and mlx-lm."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from engine.cluster.agent_client import AgentClient, InterpreterMissing
from engine.cluster.probe_results import MlxLmReport, MlxReport
from engine.errors import LaunchError
from engine.models import NoValue

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
    """There is no such interpreter."""
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
    except InterpreterMissing:
        return Interpreter(problem=f"no such interpreter: {agent.node.python}", absent=True)
    except LaunchError as error:
        return Interpreter(problem=f"{error.what}: {error.why}" if error.why else error.what)
    return as_interpreter(report, agent.node.python)


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
