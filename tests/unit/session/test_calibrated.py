"""A launch divides its batch as the newest calibration of the same job and nodes says, and says so."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from engine.config.mlx_lm_keys import with_defaults
from engine.config.models import FlightConfig
from engine.errors import InputError
from engine.models import CheckStatus, NodeFacts
from engine.planning.fingerprint import fingerprint
from engine.planning.shares import MISSING
from engine.preflight import performance
from engine.preflight.registry import CHECKS
from engine.runs.plan_file import Plan, read_plan
from engine.session import Engine
from engine.store.store import Store
from tests.unit.planning.calibrations import calibration, config

NAMES = ["a", "b", "c"]


def calibrated(
    home: Path,
    speeds: Mapping[str, float | None],
    *,
    days: float = 0,
    deck: FlightConfig | None = None,
    **fields: object,
) -> Engine:
    now, deck = datetime.now(UTC), deck or config(NAMES)
    facts = [NodeFacts(node=node.name, host=node.ssh, probed_at=now, mlx="0.32.4") for node in deck.nodes]
    Store(home).put_facts("studio", facts)
    known = fingerprint(deck, facts)
    taken = calibration(speeds, fingerprint=known, taken_at=now - timedelta(days=days), **fields)
    Store(home).put_calibration(taken)
    return Engine(home)


def planned(engine: Engine, names: list[str] = NAMES) -> Plan:
    return read_plan(engine._prepare(config(names), ()).plan)


def test_without_one_all_are_equal_and_the_plan_says_why(tmp_path: Path) -> None:
    plan = planned(Engine(tmp_path))
    assert plan.division is not None
    assert (plan.division.source, plan.division.warnings) == ("equal", (MISSING,))
    assert len({rank.share for rank in plan.ranks}) == 1
    assert plan.division.why_not == "not calibrated"


def test_a_fresh_one_gives_the_ranks_their_shares_and_what_is_predicted(tmp_path: Path) -> None:
    plan = planned(calibrated(tmp_path, {"a": 4.0, "b": 2.0, "c": 2.0}))
    assert [rank.share for rank in plan.ranks] == [0.5, 0.25, 0.25]
    assert plan.division is not None and plan.division.source == "calibrated"
    assert plan.division.tokens_per_s == pytest.approx(800, rel=0.01)
    assert plan.division.compute_s == {"a": 1.0, "b": 1.0, "c": 1.0}


def test_one_of_another_job_or_too_old_is_not_used(tmp_path: Path) -> None:
    engine = calibrated(tmp_path, {"a": 4.0, "b": 2.0, "c": 2.0}, days=31)
    old, other = planned(engine).division, planned(engine, ["a", "b"]).division
    assert old is not None and "31 days old" in old.reason and old.source == "equal"
    assert other is not None and other.reason == MISSING


def test_a_node_that_finished_nothing_is_left_out_of_the_launch(tmp_path: Path) -> None:
    plan = planned(calibrated(tmp_path, {"a": 4.0, "b": 0.0, "c": 1.0}))
    assert [(rank.rank, rank.node, rank.share) for rank in plan.ranks] == [(0, "a", 0.8), (1, "c", 0.2)]
    assert [node.name for node in plan.config.nodes] == ["a", "c"]
    assert plan.division is not None and plan.division.left_out == ("b",)


def test_when_none_is_left_nothing_is_launched(tmp_path: Path) -> None:
    engine = calibrated(tmp_path, {"a": 0.0, "b": 0.0, "c": 0.0})
    with pytest.raises(InputError, match="no node has any throughput"):
        planned(engine)
    assert engine.runs() == []


def test_a_plan_made_again_keeps_the_shares_of_the_others(tmp_path: Path) -> None:
    plan = planned(calibrated(tmp_path, {"a": 4.0, "b": 2.0, "c": 2.0})).without({"b"})
    assert {rank.node: rank.share for rank in plan.ranks} == pytest.approx({"a": 2 / 3, "c": 1 / 3})
    assert plan.division is not None and plan.division.tokens_per_s is None
    assert plan.division.why_not == "left out: b"
    assert plan.calibration is not None and [measure.node for measure in plan.calibration.nodes] == NAMES
    again = plan.without({"c"})
    assert again.division is not None and again.division.excluded == ("b", "c")


async def test_preflight_checks_the_nodes_that_a_launch_takes_and_says_so(tmp_path: Path) -> None:
    """The node that counts as offline fails no check, and is told."""
    deck = config(NAMES)
    here = {"ssh": "127.0.0.1", "workdir": str(tmp_path)}
    job = deck.job.model_copy(update={"mlx_lm": with_defaults({"batch_size": 8})})
    nodes = tuple(node.model_copy(update=here) for node in deck.nodes)
    deck = deck.model_copy(update={"job": job, "nodes": nodes})
    engine = calibrated(tmp_path, {"a": 4.0, "b": 0.0, "c": 1.0}, deck=deck)
    skip = [name for name in CHECKS if name != performance.NAME]
    results = [result async for result in engine.preflight(deck, skip=skip)]
    await engine.close()
    (found,) = [r for r in results if r.name == performance.NAME and r.status is not CheckStatus.RUNNING]
    assert found.status is CheckStatus.WARN and set(found.evidence) == {"a", "c"}
    assert "b finished nothing while it was measured: it counts as offline and is left out" in found.summary


async def test_preflight_refuses_as_a_launch_does_when_no_node_is_left(tmp_path: Path) -> None:
    engine = calibrated(tmp_path, {"a": 0.0, "b": 0.0, "c": 0.0})
    with pytest.raises(InputError, match="no node has any throughput"):
        async for _ in engine.preflight(config(NAMES)):
            pass


def test_a_stand_in_gives_no_prediction(tmp_path: Path) -> None:
    division = planned(calibrated(tmp_path, {"a": 4.0, "b": 2.0, "c": 2.0}, stand_in=True)).division
    assert division is not None and division.tokens_per_s is None and "stand-in" in (division.why_not or "")
