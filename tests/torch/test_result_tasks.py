"""Tasks on what PyTorch has trained give what transformers and peft give alone, over any number of ranks."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine.node.standard_data import standard_data
from engine.protocol.safetensors import check_header
from engine.protocol.task import Task, TaskKind
from tests.torch.running import TorchRun, output_of, run_torch, start_torch
from tests.torch.test_trainings import DDP, FSDP, ZERO, assert_same_losses, torch_job
from tests.training.tiny import Tiny

pytestmark = [pytest.mark.needs("torch"), pytest.mark.busy]

CLOSE = 1e-5
PROMPT, TOKENS = "tower to raven", 25
FEATURES = {"prompt": "prompt", "completion": "completion", "chat": "messages", "text": "text"}


def start_task(home: Path, job: dict[str, Any], kind: TaskKind, weights: Path | None, **options: Any) -> TorchRun:
    """`ranks`: 1 by default, each on a node of its own."""
    ranks = options.pop("ranks", 1)
    parts, fused = options.pop("parts", []), options.pop("fused", None)
    task = asdict(Task(kind, "run", None if weights is None else str(weights), fused, options, parts))
    return start_torch(home, job, ranks=ranks, homes=[f"node{rank}" for rank in range(ranks)], fields={"task": task})


def run_task(home: Path, job: dict[str, Any], kind: TaskKind, weights: Path | None, **options: Any) -> TorchRun:
    return start_task(home, job, kind, weights, **options).succeeded()


def refused(run: TorchRun) -> str:
    assert run.wait() == [1]
    (failure,) = run.events("failure")
    return str(failure["message"])


def losses(run: TorchRun) -> dict[str, float]:
    return {event["variant"]: event["loss"] for event in run.events("result") if event["kind"] == "evaluation"}


def verdict(run: TorchRun) -> dict[str, Any]:
    (fused,) = [event for event in run.events("result") if event["kind"] == "fused"]
    return fused


def stock(home: Path, tiny: Tiny, folders: Mapping[str, Path], model: Path | None = None) -> dict[str, dict[str, Any]]:
    """By transformers and peft alone, on the test split."""
    home.mkdir(parents=True, exist_ok=True)
    texts = [json.loads(line)["text"] for line in (tiny.text / "test.jsonl").read_text().splitlines()]
    asked = {"texts": texts, "prompt": PROMPT, "tokens": TOKENS, "parts": ["stock"], "model": str(model or tiny.model)}
    (home / "request.json").write_text(
        json.dumps({**asked, "stock": {name: str(path) for name, path in folders.items()}})
    )
    computed: dict[str, dict[str, Any]] = output_of("tests.torch.probe", str(home / "request.json"))["stock"]
    return computed


def trained(home: Path, job: dict[str, Any], ranks: int = 1) -> Path:
    """The folder of the weights that a training has saved last."""
    run = run_torch(home, job, ranks=ranks)
    return Path([event["path"] for event in run.events("checkpoint") if event["phase"] == "committed"][-1])


def in_bfloat16(tiny: Tiny, target: Path) -> Path:
    """A copy of the tiny model."""
    shutil.copytree(tiny.model, target)
    weights: Any = mx.load(str(tiny.model / "model.safetensors"))
    halves = {name: value.astype(mx.bfloat16) for name, value in weights.items()}
    mx.save_safetensors(str(target / "model.safetensors"), halves, metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    return target


def wider(tiny: Tiny, target: Path) -> Path:
    """A copy of the tiny model, whose blocks have each inner feature twice."""
    shutil.copytree(tiny.model, target)
    weights: Any = mx.load(str(tiny.model / "model.safetensors"))
    for name, axis in ((name, int("down_proj" in name)) for name in weights if ".mlp." in name):
        weights[name] = mx.concatenate([weights[name]] * 2, axis)
    mx.save_safetensors(str(target / "model.safetensors"), weights, metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "intermediate_size": 2 * config["intermediate_size"]}))
    return target


def test_weights_are_measured_as_their_training_measures_them(tiny: Tiny, tmp_path: Path) -> None:
    job = torch_job(tiny, fine_tune_type="lora", test=True, test_batches=-1, iters=4)
    training = run_torch(tmp_path / "training", job)
    (tested,) = training.events("test")
    weights = Path(training.events("checkpoint")[-1]["path"])
    measured = run_task(tmp_path / "task", job, "evaluate", weights)
    assert losses(measured)["adapter"] == pytest.approx(tested["test_loss"], abs=CLOSE)
    assert losses(measured)["base"] > tested["test_loss"] + 0.01
    (end,) = measured.events("end")
    assert end["completed"] and {event["split"] for event in measured.events("result")} == {"test"}


@pytest.mark.slow
def test_converted_data_is_gone_on_with_and_measured_as_the_standard_files_are(tiny: Tiny, tmp_path: Path) -> None:
    """One file of texts in place of a folder, of which the conversion splits off the rest."""
    rows = (tiny.text / "train.jsonl").read_text().splitlines()
    source, saved = tmp_path / "set" / "rows.json", {"checkpoint_every": 5}
    source.parent.mkdir()
    source.write_text("[" + ",".join(rows) + "]")
    options = {"valid": 0.2, "test": 0.2}
    keys: dict[str, Any] = {"fine_tune_type": "lora", "batch_size": 4, "test": True, "test_batches": -1}
    job = torch_job(tiny, **keys, data=str(source), data_options=options)
    before = run_torch(tmp_path / "node", job, ranks=2, fields=saved)
    after = run_torch(tmp_path / "node", job, ranks=2, attempt=2, fields={"resume": True, "needs_state": "it has"})
    assert after.events("resumed")[0]["update"] == 5
    assert_same_losses(after.losses(), {step: before.losses()[step] for step in (6, 7, 8)})
    (tested,) = before.events("test")
    weights = Path(before.events("checkpoint")[-1]["path"])
    measured = run_task(tmp_path / "task", job, "evaluate", weights)
    assert losses(measured)["adapter"] == pytest.approx(tested["test_loss"], abs=CLOSE)
    folder = standard_data(source, {**FEATURES, "max_seq_length": job["max_seq_length"], "data": options}).folder
    standard = run_torch(tmp_path / "standard", torch_job(tiny, **keys, data=str(folder)), ranks=2)
    assert_same_losses(standard.losses(), before.losses())
    assert standard.events("test")[0]["test_loss"] == pytest.approx(tested["test_loss"], abs=CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "division", "ranks"),
    [("lora", DDP, 1), ("dora", FSDP, 2), ("full", DDP, 1), ("full", ZERO[3], 2)],
    ids=["lora", "dora fsdp", "full", "full ZeRO-3"],
)
def test_two_ranks_measure_answer_and_merge_as_transformers_does_alone(
    tiny: Tiny, tmp_path: Path, kind: str, division: dict[str, Any], ranks: int
) -> None:
    """Rank 0's node alone has the weights."""
    job = torch_job(tiny, division, fine_tune_type=kind)
    weights = trained(tmp_path / "training", job, ranks)
    merge = run_task(tmp_path / "merge", job, "fuse", weights, path=str(tmp_path / "merged"))
    expected = stock(tmp_path, tiny, {"base": tiny.model, "adapter": weights, "fused": tmp_path / "merged"})
    alone = {name: values["loss"] for name, values in expected.items()}
    assert alone["base"] > alone["adapter"] + 0.01
    for number in (1, 2, 3):
        measured = run_task(
            tmp_path / str(number), job, "evaluate", weights, fused=str(tmp_path / "merged"), ranks=number
        )
        assert losses(measured) == pytest.approx(alone, abs=CLOSE)
    assert losses(merge) == pytest.approx(alone, abs=CLOSE)
    result = verdict(merge)
    assert result["accepted"] and result["kept"] == pytest.approx(1.0, abs=1e-3)
    committed = merge.events("checkpoint")[-1]
    assert (committed["path"], committed["holds"]) == (str(tmp_path / "merged"), "model")
    for name, size, digest in committed["files"]:
        content = (tmp_path / "merged" / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (size, digest)
    assert {path.name for path in tmp_path.glob("*merg*")} == {"merge", "merged"}
    options: dict[str, Any] = {"prompts": [PROMPT, "climb"], "max_tokens": TOKENS, "raw": True}
    answered = run_task(tmp_path / "answers", job, "generate", weights, **options)
    answers = answered.events("result")
    assert [(event["variant"], event["prompt"]) for event in answers] == [
        (variant, prompt) for variant in ("base", "adapter") for prompt in (PROMPT, "climb")
    ]
    assert [event["text"] for event in answers[::2]] == [expected[name]["answer"] for name in ("base", "adapter")]
    assert answers[0]["text"] != answers[2]["text"] and answers[2]["text"].strip() in answered.log()
    assert all(0 < event["tokens"] <= TOKENS and event["peak_memory_bytes"] > 0 for event in answers)


@pytest.mark.slow
@pytest.mark.parametrize("division", [DDP, FSDP, ZERO[2], ZERO[3]], ids=["ddp", "fsdp", "ZeRO-2", "ZeRO-3"])
@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
def test_a_checkpoint_is_used_as_the_weights_of_a_run_that_ended_there(
    tiny: Tiny, tmp_path: Path, division: dict[str, Any], kind: str
) -> None:
    """Each node has its rank's part of it."""
    keys: dict[str, Any] = {"fine_tune_type": kind, "num_layers": 1}
    saved = run_torch(
        tmp_path / "saved",
        torch_job(tiny, division, **keys),
        ranks=2,
        homes=["node0", "node1"],
        fields={"checkpoint_every": 5, "checkpoint_keep": 3},
    )
    parts = [
        [f"n{rank}", event["folder"], event["manifest"]]
        for rank in range(2)
        for event in saved.events("checkpoint", rank)
        if event.get("update") == 5 and event.get("phase") == "committed" and "manifest" in event
    ]
    parts = parts[:1] if division == DDP else parts
    assert len(parts) == (1 if division == DDP else 2)
    weights = trained(tmp_path / "ended", torch_job(tiny, division, **keys, iters=5), ranks=2)
    job, options = torch_job(tiny, **keys), {"ranks": 2}
    expected = losses(run_task(tmp_path / "expected", job, "evaluate", weights, **options))
    measured = run_task(tmp_path / "measured", job, "evaluate", None, parts=parts, **options)
    assert losses(measured) == pytest.approx(expected, abs=CLOSE) and measured.events("resumed") == []
    assert abs(expected["adapter"] - expected["base"]) > 0.01
    asked: dict[str, Any] = {"prompts": [PROMPT], "max_tokens": TOKENS, "variants": ["adapter"], "ranks": 2}
    runs = (
        run_task(tmp_path / "alone", job, "generate", weights, **asked),
        run_task(tmp_path / "asked", job, "generate", None, parts=parts, **asked),
    )
    answers = [[event["text"] for event in run.events("result")] for run in runs]
    assert answers[0] == answers[1] != []
    assert [[event["phase"] for event in run.events("phase", 1)] for run in runs] == [["loading", "waiting"]] * 2
    assert not list(tmp_path.glob("*/node*/runs/run/assembled"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_checkpoint_that_does_not_fit_the_model_is_refused_on_every_rank(
    tiny: Tiny, tmp_path: Path, kind: str
) -> None:
    job = torch_job(tiny, fine_tune_type=kind, num_layers=1, iters=1)
    saved = run_torch(tmp_path / "saved", job, fields={"checkpoint_every": 1})
    (state,) = [event for event in saved.events("checkpoint") if "manifest" in event]
    parts = [["n0", state["folder"], state["manifest"]]]
    mute = tmp_path / "mute"
    shutil.copytree(tiny.model, mute, ignore=shutil.ignore_patterns("tokenizer*"))
    for changes, why in (
        ({"num_layers": 2}, "tensors are missing, such as "),
        ({"model": str(wider(tiny, tmp_path / "wider"))}, "and the job's ["),
        ({"model": str(mute)}, "the tokenizer in "),
    ):
        run = start_task(tmp_path / why[:3], {**job, **changes}, "evaluate", None, parts=parts, ranks=2)
        assert run.wait() == [1, 1]
        assert all(why in run.events("failure", rank)[0]["message"] for rank in range(2))


@pytest.mark.slow
def test_samples_are_drawn_by_their_seed(tiny: Tiny, tmp_path: Path) -> None:
    job = torch_job(tiny)
    options: dict[str, Any] = {"prompts": [PROMPT, PROMPT], "variants": ["base"], "temperature": 1.5, "max_tokens": 20}
    texts = []
    for number, seed in enumerate((1, 1, 2)):
        run = run_task(tmp_path / str(number), job, "generate", None, seed=seed, **options)
        texts.append([event["text"] for event in run.events("result")])
    assert texts[0] == texts[1] and texts[0][0] == texts[0][1] and texts[0] != texts[2]
    options["variants"] = ["adapter"]
    assert "only the base model can answer" in refused(start_task(tmp_path / "none", job, "generate", None, **options))


@pytest.mark.slow
def test_what_rounding_takes_is_not_kept(tiny: Tiny, tmp_path: Path) -> None:
    """An update that 16 bits cannot hold is refused, and nothing is left; a larger one is kept."""
    model = in_bfloat16(tiny, tmp_path / "model")
    job = torch_job(tiny, fine_tune_type="lora", model=str(model), iters=4, lr_schedule=None, learning_rate=1e-6)
    small = trained(tmp_path / "small", job)
    lost = start_task(tmp_path / "lost", job, "fuse", small)
    assert refused(lost) == verdict(lost)["why"]
    assert losses(lost)["base"] - losses(lost)["adapter"] > 1e-5, losses(lost)
    assert not verdict(lost)["accepted"], verdict(lost)
    assert "rounding to bfloat16 kept" in verdict(lost)["why"] and "less than 95%" in verdict(lost)["why"]
    assert not lost.events("checkpoint") and not Path(verdict(lost)["path"]).exists()
    assert not list(Path(verdict(lost)["path"]).parent.glob(".fused*"))
    job |= {"learning_rate": 1e-2, "iters": 20}
    large = trained(tmp_path / "large", job)
    kept = verdict(run_task(tmp_path / "kept", job, "fuse", large))
    assert kept["accepted"] and kept["kept"] > 0.95
    merged = Path(kept["path"])
    assert {dtype for dtype, _ in check_header(merged / "model.safetensors").tensors.values()} == {"BF16"}
    assert "exists already" in refused(start_task(tmp_path / "again", job, "fuse", large, path=str(merged)))


@pytest.mark.slow
def test_what_cannot_be_done_is_refused_in_words(tiny: Tiny, tmp_path: Path) -> None:
    job = torch_job(tiny, fine_tune_type="lora", iters=1)
    weights = trained(tmp_path / "training", job)
    quantized = tmp_path / "quantized"
    shutil.copytree(tiny.model, quantized)
    config = json.loads((quantized / "config.json").read_text())
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    huge = tmp_path / "huge"
    shutil.copytree(tiny.model, huge)
    header = json.dumps({"a": {"dtype": "U8", "shape": [2**40], "data_offsets": [0, 2**40]}}).encode()
    with (huge / "model-2.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2**40)
    runs = {
        "the ranks of this node need 1 x 4.8 TB for the model": start_task(
            tmp_path / "huge-task", {**job, "model": str(huge)}, "evaluate", weights
        ),
        "is quantized, and PEFT's merge would round": start_task(
            tmp_path / "quantized-task", {**job, "model": str(quantized)}, "fuse", weights
        ),
        "dequantize and bits are for a quantized base": start_task(tmp_path / "bits", job, "fuse", weights, bits=8),
        "there are no weights to fuse": start_task(tmp_path / "none", job, "fuse", None),
        "there is nothing to evaluate as fused": start_task(
            tmp_path / "lacking", job, "evaluate", weights, variants=["fused"]
        ),
    }
    for words, run in runs.items():
        assert words in refused(run)
