"""Performance figures against their limits, and the health of workers before and during a run."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine import monitor_performance, run_health_checks

GOOD = {"throughput": 0.85, "latency_ms": 40.0, "gpu_utilization": 0.95, "memory_utilization": 0.7}


def test_figures_within_their_limits_are_valid() -> None:
    report = monitor_performance(GOOD)
    assert report.is_valid and report.issues == ()
    assert report.within_thresholds == dict.fromkeys(GOOD, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("throughput", 0),
        ("throughput", -5),
        ("latency_ms", 500),
        ("latency_ms", -1),
        ("gpu_utilization", 0.8),
        ("memory_utilization", 0.9),
        *((name, bad) for name in GOOD for bad in (math.nan, math.inf)),
    ],
)
def test_a_figure_at_its_limit_or_beyond_is_not_within(name: str, value: float) -> None:
    report = monitor_performance({**GOOD, name: value})
    assert report.within_thresholds == {**dict.fromkeys(GOOD, True), name: False}
    assert not report.is_valid and len(report.issues) == 1 and report.issues[0].startswith(name)


@pytest.mark.parametrize(
    ("limits", "good"),
    [({"latency_ms": 39}, False), ({"latency_ms": 41}, True), ({"throughput": 0.9}, False), ({}, True)],
)
def test_each_limit_can_be_replaced(limits: dict[str, float], good: bool) -> None:
    assert monitor_performance(GOOD, limits).is_valid is good


def test_what_was_not_measured_is_not_valid() -> None:
    report = monitor_performance({**GOOD, "gpu_utilization": None})
    assert report.within_thresholds["gpu_utilization"] is None
    assert not report.is_valid and report.issues == ("gpu_utilization was not measured",)


@pytest.mark.parametrize(
    ("metrics", "limits"),
    [
        ({}, None),
        ([], None),
        ({**GOOD, "latency_ms": "40"}, None),
        ({**GOOD, "latency_ms": True}, None),
        (GOOD, {"latency": 1}),
        (GOOD, {"latency_ms": math.nan}),
    ],
)
def test_what_is_no_figure_is_an_error(metrics: Any, limits: Any) -> None:
    with pytest.raises(ValueError):
        monitor_performance(metrics, limits)


def cluster(*workers: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"workers": [{"worker_id": f"w{at}", **worker} for at, worker in enumerate(workers)], **more}


def test_before_the_start_every_worker_needs_a_gpu() -> None:
    report = run_health_checks(cluster({"gpu_count": 1}, {"gpu_count": 0}, {}))
    assert (report.healthy_workers, report.unhealthy_workers, report.is_valid) == (("w0",), ("w1", "w2"), False)
    assert report.issues == ("worker w1: no GPU", "worker w2: gpu_count is not known")
    assert run_health_checks(cluster({"gpu_count": 80})).is_valid


def test_while_it_runs_every_worker_needs_a_heartbeat_that_is_not_too_old() -> None:
    heartbeats = [{"last_heartbeat": heartbeat} for heartbeat in (1000.0, 940.0, 939.0, 0, None)]
    report = run_health_checks(cluster(*heartbeats), mode="runtime", now=1000.0)
    assert report.healthy_workers == ("w0", "w1")
    assert [issue.split(":")[0] for issue in report.issues] == ["worker w2", "worker w3", "worker w4"]
    assert "dead" in report.issues[1] and "not known" in report.issues[2]


def test_the_limit_is_the_workers_else_the_clusters() -> None:
    workers = ({"last_heartbeat": 990.0}, {"last_heartbeat": 990.0, "heartbeat_limit_s": 20})
    report = run_health_checks(cluster(*workers, heartbeat_limit_s=5), "runtime", now=1000.0)
    assert report.unhealthy_workers == ("w0",)


@pytest.mark.parametrize("mode", ["", "preflight", "RUNTIME", "pre-flight\n", None])
def test_another_mode_is_an_error(mode: Any) -> None:
    with pytest.raises(ValueError, match="mode"):
        run_health_checks(cluster({"gpu_count": 1}), mode)


@pytest.mark.parametrize("count", [0, -5, 2, 1.0, True, "1"])
def test_a_worker_count_must_be_how_many_there_are_and_above_0(count: Any) -> None:
    with pytest.raises(ValueError, match="worker_count"):
        run_health_checks(cluster({"gpu_count": 1}, worker_count=count))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"workers": []},
        {"workers": None},
        {"workers": [7]},
        {"workers": [{"gpu_count": 1}]},
        cluster({"gpu_count": -1}),
        cluster({}, {"worker_id": "w0"}),
        [],
    ],
)
def test_a_cluster_that_cannot_be_is_an_error(config: Any) -> None:
    with pytest.raises(ValueError):
        run_health_checks(config)
