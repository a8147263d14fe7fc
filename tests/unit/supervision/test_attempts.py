"""What earlier attempts of a run have left, where the run has other nodes by now."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from engine.runs.journal import read_journal
from engine.supervision.attempts import Attempts
from engine.supervision.logbook import Logbook
from engine.transport.fleet import Fleet
from tests.unit.watch.run_maker import MadeRun


async def test_an_attempt_on_a_node_that_a_preflight_has_left_out_since_is_proved_to_be_gone(tmp_path: Path) -> None:
    run = MadeRun(tmp_path).attempt().state("preflight", "failed").close()
    logbook = Logbook(run.directory.journal, lambda _record: None, lambda: datetime.now(UTC))
    planned = next(each for each in read_journal(run.directory.journal) if each["event"] == "attempt")
    async with Fleet(run.plan.config.nodes, tmp_path) as fleet:
        attempts = Attempts(
            run.directory,
            run.plan.without(["node0"]),
            logbook,
            fleet,
            nonce="n",
            nodes=tmp_path / "node",
            asked=lambda: None,
            whole=run.plan,
        )
        try:
            await attempts.after_the_end(planned, ["node0", "node1"])
            assert attempts.unconfirmed == ["node0", "node1"]
            await attempts.aftermath(10.0)
            assert attempts.unconfirmed == []
        finally:
            await attempts.close()
            logbook.close()
    confirmed = [each["node"] for each in read_journal(run.directory.journal) if each["event"] == "confirmed"]
    assert confirmed == ["node0", "node1"]
