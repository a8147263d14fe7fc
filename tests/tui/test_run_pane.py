"""The run pane and what belongs to it where room or knowledge is short: a small terminal, a program of one's own, a
failed preflight, keys typed faster than they are drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import pytest
from textual.events import Key

from engine import api
from engine.errors import LaunchError, NodesInUse
from engine.models import CheckResult, CheckStatus, Reason, RunState
from engine.snapshots import (
    ChunkProgress,
    ResultFile,
    RunResult,
    RunSnapshot,
    Series,
    StopProgress,
    TrackerStatus,
    TrainedFile,
    ValidationLoss,
    Verification,
)
from tests.tui import fake_engine
from tests.tui.conftest import SIZES, SMALL, opened
from tests.tui.fake_engine import FakeEngine
from tui.glyphs import FAIL, PENDING, PHASES, STALE, STOPPED, WARN
from tui.screens.dialog import Confirm
from tui.state import DeckState
from tui.widgets.bars import header
from tui.widgets.chart import ChartCurve, Picture, draw
from tui.widgets.pane import RowList
from tui.widgets.run_summary import rank_glyph, rank_table

PROGRAM = CheckResult(name="program_present", status=CheckStatus.PASS, summary="python train.py")


def own_program() -> RunSnapshot:
    """A `command` of the user's own, running: its ranks report no step."""
    silent = fake_engine.ranks("running", iteration=None, step_s=None, memory_bytes=None, seen_at=None)
    bare = fake_engine.record(iteration=None, iterations=None, train_loss=None, val_loss=None, tokens_per_second=None)
    return replace(
        fake_engine.running(), record=bare, ranks=silent, checks=(PROGRAM,), series=Series(), eta_s=None,
        learning_rate=None,
    )  # fmt: skip


def failed_preflight() -> RunSnapshot:
    ended = fake_engine.record(
        state=RunState.FAILED, reason=Reason.PREFLIGHT_FAILED, cause="ports_free: port 40211 is held", iteration=None,
        train_loss=None, val_loss=None, tokens_per_second=None, started_at=None, ended_at=fake_engine.ago(3),
        attempts=0,
    )  # fmt: skip
    waiting = fake_engine.ranks("waiting", iteration=None, step_s=None, memory_bytes=None, seen_at=None)
    return RunSnapshot(
        record=ended, supervised=False, state_since=fake_engine.ago(3), ranks=waiting,
        checks=(*fake_engine.CHECKS[:4], fake_engine.FAILED_PORTS), taken_at=fake_engine.NOW,
    )  # fmt: skip


async def test_at_80x24_the_plan_fits_with_the_one_key_that_goes_on(fake: FakeEngine) -> None:
    async with opened(fake, size=SMALL) as console:
        for text in ("needs ", "n  launches it, after you confirm"):
            await console.shows(text)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("end", [fake_engine.trained, fake_engine.aborted, fake_engine.failed])
async def test_of_a_run_that_has_ended_the_curve_has_half_of_its_pane(
    fake: FakeEngine, size: tuple[int, int], end: Callable[[], RunSnapshot]
) -> None:
    """Whatever else there is to say: the rest is scrolled to."""
    verified = tuple(Verification(name, True, "as planned") for name in ("backend", "loss", "replicas", "a", "b", "c"))
    left = fake_engine.trained()
    fake.add(ended := replace(end(), verification=verified, result=left.result, trained=left.trained))
    async with opened(fake, size=size, follow=ended.record.id) as console:
        await console.press("4")
        await console.shows(f"{ended.record.state.value} ")
        await console.shows("── train")
        pane = console.app.deck.pane("run")
        assert console.app.deck.run_chart.size.height >= 0.45 * pane.content_size.height
        if ended.record.cause:
            await console.shows(ended.record.cause[:40])


TRAINED: Final = TrainedFile(
    "/Users/ana/.flightdeck/runs/r/adapters/adapters.safetensors", 1_511_312, "ana", "python -m mlx_lm generate …"
)


async def test_the_end_of_a_run_says_where_the_trained_weights_are_and_how_they_are_used(fake: FakeEngine) -> None:
    fake.add(ended := replace(fake_engine.succeeded(), trained=TRAINED))
    async with opened(fake, follow=ended.record.id) as console:
        await console.press("4")
        await console.shows("adapters/adapters.safetensors")
        await console.shows("(1.5 MB) on ana")
        await console.shows("python -m mlx_lm generate …")
    fake.add(going := replace(fake_engine.running(), trained=TRAINED))
    async with opened(fake, size=SMALL, follow=going.record.id) as console:
        await console.shows("step 41/60")
        assert "trained" not in console.screen


WEIGHTS: Final = ResultFile("adapter", False, 60, "ana", "/a/adapters.safetensors", "adapters.safetensors", 9, "0" * 64)
RESULT: Final = RunResult(
    files=(WEIGHTS,),
    first=ValidationLoss(0, 6.198),
    best=ValidationLoss(40, 1.372),
    last=ValidationLoss(59, 1.395),
    tokens=42_307,
    seconds=44.6,
)


async def test_the_end_of_a_run_says_what_it_came_to_and_u_fetches_the_weights(fake: FakeEngine) -> None:
    fake.add(ended := replace(fake_engine.succeeded(), result=RESULT))
    fake.held.add(ended.record.id)
    async with opened(fake, size=SMALL, follow=ended.record.id) as console:
        await console.shows("val loss 6.198 to 1.395, best 1.372 at iteration 40 ")
        await console.press("z")
        await console.shows("tokens in 0:44; u F fetches the weights")
        await console.press("u", "F")
        await console.shows("1.2 MB of 4.1 MB, 112 kB/s, ETA 25 s")
        await console.press("u")
        await console.shows("not now: fetching 1.2 MB of 4.1 MB")
        await console.press("escape")
        fake.held.clear()
        await console.until(lambda: f"fetched to {fake.home / ended.record.id}" in console.notifications)
        fake.refusal = LaunchError("another fetch writes it")
        await console.press("u", "F")
        await console.until(lambda: console.notifications[-1] == "fetch: another fetch writes it")


async def test_a_tracker_is_shown_when_it_fails_and_when_the_run_has_ended(fake: FakeEngine) -> None:
    failed = TrackerStatus("wandb", None, "UsageError: no key")
    well = TrackerStatus("tensorboard", "tensorboard --logdir /runs/r/tensorboard")
    fake.add(going := replace(fake_engine.running(), trackers=(well, failed)))
    async with opened(fake, size=SMALL, follow=going.record.id) as console:
        await console.shows("wandb is no longer written: UsageError: no key")
        assert "--logdir" not in console.screen
    fake.add(ended := replace(fake_engine.succeeded(), trackers=(well,)))
    async with opened(fake, size=SMALL, follow=ended.record.id) as console:
        await console.shows("tensorboard --logdir /runs/r/tensorboard")
        await console.shows("── train")


async def test_maximised_the_run_has_the_whole_screen(fake: FakeEngine) -> None:
    for size in (SMALL, (120, 36)):
        async with opened(fake, size=size) as console:
            await console.press("z")
            await console.until(lambda: console.app.deck.pane("run").size.height >= size[1] - 5)  # noqa: B023


async def test_a_program_of_ones_own_is_not_said_to_load_a_model_and_leaves_the_room_to_its_log(
    fake: FakeEngine,
) -> None:
    fake.add(own_program())
    async with opened(fake) as console:
        await console.shows("▶ running  prints no step that is read here: see the log")
        assert console.screen.count("▶ running") > 2 and "predicted" not in console.screen
        deck = console.app.deck
        assert deck.pane("logs").size.height > 2 * deck.pane("run").size.height
        await console.press("ctrl+x")
        assert isinstance(console.app.screen, Confirm)
        assert "TERM to your program" in console.app.screen.body and "step" not in console.app.screen.body


def test_a_rank_whose_processes_are_stopped_is_marked() -> None:
    snapshot = replace(own_program(), ranks=fake_engine.ranks("suspended", iteration=None, seen_at=None))
    state = DeckState(now=fake_engine.NOW, snapshot=snapshot)
    assert rank_glyph(state, snapshot.ranks[0]) == (WARN, "suspended")


def test_a_rank_that_waits_while_another_answers_or_saves_is_not_called_silent() -> None:
    first, second = fake_engine.ranks("training", seen_at=fake_engine.ago(40))
    answering = replace(first, phase="generating", seen_at=fake_engine.ago(1))
    for ranks, shown in (
        ((answering, second), (PENDING, "waits for rank 0")),
        ((first, second), (STALE, "training, silent 40 s")),
    ):
        snapshot = replace(fake_engine.running(), ranks=ranks)
        assert rank_glyph(DeckState(now=fake_engine.NOW, snapshot=snapshot), second) == shown


@pytest.mark.parametrize("between", [RunState.PREFLIGHT, RunState.RECOVERING, RunState.LAUNCHING])
def test_before_the_next_attempt_no_rank_is_called_silent(between: RunState) -> None:
    run, ranks = fake_engine.running(), fake_engine.ranks("validating", seen_at=fake_engine.ago(1740))
    record = run.record.model_copy(update={"state": between})
    resumed = DeckState(now=fake_engine.NOW, snapshot=replace(run, record=record, ranks=ranks))
    assert rank_glyph(resumed, ranks[1]) == (PENDING, "waiting")
    assert "silent" not in header(resumed, 160).plain


def test_a_rank_that_saves_while_the_run_is_stopped_between_attempts_is_shown_as_saving() -> None:
    run, ranks = fake_engine.running(), fake_engine.ranks("saving", seen_at=fake_engine.ago(1))
    record = run.record.model_copy(update={"state": RunState.RECOVERING})
    for stop, shown in (
        (None, (PENDING, "waiting")),
        (StopProgress("stop", fake_engine.ago(1)), (PHASES["saving"], "saving")),
    ):
        snapshot = replace(run, record=record, ranks=ranks, stop=stop)
        assert rank_glyph(DeckState(now=fake_engine.NOW, snapshot=snapshot), ranks[1]) == shown


def test_a_rank_that_another_ones_failure_ended_is_not_marked_as_failed() -> None:
    snapshot = fake_engine.failed()
    victim, first_failure = (replace(rank, exit_code=code, signal=signal)
                       for rank, code, signal in zip(snapshot.ranks, (None, 1), (15, None), strict=True))  # fmt: skip
    state = DeckState(now=fake_engine.NOW, snapshot=replace(snapshot, ranks=(victim, first_failure)))
    assert rank_glyph(state, victim) == (STOPPED, "signal 15")
    assert rank_glyph(state, first_failure) == (FAIL, "exit 1")
    killed = replace(first_failure, exit_code=None, signal=9)
    assert rank_glyph(state, killed) == (FAIL, "signal 9")


async def test_a_failed_preflight_counts_its_failures_and_opens_at_the_first(fake: FakeEngine) -> None:
    ended = failed_preflight()
    fake.add(ended)
    async with opened(fake, follow=ended.record.id) as console:
        await console.shows("1 failed check: 2 shows evidence and fix")
        assert "· not started" in console.screen and "waiting" not in console.screen
        await console.press("2")
        await console.shows("first failing")


async def test_what_is_typed_right_behind_the_search_key_is_text(fake: FakeEngine) -> None:
    ended = fake_engine.succeeded()
    fake.add(ended)
    async with opened(fake, follow=ended.record.id) as console:
        await console.shows("60 iterations in")
        for key, character in (("slash", "/"), *((letter, letter) for letter in "nez"), ("slash", "/")):
            console.app.post_message(Key(key, character))
        await console.shows("/ nez/")
        assert console.on_deck and console.app.deck.maximised_pane is None


async def test_the_help_breaks_its_lines_beside_the_keys(fake: FakeEngine) -> None:
    async with opened(fake, size=SMALL) as console:
        await console.press("question_mark")
        for _ in range(100):
            if "else to the next pane" in console.screen:
                break
            await console.press("down")
        await console.shows("l right           Move right: in a log, or a full chart's cursor;")
        broken = next(line for line in console.screen.splitlines() if "next pane" in line)
        assert broken.index("else to the next pane") == 25


async def test_without_a_configuration_the_nodes_say_so(fake: FakeEngine) -> None:
    async with opened(fake, config=None) as console:
        await console.press("escape", "1")
        await console.shows("`flightdeck init` writes one")


def test_the_number_of_nodes_gives_way_to_the_time_left() -> None:
    state = DeckState(
        now=fake_engine.NOW, ready=True, config=fake_engine.configuration(), snapshot=fake_engine.running()
    )
    widths = range(60, 100)
    drawn = [header(state, width).plain for width in widths]
    assert any("ETA" in line and "2 nodes" not in line for line in drawn)
    assert not any("2 nodes" in line and "ETA" not in line for line in drawn)


async def test_at_80x24_what_is_verified_gives_way_to_the_curve_but_for_what_is_wrong(fake: FakeEngine) -> None:
    lines = tuple(Verification(name, name != "loss", "as planned") for name in ("backend", "loss", "replicas", "gpu"))
    fake.add(running := replace(fake_engine.running(), verification=lines))
    async with opened(fake, size=SMALL, follow=running.record.id) as console:
        await console.press("4")
        await console.shows("loss        as planned")
        await console.shows("── train")
        assert "replicas" not in console.screen
        await console.press("z")
        await console.shows("replicas    as planned")


async def test_at_80x24_a_failed_check_has_room_for_its_evidence_and_fix(fake: FakeEngine) -> None:
    more = [CheckResult(name=f"check_{number}", status=CheckStatus.PASS, summary="well") for number in range(9)]
    fake.check_results = [*fake_engine.CHECKS[:4], fake_engine.FAILED_PORTS, *more]
    async with opened(fake, size=SMALL) as console:
        await console.press("2")
        await console.shows("not run yet")
        await console.press("r")
        for text in (
            "✗  fail     ports",
            "local-1       40211: pid 4711, python train.py",
            "fix           kill 4711",
        ):
            await console.shows(text)
        # The list's scrollbar covers nothing.
        await console.shows(" 3.6 s ")


async def test_why_nothing_can_be_launched_is_told_to_its_last_word(fake: FakeEngine) -> None:
    fake.check_results = [*fake_engine.CHECKS[:4], fake_engine.FAILED_PORTS]
    details = {"where": "127.0.0.1", "why": "pid 4711 since 14:01:30", "todo": "wait for its end, or stop it"}
    fake.refusal = NodesInUse("a calibration of job is going on there", **details)
    async with opened(fake, size=(120, 36)) as console:
        await console.press("n", "tab", "enter")
        for text in (
            "127.0.0.1: a calibration of job is going on there: pid",
            "4711 since 14:01:30 (wait for its end, or",
        ):
            await console.shows(text)
        await console.check()
        await console.shows("1 failure")
        await console.press("escape")
        console.app.store.change(fault=None)
        await console.shows("n cannot launch now: preflight has 1 failure: r checks")
        await console.shows("│ again  ")


async def test_no_check_is_out_of_sight_on_the_dashboard(fake: FakeEngine) -> None:
    names = [f"check_{number}" for number in range(30)]
    fake.check_results = [CheckResult(name=name, status=CheckStatus.PASS, summary="well") for name in names]
    async with opened(fake, size=(120, 36)) as console:
        await console.check()
        await console.shows("passed just now")
        await console.press("escape", "G")
        await console.shows("check 29")
        await console.press("g")
        await console.shows("check 0 ")


@pytest.mark.parametrize("size", SIZES)
async def test_each_check_has_its_place_and_its_words_before_it_begins(fake: FakeEngine, size: tuple[int, int]) -> None:
    fake.add(fake_engine.starting())
    async with opened(fake, size=size) as console:
        if size == SMALL:
            await console.press("2")
        await console.shows("running 6/15")
        rows = console.app.deck.query_one("#checks-rows", RowList)
        before, places = rows.size, list(rows._ids)
        assert places == list(api.CHECKS)
        run = fake_engine.starting()
        fake.put(replace(run, checks=tuple(fake_engine.CHECKS)))
        await console.shows("passed with 1 warning")
        assert rows.size == before and list(rows._ids) == places
        await console.press("2", "G")
        await console.shows("throughput  ")
        assert not [name for name in api.CHECKS if "_" in name and name in console.screen]
        assert console.app.deck.pane("preflight").text().count("performance_layer: throughput") == 1


@pytest.mark.parametrize(("size", "title"), [((100, 30), "2 warnings ─"), ((120, 36), "passed with 2 warnings ─")])
async def test_the_title_of_the_checks_is_whole_on_each_dashboard(
    fake: FakeEngine, size: tuple[int, int], title: str
) -> None:
    warning = fake_engine.CHECKS[0].model_copy(update={"status": CheckStatus.WARN})
    fake.add(replace(fake_engine.failed(), checks=(warning, *fake_engine.CHECKS[1:])))
    async with opened(fake, size=size) as console:
        await console.shows("of the run: ")
        assert title in console.screen


async def test_the_log_of_a_run_that_started_nothing_does_not_promise_any(fake: FakeEngine) -> None:
    fake.snapshots["failed"] = failed_preflight()
    async with opened(fake, size=(120, 36), follow="failed") as console:
        await console.shows("no output: no rank has printed anything")


@pytest.mark.parametrize(("epoch", "progress"), [(1, "data chunk 3/20 (15%)"), (2, "data chunk 3/20 (15%, epoch 2)")])
async def test_streamed_data_says_how_far_it_is(fake: FakeEngine, epoch: int, progress: str) -> None:
    fake.add(streamed := replace(fake_engine.running(), chunk=ChunkProgress(3, 20, epoch)))
    async with opened(fake, size=(120, 36), follow=streamed.record.id) as console:
        await console.shows(progress)


def test_a_low_plot_has_a_scale_of_two_figures() -> None:
    state = DeckState()
    curve = ChartCurve("train", ((1, 6.4), (60, 1.4)), "$text")
    plot = draw(Picture("loss", "", (curve,), (1, 60)), 76, 7, state.glyphs)
    assert sum("┤" in line for line in plot.plain.splitlines()) >= 2


async def test_idle_the_plan_says_what_it_needs_and_where_its_reasons_are(fake: FakeEngine) -> None:
    async with opened(fake) as console:
        await console.shows("4 explains it")
        for text in (
            "ready to launch",
            "memory        local-0 ",
            " of 12.4 GB; local-1",
            "n  launches it, after you confirm",
        ):
            await console.shows(text)


async def test_the_full_view_explains_each_choice_and_where_its_figure_came_from(fake: FakeEngine) -> None:
    for size in (SMALL, (120, 36)):
        async with opened(fake, size=size) as console:
            await console.shows("4 explains it")
            await console.press("4")
            for text in ("n  launches it, after you confirm", "strategy        data, 2 ranks", "throughput"):
                await console.shows(text)
            assert "batch_configuration" in console.app.deck.pane("run").text()
            await console.press("G")
            await console.shows("without Flight Deck")


async def test_a_plan_that_is_refused_says_so_and_how_to_go_on_all_the_same(fake: FakeEngine) -> None:
    fake.model |= {"hidden_size": 65_536, "intermediate_size": 262_144, "num_hidden_layers": 200}
    async with opened(fake, size=SMALL) as console:
        await console.shows("refused by the plan")
        await console.shows("✗ refused")
        await console.press("4")
        await console.shows("--skip hardware_layer")


async def test_a_plan_that_cannot_be_made_leaves_the_console_as_it_is(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise ValueError("no plan today")

    monkeypatch.setattr(fake, "plan", broken)
    async with opened(fake) as console:
        await console.until(lambda: "plan: no plan today" in console.notifications)
        await console.shows("n  launches it, after you confirm")


async def test_the_nodes_are_planned_anew_when_they_were_looked_at_anew(fake: FakeEngine) -> None:
    async with opened(fake) as console:
        await console.shows("4 explains it")
        fake.found = fake_engine.facts(problem="no route to host")
        await console.press("1", "r")
        await console.until(lambda: console.app.state.plan is not None and any(
            warning.name == "nodes" for warning in console.app.state.plan.warnings
        ))  # fmt: skip


async def test_the_ranks_are_shown_with_exchange_gradient_and_peak_and_the_run_with_skew_and_gradient(
    fake: FakeEngine,
) -> None:
    norms = (1.81, 2.27)
    ranks = tuple(
        replace(rank, typical_s=(0.4, 0.5)[rank.rank], exchange_s=(0.112, 0.021)[rank.rank], grad_norm=norms[rank.rank])
        for rank in fake_engine.ranks()
    )
    fake.add(replace(fake_engine.running(), ranks=ranks, grad_norm=1.94))
    async with opened(fake, size=(160, 40)) as console:
        for text in ("gradient 1.94", "slowest +25%"):
            await console.shows(text)
        await console.press("4", "z")
        for text in ("exchange", "0.112 s", "2.27", "192 MB", "← slowest"):
            await console.shows(text)


def test_the_columns_of_the_ranks_stay_when_one_becomes_the_slowest_or_validates() -> None:
    run = fake_engine.running()
    even = tuple(replace(rank, typical_s=0.4, phase="training") for rank in run.ranks)
    late = (replace(even[0], phase="validating"), replace(even[1], typical_s=12.0, step_s=12.0))
    for width, headed in ((76, False), (57, False), (156, True)):
        tables = [
            rank_table(DeckState(now=fake_engine.NOW, snapshot=shown), shown, width, headed=headed)
            for shown in (replace(run, ranks=even), replace(run, ranks=late))
        ]
        if headed:
            assert tables[0][0] == tables[1][0]
        places = [[line.plain.index("MB") for line in table if "MB" in line.plain] for table in tables]
        assert places[0] == places[1]


async def test_what_is_not_known_of_gradients_and_ranks_is_no_figure(fake: FakeEngine) -> None:
    fake.add(replace(fake_engine.running(), ranks=fake_engine.ranks(step_s=None)))
    async with opened(fake, size=(160, 40)) as console:
        await console.shows("validation 1.338")
        assert "gradient norm" not in console.screen and "slowest" not in console.screen


async def test_on_a_short_screen_the_highest_peak_is_among_the_figures(fake: FakeEngine) -> None:
    fake.add(fake_engine.running())
    async with opened(fake, size=SMALL) as console:
        await console.shows("peak 192 MB")


@pytest.mark.parametrize("size", [SMALL, (120, 36)], ids=str)
async def test_s_shows_the_answers_in_place_of_the_plot_and_back(fake: FakeEngine, size: tuple[int, int]) -> None:
    fake.add(fake_engine.sampled())
    async with opened(fake, size=size, follow="20260314-140126-demo-3f9a") as console:
        await console.shows("s samples")
        await console.press("4", "s")
        for text in ("tower to heron: hold", "base          over Over xq over", "at 40         over the beacon"):
            await console.shows(text)
        assert "── train" not in console.screen and "rank 1  local-1" not in console.screen
        await console.press("s")
        await console.shows("rank 0")
        assert "over the beacon" not in console.screen


async def test_a_run_without_sample_prompts_says_why_it_has_no_answers(fake: FakeEngine) -> None:
    fake.add(fake_engine.running())
    async with opened(fake, size=SMALL, follow="20260314-140126-demo-3f9a") as console:
        await console.press("s")
        assert console.notifications[-1].startswith("samples: no answers yet: the job's sample_prompts")
