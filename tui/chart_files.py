"""A chart as a file: SVG, or PNG where Pillow is installed (the extra `png`)."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, Final
from xml.sax.saxutils import escape

from engine.api import replacing
from engine.errors import InputError
from tui.formatting import axis_text
from tui.glyphs import Glyphs
from tui.widgets.chart import ChartCurve, Picture, curve_parts, finite_heights
from tui.widgets.plot import KINDS, Axis, mark_shape, tick_texts

WIDTH: Final = 1200
HEIGHT: Final = 480
"""Pixels of one chart with one row of names; several stand one above the other."""
COLUMNS: Final = 1100
_LEFT, _RIGHT, _TOP, _BOTTOM = 90, 20, 44, 40
_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#7A5C00", "#56B4E9")
"""Told apart by people who see few colours, too (Okabe and Ito, 2008; their yellow darker)."""
_DASHES: Final[dict[str, tuple[int, ...]]] = dict(zip(KINDS, ((), (2, 4), (9, 5), (9, 4, 2, 4)), strict=True))
_INK, _GRID = "#333333", "#DDDDDD"
_PLAIN: Final = Glyphs(ascii=True)
_TEXT_PX: Final = 14
_ROW_PX: Final = 20
"""From one row of the legend to the next."""
_PNG_SCALE: Final = 2
NO_PNG: Final = "a PNG needs Pillow: pip install 'mlx-flightdeck[png]'"

Pixel = tuple[float, float]


@dataclass(frozen=True)
class DrawnLine:
    places: Sequence[Pixel]
    colour: str
    width: float = 1.0
    dashes: tuple[int, ...] = ()


@dataclass(frozen=True)
class DrawnText:
    place: Pixel
    text: str
    anchor: str = "start"
    """ "start", "middle" or "end"."""
    colour: str = _INK


Shapes = list[DrawnLine | DrawnText]


def png_possible() -> bool:
    return importlib.util.find_spec("PIL") is not None


def write_chart(pictures: Sequence[Picture], title: str, path: Path) -> None:
    """Raises InputError for a name that ends in neither .svg nor .png, and for a PNG without Pillow; OSError."""
    if path.suffix not in (".svg", ".png"):
        raise InputError(f"{path.name} is no chart's name", why="it ends in neither .svg nor .png")
    if path.suffix == ".png" and not png_possible():
        raise InputError(NO_PNG, todo=f"{path.with_suffix('.svg').name} is written without")
    shapes: Shapes = [DrawnText((_LEFT, 18), title)]
    height = 24
    for picture in pictures:
        rows = _legend_rows(picture)
        shapes += _legend(rows, height)
        height += _ROW_PX * (len(rows) - 1)
        shapes += _shapes(picture, height)
        height += HEIGHT
    try:
        with replacing(path.resolve()) as file:
            if path.suffix == ".svg":
                file.write(_svg(shapes, height).encode())
            else:
                _write_png(shapes, height, file)
    except OSError as error:
        error.filename = str(path)
        raise


def _legend_rows(picture: Picture) -> list[list[ChartCurve]]:
    """The curves with a name, as many in a row as there is room for beside the title."""
    room = WIDTH - _LEFT - _RIGHT - _width(picture.title)
    rows, left = list[list[ChartCurve]]([[]]), room
    for curve in (curve for curve in picture.curves if curve.name):
        if rows[-1] and _width(curve.name) > left:
            rows.append([])
            left = room
        rows[-1].append(curve)
        left -= _width(curve.name)
    return rows


def _width(text: str) -> float:
    """Pixels of a text and of a sample beside it, about."""
    return _TEXT_PX * 0.6 * len(text) + 56


def _legend(rows: Sequence[Sequence[ChartCurve]], top: float) -> Shapes:
    shapes: Shapes = []
    for number, row in enumerate(rows):
        edge, base = float(WIDTH - _RIGHT), top + 20 + number * _ROW_PX
        for curve in reversed(row):
            colour, sample = _COLOURS[curve.place % len(_COLOURS)], edge - _width(curve.name) + 48
            shapes.append(DrawnText((edge, base), curve.name, "end", colour))
            shapes.append(DrawnLine([(sample - 28, base - 5), (sample, base - 5)], colour, 2, _DASHES[curve.kind]))
            edge = sample - 48
    return shapes


def _shapes(picture: Picture, top: float) -> Shapes:
    low, high = picture.window
    across = Axis.across(picture.window, WIDTH - _LEFT - _RIGHT, kind=picture.axis)
    heights, logarithmic = finite_heights(picture)
    if not heights:
        return [DrawnText((_LEFT, top + 40), f"no {picture.title} yet")]
    upright = Axis.of(heights, HEIGHT - _TOP - _BOTTOM, logarithmic=logarithmic)
    bottom, right = top + HEIGHT - _BOTTOM, WIDTH - _RIGHT

    def place(share: Pixel) -> Pixel:
        return _LEFT + share[0] * across.dots, bottom - share[1] * upright.dots

    shapes: Shapes = [DrawnText((_LEFT, top + 20), picture.title)]
    for tick, text in tick_texts(upright, 6):
        y = place((0, upright.share(tick)))[1]
        shapes += [DrawnLine([(_LEFT, y), (right, y)], _GRID), DrawnText((_LEFT - 8, y + 5), text, "end")]
    for tick in across.ticks(8):
        x = place((across.share(tick), 0))[0]
        shapes += [DrawnLine([(x, bottom), (x, bottom + 5)], _INK)]
        if float(tick).is_integer():
            shapes.append(DrawnText((x, bottom + 20), axis_text(picture.axis)(tick), "middle"))
    shapes += [DrawnText((right, bottom + 36), picture.axis, "end")]
    shapes.append(DrawnLine([(_LEFT, top + _TOP), (_LEFT, bottom), (right, bottom)], _INK))
    kinds = dict.fromkeys(mark.kind for mark in picture.marks)
    legend = "   ".join(f"{mark_shape(kind, _PLAIN)} {kind}" for kind in kinds)
    shapes.append(DrawnText((_LEFT, bottom + 36), legend))
    for mark in picture.marks:
        if low <= mark.x <= high:
            x = place((across.share(mark.x), 0))[0]
            shapes.append(DrawnLine([(x, top + _TOP), (x, bottom)], _GRID, 1.0, (3, 3)))
            shapes.append(DrawnText((x, bottom - 3), mark_shape(mark.kind, _PLAIN), "middle"))
    for curve in reversed(picture.curves):
        colour, dashes = _COLOURS[curve.place % len(_COLOURS)], _DASHES[curve.kind]
        band, line = (curve.points, curve.average) if curve.average else ((), curve.points)
        for points, width, pattern in ((band, 0.4, ()), (line, 1.6, dashes)):
            for part in curve_parts(points, across, upright):
                shapes.append(DrawnLine(list(map(place, part)), colour, width, pattern))
    return shapes


def _svg(shapes: Shapes, height: float) -> str:
    size = f'width="{WIDTH}" height="{height:g}" viewBox="0 0 {WIDTH} {height:g}"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="{_TEXT_PX}">']
    lines.append('<rect width="100%" height="100%" fill="white"/>')
    for shape in shapes:
        if isinstance(shape, DrawnText):
            x, y = shape.place
            style = f'text-anchor="{shape.anchor}" fill="{shape.colour}"'
            lines.append(f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(shape.text)}</text>')
        else:
            places = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.places)
            style = f'fill="none" stroke="{shape.colour}" stroke-width="{shape.width:g}"'
            style += f' stroke-dasharray="{" ".join(map(str, shape.dashes))}"' if shape.dashes else ""
            lines.append(f'<polyline points="{places}" {style}/>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _write_png(shapes: Shapes, height: float, file: BinaryIO) -> None:
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (WIDTH * _PNG_SCALE, int(height) * _PNG_SCALE), "white")
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(_TEXT_PX * _PNG_SCALE)
    anchors = {"start": "ls", "middle": "ms", "end": "rs"}
    for shape in shapes:
        if isinstance(shape, DrawnText):
            x, y = (value * _PNG_SCALE for value in shape.place)
            pen.text((x, y), shape.text, shape.colour, font, anchors[shape.anchor])
        else:
            for part in _dashed([(x * _PNG_SCALE, y * _PNG_SCALE) for x, y in shape.places], shape.dashes):
                pen.line(part, shape.colour, max(1, round(shape.width * _PNG_SCALE)))
    image.save(file, "PNG")


def _dashed(places: Sequence[Pixel], dashes: Sequence[int]) -> Iterator[list[Pixel]]:
    """The parts of a line that are drawn."""
    if not dashes:
        yield list(places)
        return
    number, left, part = 0, float(dashes[0] * _PNG_SCALE), list(places[:1])
    for start, end in pairwise(places):
        length, done = math.dist(start, end), 0.0
        while length - done > left:
            done += left
            share = done / length
            point = start[0] + (end[0] - start[0]) * share, start[1] + (end[1] - start[1]) * share
            if number % 2 == 0:
                yield [*part, point]
            number, part = number + 1, [point]
            left = float(dashes[number % len(dashes)] * _PNG_SCALE)
        left -= length - done
        part.append(end)
    if number % 2 == 0:
        yield part
