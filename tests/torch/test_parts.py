"""The parts of the PyTorch trainer against those of MLX and mlx-lm, what it refuses, and what it saves."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from mlx_lm.tuner.utils import build_schedule

from engine.trainer.model import load_model, row_format
from tests.forked import ROOT
from tests.needs import TORCH
from tests.torch.running import output_of, run_torch, start_torch
from tests.training.tiny import SCHEDULE, Tiny, make_job

pytestmark = [pytest.mark.needs("torch"), pytest.mark.busy]

GRADIENTS = [[0.5, -2.0, 0.0], [0.1, 1.0, 3.0], [-0.7, 0.2, 1e-3]]
OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("adam", {}),
    ("adam", {"betas": [0.8, 0.9], "eps": 1e-3, "bias_correction": True}),
    ("adamw", {}),
    ("adamw", {"weight_decay": 0.3, "bias_correction": True}),
    ("sgd", {}),
    ("sgd", {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.5}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
]
SCHEDULES: list[dict[str, Any]] = [
    SCHEDULE,
    {"name": "exponential_decay", "arguments": [1e-3, 0.9]},
    {"name": "step_decay", "arguments": [1e-3, 0.5, 7], "warmup": 2},
    {"name": "linear_schedule", "arguments": [1e-3, 1e-5, 20]},
]
TOOLS = [{"type": "function", "function": {"name": "land", "parameters": {}}}]
ROWS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": "tower to raven"}, {"text": "turn left<|end|>"}],
    "completion": [
        {"prompt": "tower", "completion": "raven copies"},
        {"prompt": "a", "completion": "b", "tools": TOOLS},
    ],
    "chat": [
        {"messages": [{"role": "user", "content": "climb"}, {"role": "assistant", "content": "level"}]},
        {"messages": [{"role": "assistant", "content": "report"}, {"role": "user", "content": "over"}], "tools": TOOLS},
    ],
}

Probe = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def probe(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Probe:
    def ask(**request: Any) -> dict[str, Any]:
        path = tmp_path_factory.mktemp("probe") / "request.json"
        path.write_text(json.dumps({"model": str(tiny.model), **request}))
        found: dict[str, Any] = output_of("tests.torch.probe", str(path))
        return found

    return ask


@pytest.fixture(scope="module")
def parts(probe: Probe) -> dict[str, Any]:
    return probe(
        parts=["tokens", "optimizers", "schedules", "refusals"],
        rows=ROWS,
        parameter=[1.0, -1.0, 0.5],
        gradients=GRADIENTS,
        optimizers=OPTIMIZERS,
        schedules=SCHEDULES,
    )


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("name", ["text", "completion", "chat"])
def test_tokens_are_those_of_mlx_lm(tiny: Tiny, tmp_path: Path, parts: dict[str, Any], name: str, mask: bool) -> None:
    job = make_job(tiny, tmp_path, mask_prompt=mask)
    found = parts["tokens"][f"{name} {mask}"]
    try:
        tokenise = row_format(job, load_model(job)[1])(ROWS[name][0])
    except ValueError as error:
        assert found == str(error)
        return
    assert found == [list(tokenise(row)) for row in ROWS[name]]


def test_a_task_on_a_full_fine_tuning_has_one_model_in_memory(probe: Probe) -> None:
    assert probe(parts=["held"])["held"] == [0, 0]


@pytest.mark.parametrize("number", range(len(OPTIMIZERS)))
def test_steps_are_those_of_mlx(parts: dict[str, Any], number: int) -> None:
    kind, settings = OPTIMIZERS[number]
    made = {"adam": optim.Adam, "adamw": optim.AdamW, "sgd": optim.SGD}[kind]
    optimizer = made(learning_rate=lambda step: 0.1 / (step + 1), **settings)
    parameters = {"weight": mx.array([1.0, -1.0, 0.5])}
    for gradient, found in zip(GRADIENTS, parts["optimizers"][number], strict=True):
        parameters = optimizer.apply_gradients({"weight": mx.array(gradient)}, parameters)
        assert found == pytest.approx(parameters["weight"].tolist(), rel=1e-5)


@pytest.mark.parametrize("number", range(len(SCHEDULES)))
def test_schedules_are_those_of_mlx_lm(parts: dict[str, Any], number: int) -> None:
    schedule = build_schedule(SCHEDULES[number])
    assert parts["schedules"][number] == pytest.approx(
        [float(schedule(mx.array(step))) for step in range(30)], rel=1e-4
    )


REFUSALS = {
    "as asked": "",
    "whole": "",
    "world size": "GroupError: Accelerate sees 1 ranks and PyTorch 1, and 2 were asked for",
    "DeepSpeed": "GroupError: Accelerate has chosen MULTI_CPU for strategy deepspeed, which needs DEEPSPEED",
    "FSDP": "GroupError: each rank should have a part of the parameters, and has all of them in a "
    "DistributedDataParallel: Accelerate replaces FSDP by DDP on the CPU, and says nothing",
    "fp16": "JobError: [job] precision = 'fp16': on the CPU Accelerate computes in float32, and says nothing",
    "offload": "JobError: [job] offload = 'cpu': fully_shard offloads from a GPU only",
    "muon": "JobError: [job] optimizer = 'muon' does not exist with framework = \"torch\": use adamw, adam or sgd",
    "adafactor": "JobError: [job] optimizer = 'adafactor' does not exist",
    "key": "JobError: [job] optimizer_config.adam: unknown key 'weight_decay'",
    "schedule": "JobError: [job] lr_schedule is not one that mlx-lm accepts: KeyError('triangle')",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_not_as_asked_is_refused(parts: dict[str, Any], name: str) -> None:
    assert parts["refusals"][name].startswith(REFUSALS[name])
    assert bool(parts["refusals"][name]) == bool(REFUSALS[name])


def test_the_check_of_a_group_does_not_wait_for_transformers() -> None:
    program = "import sys, engine.torch_trainer.strategies; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([str(TORCH), "-c", program], cwd=ROOT, check=False).returncode == 0


LORA = {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
ADAPTER = {"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": LORA}


@pytest.fixture(scope="module")
def models(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory, probe: Probe) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("weights")
    names = {"mlx": "model.{0}lora_a", "peft": "base_model.model.model.{0}lora_A.weight", "whole": "model.{0}weight"}
    shapes = {"mlx": (32, 4), "peft": (4, 32), "whole": (32, 32)}
    for kind, name in names.items():
        weights = {name.format(f"layers.{layer}.self_attn.q_proj."): mx.ones(shapes[kind]) for layer in range(2)}
        mx.save_safetensors(str(folder / f"{kind}.safetensors"), weights)
    (folder / "torn.safetensors").write_bytes(b"torn")
    files = {kind: {"resume_adapter_file": str(folder / f"{kind}.safetensors")} for kind in (*names, "torn")}
    cases = {
        "mlx": {**ADAPTER, **files["mlx"]},
        "peft": {**ADAPTER, **files["peft"]},
        "other rank": {**ADAPTER, "lora_parameters": {**LORA, "rank": 8}, **files["peft"]},
        "part": {**ADAPTER, "lora_parameters": {**LORA, "keys": []}, **files["peft"]},
        "one wrong key": {**ADAPTER, "lora_parameters": {**LORA, "keys": ["self_attn.q_proj", "self_attn.q_prog"]}},
        "torn": {**ADAPTER, **files["torn"]},
        "typo": {**ADAPTER, "lora_parameters": {**LORA, "keys": ["self_attn.q_prog"]}},
        "an adapter for the whole": {"fine_tune_type": "full", **files["peft"]},
        "whole": {"fine_tune_type": "full", **files["whole"]},
    }
    return probe(parts=["models"], models=cases, empty=str(folder))["models"]  # type: ignore[no-any-return]


def test_saved_weights_are_what_the_training_goes_on_with(models: dict[str, Any]) -> None:
    assert models["peft"].count(pytest.approx(128**0.5)) == 2
    assert models["whole"].count(pytest.approx(32)) == 2


def test_what_is_resumed_in_part_or_named_in_vain_is_a_warning(models: dict[str, Any]) -> None:
    (message,) = models["part, warnings"]
    assert "peft.safetensors' has 2 of the 28 tensors that are trained: the others begin anew" in message
    (message,) = models["one wrong key, warnings"]
    assert "no matrix is called self_attn.q_prog: the blocks have mlp.down_proj" in message


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("mlx", r"\[job\] resume_adapter_file = '.*': it has .*q_proj\.lora_a.*, which is not in a model"),
        ("other rank", r"\[job\] resume_adapter_file = '.*size mismatch for .*lora_A"),
        ("torn", r"\[job\] resume_adapter_file = '.*'.*header"),
        ("an adapter for the whole", r"\[job\] resume_adapter_file = '.*': it has base_model.*lora_A\.weight, which"),
        ("typo", r"\[job\] lora_parameters or fine_tune_type: .*self_attn\.q_prog.*"),
        ("tokenizer", r"the tokenizer in .* cannot be loaded: ."),
    ],
)
def test_what_the_user_can_fix_is_one_line(models: dict[str, Any], case: str, message: str) -> None:
    assert re.fullmatch(f"{message}.*", models[case]), models[case]


def faults(case: str, tiny: Tiny, home: Path, **keys: Any) -> dict[str, Any]:
    """See tests.torch.faults."""
    lora = {**ADAPTER, "lora_parameters": {**LORA, "rank": 16}}
    own = {"framework": "torch", "grad_accumulation_steps": 4, "adapter_path": str(home / "adapters"), **lora}
    found: dict[str, Any] = output_of("tests.torch.faults", case, str(home), json.dumps(tiny.job(**own, **keys)))
    return found


@pytest.fixture(scope="module")
def ddp(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return faults("ddp", tiny, tmp_path_factory.mktemp("ddp"), strategy="ddp")


@pytest.fixture(scope="module", params=["fsdp", "deepspeed 2", "deepspeed 3"])
def partitioned(request: Any, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    strategy, *stage = request.param.split()
    keys = {"zero_stage": int(stage[0])} if stage else {}
    return faults("partitioned", tiny, tmp_path_factory.mktemp(strategy), strategy=strategy, **keys)


def test_ddp_exchanges_gradients_once_in_an_update_and_one_rank_nothing(ddp: dict[str, Any]) -> None:
    assert (ddp["exchanges"], ddp["exchanges alone"]) == (1, 0)


def test_a_loss_waits_for_no_values_of_the_device(ddp: dict[str, Any]) -> None:
    assert ddp["loss"] == "meta"


def assert_full_disks_are_warnings(found: dict[str, Any]) -> None:
    """And leave nothing of what was being written."""
    state, weights = found["full disk"]["warnings"]
    assert state == "no checkpoint of update 1 (iteration 4): [Errno 27] File too large"
    assert weights.startswith("iteration 4: not saved: ") and "File too large" in weights
    assert (found["full disk"]["states"], found["full disk"]["saved"]) == ([], [])


def assert_saves_are_whole(found: dict[str, Any]) -> None:
    saves = found["saves"]
    assert set(saves["paths"]) == {"checkpoint-4"}, "every event of a save names its numbered folder"
    files = {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "training.json"}
    assert files < set(saves["numbered"]) and {*saves["numbered"], "checkpoint-4"} == set(saves["names"])
    assert saves["holds"] == "adapter" and sorted(saves["files"]) == sorted(saves["on disk"])
    assert saves["written once"] and saves["templates"] == ["tool_use.jinja"]
    assert len(saves["tensors"]) == 4 and all(".lora_" in name for name in saves["tensors"])


def test_a_full_disk_is_a_warning(ddp: dict[str, Any]) -> None:
    assert_full_disks_are_warnings(ddp)


def test_a_state_without_its_folder_is_a_warning(ddp: dict[str, Any]) -> None:
    (message,) = ddp["no folder"]
    assert "File exists" in message


def test_a_save_is_written_once_and_clears_what_a_killed_one_has_left(ddp: dict[str, Any]) -> None:
    assert_saves_are_whole(ddp)


@pytest.mark.slow
def test_what_is_partitioned_is_saved_as_ddp_saves(partitioned: dict[str, Any]) -> None:
    assert_full_disks_are_warnings(partitioned)
    assert_saves_are_whole(partitioned)
    assert partitioned["layout"] in ("dcp", "deepspeed ZeRO-2 fp32", "deepspeed ZeRO-3 fp32")


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_ends_the_training(partitioned: dict[str, Any]) -> None:
    """DeepSpeed skips that step in every precision."""
    assert partitioned["diverges"] == "gradient is not finite at iteration 4"


def test_a_manifest_names_no_file_that_another_rank_is_writing(ddp: dict[str, Any]) -> None:
    assert ddp["manifest"] == {"files": [".metadata", "__0_0.distcp"], "layout": "dcp"}


def test_the_scale_of_the_loss_is_part_of_the_state(ddp: dict[str, Any]) -> None:
    assert ddp["scale"] == [2.0, 8.0]


def test_a_state_that_cannot_be_read_is_refused_in_words(ddp: dict[str, Any]) -> None:
    assert "No such file or directory" in ddp["unreadable"]


def test_a_file_on_its_way_to_another_rank_shows_that_it_goes_on(ddp: dict[str, Any]) -> None:
    assert ddp["sent"] == 3


def test_a_state_is_of_one_attempt(ddp: dict[str, Any]) -> None:
    mixed = "of attempt 1 only the manifests of rank 0 are there"
    assert ddp["newest"] == [[[2, 0]], mixed, [[2, 0], [2, 1]], [[3, 0]], "tampered with"]


def test_the_phases_of_a_gpu_are_timed_when_it_has_done_them(ddp: dict[str, Any]) -> None:
    assert ddp["GPU"] == ["cuda:0"]


def test_a_failure_is_reported_as_one_line(tiny: Tiny, tmp_path: Path) -> None:
    run = start_torch(tmp_path, tiny.job(framework="torch", strategy="ddp", model=str(tmp_path / "nowhere")))
    assert run.wait() == [1]
    message = f"the model {tmp_path / 'nowhere'} is not a directory on this node"
    assert [event["message"] for event in run.events("failure")] == [message]
    assert run.log().splitlines()[-1] == f"JobError: {message}"


@pytest.mark.slow
def test_what_is_saved_loads_in_transformers_and_peft(tiny: Tiny, tmp_path: Path, probe: Probe) -> None:
    keys = {"framework": "torch", "save_every": 4, "val_batches": 2, "steps_per_eval": 4, "save_best": True}
    lora = {
        "fine_tune_type": "lora",
        "num_layers": 1,
        "lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.1, "keys": ["self_attn.q_proj", "mlp.up_proj"]},
        "data": str(tiny.chat),
        "mask_prompt": True,
        "grad_checkpoint": True,
        "precision": "bf16",
        "learning_rate": 1e-2,
    }
    run = run_torch(tmp_path / "lora", tiny.job(**keys, strategy="fsdp", **lora), ranks=2)
    adapter = run.files[0].directory.parents[1] / "adapters"
    zero = run_torch(tmp_path / "full", tiny.job(**keys, strategy="deepspeed", zero_stage=3), ranks=2)
    whole = zero.files[0].directory.parents[1] / "adapters"
    folders = {
        "adapter": adapter,
        "numbered": adapter / "checkpoint-4",
        "best": adapter / "best",
        "model": whole / "model",
    }
    saved = probe(parts=["saved"], saved={name: str(folder) for name, folder in folders.items()})["saved"]
    assert all(saved[name]["loss"] != saved[name]["base"] for name in ("adapter", "numbered", "best"))
    assert saved["adapter"]["loss"] != saved["numbered"]["loss"]
    layers = {key.partition(".layers.")[2].split(".lora")[0] for key in saved["adapter"]["norms"]}
    last = json.loads((tiny.model / "config.json").read_text())["num_hidden_layers"] - 1
    assert layers == {f"{last}.self_attn.q_proj", f"{last}.mlp.up_proj"}
    assert all(norm > 0 for norm in saved["adapter"]["norms"].values())
    committed = [event["path"] for event in run.events("checkpoint") if event["phase"] == "committed"]
    assert committed[-1] == str(adapter) and str(adapter / "checkpoint-4") in committed
    assert json.loads((adapter / "best" / "training.json").read_text())["val_loss"] == min(
        event["val_loss"] for event in run.events("validation") if event["iteration"] > 0
    )
    assert saved["model"]["loss"] == pytest.approx(saved["model"]["base"])
