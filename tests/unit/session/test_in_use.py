"""A calibration and a run do not use a node at the same time, whichever is first and whoever asks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest

from engine.config.models import FlightConfig
from engine.errors import NodesInUse
from engine.measured import Calibration, CalibrationProgress
from engine.runs.occupancy import alone
from engine.session import Engine
from engine.store.store import Store
from tests.tui.commands import flightdeck
from tests.unit.watch.run_maker import MadeRun, flight_config


class Measuring(Engine):
    """A calibration that has begun, and goes on until it is left."""

    async def _measuring(
        self, config: FlightConfig, *, quick: bool
    ) -> AsyncGenerator[CalibrationProgress | Calibration, None]:
        while True:
            yield CalibrationProgress("node0", "measuring")


def elsewhere(config: FlightConfig) -> FlightConfig:
    nodes = (node.model_copy(update={"ssh": "elsewhere.local"}) for node in config.nodes)
    return config.model_copy(update={"nodes": tuple(nodes)})


async def test_a_calibration_keeps_launches_and_calibrations_out_until_it_is_left(home: Path) -> None:
    config = flight_config()
    async with aclosing(Measuring().calibrate(config)) as steps:  # type: ignore[type-var]
        await anext(steps)
        with pytest.raises(NodesInUse, match=r"127\.0\.0\.1: a calibration of job is going on there: pid"):
            await Engine().launch(config)
        with pytest.raises(NodesInUse, match="a calibration of job"):
            await anext(Measuring().calibrate(config))
        await anext(other := Measuring().calibrate(elsewhere(config)))
        await other.aclose()  # type: ignore[attr-defined]
        assert Engine().runs() == []
    assert Engine()._prepare(config, ()).plan.exists()


async def test_a_run_that_goes_on_keeps_a_calibration_out_of_its_machines_alone(home: Path) -> None:
    run = MadeRun(home).state("preflight", "launching", "running")
    Store(home).put_run(run.plan.record())
    config = flight_config()
    with pytest.raises(NodesInUse, match=f"127.0.0.1: run {run.id} is going on there .*flightdeck abort {run.id}"):
        await anext(Measuring().calibrate(config))
    await anext(other := Measuring().calibrate(elsewhere(config)))
    await other.aclose()  # type: ignore[attr-defined]
    run.state("finishing", "succeeded").close()
    await anext(now := Measuring().calibrate(config))
    await now.aclose()  # type: ignore[attr-defined]


def test_a_launch_is_known_to_calibrations_from_its_first_moment(home: Path) -> None:
    directory = Engine()._prepare(flight_config(), ())
    with pytest.raises(NodesInUse, match=directory.id):
        Engine()._check_idle(flight_config())


def test_the_command_line_says_so_in_one_line_and_fails(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "flightdeck.toml"
    file.write_text(
        f"""
        [cluster]
        name = "desk"
        [[node]]
        name = "here"
        ssh = "127.0.0.1"
        python = "/usr/bin/python3"
        workdir = "{tmp_path}"
        [job]
        name = "job"
        model = "/model"
        data = "/data"
        """
    )
    with alone(home, ["127.0.0.1"], "a calibration of job"):
        for command in ("launch", "calibrate"):
            done = flightdeck(home, command, "-c", str(file))
            assert (done.code, done.out) == (1, "")
            assert done.err.startswith("flightdeck: 127.0.0.1: a calibration of job is going on there: pid ")
            assert len(done.err.splitlines()) == 1
