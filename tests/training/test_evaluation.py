"""A run's weights are measured as stock mlx-lm would measure them, over any number of ranks alike."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine.protocol.job import JobError
from engine.protocol.task import Task
from engine.trainer.collective import Collective
from tests.training.launching import launch
from tests.training.partitioned_cases import loaded
from tests.training.partitioned_cases import run as run_partitioned
from tests.training.task_runs import losses, make_model, quantize, run_here, run_on_ring, run_rank, stock_loss, train
from tests.training.tiny import Tiny
from tests.training.together import together
from tests.waiting import wait_until

pytestmark = pytest.mark.busy

CLOSE = 1e-5


@pytest.fixture(scope="module")
def lora(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A job, and the weights that it has trained."""
    job = tiny.job(fine_tune_type="lora", learning_rate=1e-2, iters=3)
    return job, train(job, tmp_path_factory.mktemp("lora") / "adapters.safetensors")


Trained = tuple[dict[str, Any], Path]


def test_base_and_adapter_have_stock_mlx_lms_loss(tiny: Tiny, lora: Trained, tmp_path: Path) -> None:
    job, weights = lora
    events = run_here(tmp_path, job, Task("evaluate", "run", str(weights)))

    results = [event for event in events if event["event"] == "result"]
    assert [(event["kind"], event["variant"], event["split"]) for event in results] == [
        ("evaluation", "base", "test"),
        ("evaluation", "adapter", "test"),
    ]
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": {"rank": 8, "dropout": 0.0, "scale": 20.0}}
    (weights.parent / "adapter_config.json").write_text(json.dumps(config))
    rows = tiny.text / "test.jsonl"
    assert results[0]["loss"] == pytest.approx(stock_loss(tiny.model, rows), abs=CLOSE)
    assert results[1]["loss"] == pytest.approx(stock_loss(tiny.model, rows, weights.parent), abs=CLOSE)
    assert results[1]["loss"] < results[0]["loss"] - 0.1
    assert results[0]["perplexity"] == pytest.approx(math.exp(results[0]["loss"]))
    assert [event["phase"] for event in events if event["event"] == "phase"] == ["loading", "validating"] * 2
    assert (events[-1]["event"], events[-1]["completed"]) == ("end", True)


@pytest.mark.parametrize("strategy", ["data", "sharded"])
def test_two_ranks_measure_what_one_measures(tiny: Tiny, lora: Trained, tmp_path: Path, strategy: str) -> None:
    """Rank 1 has no file of the adapter, and none of a whole model whose parameters are others than the base's."""
    job, weights = lora
    fused = quantize(tiny.model, tmp_path / "fused")
    alone = losses(run_here(tmp_path / "alone", job, Task("evaluate", "run", str(weights), str(fused))))

    def rank(collective: Collective) -> dict[str, float]:
        paths = [str(path) if collective.rank == 0 else "/nowhere" for path in (weights, fused)]
        task = Task("evaluate", "run", paths[0], paths[1])
        return losses(run_rank(tmp_path / str(collective.rank), {**job, "strategy": strategy}, task, collective))

    first, second = together(2, rank)
    assert first == pytest.approx(alone, abs=CLOSE) and second == {}
    assert alone.keys() == {"base", "adapter", "fused"} and alone["fused"] != alone["base"]


def test_a_stop_request_ends_it_after_the_batch(lora: Trained, tmp_path: Path) -> None:
    job, weights = lora
    events = run_here(tmp_path, job, Task("evaluate", "run", str(weights)), stop=True)
    assert losses(events) == {}
    assert (events[-1]["event"], events[-1]["completed"], events[-1]["stopped"]) == ("end", False, True)


def test_the_task_chooses_split_batches_and_variants(tiny: Tiny, lora: Trained, tmp_path: Path) -> None:
    job, weights = lora
    options = {"split": "valid", "batches": 1, "variants": ["adapter"]}
    events = run_here(tmp_path, job, Task("evaluate", "run", str(weights), options=options))
    (result,) = [event for event in events if event["event"] == "result"]
    assert (result["split"], result["variant"]) == ("valid", "adapter")
    everything = run_here(tmp_path / "all", job, Task("evaluate", "run", options={"split": "valid"}))
    assert [event["variant"] for event in everything if event["event"] == "result"] == ["base"]
    assert 0 < result["tokens"] < next(event for event in everything if event["event"] == "result")["tokens"]


def test_without_a_test_split_the_validations_is_measured(tiny: Tiny, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    shutil.copy(tiny.text / "valid.jsonl", data)
    (result, *_) = [e for e in run_here(tmp_path, tiny.job(data=str(data)), Task("evaluate", "run")) if "split" in e]
    assert result["split"] == "valid"
    (data / "valid.jsonl").unlink()
    with pytest.raises(JobError, match=r"no examples to evaluate on: test.jsonl and valid.jsonl missing or empty"):
        run_here(tmp_path, tiny.job(data=str(data)), Task("evaluate", "run"))


def test_a_checkpoints_float32_masters_are_measured_in_the_models_type(tiny: Tiny, tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "model", tiny, mx.bfloat16)
    job = tiny.job(model=str(model), learning_rate=1e-3)
    weights = train(job, tmp_path / "saved.safetensors")
    masters = {name: value.astype(mx.float32) for name, value in loaded(weights).items()}
    mx.save_safetensors(str(tmp_path / "masters.safetensors"), masters)
    saved, master = (
        run_here(tmp_path / name, job, Task("evaluate", "run", str(tmp_path / f"{name}.safetensors")))
        for name in ("saved", "masters")
    )
    assert losses(saved) == losses(master)


def test_weights_that_do_not_fit_are_refused_in_words(tiny: Tiny, lora: Trained, tmp_path: Path) -> None:
    job, weights = lora
    other = {**job, "lora_parameters": {"rank": 4}}
    full, whole = tiny.job(), loaded(tiny.model / "model.safetensors")
    part = {name: value for name, value in whole.items() if ".layers.1." in name and "q_proj" not in name}
    mx.save_safetensors(str(tmp_path / "part.safetensors"), part)
    for changed, path, why in (
        ({**full, "num_layers": 1}, tmp_path / "part.safetensors", r"1 of \d+ tensors are missing, such as .*q_proj"),
        (other, weights, r"its .*lora_a is \[32, 8\], and the job's \[32, 4\]"),
        (tiny.job(), weights, "none of its .* tensors is one of the job's"),
        (job, weights.with_name("lost.safetensors"), "No such file"),
    ):
        with pytest.raises(JobError, match=why):
            run_here(tmp_path, changed, Task("evaluate", "run", str(path), options={"variants": ["adapter"]}))
    with pytest.raises(JobError, match="nothing to evaluate as fused, only base"):
        run_here(tmp_path, job, Task("evaluate", "run", options={"variants": ["fused"]}))


MODELS = {"llama": False, "qwen3": True}
"""Two architectures: whether their embeddings are tied."""
DIVIDED: dict[str, dict[str, Any]] = {"data": {}, "sharded": {}, "pipeline": {"layer_split": "0-1,1-4"}}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_lora_dora_and_full_of_every_strategy_measure_alike_on_1_2_and_4_ranks(
    tiny: Tiny, tmp_path: Path, kind: str
) -> None:
    """Trained on two ranks; a pipeline of four stages divides the layers anew."""
    model = make_model(kind, tmp_path / "model", tiny, tie_word_embeddings=MODELS[kind])
    common = {"model": str(model), "iters": 4, "learning_rate": 3e-3, "num_layers": -1}
    jobs = {
        f"{strategy} {tuned}": tiny.job(fine_tune_type=tuned, strategy=strategy, **common, **keys)
        for strategy, keys in DIVIDED.items()
        for tuned in ("lora", "dora", "full")
    }
    trainings = [
        {"name": name, "job": job, "split": job.get("layer_split"), "embeddings": False} for name, job in jobs.items()
    ]
    run_partitioned(tmp_path / "trained", trainings, 2)
    cases = {}
    for name, job in jobs.items():
        task = Task("evaluate", "run", str(tmp_path / "trained" / f"{name}.trained.safetensors"))
        cases[name] = (job, task)
    alone = {name: losses(run_here(tmp_path / "alone" / name, job, task)) for name, (job, task) in cases.items()}
    for ranks in (2, 4):
        measured = run_on_ring(tmp_path / str(ranks), ranks, cases)
        for name, (first, *others) in measured.items():
            assert losses(first) == pytest.approx(alone[name], abs=CLOSE), (name, ranks)
            assert all(losses(other) == {} for other in others)
    assert all(result["adapter"] < result["base"] - 0.05 for result in alone.values()), alone


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["data", "sharded", "pipeline", "local"])
def test_it_runs_under_a_keeper_and_stops(tiny: Tiny, lora: Trained, tmp_path: Path, strategy: str) -> None:
    job, weights = lora
    task = Task("evaluate", "run", str(weights))
    fields = {"task": asdict(task), "stop_grace_s": 30.0}
    job = {**job, "strategy": strategy}
    run = launch(tmp_path / "whole", job, shares=(1.0, 1.0), spec_fields=fields).succeeded()
    alone = losses(run_here(tmp_path / "alone", job, task))
    assert losses(run.events(0)) == pytest.approx(alone, abs=CLOSE) and losses(run.events(1)) == {}

    data = tmp_path / "data"
    data.mkdir()
    (data / "test.jsonl").write_text(10_000 * (tiny.text / "test.jsonl").read_text())
    stopped = launch(tmp_path / "stopped", {**job, "data": str(data)}, shares=(1.0, 1.0), spec_fields=fields)
    wait_until(lambda: any(event["phase"] == "validating" for event in stopped.events(0, "phase")), 60)
    stopped.send_to(1, b"stop\n")
    assert [record.code for record in stopped.ended()] == [0, 0]
    assert [stopped.events(rank)[-1]["stopped"] for rank in (0, 1)] == [True, True]
    assert losses(stopped.events(0)) == {}
