"""The console on the real engine: a demo run launched with `n`, seen to learn, left, found again, and aborted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engine.api import Engine
from engine.config.models import Config
from engine.models import RunState
from tests.demo_copies import demo_below
from tests.faults.test_training import with_keys
from tests.tui.conftest import DASHBOARD, Console
from tui.app import FlightDeckApp
from tui.screens.stopping import Stopping

pytestmark = pytest.mark.busy

TAKE_SECONDS = ("gradient_layer", "versions_match")
"""Checks that tests/tui/test_cli_launch.py runs on the same demo."""


@asynccontextmanager
async def console_on(engine: Engine, config: Config) -> AsyncIterator[Console]:
    app = FlightDeckApp(engine, config)
    async with app.run_test(size=DASHBOARD) as pilot:
        yield Console(app, pilot)


async def test_a_real_run_is_launched_watched_left_found_again_and_aborted(home: Path) -> None:
    engine = Engine(demo_below(home))
    config = await asyncio.to_thread(engine.demo_config, ranks=2, iters=4000)
    config = with_keys(config, batch_size=2, max_seq_length=64)
    config = config.model_copy(update={"preflight": config.preflight.model_copy(update={"skip": TAKE_SECONDS})})
    async with console_on(engine, config) as console:
        await console.shows("launches it, after you confirm")
        await console.press("n", "right", "enter")
        await console.shows("preflight")
        await console.shows("── train")
        await console.shows("│   1 iteration")
        first = console.app.state.snapshot
        assert first is not None and first.series.train
        await console.press("q")
    run = first.record.id
    assert engine.runs.record(run).state is RunState.RUNNING, "quitting the console leaves the run alone"

    async with console_on(Engine(home), config) as console:
        await console.shows(f"4 run · {run}")
        await console.shows("▶ running")
        again = console.app.state.snapshot
        assert again is not None and (again.record.iteration or 0) >= (first.record.iteration or 0)
        await console.press("ctrl+x", "right", "enter")
        assert isinstance(console.app.screen, Stopping)
        await console.shows("aborted: no process of the run is left")
        await console.press("escape")
        await console.shows("■ aborted")
    record = Engine(home).runs.record(run)
    assert record.state is RunState.ABORTED and record.unconfirmed == []
