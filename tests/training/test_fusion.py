"""Fusing keeps what was learned, or leaves nothing and says why; the result loads in stock mlx-lm."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm import load

from engine.protocol.job import Job, JobError
from engine.protocol.safetensors import check_header
from engine.protocol.task import Task
from engine.trainer.fused_model import FusedForm, FusedModel
from engine.trainer.saver import write_model
from engine.training.result_tasks import FusionResult
from tests.training.launching import launch
from tests.training.partitioned_cases import run as run_partitioned
from tests.training.task_runs import (
    Events,
    losses,
    make_model,
    quantize,
    read_events,
    run_here,
    run_on_ring,
    stock_loss,
    train,
    verdict,
)
from tests.training.test_evaluation import DIVIDED
from tests.training.tiny import Tiny

pytestmark = pytest.mark.busy

CLOSE = 1e-3
ROUNDING = "rounding to 4 bits"


def judged(base: float, adapter: float, fused: float) -> tuple[float | None, bool, str | None]:
    result = FusionResult.of(base, adapter, fused, keep=0.95, rounding=ROUNDING)
    return result.kept, result.accepted, result.why


def test_the_gain_is_kept_or_the_model_refused() -> None:
    assert judged(3.0, 2.0, 2.0) == (1.0, True, None)
    assert judged(3.0, 2.0, 1.5) == (1.5, True, None)
    assert [judged(3.0, 2.0, loss)[1] for loss in (2.049, 2.051)] == [True, False]
    kept, accepted, why = judged(3.0, 2.0, 2.5)
    assert (kept, accepted) == (0.5, False)
    assert why == (
        "rounding to 4 bits kept 50.0% of the gain, less than 95%: the loss is 3.0000 without the adapter, 2.0000 with "
        "it, 2.5000 fused"
    )
    assert judged(3.0, 2.0, 3.5)[:2] == (-0.5, False)
    assert judged(3.0, 2.0, float("nan"))[1] is False


def test_without_a_gain_the_fused_loss_must_be_the_adapters() -> None:
    kept, accepted, why = judged(2.0, 2.1, 2.1001)
    assert (kept, accepted) == (None, True)
    assert why == "there is no gain to keep: the loss is 2.1000 with the adapter and 2.0000 without"
    kept, accepted, why = judged(2.0, 2.1, 2.0)
    assert (kept, accepted) == (None, False) and why is not None
    assert why.endswith("but 2.0000 fused (rounding to 4 bits)")
    # Within the sums' own rounding.
    assert judged(2.0, 2.0 - 1e-7, 2.0)[:2] == (None, True)
    assert judged(2.0, float("nan"), 2.0)[:2] == (None, False)


def fused(home: Path, job: dict[str, Any], weights: Path, *, stop: bool = False, **options: Any) -> Events:
    options = {"path": str(home / "fused"), **options}
    return run_here(home / "run", job, Task("fuse", "run", str(weights), options=options), stop=stop)


def left_in(home: Path) -> set[str]:
    return {path.name for path in home.iterdir()} - {"run"}


def test_a_small_update_of_a_quantized_base_is_refused_with_choices_that_keep_it(tiny: Tiny, tmp_path: Path) -> None:
    base = quantize(tiny.model, tmp_path / "base")
    job = tiny.job(model=str(base), fine_tune_type="lora", learning_rate=1e-5)
    weights = train(job, tmp_path / "small.safetensors")
    refused = verdict(fused(tmp_path, job, weights))
    assert not refused["accepted"] and refused["kept"] < 0.5
    assert refused["why"].startswith("rounding to 4 bits kept ")
    assert left_in(tmp_path) == {"base", "small.safetensors"}
    assert [(choice["dequantize"], choice["bits"]) for choice in refused["choices"]] == [
        *((False, bits) for bits in (5, 6, 8)),
        (True, None),
    ]
    sizes = [refused["bytes"], *(choice["bytes"] for choice in refused["choices"])]
    assert sizes == sorted(set(sizes))
    for number in (2, 3):
        choice = refused["choices"][number]
        events = fused(tmp_path / str(number), job, weights, **choice)
        accepted = verdict(events)
        assert accepted["accepted"] and accepted["kept"] > 0.98 and accepted["choices"] == []
        assert accepted["bytes"] == choice["bytes"]
        path = Path(accepted["path"])
        (saved,) = [event for event in events if event.get("phase") == "committed"]
        assert (saved["holds"], saved["folder"], saved["bytes"]) == ("model", str(path), choice["bytes"])
        assert {name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name, *_ in saved["files"]} == {
            name: digest for name, _, digest in saved["files"]
        }
        assert sum(value.nbytes for _, value in tree_flatten(load(str(path))[0].parameters())) == choice["bytes"]
        assert stock_loss(path, tiny.text / "test.jsonl") < stock_loss(base, tiny.text / "test.jsonl")
        assert ("quantization" in json.loads((path / "config.json").read_text())) is (not choice["dequantize"])


def test_a_fused_model_takes_the_place_of_no_other_and_a_stopped_one_leaves_none(tiny: Tiny, tmp_path: Path) -> None:
    job = tiny.job(fine_tune_type="lora", iters=1)
    weights = train(job, tmp_path / "weights.safetensors")
    # As killed ones leave them.
    (tmp_path / ".fused.fusing").mkdir()
    (tmp_path / "..fused.fusing.a1b2" / ".fused.fusing").mkdir(parents=True)
    events = fused(tmp_path, job, weights, stop=True)
    assert events[-1]["stopped"] and left_in(tmp_path) == {"weights.safetensors"}
    (tmp_path / "file").touch()
    with pytest.raises(JobError, match="/file/below/it cannot be made: Not a directory"):
        fused(tmp_path, job, weights, path=str(tmp_path / "file" / "below" / "it"))
    assert not losses(read_events(tmp_path / "run" / "rank0.events.jsonl")), "nothing was measured"
    (tmp_path / "file").unlink()
    (tmp_path / "fused").mkdir()
    with pytest.raises(JobError, match="exists already: remove it, or name another path"):
        fused(tmp_path, job, weights)
    with pytest.raises(JobError, match="bits = 8: the layers to fuse are not quantized"):
        fused(tmp_path / "other", job, weights, bits=8)
    assert left_in(tmp_path / "other") == set()


def test_it_needs_the_memory_of_a_few_parameters(tiny: Tiny, tmp_path: Path) -> None:
    """A DoRA on a base of 16 bits: fused in 16 bits again."""
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 26}
    model = make_model("qwen3", tmp_path / "model", tiny, mx.bfloat16, **sizes)
    job = tiny.job(model=str(model), fine_tune_type="dora", num_layers=-1, iters=1, batch_size=1)
    weights = train(job, tmp_path / "weights.safetensors")
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    whole = FusedModel.of(
        Job.from_spec(job, model=None, data=None, workdir=tmp_path, home=tmp_path), weights, FusedForm()
    )
    size = whole.nbytes
    write_model(tmp_path / "fused", model, whole.weights, whole.config)
    assert mx.get_peak_memory() - before < 0.15 * size
    tensors = check_header(tmp_path / "fused" / "model.safetensors").tensors
    assert {dtype for dtype, _ in tensors.values()} == {"BF16"} and size > 10 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), [("llama", mx.bfloat16), ("qwen3", mx.float16)], ids=["llama", "qwen3"])
def test_lora_dora_and_full_of_every_strategy_are_fused(tiny: Tiny, tmp_path: Path, kind: str, dtype: mx.Dtype) -> None:
    """Trained on two ranks, in 16 bits: the fused model is stock mlx-lm's, and has the loss of base and adapter."""
    model = make_model(kind, tmp_path / "model", tiny, dtype, tie_word_embeddings=kind == "qwen3")
    common = {"model": str(model), "iters": 4, "learning_rate": 3e-3, "num_layers": -1}
    jobs = {
        f"{strategy} {tuned}": tiny.job(fine_tune_type=tuned, strategy=strategy, **common, **keys)
        for strategy, keys in DIVIDED.items()
        for tuned in ("lora", "dora", "full")
    }
    trainings = [{"name": name, "job": job, "split": job.get("layer_split")} for name, job in jobs.items()]
    run_partitioned(tmp_path / "trained", trainings, 2)
    for name, job in jobs.items():
        events = fused(tmp_path / name, job, tmp_path / "trained" / f"{name}.trained.safetensors")
        judged, measured = verdict(events), losses(events)
        assert judged["accepted"] and judged["kept"] > 0.99, (name, judged)
        assert measured["fused"] == pytest.approx(measured["adapter"], rel=CLOSE)
        stock = stock_loss(Path(judged["path"]), tiny.text / "test.jsonl")
        assert stock == pytest.approx(measured["adapter"], rel=CLOSE), name


EMBEDDED = {"keys": ["self_attn.q_proj", "model.embed_tokens"], "rank": 4, "scale": 20.0, "dropout": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize("wider", [None, "none", "v_proj"], ids=["32 bits", "4 bits", "4 and 8 bits"])
@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("qwen3_moe", {}),
        ("mixtral", {}),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_experts_tied_embeddings_and_mixed_bits_are_fused(
    tiny: Tiny, tmp_path: Path, kind: str, keys: dict[str, Any], wider: str | None
) -> None:
    """Sizes that groups of 32 divide, so that every layer is quantized; each keeps its bits. On the CPU, MLX has
    experts in float32 alone, and of a quantized model's losses in 16 bits the last digits depend on the batch."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "head_dim": 32, **keys}
    base = make_model(kind, tmp_path / "base", tiny, **sizes)
    if wider is not None:
        base = quantize(base, tmp_path / "quantized", wider)
    # The embeddings' own adapter makes large updates.
    lora = {"lora_parameters": EMBEDDED, "learning_rate": 2e-3} if keys else {"learning_rate": 1e-2}
    job = tiny.job(model=str(base), fine_tune_type="lora", num_layers=-1, **lora)
    events = fused(tmp_path, job, train(job, tmp_path / "weights.safetensors"), keep=0.5)
    judged, measured = verdict(events), losses(events)
    assert judged["accepted"] and measured["adapter"] < measured["base"] - 0.3, judged
    assert wider is not None or measured["fused"] == pytest.approx(measured["adapter"], rel=CLOSE)
    stock = stock_loss(Path(judged["path"]), tiny.text / "test.jsonl")
    assert stock == pytest.approx(measured["fused"], rel=CLOSE)
    before, after = (
        {name: (value.shape, value.dtype) for name, value in tree_flatten(load(str(path))[0].parameters())}
        for path in (base, judged["path"])
    )
    assert after == before


def test_a_disk_without_room_is_refused_before_anything_is_measured(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tiny.job(fine_tune_type="lora", iters=1)
    weights, home = train(job, tmp_path / "weights.safetensors"), tmp_path / "run"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9000, 0, 9000))
    task = Task("fuse", "run", str(weights), options={"path": str(home / "fused")})
    with pytest.raises(JobError, match=r"the fused model needs [\d.]+ kB, [\d.]+ kB more than \S+run has free"):
        run_here(home, job, task)
    assert losses(read_events(home / "rank0.events.jsonl")) == {}
    assert not [*home.glob("*fus*")]


@pytest.mark.slow
def test_two_ranks_fuse_what_one_fuses_and_a_keeper_runs_it(tiny: Tiny, tmp_path: Path) -> None:
    """Rank 0 writes the model, and both measure it in parts."""
    job = tiny.job(fine_tune_type="lora", learning_rate=1e-2, strategy="sharded")
    weights = train({**job, "strategy": "data"}, tmp_path / "weights.safetensors")
    alone = losses(fused(tmp_path / "alone", job, weights))
    task = Task("fuse", "run", str(weights), options={"path": str(tmp_path / "both"), "dequantize": False})
    first, second = run_on_ring(tmp_path / "ring", 2, {"fuse": (job, task)})["fuse"]
    assert losses(first) == pytest.approx(alone, abs=1e-5) and verdict(first)["accepted"]
    assert [event for event in second if event["event"] == "result"] == []
    fields = {"task": {**asdict(task), "options": {"path": str(tmp_path / "kept")}}}
    run = launch(tmp_path / "kept run", job, spec_fields=fields).succeeded()
    assert losses(run.events()) == pytest.approx(alone, abs=1e-5) and verdict(run.events())["kept"] > 0.99
    tensors = {(tmp_path / name / "model.safetensors").read_bytes() for name in ("both", "kept", "alone/fused")}
    assert len(tensors) == 1


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sharded", "pipeline"])
def test_the_whole_model_of_a_full_fine_tune_is_measured_and_fused_as_its_trained_layers_are(
    tiny: Tiny, tmp_path: Path, strategy: str
) -> None:
    job = tiny.job(strategy=strategy)
    run = launch(tmp_path / "run", job, shares=(1.0, 1.0)).succeeded()
    cases = {
        name: (job, Task("fuse", "run", str(run.adapters / name), options={"path": str(tmp_path / f"fused {name}")}))
        for name in ("adapters.safetensors", "model")
    }
    layers, whole = (events for events, _ in run_on_ring(tmp_path / "ring", 2, cases).values())
    assert losses(whole) == pytest.approx(losses(layers), abs=1e-6)
    assert verdict(whole)["accepted"] and verdict(layers)["accepted"]
    saved = {(tmp_path / f"fused {name}" / "model.safetensors").read_bytes() for name in cases}
    assert len(saved) == 1
