"""The ring as it is joined, drawn in one or a few lines of text; what no one has measured is said to be so."""

from __future__ import annotations

from collections.abc import Sequence

from tui.glyphs import Glyphs


def ring(nodes: Sequence[str], backend: str, width: int, glyphs: Glyphs) -> list[str]:
    """Nodes in ring order with their links, closed to the first again; broken into lines of `width` cells."""
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
