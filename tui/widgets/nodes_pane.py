"""Pane 1: every node with what the last probe saw, its rank and step, and how old each fact is."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from tui.formatting import age, size
from tui.glyphs import FAIL, MUTED, OK, RUNNING, STALE, UNKNOWN, Glyph
from tui.state import FACTS_LIMIT_S, RANK_LIMIT_S, DeckState
from tui.widgets.columns import Column, lay_out
from tui.widgets.pairs import pair
from tui.widgets.pane import Pane
from tui.widgets.row_list import RowList
from tui.widgets.topology import ring

if TYPE_CHECKING:
    from engine.events import RankStatus
    from engine.models import NodeFacts

NOT_MEASURED = ("Thunderbolt", "RDMA", "clock skew", "link bandwidth and latency")
"""Facts of the full product that this release does not look at."""


class NodesPane(Pane):
    """The nodes of the configuration, else those of the shown run."""

    NAME = "nodes"
    NUMBER = "1"
    HINTS = ("enter", "recheck")

    def compose(self) -> ComposeResult:
        yield Static("", id="nodes-head", classes="head", markup=False)
        yield RowList(id="nodes-rows")
        with VerticalScroll(classes="detail", can_focus=False):
            yield Static("", id="nodes-detail", markup=False)

    def on_option_list_option_highlighted(self) -> None:
        self._detail()

    def title(self, state: DeckState) -> str:
        return "nodes" + (f"{state.glyphs.separator}probing" if state.probing else "")

    def draw(self, state: DeckState) -> None:
        nodes = node_names(state)
        if not nodes:
            said = "no nodes: there is no configuration" if state.ready else "loading"
            self.query_one("#nodes-head", Static).update(Content.styled(said, MUTED))
            self.query_one(RowList).set_rows([])
            self.query_one("#nodes-detail", Static).update("")
            return
        head, rows = lay_out(_columns(state, nodes, full=self.full), self.room)
        self.query_one("#nodes-head", Static).update(head)
        self.query_one(RowList).set_rows(list(zip(nodes, rows, strict=True)))
        self._detail()

    def _detail(self) -> None:
        if self.full and (name := self.query_one(RowList).selected):
            self.query_one("#nodes-detail", Static).update(_detail(self.state, name, self.room))

    def copy_text(self) -> str:
        name = self.query_one(RowList).selected
        return _detail(self.state, name, 100).plain if name else self.text()

    def text(self) -> str:
        head, rows = lay_out(_columns(self.state, node_names(self.state), full=True), 400)
        return "\n".join(line.plain.rstrip() for line in (head, *rows))


def node_names(state: DeckState) -> list[str]:
    """In rank order."""
    if state.config is not None:
        return [node.name for node in state.config.nodes]
    return list(dict.fromkeys(rank.node for rank in state.snapshot.ranks)) if state.snapshot else []


def _facts(state: DeckState, node: str) -> NodeFacts | None:
    return next((facts for facts in state.facts if facts.node == node), None)


def _rank(state: DeckState, node: str) -> RankStatus | None:
    ranks = state.snapshot.ranks if state.snapshot is not None else ()
    return next((rank for rank in ranks if rank.node == node), None)


def condition(state: DeckState, node: str) -> tuple[Glyph, str]:
    """The node's state in a word: ok, stale, unreachable, unknown; a silent rank of a running run is stale."""
    rank, facts = _rank(state, node), _facts(state, node)
    if rank is not None and state.active and rank.phase in ("training", "validating", "saving") and rank.seen_at:
        return (STALE, "silent") if state.age_s(rank.seen_at) > RANK_LIMIT_S else (OK, "ok")
    if facts is None:
        return (RUNNING, "probing") if state.probing else (UNKNOWN, "not probed")
    if facts.problem:
        return FAIL, "fail"
    return (STALE, "stale") if state.age_s(facts.probed_at) > FACTS_LIMIT_S else (OK, "ok")


def _columns(state: DeckState, nodes: Sequence[str], *, full: bool) -> list[Column]:
    facts = [_facts(state, node) for node in nodes]
    ranks = [_rank(state, node) for node in nodes]
    none, marks = state.glyphs.none, [condition(state, node) for node in nodes]

    def known(name: str) -> list[str]:
        return [str(getattr(fact, name, None) or none) for fact in facts]

    columns = [
        Column("node", list(nodes), 9),
        Column("state", [state.glyphs.state(glyph, word) for glyph, word in marks], 9),
        Column("chip", [_chip(fact) or none for fact in facts], 3),
        Column("memory", [_memory(state, fact) for fact in facts], 7),
        Column("python", _versions(state, facts, "python"), 2),
        Column("mlx", _versions(state, facts, "mlx"), 6),
        Column("mlx-lm", _versions(state, facts, "mlx_lm"), 4),
        Column("os", known("os"), 1),
        Column("disk free", [size(fact.disk_free_bytes) if fact else none for fact in facts], 1, right=True),
        Column("round trip", [_round_trip(fact) or none for fact in facts], 1, right=True),
        Column("rank", [str(rank.rank) if rank else none for rank in ranks], 6, right=True),
        Column("step", [_step(rank) or none for rank in ranks], 5, right=True),
        Column("age", [_age(state, fact, rank) for fact, rank in zip(facts, ranks, strict=True)], 8, right=True),
    ]
    return columns if full else [column for column in columns if column.title not in ("python", "os", "disk free")]


def _chip(facts: NodeFacts | None) -> str | None:
    if facts is None:
        return None
    cores = f"{facts.cores} cores" if facts.cores else ""
    return " ".join(part for part in (facts.chip or facts.gpu, cores) if part) or None


def _memory(state: DeckState, facts: NodeFacts | None) -> str:
    if facts is None or not facts.memory_total_bytes:
        return state.glyphs.none
    total = size(facts.memory_total_bytes)
    if facts.memory_used_bytes is None:
        return total
    used = size(facts.memory_used_bytes)
    if used.split()[-1] == total.split()[-1]:
        used = used.split()[0]
    return f"{state.glyphs.bar(facts.memory_used_bytes / facts.memory_total_bytes, 6)} {used}/{total}"


def _versions(state: DeckState, facts: Sequence[NodeFacts | None], name: str) -> list[Content]:
    """Versions; one that differs from the first node's stands out by a sign and a colour."""
    values = [getattr(fact, name, None) for fact in facts]
    reference = next((value for value in values if value), None)
    differs = "!=" if state.glyphs.ascii else "≠"
    return [
        Content(value or state.glyphs.none)
        if value is None or value == reference
        else Content.styled(f"{differs}{value}", "$error")
        for value in values
    ]


def _round_trip(facts: NodeFacts | None) -> str | None:
    return None if facts is None or facts.round_trip_s is None else f"{facts.round_trip_s * 1000:.1f} ms"


def _step(rank: RankStatus | None) -> str | None:
    return None if rank is None or rank.iteration is None else f"{rank.iteration:,}"


def _age(state: DeckState, facts: NodeFacts | None, rank: RankStatus | None) -> Content:
    moment: datetime | None = facts.probed_at if facts else None
    if moment is None:
        return Content.styled(state.glyphs.none, MUTED)
    old = state.age_s(moment) > FACTS_LIMIT_S
    return Content.styled(age(moment, state.now), "$warning" if old else MUTED)


def _detail(state: DeckState, name: str, width: int) -> Content:
    """All that is known of one node, what is not, and how the nodes are joined."""
    facts, rank = _facts(state, name), _rank(state, name)
    glyph, word = condition(state, name)
    lines: list[Content] = [Content.assemble((name, "bold"), "  ", state.glyphs.state(glyph, word))]
    if facts is not None and facts.problem:
        lines.append(Content.styled(facts.problem, "$error"))
    if facts is not None:
        pairs = [
            ("host", facts.host),
            ("chip", _chip(facts)),
            ("memory", _memory(state, facts)),
            ("disk free", size(facts.disk_free_bytes) if facts.disk_free_bytes is not None else None),
            ("system", facts.os),
            ("python", facts.python),
            ("mlx / mlx-lm", " / ".join(part or state.glyphs.none for part in (facts.mlx, facts.mlx_lm))),
            ("backends", ", ".join(facts.backends) or None),
            ("round trip", _round_trip(facts)),
            ("probed", state.ago(facts.probed_at)),
        ]
        lines += [pair(label, value or "not measured", width) for label, value in pairs]
    if rank is not None:
        seen = f"{state.glyphs.separator}last heard {state.ago(rank.seen_at)}" if rank.seen_at else ""
        lines.append(pair("rank", f"{rank.rank}{state.glyphs.separator}{rank.phase}{seen}", width))
        lines.append(pair("step", _step(rank) or "none yet", width))
    lines.append(pair("not measured", ", ".join(NOT_MEASURED), width))
    if nodes := node_names(state):
        backend = state.snapshot.record.backend if state.snapshot else _backend(state)
        drawn = ring(nodes, backend, max(20, width - 16), state.glyphs)
        lines += [
            Content(""),
            *(pair("topology" if index == 0 else "", line, width) for index, line in enumerate(drawn)),
        ]
    return Content("\n").join(lines)


def _backend(state: DeckState) -> str:
    return "ring" if state.config is None or state.config.cluster.backend == "auto" else state.config.cluster.backend
