"""The nodes as a table: one row a node, made anew only when something of that node has changed."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from textual.content import Content

from tui.formatting import age, size
from tui.glyphs import MUTED, Glyph
from tui.state import FACTS_LIMIT_S, TELEMETRY_LIMIT_S, DeckState
from tui.widgets import node_state
from tui.widgets.columns import Head

if TYPE_CHECKING:
    from engine.events import RankStatus
    from engine.models import NodeFacts, NodeTelemetry

Cells = tuple[Content, ...]
Age = tuple[str | None, bool]
"""In words, and whether that is past its limit."""

HEADS: Final = (
    Head("node", 9),
    Head("state", 9),
    Head("chip", 3, optional=True),
    Head("gpu cores", 2, right=True, optional=True),
    Head("memory", 7),
    Head("gpu", 5, right=True, optional=True),
    Head("power", 3, right=True, optional=True),
    Head("temp", 2, right=True, optional=True),
    Head("system", 1, optional=True),
    Head("thunderbolt", 2, optional=True),
    Head("rdma", 6, optional=True),
    Head("python", 2, optional=True),
    Head("mlx", 6),
    Head("mlx-lm", 4, optional=True),
    Head("disk free", 2, right=True, optional=True),
    Head("clock", 3, right=True, optional=True),
    Head("round trip", 2, right=True, optional=True),
    Head("rank", 6, right=True, optional=True),
    Head("step", 5, right=True, optional=True),
    Head("rss", 4, right=True, optional=True),
    Head("age", 8, right=True),
    Head("live", 4, right=True, optional=True),
)
BRIEF: Final = frozenset({"gpu cores", "system", "thunderbolt", "python", "disk free", "temp", "clock", "live"})
"""Left out on the dashboard, where the pane is narrow."""
_DEAR: Final = 8
AGE_STEP_S: Final = 5.0


class NodeRows:
    """The cells of every node, kept while nothing that they are made of has changed."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[tuple[object, ...], Cells]] = {}

    def of(
        self, state: DeckState, nodes: list[str], heads: tuple[Head, ...], sight: range | None = None
    ) -> dict[str, Cells]:
        """By node, in order. Rows out of `sight` are not made anew for their ages alone, which change every second."""
        versions = node_state.reference(state)
        ranks = node_state.ranks_by_node(state)
        run = state.snapshot.record.id if state.snapshot is not None else None
        common = (state.glyphs, tuple(versions.items()), run, state.active, heads)
        rows = {}
        for number, node in enumerate(nodes):
            seen = sight is None or number in sight
            rank, facts, values = ranks.get(node), state.facts.get(node), state.telemetry.get(node)
            ages = (_facts_age(state, facts), _live_age(state, values))
            shown = node_state.condition(state, node, rank, versions)
            key = (common, rank, facts, values, shown, ages)
            known = self._rows.get(node)
            if known is None or not _same(known[0], key, ages=seen):
                made = _cells(state, node, rank, versions, shown=shown, ages=ages)
                cells = dict(zip((head.title for head in HEADS), made, strict=True))
                known = self._rows[node] = (key, tuple(cells[head.title] for head in heads))
            rows[node] = known[1]
        return rows


def _same(before: tuple[object, ...], now: tuple[object, ...], *, ages: bool) -> bool:
    """Facts and telemetry by identity: comparing models field by field costs more than the row."""
    common, rank, facts, values, shown, age = now
    return (
        before[2] is facts
        and before[3] is values
        and before[0] == common
        and before[1] == rank
        and before[4] == shown
        and (before[5] == age or not ages)
    )


def heads(state: DeckState, *, full: bool) -> tuple[Head, ...]:
    """The columns of the full view, or of the dashboard's pane; versions that differ are shown before all else."""
    differ = {field.replace("_", "-") for field in node_state.differing(state)}
    found = (replace(head, priority=_DEAR) if head.title in differ else head for head in HEADS)
    return tuple(head for head in found if full or head.title not in BRIEF or head.priority == _DEAR)


def _cells(
    state: DeckState,
    node: str,
    rank: RankStatus | None,
    versions: dict[str, str],
    *,
    shown: tuple[Glyph, str],
    ages: tuple[Age, Age],
) -> Cells:
    facts, values = state.facts.get(node), node_state.live(state, node)
    none = Content.styled(state.glyphs.none, MUTED)
    (probed, old), (heard, _) = ages

    def known(text: str | None, style: str = "") -> Content:
        return none if text is None else Content.styled(text, style)

    def fact(name: str) -> str | None:
        value = getattr(facts, name, None)
        return None if value is None else str(value)

    skew = None if facts is None or facts.clock_skew_s is None else _skew(facts.clock_skew_s)
    rdma = node_state.rdma(facts) if facts else None
    return (
        Content(node),
        state.glyphs.state(*shown),
        known(node_state.chip(facts) if facts else None),
        known(fact("gpu_cores")),
        known(_memory(state, facts, values)),
        known(f"{values.gpu_use:.0%}" if values and values.gpu_use is not None else None),
        known(f"{values.power_w:.0f} W" if values and values.power_w is not None else None),
        known(_temperature(state, values)),
        known(node_state.system(facts) if facts else None),
        known(node_state.cabled(facts) if facts else None),
        known(rdma, "$warning" if rdma is not None and not _whole(rdma) else ""),
        _version(state, facts, "python", versions),
        _version(state, facts, "mlx", versions),
        _version(state, facts, "mlx_lm", versions),
        known(size(facts.disk_free_bytes) if facts and facts.disk_free_bytes is not None else None),
        known(skew, "$error" if facts is not None and node_state.skewed(facts) else ""),
        known(node_state.milliseconds(facts.round_trip_s) if facts else None),
        known(str(rank.rank) if rank else None),
        known(f"{rank.iteration:,}" if rank and rank.iteration is not None else None),
        known(_rss(state, values, rank)),
        known(probed, "$warning" if old else MUTED),
        known(heard, "$warning" if values is None else MUTED),
    )


def _facts_age(state: DeckState, facts: NodeFacts | None) -> Age:
    """How old, and whether that is stale."""
    if facts is None:
        return None, False
    return _age(facts.probed_at, state), state.age_s(facts.probed_at) > FACTS_LIMIT_S


def _live_age(state: DeckState, values: NodeTelemetry | None) -> Age:
    if values is None or values.problem is not None:
        return None, values is not None
    return _age(values.at, state), state.age_s(values.at) > TELEMETRY_LIMIT_S


def _age(then: datetime, state: DeckState) -> str:
    """In whole steps: rows that all tick every second are neither calm nor cheap. The detail view has the second."""
    steps = max(0.0, state.age_s(then)) // AGE_STEP_S
    return age(then, then + timedelta(seconds=steps * AGE_STEP_S))


def _memory(state: DeckState, facts: NodeFacts | None, values: NodeTelemetry | None) -> str | None:
    if facts is None or not facts.memory_total_bytes:
        return None
    used = facts.memory_used_bytes
    if values is not None and values.memory_used_bytes is not None and values.at >= facts.probed_at:
        used = values.memory_used_bytes
    told = node_state.of_total(used, facts.memory_total_bytes)
    return told if used is None else f"{state.glyphs.bar(used / facts.memory_total_bytes, 6)} {told}"


def _temperature(state: DeckState, values: NodeTelemetry | None) -> str | None:
    """Of the hotter of CPU and GPU."""
    found = [t for t in (values.cpu_temperature_c, values.gpu_temperature_c) if t is not None] if values else []
    return f"{max(found):.0f}{state.glyphs.degrees}" if found else None


def _rss(state: DeckState, values: NodeTelemetry | None, rank: RankStatus | None) -> str | None:
    if values is None or rank is None or state.snapshot is None:
        return None
    run = state.snapshot.record.id
    return next((size(use.rss_bytes) for use in values.ranks if use.run_id == run and use.rank == rank.rank), None)


def _version(state: DeckState, facts: NodeFacts | None, field: str, versions: dict[str, str]) -> Content:
    """One that differs from the others' stands out by a sign and a colour."""
    value = getattr(facts, field, None)
    if value is None:
        return Content.styled(state.glyphs.none, MUTED)
    if value == versions.get(field):
        return Content(value)
    return Content.styled(f"{'!=' if state.glyphs.ascii else '≠'}{value}", "$error")


def _skew(seconds: float) -> str:
    """ "+3 ms" or "-2.4 s"; what is below the round trip is noise, and still what was measured."""
    return f"{seconds:+.1f} s" if abs(seconds) >= 1 else f"{seconds * 1000:+.0f} ms"


def _whole(rdma: str) -> bool:
    first, _, rest = rdma.partition("/")
    return rest.startswith(f"{first} ")
