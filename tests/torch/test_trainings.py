"""Trainings with PyTorch: the same losses whatever the number of ranks and however they divide the training, as with
MLX, and after a checkpoint as without.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engine.protocol.exit_codes import TrainerExit
from tests.torch.running import TorchRun, run_torch, start_torch, wait_for_event
from tests.training.launching import launch
from tests.training.tiny import SCHEDULE, Tiny, write_rows, write_weights

pytestmark = [pytest.mark.needs("torch"), pytest.mark.busy]

DDP: dict[str, Any] = {"strategy": "ddp"}
FSDP: dict[str, Any] = {"strategy": "fsdp"}
GRAD_OP: dict[str, Any] = {"strategy": "fsdp", "sharding": "grad_op"}
ZERO: dict[int, dict[str, Any]] = {stage: {"strategy": "deepspeed", "zero_stage": stage} for stage in (1, 2, 3)}
CLOSE = 1e-4


def torch_job(tiny: Tiny, division: Mapping[str, Any] = DDP, **keys: Any) -> dict[str, Any]:
    return tiny.job(**{"framework": "torch", "precision": "fp32", "lr_schedule": SCHEDULE, **division, **keys})


def assert_same_losses(one: Mapping[int, float], two: Mapping[int, float], within: float = CLOSE) -> None:
    assert one.keys() == two.keys()
    worst = max(one, key=lambda iteration: abs(one[iteration] - two[iteration]))
    assert abs(one[worst] - two[worst]) < within, f"iteration {worst}: {one[worst]} and {two[worst]}"


@pytest.fixture(scope="module")
def alone(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> TorchRun:
    """One rank, whose last update has only two of four iterations."""
    return run_torch(tmp_path_factory.mktemp("alone"), torch_job(tiny, iters=10, grad_accumulation_steps=4))


@pytest.mark.parametrize("division", [FSDP, pytest.param(ZERO[2], marks=pytest.mark.slow)], ids=["fsdp", "ZeRO-2"])
def test_two_ranks_have_the_losses_of_one(
    tiny: Tiny, tmp_path: Path, alone: TorchRun, division: dict[str, Any]
) -> None:
    two = run_torch(tmp_path, torch_job(tiny, division, iters=10, grad_accumulation_steps=4), ranks=2)
    assert_same_losses(two.losses(), alone.losses())
    (start,) = two.events("start", rank=1)
    partitioned = {"fsdp": ["optimizer", "gradients", "parameters"], "deepspeed": ["optimizer", "gradients"]}
    assert start["partitioned"] == partitioned[division["strategy"]]
    assert (start["world_size"], start["backend"], start["strategy"]) == (2, "gloo", division["strategy"])
    assert start["distributed_type"] == ("DEEPSPEED" if division["strategy"] == "deepspeed" else "MULTI_CPU")


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 4])
def test_every_division_has_the_losses_of_one_rank_over_50_steps(tiny: Tiny, tmp_path: Path, accumulation: int) -> None:
    keys: dict[str, Any] = {"iters": 50 * accumulation, "grad_accumulation_steps": accumulation}
    one = run_torch(tmp_path / "one", torch_job(tiny, **keys)).losses()
    for number, division in enumerate([DDP, FSDP, GRAD_OP, *ZERO.values()]):
        two = run_torch(tmp_path / str(number), torch_job(tiny, division, **keys), ranks=2)
        assert_same_losses(two.losses(), one)


def test_mlx_and_torch_have_the_same_losses(tiny: Tiny, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"iters": 50, "optimizer": "adamw", "max_grad_norm": 1.0, "val_batches": -1}
    job = torch_job(tiny, steps_per_eval=20, steps_per_report=10, **keys)
    torch = run_torch(tmp_path / "torch", job)
    own = {key: value for key, value in job.items() if key not in ("framework", "precision", "strategy")}
    mlx = launch(tmp_path / "mlx", own).succeeded()
    assert_same_losses(torch.losses(), {event["iteration"]: event["loss"] for event in mlx.events(0, "step")}, 1e-3)
    for kind, names in [("report", ("iteration", "learning_rate", "trained_tokens")), ("validation", ("iteration",))]:
        for theirs, ours in zip(mlx.events(0, kind), torch.events(kind), strict=True):
            assert ours.keys() == theirs.keys()
            assert [ours[name] for name in names] == pytest.approx([theirs[name] for name in names])
    for theirs, ours in zip(mlx.events(0, "validation"), torch.events("validation"), strict=True):
        assert ours["val_loss"] == pytest.approx(theirs["val_loss"], abs=1e-3)
    assert torch.events("end")[0]["completed"] and torch.events("report")[-1]["peak_memory"] > 0.05


def test_an_update_without_targets_takes_no_step(tiny: Tiny, tmp_path: Path) -> None:
    """Of two rows, one a batch, the prompt of the second fills max_seq_length."""
    (tmp_path / "data").mkdir()
    rows = [{"prompt": "hold", "completion": "left"}, {"prompt": "tower " * 60, "completion": "raven"}]
    write_rows(tmp_path / "data" / "train.jsonl", rows)
    keys: dict[str, Any] = {"mask_prompt": True, "max_seq_length": 16, "batch_size": 1, "iters": 5, "save_every": 1}
    run = run_torch(tmp_path, torch_job(tiny, data=str(tmp_path / "data"), **keys))
    folders = sorted((tmp_path / "node" / "runs" / "run").rglob("checkpoint-*"))
    saved = [(folder / "model.safetensors").read_bytes() for folder in folders]
    steps = run.events("step")
    assert [event["update"] for event in steps] == [1, 2, 3, 4, 5]
    moved = [before != after for before, after in pairwise(saved)]
    assert moved == [event["tokens"] > 0 for event in steps[1:]]
    assert not all(moved) and any(moved)
    assert any("no token is a target" in event["message"] for event in run.events("warning"))


def test_the_weights_that_are_due_with_a_state_are_saved_before_it(tiny: Tiny, tmp_path: Path) -> None:
    run = run_torch(tmp_path, torch_job(tiny, iters=3, save_every=2), fields={"checkpoint_every": 2})
    committed = [event for event in run.events("checkpoint") if event["phase"] == "committed"]
    assert [(event["iteration"], event.get("kind", "weights")) for event in committed][:2] == [
        (2, "weights"),
        (2, "state"),
    ]


def test_a_state_is_sent_to_the_nodes_that_lack_it(tiny: Tiny, tmp_path: Path) -> None:
    """Two nodes, each with its own part; then a third one, the newest part on one of them is damaged, and a file of the
    state before cannot be put on the third."""
    job = torch_job(tiny, FSDP)
    saved = {"checkpoint_every": 2, "checkpoint_keep": 3}
    before = run_torch(tmp_path, job, ranks=2, homes=["a", "b"], fields=saved)
    states = [tmp_path / home / "runs" / "run" / "checkpoints" for home in ("a", "b")]
    kept = ["step-000000004", "step-000000006", "step-000000008"]
    assert [sorted(path.name for path in folder.iterdir()) for folder in states] == [kept, kept]
    assert not (states[1] / "step-000000006" / ".metadata").exists()
    damaged = next((states[1] / "step-000000008").glob("*.distcp"))
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    third = tmp_path / "c" / "runs" / "run" / "checkpoints"
    (third / "step-000000006" / "__0_0.distcp").mkdir(parents=True)
    fields = {"resume": True, "needs_state": "it has saved one"}
    after = run_torch(tmp_path, job, ranks=3, attempt=2, homes=["a", "b", "c"], fields=fields)
    (resumed,) = after.events("resumed")
    assert (resumed["update"], resumed["refused"]) == (4, 2)
    warnings = [event["message"] for rank in range(3) for event in after.events("warning", rank)]
    assert any("its hash is not the manifest's" in message for message in warnings)
    assert any("is damaged on every node that has it" in message for message in warnings)
    assert any("cannot be sent to the nodes that lack it: [Errno 21] Is a directory" in message for message in warnings)
    assert "step-000000004/__1_0.distcp" in [event["path"] for event in after.events("fetched", rank=2)]
    assert_same_losses(after.losses(), {iteration: before.losses()[iteration] for iteration in (5, 6, 7, 8)})


@pytest.mark.slow
@pytest.mark.parametrize("division", [DDP, FSDP, ZERO[2], ZERO[3]], ids=["ddp", "fsdp", "ZeRO-2", "ZeRO-3"])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_training_goes_on_with_any_number_of_ranks(
    tiny: Tiny, tmp_path: Path, division: dict[str, Any], kind: str
) -> None:
    job = torch_job(tiny, division, fine_tune_type=kind)
    before = run_torch(tmp_path, job, ranks=2, fields={"checkpoint_every": 5})
    rest = {iteration: loss for iteration, loss in before.losses().items() if iteration > 5}
    for attempt, ranks in enumerate([2, 1, 3], 2):
        after = run_torch(tmp_path, job, ranks=ranks, attempt=attempt, fields={"resume": True})
        assert_same_losses(after.losses(), rest)


@pytest.mark.slow
def test_zero_1_and_2_go_on_from_each_other_in_any_precision_and_zero_3_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    before = run_torch(tmp_path, torch_job(tiny, ZERO[2]), ranks=2, fields={"checkpoint_every": 5})
    fields = {"resume": True, "needs_state": "it has saved one"}
    other = torch_job(tiny, ZERO[1], precision="bf16")
    after = run_torch(tmp_path, other, ranks=2, attempt=2, fields=fields)
    assert_same_losses(after.losses(), {iteration: before.losses()[iteration] for iteration in (6, 7, 8)}, 1e-2)
    refused = start_torch(tmp_path, torch_job(tiny, ZERO[3]), ranks=2, attempt=3, fields=fields)
    assert refused.wait() == [1, 1]
    message = refused.events("failure", rank=1)[0]["message"]
    assert "which 2 ranks have saved as deepspeed ZeRO-2 fp32, cannot be restored" in message
    assert message.endswith("DeepSpeed converts no state between ZeRO-3 and the others: set zero_stage back")


@pytest.mark.slow
def test_zero_3_goes_on_with_a_whole_model(tiny: Tiny, tmp_path: Path) -> None:
    config = json.loads((tiny.model / "config.json").read_text())
    write_weights(tmp_path, config, seed=5)
    keys: dict[str, Any] = {"resume_adapter_file": str(tmp_path / "model.safetensors"), "num_layers": -1, "iters": 1}
    alone = run_torch(tmp_path / "ddp", torch_job(tiny, **keys))
    two = run_torch(tmp_path / "ZeRO-3", torch_job(tiny, ZERO[3], **keys), ranks=2)
    assert_same_losses(two.losses(), alone.losses())
    assert abs(alone.losses()[1] - run_torch(tmp_path, torch_job(tiny, iters=1)).losses()[1]) > CLOSE


def test_nvme_is_refused_with_checkpoints(tiny: Tiny, tmp_path: Path) -> None:
    job = torch_job(tiny, ZERO[3], offload="nvme", nvme_path=str(tmp_path))
    run = start_torch(tmp_path, job, fields={"checkpoint_every": 5})
    assert run.wait() == [1]
    assert "offload = 'nvme'" in run.events("failure")[0]["message"]


@pytest.mark.slow
def test_a_state_of_ddp_is_one_of_fsdp(tiny: Tiny, tmp_path: Path) -> None:
    before = run_torch(tmp_path, torch_job(tiny, DDP), ranks=2, fields={"checkpoint_every": 5})
    after = run_torch(tmp_path, torch_job(tiny, FSDP), ranks=2, attempt=2, fields={"resume": True})
    assert_same_losses(after.losses(), {iteration: before.losses()[iteration] for iteration in (6, 7, 8)})


@pytest.mark.slow
def test_a_stopped_training_saves_its_state_and_goes_on_from_it(tiny: Tiny, tmp_path: Path) -> None:
    job = torch_job(tiny, ZERO[3], iters=2000, steps_per_report=1)
    run = start_torch(tmp_path, job, ranks=2)
    wait_for_event(run, "report")
    run.stop(rank=1)
    run.succeeded()
    ends = [run.events("end", rank)[0] for rank in range(2)]
    assert ends[0]["stopped"] and ends[0]["iteration"] == ends[1]["iteration"] < 2000
    going_on = start_torch(
        tmp_path, job, ranks=1, attempt=2, fields={"resume": True, "needs_state": "it has saved one"}
    )
    wait_for_event(going_on, "report")
    going_on.stop(rank=0)
    going_on.succeeded()
    assert going_on.events("step")[0]["iteration"] == ends[0]["iteration"] + 1


def test_a_rank_that_loses_another_one_says_so(tiny: Tiny, tmp_path: Path) -> None:
    run = start_torch(tmp_path, torch_job(tiny, iters=5000, steps_per_report=1), ranks=2)
    wait_for_event(run, "report")
    run.processes[1].kill()
    assert run.wait()[0] == TrainerExit.PEER_LOST
    (failure,) = run.events("failure")
    assert failure["error_type"] == "PeerLost" and "by peer" in failure["message"]


def test_it_never_starts_again_where_a_state_should_be(tiny: Tiny, tmp_path: Path) -> None:
    run = start_torch(tmp_path, torch_job(tiny), fields={"resume": True, "needs_state": "it has saved one"})
    assert run.wait() == [1]
    assert "no state to resume from (no rank has any)" in run.events("failure")[0]["message"]


@pytest.mark.slow
def test_batches_by_a_budget_of_tokens_have_the_losses_of_mlx(tiny: Tiny, tmp_path: Path) -> None:
    """Two ranks, of which one has no row of a batch that is one long example."""
    rows = [
        {"text": " ".join(["tower", "raven"] * (60 if number % 9 == 8 else 1 + number % 5))} for number in range(45)
    ]
    (tmp_path / "data").mkdir()
    for name in ("train", "valid"):
        write_rows(tmp_path / "data" / f"{name}.jsonl", rows)
    keys: dict[str, Any] = {"iters": 50, "val_batches": 3, "steps_per_eval": 25, "data": str(tmp_path / "data")}
    job = torch_job(tiny, batch_tokens=96, **keys)
    del job["batch_size"]
    own = {key: value for key, value in job.items() if key not in ("framework", "precision", "strategy")}
    mlx = launch(tmp_path / "mlx", own).succeeded()
    expected = {event["iteration"]: event["loss"] for event in mlx.events(0, "step")}
    validated = [event["val_loss"] for event in mlx.events(0, "validation")]
    for number, division in enumerate([DDP, FSDP, ZERO[2]]):
        two = run_torch(tmp_path / str(number), {**job, **division}, ranks=2)
        assert_same_losses(two.losses(), expected, 1e-3)
        assert [event["val_loss"] for event in two.events("validation")] == pytest.approx(validated, abs=1e-3)
