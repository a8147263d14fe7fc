"""training_plan.json beside a run: of the nodes that the run has, and never lost to a count that takes long."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.checks.runner import CHECKS
from engine.cluster.transport.fleet import Fleet
from engine.measurements import Calibration, Division, NodeMeasure
from engine.models import CheckResult, CheckStatus, PreflightReport
from engine.run import preparation
from engine.run.effects import RunPreflight
from engine.run.preparation import Preparation, preflight_context, preflight_verdict, run_preflight
from engine.run.run_context import RunContext
from engine.run.run_plan import RunPlan, read_plan, write_plan
from engine.store.layout import RunDir
from tests.checks.conftest import make_config
from tests.damage import stalled

SPEEDS = {"node0": 3.0, "node1": 1.0, "node2": 2.0}


@pytest.fixture
def run_dir(home: Path) -> RunDir:
    directory = RunDir(home / "runs" / "r1")
    directory.path.mkdir(parents=True)
    return directory


@pytest.fixture
def train(tmp_path: Path) -> Path:
    """40 lines to train on."""
    (tmp_path / "data").mkdir()
    path = tmp_path / "data/train.jsonl"
    path.write_text('{"text": "a line"}\n' * 40)
    return path


@pytest.fixture
def plan(train: Path, tmp_path: Path) -> RunPlan:
    """Three ranks of this machine with calibrated shares; every check is skipped."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "llama"}')
    config = make_config(tmp_path / "model", train.parent, tmp_path, pythons=(sys.executable,) * len(SPEEDS))
    now = datetime.now(UTC)
    whole = sum(SPEEDS.values())
    division = Division(
        source="calibrated", reason="measured", parts={name: speed / whole for name, speed in SPEEDS.items()}
    )
    taken = Calibration(
        cluster="c",
        job="job",
        fingerprint="of three nodes",
        taken_at=now,
        nodes=tuple(NodeMeasure(node=name, host="127.0.0.1", examples_per_s=speed) for name, speed in SPEEDS.items()),
    )
    return RunPlan(
        nonce="n", config=config, run_id="r1", created_at=now, skip=tuple(CHECKS), division=division, calibration=taken
    )


async def checked(run_dir: RunDir, plan: RunPlan, home: Path) -> dict[str, Any]:
    """training_plan.json after the checks of a run."""
    async with Fleet(home) as fleet:
        context = preflight_context(plan, fleet)
        try:
            await run_preflight(run_dir, plan, context)
        finally:
            await context.close()
    return training_plan(run_dir)


def training_plan(run_dir: RunDir) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(run_dir.training_plan.read_bytes())
    return document


async def test_it_has_the_shares_of_the_run_and_names_the_checks_that_were_left_out(
    run_dir: RunDir, plan: RunPlan, home: Path
) -> None:
    document = await checked(run_dir, plan, home)
    assert {node["node"]: node["share"] for node in document["nodes"]} == pytest.approx(
        {"node0": 1 / 2, "node1": 1 / 6, "node2": 1 / 3}
    )
    assert document["data"] == {"examples": 40, "source": "counted in train.jsonl on node0"}
    assert all(listed["overridden"] for listed in document["pre_flight_checklist"]["checks"])


async def test_the_plan_has_the_result_of_the_comparison(run_dir: RunDir, plan: RunPlan, home: Path) -> None:
    before = (await checked(run_dir, plan, home))["worker_consistency"]
    assert (before["enabled"], before["agreement"], before["validation_checks"]) == (False, None, [])
    comparing = plan.model_copy(update={"skip": tuple(name for name in CHECKS if name != "worker_consistency")})
    part = (await checked(run_dir, comparing, home))["worker_consistency"]
    assert (part["enabled"], part["agreement"], part["reference"]) == (True, 1.0, "head")
    assert part["workers"] == 3 and part["while_training"]["enabled"], "what was planned is still there"


async def test_a_count_that_does_not_end_leaves_the_plan_without_it(
    run_dir: RunDir, plan: RunPlan, home: Path, train: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.checks.plan_inputs._LIMIT_S", 1.0)
    with stalled(train):
        document = await checked(run_dir, plan, home)
    assert [node["node"] for node in document["nodes"]] == list(SPEEDS)
    assert document["data"]["examples"] is None and "not counted: " in document["data"]["source"]


async def test_a_run_without_a_node_has_the_plan_of_the_others(
    run_dir: RunDir, plan: RunPlan, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plan(run_dir.plan, plan)
    await checked(run_dir, plan, home)
    without, meanwhile = plan.without(["node0"]), list[str]()

    async def preflight(*which: Any) -> PreflightReport:
        meanwhile.append(training_plan(run_dir)["reason"])
        return await run_preflight(*which)

    monkeypatch.setattr(preparation, "run_preflight", preflight)
    async with Fleet(home) as fleet:
        again = Preparation(cast(RunContext, SimpleNamespace(run_dir=run_dir, plan=without, fleet=fleet)))
        await again.check(RunPreflight({"node0": "worker_consistency: node0 differs"}))
        await again.close()
    assert meanwhile == ["it is made again without node0"]
    assert read_plan(run_dir.plan) == plan, "what was launched stays as it was"
    document = training_plan(run_dir)
    assert {node["node"]: node["share"] for node in document["nodes"]} == pytest.approx(
        {"node1": 1 / 3, "node2": 2 / 3}
    )
    assert document["hardware_calibration"]["enabled"] is True, "the calibration of all three is still known"
    assert any("node0 is left out" in warning["text"] for warning in document["warnings"])


def test_a_run_that_failed_in_preflight_tells_what_the_fix_changes() -> None:
    failed = CheckResult(name="ports_free", status=CheckStatus.FAIL, summary="40211 is held", fix_command="kill 7")
    ended = preflight_verdict(failed.model_copy(update={"fix_effect": "ends it"}))
    assert (ended.cause, ended.fix) == ("ports_free: 40211 is held; its fix ends it", "kill 7")
    assert preflight_verdict(failed).cause == "ports_free: 40211 is held"
