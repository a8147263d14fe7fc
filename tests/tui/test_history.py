"""The history by keys: filter, order, marks, tags and notes, a description, deletion, and the comparison of runs."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from textual.content import Content
from textual.events import Key

from engine.errors import InputError
from engine.models import RunRecord, RunState
from engine.run.compare import Comparison, Difference
from engine.run.series.reader import RunSeries
from engine.snapshots import Deletion, ResultFile, RunResult, RunSnapshot, TrainedFile
from engine.store.layout import RunDir
from tests.tui import fake_engine
from tests.tui.conftest import SIZE, WIDE, Console, opened
from tests.tui.fake_engine import NOW, FakeEngine
from tests.unit.run.run_maker import report
from tui.formatting import cell_text
from tui.glyphs import Glyphs
from tui.state import DeckState
from tui.widgets import history_pane
from tui.widgets.chart import Chart, View, draw, read_picture
from tui.widgets.compare_pane import ComparePane, JointSeries, table_lines
from tui.widgets.history_pane import cells
from tui.widgets.pane import RowList
from tui.widgets.run_pane import RunPane
from tui.widgets.text import Text

FAILED, ABORTED, SUCCEEDED = "20260314-134500-demo-b71c", "20260314-132000-demo-5d20", "20260313-091532-demo-e84f"


@pytest.fixture
def runs(fake: FakeEngine) -> FakeEngine:
    return fake.add(fake_engine.failed(), fake_engine.aborted(), fake_engine.trained())


def described(console: Console) -> str:
    text = console.app.deck.history.query_one("#history-detail", Text)._put
    return text.plain if text is not None else ""


def listed(console: Console) -> list[str]:
    ids = (FAILED, ABORTED, SUCCEEDED)
    return [run for text in console.app.deck.history.query_one(RowList).texts for run in ids if run in text]


@pytest.mark.parametrize("size", SIZE)
async def test_a_filter_narrows_the_list_and_escape_removes_it(runs: FakeEngine, size: tuple[int, int]) -> None:
    async with opened(runs, size=size) as console:
        await console.press("5", "slash", *"state:failed", "enter")
        assert listed(console) == [FAILED]
        await console.shows("1 of 3 runs")
        await console.press("slash", *"loss<0 ", "enter")
        await console.shows("no run matches")
        await console.press("escape")
        assert listed(console) == [FAILED, ABORTED, SUCCEEDED]
        assert console.app.state.view == "history"


async def test_a_fault_of_a_filter_is_shown_beside_it_and_the_list_stays(runs: FakeEngine) -> None:
    async with opened(runs) as console:
        await console.press("5", "slash", *"lossy<3", "enter")
        await console.shows("runs have no 'lossy' (did you mean loss?)")
        assert listed(console) == [FAILED, ABORTED, SUCCEEDED]
        await console.press("escape")
        assert console.app.state.view == "history"


async def test_the_list_is_ordered_by_the_next_column_and_back(runs: FakeEngine) -> None:
    async with opened(runs) as console:
        await console.press("5", "o")
        await console.shows("by name")
        await console.press(*"oooo")
        await console.shows("by loss")
        assert listed(console) == [SUCCEEDED, ABORTED, FAILED]
        await console.press("O")
        assert listed(console) == [FAILED, ABORTED, SUCCEEDED]


async def test_tags_and_a_note_are_entered_and_shown(runs: FakeEngine) -> None:
    async with opened(runs) as console:
        await console.press("5", "T", *"night base", "enter")
        await console.until(lambda: runs.annotated == [(FAILED, ["base", "night"], [], None)], "the tags")
        await console.shows("base, night")
        await console.press("T", "backspace", "x", "space", "N", "enter")
        await console.until(lambda: len(runs.annotated) == 2, "the tags")
        assert runs.annotated[1] == (FAILED, ["N", "x"], ["base", "night"], None)
        await console.press("N", *"too fast", "enter")
        await console.until(lambda: runs.annotated[-1] == (FAILED, [], [], "too fast"), "the note")
        await console.shows("too fast")


async def test_what_is_no_tag_is_said_in_the_prompt(runs: FakeEngine) -> None:
    async with opened(runs) as console:
        await console.press("5", "T", *"a/b", "enter")
        await console.shows("not a valid name")
        assert runs.annotated == []


async def test_a_key_right_behind_the_enter_of_a_prompt_is_no_part_of_its_text(runs: FakeEngine) -> None:
    async with opened(runs) as console:
        await console.press("5")
        app = console.app
        for key in ("T", *"night", "enter", "N", *"good", "enter"):
            app.post_message(Key(key, key if len(key) == 1 else None))
        await console.until(lambda: len(runs.annotated) == 2, "the tag and the note")
        assert runs.annotated == [(FAILED, ["night"], [], None), (FAILED, [], [], "good")]


@pytest.mark.parametrize("size", SIZE)
async def test_enter_describes_a_run_and_enter_again_opens_it(runs: FakeEngine, size: tuple[int, int]) -> None:
    async with opened(runs, size=size) as console:
        await console.press("5", "G", "enter")
        await console.shows("/home/ana/adapters.safetensors")
        await console.shows("── train")
        assert f"flightdeck chat {SUCCEEDED}" in described(console)
        assert FAILED not in console.screen
        await console.press("k")
        await console.until(lambda: f"flightdeck resume {ABORTED}" in described(console), "the run before")
        await console.press("escape")
        assert listed(console) == [FAILED, ABORTED, SUCCEEDED] and console.app.state.view == "history"
        await console.press("enter", "enter")
        await console.until(lambda: console.app.state.view == "dashboard", "the run")
        await console.until(lambda: console.app.state.snapshot is not None, "the run")
        assert console.app.state.snapshot is not None and console.app.state.snapshot.record.id == ABORTED


async def test_the_curve_of_a_described_run_has_the_height_that_its_description_leaves(runs: FakeEngine) -> None:
    async with opened(runs, size=WIDE) as console:
        await console.press("5", "G", "enter")
        await console.shows("── train")
        assert console.app.deck.history.query_one(Chart).size.height > WIDE[1] / 2


@pytest.mark.parametrize("size", [*SIZE, (100, 30)])
async def test_a_description_and_a_checks_details_have_room_beside_their_scrollbar(
    fake: FakeEngine, size: tuple[int, int]
) -> None:
    run, checks = fake_engine.failed(), fake_engine.CHECKS
    settings = dict.fromkeys("abcdefghijklmnopqrstuvwxyz" * 2, 1)
    long = checks[0].model_copy(update={"evidence": {f"node-{n}": "y" * 500 for n in range(9)}})
    record = run.record.model_copy(update={"settings": settings, "cause": "x" * 3000})
    fake.add(replace(run, record=record, checks=(long, *checks[1:])))
    async with opened(fake, size=size) as console:
        for pane, keys in (("preflight", "2"), ("history", ("5", "enter"))):
            await console.press(*keys)
            detail = console.app.deck.pane(pane).query_one(".detail")
            await console.until(partial(getattr, detail, "show_vertical_scrollbar"), f"a scrollbar in {pane}")
            text = detail.query_one(Text)._put
            assert text is not None
            assert max(line.cell_length for line in text.split()) <= detail.scrollable_content_region.width


def test_a_comparison_says_why_runs_ended_in_words() -> None:
    ended = Difference("result", "why it ended", ("user_abort", "rank_killed", None))
    assert [cell_text(ended, value) for value in ended.values] == ["on request", "rank killed", "-"]


async def test_a_run_that_left_a_checkpoint_alone_is_described_with_the_commands_that_take_it(fake: FakeEngine) -> None:
    run = fake_engine.aborted()
    file = ResultFile("checkpoint", False, 40, "local-0", "/c/step-40/weights", "step-40/weights", 9, "0" * 64)
    parts = (("local-0", "/c/part0/step-40", "f"), ("local-1", "/c/part1/step-40", "f"))
    state = TrainedFile("/c/part0/step-40", 9, "local-0", f"flightdeck generate {ABORTED} -p Hello", None, parts, 40)
    fake.add(replace(run, trained=state, result=RunResult((file,), tokens=7)))
    async with opened(fake) as console:
        await console.press("5", "enter")
        await console.until(lambda: f"flightdeck chat {ABORTED}" in described(console), "the commands")
        assert f"flightdeck fetch {ABORTED} --checkpoint" in described(console)
        assert "checkpoint of iteration 40 (9 B), in 2 parts on local-0, local-1" in described(console)
        assert "u F fetches" not in described(console)


@pytest.mark.parametrize("size", SIZE)
async def test_marked_runs_are_compared(
    runs: FakeEngine, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[DeckState] = []
    async with opened(runs, size=size) as console:
        await console.press("5", "space", "space")
        await console.shows("2 marked")
        await console.press("enter")
        await console.shows("compare · 2 runs")
        await console.until(lambda: console.app.deck.chart.settled, "the curves")
        await console.shows("demo-b71c makes 1,226 tokens/s, 33% less than demo-5d20 (1,840)")
        pane = console.app.deck.query_one(ComparePane)
        text = pane.text()
        for part in ("its ranks were connected by ring, not jaccl", "learning_rate", "0.001", "0.0005", "demo-5d20"):
            assert part in text
        monkeypatch.setattr(RunPane, "draw", lambda pane, state: drawn.append(state))
        await console.press("m")
        await console.until(lambda: "validation loss" in console.screen, "the next metric")
        assert drawn == [], "nobody sees the run's pane"
        await console.press("P")
        await console.until(lambda: any("saved to" in text for text in console.notifications), "the picture")
        (file,) = (runs.home / "saved").glob("chart-*.svg")
        assert ">compare · 2 runs<" in file.read_text()
        await console.press("escape")
        assert console.app.state.view == "history"
        await console.press("escape")
        assert console.app.state.marked == ()


def test_at_80_columns_the_table_shows_two_runs_and_the_best() -> None:
    names = tuple(f"my-long-name-of-a-job-{number:04x}" for number in range(4))
    record = fake_engine.trained().record

    def lines(count: int) -> list[str]:
        values = [("configuration", "learning_rate"), ("result", "lowest train loss, smoothed")]
        rows = tuple(Difference(*of, tuple(1.0 + n for n in range(count)), 0) for of in values)
        return [line.plain for line in table_lines(Comparison((record,) * count, names[:count], rows, ()), 74)]

    head, *rows = lines(2)
    assert head.split()[-3:] == ["my-…-0000", "my-…-0001", "best"]
    assert len(rows) == 2 and all(row.split()[-1] == "my-…-0000" and "2" in row for row in rows)
    head, *_, note = lines(4)
    assert head.split()[-3:] == ["my-…-0000", "my-…-0001", "best"]
    assert note == "2 runs not shown: there is no room"


def test_runs_are_laid_over_one_another_on_an_axis_that_all_have(tmp_path: Path) -> None:
    sources = []
    for name, tokens in (("counted", 100), ("uncounted", None), ("empty", None)):
        directory = RunDir(tmp_path / name)
        directory.path.mkdir()
        rows = [report(n, 1.0) | {"trained_tokens": tokens and n * tokens} for n in range(1, 21)]
        directory.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows if name != "empty"))
        sources.append(RunSeries(directory))
    joint, alone = JointSeries("abc", sources, (0, 1, 2)), JointSeries("ac", sources[::2], (0, 2))
    for both in (joint, alone):
        both.refresh()
    assert (joint.extent("loss", "tokens"), alone.extent("loss", "tokens")) == ((1, 20), (100, 2000))
    shown = read_picture(joint, View(axis="tokens"), "loss", 100, ())
    assert shown.axis == "iterations"
    assert [[x for x, _ in curve.points] for curve in shown.curves] == [[*range(1, 21)], [*range(1, 21)], []]
    assert "iterations: tokens not recorded" in draw(shown, 100, 20, Glyphs()).plain
    assert read_picture(alone, View(axis="tokens"), "loss", 100, ()).axis == "tokens"


async def test_a_runs_colour_stays_when_another_is_pinned_or_compared(runs: FakeEngine) -> None:
    async with opened(runs) as console:
        await console.press("5", "space", "space", "enter")
        await console.shows("compare · 2 runs")

        def styles() -> dict[str, str]:
            reading = console.app.deck.chart.reading
            return {curve.name: curve.style for curve in reading.pictures[0].curves} if reading else {}

        await console.until(lambda: len(styles()) == 2, "the curves")
        before = styles()
        await console.press("p")
        await console.until(lambda: [*styles()] == ["demo-5d20", "demo-b71c"], "the other on top")
        assert styles() == before
        await console.press("escape", "escape", "j", "space", "g", "j", "space", "enter")
        await console.until(lambda: "demo-e84f" in styles(), "the other comparison")
        assert styles()["demo-5d20"] == before["demo-5d20"]
        assert len(set(styles().values())) == 2


@pytest.mark.parametrize("size", SIZE)
async def test_a_run_is_deleted_after_it_was_said_what_that_frees(runs: FakeEngine, size: tuple[int, int]) -> None:
    async with opened(runs, size=size) as console:
        await console.press("5", "ctrl+k")
        await console.shows("1.5 GB in")
        assert "kept" in console.screen and "~/adapters on ultra" in console.screen
        await console.press("enter")
        assert runs.deleted == [], "Cancel has the focus"
        await console.press("ctrl+k")
        await console.shows("1.5 GB in")
        await console.press("right", "enter")
        await console.until(lambda: runs.deleted == [FAILED], "the deletion")
        await console.until(lambda: listed(console) == [ABORTED, SUCCEEDED], "the list")


async def test_a_node_that_keeps_a_folder_is_named_after_the_deletion(runs: FakeEngine) -> None:
    runs.away = "no"
    async with opened(runs) as console:
        await console.press("5", "ctrl+k")
        await console.shows("stays: no")
        await console.press("right", "enter")
        await console.shows("not all was deleted")
        assert len(listed(console)) == 3 and runs.deleted == []
        await console.press("right", "enter")
        await console.until(lambda: runs.deleted == [FAILED], "the deletion here")


async def test_a_description_stays_where_its_run_is_not_deleted(
    runs: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = runs.delete

    async def refused(run: str, *, go: bool, anyway: bool = False) -> Deletion:
        if go:
            raise InputError("a queued item is to use it")
        return await delete(run, go=go)

    monkeypatch.setattr(runs, "delete", refused)
    async with opened(runs) as console:
        await console.press("5", "enter")
        await console.shows("first cause")
        await console.press("ctrl+k")
        await console.shows("1.5 GB in")
        await console.press("right", "enter")
        await console.until(lambda: console.notifications[-1:] == ["delete: a queued item is to use it"], "why")
        assert console.app.state.detail and listed(console) == [FAILED, ABORTED, SUCCEEDED]


async def test_a_run_that_goes_on_is_not_deleted(fake: FakeEngine) -> None:
    fake.add(fake_engine.running())
    async with opened(fake) as console:
        await console.press("5", "ctrl+k")
        assert console.notifications[-1:] == ["delete: 20260314-140126-demo-3f9a has not ended: ctrl+x stops it"]


async def test_of_two_thousand_runs_those_in_sight_are_laid_out(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = [
        RunSnapshot(
            record=fake_engine.record(f"run-{n:05d}", RunState.SUCCEEDED, created_at=NOW - timedelta(hours=n)),
            supervised=False,
            state_since=NOW,
        )
        for n in range(2_000)
    ]
    for snapshot in old:
        fake.put(snapshot)
    laid_out = set[str]()

    def counted(state: DeckState, run: RunRecord, *, marked: bool) -> list[Content]:
        laid_out.add(run.id)
        return cells(state, run, marked=marked)

    monkeypatch.setattr(history_pane, "cells", counted)
    async with opened(fake) as console:
        await console.press("5")
        await console.shows("run-00000")
        await console.press("G")
        await console.shows("run-01999")
        assert len(laid_out) < 200
        await console.press("slash", *"run-0077", "enter")
        await console.shows("10 of 2,000 runs")
