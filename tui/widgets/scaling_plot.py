"""A scaling as lines: its table, and the speed-up over the ranks with the ideal line, drawn as the loss is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from textual.content import Content

from tui.glyphs import FAIL, MUTED, Glyphs
from tui.scaling_text import HEADERS, problems, remarks, row, subject, verdict
from tui.widgets.plot import FRAME, TRAIN, Axis, Canvas, framed, labels_of, margin_of
from tui.widgets.text import Column, lay_out, pair

if TYPE_CHECKING:
    from engine.api import Scaling

_ROWS: Final = 9
"""Rows of the plot, without its axis."""
_WIDEST: Final = 64
_PRIORITIES: Final = (9, 4, 8, 4, 9, 9, 6, 3, 5, 7, 3, 2)
"""Priorities of the columns of the table."""
_INDENT: Final = 16


def scaling_lines(scaling: Scaling, age: str, width: int, glyphs: Glyphs) -> list[Content]:
    """Each at most `width` cells."""
    columns = [
        Column(title, cells, priority, right=True)
        for title, cells, priority in zip(
            HEADERS, zip(*(row(scaling, point) for point in scaling.points), strict=True), _PRIORITIES, strict=True
        )
    ]
    head, rows = lay_out(columns, width)
    lines = [pair("scaling", f"{age}, {subject(scaling)}", width, indent=_INDENT)]
    lines += [pair("", verdict(scaling), width, style="bold", indent=_INDENT), head, *rows]
    lines += draw_scaling(scaling, min(width, _WIDEST), _ROWS, glyphs)
    lines += [pair("note", note, width, indent=_INDENT) for note in remarks(scaling)]
    failed = [f"{ranks}: {why}" for ranks, why in problems(scaling)]
    return lines + [pair("not measured", text, width, style=FAIL.style, indent=_INDENT) for text in failed]


def draw_scaling(scaling: Scaling, width: int, rows: int, glyphs: Glyphs) -> list[Content]:
    """The plot, with a legend above `rows` rows and the numbers of ranks below; nothing for less than two numbers."""
    points = [(point.ranks, scaling.speed_up(point) or 0.0) for point in scaling.measured]
    if len(points) < 2:
        return []
    last = points[-1][0]
    upright = Axis(0.0, max(last, *(speed_up for _, speed_up in points)), rows * 4)
    labels = labels_of(upright)
    across = Axis(0, last, 2 * (width - margin_of(labels) - 1))
    canvas = Canvas(across.dots // 2, rows)

    def dot(ranks: float, speed_up: float) -> tuple[int, int]:
        return across.position(ranks), upright.dots - 1 - upright.position(speed_up)

    canvas.curve([dot(*point) for point in points], TRAIN)
    for x, y in (dot(*point) for point in points):
        for beside in (-1, 0, 1):
            canvas.dot(x + beside, y, TRAIN)
            canvas.dot(x, y + beside, TRAIN)
    canvas.curve([dot(0, 0), dot(last, last)], MUTED, "dotted")
    measured, ideal = ("-- speed-up", ".. ideal") if glyphs.ascii else ("── speed-up", "⠒⠂ ideal")
    legend = Content.assemble((measured, TRAIN), "   ", (ideal, FRAME), "   ", ("over ranks", FRAME))
    return [legend.right(width), *framed(canvas, labels, across, glyphs)]
