"""The console as a person uses it: keys in, screen out."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from engine.errors import LaunchError
from engine.models import RunState
from engine.snapshots import StopProgress
from tests.tui import fake_engine
from tests.tui.conftest import SIZE, SMALL, opened
from tests.tui.fake_engine import NOW, FakeEngine
from tui.screens.deck import DeckScreen
from tui.screens.dialog import Confirm, ConfirmLaunch, Welcome
from tui.screens.help import Help
from tui.screens.stopping import Stopping
from tui.state import DeckState
from tui.widgets.pane import RowList


async def test_idle_it_shows_what_would_be_launched_and_the_one_key(fake: FakeEngine) -> None:
    async with opened(fake) as console:
        for text in ("ready to launch", "60 iterations", "local-0 50%", "n  launches it", "no runs yet"):
            assert text in console.screen


async def test_launch_asks_first_with_the_focus_on_cancel(fake: FakeEngine) -> None:
    async with opened(fake) as console:
        await console.press("n")
        assert isinstance(console.app.screen, ConfirmLaunch)
        assert console.app.focused is not None and console.app.focused.id == "cancel"
        assert "2 ranks" in console.app.screen.body and "full fine-tuning" in console.app.screen.body
        await console.press("enter")
        assert fake.launched == [] and console.on_deck


async def test_a_confirmed_launch_starts_the_plan_and_follows_the_run(fake: FakeEngine) -> None:
    async with opened(fake) as console:
        await console.press("n", "right", "enter")
        await console.shows("▶ running 0:46")
        assert fake.launched == [fake_engine.configuration()]
        assert "step 41/60" in console.screen and "ETA 19 s" in console.screen


async def test_a_refused_launch_says_why_where_the_plan_is(fake: FakeEngine) -> None:
    fake.refusal = LaunchError("the supervisor did not start", why="no space left on device", todo="free some space")
    async with opened(fake) as console:
        await console.press("n", "right", "enter")
        await console.until(lambda: console.app.state.fault is not None)
        await console.shows("no space left on device")


async def test_launch_is_disabled_by_a_failed_preflight_and_says_why(fake: FakeEngine) -> None:
    fake.check_results = [*fake_engine.CHECKS[:4], fake_engine.FAILED_PORTS]
    async with opened(fake) as console:
        await console.check()
        await console.shows("1 failure")
        assert "port 40211 is held by pid 4711" in console.screen
        await console.press("n")
        assert console.notifications == ["launch: preflight has 1 failure: r checks again"]


async def test_a_failed_check_opens_to_its_evidence_and_fix_which_can_be_copied(fake: FakeEngine) -> None:
    fake.check_results = [*fake_engine.CHECKS[:4], fake_engine.FAILED_PORTS]
    async with opened(fake) as console:
        await console.check()
        await console.shows("1 failure")
        await console.press("G")
        for text in ("first failing   rank 1 on local-1", "40211: pid 4711, python train.py", "kill 4711"):
            await console.shows(text.split("   ")[-1])
        await console.press("y")
        await console.until(lambda: bool(console.notifications))
        assert console.app.clipboard == "kill 4711"
        assert [path.read_text() for path in (fake.home / "saved").iterdir()] == ["kill 4711\n"]


async def test_abort_names_target_effect_and_what_is_kept_with_the_focus_on_cancel(fake: FakeEngine) -> None:
    fake.add(fake_engine.running())
    async with opened(fake) as console:
        await console.shows("running 0:46")
        await console.press("ctrl+x")
        dialog = console.app.screen
        assert isinstance(dialog, Confirm)
        for text in ("20260314-140126-demo-3f9a", "local-0, local-1", "then TERM", "checkpoint of iteration 40"):
            assert text in " ".join(dialog.body.split())
        assert console.app.focused is not None and console.app.focused.id == "cancel"
        await console.press("escape")
        assert fake.aborted == []


@pytest.mark.parametrize("frozen", [(), ("space",)], ids=["live", "frozen"])
async def test_a_confirmed_abort_counts_down_and_shows_every_ranks_answer(
    fake: FakeEngine, frozen: tuple[str, ...]
) -> None:
    fake.add(fake_engine.running())
    async with opened(fake) as console:
        await console.shows("running 0:46")
        await console.press(*frozen, "ctrl+x", "right", "enter")
        dialog = console.app.screen
        assert isinstance(dialog, Stopping)
        await console.until(lambda: "s left" in dialog.body, "the countdown")
        assert fake.aborted == [("20260314-140126-demo-3f9a", False)]
        assert dialog.body.count("has not acknowledged yet") == 2
        fake.put(fake_engine.stopping("term", acknowledged=(0,)))
        await console.until(lambda: dialog.body.count("has left") == 1, "rank 0's answer")
        gone = fake_engine.aborted()
        fake.put(replace(gone, record=gone.record.model_copy(update={"id": "20260314-140126-demo-3f9a"})))
        await console.until(lambda: "no process of the run is left" in dialog.body, "the proof")
        await console.press("escape", *frozen)
        await console.shows("■ aborted")


async def test_q_after_an_aborts_proof_quits_and_before_it_closes_the_dialog(fake: FakeEngine) -> None:
    fake.add(fake_engine.running())
    async with opened(fake, size=SMALL) as console:
        await console.shows("running 0:46")
        await console.press("ctrl+x", "right", "enter", "q")
        assert console.on_deck and console.app.is_running
        await console.press("ctrl+x")
        gone = fake_engine.aborted()
        fake.put(replace(gone, record=gone.record.model_copy(update={"id": "20260314-140126-demo-3f9a"})))
        dialog = console.app.screen
        assert isinstance(dialog, Stopping)
        await console.until(lambda: "no process of the run is left" in dialog.body, "the proof")
        await console.press("q")
        await console.until(lambda: console.app._exit, "the end of the console")


async def test_a_movement_right_behind_the_key_of_a_view_is_not_lost(fake: FakeEngine) -> None:
    async with opened(fake, size=SMALL) as console:
        # As typed at once: both keys are taken before a frame is drawn.
        for key in ("1", "G"):
            console.app.deck.action_press(key)
        await console.until(lambda: console.app.deck.pane("nodes").query_one(RowList).selected == "local-1")
        await console.press("escape")
        for key in ("1", "G", "enter"):
            console.app.deck.action_press(key)
        await console.until(lambda: console.app.state.detail)
        assert console.app.state.node == "local-1"


async def test_where_the_console_cannot_be_suspended_ctrl_z_says_so(fake: FakeEngine) -> None:
    async with opened(fake) as console:
        await console.press("ctrl+z")
        assert console.notifications == ["this terminal cannot suspend a program"]


async def test_stages_that_an_abort_did_not_need_are_not_ticked(fake: FakeEngine) -> None:
    fake.add(
        replace(fake_engine.running(), stop=StopProgress("verifying", fake_engine.ago(1), (0, 1), passed=("stop",)))
    )
    async with opened(fake) as console:
        await console.until(lambda: console.app.state.snapshot is not None)
        await console.press("ctrl+x")
        dialog = console.app.screen
        assert isinstance(dialog, Stopping)
        assert [line.split()[1] for line in dialog.body.splitlines() if "not needed" in line] == ["TERM", "KILL"]


async def test_an_unproved_stop_is_said_to_be_unconfirmed(fake: FakeEngine) -> None:
    fake.add(fake_engine.stopping("unconfirmed", acknowledged=(0,)))
    async with opened(fake) as console:
        await console.until(lambda: console.app.state.snapshot is not None)
        await console.press("ctrl+x")
        dialog = console.app.screen
        assert isinstance(dialog, Stopping) and "stop unconfirmed" in dialog.body


async def test_abort_is_disabled_without_a_run_and_says_why(fake: FakeEngine) -> None:
    async with opened(fake) as console:
        await console.press("ctrl+x")
        assert console.notifications == ["abort: no run is under way"]


async def test_a_run_that_goes_on_unseen_is_in_the_header_and_abort_says_how_to_get_there(fake: FakeEngine) -> None:
    fake.add(fake_engine.running(), fake_engine.succeeded())
    async with opened(fake, follow="20260313-091532-demo-e84f") as console:
        await console.shows("✓ succeeded")
        await console.press("ctrl+x")
        assert console.notifications == [
            "abort: 20260314-140126-demo-3f9a is not shown: 5 lists it, enter twice opens it, ctrl+x stops it"
        ]
        await console.press("escape")
        await console.shows("▶ 20260314-140126-demo-3f9a running, not shown")
        assert "idle" not in console.screen


@pytest.mark.parametrize("size", SIZE, ids=str)
async def test_the_plans_view_has_no_figure_of_the_run_before(fake: FakeEngine, size: tuple[int, int]) -> None:
    fake.add(fake_engine.succeeded())
    async with opened(fake, size=size, follow="20260313-091532-demo-e84f") as console:
        await console.shows("✓ succeeded")
        figure = f"{fake_engine.loss_at(60):.3f}"
        await console.press("4", "escape", "escape", "4")
        await console.shows("ready to launch")
        assert figure not in console.screen
        await console.press("L")
        assert console.notifications[-1] == "log axis: no run is shown: 5 lists them"


async def test_while_the_engine_loads_nothing_is_said_to_be_missing(fake: FakeEngine) -> None:
    async with opened(fake) as console:
        console.app.store.change(ready=False, config=None)
        await console.shows("loading the engine")
        assert "there is no" not in console.screen and "no run is shown" not in console.screen
        console.app.store.change(ready=True, fault="flightdeck.toml names programs")
        await console.until(lambda: console.screen.count("flightdeck.toml names programs") >= 3)


async def test_opened_while_a_run_goes_on_it_shows_that_run(fake: FakeEngine) -> None:
    fake.add(fake_engine.running(), fake_engine.failed())
    async with opened(fake) as console:
        await console.shows("4 run · 20260314-140126-demo-3f9a")


async def test_follow_names_the_run_to_show(fake: FakeEngine) -> None:
    fake.add(fake_engine.running(), fake_engine.failed())
    async with opened(fake, follow="20260314-134500-demo-b71c") as console:
        await console.shows("4 run · 20260314-134500-demo-b71c")


async def test_a_failed_run_shows_first_cause_and_fix(fake: FakeEngine) -> None:
    fake.add(fake_engine.failed())
    async with opened(fake, follow="20260314-134500-demo-b71c") as console:
        await console.shows("first cause")
        for text in (
            "✗ failed (rank failed)",
            "rank 1 on local-1, exit 1",
            "make the data with this model's tokenizer",
        ):
            assert text in console.screen


async def test_the_history_lists_every_run_and_opens_one(fake: FakeEngine) -> None:
    fake.add(fake_engine.running(), fake_engine.failed(), fake_engine.aborted(), fake_engine.succeeded())
    async with opened(fake) as console:
        await console.press("5")
        for text in ("▶ running", "✗ failed", "■ aborted", "✓ succeeded", "rank failed", "on request"):
            await console.shows(text)
        await console.press("j", "enter", "enter")
        await console.shows("first cause")
        assert console.app.state.view == "dashboard"


async def test_quit_leaves_the_run_and_says_so(fake: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    fake.add(fake_engine.running())
    async with opened(fake) as console:
        await console.shows("q quit (the run goes on)")
        await console.press("q")
    assert console.app.return_code == 0
    assert fake.aborted == []
    assert "20260314-140126-demo-3f9a goes on" in capsys.readouterr().err


async def test_escape_goes_one_step_back_and_never_quits(fake: FakeEngine) -> None:
    fake.add(fake_engine.succeeded())
    async with opened(fake, follow="20260313-091532-demo-e84f") as console:
        await console.shows("✓ succeeded")
        await console.press("1", "z")
        await console.press("escape", "escape")
        assert console.app.state.view == "dashboard"
        await console.press("escape")
        await console.shows("ready to launch")
        await console.press("escape", "escape")
        assert console.app.is_running


async def test_number_keys_open_the_views_and_close_them(fake: FakeEngine) -> None:
    async with opened(fake) as console:
        views = ("nodes", "preflight", "calibration", "run", "history", "queue")
        for key, view in zip("123456", views, strict=True):
            await console.press(key)
            assert console.app.state.view == view
            await console.press(key)
            assert console.app.state.view == "dashboard"


async def test_at_80x24_the_panes_are_tabs_and_tab_walks_them(fake: FakeEngine) -> None:
    fake.add(fake_engine.running())
    async with opened(fake, size=SMALL) as console:
        await console.shows("4 run · 20260314-140126-demo-3f9a")
        assert "1 nodes  " in console.screen and "5 history" in console.screen
        seen = []
        for _ in range(7):
            await console.press("tab")
            seen.append((console.app.state.view, console.app.state.pane))
        assert [pane for _, pane in seen] == ["logs", "history", "queue", "nodes", "preflight", "calibration", "run"]


async def test_tab_walks_the_panes_of_the_dashboard(fake: FakeEngine) -> None:
    async with opened(fake) as console:
        seen = []
        for _ in range(6):
            await console.press("tab")
            seen.append(console.app.state.pane)
        assert seen == ["logs", "nodes", "preflight", "calibration", "history", "run"]


async def test_help_shows_every_key_once_and_reasons_only_when_one_is_pressed(fake: FakeEngine) -> None:
    fake.add(fake_engine.running())
    async with opened(fake, size=(120, 160)) as console:
        await console.until(lambda: console.app.state.active, "the run")
        await console.press("question_mark")
        assert isinstance(console.app.screen, Help)
        for text in (
            "Launch the plan",
            "Abort the shown run",
            "says why when it is pressed",
            "Quit the console, never the run",
        ):
            assert text in console.screen
        assert "uses the nodes" not in console.screen and "has not ended" not in console.screen
        await console.press("escape")
        assert console.on_deck


@pytest.mark.parametrize("key", ["ctrl+p", "colon"])
async def test_the_palette_finds_an_action_by_name_and_does_it(fake: FakeEngine, key: str) -> None:
    async with opened(fake) as console:
        await console.press(key)
        await console.press(*"hist")
        await console.shows("history (5)")
        await console.press("enter")
        await console.until(lambda: console.app.state.view == "history")


async def test_the_palette_opens_a_run(fake: FakeEngine) -> None:
    fake.add(fake_engine.failed())
    async with opened(fake) as console:
        await console.press("ctrl+p")
        await console.press(*"134500")
        await console.shows("open 20260314-134500-demo-b71c")
        await console.press("enter")
        await console.shows("first cause")


async def test_freeze_holds_the_display_and_says_so_and_thaws_to_the_newest(fake: FakeEngine) -> None:
    fake.add(fake_engine.running())
    async with opened(fake) as console:
        await console.shows("step 41/60")
        await console.press("space")
        await console.shows("FROZEN")
        later = fake_engine.running()
        fake.put(replace(later, record=later.record.model_copy(update={"iteration": 55})))
        await console.pilot.pause(0.5)
        assert "step 41/60" in console.screen or "FROZEN" in console.screen
        assert console.app.state.snapshot is not None and console.app.state.snapshot.record.iteration == 41
        await console.press("space")
        await console.shows("step 55/60")


async def test_a_report_is_drawn_with_its_snapshot_and_only_where_it_shows(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.add(fake_engine.running(), fake_engine.trained())
    async with opened(fake) as console:
        await console.shows("step 41/60")
        app, drawn, shown = console.app, set[tuple[str | None, int]](), list[DeckState]()
        monkeypatch.setattr(RowList, "refresh_line", lambda rows, y: drawn.add((rows.id, y)))

        def show(state: DeckState) -> None:
            shown.append(state)
            DeckScreen.show(app.deck, state)

        monkeypatch.setattr(app.deck, "show", show)
        later = fake_engine.running()
        fake.put(replace(later, record=later.record.model_copy(update={"iteration": 55})))
        await console.until(lambda: [run.iteration for run in app.state.runs or ()][:1] == [55], "the list")
        await console.until(lambda: app.state.snapshot is not None and app.state.snapshot.record.iteration == 55)
        assert len(shown) == 1, "the list's figures are the snapshot's"
        app.store.change(now=NOW + timedelta(0))
        await console.pilot.pause()
        assert not drawn
        app.store.change(now=NOW + timedelta(seconds=5))
        await console.pilot.pause()
        assert {row for name, row in drawn if name == "history-rows"} == {0}


async def test_maximise_gives_the_pane_the_screen_and_back(fake: FakeEngine) -> None:
    fake.add(fake_engine.running())
    async with opened(fake) as console:
        await console.shows("4 run · 20260314")
        await console.press("z")
        await console.until(lambda: "1 nodes" not in console.screen)
        await console.press("z")
        await console.shows("1 nodes")


async def test_without_a_configuration_a_welcome_offers_the_demo(fake: FakeEngine) -> None:
    async with opened(fake, config=None) as console:
        await console.until(lambda: isinstance(console.app.screen, Welcome))
        await console.press("right", "enter")
        await console.shows("running 0:46")
        assert len(fake.launched) == 1


async def test_the_demos_key_works_in_the_welcome_and_after_a_look_around(fake: FakeEngine) -> None:
    async with opened(fake, config=None, size=SMALL) as console:
        await console.until(lambda: isinstance(console.app.screen, Welcome))
        await console.press("d")
        await console.shows("running 0:46")
        assert len(fake.launched) == 1
    async with opened(FakeEngine(fake.home), config=None, size=SMALL) as console:
        await console.until(lambda: isinstance(console.app.screen, Welcome))
        await console.press("right", "right", "enter", "d")
        await console.shows("running 0:46")


async def test_a_start_is_launched_at_once(fake: FakeEngine) -> None:
    async with opened(fake, config=None, start=fake_engine.configuration()) as console:
        await console.shows("running 0:46")
        assert len(fake.launched) == 1


async def test_a_version_that_differs_stands_out(fake: FakeEngine) -> None:
    fake.found = fake_engine.facts(mismatch=True)
    async with opened(fake) as console:
        await console.shows("≠0.31.0")


async def test_an_unreachable_node_says_why_and_old_facts_are_stale(fake: FakeEngine) -> None:
    fake.found = fake_engine.facts(problem="no answer on port 22 within 10 s", old_s=400)
    async with opened(fake) as console:
        await console.shows("✗ fail")
        assert "◌ stale" in console.screen
        await console.press("1", "j")
        await console.shows("no answer on port 22 within 10 s")


async def test_a_rank_that_falls_silent_is_shown_stale(fake: FakeEngine) -> None:
    quiet = fake_engine.running()
    first, second = quiet.ranks
    fake.add(replace(quiet, ranks=(first, replace(second, seen_at=fake_engine.ago(40)))))
    async with opened(fake) as console:
        await console.shows("◌ rank 1 silent 40 s")
        await console.shows("training, silent 40 s")
        assert console.screen.count("✓ ok   ") >= 2, "its node has just answered"


async def test_a_run_without_a_supervisor_says_so(fake: FakeEngine) -> None:
    fake.add(replace(fake_engine.running(), supervised=False))
    async with opened(fake) as console:
        await console.shows("? supervisor gone")


async def test_states_of_a_finished_run_carry_shape_and_word(fake: FakeEngine) -> None:
    fake.add(fake_engine.succeeded())
    async with opened(fake, follow="20260313-091532-demo-e84f") as console:
        await console.shows("✓ succeeded  60 iterations in 1:00")
        assert console.app.state.snapshot is not None
        assert console.app.state.snapshot.record.state is RunState.SUCCEEDED


@pytest.mark.parametrize(("iteration", "steps"), [(60, "60 iterations"), (40, "40 of 60 iterations")])
async def test_a_success_with_a_note_has_ended_early_only_where_iterations_are_missing(
    fake: FakeEngine, iteration: int, steps: str
) -> None:
    ended = fake_engine.succeeded()
    note = "rank 1 on right did not complete: the others went on without it"
    fake.add(replace(ended, record=ended.record.model_copy(update={"cause": note, "iteration": iteration})))
    async with opened(fake, follow=ended.record.id) as console:
        await console.shows(f"✓ succeeded  {steps} in 1:00")
        await console.shows("did not complete")


async def test_hostile_text_of_a_run_is_shown_as_it_is(fake: FakeEngine) -> None:
    bad = fake_engine.failed()
    cause = "[bold red]boom[/] [link=x]y[/link] [@click=app.quit]z"
    assert bad.diagnosis is not None
    fake.add(replace(bad, diagnosis=replace(bad.diagnosis, cause=cause)))
    async with opened(fake, follow="20260314-134500-demo-b71c", size=(160, 45)) as console:
        await console.shows(cause)


async def test_the_log_is_followed_and_stays_where_one_reads(fake: FakeEngine) -> None:
    fake.add(fake_engine.running())
    async with opened(fake) as console:
        await console.shows("logs · all ranks · TAIL")
        await console.shows("1 iteration 41/60")
        await console.press("f")
        await console.until(lambda: "TAIL" not in console.screen)
        await console.press("g")
        await console.shows("0 rank 0 of 2 on local-0")
        await console.press("f")
        await console.shows("1 iteration 41/60")


async def test_search_goes_to_the_match_and_n_goes_on_and_escape_ends_it(fake: FakeEngine) -> None:
    fake.add(fake_engine.running())
    async with opened(fake) as console:
        await console.shows("1 iteration 41/60")
        await console.press("slash", *"million", "enter")
        await console.shows("0.476 million")
        await console.shows("/1 'million'")
        await console.press("n")
        assert console.on_deck, "n is the next match, not a launch"
        await console.press("escape")
        await console.until(lambda: not console.app.state.searching)
        await console.press("n")
        await console.shows("put demo into the queue?")


async def test_keys_typed_into_the_search_are_text_and_escape_leaves_it(fake: FakeEngine) -> None:
    fake.add(fake_engine.running())
    async with opened(fake) as console:
        await console.shows("1 iteration 41/60")
        await console.press("slash", *"nq15 z")
        assert console.app.is_running and console.on_deck
        assert console.app.state.view == "dashboard" and "nq15 z" in console.screen
        await console.press("escape")
        await console.until(lambda: "nq15 z" not in console.screen)


async def test_filter_keeps_the_lines_that_match_and_a_leading_mark_inverts(fake: FakeEngine) -> None:
    fake.add(fake_engine.running())
    async with opened(fake) as console:
        await console.shows("1 iteration 41/60")
        await console.press("ampersand", *"loading", "enter")
        await console.shows("filter 'loading' 2 of 90")
        assert "it/s" not in console.screen
        await console.press("ampersand", "ctrl+u", "exclamation_mark", *"tok", "enter")
        await console.shows("filter '!tok' 8 of 90")
        await console.press("escape")
        await console.shows("1 iteration 41/60")


async def test_the_ranks_logs_are_switched_and_merged_again(fake: FakeEngine) -> None:
    fake.add(fake_engine.running())
    async with opened(fake) as console:
        await console.shows("logs · all ranks")
        await console.press("right_square_bracket")
        await console.shows("logs · rank 0")
        await console.press("right_square_bracket")
        await console.shows("logs · rank 1")
        await console.press("left_square_bracket")
        await console.shows("logs · rank 0")
        await console.press("a")
        await console.shows("logs · all ranks")


async def test_enter_on_a_failed_run_jumps_to_the_line_that_proves_it(fake: FakeEngine) -> None:
    fake.add(fake_engine.failed())
    async with opened(fake, follow="20260314-134500-demo-b71c") as console:
        await console.shows("enter the line that proves it")
        await console.press("g")
        await console.press("enter")
        assert console.app.state.pane == "logs"
        view = console.app.deck.logs.view
        await console.until(lambda: view.copy_text().startswith("ValueError: batch 23"), "the line")


async def test_a_resize_keeps_the_place_in_the_log(fake: FakeEngine) -> None:
    fake.add(fake_engine.running())
    async with opened(fake) as console:
        await console.shows("1 iteration 41/60")
        await console.press("g", "j", "j")
        for _ in range(4):
            await console.press("tab")
        await console.press("slash", *"params", "escape")
        view = console.app.deck.logs.view
        view.move("top")
        view.move("down")
        await console.until(lambda: "512 examples" in view.text().splitlines()[1])
        top = view.text().splitlines()[0]
        for size in (SMALL, (200, 50), (120, 36)):
            await console.pilot.resize_terminal(*size)
            await console.until(lambda: view.text().splitlines()[:1] == [top])


async def test_copying_a_log_line_keeps_it_in_a_file_too(fake: FakeEngine) -> None:
    fake.add(fake_engine.running())
    async with opened(fake) as console:
        await console.shows("1 iteration 41/60")
        await console.press("slash", *"million", "enter")
        await console.shows("million parameters")
        await console.press("y")
        await console.until(lambda: bool(console.notifications))
        assert "training 0.377 of 0.476 million parameters" in console.app.clipboard
        assert len(list((fake.home / "saved").iterdir())) == 1


async def test_the_clock_may_tick_when_the_screens_have_gone(fake: FakeEngine) -> None:
    async with opened(fake) as console:
        pass
    assert console.app.screen_stack == []
    console.app._tick()
