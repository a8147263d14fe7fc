"""A node's Python interpreter: its version, and which packages of the job's framework it can import."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from engine.cluster.agent_client import AgentClient, InterpreterBroken, InterpreterMissing
from engine.cluster.probe_results import PackagesReport, TorchBuild
from engine.config.models import JobConfig
from engine.errors import LaunchError, NodeUnreachable
from engine.failures.explanation import explained
from engine.models import NoValue

HOME_ENVIRONMENT = PurePosixPath("~/.venv")
"""Where an environment is made for a python that belongs to the system."""
_READ_ONLY = 3
_OCCUPIED = f'command -v nvidia-smi; [ -e "$1" ] || exit 1; [ -w "$2" ] || exit {_READ_ONLY}'
IMPORT_LIMIT_S = 60.0
"""For mlx-lm, or PyTorch and all of the recipe's packages, from a cold disk; from a warm one it takes two to ten."""


@dataclass(frozen=True)
class Interpreter:
    """One node's python; a package without a version is not importable, or `unknown`, with the reason in `problem`."""

    python: str | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    """Name → version."""
    backends: tuple[str, ...] = ()
    """The distributed backends that this build of MLX or PyTorch has."""
    unknown: tuple[str, ...] = ()
    """Packages about which no answer came: neither importable nor missing."""
    problem: str | None = None
    absent: bool = False
    """There is no such interpreter, or it cannot be run."""
    beside: PurePosixPath | None = None
    """The environment beside which another one is made, since a new one may not be put into a folder that is there."""
    has_nvidia_smi: bool = False
    venv: bool = False
    linux: bool = sys.platform.startswith("linux")
    """The head's own system where the interpreter has not answered."""
    build: TorchBuild | None = None
    """Torch's, once that was imported."""
    builds: Mapping[str, str] = field(default_factory=dict)
    """Name → version, of the packages that make up MLX's build on Linux."""

    def describe(self) -> str:
        versions = {"python": self.python, **self.packages, **self.builds}
        seen = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        return "; ".join(filter(None, (seen, self.problem)))


async def probe_interpreter(agent: AgentClient, job: JobConfig) -> Interpreter:
    """Import mlx on a node (a tenth of a second), mlx-lm not; for a PyTorch job look for its packages."""
    try:
        if job.framework == "torch":
            return await _probe(agent, "torch", "find", job.kind.packages(job.words))
        return await _probe(agent, "mlx", "import", ("mlx",))
    except NodeUnreachable as error:
        return Interpreter(problem=str(error))


async def _probe(agent: AgentClient, name: str, how: str, packages: tuple[str, ...]) -> Interpreter:
    """The report of a probe of `packages`, or of the interpreter that cannot run it."""
    try:
        report = await agent.probe(name, how, *packages, result_type=PackagesReport, timeout_s=IMPORT_LIMIT_S)
        return as_interpreter(report, packages, agent.node.python)
    except LaunchError as error:
        missing = f"no such interpreter: {agent.node.python}" if isinstance(error, InterpreterMissing) else None
        problem = missing or ": ".join(filter(None, (error.what, error.why)))
        seen = Interpreter(problem=problem, absent=isinstance(error, InterpreterBroken))
        return await _asked_of_shell(agent, seen) if seen.absent else seen


def environment_of(python: str) -> PurePosixPath:
    """The environment of an interpreter; for one outside of a `bin`, or in that of a home, a place for one."""
    path = PurePosixPath(python)
    environment = path.parent.parent if path.parent.name == "bin" else path.parent / ".venv"
    return environment if environment.name not in ("", "~") else HOME_ENVIRONMENT


async def _asked_of_shell(agent: AgentClient, seen: Interpreter) -> Interpreter:
    """`seen`, without a python, with `beside` and `has_nvidia_smi`. Raises NodeUnreachable."""
    environment = environment_of(agent.node.python)
    ask = ["/bin/sh", "-c", _OCCUPIED, "sh", str(environment), str(environment.parent)]
    done = await agent.transport.run(ask, timeout_s=IMPORT_LIMIT_S)
    beside = environment if done.code == 0 else HOME_ENVIRONMENT if done.code == _READ_ONLY else None
    return replace(seen, beside=beside, has_nvidia_smi=b"nvidia-smi" in done.stdout)


async def probe_imports(agent: AgentClient, seen: Interpreter, job: JobConfig) -> Interpreter:
    """`seen`, and whether that interpreter can also import mlx-lm, or for a PyTorch job its packages: seconds of work
    where nothing proves it. For a command, mlx-lm is only looked for. Raises NodeUnreachable, LaunchError."""
    if seen.python is None:
        return seen
    if job.framework == "torch":
        return await _probe(agent, "torch", "import", job.kind.packages(job.words))
    # A job with a command of its own may never import it.
    how = "import" if job.kind.reports else "find"
    modules = {name.replace("-", "_"): name for name in job.kind.packages(job.words) if name != "mlx"}
    probed = agent.probe("mlx_lm", how, *modules, result_type=PackagesReport, timeout_s=IMPORT_LIMIT_S)
    return with_modules(seen, await probed, modules)


def with_modules(seen: Interpreter, report: PackagesReport | NoValue, modules: Mapping[str, str]) -> Interpreter:
    """`modules`: those that were asked for, each with its package's name."""
    if isinstance(report, NoValue):
        names = tuple(modules.values())
        problems = [f"it is not known whether {' and '.join(names)} can be imported: {report}"]
        seen = replace(seen, unknown=names)
    else:
        missing = {name: report.errors.get(module) for module, name in modules.items() if module not in report.versions}
        problems = [f"{name} cannot be imported: {explained(error or 'not known')}" for name, error in missing.items()]
        versions = {name: report.versions[module] for module, name in modules.items() if name not in missing}
        seen = replace(seen, packages={**seen.packages, **versions})
    return replace(seen, problem="; ".join(filter(None, (seen.problem, *problems))) or None)


def as_interpreter(report: PackagesReport | NoValue, packages: Iterable[str], python: str) -> Interpreter:
    """`packages`: those that were asked for."""
    if isinstance(report, NoValue):
        return Interpreter(problem=f"{python}: {report}")
    seen = Interpreter(
        report.python,
        backends=tuple(report.backends),
        venv=report.venv,
        linux=report.linux,
        build=report.build,
        builds=report.builds,
    )
    return with_modules(seen, report, {name: name for name in packages})
