"""The cleanup of earlier attempts of a run that has other nodes by now."""

from __future__ import annotations

from pathlib import Path

from engine.cluster.transport.fleet import Fleet
from engine.run.attempt_runner import AttemptRunner, RunContext
from engine.run.events import CleanupConfirmed, NodesExcluded
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
