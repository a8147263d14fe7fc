"""Calibrations through the Engine: what a launch takes from them, and nodes that are in use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from engine.api import Engine
from engine.checks import performance
from engine.checks.context import CheckContext
from engine.checks.runner import CHECKS
from engine.cluster.host_locks import exclusive_hosts
from engine.config.mlx_lm_keys import with_defaults
from engine.config.models import Config
from engine.errors import InputError, NodesInUse
from engine.measurements import Calibration, CalibrationProgress
from engine.models import CheckStatus, NodeFacts
from engine.plan.fingerprint import fingerprint
from engine.plan.shares import MISSING
from engine.run.run_plan import RunPlan, read_plan
from engine.store.store import Store
from tests.tui.commands import flightdeck
from tests.unit.plan.calibrations import calibration, config
from tests.unit.run.run_maker import MadeRun, make_run_config

NAMES = ["a", "b", "c"]


def calibrated(
    home: Path,
    speeds: Mapping[str, float | None],
    *,
    days: float = 0,
    deck: Config | None = None,
    **fields: object,
) -> Engine:
    now, deck = datetime.now(UTC), deck or config(NAMES)
    facts = [NodeFacts(node=node.name, host=node.ssh, probed_at=now, mlx="0.32.4") for node in deck.nodes]
    Store(home).put_facts("studio", facts)
    known = fingerprint(deck, facts)
    taken = calibration(speeds, fingerprint=known, taken_at=now - timedelta(days=days), **fields)
    Store(home).put_calibration(taken)
    return Engine(home)


def planned(engine: Engine, names: list[str] = NAMES) -> RunPlan:
    return read_plan(engine.launches.make(config(names), ()).plan)


def test_without_one_all_are_equal_and_the_plan_says_why(tmp_path: Path) -> None:
    plan = planned(Engine(tmp_path))
    assert plan.division is not None
    assert (plan.division.source, plan.division.warnings) == ("equal", (MISSING,))
    assert len(set(plan.division.parts.values())) == 1
    assert plan.division.why_not == "not calibrated"


def test_a_fresh_one_gives_the_ranks_their_shares_and_what_is_predicted(tmp_path: Path) -> None:
    plan = planned(calibrated(tmp_path, {"a": 4.0, "b": 2.0, "c": 2.0}))
    assert plan.division is not None and plan.division.source == "calibrated"
    assert plan.division.parts == {"a": 0.5, "b": 0.25, "c": 0.25}
    assert plan.division.tokens_per_s == pytest.approx(800, rel=0.01)
    assert plan.division.compute_s == {"a": 1.0, "b": 1.0, "c": 1.0}


def test_one_of_another_job_or_too_old_is_not_used(tmp_path: Path) -> None:
    engine = calibrated(tmp_path, {"a": 4.0, "b": 2.0, "c": 2.0}, days=31)
    old, other = planned(engine).division, planned(engine, ["a", "b"]).division
    assert old is not None and "31 days old" in old.reason and old.source == "equal"
    assert other is not None and other.reason == MISSING


def test_a_node_that_finished_nothing_is_left_out_of_the_launch(tmp_path: Path) -> None:
    plan = planned(calibrated(tmp_path, {"a": 4.0, "b": 0.0, "c": 1.0}))
    assert plan.division is not None and plan.division.left_out == ("b",)
    assert (plan.nodes, plan.division.parts) == (("a", "c"), {"a": 0.8, "c": 0.2})


def test_a_configuration_differs_from_a_run_by_its_keys_and_not_by_a_node_that_was_left_out(tmp_path: Path) -> None:
    engine, deck = calibrated(tmp_path, {"a": 4.0, "b": 0.0, "c": 1.0}), config(NAMES)
    run = engine.launches.make(deck, ()).id
    assert engine.launches.differences(run, deck) == []
    edited = deck.model_copy(update={"job": deck.job.model_copy(update={"mlx_lm": {"iters": 7}})})
    assert "iters" in " ".join(engine.launches.differences(run, edited))
    assert engine.launches.differences(run, config(["a", "b"])) != []


def test_when_none_is_left_nothing_is_launched(tmp_path: Path) -> None:
    engine = calibrated(tmp_path, {"a": 0.0, "b": 0.0, "c": 0.0})
    with pytest.raises(InputError, match="no node has any throughput"):
        planned(engine)
    assert engine.runs.all() == []


def test_a_plan_made_again_keeps_the_shares_of_the_others(tmp_path: Path) -> None:
    plan = planned(calibrated(tmp_path, {"a": 4.0, "b": 2.0, "c": 2.0})).without({"b"})
    assert plan.division is not None and plan.division.tokens_per_s is None
    assert plan.division.parts == pytest.approx({"a": 2 / 3, "c": 1 / 3})
    assert plan.division.why_not == "left out: b"
    assert plan.calibration is not None and [measure.node for measure in plan.calibration.nodes] == NAMES
    again = plan.without({"c"})
    assert again.division is not None and again.division.excluded == ("b", "c")


async def test_preflight_checks_the_nodes_that_a_launch_takes_and_says_so(tmp_path: Path) -> None:
    """The node that counts as offline fails no check, and is named."""
    deck = config(NAMES)
    here = {"ssh": "127.0.0.1", "workdir": str(tmp_path)}
    job = deck.job.model_copy(update={"mlx_lm": with_defaults({"batch_size": 8})})
    nodes = tuple(node.model_copy(update=here) for node in deck.nodes)
    deck = deck.model_copy(update={"job": job, "nodes": nodes})
    engine = calibrated(tmp_path, {"a": 4.0, "b": 0.0, "c": 1.0}, deck=deck)
    skip = [name for name in CHECKS if name != performance.NAME]
    results = [result async for result in engine.checks.preflight(deck, skip=skip)]
    await engine.close()
    (found,) = [r for r in results if r.name == performance.NAME and r.status is not CheckStatus.RUNNING]
    assert found.status is CheckStatus.WARN and set(found.evidence) == {"a", "c"}
    assert "b completed no step during calibration: it counts as offline and is left out" in found.summary


async def test_preflight_refuses_as_a_launch_does_when_no_node_is_left(tmp_path: Path) -> None:
    engine = calibrated(tmp_path, {"a": 0.0, "b": 0.0, "c": 0.0})
    with pytest.raises(InputError, match="no node has any throughput"):
        async for _ in engine.checks.preflight(config(NAMES)):
            pass


def test_a_stand_in_gives_no_prediction(tmp_path: Path) -> None:
    division = planned(calibrated(tmp_path, {"a": 4.0, "b": 2.0, "c": 2.0}, synthetic_model=True)).division
    assert division is not None and division.tokens_per_s is None and "synthetic model" in (division.why_not or "")


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A calibration that has started goes on until its iterator is closed."""

    async def calibrate(
        _context: CheckContext, *, on_progress: Callable[[CalibrationProgress], None], **_options: Any
    ) -> Calibration:
        on_progress(CalibrationProgress("node0", "measuring"))
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr("engine.api.calibrations.calibrate", calibrate)


def measuring(config: Config) -> AsyncGenerator[CalibrationProgress | Calibration, None]:
    return Engine().calibrations.measure(config)


def elsewhere(config: Config) -> Config:
    nodes = (node.model_copy(update={"ssh": "elsewhere.local"}) for node in config.nodes)
    return config.model_copy(update={"nodes": tuple(nodes)})


async def test_a_calibration_keeps_launches_and_calibrations_out_until_it_is_left(home: Path, endless: None) -> None:
    config = make_run_config()
    async with aclosing(measuring(config)) as steps:
        await anext(steps)
        with pytest.raises(NodesInUse, match=r"127\.0\.0\.1: a calibration of job is going on there: pid"):
            await Engine().launches.launch(config)
        with pytest.raises(NodesInUse, match="a calibration of job"):
            await anext(measuring(config))
        await anext(other := measuring(elsewhere(config)))
        await other.aclose()
        assert Engine().runs.all() == []
    assert Engine().launches.make(config, ()).plan.exists()


async def test_a_run_that_goes_on_keeps_a_calibration_out_of_its_machines_alone(home: Path, endless: None) -> None:
    run = MadeRun(home).state("preflight", "launching", "running")
    Store(home).put_run(run.plan.record())
    config = make_run_config()
    with pytest.raises(NodesInUse, match=f"127.0.0.1: run {run.id} is going on there .*flightdeck abort {run.id}"):
        await anext(measuring(config))
    await anext(other := measuring(elsewhere(config)))
    await other.aclose()
    run.state("finishing", "succeeded").close()
    await anext(now := measuring(config))
    await now.aclose()


def test_a_launch_is_known_to_calibrations_from_its_first_moment(home: Path) -> None:
    directory = Engine().launches.make(make_run_config(), ())
    with pytest.raises(NodesInUse, match=directory.id):
        Engine().calibrations.check_idle(make_run_config())


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
    with exclusive_hosts(home, ["127.0.0.1"], "a calibration of job"):
        for command in ("launch", "calibrate"):
            done = flightdeck(home, command, "-c", str(file))
            assert (done.code, done.out) == (1, "")
            assert done.err.startswith("flightdeck: 127.0.0.1: a calibration of job is going on there: pid ")
            assert len(done.err.splitlines()) == 1
