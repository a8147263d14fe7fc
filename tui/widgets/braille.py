"""A canvas of braille dots (2 × 4 in a cell), with a theme colour per cell and an ASCII fallback.

Why not plotext (6.1 was tried): it draws on one figure per process held by a compiled kernel, and returns escape
codes over a background of its own; here every cell takes the theme's own variables, ticks stand on round
iterations, marks stand on the axis, and nothing is imported, parsed or shared.
"""

from __future__ import annotations

from typing import Final

from textual.content import Content

_DOTS: Final = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of a dot by its row and column within the cell."""
_ASCII_ROWS: Final = ("'", "-", "-", ".")
_BLANK: Final = 0x2800


class Canvas:
    """`width` × `height` cells; dots count from the top left, (0, 0) to (2·width - 1, 4·height - 1)."""

    def __init__(self, width: int, height: int) -> None:
        self.width = width
        self.height = height
        self._masks = [[0] * width for _ in range(height)]
        self._styles = [[""] * width for _ in range(height)]

    def dot(self, x: int, y: int, style: str) -> None:
        """Set one dot; outside the canvas nothing happens."""
        column, row = x >> 1, y >> 2
        if 0 <= column < self.width and 0 <= row < self.height:
            self._masks[row][column] |= _DOTS[y & 3][x & 1]
            self._styles[row][column] = style

    def line(self, start: tuple[int, int], end: tuple[int, int], style: str, *, dotted: bool = False) -> None:
        """A straight line, both ends set (Bresenham); `dotted` sets every third dot only."""
        (x, y), (end_x, end_y) = start, end
        run, rise = abs(end_x - x), -abs(end_y - y)
        step_x, step_y = (1 if end_x > x else -1), (1 if end_y > y else -1)
        error = run + rise
        while True:
            if not dotted or (x + y) % 3 == 0 or (x, y) in (start, end):
                self.dot(x, y, style)
            if (x, y) == (end_x, end_y):
                return
            doubled = 2 * error
            if doubled >= rise:
                error += rise
                x += step_x
            if doubled <= run:
                error += run
                y += step_y

    def row(self, number: int, *, ascii: bool = False) -> Content:
        """One line of cells as coloured text."""
        parts: list[str | tuple[str, str]] = []
        for mask, style in zip(self._masks[number], self._styles[number], strict=True):
            text = _ascii(mask) if ascii else (chr(_BLANK + mask) if mask else " ")
            if parts and isinstance(parts[-1], tuple) and parts[-1][1] == style:
                parts[-1] = (parts[-1][0] + text, style)
            else:
                parts.append((text, style))
        return Content.assemble(*parts)


def _ascii(mask: int) -> str:
    if not mask:
        return " "
    rows = [index for index, (left, right) in enumerate(_DOTS) if mask & (left | right)]
    return "|" if len(rows) > 2 else _ASCII_ROWS[rows[0]]
