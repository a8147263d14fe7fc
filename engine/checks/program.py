"""program_present: when the job has its own `command`, its program and script exist on each node."""

from __future__ import annotations

import json
from pathlib import PurePosixPath

from engine.checks import connectivity, sync
from engine.checks.check import Check, Findings
from engine.checks.context import CheckContext
from engine.checks.fixes import path_fix
from engine.checks.interpreter import Interpreter
from engine.checks.versions import install_fix
from engine.cluster.probe_results import ProgramLocation
from engine.errors import InputError
from engine.models import CheckResult
from engine.protocol.launchers import nested_in_command, started_program
from engine.security.identifiers import safe_repr

NAME = "program_present"
_LIMIT_S = 30.0
_PACKAGES = {
    **{f"mlx_lm{command}": "mlx-lm" for command in ("", ".lora", ".fuse", ".convert")},
    "tune": "torchtune",
    "fabric": "lightning",
    "llamafactory-cli": "llamafactory",
    **{name: name for name in ("accelerate", "axolotl", "deepspeed", "trl")},
}
"""Console scripts of trainings -> the package that has them."""


async def run(context: CheckContext) -> CheckResult:
    job = context.config.job
    command = job.words
    if job.kind.framework.takes_launchers:
        command = tuple(started_program(command))
    for word in command:
        # As for every path from outside: it may not lead out of the workdir.
        if word.endswith(".py") and ".." in PurePosixPath(word).parts:
            raise InputError(f"the script {safe_repr(word)}", why="refused", todo="give a path without ..")
    arguments = json.dumps(context.config.preflight.roots), *command
    answers = await context.on_all_nodes(
        lambda node: context.probe(
            node, "program", node.workdir, node.python, *arguments, result_type=ProgramLocation, timeout_s=_LIMIT_S
        )
    )
    findings = Findings(NAME, context.config)
    for node, location in findings.answered(answers):
        if location.fault is not None:
            fix = path_fix("mkdir -p", location.make) or path_fix("chmod +x", location.permit)
            if fix is None and (package := _PACKAGES.get(location.absent or "")) is not None:
                fix = install_fix(node.python, Interpreter(), {package: ""})
            findings.fault(node, location.fault, fix)
        else:
            findings.evidence[node.name] = location.program or ""
        for lock in location.locks if job.framework == "torch" else ():
            why = "a build of a C++ extension that was killed has left this lock, and torch waits for it for ever"
            findings.warn(node, f"{lock}: {why}", path_fix("rm", lock))
        if (within := location.launcher) is not None and len(context.config.nodes) > 1:
            (findings.fault if within[1] else findings.warn)(node, within[0])
    nested = nested_in_command(job.words, job.framework)
    if nested is not None and len(context.config.nodes) > 1:
        (findings.overall.fault if nested.certain else findings.overall.warn)(str(nested))
    return findings.verdict(" ".join(job.redactor().words(command)))


CHECK = Check(
    NAME, "the job's own command", run, time_limit_s=_LIMIT_S + 30, needs=(connectivity.NAME,), after=(sync.NAME,),
    label="command", not_applicable=lambda config: None if config.job.words else "the job has no command of its own",
)  # fmt: skip
