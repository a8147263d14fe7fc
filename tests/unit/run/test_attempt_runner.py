"""The cleanup of earlier attempts of a run that has other nodes by now."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from engine.cluster.transport.fleet import Fleet
from engine.plan.document import ChosenSettings
from engine.run.attempt_runner import AttemptRunner, RunContext
from engine.run.events import CleanupConfirmed, NodesExcluded, SettingsChosen
from engine.run.journal import RunRecorder, read_journal
from tests.unit.run.run_maker import MadeRun


async def test_an_attempt_on_a_node_that_preflight_has_excluded_since_is_proved_to_be_gone(tmp_path: Path) -> None:
    run = MadeRun(tmp_path).attempt().state("preflight")
    run.append(NodesExcluded(nodes=("node0",), why="it differs", world_size=1)).state("failed").close()
    recorder = RunRecorder(run.directory.journal, run.plan, lambda _record: None)
    async with Fleet(run.plan.config.nodes, tmp_path) as fleet:
        context = RunContext(run.directory, run.plan, recorder, fleet, tmp_path / "node")
        runner = AttemptRunner(context, lambda: None)
        try:
            await runner.prove_ended(recorder.history.attempts[-1], ["node0", "node1"])
            assert runner.unconfirmed == ["node0", "node1"]
            await runner.confirm_all(10.0)
            assert runner.unconfirmed == []
        finally:
            await runner.close()
            recorder.close()
    confirmed = [each.node for each in read_journal(run.directory.journal) if isinstance(each, CleanupConfirmed)]
    assert confirmed == ["node0", "node1"]


@pytest.mark.parametrize("value", ["auto", 3])
async def test_settings_that_the_job_leaves_open_are_chosen_once(tmp_path: Path, value: str | int) -> None:
    run = MadeRun(tmp_path).state("preflight").close()
    job = run.plan.config.job.model_copy(update={"mlx_lm": {"grad_checkpoint": value}})
    plan = run.plan.model_copy(update={"config": run.plan.config.model_copy(update={"job": job})})
    recorder = RunRecorder(run.directory.journal, plan, lambda _record: None)
    async with Fleet(plan.config.nodes, tmp_path) as fleet:
        context = RunContext(run.directory, plan, recorder, fleet, tmp_path / "node")
        runner = AttemptRunner(context, lambda: None)
        for count in (7, 9):
            made = Mock(settings=ChosenSettings(grad_checkpoint=count))
            await runner._choose_settings(Mock(shared=AsyncMock(return_value=made)))
    recorder.close()
    chosen = [
        each.settings.grad_checkpoint
        for each in read_journal(run.directory.journal)
        if isinstance(each, SettingsChosen)
    ]
    assert chosen == ([7] if value == "auto" else [])
    assert context.plan.config.job.mlx_lm == {"grad_checkpoint": 7 if value == "auto" else 3}
