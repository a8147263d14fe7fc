"""Ask a node what it is: one command there, read into NodeFacts. A node that does not answer is a fact too."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from engine.config.models import FlightConfig, NodeConfig
from engine.models import NodeFacts
from engine.nodes import linux, macos
from engine.security.sanitise import sanitise
from engine.transport.base import Completed, Transport
from engine.transport.local import LocalTransport

SCRIPT = Path(__file__).with_name("facts_script.py")
TIME_LIMIT_S = 30.0
"""Far above the 0.1 s it takes: a Mac that wakes, or one whose disk is cold, may take seconds to import mlx."""


Clock = Callable[[], datetime]


class Nodes(Protocol):
    """Ways to nodes; engine.transport.fleet.Fleet is one."""

    def to(self, node: NodeConfig) -> Transport: ...


def now() -> datetime:
    return datetime.now(UTC)


async def probe_all(config: FlightConfig, fleet: Nodes | None = None, clock: Clock = now) -> list[NodeFacts]:
    """The facts of every node, probed at once, in the configuration's order."""
    found = {facts.node: facts async for facts in probing(config, fleet, clock)}
    return [found[node.name] for node in config.nodes]


async def probing(config: FlightConfig, fleet: Nodes | None = None, clock: Clock = now) -> AsyncIterator[NodeFacts]:
    """The facts of each node as it answers, or has failed to. Closing the iterator ends the probes."""
    probes = [asyncio.create_task(probe(node, fleet and fleet.to(node), clock)) for node in config.nodes]
    try:
        for done in asyncio.as_completed(probes):
            yield await done
    finally:
        for task in probes:
            task.cancel()
        await asyncio.gather(*probes, return_exceptions=True)


async def probe(
    node: NodeConfig,
    transport: Transport | None = None,
    clock: Clock = now,
    *,
    time_limit_s: float = TIME_LIMIT_S,
) -> NodeFacts:
    """What `node` says of itself now. Never raises for a node that cannot answer: `problem` then says why."""
    transport = transport or LocalTransport()
    try:
        completed = await transport.run([node.python, str(SCRIPT), node.workdir], timeout_s=time_limit_s)
    except FileNotFoundError:
        fields: dict[str, Any] = {"problem": f"no such interpreter: {node.python}"}
    except OSError as refused:
        fields = {"problem": f"{node.python} cannot be run: {refused.strerror}"}
    else:
        fields = read_facts(completed)
        if completed.code is None:
            fields = {"problem": f"no answer from {node.python} within {time_limit_s:g} s"}
    try:
        return NodeFacts(node=node.name, host=node.ssh, probed_at=clock(), **fields)
    except ValidationError as odd:
        first = odd.errors()[0]
        problem = f"the probe's answer makes no sense: {first['loc'][0]}: {first['msg']}"
        return NodeFacts(node=node.name, host=node.ssh, probed_at=clock(), problem=problem)


def read_facts(completed: Completed) -> dict[str, Any]:
    """The fields of NodeFacts from what the script printed. Lines that are not its own are passed over."""
    said: dict[str, Any] = {}
    for line in completed.stdout.splitlines():
        try:
            document = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(document, dict):
            said |= document
    if "system" not in said:
        words = sanitise(completed.last_words.encode(), 200)
        return {"problem": f"the probe ended with {completed.code}" + (f": {words}" if words else "")}
    facts = {name: said.get(name) for name in ("python", "mlx", "mlx_lm", "cores", "disk_free_bytes", "gpu")}
    facts["backends"] = tuple(said.get("backends", ()))
    return {name: _plain(value) for name, value in (facts | _system_facts(said)).items()}


def _plain(value: Any) -> Any:
    """A text of the node's, safe to show."""
    return sanitise(value.encode(errors="replace"), 100) if isinstance(value, str) else value


def _system_facts(said: dict[str, Any]) -> dict[str, Any]:
    texts = {name: text or "" for name, text in said.get("texts", {}).items()}
    if said["system"] == "Darwin":
        return {
            "os": macos.os_name(texts.get("sw_vers", "")),
            "chip": macos.chip(texts.get("sysctl", "")),
            "memory_total_bytes": macos.memory_total(texts.get("sysctl", "")),
            "memory_used_bytes": macos.memory_used(texts.get("vm_stat", "")),
        }
    total, used = linux.memory(texts.get("meminfo", ""))
    return {
        "os": linux.os_name(texts.get("os_release", "")) or f"{said['system']} {said.get('release', '')}".strip(),
        "chip": linux.chip(texts.get("cpuinfo", "")) or said.get("machine"),
        "memory_total_bytes": total,
        "memory_used_bytes": used,
    }
