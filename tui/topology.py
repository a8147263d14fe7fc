"""The cluster's topology drawn as text: a box per node and a line per Thunderbolt cable. A cluster without cables is
one line of its nodes in ring order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tui.glyphs import Glyphs

if TYPE_CHECKING:
    from engine.models import Cable, Topology

LISTED: Final = 12
"""Cables, pairs or strangers that are listed before the rest is counted."""
DRAWN: Final = 16
"""Nodes of a drawing that a person can still read."""
_NAME: Final = 16
_NARROW_LANE: Final = 2
"""Cells of a cable's lane without room for its interfaces' names."""


@dataclass(frozen=True)
class _Lane:
    """A column of cables, none of which touches another one of it: from node index to node index, ascending."""

    cables: tuple[tuple[int, int, Cable], ...]

    def takes(self, top: int, bottom: int) -> bool:
        return all(bottom < a or b < top for a, b, _ in self.cables)

    def passes(self, node: int) -> bool:
        """A cable runs by the node without ending there."""
        return any(a < node < b for a, b, _ in self.cables)

    def below(self, node: int) -> Cable | None:
        """The cable that starts at the node and goes down."""
        return next((cable for a, _, cable in self.cables if a == node), None)

    def above(self, node: int) -> Cable | None:
        """The cable that ends at the node, from above."""
        return next((cable for _, b, cable in self.cables if b == node), None)


@dataclass(frozen=True)
class _Pen:
    """The characters of one alphabet."""

    corners: tuple[str, str, str, str]
    across: str
    down: str
    port: str
    crossing: str
    starts: tuple[str, str]
    """A cable going down, with the line going on to the right, and as its end."""
    ends: tuple[str, str]


@dataclass(frozen=True)
class _Cabling:
    """The cables beside the boxes."""

    lanes: Sequence[_Lane]
    cells: int
    """Width of a lane."""
    named: bool
    """There is room for the interfaces' names."""
    pen: _Pen

    def beside_edge(self, node: int, *, upper: bool) -> str:
        """Beside a box's upper or lower edge: cables that run there, and the interface of one that does not."""
        parts = ["  "]
        for lane in self.lanes:
            runs = lane.passes(node) or bool(lane.above(node) if upper else lane.below(node))
            starts = lane.below(node) if upper else lane.above(node)
            text = self.pen.down if runs else ""
            if starts is not None and self.named and not runs:
                # a is the upper end, since it comes first.
                text = (starts.a_device if upper else starts.b_device) or ""
            parts.append(text.ljust(self.cells))
        return "".join(parts)

    def last_of(self, node: int) -> int:
        """The outermost lane with a cable of the node; -1 for none."""
        ends = (bool(lane.below(node) or lane.above(node)) for lane in self.lanes)
        return max((place for place, here in enumerate(ends) if here), default=-1)

    def beside_middle(self, node: int) -> str:
        """Beside a box's middle: its own line to the cables that end here, through those that run by."""
        pen, last = self.pen, self.last_of(node)
        parts = [pen.across * 2 if last >= 0 else "  "]
        for place, lane in enumerate(self.lanes):
            ending = place == last
            if lane.below(node) is not None:
                mark = pen.starts[ending]
            elif lane.above(node) is not None:
                mark = pen.ends[ending]
            elif lane.passes(node):
                mark = pen.crossing if place < last else pen.down
            else:
                mark = pen.across if place < last else " "
            parts.append(mark + (pen.across if place < last else " ") * (self.cells - 1))
        return "".join(parts)


_UNICODE: Final = _Pen(("╭", "╮", "╰", "╯"), "─", "│", "├", "┼", ("┬", "╮"), ("┴", "╯"))
_ASCII: Final = _Pen(("+", "+", "+", "+"), "-", "|", "+", "|", ("+", "+"), ("+", "+"))


def draw(topology: Topology, width: int, glyphs: Glyphs) -> list[str]:
    """The cables between the boxes, at most `width` cells; as a list where there is no room. Empty without any."""
    if not topology.cables:
        return []
    if len(topology.nodes) > DRAWN:
        return _listed([_cable_text(cable, glyphs) for cable in topology.cables], LISTED)
    lanes = _lanes(topology)
    label = max(len(name) for cable in topology.cables for name in (cable.a_device or "", cable.b_device or ""))
    for lane in dict.fromkeys((max(label + 2, 4), label + 1, _NARROW_LANE)):
        if _box(topology) + 2 + lane * len(lanes) <= width:
            cabling = _Cabling(lanes, lane, 0 < label < lane, _ASCII if glyphs.ascii else _UNICODE)
            return _drawn(topology, cabling, glyphs)
    return _listed([_cable_text(cable, glyphs) for cable in topology.cables], LISTED * 2)


def least_width(topology: Topology) -> int:
    """Cells that a drawing of it needs, 0 when there is none to draw."""
    if not topology.cables or len(topology.nodes) > DRAWN:
        return 0
    return _box(topology) + 2 + _NARROW_LANE * len(_lanes(topology))


def verdict(topology: Topology, glyphs: Glyphs, silent: Collection[str] = ()) -> list[tuple[str, str]]:
    """The cabling as label and text: its shape, the pairs without a cable, computers that are no node.
    Cables of `silent` nodes are left out."""
    nodes, pairs = len(topology.nodes), len(topology.nodes) * (len(topology.nodes) - 1) // 2
    if silent:
        named = ", ".join(_listed([node for node in topology.nodes if node in silent], LISTED))
        lines = [("cables", f"not all known: no facts of {named}")]
        if topology.strangers:
            lines.append(("other ends", ", ".join(_listed(list(topology.strangers), LISTED))))
        return lines
    shape = {
        "mesh": "mesh: every pair is cabled",
        "ring": "ring: the cables make a circle through all nodes",
        "unknown": "not known",
        "incomplete": f"incomplete: {len(topology.missing)} of {pairs} pairs have no cable, and there is no ring",
        "none": "no Thunderbolt cable between the nodes",
        "single": "one machine: no cable needed",
    }.get(topology.shape, topology.shape)
    lines = [("cables", shape)]
    if topology.missing and topology.cables and nodes > 2:
        dash = "-" if glyphs.ascii else "–"
        missing = _listed([f"{a}{dash}{b}" for a, b in topology.missing], LISTED)
        lines.append(("no cable" if topology.shape == "incomplete" else "for a mesh", ", ".join(missing)))
    lines += [("not known", f"{node}: {why}") for node, why in topology.unknown.items()]
    if topology.strangers:
        lines.append(("strangers", ", ".join(_listed(list(topology.strangers), LISTED))))
    return lines


def ring(nodes: Sequence[str], backend: str, width: int, glyphs: Glyphs) -> list[str]:
    """Nodes in rank order with their links, closed to the first again; broken into lines of `width` cells."""
    if len(nodes) == 1:
        return [f"{nodes[0]}  (one node: no link)"]
    link = f" --{backend}-- " if glyphs.ascii else f" ──{backend}── "
    back = "(back to the first)" if glyphs.ascii else "↩"
    lines, line = [], nodes[0]
    for part in [*nodes[1:], back]:
        if len(line) + len(link) + len(part) > width and line:
            lines.append(line)
            line = " " * 2
        line += (link if part != back else " ") + part
    return [*lines, line]


def _box(topology: Topology) -> int:
    """Cells of a box, wide enough for the longest name."""
    return min(_NAME, max(len(name) for name in topology.nodes)) + 4


def _lanes(topology: Topology) -> list[_Lane]:
    """Short cables first, each in the first lane that has room: the fewest crossings for a reader."""
    index = {node: number for number, node in enumerate(topology.nodes)}
    spans = []
    for cable in topology.cables:
        top, bottom = sorted((index[cable.a], index[cable.b]))
        spans.append((top, bottom, cable))
    lanes: list[_Lane] = []
    for top, bottom, cable in sorted(spans, key=lambda span: (span[1] - span[0], span[0])):
        place = next((number for number, lane in enumerate(lanes) if lane.takes(top, bottom)), None)
        if place is None:
            lanes.append(_Lane(((top, bottom, cable),)))
        else:
            lanes[place] = _Lane((*lanes[place].cables, (top, bottom, cable)))
    return lanes


def _drawn(topology: Topology, cabling: _Cabling, glyphs: Glyphs) -> list[str]:
    pen, box = cabling.pen, _box(topology)
    top_left, top_right, bottom_left, bottom_right = pen.corners
    lines = []
    for number, node in enumerate(topology.nodes):
        name = node if len(node) <= _NAME else node[: _NAME - 1] + ("." if glyphs.ascii else "…")
        edge = pen.across * (box - 2)
        middle = f"{pen.down} {name:<{box - 4}} {pen.port if cabling.last_of(number) >= 0 else pen.down}"
        lines += [
            top_left + edge + top_right + cabling.beside_edge(number, upper=True),
            middle + cabling.beside_middle(number),
            bottom_left + edge + bottom_right + cabling.beside_edge(number, upper=False),
        ]
    return [line.rstrip() for line in lines]


def _cable_text(cable: Cable, glyphs: Glyphs) -> str:
    link = "--" if glyphs.ascii else "──"
    return f"{cable.a} {cable.a_device or ''} {link} {cable.b_device or ''} {cable.b}".replace("  ", " ")


def _listed(parts: list[str], most: int) -> list[str]:
    return parts if len(parts) <= most else [*parts[:most], f"and {len(parts) - most} more"]
