"""A run that has ended is started again, and the settings are changed, from the console."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config.edit import write_settings
from engine.config.load import load_config
from engine.config.models import Config
from engine.config.overrides import Settings
from engine.models import CheckResult, NodeFacts, RunState
from engine.plan.document import TrainingPlan
from engine.snapshots import ResultFile, RunResult, RunSnapshot
from tests.tui import fake_engine
from tests.tui.conftest import SIZE, Console, opened
from tests.tui.fake_engine import FakeEngine, configuration
from tui.screens.settings import SettingsForm

CHECKPOINT = ResultFile("checkpoint", False, 37, "ultra", "/srv/step-37", "step-37", 1_500_000, "f")


def aborted() -> RunSnapshot:
    return replace(fake_engine.aborted(), result=RunResult(files=(CHECKPOINT,)))


RUN = aborted().record.id


async def shown(console: Console) -> None:
    await console.until(lambda: console.app.state.snapshot is not None, "the run")


@pytest.mark.parametrize("size", SIZE)
async def test_the_ways_to_start_it_again_are_said_before_one_is_taken(fake: FakeEngine, size: tuple[int, int]) -> None:
    fake.add(aborted())
    async with opened(fake, size=size, follow=RUN) as console:
        await shown(console)
        await console.press("R")
        await console.shows("a letter or enter chooses")
        assert f"start {RUN} again" in console.screen
        assert "this run, from iteration 37 (checkpoint on ultra)" in console.screen
        assert "a new run: same configuration, data and versions" in console.screen
        assert "a new run with other settings" in console.screen
        await console.press("r")
        await console.until(lambda: fake.resumed == [RUN], "the resumption")


async def test_a_run_of_the_history_is_run_again_and_shown(fake: FakeEngine) -> None:
    fake.add(aborted(), fake_engine.running())
    fake.put(replace(fake_engine.running(), record=fake_engine.record("20260314-140126-demo-3f9a", RunState.FAILED)))
    async with opened(fake) as console:
        await console.press("5", "R")
        await console.shows("a letter or enter chooses")
        await console.press("s")
        await console.until(lambda: fake.repeated == [(RUN, {})], "the repetition")
        await console.until(lambda: console.app.state.snapshot is not None, "the new run")


async def test_what_has_changed_is_named_and_asked_for(fake: FakeEngine) -> None:
    fake.add(aborted())
    fake.changed_inputs = "train.jsonl: crc32 1 then, crc32 2 now; mlx: 0.32.1 then, 0.32.4 now"
    async with opened(fake, follow=RUN) as console:
        await shown(console)
        await console.press("R", "s")
        await console.shows("mlx: 0.32.1 then, 0.32.4 now")
        assert "train.jsonl: crc32 1 then, crc32 2 now" in console.screen and fake.repeated == []
        await console.press("right", "enter")
        await console.until(lambda: fake.repeated == [(RUN, {})], "the repetition")


@pytest.mark.parametrize("size", SIZE)
async def test_a_run_is_run_again_with_other_settings_beside_their_plan(
    fake: FakeEngine, size: tuple[int, int]
) -> None:
    fake.add(aborted())
    async with opened(fake, size=size, follow=RUN) as console:
        await shown(console)
        await console.press("R", "c")
        await console.shows("memory  ")
        await console.press(*"5e-4")
        await console.shows("was 0.001")
        await console.press("down", "0")
        await console.shows("a whole number, 1 or more")
        await console.press("enter", "enter")
        assert fake.repeated == [], "a fault is not launched"
        await console.press("backspace", *"16")
        await console.shows("16 per update")
        await console.press("enter", "enter")
        await console.until(
            lambda: fake.repeated == [(RUN, {"learning_rate": 5e-4, "batch_size": 16})], "the repetition"
        )


async def test_settings_are_changed_before_a_launch(fake: FakeEngine) -> None:
    config = fake.configuration("")
    async with opened(fake, config=config) as console:
        await console.press("n", "c", *"2e-3", "enter", "enter")
        await console.until(lambda: len(fake.launched) == 1, "the launch")
        assert fake.launched[0].job.mlx_lm["learning_rate"] == 2e-3
        assert fake.written == [], "there is no file"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (file := tmp_path / "flightdeck.toml").write_text('[[node]]\n[job]\nmodel = "m"\ndata = "d"\niters = 50\n')
    return file


async def test_the_plan_of_a_file_that_is_edited_while_it_is_made_is_made_anew(
    fake: FakeEngine, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, goes_on, made = fake.plan, threading.Event(), list[tuple[Config, TrainingPlan]]()

    async def slow(config: Config, *, facts: Sequence[NodeFacts] | None = None) -> TrainingPlan:
        made.append((config, await plan(config, facts=facts)))
        while not goes_on.is_set():
            await asyncio.sleep(0.01)
        return made[-1][1]

    monkeypatch.setattr(fake, "load_config", load_config)
    monkeypatch.setattr(fake, "plan", slow)
    async with opened(fake, config=file) as console:
        await console.until(lambda: len(made) == 1, "the first plan's start")
        file.write_text(file.read_text().replace("iters = 50", "iters = 75"))
        await console.shows("changed       iters 50 → 75")
        await console.until(lambda: not console.app.state.probing, "the probe")
        goes_on.set()
        await console.until(lambda: console.app.state.plan is not None, "a plan")
        assert [config.job.mlx_lm["iters"] for config, _ in made] == [50, 75]
        assert console.app.state.plan is made[1][1]


async def test_an_edit_is_read_at_once_and_its_keys_are_said(
    fake: FakeEngine, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "load_config", load_config)
    async with opened(fake, config=file) as console:
        file.write_text(file.read_text().replace("iters = 50", "iters = 75"))
        await console.shows("changed       iters 50 → 75")
        assert console.notifications == [f"{file} was edited: iters 50 → 75"]
        await console.press("n")
        await console.shows("launch m?")
        assert "changed       iters 50 → 75" in console.screen
        await console.press("escape")
        good, faulty = file.read_text(), file.read_text().replace("iters = 75", "iters = 0  # none")
        file.write_text(faulty)
        await console.shows("line 5: iters = 0  # none")
        assert "job.iters = 0: expected" in console.screen and console.app.state.config is not None
        await console.press("n")
        await console.shows("what was read before still counts")
        await console.press("escape")
        file.write_text(good.replace("75", "80"))
        await console.shows("changed       iters 50 → 80")
        assert "expected" not in console.screen


async def test_the_checks_of_a_run_are_said_to_be_its_own_and_an_edit_after_them_too(
    fake: FakeEngine, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "load_config", load_config)
    fake.launched.append(load_config(file))
    async with opened(fake.add(aborted()), config=file, follow=RUN) as console:
        await console.shows("2 preflight · of the run: passed")
        assert "not the run's" not in console.screen
        file.write_text(file.read_text().replace("iters = 50", "iters = 75"))
        await console.shows("the configuration is not the run's: r here checks it")
        await console.check()
        assert "of the run" not in console.screen and "not the run's" not in console.screen


async def test_an_edit_after_a_launch_is_one_of_what_was_launched(
    fake: FakeEngine, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "load_config", load_config)
    async with opened(fake, config=file) as console:
        await console.press("n", "right", "enter")
        await console.until(lambda: console.app.state.active, "the run")
        fake.put(replace(fake_engine.running(), record=fake_engine.record(state=RunState.FAILED)))
        await console.until(lambda: not console.app.state.active, "its end")
        file.write_text(file.read_text().replace("iters = 50", "iters = 75"))
        await console.shows("the configuration is not the run's: r here checks it")
        assert console.notifications[-1] == f"{file} was edited: iters 50 → 75"


async def test_a_file_that_was_edited_before_a_command_launched_it_does_not_differ(
    fake: FakeEngine, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared, differences = list[list[str]](), fake.differences

    def counted(run: str, config: Config) -> list[str]:
        compared.append(differences(run, config))
        return compared[-1]

    monkeypatch.setattr(fake, "load_config", load_config)
    monkeypatch.setattr(fake, "differences", counted)
    async with opened(fake, config=file) as console:
        file.write_text(file.read_text().replace("iters = 50", "iters = 75"))
        await console.until(lambda: bool(console.app.state.edits), "the edit")
        fake.launched.append(load_config(file))
        fake.add(fake_engine.running())
        await console.until(lambda: bool(compared), "the comparison")
        await console.shows("2 preflight · passed")
        assert compared[-1] == [] and "not the run's" not in console.screen


async def test_checks_of_a_file_that_is_edited_meanwhile_are_run_anew(
    fake: FakeEngine, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked, goes_on = list[Config](), threading.Event()

    async def slow(config: Config, *, skip: Iterable[str] = ()) -> AsyncIterator[CheckResult]:
        checked.append(config)
        for number, result in enumerate(fake.check_results):
            while number and not goes_on.is_set():
                await asyncio.sleep(0.01)
            summary = f"iters {config.job.mlx_lm['iters']}"
            yield result.model_copy(update={"summary": summary})

    monkeypatch.setattr(fake, "load_config", load_config)
    monkeypatch.setattr(fake, "preflight", slow)
    async with opened(fake, config=file) as console:
        await console.press("2", "r")
        await console.shows("iters 50")
        file.write_text(file.read_text().replace("iters = 50", "iters = 75"))
        await console.until(lambda: bool(console.app.state.edits), "the edit")
        goes_on.set()
        await console.until(lambda: len(checked) == 2 and console.app.state.busy is None, "the checks")
        assert {check.summary for check in console.app.state.checks} == {"iters 75"}


@pytest.mark.parametrize(
    ("edit", "notice"),
    [
        (("iters", "iters"), ""),
        (("iters = 50", "iters = 75"), "iters 50 → 75"),
        (("[[node]]", '[[node]]\nssh = "elsewhere"\npython = "/p"'), "ssh 127.0.0.1 → elsewhere"),
    ],
    ids=["nothing", "a setting", "the host"],
)
async def test_what_an_editor_writes_beside_the_settings_is_not_launched_unseen(
    fake: FakeEngine, file: Path, monkeypatch: pytest.MonkeyPatch, edit: tuple[str, str], notice: str
) -> None:
    def write(config: Config, changes: Settings) -> None:
        file.write_text(file.read_text().replace(*edit))
        write_settings(config, changes)

    monkeypatch.setattr(fake, "load_config", load_config)
    monkeypatch.setattr(fake, "write_settings", write)
    async with opened(fake, config=file) as console:
        await console.press("n", "c", *"2e-3", "enter", "enter")
        refused = "nothing was launched: the file has changed meanwhile"
        await console.until(lambda: bool(fake.launched) or refused in " ".join(console.notifications), "an answer")
        assert bool(fake.launched) == (not notice)
        assert notice in " ".join(console.notifications)
    assert load_config(file).job.mlx_lm["learning_rate"] == 2e-3


async def test_an_editor_that_cannot_be_read_is_a_notice(
    fake: FakeEngine, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "load_config", load_config)
    monkeypatch.setenv("VISUAL", "nano '")
    async with opened(fake, config=file) as console:
        await console.press("e")
        assert console.notifications == ["editor: No closing quotation"]


async def test_the_configuration_is_edited_in_the_editor(
    fake: FakeEngine, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "load_config", load_config)
    monkeypatch.setenv("VISUAL", "nano -w")
    asked: list[list[str]] = []
    async with opened(fake, config=file) as console:
        monkeypatch.setattr(console.app, "_in_terminal", lambda *arguments: asked.append(arguments[3]()))
        await console.press("e")
        assert asked == [["nano", "-w", str(file)]]


async def test_an_answer_that_comes_while_the_settings_are_taken_down_is_dropped(fake: FakeEngine) -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async def plan(_: Config) -> str:
        asked.set()
        await answer.wait()
        # Its parts go before the work that a screen has begun.
        await form.remove_children()
        return "too late"

    form = SettingsForm("settings", configuration(), 70, plan, "nothing")
    async with opened(fake) as console:
        console.app.push_screen(form)
        await console.until(asked.is_set)
        answer.set()
        await console.until(lambda: all(worker.is_finished for worker in form.workers))
        assert "too late" in form.body and console.app.is_running
