"""start.sh: the one program that starts every rank of a host. In an attempt it becomes that rank's keeper. mlx.launch
starts it, or we do, over our own connections and with the environment that mlx.launch would have given it."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from engine.cluster.agent_client import AgentClient
from engine.cluster.staging import gather_all
from engine.cluster.transport.base import Completed
from engine.cluster.transport.fleet import Fleet
from engine.config.models import NodeConfig
from engine.errors import FlightDeckError
from engine.launch.rank_environment import NEEDED_FILE
from engine.launch.ssh_shim import KEPT_TMPDIR_ENV, NODE_ROOT_ENV
from engine.protocol.attempt import AttemptSpec, NodeFiles
from engine.protocol.exit_codes import ShellExit
from engine.security.sanitise import last_line, plain

START_LIMIT_S = 45.0
"""Until a keeper has started its program; below the supervisor's own patience with ranks that do not come."""
_LOG_BYTES = 65_536


def start_script(
    spec: AttemptSpec,
    files: NodeFiles,
    bundle: PurePath,
    *,
    ranks: Collection[int] | None = None,
    detached: Collection[int] = (),
    environment: Mapping[str, str | None] | None = None,
    variables: Mapping[int, Mapping[str, str]] = {},
) -> str:
    """The script's text, for `ranks` of the attempt, by default all of them. `bundle` is the folder of the node bundle.
    The keepers of the `detached` ranks detach from the script as soon as their rank runs. `variables`: by rank."""
    programs = {}
    for rank in spec.ranks:
        if ranks is None or rank.rank in ranks:
            options = ["--detach"] if rank.rank in detached else []
            keeper = [rank.python, "-m", "engine.node.keeper", "--spec", str(files.spec), *options]
            keeper_log = shlex.quote(str(files.keeper_log(rank.rank)))
            programs[rank.rank] = RankProgram(keeper, f">/dev/null 2>>{keeper_log}", variables.get(rank.rank, {}))
    return ranks_script(programs, bundle, backend=spec.backend, world_size=spec.world_size, environment=environment)


@dataclass(frozen=True)
class RankProgram:
    """The program that start.sh execs for one rank."""

    argv: Sequence[str]
    output: str
    """Shell redirections of its output."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Its own, in place of the launcher's."""


def ranks_script(
    programs: Mapping[int, RankProgram],
    bundle: PurePath,
    *,
    backend: str,
    world_size: int,
    environment: Mapping[str, str | None] | None = None,
) -> str:
    """A script that starts every rank of a host, whatever they run: it changes to `bundle` and execs the program of
    $MLX_RANK.

    The program takes none of the launcher's pipes: the launcher drops them at the first newline it is sent, and then
    costs 1 % of a core instead of a whole one. `environment` overrides the launcher's; None unsets a variable."""
    lines = ["#!/bin/sh"]
    for name, value in (environment or {}).items():
        lines.append(f"unset {name}" if value is None else f"{name}={shlex.quote(value)}; export {name}")
    # Undone: what the ssh shim has set for mlx.launch.
    lines += [
        f'if [ -n "${{{KEPT_TMPDIR_ENV}-}}" ]; then TMPDIR=${KEPT_TMPDIR_ENV}; export TMPDIR',
        f'elif [ -n "${{{KEPT_TMPDIR_ENV}+x}}" ]; then unset TMPDIR; fi',
        f"unset {KEPT_TMPDIR_ENV} {NODE_ROOT_ENV}",
    ]
    file = NEEDED_FILE.get(backend, "MLX_HOSTFILE")
    lines.append(f'case "${{{file}-}}" in "" | /*) ;; *) {file}="$PWD/${file}" ;; esac')
    lines.append(f"cd {shlex.quote(str(bundle))} || exit {ShellExit.CANNOT_RUN}")
    if world_size == 1:
        # For a single rank mlx.launch names an empty hostfile, which MLX cannot parse.
        lines.append("unset MLX_HOSTFILE")
    lines.append('case "$MLX_RANK" in')
    check = _check(backend) if world_size > 1 else ""
    for rank, program in programs.items():
        # Redirected before exec, so that the shell's own error about a missing interpreter is kept too.
        begin = f"exec </dev/null {program.output}; {exports(program.environment)}{check}"
        lines.append(f"{rank}) {begin}exec {shlex.join(program.argv)} ;;")
    lines.append("esac")
    lines.append('echo "start.sh: no rank ${MLX_RANK:-(MLX_RANK is not set)} in this attempt" >&2')
    lines.append(f"exit {ShellExit.CANNOT_RUN}")
    return "\n".join(lines) + "\n"


def exports(variables: Mapping[str, str]) -> str:
    """The beginning of a shell's line."""
    return "".join(f"export {name}={shlex.quote(value)} && " for name, value in variables.items())


def _check(backend: str) -> str:
    """Fail when MLX's file is missing or empty: every rank would train in a group of its own."""
    name = NEEDED_FILE.get(backend)
    if name is None:
        return ""
    # mktemp has made it, and writing it has failed, or mktemp itself has.
    full = f'echo "{name} names an empty file: the disk of ${name} is full"'
    none = f'echo "{name} names no file: temporary files cannot be made, see TMPDIR"'
    report = f'if [ -e "${name}" ]; then {full}; else {none}; fi >&2'
    missing = f'[ -n "${{{name}+x}}" ] && [ ! -s "${name}" ]'
    return f"if {missing}; then {report}; exit {ShellExit.NOT_PREPARED}; fi; "


@dataclass(frozen=True)
class StartFailure:
    rank: int
    message: str
    """The last line of output about it; "" when there is none."""
    code: int = ShellExit.SSH_FAILED
    """Its start.sh's exit code, negative for a signal; ssh's own where that is not known."""


@dataclass(frozen=True)
class RankStart:
    rank: int
    host: NodeConfig
    """The first node of its host: the rank's own python may be missing, which start.sh reports."""
    files: NodeFiles
    environment: Mapping[str, str]
    """Shows in `ps` on the node: nothing secret is in it."""


async def start_ranks(fleet: Fleet, starts: list[RankStart]) -> tuple[StartFailure, ...]:
    """Start all ranks at the same time over our own connections; those that did not start, in rank order.

    A keeper detaches from the connection, so the call returns as soon as the rank's program runs, and a later loss of
    the connection does not touch the rank."""
    failures = await gather_all(_start_rank(fleet.agent(start.host), start) for start in starts)
    return tuple(failure for failure in failures if failure is not None)


async def _start_rank(agent: AgentClient, rank: RankStart) -> StartFailure | None:
    try:
        completed = await run_start_script(agent, rank.files.start, rank.environment, START_LIMIT_S)
    except FlightDeckError as error:
        return StartFailure(rank.rank, str(error))
    if completed.code == 0:
        return None
    if completed.code is None:
        return StartFailure(rank.rank, f"its keeper has not started it within {START_LIMIT_S:g} s")
    output = await _keeper_output(agent, rank) or completed.exit_output
    return StartFailure(rank.rank, plain(output, 300), completed.code)


async def run_start_script(
    agent: AgentClient, script: PurePath, environment: Mapping[str, str], limit_s: float
) -> Completed:
    """Run a host's start.sh for one rank. Raises LaunchError, NodeUnreachable."""
    variables = [f"{name}={value}" for name, value in environment.items()]
    return await agent.run(["/usr/bin/env", *variables, "/bin/sh", str(script)], timeout_s=limit_s)


async def _keeper_output(agent: AgentClient, rank: RankStart) -> str:
    try:
        log = await agent.read_end(rank.files.keeper_log(rank.rank), _LOG_BYTES)
    except FlightDeckError:
        return ""
    return last_line(log.decode(errors="replace"))
