"""One node in full: its problem and the fix, every known fact with its age, and how the nodes are connected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from textual.content import Content

from tui import node_state
from tui.formatting import age, memory, size
from tui.glyphs import MUTED, STALE, WARN
from tui.state import TELEMETRY_LIMIT_S, DeckState
from tui.topology import draw, ring, verdict
from tui.widgets.text import pair

if TYPE_CHECKING:
    from engine.models import Interface, NodeFacts, NodeTelemetry, ThunderboltPort
    from engine.snapshots import RankStatus

REASONS: Final = 8
"""Addresses of more ranks than this are counted, not listed."""

Pairs = list[tuple[str, str | None]]


def detail(state: DeckState, node: str, width: int) -> Content:
    """Every known fact of one node, and the names of the unknown ones."""
    return Content("\n").join(_node(state, node, width))


def connections(state: DeckState, width: int) -> Content:
    """How the nodes are connected: the topology drawn, and the network plan with its reasons."""
    topology, nodes = state.topology, node_state.node_names(state)
    lines = [Content.styled("topology", "bold")]
    drawn = draw(topology, width, state.glyphs) if topology is not None else []
    if topology is not None and not all(node.local for node in (state.config.nodes if state.config else ())):
        silent = {facts.node for facts in state.facts.values() if facts.problem}
        lines += [pair(label, text, width) for label, text in verdict(topology, state.glyphs, silent)]
    if drawn:
        lines += [Content(""), *map(Content, drawn)]
    elif nodes:
        lines += [Content(line) for line in ring(nodes, state.backend or "?", width, state.glyphs)]
    return Content("\n").join([*lines, Content(""), *_network_plan(state, width)])


def _network_plan(state: DeckState, width: int) -> list[Content]:
    lines = [Content.styled("network", "bold")]
    if state.network_plan is None:
        why = state.network_problem or (
            "waiting for every node's facts" if state.probing else "not known before a probe"
        )
        return [*lines, pair("backend", why, width, style="$error" if state.network_problem else MUTED)]
    plan = state.network_plan
    lines.append(pair("backend", plan.backend, width, style="bold"))
    lines += [pair("because" if not number else "", reason, width) for number, reason in enumerate(plan.reasons)]
    lines += [pair(state.glyphs.shape(WARN), text, width, style="$warning") for text in plan.warnings]
    names = node_state.node_names(state)
    for rank, (name, host) in enumerate(zip(names[:REASONS], plan.hosts, strict=False)):
        devices = [word for part in host.rdma or () if part for word in ((part,) if isinstance(part, str) else part)]
        text = state.glyphs.separator.join([", ".join(host.ips) or "any address", *devices])
        lines.append(pair(f"rank {rank}", f"{name}  {text}", width))
    if len(names) > REASONS:
        lines.append(pair("", f"and {len(names) - REASONS} more", width, style=MUTED))
    return lines


def _node(state: DeckState, node: str, width: int) -> list[Content]:
    facts, rank = state.facts.get(node), node_state.ranks_by_node(state).get(node)
    versions = node_state.reference(state)
    glyph, word = node_state.condition(state, node, rank, versions)
    lines: list[Content] = [Content.assemble((node, "bold"), "  ", state.glyphs.state(glyph, word))]
    if (link := node_state.away(state, rank)) is not None:
        text = f"{link.condition} for {age(link.since, state.now)}" + (f": {link.why}" if link.why else "")
        lines.append(pair("supervisor", text, width, style="$error"))
    if facts is None:
        lines.append(Content.styled(f"not probed yet{state.key(': r probes')}", MUTED))
        return [*lines, *_rank(state, rank, width)]
    if facts.problem:
        lines += _problem(state, facts, width)
    lines += [
        pair(state.glyphs.shape(WARN), text, width, style="$warning") for text in node_state.warnings(facts, versions)
    ]
    if state.topology is not None and (setup := state.topology.setup.get(node)):
        text = f"its Thunderbolt cables have no network of their own{state.key(': x sets up those of all nodes, by')}"
        lines.append(pair(state.glyphs.shape(WARN), text, width, style="$warning"))
        lines += [pair("", command, width, style=MUTED) for command in setup]
    unknown: list[str] = []
    lines += _rank(state, rank, width)
    lines += _now(state, state.telemetry.get(node), width)
    lines += _facts(state, facts, width, unknown, stale=glyph is STALE)
    if unknown and not facts.problem:
        lines.append(pair("not measured", ", ".join(unknown), width, style=MUTED))
    return lines


def _problem(state: DeckState, facts: NodeFacts, width: int) -> list[Content]:
    lines, key = [pair("problem", facts.problem or "", width, style="$error")], ""
    if facts.host_key is not None:
        lines.append(pair("it shows", facts.host_key.fingerprint, width))
        key = "x compares it with the node's own, and accepts it"
    elif facts.changed_key is not None:
        lines.append(pair("accepted is", facts.changed_key.accepted, width))
        lines.append(pair("it shows", facts.changed_key.found, width))
        key = "x shows what can be done; it is never accepted from here"
    elif facts.fix:
        lines.append(pair("fix", facts.fix, width, style="bold"))
    return [*lines, pair("", key, width, style=MUTED)] if state.key(key) else lines


def _rank(state: DeckState, rank: RankStatus | None, width: int) -> list[Content]:
    if rank is None:
        return []
    separator = state.glyphs.separator
    seen = f"{separator}last report {state.ago(rank.seen_at)}" if rank.seen_at else ""
    lines = [Content(""), pair("rank", f"{rank.rank}{separator}{rank.phase}{seen}", width)]
    lines.append(pair("step", f"{rank.iteration:,}" if rank.iteration is not None else "none yet", width))
    return lines


def _now(state: DeckState, values: NodeTelemetry | None, width: int) -> list[Content]:
    """Telemetry; past its limit it is shown as stale, without values."""
    if values is None:
        return []
    stale = state.age_s(values.at) > TELEMETRY_LIMIT_S
    lines = [Content(""), _title(state, f"telemetry{state.glyphs.separator}{state.ago(values.at)}", stale=stale)]
    if values.problem is not None:
        return [*lines, pair("", values.problem, width, style="$warning")]
    if stale:
        return [*lines, pair("", "telemetry has stopped: its last values are no longer shown", width)]
    heat = [
        f"{name} {value:.0f}{state.glyphs.degrees}"
        for name, value in (("CPU", values.cpu_temperature_c), ("GPU", values.gpu_temperature_c))
        if value is not None
    ]
    clock = f" at {values.gpu_mhz:,.0f} MHz" if values.gpu_mhz is not None else ""
    watts = [f"{values.power_w:.0f} W"] if values.power_w is not None else []
    watts += [f"GPU {values.gpu_power_w:.1f} W"] if values.gpu_power_w is not None else []
    used = [
        f"rank {use.rank} {memory(use.rss_bytes)}"
        for use in values.ranks
        if state.snapshot is None or use.run_id == state.snapshot.record.id
    ]
    pairs: Pairs = [
        ("cpu", f"{values.cpu_use:.0%}" if values.cpu_use is not None else None),
        ("gpu", f"{values.gpu_use:.0%}{clock}" if values.gpu_use is not None else None),
        ("GPU memory", _gpu_memory(values)),
        ("memory", memory(values.memory_used_bytes) + " used" if values.memory_used_bytes is not None else None),
        ("swap", memory(values.swap_used_bytes) + " used" if values.swap_used_bytes is not None else None),
        ("power", ", ".join(watts) or None),
        ("temperature", ", ".join(heat) or None),
        ("thermal", values.thermal),
        ("in use by", ", ".join(used) or None),
        ("read from", values.source),
    ]
    return [*lines, *(pair(label, text, width) for label, text in pairs if text is not None)]


def _gpu_memory(values: NodeTelemetry) -> str | None:
    """Each GPU by its number; without those that report nothing."""
    gpus = [(gpu.index, gpu.used_bytes, gpu.total_bytes) for gpu in values.gpu_memory if gpu.total_bytes]
    return ", ".join(f"{index}: {node_state.of_total(used, total or 0)}" for index, used, total in gpus) or None


def _facts(state: DeckState, facts: NodeFacts, width: int, unknown: list[str], *, stale: bool) -> list[Content]:
    """The probe's facts in groups; the labels of those that nobody measured go to `unknown`. `stale`: the node's."""
    seen = state.ago(facts.probed_at)
    groups: list[tuple[str, Pairs]] = [
        ("machine", _machine(state, facts)),
        ("memory and disk", _room(state, facts)),
        ("software", _software(facts)),
        ("network", _network(facts)),
        ("thunderbolt", [(_port(port), _other_end(state, facts.node, port)) for port in facts.thunderbolt]),
        ("rdma", _rdma(facts)),
    ]
    lines: list[Content] = []
    for title, pairs in groups:
        measured = [(label, text) for label, text in pairs if text is not None]
        if not facts.problem:
            unknown += [label for label, text in pairs if text is None]
        if measured:
            lines += [Content(""), _title(state, f"{title}{state.glyphs.separator}{seen}", stale=stale)]
            lines += [pair(label, text, width) for label, text in measured]
    return lines


def _title(state: DeckState, text: str, *, stale: bool) -> Content:
    name, _, seen = text.partition(state.glyphs.separator)
    mark = state.glyphs.state(STALE, f"stale, {seen}") if stale else Content.styled(seen, MUTED)
    return Content.assemble((name, "bold"), "  ", mark)


def _machine(state: DeckState, facts: NodeFacts) -> Pairs:
    cores = f"{facts.cores}" if facts.cores is not None else None
    if cores and facts.performance_cores:
        cores += f", {facts.performance_cores} of them performance cores"
    named = f" ({facts.hostname})" if facts.hostname and facts.hostname not in facts.host else ""
    low = {True: "on", False: "off"}.get(facts.low_power_mode) if facts.low_power_mode is not None else None
    return [
        ("host", facts.host + named),
        ("user", f"{facts.user}, home {facts.home}" if facts.user and facts.home else facts.user),
        ("model", facts.model),
        ("chip", facts.chip),
        ("cpu cores", cores),
        ("gpu cores", str(facts.gpu_cores) if facts.gpu_cores is not None else None),
        *_nvidia(facts),
        ("system", facts.os),
        ("power source", facts.power_source),
        ("Low Power", low),
        ("thermal", facts.thermal),
    ]


def _nvidia(facts: NodeFacts) -> Pairs:
    """Nothing where there is none."""
    driver = ", CUDA ".join(filter(None, (facts.nvidia_driver, facts.cuda)))
    capabilities = dict.fromkeys(gpu.compute_capability for gpu in facts.gpus if gpu.compute_capability)
    capability = f" (compute capability {', '.join(capabilities)})" if capabilities else ""
    return [pair for pair in (("GPUs", node_state.gpus(facts) + capability), ("NVIDIA driver", driver)) if pair[1]]


def _room(state: DeckState, facts: NodeFacts) -> Pairs:
    used = node_state.of_total(facts.memory_used_bytes, facts.memory_total_bytes) if facts.memory_total_bytes else None
    disk = None
    if facts.disk_free_bytes is not None:
        disk = size(facts.disk_free_bytes) + " free"
        disk += f" of {size(facts.disk_total_bytes)}" if facts.disk_total_bytes is not None else ""
    return [
        ("memory", f"{used} used" if used and facts.memory_used_bytes is not None else used),
        ("GPU limit", memory(facts.gpu_limit_bytes) if facts.gpu_limit_bytes is not None else None),
        ("swap", f"{memory(facts.swap_used_bytes)} used" if facts.swap_used_bytes is not None else None),
        ("disk", disk),
    ]


def _software(facts: NodeFacts) -> Pairs:
    return [
        ("python", facts.python),
        ("mlx", ", ".join(filter(None, (facts.mlx, facts.mlx_cuda))) or None),
        ("mlx-lm", facts.mlx_lm),
        *([("torch", facts.torch)] if facts.torch else []),
        ("device", "gpu (CUDA)" if facts.mlx_device == "CUDA" else facts.gpu),
        ("backends", ", ".join(facts.backends) or None),
    ]


def _network(facts: NodeFacts) -> Pairs:
    skew = f"{facts.clock_skew_s:+.3f} s against this machine" if facts.clock_skew_s is not None else None
    shown = [interface for interface in facts.interfaces if interface.ipv4 or interface.active or interface.bridge]
    return [
        ("round trip", node_state.milliseconds(facts.round_trip_s)),
        ("clock", skew),
        *((interface.name, _interface(interface)) for interface in shown),
    ]


def _interface(interface: Interface) -> str:
    parts = [", ".join(interface.ipv4) or "no IPv4"]
    if interface.active is False:
        parts.append("down")
    if interface.bridge:
        parts.append(f"in {interface.bridge}")
    if interface.port_name:
        parts.append(f"({interface.port_name})")
    return " ".join(parts)


def _port(port: ThunderboltPort) -> str:
    return " ".join(part for part in (port.receptacle, port.device) if part) or "port"


def _other_end(state: DeckState, node: str, port: ThunderboltPort) -> str:
    """The other end: a node with its interface, a stranger, or no computer."""
    speed = f", {port.speed}" if port.speed else ""
    if port.peer_uuid is None:
        return "no computer at the other end"
    for cable in state.topology.cables if state.topology is not None else ():
        for here, device, there, other in (
            (cable.a, cable.a_device, cable.b, cable.b_device),
            (cable.b, cable.b_device, cable.a, cable.a_device),
        ):
            if here == node and device == port.device and device is not None:
                return f"{there} {other or ''}".strip() + speed
    return f"{port.peer_name or 'a computer'}, no node of this cluster{speed}"


def _rdma(facts: NodeFacts) -> Pairs:
    if facts.rdma_enabled is None and not facts.rdma_devices:
        return [("rdma", None)]
    rows: Pairs = []
    if facts.rdma_enabled is not None:
        rows.append(("rdma", "on" if facts.rdma_enabled else "off"))
    for device in facts.rdma_devices:
        state = (device.port_state or "state unknown").removeprefix("PORT_").lower()
        address = {True: "", False: ", no IPv4 in its GID table: no queue pair comes up", None: ""}[device.ipv4_gid]
        rows.append((device.name, state + address))
    return rows
