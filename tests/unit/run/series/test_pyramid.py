"""A pyramid of minima and maxima holds what brute force finds, whatever is appended, cut or torn."""

from __future__ import annotations

import math
import struct
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.run.metrics import Curve
from engine.run.series.pyramid import FACTOR, PyramidReader, PyramidWriter, level_file
from engine.run.series.reader import columns, moving_average

HEIGHTS = st.floats(-1e12, 1e12) | st.just(math.nan)
CURVES = st.lists(HEIGHTS, min_size=1, max_size=700)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


def written(folder: Path, ys: list[float], step: int = 3) -> PyramidReader:
    for path in folder.glob("s.*"):
        path.unlink()
    writer = PyramidWriter(folder / "s")
    for number, y in enumerate(ys):
        writer.add(number * step, y)
    writer.flush()
    return PyramidReader(folder / "s", writer.count)


def finite(ys: list[float]) -> list[float]:
    return [y for y in ys if not math.isnan(y)]


@given(CURVES, st.integers(1, 60), st.data())
def test_blocks_hold_the_extremes_of_their_points(
    folder: Path, ys: list[float], least: int, data: st.DataObject
) -> None:
    reader = written(folder, ys)
    start = data.draw(st.integers(0, len(ys) - 1))
    stop = data.draw(st.integers(start + 1, len(ys)))
    rows = list(reader.blocks(start, stop, least).rows())
    assert len(rows) >= min(least, stop - start)
    assert len(rows) <= FACTOR * (least + 3) + FACTOR * 4
    begins = [round(row.x1 / 3) for row in rows]
    assert begins[0] <= start and all(first.x2 < second.x1 for first, second in pairwise(rows))
    covered = finite(ys[start:stop])
    shown = finite([y for row in rows for y in (row.y1, row.y2)])
    for extreme in (min, max):
        if covered:
            assert extreme(shown) == pytest.approx(extreme([*shown, *covered]), abs=0)
    points = {(number * 3.0, y) for number, y in enumerate(ys)}
    assert all((row.x1, row.y1) in points and (row.x2, row.y2) in points for row in rows if not math.isnan(row.y1))


@given(CURVES, st.integers(1, 40))
def test_columns_hold_the_extremes_of_brute_force(folder: Path, ys: list[float], width: int) -> None:
    reader = written(folder, ys)
    blocks = reader.blocks(0, len(ys), 3 * width)
    borders = [3.0 * (len(ys) - 1) / width * number for number in range(width + 1)]
    kept = columns(blocks, borders)
    assert len(kept) <= 2 * (width + 2)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
    assert all(math.isnan(y) or ys[round(x / 3)] == y for x, y in kept)
    heights = finite([y for _, y in kept])
    if finite(ys):
        assert (min(heights), max(heights)) == (min(finite(ys)), max(finite(ys)))
    else:
        assert not heights and kept
    if len(blocks.x1) <= width:
        return
    starts = [*blocks.x1, math.inf]
    for left, right in pairwise([-math.inf, *borders, math.inf]):
        mine = [number for number, x in enumerate(blocks.x1) if left <= x < right]
        if mine:
            begin, end = (starts[mine[0]], starts[mine[-1] + 1])
            brute = finite([y for number, y in enumerate(ys) if begin <= number * 3 < end])
            shown = finite([y for x, y in kept if begin <= x < end])
            if brute and not any(math.isnan(y) for y in ys):
                assert (min(shown), max(shown)) == (min(brute), max(brute))


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 90)), min_size=1, max_size=5))
def test_going_back_drops_what_was_there_as_a_curve_in_memory_does(folder: Path, lives: list[tuple[int, int]]) -> None:
    """Each life of a training begins at an iteration and makes some steps."""
    for path in folder.glob("s.*"):
        path.unlink()
    writer, curve, y = PyramidWriter(folder / "s"), Curve(), 0.0
    for begin, steps in lives:
        for x in range(begin, begin + steps):
            y += 1.0
            writer.add(x, y)
            curve.add(x, y)
    writer.flush()
    assert all_points(folder, writer.count) == [(float(x), y) for x, y in curve.points]
    assert_whole(folder, [y for _, y in curve.points])


def all_points(folder: Path, count: int) -> list[tuple[float, float]]:
    reader = PyramidReader(folder / "s", count)
    return [reader.point(number) for number in range(count)]


def assert_whole(folder: Path, ys: list[float]) -> None:
    """Each level has a block for each whole group of points, with their extremes."""
    level = 0
    while level_file(folder / "s", level).exists():
        size = 40 if level else 16
        whole = len(ys) // FACTOR**level
        assert level_file(folder / "s", level).stat().st_size == whole * size
        if level:
            rows = list(PyramidReader(folder / "s", len(ys)).records(level, 0, whole).rows())
            groups = [ys[number * FACTOR**level : (number + 1) * FACTOR**level] for number in range(whole)]
            assert [sorted((row.y1, row.y2)) for row in rows] == [[min(group), max(group)] for group in groups]
            assert [row.mean for row in rows] == pytest.approx([sum(group) / len(group) for group in groups])
        level += 1
    assert FACTOR**level > len(ys)


@given(st.integers(1, 600), st.integers(0, 600), st.integers(0, 39))
def test_what_a_kill_left_behind_the_known_points_is_cut_off(folder: Path, count: int, kept: int, torn: int) -> None:
    kept = min(kept, count)
    written(folder, [float(number % 97) for number in range(count)])
    with level_file(folder / "s", 0).open("ab") as file:
        file.write(b"\xff" * torn)
    writer = PyramidWriter(folder / "s", kept)
    for number in range(kept, count + 5):
        writer.add(number * 3, float(number % 97))
    writer.flush()
    assert_whole(folder, [float(number % 97) for number in range(count + 5)])


def test_a_pyramid_with_fewer_points_than_are_known_is_refused(folder: Path) -> None:
    written(folder, [1.0] * 100)
    with level_file(folder / "s", 1).open("r+b") as file:
        file.truncate(struct.calcsize("<5d") * 3)
    with pytest.raises(ValueError, match="fewer than 12 records"):
        PyramidWriter(folder / "s", 100)


def test_the_average_of_a_constant_is_the_constant_and_lags_behind_a_step(folder: Path) -> None:
    reader = written(folder, [1.0] * 100 + [2.0] * 100)
    average = moving_average(reader.blocks(0, 200, 200), 30.0)
    assert {y for _, y in average[:100]} == {1.0}
    after = [y for _, y in average[100:]]
    assert after == sorted(after) and after[0] < 1.2 and after[9] == pytest.approx(2 - math.exp(-1), abs=0.02)
    coarse = moving_average(reader.blocks(0, 200, 20), 30.0)
    assert coarse[-1][1] == pytest.approx(average[-1][1], abs=0.01)
