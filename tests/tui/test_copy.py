"""What `y` copies: a command as it can be pasted into a shell here, chosen where there are several."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from engine.models import CheckResult, CheckStatus
from engine.snapshots import RunResult, TrackerStatus, TrainedFile
from tests.tui import fake_engine, macs
from tests.tui.conftest import SIZE, opened
from tests.tui.fake_engine import FakeEngine
from tui.screens.use import Choices

COMMAND = "/opt/mlx/bin/python -m mlx_lm generate --model /models/qwen --adapter-path '/a b/adapters' --prompt Hello"
USED = TrainedFile("/a b/adapters/adapters.safetensors", 1_500_000, macs.names(1)[0], COMMAND)
THERE = f"ssh ana@{USED.node}.local {shlex.quote(COMMAND)}"


@pytest.mark.parametrize("size", SIZE)
async def test_a_command_of_another_node_is_copied_whole_with_ssh_and_which_one_is_asked(
    fake: FakeEngine, size: tuple[int, int]
) -> None:
    tracker = TrackerStatus("tensorboard", "tensorboard --logdir '/runs/r/tensor board'")
    ended = replace(fake_engine.succeeded(), trained=USED, result=RunResult(), trackers=(tracker,))
    fake.add(ended)
    async with opened(fake, size=size, follow=ended.record.id, config=macs.configuration(2)) as console:
        await console.shows("succeeded")
        await console.press("4", "y")
        await console.shows("3  everything")
        await console.press("1")
        await console.until(lambda: console.on_deck and bool(console.notifications))
        assert console.app.clipboard == THERE
        await console.press("y", "j", "enter")
        await console.until(lambda: console.app.clipboard == tracker.use)
        assert sorted(path.read_text() for path in (fake.home / "saved").iterdir()) == [
            f"{THERE}\n",
            f"{tracker.use}\n",
        ]


async def test_of_a_described_run_the_chosen_command_is_copied(fake: FakeEngine) -> None:
    fake.add(ended := fake_engine.failed())
    async with opened(fake) as console:
        await console.press("5", "enter")
        await console.shows(f"flightdeck resume {ended.record.id}")
        await console.press("y")
        assert isinstance(console.app.screen, Choices)
        await console.press("1")
        await console.until(lambda: console.app.clipboard == f"flightdeck resume {ended.record.id}")
        await console.press("escape", "y")
        await console.until(lambda: console.app.clipboard == ended.record.id)


async def test_of_a_fix_on_several_nodes_all_or_that_of_one_is_copied(fake: FakeEngine) -> None:
    first, second = macs.names(2)
    fixes = {first: "kill 4711", second: "kill 4712"}
    whole = f"ssh ana@{first}.local 'kill 4711' && ssh bea@{second}.local 'kill 4712'"
    ports = CheckResult(name="ports_free", status=CheckStatus.FAIL, fix_command=whole, fixes=fixes)
    fake.found, fake.check_results = macs.facts(2), [ports]
    async with opened(fake, config=macs.configuration(2)) as console:
        await console.check()
        await console.press("y")
        await console.shows(f"on {second}")
        await console.press("3")
        await console.until(lambda: "kill 4712" in console.app.clipboard)
        assert console.app.clipboard.startswith("ssh ") and "4711" not in console.app.clipboard
        await console.press("y", "1")
        await console.until(lambda: console.app.clipboard == whole)
