"""The key that uses a run's result: what it offers, why not, what it starts, and the way back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

import pytest

from engine.api import TaskRequest
from engine.models import RunState
from engine.snapshots import ResultFile, RunResult, RunSnapshot, TrainedFile
from engine.task_result import Fused
from tests.tui import fake_engine
from tests.tui.conftest import DASHBOARD, SIZE, WIDE, Console, opened
from tests.tui.fake_engine import FakeEngine
from tui.screens.use import Choices

SOURCE: Final = fake_engine.succeeded().record.id
CHECKPOINT: Final = ResultFile("checkpoint", False, 60, "local-0", "/c/step-60/weights", "step-60/weights", 9, "0" * 64)


@asynccontextmanager
async def showing(fake: FakeEngine, run: str = SOURCE, size: tuple[int, int] = DASHBOARD) -> AsyncIterator[Console]:
    async with opened(fake, size=size, follow=run) as console:
        await console.until(lambda: console.app.state.snapshot is not None, "the run")
        yield console


@pytest.mark.parametrize("size", SIZE)
async def test_u_lists_what_a_result_is_good_for(fake: FakeEngine, size: tuple[int, int]) -> None:
    fake.add(fake_engine.trained())
    async with showing(fake, size=size) as console:
        await console.press("u")
        await console.shows("a letter or enter chooses")
        for label in ("chat", "evaluate", "fuse", "serve", "fetch", "publish"):
            assert f"  {label} " in console.screen


@pytest.mark.parametrize(
    ("keys", "request_"),
    [
        (("e",), TaskRequest("evaluate", divided=True)),
        (("j", "enter"), TaskRequest("evaluate", divided=True)),
        (("f", "b"), TaskRequest("fuse", {"keep": 0.95}, divided=None)),
        (("f", "d"), TaskRequest("fuse", {"keep": 0.95, "dequantize": True}, divided=None)),
        (("f", "4"), TaskRequest("fuse", {"keep": 0.95, "bits": 4}, divided=None)),
        (("s",), TaskRequest("serve", {"host": "127.0.0.1", "port": 8080, "max_tokens": 512}, divided=None)),
    ],
)
async def test_a_task_is_started_after_a_confirmation_and_shown(
    fake: FakeEngine, keys: tuple[str, ...], request_: TaskRequest
) -> None:
    fake.add(fake_engine.trained())
    async with showing(fake) as console:
        await console.press("u", *keys)
        await console.shows("Cancel")
        assert fake.started == [] and SOURCE in console.screen
        await console.press("right", "enter")
        await console.shows(f"{request_.kind} of {SOURCE}")
        assert fake.started == [(SOURCE, request_)]
        await console.press("escape")
        await console.until(lambda: console.app.state.snapshot is not None, "its run")
        await console.shows(f"4 run · {SOURCE}")


async def test_a_letter_right_behind_the_key_is_for_the_dialog(fake: FakeEngine) -> None:
    """e is the next error of the log otherwise, and the result is read in another thread."""
    fake.add(fake_engine.trained())
    async with showing(fake) as console:
        console.app.deck.action_press("u")
        await console.press("c")
        await console.shows("tower to heron")


@pytest.mark.parametrize(
    ("snapshot", "why"),
    [
        (replace(fake_engine.succeeded(), result=RunResult()), "it has saved no weights"),
        (fake_engine.running(), "it is running"),
    ],
)
async def test_what_cannot_be_done_now_says_why_and_stays(fake: FakeEngine, snapshot: RunSnapshot, why: str) -> None:
    fake.why_no_tasks = why
    fake.add(snapshot)
    async with showing(fake, snapshot.record.id) as console:
        await console.press("u", "e")
        await console.shows(f"evaluate   not now: {why}")
        assert isinstance(console.app.screen, Choices)
        await console.press("enter", "s", "F", "p")
        assert isinstance(console.app.screen, Choices)
        await console.press("escape")
        assert console.on_deck and fake.started == []


async def test_a_state_in_parts_is_served_by_one_node_loaded_on_all_that_have_a_part_and_evaluated_on_all(
    fake: FakeEngine,
) -> None:
    source = fake_engine.succeeded()
    parts = (("local-1", "/c/part0/step-80", "f"), ("local-2", "/c/part1/step-80", "f"))
    trained = TrainedFile("/c/part0/step-80", 7, "local-1", "", None, parts, 80)
    fake.add(replace(source, trained=trained, result=RunResult()))
    async with showing(fake, size=WIDE) as console:
        await console.press("u")
        await console.shows("fuse       into one model on local-1, and")
        assert "at 127.0.0.1:8080 of local-1, until" in console.screen
        for key, nodes in (("s", "local-1, local-2 "), ("e", "local-1, local-2, local-0 ")):
            await console.press(key)
            await console.shows(f"on            {nodes}")
            assert key == "e" or "8080/v1 of local-1 lasts" in " ".join(console.screen.replace("│", " ").split())
            await console.press("escape", "u")
            await console.shows("a letter or enter chooses")


async def test_what_was_fused_is_published_although_a_checkpoint_alone_was_left(fake: FakeEngine) -> None:
    fused = fake_engine.task("fuse", RunState.SUCCEEDED, Fused(path="/fused", bytes=7, kept=0.99, accepted=True))
    source, alone = fake_engine.trained(), "it has left a checkpoint alone"
    assert source.result is not None
    fake.add(replace(source, result=replace(source.result, files=(CHECKPOINT,))))
    async with showing(fake, size=WIDE) as console:
        await console.press("u")
        await console.shows(f"publish    not now: {alone}")
        await console.press("escape")
        fake.add(fused)
        await console.press("u")
        await console.shows("publish    for LM Studio")
        assert f"fetch      not now: {alone}" in console.screen


async def test_what_was_trained_in_parts_is_served_in_parts_and_that_is_said(fake: FakeEngine) -> None:
    source = fake_engine.trained()
    assert source.trained is not None
    fake.add(replace(source, trained=replace(source.trained, divided=True)))
    async with showing(fake, size=WIDE) as console:
        await console.press("u")
        await console.shows("ask it, beside its base model, its layers divided over")
        await console.press("s")
        await console.shows("one request at a time: its layers are")
        assert "on            local-0, local-1 " in console.screen


async def test_what_cannot_be_served_can_still_be_evaluated(fake: FakeEngine) -> None:
    source = fake_engine.trained()
    assert source.trained is not None
    fake.add(replace(source, trained=replace(source.trained, unserved="serving needs an MLX run")))
    async with showing(fake) as console:
        await console.press("u")
        await console.shows("chat       not now: serving needs an MLX run")
        await console.shows("serve      not now: serving needs an MLX run")
        await console.shows("evaluate   loss and perplexity")


async def test_no_task_is_started_where_another_run_uses_the_nodes(fake: FakeEngine) -> None:
    fake.add(fake_engine.running(), fake_engine.trained())
    async with showing(fake) as console:
        await console.press("u", "e")
        await console.shows("not now: 20260314-140126-demo-3f9a uses the nodes: 5 lists it")
        assert isinstance(console.app.screen, Choices)


async def test_a_run_is_used_from_the_history(fake: FakeEngine) -> None:
    fake.add(fake_engine.failed(), fake_engine.trained())
    async with opened(fake) as console:
        await console.press("5", "j", "u")
        await console.shows(f"use {SOURCE}")


async def test_a_refused_fusion_shows_its_ways_out_and_the_dialog_their_sizes(fake: FakeEngine) -> None:
    fused = fake_engine.refused()
    fake.add(fused, fake_engine.trained())
    async with showing(fake, fused.record.id) as console:
        await console.shows("u f fuses it in another form")
        assert "--bits 8" in console.screen and "no loss yet" not in console.screen
        await console.press("u", "f")
        await console.shows("quantized anew, 1.0 MB")
        assert "(tried: kept 10.0% of the gain)" in console.screen


async def test_a_task_that_runs_shows_phases_and_nothing_of_a_training(fake: FakeEngine) -> None:
    evaluation = fake_engine.task("evaluate", RunState.RUNNING)
    fake.add(evaluation, fake_engine.trained())
    async with showing(fake, evaluation.record.id) as console:
        await console.shows(f"evaluate of {SOURCE}")
        assert "validating" in console.screen and "ctrl+x stops it" in console.screen
        for text in ("loss", "step", "ETA", "compute"):
            assert text not in console.screen
        await console.press("L")
        assert console.notifications[-1:] == ["log axis: a task trains nothing"]
        await console.press("ctrl+x")
        await console.shows(f"the result of {SOURCE}, which it only reads")


async def test_history_has_tasks_below_their_run_with_their_outcomes(fake: FakeEngine) -> None:
    evaluation = fake_engine.task("evaluate", RunState.SUCCEEDED, *fake_engine.evaluated("base", "adapter"))
    fake.add(evaluation, fake_engine.failed(), fake_engine.trained())
    async with opened(fake) as console:
        await console.press("5")
        await console.shows("└ 20260314-140200-demo-9c1e-evaluate")
        rows = [line for line in console.screen.splitlines() if "-demo-" in line]
        assert [name in row for name, row in zip(("134500", SOURCE, "└ 2026"), rows, strict=False)] == [True] * 3
        await console.press("j")
        await console.shows("evaluate      ✓ succeeded 46 s ago · base 6.174, adapter 1.968")


async def test_a_result_is_published_and_what_comes_next_is_shown(fake: FakeEngine) -> None:
    fake.add(fake_engine.trained())
    async with showing(fake) as console:
        await console.press("u", "p", "o")
        await console.shows("ollama create demo")
        assert fake.published == [(SOURCE, "ollama", fake.home / SOURCE)]


async def test_the_hub_is_reached_by_command(fake: FakeEngine) -> None:
    fake.add(fake_engine.trained())
    async with showing(fake) as console:
        await console.press("u", "p", "u")
        await console.shows(f"flightdeck publish {SOURCE} --hub OWNER/NAME")
