"""A rank's last output is evidence, whatever characters are in it; so is who holds a port that it could not bind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from engine.config.models import ClusterConfig, Config, JobConfig, NodeConfig
from engine.failures.signatures import BY_ID
from engine.protocol.attempt import NodeFiles
from engine.protocol.events import EventWriter
from engine.run import failure_evidence
from engine.run.effects import Judge, Standing
from engine.run.events import Attempt, AttemptPlanned, LaunchDecided, Trigger
from engine.run.failure_evidence import EvidenceCollector, FailureEvidence
from engine.run.journal import RunRecorder
from engine.run.observation import RankView
from engine.run.run_context import AttemptContext, HostConnections
from engine.run.run_plan import RunPlan
from engine.store.layout import RunDir
from tests.unit.run.file_host import FileHost
from tests.unit.run.run_maker import made_decisions

BIND_ERROR = "RuntimeError: [ring] Couldn't bind socket (error: 98)"


class Clock:
    """Stands in for the module `time`."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class PortHost(FileHost):
    """`holders` is its answer about ports; with None it does not answer."""

    def __init__(self, files: NodeFiles, ranks: Sequence[int], holders: dict[int, str] | None) -> None:
        super().__init__(files, ranks, [f"node{rank}" for rank in ranks])
        self.holders = holders
        self.asked: list[list[int]] = []

    def request_port_holders(self, ports: Sequence[int]) -> None:
        self.asked.append(list(ports))
        self.port_holders = None if self.holders is None else {p: self.holders[p] for p in ports if p in self.holders}


@contextlib.contextmanager
def collector(directory: Path, hosts: Sequence[FileHost], ranks: int = 1) -> Iterator[EvidenceCollector]:
    nodes = tuple(
        NodeConfig(name=f"node{rank}", python="/python", ips=("127.0.0.1",), workdir="/") for rank in range(ranks)
    )
    config = Config(cluster=ClusterConfig(), nodes=nodes, job=JobConfig(name="test"))
    plan = RunPlan(nonce="n", config=config, run_id="r", created_at=datetime.now(UTC))
    attempt = Attempt(
        number=1,
        nonce="nonce",
        starting_port=20_000,
        log_bases={},
        event_bases={},
        layouts=(),
        nodes=plan.nodes,
    )
    with contextlib.closing(RunRecorder(directory / "journal.jsonl", plan, print)) as recorder:
        recorder.append(LaunchDecided(decisions=made_decisions(plan)))
        recorder.append(AttemptPlanned(attempt=attempt))
        yield EvidenceCollector(AttemptContext(RunDir(directory), plan, attempt, HostConnections(hosts), recorder))


def collect(evidence: EvidenceCollector, ranks: int = 1) -> FailureEvidence:
    views = [RankView(rank, f"node{rank}") for rank in range(ranks)]
    return evidence.collect(views, (), Judge(Trigger.ENDED, (Standing(),) * ranks, over=True))


def test_a_failure_is_read_though_its_message_holds_a_line_separator(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path)
    message = "no such word: raven\u2028\x85 or crow"
    EventWriter(files.events(0), 0, 1).write("failure", error_type="ValueError", message=message)
    with collector(tmp_path, [FileHost(files, (0,), ("node0",))]) as evidence:
        failure = evidence.rank_evidence(RankView(0, "node0"), (), Standing()).failure
    assert failure is not None and failure["message"] == message


def test_ranks_that_cannot_bind_share_one_wait_and_each_host_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(failure_evidence, "time", clock)
    files = NodeFiles(tmp_path)
    for rank in range(6):
        files.log(rank).write_text("all is well" if rank == 2 else BIND_ERROR)
    shared = PortHost(files, (0, 1, 2), {20_001: "nginx"})
    silent = [PortHost(files, (rank,), None) for rank in (3, 4, 5)]
    with collector(tmp_path, [shared, *silent], ranks=6) as evidence:
        found = collect(evidence, ranks=6)
    free, held = "port 20000 was in use; it is free again", "port 20001 is in use by nginx"
    assert [rank.port for rank in found.ranks] == [free, held, None, None, None, None]
    assert [host.asked for host in (shared, *silent)] == [[[20_000, 20_001]], [[20_003]], [[20_004]], [[20_005]]]
    assert clock.now == pytest.approx(failure_evidence._ANSWER_LIMIT_S, abs=0.1)


def test_who_holds_pytorchs_port_is_asked_for_the_port_that_could_not_be_listened_on(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path)
    files.log(0).write_text(BY_ID["c10d.port_in_use"].example)
    host = PortHost(files, (0,), {29_500: "nginx"})
    with collector(tmp_path, [host]) as evidence:
        found = collect(evidence)
    assert [rank.port for rank in found.ranks] == ["port 29500 is in use by nginx"]
