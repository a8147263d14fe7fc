"""A run, and one attempt of it, as the parts of its supervisor share them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.cluster.awake_clock import AwakeClock
from engine.cluster.host_connection import HostConnection
from engine.cluster.transport.fleet import Fleet
from engine.run.events import Attempt
from engine.run.history import AttemptHistory, RunHistory
from engine.run.journal import RunRecorder
from engine.run.run_plan import RunPlan
from engine.store.layout import RunDir


@dataclass
class RunContext:
    run_dir: RunDir
    whole_plan: RunPlan
    """As launched; once they are there, with the paths of the model and the data that the job names."""
    recorder: RunRecorder
    fleet: Fleet
    node_root: Path
    """This machine's own."""
    clock: AwakeClock = field(default_factory=AwakeClock)

    @property
    def history(self) -> RunHistory:
        return self.recorder.history

    @property
    def plan(self) -> RunPlan:
        return self.history.plan(self.whole_plan)

    def plan_on(self, nodes: Sequence[str]) -> RunPlan:
        return self.history.plan_on(self.whole_plan, nodes)


class HostConnections:
    def __init__(self, connections: Sequence[HostConnection]) -> None:
        self._all = tuple(connections)
        self._of_rank = {rank: connection for connection in connections for rank in connection.ranks}

    def __iter__(self) -> Iterator[HostConnection]:
        return iter(self._all)

    def to(self, rank: int) -> HostConnection:
        return self._of_rank[rank]


@dataclass(frozen=True)
class AttemptContext:
    run_dir: RunDir
    plan: RunPlan
    """With the attempt's own nodes only."""
    attempt: Attempt
    connections: HostConnections
    recorder: RunRecorder

    @property
    def history(self) -> AttemptHistory:
        return self.recorder.history.attempt(self.attempt.number)
