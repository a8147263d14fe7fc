"""Ask a node what it is: one program there, sent over its stdin, read into NodeFacts. A node that does not answer is a
fact too, with its reason and what to do about it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from engine.config.models import FlightConfig, NodeConfig
from engine.errors import FlightDeckError, HostKeyChanged, HostKeyUnknown, LoginRefused, NodeUnreachable
from engine.models import HostKeyChange, HostKeyOffer, NodeFacts
from engine.nodes import answer
from engine.nodes.words import word
from engine.transport.base import Completed, Transport

SCRIPT = Path(__file__).with_name("facts_script.py")
TIME_LIMIT_S = 12.0
"""Of the program there, whose own questions have shorter ones. On a node that is awake it takes 0.1 s."""
_CONNECT_S = 3.0
"""What a connection may take of it besides; one that fails says so itself, and why, by then."""
_COMMAND_NOT_FOUND = 127
_CANNOT_RUN = 126
_SET_PYTHON = 'set python = "…" in its [[node]]'

Clock = Callable[[], datetime]


class Nodes(Protocol):
    """Ways to nodes; engine.transport.fleet.Fleet is one."""

    def to(self, node: NodeConfig) -> Transport: ...


def now() -> datetime:
    return datetime.now(UTC)


async def probe_all(config: FlightConfig, fleet: Nodes, clock: Clock = now) -> list[NodeFacts]:
    """The facts of every node, probed at once, in the configuration's order."""
    found = {facts.node: facts async for facts in probing(config, fleet, clock)}
    return [found[node.name] for node in config.nodes]


async def probing(config: FlightConfig, fleet: Nodes, clock: Clock = now) -> AsyncGenerator[NodeFacts, None]:
    """The facts of each node as it answers, or has failed to. Closing the iterator ends the probes.

    Nodes that are the same in all that is asked (ranks on one machine) are asked once.
    """
    alike: dict[tuple[str, str, str], list[NodeConfig]] = {}
    for node in config.nodes:
        alike.setdefault((node.ssh, node.python, node.workdir), []).append(node)
    probes = [asyncio.create_task(_probe_alike(nodes, fleet, clock)) for nodes in alike.values()]
    try:
        for done in asyncio.as_completed(probes):
            for facts in await done:
                yield facts
    finally:
        for task in probes:
            task.cancel()
        await asyncio.gather(*probes, return_exceptions=True)


async def _probe_alike(nodes: Sequence[NodeConfig], fleet: Nodes, clock: Clock) -> list[NodeFacts]:
    facts = await probe(nodes[0], fleet.to(nodes[0]), clock)
    return [facts.model_copy(update={"node": node.name}) for node in nodes]


async def probe(
    node: NodeConfig, transport: Transport, clock: Clock = now, *, time_limit_s: float = TIME_LIMIT_S
) -> NodeFacts:
    """What `node` says of itself now. Never raises for a node that cannot answer: `problem` then says why."""
    try:
        async with asyncio.timeout(time_limit_s + _CONNECT_S):
            fields = await _asked(node, transport, clock, time_limit_s)
    except TimeoutError:
        problem = f"no answer within {time_limit_s + _CONNECT_S:g} s"
        fields = {"problem": problem, "problem_kind": "unreachable"}
    except FlightDeckError as error:
        fields = _refused(error, node)
    except FileNotFoundError:
        fields = _no_interpreter(node)
    except OSError as refused:
        fields = {"problem": word(f"{node.python} cannot be run: {refused.strerror or refused}", 200)}
    except Exception as error:
        # One node's fault, whatever it is, must not take the answers of the others with it.
        fields = {"problem": word(f"the probe failed: {type(error).__name__}: {error}", 200)}
    try:
        return NodeFacts(node=node.name, host=node.ssh, probed_at=clock(), **fields)
    except ValidationError as odd:
        first = odd.errors()[0]
        problem = f"the probe's answer makes no sense: {first['loc'][0]}: {first['msg']}"
        return NodeFacts(node=node.name, host=node.ssh, probed_at=clock(), problem=problem)


async def _asked(node: NodeConfig, transport: Transport, clock: Clock, time_limit_s: float) -> dict[str, Any]:
    round_trip_s = await transport.round_trip_s()
    argv = [node.python, "-", node.workdir]
    completed = await transport.run(argv, timeout_s=time_limit_s, stdin=_script())
    received = clock().timestamp()
    said = answer.said(completed.stdout)
    if said is None:
        return _unanswered(node, completed, time_limit_s)
    fields = answer.read_facts(said) | {"round_trip_s": round_trip_s}
    if (ended := answer.node_clock(said)) is not None:
        # From the way back alone: on the way there an interpreter is started, which takes longer than any network.
        fields["clock_skew_s"] = ended + (round_trip_s or 0.0) / 2 - received
    return fields


def _unanswered(node: NodeConfig, completed: Completed, time_limit_s: float) -> dict[str, Any]:
    if completed.code is None:
        return {"problem": f"no answer from {node.python} within {time_limit_s:g} s"}
    if completed.code == _COMMAND_NOT_FOUND:
        return _no_interpreter(node)
    words = word(completed.last_words, 200)
    problem = f"the probe ended with {completed.code}" + (f": {words}" if words else "")
    return {"problem": problem, "fix": _SET_PYTHON if completed.code == _CANNOT_RUN else None}


def _no_interpreter(node: NodeConfig) -> dict[str, Any]:
    return {"problem": f"no such interpreter: {node.python}", "problem_kind": "no python", "fix": _SET_PYTHON}


def _refused(error: FlightDeckError, node: NodeConfig) -> dict[str, Any]:
    problem = word(f"{error.what}: {error.why}" if error.why else error.what, 300)
    fields: dict[str, Any] = {"problem": problem, "problem_kind": _kind(error), "fix": word(error.todo, 300)}
    if isinstance(error, HostKeyUnknown):
        fields["host_key"] = HostKeyOffer(target=error.target, key=error.key, fingerprint=error.fingerprint)
    elif isinstance(error, HostKeyChanged):
        fields["changed_key"] = HostKeyChange(target=node.ssh, accepted=error.expected, found=error.found)
    return fields


def _kind(error: FlightDeckError) -> str | None:
    kinds = ((HostKeyUnknown, "key unknown"), (HostKeyChanged, "key changed"), (LoginRefused, "login refused"))
    known = next((kind for of, kind in kinds if isinstance(error, of)), None)
    return known or ("unreachable" if isinstance(error, NodeUnreachable) else None)


@cache
def _script() -> bytes:
    return SCRIPT.read_bytes()
