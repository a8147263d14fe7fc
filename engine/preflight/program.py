"""program_present: for a job with a `command` of its own, that program and its script can be found on each node."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

from engine.config.models import FlightConfig, NodeConfig
from engine.models import CheckResult, CheckStatus
from engine.preflight.check import Check, ranks_of, verdict
from engine.preflight.model import near

NAME = "program_present"
_PYTHON_NAMES = ("python", "python3")


def _no_command(config: FlightConfig) -> str | None:
    return None if config.job.command else "the job is an mlx-lm training, not a command"


async def look(config: FlightConfig) -> CheckResult:
    command = config.job.command or ()
    faults: dict[str, str] = {}
    fixes: dict[str, str] = {}
    evidence: dict[str, str] = {}
    blames: tuple[int, str] | None = None
    for rank, node in ranks_of(config):
        program, fault, fix = locate(command, node)
        evidence[node.name] = fault or program
        if fault:
            faults[node.name] = fault
            blames = blames or (rank, node.name)
        if fix:
            fixes[node.name] = fix
    if faults:
        summary = "; ".join(dict.fromkeys(faults.values()))
        return verdict(NAME, CheckStatus.FAIL, summary, evidence=evidence, fixes=fixes, blames=blames)
    return verdict(NAME, CheckStatus.PASS, " ".join(command), evidence=evidence)


def locate(command: tuple[str, ...], node: NodeConfig) -> tuple[str, str | None, str | None]:
    """Where the command's program lies on `node`, what is wrong with it or its script, and a fix."""
    workdir = Path(node.workdir)
    if not workdir.is_dir():
        return "", f"workdir {workdir} is not there{near(workdir)}", f"mkdir -p {_quoted(workdir)}"
    # The keeper's own words for what differs from node to node.
    here = {"{workdir}": node.workdir, "{python}": node.python}
    command = tuple(here.get(word, word.replace("{workdir}", node.workdir)) for word in command)
    first = command[0]
    if first in _PYTHON_NAMES:
        program = Path(node.python)
    elif os.sep in first:
        program = workdir / Path(first).expanduser()
    else:
        program = Path(shutil.which(first) or "")
        if not program.name:
            return "", f"no program {first} on PATH", None
    if not program.is_file():
        return "", f"{program} is not there{near(program)}", None
    if not os.access(program, os.X_OK):
        return "", f"{program} may not be executed", f"chmod +x {_quoted(program)}"
    if first in _PYTHON_NAMES or program.name.startswith("python"):
        script = next((word for word in command[1:] if not word.startswith("-")), None)
        if script and script.endswith(".py"):
            path = workdir / Path(script).expanduser()
            if not path.is_file():
                return "", f"{path} is not there{near(path)}", None
            return f"{program} {path}", None, None
    return str(program), None, None


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


CHECK = Check(NAME, "the job's own command", look, time_limit_s=10, not_applicable=_no_command)
