"""program_present: for a job with a `command` of its own, that program and its script can be found on each node."""

from __future__ import annotations

from typing import Any

from engine.config.models import FlightConfig, NodeConfig
from engine.errors import FlightDeckError
from engine.models import CheckResult, CheckStatus
from engine.preflight import connectivity
from engine.preflight.check import Check, ranks_of, verdict
from engine.preflight.scene import Scene
from engine.security.sanitise import plain

NAME = "program_present"
_LIMIT_S = 30.0


def _no_command(config: FlightConfig) -> str | None:
    return None if config.job.command else "the job is an mlx-lm training, not a command"


async def look(scene: Scene) -> CheckResult:
    command = scene.config.job.command or ()

    async def locate(node: NodeConfig) -> dict[str, Any]:
        return await scene.look(node, "program", node.workdir, node.python, *command, timeout_s=_LIMIT_S)

    found = await scene.on_all(locate)
    faults: dict[str, str] = {}
    fixes: dict[str, str] = {}
    evidence: dict[str, str] = {}
    blames: tuple[int, str] | None = None
    for rank, node in ranks_of(scene.config):
        said = found[node.name]
        fault = str(said) if isinstance(said, FlightDeckError) else said["fault"]
        if fault:
            faults[node.name] = evidence[node.name] = plain(fault)
            blames = blames or (rank, node.name)
            if not isinstance(said, FlightDeckError) and said["fix"]:
                fixes[node.name] = plain(said["fix"])
        elif not isinstance(said, FlightDeckError):
            evidence[node.name] = plain(said["program"])
    if faults:
        summary = "; ".join(dict.fromkeys(faults.values()))
        return verdict(NAME, CheckStatus.FAIL, summary, evidence=evidence, fixes=fixes, blames=blames)
    return verdict(NAME, CheckStatus.PASS, " ".join(command), evidence=evidence)


CHECK = Check(
    NAME,
    "the job's own command",
    look,
    time_limit_s=_LIMIT_S + 30,
    needs=(connectivity.NAME,),
    not_applicable=_no_command,
)
