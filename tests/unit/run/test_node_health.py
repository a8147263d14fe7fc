"""The recorded condition of nodes that answer, do not, and answer again; and when their ranks count as ended."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.cluster.host_connection import ConnectionState, HostFacts
from engine.config.models import ClusterConfig, Config, JobConfig, NodeConfig, RecoveryConfig
from engine.protocol.attempt import NodeFiles
from engine.run.events import NodeConditionChanged
from engine.run.node_health import UNREACHABLE_S, NodeHealth, lost_after_s
from engine.run.ranks import HostConnections
from tests.unit.run.file_host import FileHost

START = datetime(2026, 1, 2, tzinfo=UTC)


class Away(FileHost):
    """A connection whose state the test sets."""

    def __init__(self, *ranks: int) -> None:
        super().__init__(NodeFiles(Path("/none")), ranks, [f"n{rank}" for rank in ranks], ssh="away")
        self.facts = HostFacts("boot", 3, 0.0)
        self.silent(0.0, answered=False)

    def silent(self, seconds: float, *, answered: bool = True, why: str | None = None) -> None:
        self.shown = ConnectionState(silent_s=seconds, answered=answered, problem=why)


class Watched:
    """Conditions of one link, and what they enter."""

    def __init__(self, limit_s: float | None = 40.0, before: list[NodeConditionChanged] | None = None) -> None:
        self.link = Away(1)
        self.events: list[NodeConditionChanged] = []
        self.head = FileHost(NodeFiles(Path("/none")), (0,), ("head",))
        links = HostConnections([self.head, self.link])
        self.health = NodeHealth(links, self.events.append, limit_s, before or (), lambda: START)

    def after(self, seconds: float, **state: Any) -> list[int]:
        self.link.silent(seconds, **state)
        return self.health.poll()


def test_each_change_is_recorded_once_and_the_head_has_no_condition() -> None:
    watched = Watched()
    for seconds in (0.0, 0.5, 1.0, 14.0, 16.0, 20.0, 0.1, 0.5):
        assert watched.after(seconds) == []
    assert [event.condition for event in watched.events] == ["connected", "unreachable", "connected"]
    assert {event.node for event in watched.events} == {"n1"}
    assert watched.events[0].boot_id == "boot" and watched.events[0].silent_s is None
    assert watched.events[1].since == datetime(2026, 1, 1, 23, 59, 44, tzinfo=UTC)
    assert watched.events[2].silent_s == 20.0
    assert (watched.health.silence_s(watched.link), watched.events[0].memory_kills) == (20.0, 3)


def test_a_silence_of_this_machines_agent_is_remembered() -> None:
    watched = Watched()
    watched.head.shown = ConnectionState(silent_s=70.0, answered=True)
    watched.after(0.0)
    watched.head.shown = ConnectionState(silent_s=0.0, answered=True)
    watched.after(0.0)
    assert watched.health.silence_s(watched.head) == 70.0
    assert {event.node for event in watched.events} == {"n1"}


def test_a_node_that_never_answered_is_not_connected_but_can_be_unreachable() -> None:
    watched = Watched()
    watched.after(3.0, answered=False)
    assert watched.events == []
    watched.after(UNREACHABLE_S, answered=False, why="Connection refused")
    assert (watched.events[0].condition, watched.events[0].why) == ("unreachable", "Connection refused")


def test_a_node_is_lost_after_its_limit_and_not_before() -> None:
    watched = Watched(limit_s=40.0)
    assert watched.after(39.9) == []
    assert watched.after(40.1) == [1]
    assert [event.condition for event in watched.events] == ["unreachable", "lost"]
    assert watched.after(0.1) == [], "it is back"


def test_without_a_limit_no_node_is_ever_lost() -> None:
    assert Watched(limit_s=None).after(1e6) == []


def test_an_adopter_records_only_what_is_new() -> None:
    before = [NodeConditionChanged(node="n1", condition="connected", boot_id="boot")]
    watched = Watched(before=before)
    watched.after(0.1)
    assert watched.events == []


def config(command: tuple[str, ...] | None, **recovery: Any) -> Config:
    node = NodeConfig(name="n", python="/python", workdir="/")
    job = JobConfig(name="test", command=command)
    return Config(cluster=ClusterConfig(), nodes=(node,), job=job, recovery=RecoveryConfig(**recovery))


def test_the_limit_is_longer_than_lease_and_graces() -> None:
    graces = {"lease_s": 60.0, "stop_grace_s": 2.5, "save_grace_s": 30.0, "term_grace_s": 0.8}
    assert (lost_after_s(config(("true",), **graces)) or 0.0) > 60.8
    assert (lost_after_s(config(None, **graces)) or 0.0) > 90.8
    assert lost_after_s(config(None, on_lease_expiry="continue")) is None
