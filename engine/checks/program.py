"""program_present: when the job has its own `command`, its program and script exist on each node."""

from __future__ import annotations

from pathlib import PurePosixPath

from engine.checks import connectivity, sync
from engine.checks.check import Check, Findings
from engine.checks.context import CheckContext
from engine.checks.fixes import path_fix
from engine.cluster.probe_results import ProgramLocation
from engine.errors import InputError
from engine.models import CheckResult
from engine.protocol.launchers import started_program
from engine.security.identifiers import safe_repr

NAME = "program_present"
_LIMIT_S = 30.0


async def run(context: CheckContext) -> CheckResult:
    job = context.config.job
    command = job.command or ()
    if job.framework == "torch":
        command = tuple(started_program(command))
    for word in command:
        # As for every path from outside: it may not lead out of the workdir.
        if word.endswith(".py") and ".." in PurePosixPath(word).parts:
            raise InputError(f"the script {safe_repr(word)}", why="refused", todo="give a path without ..")
    answers = await context.on_all_nodes(
        lambda node: context.probe(
            node, "program", node.workdir, node.python, *command, result_type=ProgramLocation, timeout_s=_LIMIT_S
        )
    )
    found = Findings(NAME, context.config)
    for node, location in found.answered(answers):
        if location.fault is not None:
            fix = path_fix("mkdir -p", location.make) or path_fix("chmod +x", location.permit)
            found.fault(node, location.fault, fix)
        elif (why := _outside(context, location)) is not None:
            found.fault(node, why)
        else:
            found.evidence[node.name] = location.program or ""
    return found.verdict(" ".join(command))


def _outside(context: CheckContext, location: ProgramLocation) -> str | None:
    """Why a script may not be run from where it is; None when it may."""
    script, allowed = location.script, (*location.roots, *context.config.preflight.roots)
    if script is None or any(PurePosixPath(script).is_relative_to(root) for root in allowed):
        return None
    return f"{script} is outside of the home and the workdir: move it, or name its folder in [preflight] roots"


CHECK = Check(
    NAME,
    "the job's own command",
    run,
    time_limit_s=_LIMIT_S + 30,
    needs=(connectivity.NAME,),
    after=(sync.NAME,),
    not_applicable=lambda config: None if config.job.command else "the job is a training of ours, not a command",
)
