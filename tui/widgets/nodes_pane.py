"""Pane 1: the table of nodes with facts, telemetry, rank and the newest sign of life, and the details of the selected
node. A row is rebuilt only when something of its node has changed.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from textual.app import ComposeResult
from textual.containers import Container, VerticalScroll
from textual.content import Content

from engine import api
from tui import node_state
from tui.fixes import CheckFix, fix_for
from tui.formatting import age, memory, size
from tui.glyphs import MUTED, STALE, Glyph
from tui.node_state import node_names
from tui.state import DeckState
from tui.topology import least_width
from tui.widgets.node_detail import connections, detail
from tui.widgets.pane import Pane, RowList
from tui.widgets.text import Column, Table, Text

if TYPE_CHECKING:
    from engine.models import NodeFacts, NodeTelemetry
    from engine.snapshots import RankStatus


Cells = tuple[Content, ...]

HEADS: Final = (
    Column("node", priority=9),
    Column("state", priority=9, reserved=9),
    Column("chip", priority=3, optional=True),
    Column("gpu cores", priority=2, right=True, optional=True),
    Column("memory", priority=7),
    Column("gpu", priority=5, right=True, optional=True, reserved=4),
    Column("power", priority=3, right=True, optional=True),
    Column("temp", priority=2, right=True, optional=True, reserved=5),
    Column("system", priority=1, optional=True),
    Column("thunderbolt", priority=2, optional=True),
    Column("rdma", priority=6, optional=True),
    Column("python", priority=2, optional=True),
    Column("mlx", priority=5),
    Column("mlx-lm", priority=3, optional=True),
    Column("disk free", priority=2, right=True, optional=True),
    Column("clock", priority=3, right=True, optional=True),
    Column("round trip", priority=2, right=True, optional=True),
    Column("rank", priority=6, right=True, optional=True),
    Column("step", priority=5, right=True, optional=True),
    Column("in use", priority=4, right=True, optional=True),
    Column("seen", priority=8, right=True, reserved=6),
)
BRIEF: Final = frozenset({"gpu cores", "system", "thunderbolt", "python", "disk free", "temp", "clock"})
"""Left out on the dashboard, where the pane is narrow."""
_FIRST: Final = 8
AGE_STEP_S: Final = 5.0


class NodeRows:
    """The cells of every node, kept while nothing that they are made of has changed."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[tuple[object, ...], Cells]] = {}

    def of(
        self, state: DeckState, nodes: list[str], heads: tuple[Column, ...], sight: range | None = None
    ) -> dict[str, Cells]:
        """By node, in order. Rows out of `sight` are not made again for their ages alone, which change every second."""
        versions = node_state.reference(state)
        ranks = node_state.ranks_by_node(state)
        run = state.snapshot.record.id if state.snapshot is not None else None
        common = (state.glyphs, tuple(versions.items()), run, state.active, heads)
        rows = {}
        for number, node in enumerate(nodes):
            rank, facts, values = ranks.get(node), state.facts.get(node), state.telemetry.get(node)
            shown = node_state.condition(state, node, rank, versions)
            last = node_state.last_seen(state, node, rank)
            seen = None if last is None else _age(last, state)
            key = (common, rank, facts, values, shown, seen)
            drawn = self._rows.get(node)
            if drawn is None or not _same(drawn[0], key, ages=sight is None or number in sight):
                made = _cells(state, node, rank, versions, shown=shown, seen=seen)
                cells = dict(zip((head.title for head in HEADS), made, strict=True))
                drawn = self._rows[node] = (key, tuple(cells[head.title] for head in heads))
            rows[node] = drawn[1]
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


def heads(state: DeckState, *, full: bool) -> tuple[Column, ...]:
    """The columns of the full view, or of the dashboard's pane; versions that differ are shown before all else."""
    differ = {field.replace("_", "-") for field in node_state.differing(state)}
    ordered = (replace(head, priority=_FIRST) if head.title in differ else head for head in HEADS)
    return tuple(head for head in ordered if full or head.title not in BRIEF or head.priority == _FIRST)


def _cells(
    state: DeckState,
    node: str,
    rank: RankStatus | None,
    versions: dict[str, str],
    *,
    shown: tuple[Glyph, str],
    seen: str | None,
) -> Cells:
    facts, values = state.facts.get(node), node_state.live(state, node)
    none = Content.styled(state.glyphs.none, MUTED)

    def cell(text: str | None, style: str = "") -> Content:
        return none if text is None else Content.styled(text, style)

    def fact(name: str) -> str | None:
        value = getattr(facts, name, None)
        return None if value is None else str(value)

    skew = None if facts is None or facts.clock_skew_s is None else _skew(facts.clock_skew_s)
    rdma = node_state.rdma(facts) if facts else None
    return (
        Content(node),
        state.glyphs.state(*shown),
        cell(node_state.chip(facts) if facts else None),
        cell(fact("gpu_cores")),
        cell(_memory(state, facts, values)),
        cell(f"{values.gpu_use:.0%}" if values and values.gpu_use is not None else None),
        cell(f"{values.power_w:.0f} W" if values and values.power_w is not None else None),
        cell(_temperature(state, values)),
        cell(node_state.system(facts) if facts else None),
        cell(node_state.cabled(facts) if facts else None),
        cell(rdma, "$warning" if rdma is not None and not _whole(rdma) else ""),
        _version(state, facts, "python", versions),
        _version(state, facts, "mlx", versions),
        _version(state, facts, "mlx_lm", versions),
        cell(size(facts.disk_free_bytes) if facts and facts.disk_free_bytes is not None else None),
        cell(skew, "$error" if facts is not None and node_state.skewed(facts) else ""),
        cell(node_state.milliseconds(facts.round_trip_s) if facts else None),
        cell(str(rank.rank) if rank else None),
        cell(f"{rank.iteration:,}" if rank and rank.iteration is not None else None),
        cell(_in_use(state, values, rank)),
        cell(seen, shown[0].style if shown[0] is STALE else MUTED),
    )


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
    text = node_state.of_total(used, facts.memory_total_bytes)
    return text if used is None else f"{state.glyphs.bar(used / facts.memory_total_bytes, 5)} {text}"


def _temperature(state: DeckState, values: NodeTelemetry | None) -> str | None:
    """The hotter of CPU and GPU."""
    temperatures = [t for t in (values.cpu_temperature_c, values.gpu_temperature_c) if t is not None] if values else []
    return f"{max(temperatures):.0f}{state.glyphs.degrees}" if temperatures else None


def _in_use(state: DeckState, values: NodeTelemetry | None, rank: RankStatus | None) -> str | None:
    """The main memory of the node's rank."""
    if values is None or rank is None or state.snapshot is None:
        return None
    run = state.snapshot.record.id
    return next((memory(use.rss_bytes) for use in values.ranks if use.run_id == run and use.rank == rank.rank), None)


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


WIDE: Final = 110
"""From this room on a node and the topology stand side by side."""
GUTTER: Final = 3
TEXT_WIDTH: Final = 100
"""Cells of copied and saved text."""


class NodesPane(Pane):
    """The nodes of the configuration, else those of the shown run."""

    NAME = "nodes"
    NUMBER = "1"
    HINTS = ("enter", "fix", "shell", "recheck")
    UNSEEN = frozenset({"check", "checks", "checks_at", "has_log", "searching", "busy", "runs"})

    def __init__(self) -> None:
        super().__init__()
        self._cells = NodeRows()
        self._table = Table()
        self._run: str | None = None
        self._drawn: tuple[object, ...] = ()
        self._connected: tuple[object, ...] = ()

    def compose(self) -> ComposeResult:
        yield Text(id="nodes-head", classes="head")
        yield RowList(id="nodes-rows")
        with VerticalScroll(classes="detail", can_focus=False), Container(id="nodes-parts"):
            yield Text(id="nodes-detail")
            yield Text(id="nodes-connections")

    def on_row_list_moved(self, event: RowList.Moved) -> None:
        self.post_message(self.Selected(self.NAME, event.rows.selected))

    @property
    def opens(self) -> bool:
        return not (self.full and self.state.detail)

    def title(self, state: DeckState) -> str:
        title = ["nodes"]
        if state.detail and self.full and state.node:
            title.append(state.node)
        if state.probing:
            total = len(node_names(state))
            title.append(f"probing {total - len(state.unanswered)}/{total}")
        if state.frozen and state.listening:
            title.append("frozen")
        return state.glyphs.separator.join(title)

    def draw(self, state: DeckState) -> None:
        nodes = node_names(state)
        head, rows = self.query_one("#nodes-head", Text), self.query_one(RowList)
        alone = self.full and state.detail
        head.display = rows.display = not alone
        self.set_class(alone, "-alone")
        # The list that had the focus is not on the screen then; the keys still come here.
        self.set_class(alone and state.pane == self.NAME, "-keys")
        if not nodes:
            head.put(Content.styled(state.unconfigured, MUTED))
            rows.set_rows([])
            for part in ("#nodes-detail", "#nodes-connections"):
                self.query_one(part, Text).put(Content(""))
            return
        run = state.snapshot.record.id if state.snapshot is not None else None
        if run != self._run:
            self._run, self._table = run, Table()
        if not alone:
            shown, none = heads(state, full=self.full), state.glyphs.none
            line, lines = self._table.lay_out(
                shown, self._cells.of(state, nodes, shown, rows.in_sight), self.room, none=none
            )
            head.put(line)
            rows.set_rows(lines)
        if self.full and state.node in nodes:
            self._draw_detail(state, state.node)

    def _draw_detail(self, state: DeckState, node: str) -> None:
        """Both parts, each only when something in it has changed: 64 nodes report, one is shown."""
        room = self.room - 1
        left = (room - GUTTER) * 48 // 100
        right = room - GUTTER - left
        wide = room >= WIDE and (state.topology is None or least_width(state.topology) <= right)
        self.set_class(wide, "-wide")
        if not wide:
            left = right = room
        values, facts = state.telemetry.get(node), state.facts.get(node)
        shown: tuple[object, ...] = (node, left, facts, values, state.now, state.snapshot, state.topology, state.glyphs)
        if not _alike(shown, self._drawn):
            self._drawn = shown
            self.query_one("#nodes-detail", Text).put(detail(state, node, left))
        wired = (state.network_plan, state.network_problem, state.backend)
        links: tuple[object, ...] = (right, state.topology, *wired, state.probing, state.config, state.glyphs)
        if not _alike(links, self._connected):
            self._connected = links
            self.query_one("#nodes-connections", Text).put(connections(state, right))

    def move(self, name: str) -> bool:
        """With one node alone, left and right go to the one before and after; everything else scrolls."""
        rows = self.query_one(RowList)
        if not (self.full and self.state.detail):
            return super().move(name)
        if name in ("left", "right"):
            rows.move("up" if name == "left" else "down")
            self.query_one(".detail").scroll_home(animate=False)
            return True
        self.scroll_text(self.query_one(".detail"), name)
        return True

    def copy_text(self) -> str:
        """A node's fix where it has a problem with one, or a check that failed there, as a line for this machine's
        shell; else all that is known of the node."""
        facts = self.state.selected_facts
        if facts is not None and facts.problem:
            key = facts.host_key.fingerprint if facts.host_key else None
            return key or facts.fix or facts.problem
        fix = fix_for(self.state)
        if isinstance(fix, CheckFix) and self.state.config is not None:
            return api.as_shell_line(self.state.config, fix.commands) or ""
        return detail(self.state, self.state.node, TEXT_WIDTH).plain if self.state.node else self.text()

    def text(self) -> str:
        nodes, shown = node_names(self.state), heads(self.state, full=True)
        head, rows = Table().lay_out(shown, NodeRows().of(self.state, nodes, shown), 400)
        table = [line.plain.rstrip() for line in (head, *(line for _, line in rows))]
        details = [detail(self.state, node, TEXT_WIDTH) for node in nodes]
        return "\n\n".join(
            ["\n".join(table), connections(self.state, TEXT_WIDTH).plain, *(part.plain for part in details)]
        )


def _alike(now: tuple[object, ...], before: tuple[object, ...]) -> bool:
    """The same objects: comparing facts field by field costs more than drawing them."""
    return len(now) == len(before) and all(
        one is other or (isinstance(one, (int, str)) and one == other) for one, other in zip(now, before, strict=True)
    )
