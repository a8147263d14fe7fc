"""nodes: the facts of every node, the topology, the network plan, and host keys that a person must accept."""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from engine.api import Config, Engine, ExitCode, NetworkPlan
from engine.errors import FlightDeckError, InputError, StateError
from engine.models import HostKeyOffer, NodeFacts, Topology
from tui import node_state, topology
from tui.commands.terminal import Lines, accepted_config, agreed_to, agreed_to_key, is_person, print_json
from tui.formatting import NOT_MEASURED, ago, size, table
from tui.glyphs import Glyphs, utf8_terminal
from tui.state import DeckState

ASK: Final = ""
"""--trust without a fingerprint: ask, whatever else is on stdout."""
_WIDTH: Final = 78
_HEADERS: Final = (
    *("RANK", "NODE", "STATE", "HOST", "CHIP", "GPU", "MEMORY", "DISK FREE"),
    *("RDMA", "PYTHON", "MLX", "MLX-LM", "CLOCK", "PING", "SEEN", "SYSTEM"),
)


@dataclass(frozen=True)
class ClusterProbe:
    facts: Sequence[NodeFacts]
    topology: Topology
    network: NetworkPlan | None
    problem: str | None
    """Why there is no network plan."""


def nodes(options: argparse.Namespace, engine: Engine) -> int:
    """Probe every node of the configuration; 1 when one has a problem, or they cannot be wired."""
    config = accepted_config(options, engine)
    progress = Lines(sys.stderr)
    if ASK in options.trust and not is_person(sys.stdin):
        raise InputError("--trust without a fingerprint asks, and there is no terminal", todo="--trust SHA256:…")
    if options.setup and not is_person(sys.stdin):
        raise InputError("--setup asks, and there is no terminal", todo="run the commands that flightdeck nodes prints")
    asks = is_person(sys.stdin) and is_person(progress.stream) and (ASK in options.trust or not options.json)
    trusted = [key for key in options.trust if key != ASK]
    seen = asyncio.run(_probe(engine, config, trusted, progress, asks=asks))
    if options.setup and _set_up(engine, config, seen.topology, progress):
        seen = asyncio.run(_probe(engine, config, (), progress, asks=False))
    if options.json:
        document = {"nodes": seen.facts, "topology": seen.topology, "network": seen.network}
        print_json(document | {"network_problem": seen.problem})
    else:
        _print(Lines(), config, engine, seen)
    left = options.setup and seen.topology.setup
    return ExitCode.FAILED if seen.problem or left or any(fact.problem for fact in seen.facts) else ExitCode.OK


async def _probe(
    engine: Engine, config: Config, trusted: Sequence[str], progress: Lines, *, asks: bool
) -> ClusterProbe:
    """Probe; accept what a person trusts, and probe again when there was such a key."""
    async with engine:
        facts = await engine.nodes.probe(config)
        offers = unique_offers(facts)
        accepted = [offer for offer in offers if offer.fingerprint in trusted]
        for fingerprint in set(trusted) - {offer.fingerprint for offer in offers}:
            progress.say(f"flightdeck: no node shows {fingerprint} as a new host key: nothing is accepted for it")
        if asks:
            accepted += [offer for offer in offers if offer not in accepted and agreed_to_key(offer, progress)]
        for offer in accepted:
            await engine.nodes.accept_host_key(offer)
            progress.say(f"accepted {offer.fingerprint} for {offer.target}")
        if accepted:
            facts = await engine.nodes.probe(config)
        cabling = engine.nodes.topology(facts)
        try:
            return ClusterProbe(facts, cabling, engine.nodes.network_plan(config, facts), None)
        except FlightDeckError as error:
            return ClusterProbe(facts, cabling, None, str(error))


def _set_up(engine: Engine, config: Config, cabling: Topology, progress: Lines) -> bool:
    """Run the set-up commands that a person agrees to, node by node; their effect is what the next probe finds."""
    if not cabling.setup:
        progress.say("every Thunderbolt cable has a network of its own, or there is none: nothing to set up")
        return False
    _print_setup(progress, cabling)
    if not agreed_to("run these commands on the nodes, with sudo?", progress):
        return False
    for node, commands in cabling.setup.items():
        progress.say(f"{node}:")
        # Standard output is the document's, with --json.
        code = subprocess.call(engine.nodes.setup_argv(config, node, commands), stdout=sys.__stderr__)
        if code:
            progress.say(f"  ended with {code}")
    return True


def _print_setup(lines: Lines, cabling: Topology) -> None:
    for node, commands in cabling.setup.items():
        lines.say(f"on {node}:")
        for command in commands:
            lines.say(f"  {command}")
    lines.say("They take the Thunderbolt bridge down, and last until the Mac restarts, which also takes them back.")


def unique_offers(facts: Iterable[NodeFacts]) -> list[HostKeyOffer]:
    """Each new key once, however many nodes are behind it."""
    return list(dict.fromkeys(fact.host_key for fact in facts if fact.host_key is not None))


def _print(lines: Lines, config: Config, engine: Engine, seen: ClusterProbe) -> None:
    glyphs = Glyphs(ascii=not utf8_terminal())
    state = DeckState(now=datetime.now(UTC), glyphs=glyphs, config=config, facts={f.node: f for f in seen.facts})
    versions = node_state.reference(state)
    before: dict[str, NodeFacts] = {}
    if any(fact.problem for fact in seen.facts):
        with suppress(StateError):
            before = {fact.node: fact for fact in engine.nodes.last_facts(config)}
    rows = [_row(state, rank, fact, before.get(fact.node), versions) for rank, fact in enumerate(seen.facts)]
    lines.say(table(_HEADERS, rows, lines.width))
    for fact in seen.facts:
        _print_node(lines, fact, versions)
    _print_links(lines, seen, glyphs)


def _row(state: DeckState, rank: int, fact: NodeFacts, before: NodeFacts | None, versions: dict[str, str]) -> list[str]:
    """A node that does not answer is shown as it was when it last did, with that age."""
    _, word = node_state.condition(state, fact.node, None, versions)
    shown = before if fact.problem and before is not None else fact
    old = shown is before
    total = shown.memory_total_bytes
    return [
        str(rank),
        fact.node,
        f"{word}, stale" if old else word,
        fact.host,
        node_state.chip(shown) or NOT_MEASURED,
        str(shown.gpu_cores or NOT_MEASURED),
        node_state.of_total(shown.memory_used_bytes, total) if total else NOT_MEASURED,
        size(shown.disk_free_bytes),
        node_state.rdma(shown) or NOT_MEASURED,
        *(_version(shown, field, versions) for field in ("python", "mlx", "mlx_lm")),
        NOT_MEASURED if shown.clock_skew_s is None else f"{shown.clock_skew_s:+.3f} s",
        node_state.milliseconds(shown.round_trip_s) or NOT_MEASURED,
        ago(shown.probed_at, state.now, at_once="now"),
        node_state.system(shown) or NOT_MEASURED,
    ]


def _version(fact: NodeFacts, field: str, versions: dict[str, str]) -> str:
    value: str | None = getattr(fact, field)
    if value is None:
        return NOT_MEASURED
    return value if value == versions.get(field, value) else f"!={value}"


def _print_node(lines: Lines, fact: NodeFacts, versions: dict[str, str]) -> None:
    if fact.problem is None:
        for warning in node_state.warnings(fact, versions):
            lines.wrap(f"{lines.ink(fact.node, 'yellow')}: ", warning, 2)
        return
    # Both fingerprints stand below one another: so they can be compared.
    text = fact.problem.partition(":")[0] if fact.changed_key is not None else fact.problem
    lines.wrap(f"{lines.ink(fact.node, 'red')}: ", text, 2)
    if fact.changed_key is not None:
        lines.say(f"  accepted  {fact.changed_key.accepted}")
        lines.say(f"  it shows  {fact.changed_key.found}")
    if fact.host_key is not None:
        lines.say("  compare it on the node itself: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub")
        lines.say(f"  then: flightdeck nodes --trust {fact.host_key.fingerprint}")
    elif fact.fix:
        lines.say(f"  fix: {fact.fix}")


def _print_links(lines: Lines, seen: ClusterProbe, glyphs: Glyphs) -> None:
    if len(seen.topology.nodes) > 1:
        for label, text in topology.verdict(seen.topology, glyphs):
            lines.wrap(f"{label}: ", text, 2)
        for line in topology.draw(seen.topology, _WIDTH, glyphs):
            lines.say(f"  {line}")
    if seen.topology.setup:
        lines.say(lines.ink("the Thunderbolt cables have no network of their own", "yellow"))
        lines.say("`flightdeck nodes --setup` runs these commands, after a question:")
        _print_setup(lines, seen.topology)
    if seen.network is None:
        lines.wrap(f"{lines.ink('not wired', 'red')}: ", seen.problem or "", 2)
        return
    lines.say(f"backend: {seen.network.backend}")
    for reason in seen.network.reasons:
        lines.wrap("  ", reason, 4)
    for warning in seen.network.warnings:
        lines.wrap(f"  {lines.ink('warning', 'yellow')}: ", warning, 4)
