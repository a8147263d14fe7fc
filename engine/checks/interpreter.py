"""A node's Python interpreter: its version, and whether it can import mlx and mlx-lm."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from engine.cluster.agent_client import AgentClient, InterpreterMissing
from engine.cluster.probe_results import MlxLmReport, MlxReport
from engine.errors import LaunchError
from engine.models import Failed, Late, NoValue

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
        seen = ", ".join(
            f"{name} {version}"
            for name, version in (("python", self.python), ("mlx", self.mlx), ("mlx-lm", self.mlx_lm))
            if version
        )
        return "; ".join(part for part in (seen, self.problem) if part)


async def probe_interpreter(agent: AgentClient) -> Interpreter:
    """Import mlx on a node (a tenth of a second), mlx-lm not. Raises NodeUnreachable."""
    try:
        report = await agent.probe("mlx", result_type=MlxReport, timeout_s=IMPORT_LIMIT_S)
    except InterpreterMissing:
        return Interpreter(problem=f"no such interpreter: {agent.node.python}", absent=True)
    except LaunchError as error:
        return Interpreter(problem=f"{error.what}: {error.why}" if error.why else error.what)
    return as_interpreter(report, agent.node.python)


async def probe_mlx_lm(agent: AgentClient, seen: Interpreter, *, imported: bool = True) -> Interpreter:
    """`seen`, and whether that interpreter can also import mlx-lm: seconds of work where nothing proves it; not
    `imported`, it is only looked for. Raises NodeUnreachable, LaunchError."""
    if seen.python is None:
        return seen
    how = "import" if imported else "find"
    return with_mlx_lm(seen, await agent.probe("mlx_lm", how, result_type=MlxLmReport, timeout_s=IMPORT_LIMIT_S))


def as_interpreter(report: MlxReport | NoValue, python: str) -> Interpreter:
    if isinstance(report, Late):
        return Interpreter(problem=f"{python} did not answer in {report.after_s:.0f} s")
    if isinstance(report, NoValue):
        return Interpreter(problem=f"the interpreter {_how_it_ended(report)}")
    return Interpreter(
        report.python,
        report.mlx,
        backends=tuple(report.backends),
        problem=f"mlx cannot be imported: {report.mlx_error}" if report.mlx_error is not None else None,
        venv=report.venv,
        linux=report.linux,
    )


def with_mlx_lm(seen: Interpreter, report: MlxLmReport | NoValue) -> Interpreter:
    if isinstance(report, Late):
        problem = f"not within {report.after_s:.0f} s"
    elif isinstance(report, NoValue):
        problem = f"python {_how_it_ended(report)}"
    elif report.mlx_lm_error is not None:
        problem = report.mlx_lm_error
    else:
        return replace(seen, mlx_lm=report.mlx_lm)
    found = f"mlx-lm cannot be imported: {problem}"
    return replace(seen, problem="; ".join(part for part in (seen.problem, found) if part))


def _how_it_ended(outcome: NoValue) -> str:
    code, output = (outcome.exit_code, outcome.stderr) if isinstance(outcome, Failed) else (0, "")
    return f"ended with {code}: {output or 'no output'}"
