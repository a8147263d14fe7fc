"""Runs of the partitioned strategies under the real launcher: how they end, what they save, where they resume."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import generate, load

from engine.protocol.attempt import read_identity
from tests.training.launching import Launched, launch
from tests.training.test_outputs import PROMPT, mlx_lm, weights
from tests.training.test_resume import LONGER, by_iteration, kill_all_at, resumed, run_training, same_weights
from tests.training.tiny import Tiny
from tests.waiting import wait_until

pytestmark = pytest.mark.busy

BOTH = (1.0, 1.0)
PIPELINE = {"strategy": "pipeline", "layer_split": "0-1,1-2"}
SHARDED = {"strategy": "sharded"}


@pytest.fixture(scope="module")
def full(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """A pipeline that is validated, tested and saved."""
    job = tiny.job(val_batches=-1, steps_per_eval=4, test=True, save_every=5, **PIPELINE)
    return launch(tmp_path_factory.mktemp("pipeline"), job, shares=BOTH).succeeded()


def logits(model: Any, tokenizer: Any) -> mx.array:
    found: mx.array = model(mx.array([tokenizer.encode(PROMPT)]))
    return found


@pytest.mark.slow
def test_a_pipeline_validates_and_tests_as_its_own_model_does(tiny: Tiny, full: Launched) -> None:
    alone = launch(full.home.parent / "alone", tiny.job(val_batches=-1, steps_per_eval=4, test=True)).succeeded()
    assert np.abs(np.array(full.losses(1)) - alone.losses()).max() < 1e-4
    for kind, name in (("validation", "val_loss"), ("test", "test_loss")):
        mine, theirs = ([event[name] for event in run.events(0, kind)] for run in (full, alone))
        assert len(mine) == len(theirs) > 0 and np.abs(np.array(mine) - theirs).max() < 1e-4
        assert mine == [event[name] for event in full.events(1, kind)]
    assert [event["tokens"] for event in full.events(1, "step")] == [e["tokens"] for e in alone.events(0, "step")]


@pytest.mark.slow
def test_a_full_pipeline_leaves_one_model_and_an_adapter_that_mlx_lm_takes(
    tiny: Tiny, full: Launched, tmp_path: Path
) -> None:
    model, tokenizer = load(str(full.adapters / "model"))
    adapted, _ = load(str(tiny.model), adapter_path=str(full.adapters))
    base, _ = load(str(tiny.model))
    assert mx.array_equal(logits(model, tokenizer), logits(adapted, tokenizer)).item()
    assert not mx.allclose(logits(model, tokenizer), logits(base, tokenizer)).item()
    assert isinstance(generate(model, tokenizer, PROMPT, max_tokens=2), str)
    names = {path.name for path in full.adapters.iterdir()}
    assert names == {"adapter_config.json", "adapters.safetensors", "0000005_adapters.safetensors", "model"}
    assert {name for name, _ in tree_flatten(model.parameters())} == {
        name for name, _ in tree_flatten(base.parameters())
    }


@pytest.mark.slow
@pytest.mark.parametrize("own", [SHARDED, PIPELINE], ids=["sharded", "pipeline"])
@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
def test_mlx_lm_fuses_it_and_goes_on_from_it(tiny: Tiny, tmp_path: Path, kind: str, own: dict[str, Any]) -> None:
    run = launch(tmp_path / "run", tiny.job(fine_tune_type=kind, **own), shares=BOTH).succeeded()
    mlx_lm("fuse", model=tiny.model, adapter_path=run.adapters, save_path=tmp_path / "fused")
    whole, tokenizer = load(str(tmp_path / "fused"))
    adapted, _ = load(str(tiny.model), adapter_path=str(run.adapters))
    assert mx.allclose(logits(whole, tokenizer), logits(adapted, tokenizer), atol=1e-4).item()
    options = {"prompt": PROMPT, "max_tokens": 8, "ignore_chat_template": True, "verbose": False}
    mlx_lm("generate", model=tiny.model, adapter_path=run.adapters, **options)
    resume = {"resume_adapter_file": run.adapters / "adapters.safetensors", "iters": 1, "learning_rate": 0.0}
    mlx_lm("lora", config=run.adapters / "adapter_config.json", train=True, adapter_path=tmp_path / "more", **resume)
    saved, ours = weights(tmp_path / "more"), weights(run.adapters)
    assert saved.keys() == ours.keys()
    assert all(mx.array_equal(saved[name], value).item() for name, value in ours.items())


@pytest.mark.parametrize("own", [SHARDED, pytest.param(PIPELINE, marks=pytest.mark.slow)], ids=["sharded", "pipeline"])
@pytest.mark.slow
def test_all_ranks_stop_save_and_exit_together(tiny: Tiny, tmp_path: Path, own: dict[str, Any]) -> None:
    run = launch(tmp_path, tiny.job(iters=100_000, **own), shares=BOTH, spec_fields={"stop_grace_s": 30.0})
    wait_until(lambda: len(run.events(1, "step")) >= 3, 60)
    run.send_to(1, b"stop\n")
    assert [record.code for record in run.ended()] == [0, 0]
    ends = [run.events(rank)[-1] for rank in (0, 1)]
    assert [(end["event"], end["completed"], end["stopped"]) for end in ends] == [("end", False, True)] * 2
    assert ends[0]["iteration"] == ends[1]["iteration"]
    model, tokenizer = load(str(run.adapters / "model"))
    adapted, _ = load(str(tiny.model), adapter_path=str(run.adapters))
    assert mx.array_equal(logits(model, tokenizer), logits(adapted, tokenizer)).item()


@pytest.mark.parametrize("own", [PIPELINE, pytest.param(SHARDED, marks=pytest.mark.slow)], ids=["pipeline", "sharded"])
@pytest.mark.slow
def test_who_loses_its_neighbour_says_so_and_that_its_part_alone_is_no_state(
    tiny: Tiny, tmp_path: Path, own: dict[str, Any]
) -> None:
    run = launch(tmp_path, tiny.job(iters=100_000, **own), shares=BOTH)
    wait_until(lambda: len(run.events(1, "step")) >= 3, 60)
    killed = read_identity(run.files.identity(1))
    assert killed is not None
    os.kill(killed.trainer_pid, signal.SIGKILL)
    survivor, victim = run.ended()
    assert (victim.signal, survivor.code) == (signal.SIGKILL, 5)
    (failure,) = run.events(0, "failure")
    assert failure["error_type"] == "PeerLost"
    assert (
        run.events(0, "emergency_checkpoint") == []
        and "no emergency checkpoint: this rank has only a part" in run.log()
    )


def newest_whole(run: Launched) -> int:
    """The iteration of the last checkpoint of which both ranks have told that their part is on the disk."""
    reported = [[event for event in run.events(rank, "checkpoint") if event["phase"] == "committed"] for rank in (0, 1)]
    return min(int(events[-1]["iteration"]) for events in reported)


def kill_and_go_on(what: dict[str, Any], home: Path) -> tuple[Launched, Launched]:
    """Killed on both ranks after step 11, and the attempt that goes on."""
    run = run_training(home, what, every=3)
    kill_all_at(run, 2, 11, parts=2)
    again = run_training(home, what, every=3, attempt=2).succeeded()
    for rank in (0, 1):
        found = resumed(again, rank)
        assert found["source"] == "checkpoint" and found["refused"] == 0
        assert found["iteration"] >= newest_whole(run) > 0
    return run, again


@pytest.mark.slow
def test_killed_on_all_ranks_it_goes_on_from_every_ranks_part(tiny: Tiny, tmp_path: Path) -> None:
    """What is trained twice is the same twice."""
    run, again = kill_and_go_on(tiny.job(iters=LONGER, save_every=1000, **PIPELINE), tmp_path)
    seen, steps = by_iteration(run), by_iteration(again)
    assert all(seen[iteration] == steps[iteration] for iteration in seen.keys() & steps.keys())
    assert sorted(seen | steps) == list(range(1, LONGER + 1))


@pytest.mark.slow
@pytest.mark.parametrize("own", [PIPELINE, SHARDED], ids=["pipeline", "sharded"])
def test_killed_on_all_ranks_it_is_bit_by_bit_the_undisturbed_run(
    tiny: Tiny, tmp_path: Path, own: dict[str, Any]
) -> None:
    what = tiny.job(iters=LONGER, save_every=1000, **own)
    whole = run_training(tmp_path / "whole", what, every=0).succeeded()
    run, again = kill_and_go_on(what, tmp_path / "killed")
    assert by_iteration(run) | by_iteration(again) == by_iteration(whole)
    assert same_weights(again, whole)


@pytest.mark.slow
def test_a_sharded_state_goes_on_on_another_number_of_ranks(tiny: Tiny, tmp_path: Path) -> None:
    what = tiny.job(iters=LONGER, save_every=1000, **SHARDED)
    whole = by_iteration(run_training(tmp_path / "whole", what, every=0).succeeded())
    for shares in ((1.0,), (1.0, 1.0, 1.0)):
        home = tmp_path / str(len(shares))
        run = run_training(home, what, every=3)
        kill_all_at(run, 2, 11, parts=2)
        again = run_training(home, what, shares, every=3, attempt=2).succeeded()
        assert resumed(again)["iteration"] >= newest_whole(run) > 0
        steps = by_iteration(again)
        assert steps and all(abs(whole[iteration] - loss) < 1e-4 for iteration, loss in steps.items())


@pytest.mark.slow
def test_what_cannot_be_divided_is_one_line_before_the_training(tiny: Tiny, tmp_path: Path) -> None:
    run = launch(tmp_path, tiny.job(strategy="pipeline", layer_split="0-1,1-3"), shares=BOTH)
    assert {record.code for record in run.ended()} == {1}
    (failure,) = run.events(0, "failure")
    assert failure["error_type"] == "JobError" and "ends at layer 3, and the model has 2" in failure["message"]
    assert run.log().splitlines()[-1] == f"JobError: {failure['message']}"
    assert run.events(0, "step") == []
