"""What a supervisor launches is decided once, is in its journal, and is read from there by all that comes after."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from engine.checks import plan_inputs
from engine.checks.context import CheckContext
from engine.checks.runner import CHECKS
from engine.cluster.staging import HostLayout
from engine.cluster.transport.fleet import Fleet
from engine.config.models import RecoveryConfig
from engine.errors import LaunchError
from engine.models import Reason, RunState
from engine.plan.context import PlanInputs
from engine.plan.decisions import LaunchDecisions
from engine.plan.document import ChosenSettings
from engine.plan.network import NetworkPlan
from engine.plan.planner import make_plan
from engine.protocol.attempt import AttemptSpec
from engine.run import driver, preparation, supervisor
from engine.run.attempt import attempt_spec
from engine.run.events import Attempt, AttemptFailed, LaunchDecided, NodesExcluded, StateChanged, Verdict
from engine.run.journal import RunRecorder, read_journal
from engine.run.preparation import run_preflight
from engine.run.run_context import RunContext
from engine.run.run_plan import RunPlan, write_plan
from engine.run.supervisor import supervise
from engine.store.layout import RunDir
from tests.unit.launch.host_layouts import configured_network, local_layout
from tests.unit.plan.clusters import inputs, mac
from tests.unit.run.run_maker import MadeRun, made_decisions

RECORDED: dict[str, Any] = {
    "layer_split": "0-30,30-36",
    "validators": ("node1",),
    "settings": ChosenSettings(grad_checkpoint=7),
}
"""Not as a plan would decide it."""
SPLIT = "0-28,28-36"
"""As the plan of these two nodes decides."""


@dataclass
class Launches:
    """A run of two ranks of this machine, planned as two Macs, of which nothing is started."""

    run: MadeRun
    plan: RunPlan
    planned: PlanInputs
    plans_made: list[Any] = field(default_factory=list)
    specs: list[AttemptSpec] = field(default_factory=list)

    async def supervise(self, *, adopt: bool = False, resume: bool = False) -> None:
        recorder = RunRecorder(self.run.close().directory.journal, self.plan, lambda _record: None)
        if resume:
            supervisor.reopen(recorder)
        await supervise(
            RunContext(self.run.directory, self.plan, recorder, Fleet(self.run.home), self.run.home / "node"),
            adopt=adopt,
        )
        recorder.close()

    @property
    def decided(self) -> list[LaunchDecisions]:
        journal = read_journal(self.run.directory.journal)
        return [event.decisions for event in journal if isinstance(event, LaunchDecided)]

    @property
    def cause(self) -> str:
        """Why the run has ended."""
        end = read_journal(self.run.directory.journal)[-1]
        assert isinstance(end, StateChanged) and end.verdict is not None
        return end.verdict.cause or ""

    @property
    def launched(self) -> list[tuple[str | None, list[bool], object]]:
        """Of each attempt the layers, who validates, and the layers that are recomputed."""
        jobs = [(spec.job or {}, [rank.validates for rank in spec.ranks]) for spec in self.specs]
        return [(job.get("layer_split"), validates, job["grad_checkpoint"]) for job, validates in jobs]

    def failed(self, *more: Any) -> Launches:
        """After a first attempt that had been decided as RECORDED."""
        self.run.state("preflight").append(LaunchDecided(decisions=made_decisions(self.plan, **RECORDED)))
        lost = Verdict(RunState.FAILED, Reason.NODE_LOST, rank=1)
        self.run.attempt(decided=False).state("launching", "running", "recovering")
        self.run.append(AttemptFailed(attempt=1, verdict=lost, reached=37, failed_at=datetime.now(UTC)), *more)
        return self


@pytest.fixture
def launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launches:
    facts = [mac("node0", 0, "Apple M3 Ultra", 256), mac("node1", 1, "Apple M4 Max", 128)]
    settings = {"fine_tune_type": "full", "grad_checkpoint": "auto", "batch_size": 4}
    planned = inputs(facts, settings=settings, strategy="pipeline", job={"strategy": "pipeline"})
    nodes = tuple(
        node.model_copy(update={"ssh": "127.0.0.1", "python": sys.executable, "workdir": "/"})
        for node in planned.config.nodes
    )
    recovery = RecoveryConfig(max_restarts=1, backoff_s=0)
    config = planned.config.model_copy(update={"nodes": nodes, "recovery": recovery})
    run = MadeRun(tmp_path)
    run.plan = run.plan.model_copy(update={"config": config, "skip": tuple(CHECKS)})
    write_plan(run.directory.plan, run.plan)
    made = Launches(run, run.plan, planned)

    async def collected(context: CheckContext) -> PlanInputs:
        network = configured_network(context.config.nodes)
        launched = replace(made.planned, config=context.config, network=network)
        return replace(launched, division=context.division, checks=context.planned)

    async def network(context: CheckContext) -> NetworkPlan:
        return configured_network(context.config.nodes)

    async def layouts(context: CheckContext) -> tuple[HostLayout, ...]:
        return (local_layout(tmp_path / "node", len(context.config.nodes)),)

    async def launch(_: RunDir, plan: RunPlan, attempt: Attempt, decisions: LaunchDecisions, *_more: object) -> None:
        made.specs.append(attempt_spec(plan, attempt, decisions, {}))
        raise LaunchError("that is enough")

    def counted(given: PlanInputs) -> Any:
        made.plans_made.append(given)
        return make_plan(given)

    monkeypatch.setattr(plan_inputs, "shared_plan_inputs", collected)
    monkeypatch.setattr(plan_inputs, "make_plan", counted)
    monkeypatch.setattr(CheckContext, "network_plan", network)
    monkeypatch.setattr(CheckContext, "layouts", layouts)
    monkeypatch.setattr(preparation, "fresh_ports", AsyncMock(return_value=20_000))
    monkeypatch.setattr(driver, "launch", launch)
    return made


def garbled(run_dir: RunDir) -> None:
    other = {"strategy": {"layer_split": "0-1,1-36"}, "nodes": [{"node": "node0", "validates": False}]}
    run_dir.training_plan.write_text(json.dumps(other))


@pytest.mark.parametrize(
    "damage", [lambda _: None, lambda run_dir: run_dir.training_plan.unlink(), garbled], ids=["none", "gone", "other"]
)
async def test_one_plan_is_made_and_launched_whatever_becomes_of_its_file(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, damage: Callable[[RunDir], None]
) -> None:
    shown = dict[str, Any]()

    async def preflight(run_dir: RunDir, *more: Any) -> Any:
        report = await run_preflight(run_dir, *more)
        shown.update(json.loads(run_dir.training_plan.read_bytes()))
        damage(run_dir)
        return report

    monkeypatch.setattr(preparation, "run_preflight", preflight)
    await launches.supervise()
    assert len(launches.plans_made) == 1
    [decided] = launches.decided
    assert isinstance(decided.settings, ChosenSettings)
    assert launches.launched == [(SPLIT, [True, True], decided.settings.grad_checkpoint)]
    assert shown["strategy"]["layer_split"] == decided.layer_split == SPLIT
    assert shown["settings"] == decided.settings.model_dump()
    assert {row["node"]: row["share"] for row in shown["nodes"]} == decided.division.parts
    assert {check["overridden"] for check in shown["pre_flight_checklist"]["checks"]} == {True}


@pytest.mark.parametrize("how", ["adopt", "resume"])
async def test_adoption_and_resume_launch_what_was_recorded(launches: Launches, how: str) -> None:
    launches.failed()
    if how == "resume":
        launches.run.state("finishing", "failed")
    await launches.supervise(**{how: True})
    assert launches.launched == [("0-30,30-36", [False, True], 7)]
    assert [made.layer_split for made in launches.decided] == ["0-30,30-36"], "nothing new was decided"
    if how == "resume":
        shown = json.loads(launches.run.directory.training_plan.read_bytes())
        assert shown["strategy"]["layer_split"] == "0-30,30-36"
    else:
        assert launches.plans_made == []


async def test_a_run_whose_journal_has_lost_its_decisions_is_not_launched_by_others(launches: Launches) -> None:
    launches.run.state("preflight", "launching").attempt(decided=False).state("running", "finishing", "failed")
    await launches.supervise(resume=True)
    assert launches.specs == []
    assert "cannot be continued as launched: the decisions of its launch are missing" in launches.cause


async def test_no_plan_is_no_launch(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_inputs, "make_plan", Mock(side_effect=ZeroDivisionError("no ranks")))
    await launches.supervise()
    assert launches.specs == []
    assert "the training cannot be planned: ZeroDivisionError: no ranks" in launches.cause
    shown = json.loads(launches.run.directory.training_plan.read_bytes())
    assert (shown["enabled"], "ZeroDivisionError" in shown["reason"]) == (False, True)


async def test_other_nodes_are_decided_anew_with_the_settings_of_the_run(launches: Launches) -> None:
    """Its job is no pipeline, and node1 was left out: of a launch on both nodes only the settings stay."""
    job = launches.plan.config.job.model_copy(update={"strategy": "data"})
    launches.plan = launches.plan.model_copy(update={"config": launches.plan.config.model_copy(update={"job": job})})
    launches.run.plan = launches.plan
    launches.failed().run.state("finishing", "failed")
    launches.run.append(NodesExcluded(nodes=("node0",), why="it differs", world_size=1))
    await launches.supervise(resume=True)
    assert launches.launched == [(None, [True], 7)]
    recorded, anew = launches.decided
    assert (recorded.nodes, anew.nodes) == (("node0", "node1"), ("node1",))
    assert (anew.settings, anew.validators, anew.division.parts) == (recorded.settings, ("node1",), {"node1": 1.0})
    await launches.supervise(resume=True)
    assert len(launches.specs) == 2 and len(launches.decided) == 2, "it is read from the journal the second time"
