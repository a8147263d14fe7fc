"""performance_layer: a calibration of this job, fresh, and what it predicts. A missing one is a warning."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from engine.checks import performance as check
from engine.checks.plan_inputs import MemoryNeed
from engine.cluster.facts import probe_all
from engine.config.models import Config
from engine.measurements import Division, LinkMeasure
from engine.models import CheckResult, CheckStatus
from engine.plan.document import RankMemory
from engine.plan.fingerprint import fingerprint
from engine.plan.prediction import division_of, predict
from engine.plan.shares import MISSING, divide_batch
from engine.store.store import Store
from tests.checks.conftest import fleet_of, run_check
from tests.checks.recorded import RANK
from tests.unit.plan.calibrations import TAKEN, calibration, config, measure

pytestmark = pytest.mark.usefixtures("shared_agent")


def memory(needed_bytes: int, limit_bytes: int = 10 * 2**30) -> RankMemory:
    sizes = {"peak_bytes": needed_bytes, "reserve_bytes": 0, "limit_bytes": limit_bytes}
    return RankMemory(**{**RANK, **sizes, "source": "calibration", "fits": needed_bytes <= limit_bytes})


FITS = memory(8 * 2**30)
SOON = TAKEN + timedelta(hours=2)


def evaluated(
    speeds: Mapping[str, float | None],
    *,
    now: datetime = SOON,
    need: MemoryNeed = FITS,
    fixed: Mapping[str, float] | None = None,
    **fields: Any,
) -> CheckResult:
    job = config(list(speeds), fixed=fixed)
    measured = check.CalibrationStatus(calibration(speeds, **fields))
    return check.evaluate(job, measured, dict.fromkeys(speeds, need), now)


def test_two_equal_nodes_pass_with_what_is_predicted() -> None:
    result = evaluated({"ultra": 0.86, "max": 0.84})
    assert result.status is CheckStatus.PASS, result
    assert result.summary.startswith("1.68 examples/s predicted, speed-up 1.9")
    assert result.summary.endswith("calibrated 2 h ago")
    assert result.evidence["max"].startswith("0.84 examples/s, needs 8 GB of 10 GB (by calibration")


def test_an_old_calibration_warns_with_the_command_that_makes_a_new_one() -> None:
    result = evaluated({"ultra": 1.0, "max": 1.0}, now=TAKEN + timedelta(days=31))
    assert (result.status, result.fix_command) == (CheckStatus.WARN, "flightdeck calibrate")
    assert "the calibration is 31 days old, the limit is 30" in result.summary


@pytest.mark.parametrize(("latency_s", "status"), [(0.499, CheckStatus.PASS), (0.5, CheckStatus.FAIL)])
def test_latency_stays_below_half_a_second(latency_s: float, status: CheckStatus) -> None:
    everyone = LinkMeasure(nodes=("ultra", "max"), latency_s=latency_s, bandwidth_bytes_per_s=1e9)
    result = evaluated({"ultra": 1.0, "max": 1.0}, all_ranks=everyone)
    assert result.status is status, result
    assert ("500 ms, the limit is 500" in result.summary) is (status is CheckStatus.FAIL)


def test_a_slow_link_is_reported_with_its_two_nodes() -> None:
    links = (LinkMeasure(nodes=("ultra", "max"), latency_s=0.7),)
    result = evaluated({"ultra": 1.0, "max": 1.0}, links=links)
    assert (result.status, result.blames) == (CheckStatus.FAIL, (0, "ultra"))
    assert "an all_sum with max takes 700 ms" in result.summary


@pytest.mark.parametrize(("peak", "status"), [(90, CheckStatus.PASS), (91, CheckStatus.WARN)])
def test_memory_above_nine_tenths_of_the_limit_is_warned_of(peak: int, status: CheckStatus) -> None:
    result = evaluated({"ultra": 1.0, "max": 1.0}, need=memory(peak * 2**30 // 10))
    assert (result.status, "above 90% it may not be enough" in result.summary) == (status, status is CheckStatus.WARN)


def test_a_node_that_the_plan_overrates_warns_above_a_tenth_and_fails_above_a_fifth() -> None:
    """Fixed shares win over the measured ones: the plan then assumes what was never true."""
    equal = {"ultra": 1.0, "max": 1.0}
    assert evaluated({"ultra": 1.0, "max": 1.0}, fixed=equal).status is CheckStatus.PASS
    warned = evaluated({"ultra": 1.4, "max": 1.0}, fixed=equal)
    assert (warned.status, "max: its part of a step takes" in warned.summary) == (CheckStatus.WARN, True), warned
    failed = evaluated({"ultra": 2.0, "max": 1.0}, fixed=equal)
    assert (failed.status, failed.blames) == (CheckStatus.FAIL, (1, "max"))
    assert "longer than the plan assumes" in failed.summary


@pytest.mark.parametrize(
    "speeds",
    [
        {"a": 1.0, "b": 1.0, "c": 1.0},
        {"a": 1.0, "b": 0.65},
        {"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.33},
        {**{f"n{number}": 1.0 for number in range(7)}, "slow": 0.75},
    ],
)
def test_whole_sequences_and_our_own_rules_are_nobodys_fault(speeds: dict[str, float]) -> None:
    """What a division into whole sequences costs, and equal shares below the limit for unequal ones."""
    result = evaluated(speeds)
    assert result.status is not CheckStatus.FAIL, result.summary


def test_a_node_that_finished_nothing_is_left_out_and_one_that_was_not_measured_warns() -> None:
    offline = evaluated({"ultra": 1.0, "max": 0.0})
    assert offline.status is CheckStatus.WARN, offline
    assert "max completed no step during calibration: it counts as offline and is left out" in offline.summary
    assert evaluated({"ultra": 0.0, "max": 0.0}).status is CheckStatus.FAIL
    unknown = evaluated({"ultra": 1.0, "max": None})
    assert (unknown.status, "max: its throughput was not measured" in unknown.summary) == (CheckStatus.WARN, True)
    assert "no throughput is predicted" in unknown.summary


async def test_without_a_calibration_of_this_very_job_it_is_missing_and_not_failed(
    config: Config, tmp_path: Path, home: Path
) -> None:
    result = await run_check(check.run, config)
    assert (result.status, result.summary) == (
        CheckStatus.WARN,
        "hardware calibration missing, assuming equal performance",
    )
    assert result.fix_command == "flightdeck calibrate"
    async with fleet_of(config) as fleet:
        facts = await probe_all(config, fleet)
    store, speeds = Store(home), {"node0": 1.0, "node1": 1.0}
    store.put_calibration(calibration(speeds, cluster=config.cluster.name, fingerprint="of another job"))
    assert "missing" in (await run_check(check.run, config)).summary
    mine = fingerprint(config, facts)
    now = datetime.now(TAKEN.tzinfo)
    store.put_calibration(calibration(speeds, cluster=config.cluster.name, fingerprint=mine, taken_at=now))
    result = await run_check(check.run, config)
    assert "examples/s predicted" in result.summary, result


def test_the_shares_of_the_run_count_and_not_those_that_would_be_made_now() -> None:
    """Without the slow one the two others are so alike that they would be equal: the run goes on with its own."""
    speeds = {"a": 1.1, "b": 1.0, "slow": 0.5}
    taken = calibration(speeds)
    division = division_of(predict(config(list(speeds)), taken, SOON))
    kept = division.without({"slow"})
    assert divide_batch(config(["a", "b"]), taken).source == "equal" and kept.source == "calibrated"
    measured = check.CalibrationStatus(taken, kept)
    result = check.evaluate(config(["a", "b"]), measured, dict.fromkeys("ab", FITS), SOON)
    assert (result.status, result.fix_command) == (CheckStatus.WARN, None)
    assert result.summary == "no throughput is predicted: left out: slow"
    assert result.evidence["a"].startswith("1.1 examples/s")


async def test_the_context_of_a_run_has_the_calibration_of_all_its_nodes(config: Config) -> None:
    """It is of another set of nodes: no fingerprint of the configuration finds it."""
    taken = calibration({"node0": 1.0, "node1": 1.0, "gone": 1.0}, taken_at=datetime.now(TAKEN.tzinfo))
    parts = {"node0": 0.25, "node1": 0.25, "gone": 0.5}
    division = Division(source="calibrated", reason="r", parts=parts).without({"gone"})
    result = await run_check(check.run, config, division=division, calibration=taken)
    assert MISSING not in result.summary and "left out: gone" in result.summary, result
    assert result.evidence["node0"].startswith("1 examples/s")


def test_a_node_that_has_changed_since_it_was_measured_warns() -> None:
    measured = check.CalibrationStatus(calibration({"a": 1.0, "b": 1.0}), changed=("b",))
    result = check.evaluate(config(["a", "b"]), measured, dict.fromkeys("ab", FITS), SOON)
    assert (result.status, result.fix_command) == (CheckStatus.WARN, "flightdeck calibrate")
    assert "b: it has changed since it was measured" in result.summary


def test_without_a_calibration_memory_is_still_checked() -> None:
    tight = {"a": FITS, "b": memory(95, 100)}
    result = check.evaluate(config(["a", "b"]), check.CalibrationStatus(None), tight, SOON)
    assert result.status is CheckStatus.WARN
    assert "95%, and above 90%" in result.summary and MISSING in result.summary


def test_the_fix_names_the_configuration_and_is_only_given_where_it_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deck = config(["a", "b"]).model_copy(update={"file": tmp_path / "my deck.toml"})

    def fix(deck: Config, need: MemoryNeed = FITS, **fields: Any) -> str | None:
        taken = calibration({"a": 1.0, "b": 1.0}, **fields)
        return check.evaluate(deck, check.CalibrationStatus(taken), dict.fromkeys("ab", need), SOON).fix_command

    old = TAKEN - timedelta(days=99)
    assert fix(deck, taken_at=old) == f"flightdeck calibrate -c '{tmp_path}/my deck.toml'"
    here = deck.model_copy(update={"file": tmp_path / "flightdeck.toml"})
    monkeypatch.chdir(tmp_path)
    assert fix(here, taken_at=old) == "flightdeck calibrate"
    slow = LinkMeasure(nodes=("a", "b"), latency_s=0.7, bandwidth_bytes_per_s=1e9)
    assert fix(deck, memory(95, 100)) is None
    assert fix(deck, all_ranks=slow) is None
    assert fix(deck, links=(slow,)) is None


def test_equal_shares_by_our_own_rule_fail_no_node() -> None:
    """Nodes of which one is slower by far, but measured so noisily that it is no evidence."""
    nodes = tuple(measure(name, speed, spread=0.6, windows=4) for name, speed in (("a", 1.0), ("b", 0.5)))
    result = evaluated({"a": 1.0, "b": 0.5}, nodes=nodes)
    assert result.status is CheckStatus.WARN, result
    assert "b: its part of a step takes 33% longer than the mean speeds would allow" in result.summary


def test_switched_off_it_names_the_setting() -> None:
    assert check.CHECK.switched_off(config(["ultra"], enabled=False)) == ("switched off: [calibration] enabled = false")
