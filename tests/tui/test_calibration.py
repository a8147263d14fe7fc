"""Pane 3: what was measured as bars, what follows from it, measuring from the console, and stopping that."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.measurements import CalibrationProgress, LinkMeasure
from tests.tui import fake_engine
from tests.tui.conftest import DASHBOARD, SMALL, opened
from tests.tui.fake_engine import FakeEngine
from tui.actions import BY_ID, label
from tui.formatting import bandwidth, latency, spread, throughput
from tui.glyphs import Glyphs
from tui.state import DeckState
from tui.widgets.scaling_plot import scaling_lines
from tui.widgets.shares_pane import _lines, shares, speed_up, verdict

STEPS = [
    CalibrationProgress("local-0", "measuring", 60.0, 120.0, 16.0),
    CalibrationProgress("local-1", "loading", 0.0, 120.0),
]


@pytest.fixture
def calibrated(fake: FakeEngine) -> FakeEngine:
    fake.taken = fake_engine.calibration()
    return fake


@pytest.mark.parametrize("size", [DASHBOARD, SMALL])
async def test_a_bar_per_node_with_its_speed_its_spread_and_its_share(
    calibrated: FakeEngine, size: tuple[int, int]
) -> None:
    async with opened(calibrated, size=size) as console:
        await console.press("3")
        for text in ("calibration · 2 h ago", "16.4 ex/s", "±2 %", "58%", "5 of 8", "12.1 ex/s", "42%", "3 of 8"):
            await console.shows(text)
        await console.shows("48 µs, 8.1 GB/s")
        await console.shows("1.60 predicted")
        bars = [line.count("▇") for line in console.screen.splitlines() if " ex/s" in line and "local-" in line]
        assert len(bars) == 2 and bars[0] > bars[1] > 0


def test_the_link_of_the_preflight_is_cut_where_a_person_sees_it() -> None:
    state = DeckState(ready=True, config=fake_engine.configuration(), snapshot=fake_engine.running())
    whole, cut = (_lines(state, width, full=False)[-1].plain for width in (60, 40))
    assert whole.endswith("(preflight)") and whole.startswith(cut[:-1]) and cut.endswith("…")


async def test_the_dashboard_has_it_in_short(calibrated: FakeEngine) -> None:
    async with opened(calibrated, size=DASHBOARD) as console:
        for text in ("3 calibration · 2 h ago", "local-1", "±3 %", "predicted"):
            await console.shows(text)


async def test_the_full_view_tells_why_what_is_predicted_and_of_the_priority(calibrated: FakeEngine) -> None:
    async with opened(calibrated, size=DASHBOARD) as console:
        await console.press("3")
        for text in ("by the measured throughputs, which vary by 15%", "efficiency", "not on macOS", "31 MB"):
            await console.shows(text)


async def test_without_one_nothing_is_said_to_be_measured(fake: FakeEngine) -> None:
    async with opened(fake, size=DASHBOARD) as console:
        await console.press("3")
        await console.shows("calibration · not measured")
        await console.shows("hardware calibration missing, assuming equal performance")


async def test_an_old_one_is_shown_stale_and_its_shares_are_not_used(fake: FakeEngine) -> None:
    fake.taken = fake_engine.calibration(old_s=45 * 86_400)
    async with opened(fake, size=DASHBOARD) as console:
        await console.press("3")
        for text in ("stale, 45 d ago", "hardware calibration is 45 days old", "50%"):
            await console.shows(text)


async def test_what_could_not_be_measured_says_why(fake: FakeEngine) -> None:
    broken = LinkMeasure(nodes=("local-0", "local-1"), problem="a port was taken")
    fake.taken = fake_engine.calibration(speeds=(16.4, None), links=(broken,), all_ranks=broken)
    async with opened(fake, size=DASHBOARD) as console:
        await console.press("3")
        for text in ("ended without a result", "a port was taken", "– ex/s", "not predicted"):
            await console.shows(text)


async def test_a_node_that_finished_nothing_is_left_out_and_it_is_said(fake: FakeEngine) -> None:
    fake.taken = fake_engine.calibration(speeds=(16.4, 0.0))
    async with opened(fake, size=DASHBOARD) as console:
        await console.press("3")
        await console.shows("left out")
        await console.shows("local-1 completed no step during calibration")


@pytest.mark.parametrize(("key", "quick", "size"), [("c", False, DASHBOARD), ("C", True, SMALL)])
async def test_it_is_measured_from_the_pane_and_shown_as_it_goes(
    fake: FakeEngine, key: str, quick: bool, size: tuple[int, int]
) -> None:
    fake.steps = [*STEPS, fake_engine.calibration(old_s=0)]
    async with opened(fake, size=size) as console:
        await console.press("3", key)
        for text in ("measuring, 0 done", "16.0 ex/s", "loading", "c stop measuring"):
            await console.shows(text)
        assert fake.measurements == [quick]
        fake.measured.set()
        await console.shows("calibration · just now")
        assert console.app.state.busy is None


async def test_it_is_stopped_by_the_same_key_and_what_was_known_stays(calibrated: FakeEngine) -> None:
    calibrated.steps = [*STEPS, fake_engine.calibration(old_s=0)]
    async with opened(calibrated, size=DASHBOARD) as console:
        await console.press("3", "c")
        await console.shows("measuring, 0 done")
        await console.press("c")
        await console.shows("calibration · 2 h ago")
        await console.until(lambda: calibrated.stopped == 1, "the engine's end")
        assert console.app.state.busy is None and console.app.state.calibrating is None


async def test_while_a_run_goes_on_nothing_is_measured(fake: FakeEngine) -> None:
    fake.add(fake_engine.running())
    async with opened(fake, size=DASHBOARD) as console:
        await console.until(lambda: console.app.state.snapshot is not None, "the run")
        await console.press("3", "c")
        assert fake.measurements == []
        assert any("uses the nodes now" in text for text in console.notifications)


async def test_the_key_means_nothing_in_another_pane(fake: FakeEngine) -> None:
    fake.steps = [*STEPS, fake_engine.calibration(old_s=0)]
    async with opened(fake, size=DASHBOARD) as console:
        await console.press("1", "c", "C")
        assert fake.measurements == []


async def test_the_run_pane_has_predicted_beside_measured(calibrated: FakeEngine) -> None:
    run = replace(fake_engine.running(), division=fake_engine.division())
    calibrated.add(run)
    async with opened(calibrated, size=DASHBOARD, follow=run.record.id) as console:
        await console.press("4")
        await console.shows("predicted 1,910 tok/s (-4%)")
        await console.press("3")
        await console.shows("1.60 predicted, 1.56 measured")


async def test_the_plan_says_what_is_expected(calibrated: FakeEngine) -> None:
    async with opened(calibrated, size=DASHBOARD) as console:
        for text in ("local-0 58%, local-1 42%", "tok/s, speed-up 1.60", "by the measured throughputs"):
            await console.shows(text)


def test_shares_without_an_outlook_are_the_configurations() -> None:
    assert shares(DeckState()) is None
    assert shares(DeckState(config=fake_engine.configuration(shares=(3.0, None)))) == {"local-0": 0.75, "local-1": 0.25}


def test_a_speed_up_is_measured_only_where_there_was_a_prediction() -> None:
    run = fake_engine.running()
    assert speed_up(DeckState(snapshot=run)) is None
    divided = replace(run, division=fake_engine.division())
    assert speed_up(DeckState(snapshot=divided)) == pytest.approx(1840 / (1910 / 1.62))


def test_words_for_what_is_under_way() -> None:
    other_order = {step.what: step for step in reversed(STEPS)}
    rows = _lines(DeckState(config=fake_engine.configuration(), calibrating=other_order), 100, full=False)
    assert [row.plain.split()[0] for row in rows[:2]] == ["local-0", "local-1"], "as the configuration has them"
    measuring = DeckState(calibrating={"a": CalibrationProgress("a", "measured"), "b": CalibrationProgress("b", "x")})
    assert verdict(measuring) == "measuring, 1 done"
    assert label(BY_ID["calibrate"], measuring) == "stop measuring"
    assert label(BY_ID["calibrate"], DeckState()) == "calibrate"


def test_figures_as_people_write_them() -> None:
    assert [latency(s) for s in (None, 4.8e-5, 0.0123, 0.42)] == ["-", "48 µs", "12.3 ms", "0.42 s"]
    assert [throughput(e) for e in (None, 0.856, 16.44, 340.0)] == ["-", "0.86 ex/s", "16.4 ex/s", "340 ex/s"]
    assert (bandwidth(8.1e9), bandwidth(None), spread(0.023), spread(None)) == ("8.1 GB/s", "-", "±2 %", "-")


async def test_a_scaling_is_a_table_and_a_plot_with_its_age_and_what_it_is_of(calibrated: FakeEngine) -> None:
    calibrated.scaled = fake_engine.scaling()
    async with opened(calibrated, size=(160, 45)) as console:
        await console.press("3")
        for text in (
            "2 h ago, strong scaling, strategy data, ring: a batch of 8 over 1 to 4 ranks",
            "it stops paying at 4 ranks",
            "3,895 tok/s",
            "90%",
            "── speed-up   ⠒⠂ ideal   over ranks",
        ):
            await console.shows(text)


async def test_on_a_small_screen_one_scrolls_to_its_end(calibrated: FakeEngine) -> None:
    calibrated.scaled = fake_engine.scaling(speed_ups=(1.0, 1.9, None))
    async with opened(calibrated, size=SMALL) as console:
        await console.press("3")
        await console.shows("efficiency")
        await console.press("G")
        await console.shows("needs 9 GB by the estimate")


async def test_a_scaling_is_measured_from_the_pane_shown_as_it_grows_and_stopped_by_the_same_key(
    fake: FakeEngine,
) -> None:
    part = fake_engine.scaling(speed_ups=(1.0, 1.9), old_s=0, complete=False)
    fake.steps = [CalibrationProgress("2 ranks", "measured", examples_per_s=31.1), part, fake_engine.scaling()]
    async with opened(fake, size=DASHBOARD) as console:
        await console.press("3", "S")
        for text in ("measuring, 1 done", "31.1 ex/s", "over 1 to 2 ranks of 4, interrupted", "c stop measuring"):
            await console.shows(text)
        assert fake.scalings == [(False, False)] and "waiting" not in console.screen
        await console.press("c")
        await console.until(lambda: fake.stopped == 1, "the engine's end")
        await console.shows("over 1 to 2 ranks of 4, interrupted")
        fake.measured.set()
        await console.press("S")
        await console.shows("over 1 to 4 ranks")
        assert console.app.state.busy is None


async def test_a_number_of_ranks_that_was_not_measured_is_told_of(fake: FakeEngine) -> None:
    fake.steps = [fake_engine.scaling(speed_ups=(1.0, None))]
    fake.measured.set()
    async with opened(fake, size=DASHBOARD) as console:
        await console.press("3", "S")
        await console.until(lambda: any("scaling: 2 ranks: rank 2 on mini" in n for n in console.notifications), "it")


@given(st.lists(st.none() | st.floats(0.05, 100), min_size=1, max_size=20), st.integers(40, 200), st.booleans())
def test_a_scaling_is_drawn_in_whatever_room_there_is(speed_ups: list[float | None], width: int, ascii: bool) -> None:
    lines = scaling_lines(fake_engine.scaling(speed_ups=speed_ups), "2 h ago", width, Glyphs(ascii=ascii))
    text = [line for content in lines for line in content.plain.splitlines()]
    measured = sum(speed_up is not None for speed_up in speed_ups)
    assert any("ideal" in line for line in text) == (measured > 1)
    assert max(map(len, text)) <= width
    assert not ascii or all(line.isascii() for line in text if "µ" not in line)
