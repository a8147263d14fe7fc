"""A node's condition, its warnings, and its facts as short texts: pure functions of the state, for the
panes and `flightdeck nodes`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from engine.errors import ENABLE_RDMA
from tui.formatting import memory, size
from tui.glyphs import FAIL, OK, RUNNING, STALE, UNKNOWN, WARN, Glyph
from tui.state import FACTS_LIMIT_S, TELEMETRY_LIMIT_S, DeckState

if TYPE_CHECKING:
    from datetime import datetime

    from engine.models import NodeFacts, NodeTelemetry
    from engine.snapshots import NodeCondition, RankStatus

SKEW_LIMIT_S: Final = 1.0
"""A clock that is further off stands out: logs of two nodes can then not be read side by side."""
DISK_LIMIT_BYTES: Final = 5_000_000_000
VERSIONS: Final = ("python", "mlx", "mlx_lm", "torch")


def node_names(state: DeckState) -> list[str]:
    """In rank order."""
    if state.config is not None:
        return [node.name for node in state.config.nodes]
    return list(dict.fromkeys(rank.node for rank in state.snapshot.ranks)) if state.snapshot else []


def ranks_by_node(state: DeckState) -> dict[str, RankStatus]:
    """The shown run's rank on each node."""
    ranks = state.snapshot.ranks if state.snapshot is not None else ()
    return {rank.node: rank for rank in reversed(ranks)}


def reference(state: DeckState) -> dict[str, str]:
    """The version of python, mlx, mlx-lm and torch that most nodes have, by field; of equals the first node's."""
    common = {}
    for field in VERSIONS:
        values = Counter(value for facts in state.facts.values() if (value := getattr(facts, field)))
        if values:
            common[field] = values.most_common(1)[0][0]
    return common


def differing(state: DeckState) -> set[str]:
    """Fields of VERSIONS in which the nodes are not the same."""
    by_field = {
        field: {value for facts in state.facts.values() if (value := getattr(facts, field))} for field in VERSIONS
    }
    return {field for field, values in by_field.items() if len(values) > 1}


def live(state: DeckState, node: str) -> NodeTelemetry | None:
    """The node's telemetry while it may be believed."""
    values = state.telemetry.get(node)
    if values is None or values.problem is not None or state.age_s(values.at) > TELEMETRY_LIMIT_S:
        return None
    return values


def away(state: DeckState, rank: RankStatus | None) -> NodeCondition | None:
    """The condition of a rank's node that the run's supervisor cannot reach; None for a connected one."""
    if rank is None or rank.link is None or rank.link.condition == "connected" or not state.active:
        return None
    return rank.link


def last_seen(state: DeckState, node: str, rank: RankStatus | None = None) -> datetime | None:
    """The newest sign of life of a node: its telemetry, a report of its rank, the supervisor's connection to it, or an
    answered probe."""
    facts, values = state.facts.get(node), state.telemetry.get(node)
    signs = [facts.probed_at] if facts is not None and not facts.problem else []
    signs += [values.at] if values is not None and values.problem is None else []
    if rank is not None and state.active and state.snapshot is not None:
        signs += [*rank.signs.values(), *([rank.seen_at] if rank.seen_at is not None else [])]
        connected = rank.link is not None and rank.link.condition == "connected"
        signs += [state.now] if connected and state.snapshot.supervised else []
    return max(signs, default=None)


def condition(state: DeckState, node: str, rank: RankStatus | None, versions: dict[str, str]) -> tuple[Glyph, str]:
    """The node's state in one or two words. It is as fresh as its newest sign of life."""
    facts, values = state.facts.get(node), state.telemetry.get(node)
    if (link := away(state, rank)) is not None:
        return FAIL, link.condition
    seen = last_seen(state, node, rank)
    # Telemetry goes on for a while where a new connection fails already.
    if facts and facts.problem and (seen is None or (seen - facts.probed_at).total_seconds() < TELEMETRY_LIMIT_S):
        return (UNKNOWN if facts.host_key else FAIL), facts.problem_kind or "fail"
    if seen is None:
        return (RUNNING, "probing") if state.probing else (UNKNOWN, "unknown")
    if values is not None and state.listening:
        # It reports every 2 s: what says nothing for longer is not merely old.
        if state.age_s(seen) > TELEMETRY_LIMIT_S or (values.problem is not None and values.at > seen):
            return STALE, "silent"
    elif state.age_s(seen) > FACTS_LIMIT_S:
        return STALE, "stale"
    return (WARN, "warn") if facts is not None and warnings(facts, versions) else (OK, "ok")


def warnings(facts: NodeFacts, versions: dict[str, str]) -> list[str]:
    """Facts of a node that may spoil a run, one line each."""
    lines = []
    if facts.mlx_problem:
        lines.append(f"mlx cannot be imported: {facts.mlx_problem}")
    if facts.gpus and facts.mlx_device == "CPU":
        lines.append(f"MLX computes on its CPU, and not on {gpus(facts)}: it needs MLX's CUDA build")
    for field in VERSIONS:
        value, most = getattr(facts, field), versions.get(field)
        if value and most and value != most:
            lines.append(f"{field.replace('_', '-')} {value}, elsewhere {most}")
    if skewed(facts):
        lines.append(f"its clock is {facts.clock_skew_s:+.1f} s off this machine's")
    if facts.disk_free_bytes is not None and facts.disk_free_bytes < DISK_LIMIT_BYTES:
        lines.append(f"only {size(facts.disk_free_bytes)} of disk is free")
    if facts.low_power_mode:
        lines.append("Low Power Mode is on: it slows every step")
    if facts.thermal not in (None, "nominal"):
        lines.append(f"it is throttled: {facts.thermal}")
    if facts.rdma_enabled is False and any(port.peer_uuid for port in facts.thunderbolt):
        lines.append(f"RDMA is off: {ENABLE_RDMA}")
    lines += [f"not known: {why}" for why in facts.unknown.values()]
    return lines


def skewed(facts: NodeFacts) -> bool:
    return facts.clock_skew_s is not None and abs(facts.clock_skew_s) > SKEW_LIMIT_S


def gpus(facts: NodeFacts) -> str:
    """ "2 x NVIDIA H100 80GB HBM3", "" without any."""
    return ", ".join(f"{count} x {name}" for name, count in Counter(gpu.name for gpu in facts.gpus).items())


def chip(facts: NodeFacts) -> str | None:
    """Its name, or what it computes on: NVIDIA GPUs; with its CPU cores where there is no GPU to count."""
    if facts.gpus and facts.mlx_device != "CPU":
        return gpus(facts)
    cores = f"{facts.cores} cores" if facts.cores and not facts.gpu_cores else ""
    return " ".join(part for part in (facts.chip or facts.gpu, cores) if part) or None


def system(facts: NodeFacts) -> str | None:
    """ "26.4.1 25E253" of a Mac, else all that it calls itself."""
    if facts.os_version and facts.system == "Darwin":
        return " ".join(part for part in (facts.os_version, facts.os_build) if part)
    return facts.os


def cabled(facts: NodeFacts) -> str | None:
    """Thunderbolt ports with a computer at the other end, of all."""
    if not facts.thunderbolt:
        return None
    return f"{sum(port.peer_uuid is not None for port in facts.thunderbolt)}/{len(facts.thunderbolt)} cabled"


def rdma(facts: NodeFacts) -> str | None:
    """RDMA as "2/2 active" or "off"."""
    if facts.rdma_enabled is False:
        return "off"
    if not facts.rdma_devices:
        return "no device" if facts.rdma_enabled and "ibv_devices" not in facts.unknown else None
    if all(device.port_state is None for device in facts.rdma_devices):
        return f"{len(facts.rdma_devices)} unknown"
    active = sum(device.port_state == "PORT_ACTIVE" for device in facts.rdma_devices)
    return f"{active}/{len(facts.rdma_devices)} active"


def milliseconds(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1000:.1f} ms"


def of_total(used: int | None, total: int) -> str:
    """Main memory: "5.1/24.8 GB"; the total alone when the rest was not measured."""
    whole = memory(total)
    if used is None:
        return whole
    part = memory(used)
    return f"{part.split()[0] if part.split()[-1] == whole.split()[-1] else part}/{whole}"
