"""Starts the ranks over our own connections, with the environment that mlx.launch would have given them.

Each is started by the same start.sh. Its keeper detaches from the connection, so the call returns as soon as the
rank's program runs, and a later loss of the connection does not touch the rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.cluster.agent_client import AgentClient, TransportProvider
from engine.cluster.staging import gather_all
from engine.config.models import NodeConfig
from engine.errors import FlightDeckError
from engine.protocol.attempt import NodeFiles
from engine.security.sanitise import sanitise

START_LIMIT_S = 45.0
"""Until a keeper has started its program; below the flight's own patience with ranks that do not come."""
_LOG_BYTES = 65_536


@dataclass(frozen=True)
class StartFailure:
    """A rank that did not start."""

    rank: int
    code: int | None
    """Its start.sh's exit code, negative for a signal; None when that is not known."""
    words: str
    """The last line of output about it; "" when there is none."""


@dataclass(frozen=True)
class RankStart:
    rank: int
    host: NodeConfig
    """The first node of its host: the rank's own python may be missing, which start.sh reports."""
    files: NodeFiles
    environment: Mapping[str, str]
    """Shows in `ps` on the node: nothing secret is in it."""


async def start_ranks(fleet: TransportProvider, starts: list[RankStart]) -> tuple[StartFailure, ...]:
    """Start all ranks at the same time; those that did not start, in rank order."""
    failures = await gather_all(_start_rank(fleet.agent(each.host), each) for each in starts)
    return tuple(failure for failure in failures if failure is not None)


async def _start_rank(agent: AgentClient, rank: RankStart) -> StartFailure | None:
    variables = [f"{name}={value}" for name, value in rank.environment.items()]
    argv = ["/usr/bin/env", *variables, "/bin/sh", str(rank.files.start)]
    try:
        completed = await agent.run(argv, timeout_s=START_LIMIT_S)
    except FlightDeckError as error:
        return StartFailure(rank.rank, None, str(error))
    if completed.code == 0:
        return None
    if completed.code is None:
        return StartFailure(rank.rank, None, f"its keeper has not started it within {START_LIMIT_S:g} s")
    words = await _keeper_output(agent, rank) or completed.exit_output
    return StartFailure(rank.rank, completed.code, sanitise(words.encode(errors="replace"), 300))


async def _keeper_output(agent: AgentClient, rank: RankStart) -> str:
    try:
        log = await agent.read_end(rank.files.keeper_log(rank.rank), _LOG_BYTES)
    except FlightDeckError:
        return ""
    lines = [line.strip() for line in log.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""
