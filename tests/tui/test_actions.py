"""The action table: one source of bindings, bar, help and README."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.snapshots import ResultFile, RunResult, TrainedFile
from tests.tui import fake_engine
from tests.tui.conftest import SMALL, opened
from tests.tui.fake_engine import FakeEngine
from tui.actions import ACTIONS, BY_ID, GROUPS, action_for, bar, keys, label, markdown
from tui.app import FlightDeckApp
from tui.screens.deck import MOVES, DeckScreen
from tui.screens.settings import starts
from tui.screens.use import RunUse, uses
from tui.state import VIEWS, DeckState
from tui.widgets.chart import CHART_ACTIONS
from tui.widgets.logs_pane import LOG_ACTIONS

IDLE = DeckState(now=fake_engine.NOW, ready=True, config=fake_engine.configuration())
RUNNING = DeckState(now=fake_engine.NOW, ready=True, config=fake_engine.configuration(), snapshot=fake_engine.running(),
                    has_log=True)  # fmt: skip


def test_every_action_can_be_done_by_someone() -> None:
    for action in ACTIONS:
        owner = any(hasattr(part, f"do_{action.id}") for part in (DeckScreen, FlightDeckApp))
        view = action.group == "views" and action.id.removeprefix("view_") in VIEWS
        own = {"logs": LOG_ACTIONS, "chart": CHART_ACTIONS}.get(action.group, {})
        assert owner or view or action.id in own or action.id in MOVES, action.id
        assert action.group in GROUPS


def test_every_key_is_bound_on_the_deck() -> None:
    bound = {binding.key for binding in DeckScreen.BINDINGS}  # type: ignore[union-attr]
    assert bound == set(keys())


def test_nothing_destructive_is_on_a_bare_letter() -> None:
    assert [action.id for action in ACTIONS if action.dangerous] == ["abort", "cancel_item", "delete_run"]
    assert all(len(key) > 1 and "+" in key for action in ACTIONS if action.dangerous for key in action.keys)


@pytest.mark.parametrize("view", VIEWS)
def test_a_key_means_at_most_one_thing_in_a_view(view: str) -> None:
    state = DeckState(view=view, pane="run" if view in ("dashboard", "run") else view)
    for key in keys():
        meant = [action for action in ACTIONS if key in action.keys and action.applies(state)]
        assert len(meant) <= 1, (view, key, [action.id for action in meant])


def test_n_is_the_next_match_while_a_search_is_on_in_the_log_else_launch() -> None:
    def meaning(state: DeckState) -> str | None:
        action = action_for("n", state)
        return action.id if action else None

    assert meaning(IDLE) == "launch"
    assert meaning(DeckState(pane="logs", searching=True)) == "next_match"
    assert meaning(DeckState(pane="logs", searching=False)) == "launch"


def test_behind_a_run_that_has_ended_the_bar_names_the_plan() -> None:
    ended = replace(IDLE, snapshot=fake_engine.succeeded())
    named = [f"{action.shown_key} {label(action, ended)}" for action in bar(ended)]
    assert "esc plan" in named and "? help" in named
    assert "back" not in [action.id for state in (IDLE, RUNNING) for action in bar(state)]


def test_the_runs_view_names_the_launch_where_nothing_runs() -> None:
    def named(state: DeckState) -> list[str]:
        return [action.id for action in bar(replace(state, view="run"))]

    assert named(IDLE)[0] == "launch" and not {"abort", "search", "log_axis"} & set(named(IDLE))
    assert named(replace(IDLE, snapshot=fake_engine.succeeded()))[:3] == ["again", "launch", "search"]
    assert named(RUNNING)[:2] == ["abort", "search"]


async def test_at_80_columns_the_bar_of_an_ended_run_keeps_help_and_quit(fake: FakeEngine) -> None:
    fake.add(fake_engine.trained())
    async with opened(fake, size=SMALL) as console:
        console.app.open_run(fake_engine.trained().record.id)
        await console.until(lambda: "esc plan" in console.screen)
        assert console.screen.splitlines()[-1].rstrip().endswith("? help  q quit")


def test_a_run_that_cannot_be_served_has_no_chat_and_says_why() -> None:
    trained = TrainedFile("/home/ana/adapters", 7, "ana", "python", unserved="serving needs an MLX run")
    ended = replace(IDLE, snapshot=fake_engine.succeeded())
    assert ended.snapshot is not None
    torch = replace(ended, snapshot=replace(ended.snapshot, trained=trained))
    assert BY_ID["chat"].why_not(torch) == "serving needs an MLX run"


def test_what_cannot_be_fetched_says_why() -> None:
    def why(result: RunResult | None, busy: str | None = None) -> str | None:
        use = RunUse(replace(fake_engine.succeeded(), result=result), (), None)
        return next(choice.why_not for choice in uses(use, replace(IDLE, busy=busy)) if choice.label == "fetch")

    saved = ResultFile("adapter", False, 60, "ana", "/a", "a", 9, "0" * 64)
    assert (why(None) or "").startswith("it has not ended: `flightdeck fetch ")
    assert why(RunResult()) == "it has left no weights with hashes"
    alone = why(RunResult(files=(replace(saved, holds="checkpoint"),)))
    assert (alone or "").startswith("it has left a checkpoint alone: fuse it, or `flightdeck fetch ")
    assert (why(RunResult(files=(replace(saved, best=True),))) or "").endswith(" --best`")
    assert why(RunResult(files=(saved,))) is None
    assert why(RunResult(files=(saved,)), "launching") == "launching"


def test_where_there_is_a_configuration_the_demo_says_what_goes_on() -> None:
    assert BY_ID["demo"].why_not(IDLE) == "there is a configuration: n launches it"
    assert BY_ID["demo"].why_not(replace(IDLE, config=None)) is None


@pytest.mark.parametrize("view", VIEWS)
def test_the_bar_offers_help_and_quit_everywhere_and_only_what_applies(view: str) -> None:
    for pane in (view if view in ("nodes", "preflight", "calibration", "history") else "run", "logs"):
        state = DeckState(view=view, pane=pane)
        shown = bar(state)
        assert {"help", "quit"} <= {action.id for action in shown}
        assert all(action.applies(state) for action in shown)


def test_a_disabled_action_says_why() -> None:
    assert BY_ID["launch"].why_not(IDLE) is None
    assert BY_ID["launch"].why_not(RUNNING) == "20260314-140126-demo-3f9a has not ended: ctrl+x stops it"
    assert BY_ID["launch"].why_not(DeckState(ready=True)) == "there is no configuration: no flightdeck.toml here"
    other = replace(IDLE, runs=(fake_engine.record(),), snapshot=fake_engine.failed(), metrics=("loss",))
    opens = "5 lists it, enter twice opens it, ctrl+x stops it"
    assert BY_ID["launch"].why_not(other) == f"20260314-140126-demo-3f9a has not ended: {opens}"
    assert [choice.why_not for choice in starts(fake_engine.failed(), other.taken)][1] == (
        f"20260314-140126-demo-3f9a uses the nodes: {opens}"
    )
    assert BY_ID["next_metric"].why_not(other) is None
    assert BY_ID["next_metric"].why_not(replace(other, snapshot=None)) == "no run is shown: 5 lists them"
    assert BY_ID["abort"].why_not(RUNNING) is None
    assert BY_ID["abort"].why_not(DeckState(snapshot=fake_engine.failed())) == "20260314-134500-demo-b71c has ended"
    assert BY_ID["search"].why_not(IDLE) == "no log yet: no run is shown"


def test_single_nodes_of_a_pytorch_job_are_not_measured_but_its_scaling_is_and_c_ends_it() -> None:
    config = fake_engine.configuration()
    torch = replace(
        IDLE, config=config.model_copy(update={"job": config.job.model_copy(update={"framework": "torch"})})
    )
    why = "single nodes are measured with MLX: ranks of a PyTorch job have equal shares"
    assert [BY_ID[key].why_not(torch) for key in ("calibrate", "calibrate_quick", "scaling")] == [why, why, None]
    assert BY_ID["calibrate"].why_not(replace(torch, calibrating={})) is None
    assert BY_ID["calibrate"].why_not(IDLE) is None


def test_the_key_table_names_every_action() -> None:
    table = markdown()
    assert all(action.help in table for action in ACTIONS)
    assert "`ctrl+x`" in table and "`?`" in table
