"""nodes: every node as it is now, how they are cabled and would be wired, and host keys that a person has to accept."""

from __future__ import annotations

import argparse
import asyncio
import sys
import termios
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from engine.config.models import FlightConfig
from engine.errors import FlightDeckError, InputError, StateError
from engine.models import HostKeyOffer, NodeFacts, Topology
from engine.planning.wiring import Wiring
from engine.session import Engine
from tui.commands.terminal import Lines, config_file, is_person, print_json
from tui.formatting import NOT_MEASURED, age, size, table
from tui.glyphs import Glyphs, utf8_terminal
from tui.state import DeckState
from tui.widgets import node_state, topology

OK, FAILED = 0, 1
ASK: Final = ""
"""--trust without a fingerprint: ask, whatever else is on stdout."""
_WIDTH: Final = 78
_HEADERS: Final = (
    *("RANK", "NODE", "STATE", "HOST", "CHIP", "GPU", "MEMORY", "DISK FREE"),
    *("RDMA", "PYTHON", "MLX", "MLX-LM", "CLOCK", "PING", "SEEN", "SYSTEM"),
)


@dataclass(frozen=True)
class Seen:
    """What one look at the cluster has found."""

    facts: Sequence[NodeFacts]
    topology: Topology
    wiring: Wiring | None
    unwired: str | None
    """Why there is no wiring."""


def nodes(options: argparse.Namespace, engine: Engine) -> int:
    """Probe every node of the configuration; 1 when one has a problem, or they cannot be wired."""
    config = engine.load_config(config_file(options))
    told = Lines(sys.stderr)
    if ASK in options.trust and not is_person(sys.stdin):
        raise InputError("--trust without a fingerprint asks, and there is no terminal", todo="--trust SHA256:…")
    asks = is_person(sys.stdin) and is_person(told.stream) and (ASK in options.trust or not options.json)
    seen = asyncio.run(_look(engine, config, [key for key in options.trust if key != ASK], told, asks=asks))
    if options.json:
        wiring = seen.wiring.model_dump(mode="json") if seen.wiring is not None else None
        shown = [fact.model_dump(mode="json") for fact in seen.facts]
        document = {"nodes": shown, "topology": seen.topology.model_dump(mode="json"), "wiring": wiring}
        print_json(document | {"wiring_problem": seen.unwired})
    else:
        _print(Lines(), config, engine, seen)
    return FAILED if seen.unwired or any(fact.problem for fact in seen.facts) else OK


async def _look(engine: Engine, config: FlightConfig, trusted: Sequence[str], told: Lines, *, asks: bool) -> Seen:
    """Probe; accept what a person trusts, and probe again when there was such a key."""
    try:
        facts = await engine.facts(config)
        offers = unique_offers(facts)
        accepted = [offer for offer in offers if offer.fingerprint in trusted]
        for fingerprint in set(trusted) - {offer.fingerprint for offer in offers}:
            told.say(f"flightdeck: no node shows {fingerprint} as a new host key: nothing is accepted for it")
        if asks:
            accepted += [offer for offer in offers if offer not in accepted and _agreed(offer, told)]
        for offer in accepted:
            await engine.accept_host_key(offer)
            told.say(f"accepted {offer.fingerprint} for {offer.target}")
        if accepted:
            facts = await engine.facts(config)
        found = engine.topology(config, facts)
        try:
            return Seen(facts, found, engine.wiring(config, facts), None)
        except FlightDeckError as error:
            return Seen(facts, found, None, str(error))
    finally:
        await engine.close()


def unique_offers(facts: Iterable[NodeFacts]) -> list[HostKeyOffer]:
    """Each new key once, however many nodes are behind it."""
    return list(dict.fromkeys(fact.host_key for fact in facts if fact.host_key is not None))


def _agreed(offer: HostKeyOffer, told: Lines) -> bool:
    """Whether a person has compared the key and says yes; anything else is no."""
    kind = offer.key.partition(" ")[0]
    told.say(f"{offer.target} shows a host key ({kind}) that nobody has accepted. On the node itself,")
    told.say("  ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub  must print the same fingerprint.")
    forget_typed()
    told.stream.write(f"accept {offer.fingerprint} for {offer.target}? [y/N] ")
    told.stream.flush()
    try:
        return input().strip().lower() in ("y", "yes")
    except EOFError:
        return False


def forget_typed() -> None:
    """What was typed before the question is no answer to it: nobody has compared a fingerprint not yet shown."""
    with suppress(OSError, ValueError, termios.error):
        termios.tcflush(sys.stdin, termios.TCIFLUSH)


def _print(lines: Lines, config: FlightConfig, engine: Engine, seen: Seen) -> None:
    glyphs = Glyphs(ascii=not utf8_terminal())
    state = DeckState(now=datetime.now(UTC), glyphs=glyphs, config=config, facts={f.node: f for f in seen.facts})
    versions = node_state.reference(state)
    before: dict[str, NodeFacts] = {}
    if any(fact.problem for fact in seen.facts):
        with suppress(StateError):
            before = {fact.node: fact for fact in engine.last_facts(config)}
    rows = [_row(state, rank, fact, before.get(fact.node), versions) for rank, fact in enumerate(seen.facts)]
    lines.say(table(_HEADERS, rows))
    for fact in seen.facts:
        _print_node(lines, fact, versions)
    _print_links(lines, seen, glyphs)


def _row(state: DeckState, rank: int, fact: NodeFacts, before: NodeFacts | None, versions: dict[str, str]) -> list[str]:
    """A node that does not answer is shown as it was when it last did, with that age."""
    _, word = node_state.condition(state, fact.node, None, versions)
    known = before if fact.problem and before is not None else fact
    old = known is before
    total = known.memory_total_bytes
    return [
        str(rank),
        fact.node,
        f"{word}, stale" if old else word,
        fact.host,
        node_state.chip(known) or NOT_MEASURED,
        str(known.gpu_cores or NOT_MEASURED),
        node_state.of_total(known.memory_used_bytes, total) if total else NOT_MEASURED,
        size(known.disk_free_bytes),
        node_state.rdma(known) or NOT_MEASURED,
        *(_version(known, field, versions) for field in ("python", "mlx", "mlx_lm")),
        NOT_MEASURED if known.clock_skew_s is None else f"{known.clock_skew_s:+.3f} s",
        node_state.milliseconds(known.round_trip_s) or NOT_MEASURED,
        _ago(known.probed_at, state.now),
        node_state.system(known) or NOT_MEASURED,
    ]


def _version(fact: NodeFacts, field: str, versions: dict[str, str]) -> str:
    value: str | None = getattr(fact, field)
    if value is None:
        return NOT_MEASURED
    return value if value == versions.get(field, value) else f"!={value}"


def _ago(moment: datetime, now: datetime) -> str:
    said = age(moment, now)
    return said if said == "now" else f"{said} ago"


def _print_node(lines: Lines, fact: NodeFacts, versions: dict[str, str]) -> None:
    """Its problem with what mends it, or what about it deserves a warning."""
    if fact.problem is None:
        for warning in node_state.warnings(fact, versions):
            lines.say(f"{lines.ink(fact.node, 'yellow')}: {warning}")
        return
    # Both fingerprints stand below one another: so they can be compared.
    said = fact.problem.partition(":")[0] if fact.changed_key is not None else fact.problem
    lines.say(f"{lines.ink(fact.node, 'red')}: {said}")
    if fact.changed_key is not None:
        lines.say(f"  accepted  {fact.changed_key.accepted}")
        lines.say(f"  it shows  {fact.changed_key.found}")
    if fact.host_key is not None:
        lines.say("  compare it on the node itself: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub")
        lines.say(f"  then: flightdeck nodes --trust {fact.host_key.fingerprint}")
    elif fact.fix:
        lines.say(f"  fix: {fact.fix}")


def _print_links(lines: Lines, seen: Seen, glyphs: Glyphs) -> None:
    if len(seen.topology.nodes) > 1:
        for label, text in topology.verdict(seen.topology, glyphs):
            lines.say(f"{label}: {text}")
        for line in topology.draw(seen.topology, _WIDTH, glyphs):
            lines.say(f"  {line}")
    if seen.wiring is None:
        lines.say(f"{lines.ink('not wired', 'red')}: {seen.unwired}")
        return
    lines.say(f"backend: {seen.wiring.backend}")
    for reason in seen.wiring.reasons:
        lines.say(f"  {reason}")
    for warning in seen.wiring.warnings:
        lines.say(f"  {lines.ink('warning', 'yellow')}: {warning}")
