"""The set-up of a configuration in the console, from an empty folder to the checks."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from engine.api import Config, DataInspection, EnvironmentPlan
from engine.snapshots import CopyProgress
from tests.tui.conftest import SMALL, Console, opened
from tests.tui.fake_engine import FINGERPRINT, NOW, FakeEngine, FakeSetup
from tui.app import FlightDeckApp
from tui.screens.setup import Setup, _inspected

MOST_KEYS = 15


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty but for data."""
    folder = tmp_path / "studio"
    (folder / "data").mkdir(parents=True)
    (folder / "data/train.jsonl").write_text("{}\n")
    monkeypatch.chdir(folder)
    return folder


def screen(console: Console) -> Setup:
    screen = console.app.screen
    assert isinstance(screen, Setup)
    return screen


async def at(console: Console, step: str) -> None:
    await console.until(lambda: isinstance(console.app.screen, Setup) and screen(console).step.name == step, step)


async def answered(console: Console) -> None:
    await console.until(lambda: all(one.answer for one in screen(console).candidates.values()), "the answers")
    await console.until(lambda: len(screen(console).candidates) >= 3, "the hosts")


async def go_to_data(console: Console, *, chosen: bool = False) -> None:
    """`chosen`: the nodes, whose keys are accepted, and the model are, by a file or before."""
    await console.press("i")
    await answered(console)
    await console.press("enter", *["y"] * (not chosen))
    await at(console, "model")
    await console.press(*["m"] * (not chosen), "enter")
    await at(console, "data")


async def test_from_an_empty_folder_to_the_checks_in_few_keys(fake: FakeEngine, folder: Path) -> None:
    keys: list[str] = []
    async with opened(fake, config=None, size=SMALL) as console:

        async def press(*pressed: str) -> None:
            keys.extend(pressed)
            await console.press(*pressed)

        await press("i")
        await answered(console)
        assert screen(console).choices.chosen == ("ana@ultra.local", "max"), "Macs are taken by themselves"
        await console.shows(FINGERPRINT)
        await press("enter")
        await console.shows("max: compare the host keys, then y accepts them")
        await press("y")
        await at(console, "model")
        assert [offer.target for offer in fake.accepted] == ["max"]
        await console.press(*"~bob/Qwen3")
        await press("enter")
        await console.shows("job.model = '~bob/Qwen3': expected")
        await console.press(*["backspace"] * 10, *"~/Qwen3")
        await press("enter")
        await at(console, "data")
        await console.shows("why is the sky blue? scattering")
        await press("enter")
        await at(console, "method")
        await console.shows("does not fit")
        await press("right", "right", "-", "+", "+", "enter")
        await at(console, "file")
        await console.shows("# MLX Flight Deck")
        await press("enter")
        await console.until(lambda: console.on_deck, "the deck")
        await console.until(lambda: console.app.state.checks_at is not None, "the preflight")
        assert console.app.state.view == "preflight"
    written = tomllib.loads((folder / "flightdeck.toml").read_text())
    assert [node["ssh"] for node in written["node"]] == ["ana@ultra.local", "max"]
    job = {"model": "~/Qwen3", "data": "data", "fine_tune_type": "lora", "batch_size": 12, "iters": 2000}
    assert written["job"] == job, "six a rank are the most that fit"
    assert len(keys) <= MOST_KEYS, keys


async def test_it_is_left_and_taken_up_again_and_nodes_are_typed_and_ordered(fake: FakeEngine, folder: Path) -> None:
    async with opened(fake, config=None, size=SMALL) as console:
        await console.press("enter")
        await answered(console)
        await console.press("t", *"no host", "enter")
        await console.shows("'no host' is not a host")
        assert screen(console).choices.typed == (), "it would be in the way of each later search"
        assert screen(console).typed == "no host", "it can be corrected"
        await console.press("ctrl+a", "ctrl+k", *"gone", "enter")
        await console.until(lambda: "gone" in screen(console).candidates, "the typed host")
        assert "is not a host" not in console.screen
        await console.press("J")
        assert screen(console).choices.chosen == ("max", "ana@ultra.local", "gone")
        await console.press("down", "down", "down", "space", "enter", "y")
        await at(console, "model")
        await console.press("escape", "escape")
        await console.until(lambda: console.on_deck, "the deck")
    async with opened(fake, config=None, size=SMALL) as console:
        await console.press("i")
        await answered(console)
        assert screen(console).choices.chosen == ("max", "ana@ultra.local")
        assert "gone" in screen(console).candidates
    assert not (folder / "flightdeck.toml").exists()


async def test_space_asks_a_host_anew_that_has_not_answered(
    fake: FakeEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(fake, config=None, size=SMALL) as console:
        await console.press("enter")
        await answered(console)
        await console.press("t", *"gone", "enter")
        await console.shows("no answer within 10 s")
        ask = FakeSetup.ask
        monkeypatch.setattr(FakeSetup, "ask", lambda setup, host: ask(setup, "ana@ultra.local"))
        await console.press("down", "down", "down", "space", "space")
        candidates = screen(console).candidates
        await console.until(lambda: bool((one := candidates["gone"].answer) and one.answers), "its answer")
        assert screen(console).choices.chosen == ("ana@ultra.local", "max", "gone")


async def test_data_that_was_chosen_before_is_shown_when_it_is_taken_up_again(fake: FakeEngine, folder: Path) -> None:
    (folder / "more.jsonl").touch()
    async with opened(fake, config=None, size=SMALL) as console:
        await go_to_data(console)
        await console.press("down")
        await console.until(lambda: fake.setup.inspected[-1:] == ["more.jsonl"], "its rows")
        await console.press("escape", "escape", "escape")
        await console.until(lambda: console.on_deck, "the deck")
        await go_to_data(console, chosen=True)
        await console.shows("▸ more.jsonl")
        await console.shows("why is the sky blue?")
        await console.press("enter")
        await at(console, "method")


async def test_data_that_was_read_is_read_again_only_for_another_model(fake: FakeEngine, folder: Path) -> None:
    async with opened(fake, config=None, size=SMALL) as console:
        await go_to_data(console)
        await console.shows("why is the sky blue?")
        for key, step in (("enter", "method"), ("escape", "data"), ("enter", "method"), ("escape", "data")):
            await console.press(key)
            await at(console, step)
        await console.shows("why is the sky blue?")
        assert fake.setup.inspected == ["data"]
        await console.press("escape")
        await at(console, "model")
        await console.press("x", "enter")
        await at(console, "data")
        await console.until(lambda: fake.setup.inspected == ["data", "data"], "its tokens by another model")


async def test_a_found_host_that_is_asked_anew_keeps_what_was_found(
    fake: FakeEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, asleep = FakeSetup.ask, ["ana@ultra.local"]
    monkeypatch.setattr(FakeSetup, "ask", lambda setup, host: ask(setup, "gone" if host in asleep else host))
    async with opened(fake, config=None, size=SMALL) as console:
        await console.press("enter")
        await answered(console)
        asleep.clear()
        await console.press("space")
        candidates = screen(console).candidates
        await console.until(lambda: bool((one := candidates["ana@ultra.local"].answer) and one.answers), "its answer")
        assert candidates["ana@ultra.local"].host.sources == ("Bonjour",)


async def test_a_files_own_epochs_and_budget_are_changed_and_not_replaced(fake: FakeEngine, folder: Path) -> None:
    job = '[job]\nmodel = "~/Qwen3"\ndata = "data"\nbatch_tokens = 9000\nepochs = 3\n'
    (folder / "flightdeck.toml").write_text(f'[[node]]\nssh = "ana@ultra.local"\n{job}')
    async with opened(fake, config=None, size=SMALL) as console:
        await go_to_data(console, chosen=True)
        await console.shows("why is the sky blue?")
        await console.press("enter")
        await at(console, "method")
        await console.press("-", "-", "-", "right", "right", "left")
        await console.shows("1 epoch ")
        await console.shows("18,000 tokens")
        await console.press("+", "enter")
        await at(console, "file")
        await console.press("enter")
        await console.until(lambda: console.on_deck, "the deck")
    text = (folder / "flightdeck.toml").read_text()
    written = tomllib.loads(text)["job"]
    assert "batch_tokens = 18000\nepochs = 2\n" in text and not {"iters", "batch_size"} & written.keys()


async def test_data_that_cannot_be_trained_on_is_not_passed_over(fake: FakeEngine, folder: Path) -> None:
    (folder / "bad.csv").write_text("a,b,c\n1,2,3\n")
    async with opened(fake, config=None, size=SMALL) as console:
        await go_to_data(console)
        await console.press("down")
        await console.shows("line 1 has no text")
        await console.press("enter")
        await console.shows("it cannot be trained on as it is")
        assert screen(console).step.name == "data"
        await console.press("enter")
        await at(console, "method")


@pytest.mark.parametrize("moves_on", [False, True])
async def test_data_that_is_still_being_read_is_not_passed_over(
    moves_on: bool, fake: FakeEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bad.csv", "worse-bad.csv"):
        (folder / name).write_text("a,b,c\n1,2,3\n")
    inspect, read = FakeSetup.inspect, asyncio.Event()

    async def slow(self: FakeSetup, config: Config, *, shown: int) -> DataInspection:
        while config.job.data == "bad.csv" and not read.is_set():
            await asyncio.sleep(0.01)
        return await inspect(self, config, shown=shown)

    monkeypatch.setattr(FakeSetup, "inspect", slow)
    async with opened(fake, config=None, size=SMALL) as console:
        await go_to_data(console)
        while screen(console).typed != "bad.csv":
            await console.press("down")
        await console.shows("reading bad.csv")
        await console.press("enter")
        assert screen(console).step.name == "data"
        while moves_on and screen(console).typed != "worse-bad.csv":
            await console.press("down")
        await console.shows("line 1 has no text" if moves_on else "reading bad.csv")
        read.set()
        await console.until(lambda: not screen(console)._moving)
        assert ("it cannot be trained on as it is" in console.screen) != moves_on
        while screen(console).typed != "worse-bad.csv":
            await console.press("down")
        await console.shows("line 1 has no text")
        await console.press("ctrl+a", "ctrl+k", "enter")
        await console.shows("choose one, or type it")
        assert "it cannot be trained on as it is" not in console.screen


async def test_a_key_that_comes_before_the_engine_waits_for_it(fake: FakeEngine, folder: Path) -> None:
    app = FlightDeckApp(fake.engine, clock=lambda: NOW)
    async with app.run_test(size=SMALL) as pilot:
        console = Console(app, pilot)
        assert not app.state.ready
        app.do_setup()
        await console.until(lambda: isinstance(app.screen, Setup), "the set-up")


class FakeEnvironments:
    """One node has no room at first; the second making fails on it, the third is done."""

    def __init__(self) -> None:
        self.room, self.fails, self.made = False, True, list[str]()

    async def plan(self, config: Config, names: Sequence[str]) -> list[EnvironmentPlan]:
        problem = "" if self.room else "0.1 GB are free there"
        python = "~/.flightdeck/environments/0f/bin/python"
        return [EnvironmentPlan(node=name, ssh=name, python=python, problem=problem) for name in names]

    async def make(self, config: Config, plans: Sequence[EnvironmentPlan]) -> AsyncIterator[CopyProgress]:
        for plan in plans:
            self.made.append(plan.node)
            yield CopyProgress(plan.node, note="mlx is installed", failed=self.fails)


async def test_a_node_without_mlx_gets_an_environment(fake: FakeEngine, folder: Path) -> None:
    made = FakeEnvironments()
    cast(Any, fake).environments = made
    async with opened(fake, config=None, size=SMALL) as console:
        await console.press("i")
        await answered(console)
        await console.press("t", *"bare", "enter", "enter", "y")
        await at(console, "python")
        await console.shows("0.1 GB are free there")
        await console.press("enter")
        await console.shows("no environments can be made now")
        made.room = True
        await console.press("escape", "enter")
        await at(console, "python")
        await console.until(lambda: "0.1 GB" not in console.screen, "the new plan")
        await console.press("enter")
        await console.shows("not all were made")
        made.fails = False
        await console.press("enter")
        await at(console, "model")
        assert made.made == ["bare", "bare"]
        assert [node.answer.python for node in screen(console).nodes if node.answer and node.host.ssh == "bare"] == [
            "~/.flightdeck/environments/0f/bin/python"
        ]
        await console.press("escape")
        await at(console, "nodes")


def test_data_that_cannot_be_read_is_not_told_as_read() -> None:
    why = "/data has several subsets"
    read = DataInspection(
        node="vm", source="/data", conversion=None, files={}, lengths={}, rows=(), warnings=(), faults=(why,)
    )
    lines = [line.plain for line in _inspected(read, 70)]
    assert len(lines) == 2 and lines[0].endswith("vm, /data") and lines[1].endswith(why)
