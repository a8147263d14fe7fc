"""The queue by keys and by command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.api.queue import starting_time
from engine.queue.queue_files import QueueFiles
from tests.tui import fake_engine
from tests.tui.commands import flightdeck
from tests.tui.conftest import opened
from tests.tui.fake_engine import FakeEngine, configuration

CONFIG = """
[[node]]
name = "ana"
ssh = "ana.test"
python = "/usr/bin/python3"

[job]
name = "night"
command = ["true"]
"""


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of a queue starts."""
    monkeypatch.setattr("engine.api.queue.start_runner", lambda *_, **__: False)
    monkeypatch.setattr("engine.api.runs.start_runner", lambda *_, **__: False)
    yield


def items(home: Path) -> list[tuple[int, str]]:
    return [(item.id, item.state) for item in QueueFiles(home).read().items]


async def test_n_queues_while_a_run_goes_on_and_the_pane_orders_holds_and_cancels(fake: FakeEngine) -> None:
    fake.add(fake_engine.running())
    async with opened(fake, size=(80, 24)) as console:
        await console.press("n")
        await console.shows("put demo into the queue?")
        await console.press("right", "enter")
        await console.until(lambda: items(fake.home) == [(1, "waiting")], "the item")
        fake.queue.add([configuration()])
        await console.press("6")
        await console.until(lambda: len(console.app.deck.pane("queue").text().splitlines()) == 3, "both items")
        await console.press("J")
        await console.until(lambda: [item for item, _ in items(fake.home)] == [2, 1], "the order")
        await console.press("H")
        await console.until(lambda: items(fake.home) == [(2, "waiting"), (1, "held")], "the hold")
        await console.until(lambda: "held" in console.app.deck.pane("queue").text(), "the pane")
        await console.press("ctrl+k", "right", "enter")
        await console.until(lambda: items(fake.home) == [(2, "waiting"), (1, "cancelled")], "the end")
        await console.until(lambda: "cancelled" in console.app.deck.pane("queue").text(), "the pane")
        await console.press("H")
        assert "hold: item 1 is cancelled" in console.notifications


async def test_a_time_to_start_and_a_length_are_asked_for_and_read_as_the_command_reads_them(fake: FakeEngine) -> None:
    fake.add(fake_engine.running())
    async with opened(fake, size=(80, 24)) as console:
        await console.press("n", "up", "up")
        await console.shows("not before")
        await console.press(*"soon", "down", *"8x")
        await console.shows("'8x': expected a time such as 30m, 8h or 2d")
        assert "'soon' is no time" in console.screen and "Queue" in console.screen
        await console.press("backspace", "h", "up", *["backspace"] * 4, *"2099-12-31 22:00", "enter", "enter")
        await console.until(lambda: items(fake.home) == [(1, "waiting")], "the item")
    (item,) = QueueFiles(fake.home).read().items
    assert item.budget_s == 28_800 and item.after == starting_time("2099-12-31 22:00")


def test_a_grid_is_queued_listed_and_changed_by_command(home: Path, tmp_path: Path) -> None:
    (tmp_path / "flightdeck.toml").write_text(CONFIG)
    grid = ("--set", "recovery.lease_s=20,30")
    refused = flightdeck(home, "launch", *grid, cwd=tmp_path)
    assert refused.code == 2 and "asks for 2 runs" in refused.err and "--queue" in refused.err
    wishes = ("--after", "2099-12-31 22:00", "--for", "8h", "--stop-queue-on-failure")
    done = flightdeck(home, "launch", "--queue", *grid, *wishes, "--json", cwd=tmp_path)
    assert ", not before 2099-12-31 22:00" in done.err.splitlines()[0], done.err
    queued = json.loads(done.out)
    assert [(item["id"], item["budget_s"], item["stop_on_failure"]) for item in queued] == [
        (1, 28_800.0, True), (2, 28_800.0, True),
    ]  # fmt: skip
    assert queued[0]["name"] != queued[1]["name"] and queued[0]["hosts"] == {"ana": "ana.test:"}
    assert flightdeck(home, "queue", "move", "2", "1").out.startswith("item 2 (")
    assert flightdeck(home, "queue", "hold", "1").code == 0
    shown = flightdeck(home, "queue").out.splitlines()
    assert [line.split()[0] for line in shown] == ["ITEM", "2", "1"] and "not before" in shown[1]
    listed = json.loads(flightdeck(home, "queue", "--json").out)
    assert [(item["id"], item["state"]) for item in listed["items"]] == [(2, "waiting"), (1, "held")]
    assert flightdeck(home, "queue", "release", "1").code == flightdeck(home, "queue", "cancel", "1").code == 0


@pytest.mark.parametrize("arguments", [
    ("queue", "move", "1"), ("queue", "hold"), ("queue", "cancel", "7"), ("queue", "cancel", "1"),
    ("launch", "--after", "22:00"), ("launch", "--queue", "--follow"), ("launch", "--queue", "--after", "soon"),
    ("launch", "--after", ""), ("launch", "--queue", "--after", ""),
])  # fmt: skip
def test_what_cannot_be_done_is_refused_in_one_line(home: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "flightdeck.toml").write_text(CONFIG)
    assert flightdeck(home, "launch", "--queue", cwd=tmp_path).code == 0
    files = QueueFiles(home)
    files.change(lambda queue: queue.changed(1, "launching", run="r1").changed(1, "started"))
    done = flightdeck(home, *arguments, cwd=tmp_path)
    assert done.code == 2 and len(done.err.splitlines()) == 1, done
    assert items(home) == [(1, "started")]
