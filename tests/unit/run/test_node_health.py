"""The recorded condition of nodes that answer, do not, and answer again; and when their ranks count as ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from engine.config.models import ClusterConfig, Config, JobConfig, NodeConfig, RecoveryConfig
from engine.run.events import NodeConditionChanged
from engine.run.node_health import UNREACHABLE_S, HostHealth, lost_after_s, next_health, recorded_health
from engine.run.observation import HostView

START = datetime(2026, 1, 2, tzinfo=UTC)


class Watched:
    """The health of one host over time, and what it enters."""

    def __init__(
        self, limit_s: float | None = 40.0, before: Sequence[NodeConditionChanged] = (), *, local: bool = False
    ) -> None:
        self.host = HostView("1:n1", ("n1",), (1,), local, boot_id="boot", memory_kills=3)
        self.limit_s = limit_s
        self.health: HostHealth = recorded_health(self.host, before)
        self.events: list[NodeConditionChanged] = []

    def after(self, seconds: float, **state: Any) -> bool:
        """It was seen with a silence of `seconds`; it is lost."""
        host = replace(self.host, silent_s=seconds, **state)
        self.health, changes = next_health(host, self.health, self.limit_s, START)
        self.events += changes
        return self.health.condition == "lost"


def test_each_change_is_recorded_once() -> None:
    watched = Watched()
    for seconds in (0.0, 0.5, 1.0, 14.0, 16.0, 20.0, 0.1, 0.5):
        assert not watched.after(seconds)
    assert [event.condition for event in watched.events] == ["connected", "unreachable", "connected"]
    assert {event.node for event in watched.events} == {"n1"}
    assert watched.events[0].boot_id == "boot" and watched.events[0].silent_s is None
    assert watched.events[1].since == datetime(2026, 1, 1, 23, 59, 44, tzinfo=UTC)
    assert watched.events[2].silent_s == 20.0
    assert watched.events[0].memory_kills == 3


def test_a_silence_of_this_machines_agent_is_no_condition() -> None:
    watched = Watched(local=True)
    watched.after(70.0)
    watched.after(0.0)
    assert watched.events == []


def test_a_node_that_never_answered_is_not_connected_but_can_be_unreachable() -> None:
    watched = Watched()
    watched.after(3.0, answered=False)
    assert watched.events == []
    watched.after(UNREACHABLE_S, answered=False, problem="Connection refused")
    assert (watched.events[0].condition, watched.events[0].why) == ("unreachable", "Connection refused")


def test_a_node_is_lost_after_its_limit_and_not_before() -> None:
    watched = Watched(limit_s=40.0)
    assert not watched.after(39.9)
    assert watched.after(40.1)
    assert [event.condition for event in watched.events] == ["unreachable", "lost"]
    assert not watched.after(0.1), "it is back"


def test_without_a_limit_no_node_is_ever_lost() -> None:
    assert not Watched(limit_s=None).after(1e6)


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
