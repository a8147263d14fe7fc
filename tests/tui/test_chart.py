"""The chart of a run by keys: metrics, axes, cursor, zoom, grid, and the same as a file."""

from __future__ import annotations

import resource
import struct
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from engine.errors import InputError
from engine.models import Reason
from engine.run.series.reader import SeriesChart, SeriesCurve
from engine.snapshots import AttemptStatus, ResultFile, RunResult, Series, TrainedFile, Verification
from tests.tui import fake_engine
from tests.tui.conftest import SIZES, Console, opened
from tests.tui.fake_engine import FakeEngine
from tui.chart_files import NO_PNG, write_chart
from tui.formatting import figure_text, memory
from tui.glyphs import Glyphs
from tui.state import DeckState
from tui.widgets.chart import ChartCurve, Picture, draw, picture
from tui.widgets.plot import ChartMark
from tui.widgets.run_summary import marks, rank_line


async def pressed(console: Console, *keys: str) -> Picture:
    """What is drawn after the keys."""
    await console.press(*keys)
    chart = console.app.deck.chart
    await console.until(lambda: chart.settled and chart.reading is not None and chart.reading.view == chart.view)
    assert chart.reading is not None
    return chart.reading.pictures[0]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_the_chart_goes_by_keys(fake: FakeEngine, size: tuple[int, int]) -> None:
    fake.add(fake_engine.running())
    async with opened(fake, size=size) as console:
        await console.shows("── train")
        await pressed(console, "4")
        assert (await pressed(console, "m")).metric == "learning rate"
        assert [(await pressed(console, "m")).metric for _ in range(2)] == ["throughput", "loss"]
        assert [(await pressed(console, "X")).window for _ in range(3)] == [(700, 28_700), (0, 40), (1, 41)]
        await console.shows("★ best validation")
        assert (await pressed(console, "L")).logarithmic
        assert len((await pressed(console, "L", "A")).curves[0].average) == 41
        assert (await pressed(console, "A", "plus")).window == (11, 31)
        assert (await pressed(console, "less_than_sign")).window == (1, 21)
        assert (await pressed(console, "greater_than_sign", "greater_than_sign", "greater_than_sign")).window == (
            21,
            41,
        )
        assert (await pressed(console, "minus")).window == (1, 41)
        assert (await pressed(console, "plus", "plus", "0")).window == (1, 41)
        assert (await pressed(console, "h")).cursor == 41
        shown = await pressed(console, "left", "h")
        assert shown.cursor == 39 and f"train {fake_engine.loss_at(39):.4g}" in shown.values
        await console.shows("iteration 39   train 1.266")
        assert (await pressed(console, "l")).cursor == 40
        assert (await pressed(console, "escape")).cursor is None
        assert console.app.state.view == "run"


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_the_grid_has_every_metric_and_the_whole_pane(fake: FakeEngine, size: tuple[int, int]) -> None:
    fake.add(fake_engine.running())
    async with opened(fake, size=size) as console:
        await console.shows("── train")
        await pressed(console, "4", "M")
        pane, chart = console.app.deck.pane("run"), console.app.deck.chart
        await console.until(lambda: chart.size.height == pane.content_size.height)
        seen = set[str]()
        for _ in range(3):
            await pressed(console, "m")
            assert chart.reading is not None
            seen |= {small.metric for small in chart.reading.pictures}
        assert seen == {"loss", "learning rate", "throughput"}
        await pressed(console, "escape")
        assert not chart.view.grid and console.app.state.view == "run"
        await console.shows("rank 0")


async def test_new_points_are_drawn_and_a_zoomed_end_is_followed(fake: FakeEngine) -> None:
    fake.add(run := fake_engine.running())
    async with opened(fake) as console:
        await console.shows("── train")
        await pressed(console, "4", "plus", "greater_than_sign", "greater_than_sign", "greater_than_sign")
        fake_engine.write_metrics(console.app.deck.chart._source._run_dir, fake_engine.series(51))  # type: ignore[union-attr]
        fake.put(replace(run, series=fake_engine.series(51)))
        chart = console.app.deck.chart
        await console.until(lambda: chart.reading is not None and chart.reading.pictures[0].window == (31, 51))


async def test_a_run_without_figures_says_so(fake: FakeEngine) -> None:
    fake.add(replace(fake_engine.running(), series=Series()))
    async with opened(fake) as console:
        await console.press("4", "m")
        await console.until(lambda: "metric: no figures yet" in console.notifications)


async def test_the_chart_is_saved_as_a_picture(fake: FakeEngine) -> None:
    fake.add(fake_engine.running())
    async with opened(fake) as console:
        await console.shows("── train")
        await pressed(console, "P")
        await console.until(lambda: any("saved to" in text for text in console.notifications))
        folder = fake.home / "saved"
        assert sorted(path.suffix for path in folder.glob("chart-*")) == [".png", ".svg"]


def chart_of(*labels: str) -> Picture:
    curves = [SeriesCurve(label, [(x, y + x / 10) for x in range(1, 61)], []) for y, label in enumerate(labels)]
    placed = (ChartMark(20, "checkpoint"), ChartMark(30, "lost node"))
    return replace(picture(SeriesChart("memory", "B", "time", tuple(curves)), (1, 60)), marks=placed)


def test_an_svg_has_each_curve_and_says_what_it_is(tmp_path: Path) -> None:
    write_chart([chart_of("rank 0", "<b>"), chart_of("a")], "a & b", tmp_path / "c.svg")
    root = ElementTree.parse(tmp_path / "c.svg").getroot()
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a & b", "rank 0", "<b>", "memory, B", "0:30", "v checkpoint   x lost node"} <= set(texts)
    lines = [element.get("points", "") for element in root.iter("{http://www.w3.org/2000/svg}polyline")]
    assert sum(line.count(",") == 60 for line in lines) == 3


def test_the_names_of_many_curves_stand_in_rows_in_colours_that_stay_theirs(tmp_path: Path) -> None:
    names = [f"a-job-of-some-name-{number:04x}" for number in range(50)]
    curves = tuple(SeriesCurve(name, [(1, 2.0), (9, 3.0)], [], place) for place, name in enumerate(names))
    colours = list[dict[str, str | None]]()
    for order in (curves, (*curves[3:], *curves[:3])):
        write_chart([picture(SeriesChart("loss", "", "iterations", order), (1, 9))], "t", tmp_path / "c.svg")
        root = ElementTree.parse(tmp_path / "c.svg").getroot()
        texts = list(root.iter("{http://www.w3.org/2000/svg}text"))
        colours.append({text.text or "": text.get("fill") for text in texts if text.text in names})
        places = [(float(text.get("x", 0)), float(text.get("y", 0))) for text in texts if text.text in names]
        assert len(set(places)) == 50 and all(x > 200 and y < float(root.get("height", 0)) for x, y in places)
        lines = [line.get("points", "") for line in root.iter("{http://www.w3.org/2000/svg}polyline")]
        plot = [points.split()[0].split(",") for points in lines if points][-50:]
        assert max(y for _, y in places) < min(float(y) for _, y in plot)
    assert colours[0] == colours[1]


def test_a_png_is_one(tmp_path: Path) -> None:
    write_chart([chart_of("rank 0", "rank 1")], "t", tmp_path / "c.png")
    data = (tmp_path / "c.png").read_bytes()
    assert data.startswith(b"\x89PNG") and struct.unpack(">2I", data[16:24]) == (2400, 1008)
    assert zlib.crc32(data) and len(data) > 10_000


def test_without_pillow_a_png_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InputError, match=NO_PNG.split(":")[0]):
        write_chart([chart_of("a")], "t", tmp_path / "c.png")
    with pytest.raises(InputError, match="ends in neither"):
        write_chart([chart_of("a")], "t", tmp_path / "c.gif")
    write_chart([chart_of("a")], "t", tmp_path / "c.svg")


@pytest.mark.parametrize("name", ["c.svg", "c.png"])
def test_a_chart_that_finds_no_room_leaves_the_one_before(name: str, tmp_path: Path) -> None:
    path, limits = tmp_path / name, resource.getrlimit(resource.RLIMIT_FSIZE)
    path.write_bytes(b"before")
    path.chmod(0o600)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="large"):
            write_chart([chart_of("a")], "t", path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (path.read_bytes(), [*tmp_path.iterdir()]) == (b"before", [path])
    link = tmp_path / f"link{path.suffix}"
    link.symlink_to(path)
    write_chart([chart_of("a")], "t", link)
    assert link.is_symlink() and path.stat().st_size > 100 and path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(OSError) as no_folder:
        write_chart([chart_of("a")], "t", tmp_path / "none" / name)
    assert no_folder.value.filename == str(tmp_path / "none" / name)


def test_of_many_curves_each_has_a_letter_at_its_end() -> None:
    rows = draw(chart_of("ultra", "max", "mini"), 60, 14, Glyphs()).plain.splitlines()
    assert all(f"{tag} {name}" in rows[0] for tag, name in (("u", "ultra"), ("m", "max"), ("i", "mini")))
    assert [row[-1] for row in rows[1:-2] if row[-1].isalpha()] == ["i", "m", "u"]
    assert " 0 rank 0 " in draw(chart_of("rank 0", "rank 1", "rank 2"), 90, 14, Glyphs()).plain


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_the_chart_is_the_largest_thing_of_a_runs_view(fake: FakeEngine, size: tuple[int, int]) -> None:
    results = {"adapter": ResultFile("adapter", False, 60, "ana", "/a", "adapters.safetensors", 9, "0" * 64)}
    left = replace(
        fake_engine.succeeded(),
        result=RunResult(files=tuple(results.values()), tokens=42_307, seconds=44.6),
        trained=TrainedFile("/a/adapters.safetensors", 1_511_312, "ana", "python -m mlx_lm generate --model /m"),
        verification=(Verification("backend", True, "ring"), Verification("loss", True, "falling")),
    )
    fake.add(fake_engine.running(), fake_engine.aborted(), left)
    async with opened(fake, size=size) as console:
        await console.press("4")
        for run in list(fake.snapshots):
            if console.app.state.snapshot is None or run != console.app.state.snapshot.record.id:
                console.app.open_run(run)
            await console.until(lambda: console.app.state.snapshot is not None)
            await pressed(console, "m")
            pane, chart = console.app.deck.pane("run"), console.app.deck.chart
            await console.until(lambda: chart.size.height >= 0.45 * pane.content_size.height)  # noqa: B023
            assert chart.region.bottom <= pane.content_region.bottom


async def test_what_is_well_is_folded_until_the_pane_is_maximised(fake: FakeEngine) -> None:
    verified = (Verification("backend", True, "ring, 2 ranks"), Verification("GPU use", None, "on the CPU"))
    fake.add(run := replace(fake_engine.running(), verification=verified))
    async with opened(fake) as console:
        await console.press("4")
        await console.shows("✓ as expected: backend   ? not known: GPU use")
        assert "exchange" not in console.screen
        await console.press("z")
        await console.shows("ring, 2 ranks")
        assert "exchange" in console.screen
        await console.press("z")
        await console.shows("✓ as expected: backend   ? not known: GPU use")
        stale = replace(run.ranks[1], seen_at=fake_engine.ago(300))
        bad = Verification("loss", False, "not finite")
        fake.put(replace(run, ranks=(run.ranks[0], stale), verification=(*verified, bad)))
        await console.shows("not finite")
        await console.shows("exchange")


def test_many_ranks_are_counted_on_one_line() -> None:
    ranks = tuple(replace(fake_engine.ranks()[0], rank=rank, step_s=0.5 + rank / 100) for rank in range(64))
    snapshot = replace(fake_engine.running(), ranks=ranks)
    line = rank_line(DeckState(now=fake_engine.NOW, snapshot=snapshot), snapshot, 100).plain
    assert line == "64 ranks   0.500 to 1.130 s   rank 63 ← slowest   ▶ 64 training"


def test_a_validation_looks_the_same_before_there_is_a_report() -> None:
    def kinds(*labels: str) -> dict[str, tuple[str, str]]:
        curves = tuple(SeriesCurve(label, [(1.0, 1.0)], []) for label in labels)
        drawn = picture(SeriesChart("loss", "", "iterations", curves), (0, 1)).curves
        return {curve.name: (curve.kind, curve.style) for curve in drawn}

    assert kinds("validation")["validation"] == kinds("train", "validation")["validation"]


def test_a_lost_node_and_the_best_validation_are_marked() -> None:
    run = fake_engine.running()
    lost = AttemptStatus(1, ((0, "a"),), fake_engine.NOW, reason=Reason.NODE_LOST, reached=33)
    killed = replace(lost, number=2, reason=Reason.RANK_KILLED, reached=35)
    placed = marks(replace(run, attempts=(lost, killed)))
    assert (33, "lost node") in placed and 35 not in {iteration for iteration, _ in placed}
    best = min(run.series.val, key=lambda point: point[1])[0]
    assert [iteration for iteration, kind in placed if kind == "best validation"] == [best]


@pytest.mark.parametrize("logarithmic", [False, True])
@pytest.mark.parametrize("window", [(2.0**62, 2.0**62), (0.0, 1.0), (-(2.0**62), 2.0**62)], ids=str)
def test_numbers_of_any_size_are_drawn(window: tuple[float, float], logarithmic: bool, tmp_path: Path) -> None:
    heights = (5e-324, 1.0, 2.0**62)
    curve = ChartCurve("a", [(window[0], y) for y in heights[:2]] + [(window[1], heights[2])], "")
    drawn = Picture("loss", "", (curve,), window, logarithmic=logarithmic, cursor=window[1])
    assert "loss" in draw(drawn, 80, 20, Glyphs()).plain
    write_chart([drawn], "", tmp_path / "chart.svg")
    assert "nan" not in (tmp_path / "chart.svg").read_text()


def test_memory_has_the_same_figure_in_a_chart_as_in_a_pane_and_a_network_counts_in_thousands() -> None:
    assert figure_text(96 * 2**30, "B") == "96 GB" == memory(96 * 2**30)
    assert (figure_text(24 * 2**20, "B"), figure_text(2e9, "B/s")) == ("24 MB", "2 GB/s")
