"""What a rank said last is heard, whatever characters it said it with."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from engine.config.models import ClusterConfig, FlightConfig, JobConfig, NodeConfig
from engine.runs.plan_file import Plan
from engine.supervision.attempt import Attempt
from engine.supervision.conditions import Conditions
from engine.supervision.links.links import Links
from engine.supervision.links.local import LocalLink
from engine.supervision.outset import Outset
from engine.supervision.ranks import Rank
from engine.supervision.witnesses import Witnesses
from engine.worker.events import EventWriter
from engine.worker.wire import NodeFiles
from tests.unit.launch.places import as_configured


def test_a_failure_is_heard_though_its_message_holds_a_line_separator(tmp_path: Path) -> None:
    node = NodeConfig(name="left", python="/python", workdir="/")
    config = FlightConfig(cluster=ClusterConfig(), nodes=(node,), job=JobConfig(name="test"))
    plan = Plan.of(config, run_id="r", created_at=datetime.now(UTC))
    attempt = Attempt(1, "nonce", 20_000, {}, {}, (), as_configured(config.nodes))
    files = NodeFiles(tmp_path)
    links = Links([LocalLink(files, "nonce", (0,), ("left",))])
    conditions = Conditions(links, print, None)
    message = "no such word: raven\u2028\x85 or crow"
    EventWriter(files.events(0), 0, 1).write("failure", error_type="ValueError", message=message)
    heard = Witnesses(plan, attempt, links, conditions, Outset(), launching=tmp_path).of(Rank(plan.ranks[0]))
    assert heard.failure is not None and heard.failure["message"] == message
