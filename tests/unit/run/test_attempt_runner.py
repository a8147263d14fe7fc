"""The cleanup of earlier attempts of a run that has other nodes by now, and of one that is not known."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from engine.cluster.transport.fleet import Fleet
from engine.config.models import NodeConfig
from engine.models import RunState
from engine.protocol.attempt import ExitRecord, NodeFiles, write_atomic
from engine.protocol.job import Strategy
from engine.run.attempt_runner import AttemptRunner, RunContext
from engine.run.events import CleanupConfirmed, NodesExcluded, RunReopened
from engine.run.journal import RunRecorder, read_journal
from engine.run.run_plan import RunPlan
from engine.security.identifiers import LOCAL
from tests.unit.run.run_maker import MadeRun


async def test_an_attempt_on_a_node_that_preflight_has_excluded_since_is_proved_to_be_gone(tmp_path: Path) -> None:
    run = MadeRun(tmp_path).attempt().state("preflight")
    run.append(NodesExcluded(nodes=("node0",), why="it differs", world_size=1)).state("failed").close()
    recorder = RunRecorder(run.directory.journal, run.plan, lambda _record: None)
    async with Fleet(tmp_path) as fleet:
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


class Unknown:
    """A run whose newest attempt is not in its journal, as the earlier ones are; on this machine alone."""

    def __init__(self, home: Path, number: int = 1, **how: Any) -> None:
        self.run = MadeRun(home, **how)
        for known in range(1, number):
            self.run.attempt(known)
        self.files = NodeFiles.for_attempt(home / "node", self.run.id, number)
        self.files.directory.mkdir(parents=True)
        self.folder = self.run.directory.attempt(number)
        self.folder.mkdir(parents=True)

    def hosts(self, *hosts: str) -> Unknown:
        (self.folder / "hostfile.json").write_text(json.dumps({"hosts": [{"ssh": host} for host in hosts]}))
        return self

    def exits(self, *codes: int) -> Unknown:
        for rank, code in enumerate(codes):
            record = ExitRecord(rank, 1, code, None, 0.0, 0)
            write_atomic(self.files.exit(rank), json.dumps(asdict(record)))
            self.files.events(rank).write_text(json.dumps({"event": "end", "completed": code == 0}) + "\n")
        return self

    @asynccontextmanager
    async def runner(self, plan: RunPlan | None = None) -> AsyncIterator[AttemptRunner]:
        run, plan = self.run.close(), plan or self.run.plan
        recorder = RunRecorder(run.directory.journal, plan, lambda _record: None)
        async with Fleet(run.home) as fleet:
            runner = AttemptRunner(RunContext(run.directory, plan, recorder, fleet, run.home / "node"), lambda: None)
            try:
                yield runner
            finally:
                await runner.close()
                recorder.close()


@pytest.mark.parametrize(
    ("strategy", "hosts", "codes", "whose"),
    [
        ("data", 2, (0, 0), "every rank"),
        ("data", 2, (0,), None),
        ("data", 1, (0,), "every rank"),
        ("data", 0, (0,), None),
        ("local", 2, (0, 1), "rank 0"),
        ("local", 2, (1, 0), None),
    ],
)
async def test_an_attempt_that_is_not_known_has_succeeded_when_the_ranks_that_it_needed_have(
    tmp_path: Path, strategy: Strategy, hosts: int, codes: tuple[int, ...], whose: str | None
) -> None:
    """`hosts`: in its hostfile; 0 without one."""
    unknown = Unknown(tmp_path, strategy=strategy).exits(*codes)
    unknown.run.state("preflight", "launching", "running")
    if hosts:
        unknown.hosts(*[LOCAL] * hosts)
    async with unknown.runner() as runner:
        verdict = await runner.end_unknown()
    assert (verdict is not None and verdict.state is RunState.SUCCEEDED) is (whose is not None)
    assert whose is None or f"the exit record of {whose} shows" in ((verdict and verdict.cause) or "")


async def test_a_known_attempt_does_not_hide_the_success_of_a_later_one_that_is_not_known(tmp_path: Path) -> None:
    unknown = Unknown(tmp_path, number=2).hosts(LOCAL, LOCAL).exits(0, 0)
    unknown.run.state("preflight", "launching", "running", "failed", reason="node_lost")
    unknown.run.append(RunReopened()).state("preflight")
    async with unknown.runner() as runner:
        verdict = await runner.launch_first(Mock())
    assert verdict.state is RunState.SUCCEEDED and "attempt 2 is not in journal.jsonl" in (verdict.cause or "")


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (("ana", "cia@c.local"), ["ana", "cia", "bea"]),
        (("cia@c.local",), ["cia", "ana", "bea"]),
        ((), ["ana", "bea", "cia"]),
        (("nobody",), ["ana", "bea", "cia"]),
    ],
)
async def test_the_ranks_of_an_attempt_that_is_not_known_are_numbered_by_its_hostfile(
    tmp_path: Path, hosts: tuple[str, ...], expected: list[str]
) -> None:
    unknown = Unknown(tmp_path).hosts(*hosts)
    ssh = {"ana": "ana", "bea": "bea", "cia": "cia@c.local"}
    nodes = tuple(NodeConfig(name=name, ssh=host, python="python", workdir="/") for name, host in ssh.items())
    config = unknown.run.plan.config.model_copy(update={"nodes": nodes})
    async with unknown.runner(unknown.run.plan.model_copy(update={"config": config})) as runner:
        plan, world_size = runner._plan_of_unknown()
    assert list(plan.nodes) == expected
    assert world_size == (len(hosts) if hosts and hosts != ("nobody",) else 3)
