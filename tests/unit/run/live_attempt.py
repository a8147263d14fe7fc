"""An attempt that is live as far as its supervisor sees: its hosts are FileHosts, and its keepers and trainers are the
test itself."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.cluster.awake_clock import AwakeClock
from engine.cluster.transport.fleet import Fleet
from engine.models import RunState
from engine.node.processes import boot_id, start_time
from engine.protocol.attempt import ExitRecord, Identity, write_atomic
from engine.protocol.job import Strategy
from engine.run.driver import LiveRun
from engine.run.events import Attempt
from engine.run.journal import RunRecorder
from engine.run.run_context import HostConnections, RunContext
from engine.run.run_plan import RunPlan
from engine.security.identifiers import LOCAL
from tests.machine import NOBODY
from tests.unit.run.file_host import FileHost
from tests.unit.run.run_maker import MadeRun


class LiveAttempt:
    """Attempt 1 of a run whose nodes have a rank each, planned; each node is a host of its own."""

    def __init__(
        self,
        home: Path,
        *,
        strategy: Strategy = "data",
        command: tuple[str, ...] | None = None,
        ssh: Sequence[str] = (LOCAL, LOCAL),
        **config: Any,
    ) -> None:
        """`ssh`: of each node. `config`: sections other than the configuration's own."""
        made = MadeRun(home, ranks=len(ssh), strategy=strategy, command=command)
        made.attempt().state("preflight", "launching").close()
        self.directory = made.directory
        self.plan = made.plan.model_copy(update={"config": made.plan.config.model_copy(update=config)})
        self.recorder = RunRecorder(made.directory.journal, self.plan, lambda _record: None)
        self.attempt = self.recorder.history.attempts[-1].plan
        self.files = self.attempt.files(made.id, 0)
        self.files.directory.mkdir(parents=True)
        self.connected: list[FileHost] = []
        """All that were ever made."""
        self._ssh = ssh
        self.node_root = home / "node"
        self.supervise()

    def supervise(self, clock: AwakeClock | None = None) -> None:
        """By another supervisor from here on."""
        fleet, clock = Fleet(self.directory.home), clock or AwakeClock()
        self.context = RunContext(self.directory, self.plan, self.recorder, fleet, self.node_root, clock)
        self.run = LiveRun(self.context, self.connect)

    def connect(self, _run: RunContext, plan: RunPlan, attempt: Attempt) -> HostConnections:
        files = attempt.files(plan.run_id, 0)
        ranks = range(len(plan.nodes))
        hosts = [FileHost(files, (rank,), (f"node{rank}",), ssh=self._ssh[rank]) for rank in ranks]
        for host, before in zip(hosts, self.hosts, strict=False):
            # The machines are as they were.
            host.shown, host.left = before.shown, before.left
        self.connected += hosts
        return HostConnections(hosts)

    @property
    def hosts(self) -> list[FileHost]:
        """Those that were connected last."""
        return self.connected[-len(self._ssh) :]

    def start(self, *ranks: int) -> None:
        pid, run = os.getpid(), self.plan.run_id
        start = start_time(pid) or ""
        for rank in ranks:
            # The trainers' group is nobody's: what is sent to it reaches no process.
            identity = Identity(rank, run, 1, self.attempt.nonce, boot_id(), pid, start, NOBODY, NOBODY, start, 1.0)
            write_atomic(self.files.identity(rank), json.dumps(asdict(identity)))

    def report(self, rank: int, event: str, **fields: Any) -> None:
        with self.files.events(rank).open("a") as file:
            file.write(json.dumps({"event": event, **fields, "rank": rank}) + "\n")

    def exit(self, rank: int, code: int, **more: Any) -> None:
        write_atomic(self.files.exit(rank), json.dumps(asdict(ExitRecord(rank, 1, code, None, 0.0, 0, **more))))

    @property
    def state(self) -> RunState:
        return self.recorder.state

    async def close(self) -> None:
        await self.run.close()
        self.recorder.close()
