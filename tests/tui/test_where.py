"""Where a person is: what the console shows first, where esc leads, and that its parts say the same."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from engine.api import Engine
from engine.config.load import load_config
from engine.models import RunState
from engine.snapshots import RunSnapshot, Series
from engine.store.layout import RunDir
from tests.tui import fake_engine
from tests.tui.conftest import SIZE, SMALL, Console, opened
from tests.tui.fake_engine import NOW, FakeEngine, configuration
from tui.actions import bar
from tui.app import FlightDeckApp
from tui.formatting import span
from tui.state import DeckState
from tui.widgets.bars import header
from tui.widgets.plan_summary import overview
from tui.widgets.run_summary import figures


@pytest.mark.parametrize("size", SIZE)
async def test_in_the_morning_the_end_of_the_nights_run_is_shown_first(fake: FakeEngine, size: tuple[int, int]) -> None:
    fake.add(fake_engine.failed(), fake_engine.succeeded())
    async with opened(fake, size=size) as console:
        await console.until(lambda: console.app.state.snapshot is not None, "the run")
        await console.shows("first cause")
        await console.press("escape")
        await console.shows("ready to launch")


async def test_it_is_shown_in_the_view_that_was_opened_while_the_engine_was_loaded(fake: FakeEngine) -> None:
    fake.add(fake_engine.failed())
    loads = threading.Event()

    def engine() -> Engine:
        loads.wait(30)
        return fake.engine

    app = FlightDeckApp(engine, configuration(), clock=lambda: NOW)
    async with app.run_test(size=SMALL) as pilot:
        try:
            await pilot.press("5")
        finally:
            loads.set()
        await Console(app, pilot).until(lambda: app.state.snapshot is not None, "the run")
        assert app.state.view == "history"


async def test_it_is_shown_in_the_view_that_was_opened_while_it_was_read(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, goes_on, find = threading.Event(), threading.Event(), fake.add(fake_engine.failed()).find

    def slow(run: str) -> RunDir:
        asked.set()
        goes_on.wait(30)
        return find(run)

    monkeypatch.setattr(fake, "find", slow)
    async with opened(fake, size=SMALL) as console:
        try:
            await console.until(asked.is_set, "the reading")
            await console.press("5")
        finally:
            goes_on.set()
        await console.until(lambda: console.app.state.snapshot is not None, "the run")
        assert console.app.state.view == "history"


async def test_a_run_of_the_day_before_is_not(fake: FakeEngine) -> None:
    fake.add(fake_engine.succeeded())
    async with opened(fake) as console:
        await console.shows("ready to launch")
        assert console.app.state.snapshot is None


@pytest.mark.parametrize("size", SIZE)
async def test_esc_leads_back_to_the_history_from_which_a_run_was_opened(
    fake: FakeEngine, size: tuple[int, int]
) -> None:
    fake.add(fake_engine.succeeded())
    async with opened(fake, size=size) as console:
        await console.press("5", "enter", "enter")
        await console.until(lambda: console.app.state.snapshot is not None, "the run")
        await console.shows("esc history")
        await console.press("escape")
        assert console.app.state.view == "history" and console.app.state.snapshot is None
        await console.press("escape")
        await console.shows("ready to launch")


async def test_a_run_that_a_command_starts_is_shown_as_the_run(fake: FakeEngine) -> None:
    async with opened(fake) as console:
        await console.shows("ready to launch")
        fake.add(fake_engine.running())
        await console.until(lambda: console.app.state.active, "the run")
        await console.shows("step 41/60")
        assert "not shown" not in console.screen


async def test_a_run_that_a_command_starts_does_not_take_away_the_one_that_a_person_reads(fake: FakeEngine) -> None:
    fake.add(fake_engine.succeeded())
    async with opened(fake) as console:
        await console.press("5", "enter", "enter")
        await console.until(lambda: console.app.state.snapshot is not None, "the run")
        fake.add(fake_engine.running())
        await console.until(lambda: "has started: 5 lists it" in " ".join(console.notifications), "the notice")
        assert not console.app.state.active
        await console.press("escape")
        assert console.app.state.view == "history"


async def test_waiting_for_a_question_is_neither_loading_nor_nothing(
    fake: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file := tmp_path / "flightdeck.toml").write_text('[[node]]\n[job]\nmodel = "m"\ndata = "d"\n')
    monkeypatch.setattr(fake, "load_config", load_config)
    monkeypatch.setattr(fake, "is_accepted", lambda config, launch=False: False)
    monkeypatch.setattr(fake, "programs", lambda config: [("this machine", "/x/python")], raising=False)
    async with opened(fake, config=file) as console:
        await console.until(lambda: not console.on_deck, "the question")
        state = console.app.state
        assert "waiting for your answer" in header(state, 120).plain
        assert "loading" in header(DeckState(), 120).plain
        assert "no configuration" in header(replace(state, asking=False), 120).plain
        await console.press("escape")
        await console.shows("was not accepted")


def test_the_arrow_is_of_the_smoothed_loss() -> None:
    def arrow(*losses: float) -> str:
        series = Series(train=tuple(enumerate(losses)))
        state = DeckState(now=fake_engine.NOW, ready=True, snapshot=replace(fake_engine.running(), series=series))
        text = header(state, 200).plain.split("loss ")[1]
        return "".join(glyph for glyph in (state.glyphs.down, state.glyphs.up) if glyph in text.split("   ")[0])

    down, up = DeckState().glyphs.down, DeckState().glyphs.up
    falling = [3 - 0.1 * step for step in range(20)]
    assert arrow(*falling[:-1], falling[-2] + 0.05) == down, "one report that is higher turns nothing"
    assert arrow(*reversed(falling)) == up
    assert arrow(2.0) == arrow(2.0, 2.0) == ""


def test_the_header_says_that_the_loss_is_not_finite() -> None:
    running = fake_engine.running()
    diverged = replace(running, series=replace(running.series, not_finite=(40, 60)))
    text = header(DeckState(now=fake_engine.NOW, ready=True, snapshot=diverged), 200).plain
    assert "loss not finite since 40   " in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(19.9, "19 s"), (61, "1 min"), (7380, "2 h 03 min"), (100_800, "1 d 4 h"), (None, "-")]
)
def test_the_time_left_has_its_unit(seconds: float | None, text: str) -> None:
    assert span(seconds) == text


async def test_without_a_configuration_the_history_is_shown_where_there_is_one(fake: FakeEngine) -> None:
    fake.add(fake_engine.succeeded())
    async with opened(fake, config=None) as console:
        await console.until(lambda: console.app.state.view == "history", "the history")
        assert console.on_deck
        await console.press("escape")
        await console.shows("flightdeck init  writes a configuration")
    fake.snapshots.clear()
    fake.add(fake_engine.failed())
    async with opened(fake, config=None, size=SMALL) as console:
        await console.shows("first cause")


@pytest.mark.parametrize("run", [fake_engine.running(), fake_engine.aborted()], ids=["running", "ended"])
def test_nothing_is_said_of_a_prediction_that_nobody_made(run: RunSnapshot) -> None:
    text = figures(DeckState(now=fake_engine.NOW, ready=True, snapshot=run), run, 160).plain
    assert "speed 1,840 tok/s" in text and "predicted" not in text


async def test_a_task_from_which_esc_led_back_is_not_shown_again_by_itself(fake: FakeEngine) -> None:
    fake.add(fake_engine.trained())
    task, source = fake_engine.task("fuse", RunState.RUNNING), fake_engine.trained().record.id
    async with opened(fake, follow=source) as console:
        await console.until(lambda: console.app.state.snapshot is not None, "the run")
        fake.add(task)
        console.app.open_run(task.record.id)
        console.app.open_run(source)
        await console.until(lambda: len(console.app.state.runs or ()) == 2, "the task among the runs")
        assert console.app._shown == source


def test_while_it_launches_nothing_is_said_to_be_impossible() -> None:
    state = DeckState(now=fake_engine.NOW, ready=True, config=fake_engine.configuration(), busy="launching")
    text = "\n".join(line.plain for line in overview(state, 80))
    assert "launching: its run is shown in a moment" in text and "cannot" not in text


def test_an_ended_run_without_a_configuration_leaves_room_for_quit_at_80_columns() -> None:
    state = DeckState(now=fake_engine.NOW, ready=True, snapshot=fake_engine.trained())
    assert {"chat", "again", "quit"} <= {action.id for action in bar(state)} and all(
        action.id != "demo" for action in bar(state)
    )
