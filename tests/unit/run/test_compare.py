"""What differs between runs, which is best, and why their speeds differ."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.run.compare import ComparedRun, Comparison, Difference, compare
from engine.run.events import EnergyMeasured, TrainingStarted
from engine.run.journal import read_history
from engine.run.series.reader import SeriesFigures
from tests.unit.run.run_maker import MadeRun, made_decisions, make_run_config

PACE = {"whole": 1.0, "compute": 0.6, "exchange": 0.2, "data": 0.01, "update": 0.1}


def run(  # noqa: PLR0913
    home: Path,
    number: int,
    *,
    speed: float = 1000.0,
    pace: dict[str, float] | None = None,
    job: dict[str, Any] | None = None,
    ranks: int = 2,
    versions: dict[str, str] | None = None,
    series: dict[tuple[str, str], float] | None = None,
    **more: Any,
) -> ComparedRun:
    """A run that has succeeded, with what is named other than in the rest."""
    config = make_run_config(ranks)
    changed = config.job.model_copy(update={"mlx_lm": {**config.job.mlx_lm, "learning_rate": 1e-4, **(job or {})}})
    made = MadeRun(home, number=number, config=config.model_copy(update={"job": changed}))
    made.state("preflight", "launching").attempt()
    made.append(TrainingStarted(attempt=1, versions=versions or {"mlx": "0.32.4"}, inputs={"train.jsonl": "crc32 1"}))
    made.append(EnergyMeasured(node="node0", joules=3.6e6, seconds=10.0))
    made.state("running", "finishing", "succeeded", reason="completed", train_loss=2.0, iteration=60).close()
    figures = {("throughput", ""): speed, **{("step time", part): s for part, s in {**PACE, **(pace or {})}.items()}}
    every = {name: SeriesFigures(y, y, y, y, y) for name, y in {**figures, **(series or {})}.items()}
    history = read_history(made.directory)
    return ComparedRun(history.record, made.plan, history, every, **more)


def difference(comparison: Comparison, key: str) -> Difference:
    return next(row for row in comparison.differences if row.key == key)


def reasons(slow: ComparedRun, fast: ComparedRun) -> list[str]:
    (speed,) = compare([fast, slow]).speeds
    assert (speed.run, speed.fastest) == (slow.record.id, fast.record.id)
    return list(speed.reasons)


def test_only_what_differs_is_listed(tmp_path: Path) -> None:
    one = run(tmp_path, 1)
    other = run(tmp_path, 2, job={"learning_rate": 1e-5}, versions={"mlx": "0.33.0"}, speed=1001.0)
    comparison = compare([one, other])
    assert [(row.section, row.key, row.values) for row in comparison.differences] == [
        ("configuration", "learning_rate", (1e-4, 1e-5)),
        ("versions", "mlx", ("0.32.4", "0.33.0")),
        ("result", "tokens/s", (1000.0, 1001.0)),
    ]
    assert comparison.names == ("job-0001", "job-0002")


def test_of_a_node_that_one_run_lacks_only_its_name_is_listed(tmp_path: Path) -> None:
    keys = [row.key for row in compare([run(tmp_path, 1), run(tmp_path, 2, ranks=1)]).differences]
    assert keys == ["ranks", "nodes", "shares", "validating nodes"]


def test_runs_alike_have_no_difference(tmp_path: Path) -> None:
    assert compare([run(tmp_path, 1), run(tmp_path, 2)]).differences == ()


def test_the_best_of_each_figure_is_named(tmp_path: Path) -> None:
    loss = [{("loss", "validation"): value, ("memory", "rank 0"): 9e9 + value} for value in (2.0, 1.5, 1.75)]
    runs = [run(tmp_path, n, speed=speed, series=loss[n]) for n, speed in enumerate((800.0, 1000.0, 1200.0))]
    comparison = compare(runs)
    best = {row.key: row.best for row in comparison.differences}
    assert best == {
        **dict.fromkeys(("val loss", "best val loss", "best val loss, smoothed"), 1),
        "tokens/s": 2,
        "peak memory": 1,
    }


def test_a_run_that_diverged_is_never_the_best_nor_unlike_one_of_its_kind(tmp_path: Path) -> None:
    nan = {("loss", "train"): math.nan, ("loss", "validation"): math.nan, ("step time", "whole"): math.nan}
    diverged, sound = {**nan, ("throughput", ""): math.nan}, {("loss", "train"): 2.0, ("loss", "validation"): 2.0}
    runs = [run(tmp_path, n, series=series) for n, series in enumerate((diverged, diverged, sound))]
    assert compare(runs[:2]).differences == ()
    comparison = compare(runs)
    assert difference(comparison, "val loss").values == (None, None, 2.0)
    assert {row.best for row in comparison.differences} == {None}
    assert comparison.speeds == ()


def test_the_best_smoothed_loss_may_be_another_runs(tmp_path: Path) -> None:
    lucky, steady, short = (run(tmp_path, number) for number in range(3))
    figures = {
        lucky.record.id: SeriesFigures(3.0, 2.0, 1.0, 2.0, 1.9),
        steady.record.id: SeriesFigures(3.0, 1.5, 1.4, 2.0, 1.6),
        short.record.id: SeriesFigures(3.0, 2.5, 2.5, 2.5, math.nan),
    }
    runs = [replace(one, series={("loss", "train"): figures[one.record.id]}) for one in (lucky, steady, short)]
    comparison = compare(runs)
    lowest, smoothed = (difference(comparison, f"lowest train loss{end}") for end in ("", ", smoothed"))
    assert (lowest.values, lowest.best) == ((1.0, 1.4, 2.5), 0)
    assert (smoothed.values, smoothed.best) == ((1.9, 1.6, None), 1)


def test_a_setting_of_one_run_alone_is_none_in_the_others(tmp_path: Path) -> None:
    comparison = compare([run(tmp_path, 1), run(tmp_path, 2, job={"lora_parameters": {"rank": 16}})])
    assert difference(comparison, "lora_parameters.rank").values == (None, 16)


def test_variables_are_compared_without_their_secrets(tmp_path: Path) -> None:
    runs = []
    for number, token in enumerate(("hf_abcdefghijklmnop", "hf_ponmlkjihgfedcba"), 1):
        base = run(tmp_path, number)
        env = {"HF_TOKEN": token, "AWS_ACCESS_KEY_ID": f"AB{number}", "OMP_NUM_THREADS": str(number)}
        job = base.plan.config.job.model_copy(update={"env": env})
        config = base.plan.config.model_copy(update={"job": job})
        runs.append(ComparedRun(base.record, base.plan.model_copy(update={"config": config}), base.history))
    shown = [row for row in compare(runs).differences if row.key.startswith("env.")]
    assert [(row.key, row.values) for row in shown] == [("env.OMP_NUM_THREADS", ("1", "2"))]


KEYS = ["seed", "mask_prompt", "patience"]
values = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from(["a", "b"]))


@given(st.lists(st.dictionaries(st.sampled_from(KEYS), values, min_size=3), min_size=2, max_size=4))
def test_a_key_is_listed_exactly_where_two_runs_have_other_values(
    tmp_path_factory: pytest.TempPathFactory, jobs: list[dict[str, Any]]
) -> None:
    base = PLAIN.setdefault("run", run(tmp_path_factory.mktemp("home"), 0))
    runs = []
    for job in jobs:
        changed = base.plan.config.job.model_copy(update={"mlx_lm": job})
        config = base.plan.config.model_copy(update={"job": changed})
        plan = base.plan.model_copy(update={"config": config})
        runs.append(ComparedRun(base.record, plan, base.history))
    listed = {row.key: row.values for row in compare(runs).differences}
    for key in KEYS:
        kinds = {(type(job[key]).__name__, job[key]) for job in jobs}
        assert (key in listed) == (len(kinds) > 1)
        if key in listed:
            assert listed[key] == tuple(job[key] for job in jobs)


PLAIN: dict[str, ComparedRun] = {}
"""One run for all examples of a property."""


def test_speeds_within_a_few_percent_are_alike(tmp_path: Path) -> None:
    (speed,) = compare([run(tmp_path, 1), run(tmp_path, 2, speed=980.0)]).speeds
    assert speed.summary == "job-0002 is as fast as job-0001: 980 and 1,000 tokens/s"
    assert speed.reasons == ()


def test_a_slow_exchange_is_the_first_reason(tmp_path: Path) -> None:
    fast = run(tmp_path, 1)
    slow = run(tmp_path, 2, speed=600.0, pace={"whole": 1.6, "exchange": 0.8, "compute": 0.7})
    (speed,) = compare([fast, slow]).speeds
    assert speed.summary == "job-0002 makes 600 tokens/s, 40% less than job-0001 (1,000)"
    assert speed.reasons == (
        "it waits 800 ms a step for the other ranks and their gradients, not 200 ms: 38% of its step",
        "it computes 700 ms a step on its slowest rank, not 600 ms: 6% of its step",
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ranks": 1}, "it ran on 1 rank (node0), not 2 ranks (node0, node1)"),
        (
            {"job": {"batch_size": 2}},
            "it trains other work: batch_size is 2, not 4: a small batch shares its fixed cost",
        ),
        ({"job": {"batch_size": 8}}, "it trains other work: batch_size is 8, not 4$"),
        ({"ranks": 1, "chips": {"node0": "M3"}}, "it ran on 1 rank (node0), not 2 ranks (node0, node1)$"),
        ({"job": {"batch_tokens": 96}}, "it trains other work: batch_tokens is 96, in the other not set"),
        ({"pace": {"whole": 1.5, "data": 0.5}}, "it waits 500 ms a step for its data, not 10 ms: 33% of its step"),
        ({"versions": {"mlx": "0.31.0"}}, "mlx was 0.31.0, not 0.32.4"),
        ({"chips": {"node0": "M1", "node1": "M1"}}, "its chips are M1, M1, not M3, M3"),
        ({"throttled": {"node1": ("heavy", 0.4)}}, "node1 was throttled by heat (heavy) for 40% of the time, not 0%"),
        (
            {"series": {("skew", ""): 0.8, ("compute", "rank 0"): 0.3, ("compute", "rank 1"): 0.54}},
            "its ranks are unequal: rank 1 (node1) takes 80% longer than the fastest, not 0%",
        ),
    ],
)
def test_a_slow_run_is_explained(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    fast = run(tmp_path, 1, chips={"node0": "M3", "node1": "M3"})
    slow = run(tmp_path, 2, **{"speed": 500.0, "chips": fast.chips, **changes})
    texts = reasons(slow, fast)
    # A "$" ends the text; of the same chips nothing is said.
    assert any(f"{text}$".startswith(reason) for text in texts), texts
    assert ("its chips" in reason) == any("its chips" in text for text in texts)


def test_a_command_is_other_work_and_its_lack_of_settings_is_no_reason(tmp_path: Path) -> None:
    trained, commanded = run(tmp_path, 1), run(tmp_path, 2, speed=500.0)
    job = commanded.plan.config.job.model_copy(update={"command": ("python", "train.py"), "mlx_lm": {}, "model": None})
    plan = commanded.plan.model_copy(update={"config": commanded.plan.config.model_copy(update={"job": job})})
    program = ComparedRun(commanded.record, plan, commanded.history, commanded.series)
    assert reasons(program, trained) == [
        'it trains other work: command is ["python", "train.py"], in the other not set'
    ]
    faster = ComparedRun(commanded.record, plan, commanded.history, {("throughput", ""): SeriesFigures(*[2e3] * 5)})
    assert reasons(trained, faster) == ['it trains other work: command is not set, in the other ["python", "train.py"]']


def test_another_backend_and_other_shares_are_reasons(tmp_path: Path) -> None:
    fast, slow = run(tmp_path, 1), run(tmp_path, 2, speed=500.0)
    made = made_decisions(slow.plan)
    division = made.division.model_copy(update={"parts": {"node0": 0.7, "node1": 0.3}, "source": "calibration"})
    network = made.network.model_copy(update={"backend": "jaccl"})
    decisions = made.model_copy(update={"division": division, "network": network})
    history = slow.history.__class__(**{**vars(slow.history), "decisions": (decisions,)})
    texts = reasons(ComparedRun(slow.record, slow.plan, history, slow.series), fast)
    assert texts[0] == "its ranks were connected by jaccl, not ring"
    assert "its batch was shared as node0 70%, node1 30% (calibration), not node0 50%, node1 50%" in texts


def test_a_difference_that_nothing_explains_is_said_so(tmp_path: Path) -> None:
    assert reasons(run(tmp_path, 2, speed=500.0), run(tmp_path, 1)) == [
        "nothing that the runs have recorded explains it: the machines may have had other work"
    ]
