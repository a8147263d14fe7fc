"""The newest checkpoint of a run that was killed is measured and asked as the result of one that ended there, however
its state was divided."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.protocol.attempt import STOP
from engine.protocol.task import Task, TaskKind
from tests.training.launching import Launched, launch
from tests.training.states import tamper
from tests.training.task_runs import losses, run_here
from tests.training.test_resume import BOTH, kill_all_at, run_training
from tests.training.tiny import Tiny
from tests.waiting import wait_until

pytestmark = [pytest.mark.busy, pytest.mark.slow]

CLOSE = 1e-5
ITERS = 100
STRATEGIES: dict[str, dict[str, Any]] = {
    "sharded": {"strategy": "sharded"},
    "pipeline": {"strategy": "pipeline", "layer_split": "0-1,1-2"},
    "local": {"strategy": "local", "local_steps": 3},
}
PROMPT = "tower, raven zero one"


def killed(home: Path, job: dict[str, Any], *, parts: int = 2, **fields: Any) -> tuple[Launched, int, list[list[str]]]:
    """A run of two ranks that was killed; the iteration of its newest complete state, and the parts of that as a task
    names them."""
    run = run_training(home, {**job, "iters": ITERS}, every=3, **fields)
    kill_all_at(run, 2, 8, parts=parts)
    committed = [
        {event["update"]: event for event in run.events(rank, "checkpoint") if event["phase"] == "committed"}
        for rank in range(parts)
    ]
    update = max(set.intersection(*(set(events) for events in committed)))
    saved = [events[update] for events in committed]
    assert update < ITERS
    return run, saved[0]["iteration"], [[f"n{rank}", e["folder"], e["manifest"]] for rank, e in enumerate(saved)]


def task(home: Path, job: dict[str, Any], kind: TaskKind, parts: Any, **options: Any) -> Launched:
    described = asdict(Task(kind, "run", parts=parts, options=options))
    return launch(home, {**job, "iters": ITERS}, shares=BOTH, spec_fields={"task": described})


def answers(run: Launched) -> list[str]:
    return [event["text"] for event in run.events(0, "result") if event["kind"] == "answer"]


@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_state_in_parts_is_measured_and_asked_as_the_weights_of_a_run_that_ended_there(
    tiny: Tiny, tmp_path: Path, strategy: str, kind: str
) -> None:
    job = tiny.job(fine_tune_type=kind, learning_rate=1e-2 if kind != "full" else 1e-3, **STRATEGIES[strategy])
    _, iteration, parts = killed(tmp_path / "killed", job)
    # With "local" each part is a whole state, and a task is given one.
    parts = parts[-1:] if strategy == "local" else parts
    ended = run_training(tmp_path / "ended", {**job, "iters": iteration}, every=0).succeeded()
    file = str(ended.adapters / "adapters.safetensors")
    whole = {**job, "strategy": "data"}
    expected = losses(run_here(tmp_path / "expected", whole, Task("evaluate", "run", file)))
    assert expected["adapter"] < expected["base"] - 0.1

    measured = task(tmp_path / "eval", job, "evaluate", parts).succeeded()
    assert losses(measured.events()) == pytest.approx(expected, abs=CLOSE)
    assert f"weights from {len(parts)} part{'s' * (len(parts) > 1)} of a state" in measured.log()
    assert not list(measured.home.glob("assembled-*"))
    options = {"prompts": [PROMPT], "max_tokens": 24, "raw": True, "variants": ["adapter"]}
    asked = task(tmp_path / "asked", job, "generate", parts, **options).succeeded()
    alone = launch(
        tmp_path / "alone",
        {**whole, "iters": ITERS},
        spec_fields={"task": asdict(Task("generate", "run", file, options=options))},
    ).succeeded()
    assert answers(asked) == answers(alone) != []


def test_a_state_in_parts_is_served_as_it_answers(tiny: Tiny, tmp_path: Path) -> None:
    job = tiny.job(fine_tune_type="lora", learning_rate=1e-2, **STRATEGIES["sharded"])
    _, _, parts = killed(tmp_path / "killed", job)
    options = {"prompts": [PROMPT], "max_tokens": 24, "raw": True, "variants": ["base", "adapter"]}
    expected = answers(task(tmp_path / "asked", job, "generate", parts, **options).succeeded())
    options = {"host": "127.0.0.1", "port": 0, "max_tokens": 24, "name": "trained"}
    served = task(tmp_path / "served", job, "serve", parts, **options)
    wait_until(lambda: bool(served.events(0, "result")), 120)
    url = f"{served.events(0, 'result')[0]['address']}/completions"
    asked = [{"model": name, "prompt": PROMPT, "max_tokens": 24} for name in ("base", "trained")]
    replies = [httpx.post(url, json=body, timeout=60).raise_for_status().json() for body in asked]
    assert [reply["choices"][0]["text"] for reply in replies] == expected and expected[0] != expected[1]
    served.send(STOP)
    served.succeeded()
    assert not list(served.home.glob("assembled-*"))


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_a_state_that_is_not_divided_is_used_where_it_is_or_unpacked(
    tiny: Tiny, tmp_path: Path, compression: str
) -> None:
    job = tiny.job()
    _, iteration, parts = killed(tmp_path / "killed", job, parts=1, checkpoint_compression=compression)
    ended = run_training(tmp_path / "ended", {**job, "iters": iteration}, every=0).succeeded()
    file = str(ended.adapters / "adapters.safetensors")
    expected = losses(run_here(tmp_path / "expected", job, Task("evaluate", "run", file)))
    measured = task(tmp_path / "eval", job, "evaluate", parts).succeeded()
    assert losses(measured.events()) == pytest.approx(expected, abs=CLOSE)
    assert "part of a state" not in measured.log(), "nothing was copied"


def test_a_part_that_is_not_as_it_was_saved_is_refused_on_every_rank(tiny: Tiny, tmp_path: Path) -> None:
    job = tiny.job(**STRATEGIES["sharded"])
    _, _, parts = killed(tmp_path / "killed", job)
    tamper(Path(parts[1][1]))
    refused = task(tmp_path / "eval", job, "evaluate", parts)
    assert 0 not in [record.code for record in refused.ended()]
    why = (
        f"the part of the state in {parts[1][1]} on n1 is not used: its manifest is not the one that it was saved with"
    )
    assert all(why in refused.log(rank) for rank in (0, 1))
