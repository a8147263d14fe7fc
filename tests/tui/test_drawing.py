"""What is drawn in cells: columns, bars, axes, curves, the header; widths hold for any content."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.app import App, ComposeResult
from textual.content import Content

from engine.cluster.topology import topology
from engine.run.series.reader import SeriesChart, SeriesCurve
from tests.tui import fake_engine, macs
from tui import topology as topology_drawing
from tui.glyphs import Glyphs
from tui.state import DeckState
from tui.topology import ring
from tui.widgets.bars import header
from tui.widgets.chart import ChartCurve, Picture, draw, picture
from tui.widgets.plot import Axis, Canvas, ChartMark, step_of, tick_text, tick_texts
from tui.widgets.run_summary import skew, slowest
from tui.widgets.text import Column, Text, justify, lay_out, pair

FINITE = st.floats(min_value=1e-6, max_value=1e6)
LOSSES = st.floats(min_value=1e-4, max_value=1e4)
TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30)


@given(st.lists(st.lists(TEXT, min_size=3, max_size=3), min_size=1, max_size=6), st.integers(10, 200))
def test_a_table_never_exceeds_its_width(cells: list[list[str]], width: int) -> None:
    columns = [Column(f"c{index}", texts, priority=index, grows=index == 0) for index, texts in enumerate(cells)]
    head, rows = lay_out(columns, width)
    assert all(line.cell_length <= width for line in (head, *rows))
    assert len(rows) == 3


def test_the_least_important_column_goes_first() -> None:
    columns = [Column("node", ["local-0"], 9), Column("chip", ["M3 Ultra"], 1), Column("rank", ["0"], 5)]
    assert lay_out(columns, 30)[0].plain.split() == ["node", "chip", "rank"]
    assert lay_out(columns, 18)[0].plain.split() == ["node", "rank"]


@given(TEXT, TEXT, st.integers(8, 120))
def test_a_justified_line_fits(left: str, right: str, width: int) -> None:
    if len(right) < width - 1:
        assert justify(Content(left), Content(right), width).cell_length == width


@given(st.floats(-1, 2), st.integers(1, 40), st.booleans())
def test_a_bar_is_as_wide_as_asked_and_grows_with_the_fraction(fraction: float, width: int, ascii: bool) -> None:
    glyphs = Glyphs(ascii=ascii)
    full = "#" if ascii else "▇"
    assert len(glyphs.bar(fraction, width)) == width
    assert glyphs.bar(fraction, width).count(full) <= glyphs.bar(min(1, fraction + 0.5), width).count(full)


@given(st.lists(FINITE, min_size=1, max_size=20), st.integers(1, 200), st.booleans())
def test_every_value_has_a_place_on_its_axis_in_order(values: list[float], dots: int, logarithmic: bool) -> None:
    axis = Axis.of(values, dots, logarithmic=logarithmic)
    places = [axis.position(value) for value in sorted(values)]
    assert places == sorted(places) and places[0] >= 0 and places[-1] < dots
    assert all(axis.low <= tick <= axis.high for tick in axis.ticks(5))


@given(st.floats(1e-6, 1e6))
def test_a_step_is_round_and_just_large_enough(rough: float) -> None:
    step = step_of(rough)
    mantissa = step / 10.0 ** math.floor(math.log10(step) + 1e-9)
    assert step >= rough * (1 - 1e-6) and step <= rough * 2.6
    assert any(math.isclose(mantissa, nice, rel_tol=1e-6) for nice in (1, 2, 5, 10))


def test_ticks_are_told_apart() -> None:
    assert [tick_text(value, 0.05) for value in (1.15, 1.2)] == ["1.15", "1.20"]
    assert tick_text(1000, 500) == "1,000"


@pytest.mark.parametrize(
    ("values", "logarithmic", "texts"),
    [
        ([1e-5], False, ["1e-05", "1.05e-05"]),
        ([5e-7, 0.0], False, ["0", "2e-07", "4e-07"]),
        ([1.23456, 1.23457], False, ["1.234565", "1.23457"]),
        ([1e-8, 1e-3], True, ["1e-08", "1e-07", "1e-06", "1e-05", "0.0001", "0.001"]),
        ([1e18, 3e18], False, ["1e+18", "2e+18", "3e+18"]),
        ([1e-11, 9e-10], True, ["1e-11", "1e-10"]),
        ([2e-11], True, ["2e-11", "2.1e-11"]),
    ],
)
def test_ticks_of_small_and_of_large_values_are_right(values: list[float], logarithmic: bool, texts: list[str]) -> None:
    assert [text for _, text in tick_texts(Axis.of(values, 60, logarithmic=logarithmic), 3)] == texts


@given(st.integers(0, 19), st.integers(0, 15), st.integers(0, 19), st.integers(0, 15))
def test_a_line_reaches_both_its_ends(x0: int, y0: int, x1: int, y1: int) -> None:
    canvas = Canvas(10, 4)
    canvas.curve(sorted([(x0, y0), (x1, y1)]), "")
    for x, y in ((x0, y0), (x1, y1)):
        assert canvas.row(y // 4).plain[x // 2] != " "


POINTS = st.lists(LOSSES, max_size=60).map(lambda values: tuple(enumerate(values, start=1)))


@given(POINTS, POINTS, st.tuples(st.integers(1, 160), st.integers(1, 40)), st.booleans(), st.booleans())
def test_the_plot_fits_its_room_whatever_the_series(
    train: tuple[tuple[int, float], ...],
    val: tuple[tuple[int, float], ...],
    size: tuple[int, int],
    logarithmic: bool,
    ascii: bool,
) -> None:
    width, height = size
    marks = (ChartMark(3, "checkpoint"), ChartMark(9, "restart"))
    shown = replace(losses(train, val), marks=marks, logarithmic=logarithmic)
    lines = draw(shown, width, height, Glyphs(ascii=ascii)).split("\n")
    if len(lines) > 1:
        assert len(lines) == height
        assert all(line.cell_length <= width for line in lines)
    if ascii:
        assert all(line.plain.isascii() for line in lines)


def losses(*curves: tuple[tuple[int, float], ...]) -> Picture:
    kinds = (("train", "solid"), ("validation", "dotted"))
    drawn = [ChartCurve(name, points, "$text", kind) for points, (name, kind) in zip(curves, kinds, strict=False)]
    steps = [step for points in curves for step, _ in points]
    return Picture("loss", "", tuple(drawn), (min(steps, default=0), max(steps, default=0)))


def test_a_legend_without_room_drops_its_marks_before_the_axis() -> None:
    marks = (ChartMark(2, "checkpoint"), ChartMark(3, "best validation"))
    drawn = replace(losses(((1, 2.0), (4, 1.0))), axis="tokens", marks=marks)
    head = draw(drawn, 40, 10, Glyphs()).plain.splitlines()[0]
    assert "tokens" in head and "best validation" not in head


def test_a_value_that_is_not_finite_is_a_gap() -> None:
    whole, gap = (((1, 1.0), (2, middle), (3, middle), (4, 1.0)) for middle in (1.0, math.nan))
    rows = [draw(losses(points), 60, 8, Glyphs()).plain for points in (whole, gap)]
    dots = [sum("\u2800" < character < "\u2900" for character in row) for row in rows]
    assert dots[0] > 50 and 0 < dots[1] < 4


def test_curves_are_told_apart_without_colour() -> None:
    levels = [SeriesCurve(f"rank {y}", [(1.0, float(y)), (60.0, float(y))], []) for y in range(4)]
    chart = SeriesChart("compute", "s", "iterations", tuple(levels))
    for glyphs in (Glyphs(), Glyphs(ascii=True)):
        text = draw(picture(chart, (1, 60)), 70, 20, glyphs).plain
        rows = [line.partition("┤")[2] or line.partition("│")[2] or line[4:] for line in text.splitlines()[1:-2]]
        lines = [row.strip() for row in rows if len(set(row.strip())) > 0 and row.strip()]
        assert sorted(row[-1] for row in lines) == ["0", "1", "2", "3"]
        assert len({row[:40] for row in lines}) == 4


@given(POINTS)
def test_a_curve_is_cut_at_the_edges_of_the_window(points: tuple[tuple[int, float], ...]) -> None:
    shown = replace(losses(points), window=(2.0, 3.0))
    assert all(line.cell_length <= 60 for line in draw(shown, 60, 12, Glyphs()).split("\n"))


def test_a_diverged_loss_is_left_out_of_the_plot_and_breaks_nothing() -> None:
    train = ((1, 2.0), (2, math.nan), (3, math.inf), (4, 1.0))
    assert "train" in draw(replace(losses(train), logarithmic=True), 60, 12, Glyphs()).plain


def test_checkpoints_and_restarts_are_marks_on_the_axis() -> None:
    series = fake_engine.series(60, restart=33)
    marks = tuple(ChartMark(mark.iteration, mark.kind) for mark in series.marks)
    text = draw(replace(losses(series.train, series.val), marks=marks), 80, 16, Glyphs()).plain
    axis = text.splitlines()[-2]
    assert axis.count("▾") == 3 and axis.count("↻") == 1


@given(st.integers(20, 240))
def test_the_header_is_one_line_of_its_width(width: int) -> None:
    state = DeckState(
        now=fake_engine.NOW, ready=True, config=fake_engine.configuration(), snapshot=fake_engine.running()
    )
    line = header(state, width)
    assert line.cell_length <= width and "\n" not in line.plain


@pytest.mark.parametrize(("width", "kept"), [(120, "ETA"), (80, "ETA"), (60, "running")])
def test_the_header_keeps_what_matters_most(width: int, kept: str) -> None:
    state = DeckState(
        now=fake_engine.NOW, ready=True, config=fake_engine.configuration(), snapshot=fake_engine.running()
    )
    assert kept in header(state, width).plain


@given(TEXT, st.integers(20, 120))
def test_a_label_hangs_beside_its_text(text: str, width: int) -> None:
    lines = pair("label", text, width, indent=8).split("\n")
    assert all(not line.plain[:8].strip() for line in lines[1:])


def test_the_slowest_rank_is_named_only_when_it_matters() -> None:
    assert slowest(fake_engine.ranks(seconds=(0.412, 0.471))) == 1
    assert slowest(fake_engine.ranks(seconds=(0.412, 0.415))) is None
    assert slowest(fake_engine.ranks()[:1]) is None


def test_who_was_slow_once_is_not_the_slowest() -> None:
    """Rank 0's last step took long; over the last steps rank 1 does."""
    once, always = fake_engine.ranks(seconds=(2.0, 0.47))
    ranks = (replace(once, typical_s=0.4), replace(always, typical_s=0.46))
    assert slowest(ranks) == 1
    share, rank = skew(ranks) or (0.0, -1)
    assert share == pytest.approx(0.15) and rank == 1
    assert skew((once, replace(always, step_s=None))) is None


def test_the_ring_is_drawn_closed() -> None:
    assert ring(["a", "b", "c"], "ring", 80, Glyphs()) == ["a ──ring── b ──ring── c ↩"]
    assert ring(["a"], "ring", 80, Glyphs()) == ["a  (one node: no link)"]
    assert all(len(line) <= 40 for line in ring([f"node-{n}" for n in range(8)], "ring", 40, Glyphs()))


@given(st.integers(2, 8), st.data(), st.booleans())
def test_a_drawn_topology_has_every_cable_and_fits_78_columns(count: int, data: st.DataObject, ascii: bool) -> None:
    cables = data.draw(st.lists(st.sampled_from(macs.mesh(count)), unique=True, max_size=28))
    found, glyphs = topology(macs.facts(count, cables)), Glyphs(ascii=ascii)
    drawn = topology_drawing.draw(found, 78, glyphs)
    assert bool(drawn) == bool(cables)
    assert all(len(line) <= 78 for line in drawn) and topology_drawing.least_width(found) <= 78
    if ascii:
        assert all(line.isascii() for line in drawn)
        return
    # Each cable begins once and ends once: at a corner or at a branch of a node's own line.
    beside = "".join(line[line.index("├") + 1 :] for line in drawn if "├" in line)
    assert sum(beside.count(mark) for mark in "┬╮") == sum(beside.count(mark) for mark in "┴╯") == len(cables)


def test_no_ascii_drawing_loses_what_the_other_has() -> None:
    mesh = topology(macs.facts())
    ours, plain = topology_drawing.draw(mesh, 78, Glyphs()), topology_drawing.draw(mesh, 78, Glyphs(ascii=True))
    assert [len(line) for line in ours] == [len(line) for line in plain]
    assert all("en3" in line for line in (ours[0], plain[0]))


def test_cables_of_a_node_that_did_not_answer_are_not_said_to_be_missing() -> None:
    shown = topology_drawing.verdict(
        topology([*macs.facts()[:3], macs.unreachable(macs.facts()[3])]), Glyphs(), {"air"}
    )
    assert shown[0] == ("cables", "not all known: no facts of air")
    assert "no cable" not in dict(shown)


@pytest.mark.parametrize(("wraps", "laid_out"), [(True, [True, True, True]), (False, [True, False, True])])
def test_a_text_is_laid_out_anew_only_where_it_may_take_other_room(
    monkeypatch: pytest.MonkeyPatch, wraps: bool, laid_out: list[bool]
) -> None:
    text, layouts = Text(id="text", wraps=wraps), list[bool]()
    monkeypatch.setattr(text, "update", lambda _, layout: layouts.append(layout))
    for lines in ("one", "one", "two", "two\nlines", "two\nlines"):
        text.put(Content(lines))
    assert layouts == laid_out


class Narrow(App[None]):
    """A text of the height of its content, twenty cells wide."""

    CSS = "Text { height: auto; width: 20; }"

    def compose(self) -> ComposeResult:
        yield Text(id="figures")


async def test_a_line_that_fits_takes_one_row_after_one_that_was_broken() -> None:
    app = Narrow()
    async with app.run_test() as pilot:
        text = app.query_one(Text)
        text.put(Content("val 1.400   lr 0.003   gradient 0.321"))
        await pilot.pause()
        assert text.size.height == 2
        text.put(Content("val 1.400   lr 0.003"))
        await pilot.pause()
        assert text.size.height == 1


async def test_a_text_put_twice_around_a_layout_takes_the_rows_of_the_second() -> None:
    app = Narrow()
    async with app.run_test() as pilot:
        text = app.query_one(Text)
        await pilot.pause()
        text.put(Content("rank 0\nrank 1"))
        # Something else has the screen laid out before the text's own idle event.
        app.screen._arrangement_cache.clear()
        app.screen._refresh_layout()
        text.put(Content("ranks"))
        await pilot.pause()
        assert text.size.height == 1
