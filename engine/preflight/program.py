"""program_present: for a job with a `command` of its own, that program and its script can be found on each node."""

from __future__ import annotations

from engine.config.models import FlightConfig, NodeConfig
from engine.errors import FlightDeckError
from engine.models import CheckResult
from engine.preflight import connectivity, sync
from engine.preflight.answers import Program
from engine.preflight.check import Check, Findings
from engine.preflight.scene import Scene
from engine.transport.base import quoted

NAME = "program_present"
_LIMIT_S = 30.0


def _no_command(config: FlightConfig) -> str | None:
    return None if config.job.command else "the job is an mlx-lm training, not a command"


async def look(scene: Scene) -> CheckResult:
    command = scene.config.job.command or ()

    async def locate(node: NodeConfig) -> Program:
        return await scene.look(node, "program", node.workdir, node.python, *command, said=Program, timeout_s=_LIMIT_S)

    answers = await scene.on_all(locate)
    found = Findings(NAME, scene.config)
    for node in scene.config.nodes:
        said = answers[node.name]
        if isinstance(said, FlightDeckError):
            found.fault(node, str(said))
        elif said.fault is not None:
            found.fault(node, said.fault, _fix(said))
        else:
            found.evidence[node.name] = said.program or ""
    return found.verdict(" ".join(command))


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
