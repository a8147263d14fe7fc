"""A rank's last output is evidence, whatever characters are in it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from engine.config.models import ClusterConfig, Config, JobConfig, NodeConfig
from engine.protocol.attempt import NodeFiles
from engine.protocol.events import EventWriter
from engine.run.attempt import AttemptOrigin
from engine.run.events import Attempt
from engine.run.failure_evidence import EvidenceCollector
from engine.run.journal import RunRecorder
from engine.run.node_health import NodeHealth
from engine.run.ranks import AttemptContext, HostConnections, Rank
from engine.run.run_plan import RunPlan
from engine.store.layout import RunDir
from tests.unit.launch.host_layouts import configured_network
from tests.unit.run.file_host import FileHost


def test_a_failure_is_read_though_its_message_holds_a_line_separator(tmp_path: Path) -> None:
    node = NodeConfig(name="left", python="/python", workdir="/")
    config = Config(cluster=ClusterConfig(), nodes=(node,), job=JobConfig(name="test"))
    plan = RunPlan(config=config, run_id="r", created_at=datetime.now(UTC))
    attempt = Attempt(
        number=1,
        nonce="nonce",
        starting_port=20_000,
        log_bases={},
        event_bases={},
        layouts=(),
        network=configured_network(config.nodes),
    )
    files = NodeFiles(tmp_path)
    connections = HostConnections([FileHost(files, (0,), ("left",))])
    recorder = RunRecorder(tmp_path / "journal.jsonl", plan, print)
    context = AttemptContext(RunDir(tmp_path), plan, attempt, connections, recorder)
    message = "no such word: raven\u2028\x85 or crow"
    EventWriter(files.events(0), 0, 1).write("failure", error_type="ValueError", message=message)
    health = NodeHealth(connections, print, None)
    evidence = EvidenceCollector(context, health, AttemptOrigin()).rank_evidence(Rank(0, "left"))
    recorder.close()
    assert evidence.failure is not None and evidence.failure["message"] == message
