"""View 7: the copies of the nodes, and what its keys ask for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import pytest
from textual.widgets import OptionList

from engine.api import Config, NodeCopies, NodeCopy
from engine.errors import InputError
from engine.models import CheckResult, CheckStatus
from engine.snapshots import CopyProgress
from tests.tui import macs
from tests.tui.conftest import SMALL, opened
from tests.tui.fake_engine import FakeEngine
from tui.screens.copies import ModelCopies

TINY = NodeCopy(kind="model", name="org/tiny", revision="c0ffee" * 6, path="/hub/tiny", bytes=4_000_000_000, files=3)
ROWS = NodeCopy(kind="dataset", name="org/rows", path="/hub/rows", bytes=10, files=1, missing=("train.jsonl",))


@dataclass
class FakeModels:
    asked: list[tuple[str, ...]] = field(default_factory=list)
    copies: tuple[NodeCopy, ...] = (TINY, ROWS)

    async def each(self, config: Config) -> AsyncIterator[NodeCopies]:
        yield NodeCopies(node="ultra", cache="/hub", free_bytes=10**12, copies=self.copies)
        yield NodeCopies(node="max", problem="it does not answer")

    async def push(self, config: Config, name: str) -> AsyncIterator[CopyProgress]:
        self.asked.append(("push", name))
        yield CopyProgress("max", 1_000_000_000, 4_000_000_000)
        yield CopyProgress("max", 4_000_000_000, 4_000_000_000, "/hub/tiny")

    async def pull(self, config: Config, name: str, node: str) -> AsyncIterator[CopyProgress]:
        self.asked.append(("pull", name, node))
        yield CopyProgress("this machine", 1, 1, "/hub/tiny")

    async def verify(self, config: Config, name: str, *, dataset: bool) -> dict[str, Sequence[str] | str]:
        self.asked.append(("verify", name))
        return {"ultra": ("model.safetensors",)}

    async def remove(self, config: Config, name: str, node: str) -> int:
        self.asked.append(("rm", name, node))
        return 4_000_000_000


@pytest.fixture
def models(fake: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> FakeModels:
    monkeypatch.setattr(FakeEngine, "models", models := FakeModels(), raising=False)
    return models


async def test_the_copies_of_all_nodes_are_shown_and_each_key_does_what_the_command_does(
    fake: FakeEngine, models: FakeModels
) -> None:
    async with opened(fake, config=macs.configuration(2), size=SMALL) as console:
        await console.until(lambda: console.app.state.ready)
        await console.press("7")
        await console.shows("max: it does not answer")
        assert "org/tiny" in console.screen and "1 file missing" in console.screen
        for key, text in (("p", "copied and verified"), ("g", "copied and verified"), ("v", "damaged: model.safe")):
            await console.press(key)
            await console.shows(text)
        await console.press("n", *"org/x", "enter")
        await console.until(lambda: ("push", "org/x") in models.asked, "the push of a typed name")
        await console.shows("copied and verified")
        await console.press("ctrl+k")
        await console.shows("remove org/tiny?")
        await console.press("right", "enter")
        await console.shows("4.0 GB are free again")
        assert models.asked == [
            ("push", "org/tiny"), ("pull", "org/tiny", "ultra"), ("verify", "org/tiny"), ("push", "org/x"),
            ("rm", "org/tiny", "ultra"),
        ]  # fmt: skip


async def test_its_number_keys_lead_to_the_other_views_and_a_copy_goes_on_meanwhile(
    fake: FakeEngine, models: FakeModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = asyncio.Event()

    async def slow(config: Config, name: str) -> AsyncIterator[CopyProgress]:
        yield CopyProgress("max", 1_000_000_000, 4_000_000_000)
        while not goes_on.is_set():
            await asyncio.sleep(0.01)
        yield CopyProgress("max", 4_000_000_000, 4_000_000_000, "/hub/tiny")

    monkeypatch.setattr(models, "push", slow)
    async with opened(fake, config=macs.configuration(2)) as console:
        await console.until(lambda: console.app.state.ready)
        await console.press("7")
        await console.shows("max: it does not answer")
        await console.press("p")
        await console.shows("1.0 GB of 4.0 GB")
        await console.press("2")
        assert console.on_deck and console.app.state.view == "preflight"
        for key in ("2", "escape"):
            await console.press("7")
            await console.shows("1.0 GB of 4.0 GB")
            await console.press(key)
            assert console.on_deck and console.app.state.view == "preflight"
        goes_on.set()
        await console.until(lambda: "7: a copy has ended: copied and verified" in console.notifications)


async def test_rows_of_one_file_are_not_acted_on_by_another(
    fake: FakeEngine, models: FakeModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, listed = asyncio.Event(), list[str]()

    async def slow(config: Config) -> AsyncIterator[NodeCopies]:
        names = [node.name for node in config.nodes]
        while len(names) == 3 and not answers.is_set():
            await asyncio.sleep(0.01)
        listed.append(", ".join(names))
        for name in names:
            yield NodeCopies(node=name, cache="/hub", free_bytes=1, copies=(TINY,))

    monkeypatch.setattr(models, "each", slow)
    async with opened(fake, config=macs.configuration(2)) as console:
        await console.press("7")
        await console.shows("org/tiny")
        await console.press("escape")
        console.app.store.change(config=macs.configuration(3))
        await console.press("7")
        await console.shows("asking the nodes")
        assert "org/tiny" not in console.screen
        await console.press("ctrl+k")
        await console.shows("nothing is selected")
        await console.press("escape")
        console.app.store.change(config=macs.configuration(1))
        await console.press("7")
        answers.set()
        await console.shows("org/tiny")
        assert console.screen.count("org/tiny") == 1, f"of all that were asked: {listed}"
        await console.until(lambda: "asking the nodes" not in console.screen)
        assert "free in /hub" in console.screen and "nothing is selected" not in console.screen


async def test_nodes_of_another_file_are_asked_when_what_was_under_way_has_ended(
    fake: FakeEngine, models: FakeModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = asyncio.Event()

    async def slow(config: Config, name: str, *, dataset: bool) -> dict[str, Sequence[str] | str]:
        while not answers.is_set():
            await asyncio.sleep(0.01)
        return {"ultra": ("model.safetensors",)}

    monkeypatch.setattr(models, "verify", slow)
    async with opened(fake, config=macs.configuration(2)) as console:
        await console.press("7")
        await console.shows("org/tiny")
        await console.press("v")
        await console.shows("is hashed")
        await console.press("escape")
        console.app.store.change(config=macs.configuration(3))
        await console.press("7")
        assert "4.0 GB" not in console.screen
        answers.set()
        await console.shows("4.0 GB")
        await console.shows("verified: org/tiny")
        assert "damaged: model.safetensors" in console.screen


async def test_a_node_that_is_slow_holds_up_no_other_and_its_listing_is_not_the_copy_that_came_before(
    fake: FakeEngine, models: FakeModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = asyncio.Event()

    async def slow(config: Config) -> AsyncIterator[NodeCopies]:
        if not any(what == "rm" for what, *_ in models.asked):
            yield NodeCopies(node="max", cache="/hub", free_bytes=10**12, copies=(ROWS,))
        while not answers.is_set():
            await asyncio.sleep(0.01)
        yield NodeCopies(node="ultra", cache="/hub", free_bytes=10**12, copies=(TINY,))

    monkeypatch.setattr(models, "each", slow)
    async with opened(fake, config=macs.configuration(2)) as console:
        await console.press("7")
        await console.shows("hf:org/rows")
        assert "asking the nodes" in console.screen and "org/tiny" not in console.screen
        answers.set()
        await console.shows("org/tiny")
        assert console.screen.index("org/tiny") < console.screen.index("hf:org/rows")
        assert console.app.screen.query_one(OptionList).highlighted == 1, "the cursor stays on its row"
        answers.clear()
        await console.press("p")
        await console.shows("asking the nodes")
        assert "copied and verified" in console.screen
        await console.press("c")
        await console.shows("the listing was stopped")
        assert models.asked == [("push", "hf:org/rows")] and "copied and verified" in console.screen
        await console.press("r")
        await console.shows("asking the nodes")
        await console.press("ctrl+k")
        await console.shows("remove hf:org/rows?")
        await console.press("right", "enter")
        await console.shows("hf:org/rows is removed")
        await console.shows("asking the nodes")
        assert console.app.screen.query_one(OptionList).option_count == 1, "the row of what is removed goes at once"
        await console.press("v")
        await console.shows("verified: org/tiny")
        answers.set()
        await console.until(lambda: "asking the nodes" not in console.screen, "the listing that gave way")
        assert "verified: org/tiny" in console.screen


async def test_c_right_behind_a_key_leaves_none_under_way(fake: FakeEngine, models: FakeModels) -> None:
    async with opened(fake, config=macs.configuration(2)) as console:
        await console.press("7")
        await console.shows("max: it does not answer")
        view = console.app.get_screen("copies", ModelCopies)
        view.action_ask()
        await view.action_stop()
        await console.until(lambda: view._worker is not None and view._worker.is_finished)
        await console.press("v")
        await console.shows("damaged: model.safetensors")


async def test_c_stops_a_copy_and_a_failed_one_is_an_error(
    fake: FakeEngine, models: FakeModels, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends, stopped = asyncio.Event(), list[str]()

    async def slow(config: Config, name: str) -> AsyncIterator[CopyProgress]:
        try:
            yield CopyProgress("max", 1_000_000_000, 4_000_000_000)
            while not ends.is_set():
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            stopped.append(name)
            raise
        raise InputError("no space left")

    monkeypatch.setattr(models, "push", slow)
    async with opened(fake, config=macs.configuration(2), size=SMALL) as console:
        await console.press("7")
        await console.shows("max: it does not answer")
        await console.press("p", "p")
        await console.shows("a copy is under way: c stops it")
        await console.press("c")
        await console.shows("a copy was stopped")
        await console.until(lambda: stopped == ["org/tiny"], "the end of the push")
        await console.press("p", "escape")
        ends.set()
        await console.until(lambda: "7: a copy has failed: no space left" in console.notifications)
        assert [one.severity for one in console.app._notifications][-1] == "error"
        ends.clear()
        await console.press("7")
        await console.shows("max: it does not answer")
        await console.press("p")
        await console.shows("c stop ")
        await console.press("escape", "q")
    assert "a copy was under way; flightdeck models shows what is there" in " ".join(capsys.readouterr().err.split())


async def test_at_80_columns_an_incomplete_copy_leaves_every_row_its_name_revision_and_size(
    fake: FakeEngine, models: FakeModels
) -> None:
    shard = "model-00002-of-00004.safetensors"
    lacks = TINY.model_copy(update={"name": "mlx-community/Qwen3-4B-bf16", "missing": (shard,), "bytes": 10**11})
    models.copies = (TINY, lacks)
    async with opened(fake, config=macs.configuration(2), size=SMALL) as console:
        await console.until(lambda: console.app.state.ready)
        await console.press("7")
        await console.shows("it does not answer")
        rows = [line.strip("│ ").split() for line in console.screen.splitlines() if "c0ffeec0" in line]
        assert rows[0] == ["ultra", "org/tiny", "c0ffeec0", "4.0", "GB", "complete"]
        assert rows[1][1].startswith("mlx-community/Qwen3") and rows[1][2:5] == ["c0ffeec0", "100", "GB"]
        assert rows[1][5:8] == ["1", "file", "missing:"] and shard not in console.screen
        await console.press("j")
        await console.shows(shard)
        assert f"{lacks.name}: 1 file missing:" in console.screen


async def test_x_on_a_check_brings_the_model_that_the_nodes_lack(fake: FakeEngine, models: FakeModels) -> None:
    lacks = CheckResult(
        name="model_present", status=CheckStatus.FAIL, summary="max has no whole copy of org/tiny",
        fix_command="flightdeck models push org/tiny", fix_effect="copies it",
    )  # fmt: skip
    fake.check_results = [lacks]
    async with opened(fake, config=macs.configuration(2), size=SMALL) as console:
        await console.until(lambda: console.app.state.ready)
        await console.press("2", "r")
        await console.shows("no whole copy")
        await console.press("x")
        await console.shows("copied and verified")
        assert models.asked == [("push", "org/tiny")]


async def test_a_console_that_only_reads_copies_nothing(fake: FakeEngine, models: FakeModels) -> None:
    async with opened(fake, config=macs.configuration(2), size=SMALL, read_only=True) as console:
        await console.until(lambda: console.app.state.ready)
        await console.press("7")
        await console.shows("org/tiny")
        await console.press("p")
        await console.shows("this console only reads")
        assert models.asked == []
