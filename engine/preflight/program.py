"""program_present: for a job with a `command` of its own, that program and its script can be found on each node."""

from __future__ import annotations

from pathlib import PurePosixPath

from engine.config.models import FlightConfig, NodeConfig
from engine.errors import FlightDeckError, InputError
from engine.models import CheckResult
from engine.preflight import connectivity, sync
from engine.preflight.answers import Program
from engine.preflight.check import Check, Findings
from engine.preflight.scene import Scene
from engine.security.identifiers import shown
from engine.transport.base import quoted

NAME = "program_present"
_LIMIT_S = 30.0


def _no_command(config: FlightConfig) -> str | None:
    return None if config.job.command else "the job is an mlx-lm training, not a command"


async def look(scene: Scene) -> CheckResult:
    command = scene.config.job.command or ()

    async def locate(node: NodeConfig) -> Program:
        return await scene.look(node, "program", node.workdir, node.python, *command, said=Program, timeout_s=_LIMIT_S)

    for word in command:
        # As for every path that is given: it is not followed out of where it begins.
        if word.endswith(".py") and ".." in PurePosixPath(word).parts:
            raise InputError(f"the script {shown(word)}", why="refused", todo="give a path without ..")
    answers = await scene.on_all(locate)
    found = Findings(NAME, scene.config)
    for node in scene.config.nodes:
        said = answers[node.name]
        if isinstance(said, FlightDeckError):
            found.fault(node, str(said))
        elif said.fault is not None:
            found.fault(node, said.fault, _fix(said))
        elif (why := _outside(scene, said)) is not None:
            found.fault(node, why)
        else:
            found.evidence[node.name] = said.program or ""
    return found.verdict(" ".join(command))


def _outside(scene: Scene, said: Program) -> str | None:
    """Why a script may not be run from where it lies; None when it may."""
    allowed = (*said.roots, *scene.config.preflight.roots)
    if said.script is None or any(PurePosixPath(said.script).is_relative_to(root) for root in allowed):
        return None
    return f"{said.script} lies outside of the home and the workdir: move it, or name its folder in [preflight] roots"


def _fix(said: Program) -> str | None:
    if said.make is not None:
        return f"mkdir -p {quoted(said.make)}"
    return f"chmod +x {quoted(said.permit)}" if said.permit is not None else None


CHECK = Check(
    NAME,
    "the job's own command",
    look,
    time_limit_s=_LIMIT_S + 30,
    needs=(connectivity.NAME,),
    after=(sync.NAME,),
    not_applicable=_no_command,
)
