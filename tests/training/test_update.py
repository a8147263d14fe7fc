"""One rank's loop in this process: accumulation, masking, clipping, precision, every optimizer, and errors."""

from __future__ import annotations

import itertools
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs, TransformerBlock
from mlx_lm.tuner.datasets import CacheDataset, load_local_dataset
from mlx_lm.tuner.trainer import default_loss, iterate_batches
from mlx_lm.tuner.utils import build_schedule

from engine.protocol import exchange
from engine.protocol.attempt import CONTROL_FD_ENV, STOP
from engine.protocol.events import EventWriter
from engine.protocol.job import Job, JobError
from engine.trainer.checkpoint.saving import EmergencyCheckpoint, PeriodicCheckpoints
from engine.trainer.checkpoint.store import Snapshot
from engine.trainer.collective import Collective
from engine.trainer.loop import Loop
from engine.trainer.model import load_model, recompute_layers, row_format
from engine.trainer.optimizer import Updater
from engine.trainer.replica_check import ReplicaCheck, parameter_checksum
from engine.trainer.samples import Samples
from engine.trainer.strategies import data_parallel
from engine.trainer.strategies.data_parallel import DataParallel, Gradients
from engine.trainer.strategies.sharded import Sharded
from engine.trainer.weights import scalar
from engine.training.checkpoint_files import Origin, ResumePoint
from engine.training.data import Batch, DataLoader, Split, rank_facts
from engine.training.process import Control
from engine.training.reporting import Diverged, GroupError, Outcome, Reporter, check_equal
from tests.training.launching import launch
from tests.training.states import spec
from tests.training.tiny import SCHEDULE, Tiny, make_job, write_rows
from tests.unit.trainer.checkpoint.latest import latest
from tests.waiting import wait_until

ORIGIN = Origin("c", world_size=1, part=0, parts=1, inputs={})


@dataclass
class Trained:
    """A loop that has run in this process."""

    job: Job
    model: Any
    outcome: Outcome | None = None
    events: list[dict[str, Any]] = field(default_factory=list)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    def weights(self) -> dict[str, mx.array]:
        return dict(tree_flatten(self.model.trainable_parameters()))


def stopped_control(monkeypatch: pytest.MonkeyPatch) -> Control:
    """A control that has already received "stop"."""
    read_end, write_end = os.pipe()
    monkeypatch.setenv(CONTROL_FD_ENV, str(read_end))
    control = Control()
    os.write(write_end, STOP)
    wait_until(control.stop.is_set)
    return control


def train(
    tiny: Tiny, home: Path, control: Control | None = None, start: Snapshot | None = None, /, **keys: Any
) -> Trained:
    """Train as the only rank, from `start` if any; an exception leaves the events in the file `events.jsonl`."""
    return train_rank(tiny, home, (Collective("ring", 1, 0), [1.0]), control, start, **keys)


def train_rank(
    tiny: Tiny,
    home: Path,
    group: tuple[Collective, list[float]],
    control: Control | None = None,
    start: Snapshot | None = None,
    /,
    **keys: Any,
) -> Trained:
    """Train as one rank of a group, whose ranks have these shares."""
    collective, shares = group
    job = make_job(tiny, home, **keys)
    job.adapter_path.mkdir(parents=True, exist_ok=True)
    path = home / "events.jsonl"
    reporter = Reporter(EventWriter(path, collective.rank, 1))
    model, tokenizer = load_model(job)
    splits = [Split(job, name, row_format(job, tokenizer), lambda _: None) for name in ("train", "valid")]
    loader = DataLoader(splits[0], job, shares, collective.rank, reporter)
    strategy = (Sharded if job.strategy == "sharded" else DataParallel)(job, model, loader, collective)
    point = ResumePoint()
    if start is not None:
        strategy.restore(start.state, 0, 1)
        point = ResumePoint(start.iteration, start.update, start.window, best=start.best)
    every = (50 if collective.size == 1 else 1) if strategy.replicated else 0
    loop = Loop(
        job=job,
        strategy=strategy,
        valid=splits[1],
        collective=collective,
        control=control or Control(),
        reporter=reporter,
        replicas=ReplicaCheck(model, collective, reporter, every=every, stops=True),
        periodic=PeriodicCheckpoints(None, spec(checkpoint_every=0), ORIGIN, reporter),
        emergency=EmergencyCheckpoint(home, 1, collective.rank, ORIGIN, reporter),
        start=point,
    )
    if job.sample_prompts:
        loop.samples = Samples(job, strategy, tokenizer, loop.control, reporter, raw=splits[0].form == "text")
    trained = Trained(job, model)
    trained.outcome = loop.run()
    trained.events = [json.loads(line) for line in path.read_text().splitlines()]
    return trained


def test_accumulated_iterations_make_one_update_and_the_last_partial_one_counts(tiny: Tiny, tmp_path: Path) -> None:
    """5 iterations of 4, by 2: updates after 2, 4 and 5. The same by hand, from the same batches."""
    trained = train(tiny, tmp_path, batch_size=4, iters=5, grad_accumulation_steps=2, steps_per_report=3)

    job = trained.job
    model, tokenizer = load_model(job)
    examples = Split(job, "train", row_format(job, tokenizer), lambda _: None)
    sampler = examples.sampler(4, job.seed)
    gradients, updater = Gradients(model, held=True), Updater(job, model)
    losses = []
    for window in ([0, 1], [2, 3], [4]):
        batches = [examples.batch(sampler.batch(position)) for position in window]
        sums: dict[str, mx.array] = {}
        for batch in batches:
            losses.append(gradients.add(batch) / batch.targets)
            for piece in gradients.pieces():
                sums |= {name: value + sums.get(name, 0) for name, value in piece.items()}
            gradients.clear()
        updater.update([sums], sum(batch.targets for batch in batches))
    by_hand = dict(tree_flatten(model.trainable_parameters()))

    assert np.allclose([event["loss"] for event in trained.of("step")], losses, atol=1e-6)
    assert all(mx.allclose(value, by_hand[name], atol=1e-6).item() for name, value in trained.weights().items())
    assert [event["grad_norm"] is not None for event in trained.of("step")] == [False, True, False, True, True]
    assert [event["iteration"] for event in trained.of("report")] == [3, 5]


def test_a_rank_reports_its_own_loss_and_gradient_norm_once_per_update(tiny: Tiny, tmp_path: Path) -> None:
    """Alone, they are those of the whole; a clipped gradient's norm is told as it was."""
    trained = train(tiny, tmp_path, iters=5, grad_accumulation_steps=2, max_grad_norm=0.01)
    steps = trained.of("step")
    assert ["update" in event for event in steps] == [False, True, False, True, True]
    reported = [event for event in steps if "update" in event]
    assert [event["update"] for event in reported] == [1, 2, 3]
    for event in reported:
        assert event["own_grad_norm"] == pytest.approx(event["grad_norm"], rel=1e-4)
    pair = steps[:2]
    mean = sum(event["loss"] * event["tokens"] for event in pair) / sum(event["tokens"] for event in pair)
    assert reported[0]["own_loss"] == pytest.approx(mean, rel=1e-6)
    assert reported[2]["own_loss"] == pytest.approx(steps[4]["loss"], rel=1e-6)
    assert trained.of("replica_check") == []


def test_loss_and_gradient_are_mlx_lms_but_for_its_pad_target(tiny: Tiny, tmp_path: Path) -> None:
    """Against mlx-lm's own batches and loss, whose mask counts one token of padding per document."""
    job = make_job(tiny, tmp_path)
    model, tokenizer = load_model(job)
    stock, _, _ = load_local_dataset(job.data, tokenizer, job)
    tokens, bounds = next(iterate_batches(CacheDataset(stock), 4, 128))
    bounds = mx.stack([bounds[:, 0], bounds[:, 1] - 1], axis=1)
    expected, count = default_loss(model, tokens, bounds)

    gradients = Gradients(model)
    ends = np.array(bounds[:, 1]) + 1
    batch = Batch(np.array(tokens), np.stack([np.ones(4), ends], axis=1).astype(np.int32), int((ends - 1).sum()))
    loss = gradients.add(batch)
    assert batch.targets == count.item()
    assert loss / batch.targets == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("form", ["chat", "completions"])
def test_the_prompt_is_masked_as_mlx_lm_masks_it(tiny: Tiny, tmp_path: Path, form: str) -> None:
    job = make_job(tiny, tmp_path, data=str(getattr(tiny, form)), mask_prompt=True)
    _, tokenizer = load_model(job)
    stock, _, _ = load_local_dataset(job.data, tokenizer, job)
    examples = Split(job, "train", row_format(job, tokenizer), lambda _: None)
    for index in (0, 7):
        tokens, offset = stock.process(stock[index])
        batch = examples.batch([index])
        assert batch.tokens[0, : len(tokens)].tolist() == tokens[:128]
        assert batch.bounds.tolist() == [[offset, min(len(tokens), 128)]]
        assert 0 < batch.targets == min(len(tokens), 128) - offset


def test_a_batch_without_targets_changes_nothing(tiny: Tiny, tmp_path: Path) -> None:
    """The prompts alone fill max_seq_length, so that all targets are masked."""
    data = tmp_path / "data"
    data.mkdir()
    row = {"prompt": "tower " * 60, "completion": "raven"}
    before = parameter_checksum(load_model(make_job(tiny, tmp_path))[0])
    rows = [{"prompt": "hold", "completion": "left"}, row]
    write_rows(data / "train.jsonl", rows)
    # One row a batch: the second one has no target.
    trained = train(tiny, tmp_path, data=str(data), mask_prompt=True, max_seq_length=16, batch_size=1, iters=2)
    assert trained.outcome == Outcome(completed=True, stopped=False, iteration=2)
    assert sorted((event["loss"] is None, event["tokens"] == 0) for event in trained.of("step")) == [
        (False, False),
        (True, True),
    ]
    assert "no token is a target" in trained.of("warning")[-1]["message"]
    assert parameter_checksum(trained.model) != before


def test_a_training_without_any_target_fails_and_saves_nothing(tiny: Tiny, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    write_rows(data / "train.jsonl", [{"prompt": "tower " * 60, "completion": "raven"}] * 8)
    with pytest.raises(JobError, match="no row that was trained on has a target, so that nothing was learned"):
        train(tiny, tmp_path, data=str(data), mask_prompt=True, max_seq_length=16, iters=3)
    assert not list(tmp_path.rglob("adapters.safetensors"))


def test_half_empty_batches_train_on_what_there_is(tiny: Tiny, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    rows = [{"prompt": "tower " * 60, "completion": "raven"}, {"prompt": "hold", "completion": "left over"}] * 4
    write_rows(data / "train.jsonl", rows)
    trained = train(tiny, tmp_path, data=str(data), mask_prompt=True, max_seq_length=40, iters=3)
    assert all(event["tokens"] > 0 and math.isfinite(event["loss"]) for event in trained.of("step"))


def test_clipping_bounds_the_update_and_reports_the_norm_before(tiny: Tiny, tmp_path: Path) -> None:
    plain = train(tiny, tmp_path / "plain", optimizer="sgd", learning_rate=0.5, iters=1)
    clipped = train(tiny, tmp_path / "clipped", optimizer="sgd", learning_rate=0.5, iters=1, max_grad_norm=0.01)
    norm = plain.of("step")[0]["grad_norm"]
    assert norm > 0.1 and clipped.of("step")[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    start = dict(tree_flatten(load_model(plain.job)[0].trainable_parameters()))

    def moved(run: Trained) -> float:
        return math.sqrt(sum(scalar(mx.square(value - start[name]).sum()) for name, value in run.weights().items()))

    assert moved(plain) == pytest.approx(0.5 * norm, rel=1e-3)
    assert moved(clipped) == pytest.approx(0.5 * 0.01, rel=1e-2)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "muon", "sgd", "adafactor"])
def test_every_optimizer_of_mlx_lm_learns(tiny: Tiny, tmp_path: Path, optimizer: str) -> None:
    rates = {"sgd": 0.5, "adafactor": 1e-2, "muon": 1e-2}
    settings = {"adamw": {"weight_decay": 0.1}}
    keys = {"optimizer": optimizer, "optimizer_config": settings, "learning_rate": rates.get(optimizer, 3e-3)}
    losses = [event["loss"] for event in train(tiny, tmp_path, iters=12, **keys).of("step")]
    assert sum(losses[-3:]) / 3 < losses[0] - 0.2


def test_a_schedule_is_mlx_lms(tiny: Tiny, tmp_path: Path) -> None:
    schedule = {"name": "cosine_decay", "warmup": 2, "warmup_init": 1e-7, "arguments": [1e-3, 8, 1e-7]}
    reports = train(tiny, tmp_path, iters=6, lr_schedule=schedule, steps_per_report=1).of("report")
    expected = build_schedule(schedule)
    rates = [expected(mx.array(step)).item() for step in range(6)]
    assert [report["learning_rate"] for report in reports] == pytest.approx(rates)


def bfloat16(tiny: Tiny, to: Path) -> Tiny:
    to.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (to / name).write_bytes((tiny.model / name).read_bytes())
    weights = mx.load(str(tiny.model / "model.safetensors"))
    assert isinstance(weights, dict)
    halves = {name: value.astype(mx.bfloat16) for name, value in weights.items()}
    mx.save_safetensors(str(to / "model.safetensors"), halves, metadata={"format": "mlx"})
    return Tiny(to, tiny.text, tiny.chat, tiny.completions)


def test_small_steps_add_up_in_bfloat16_with_float32_masters(tiny: Tiny, tmp_path: Path) -> None:
    """The norms' weights are 1, where bfloat16 steps by 0.004 and more: steps of 0.0003 add up or are lost, each."""
    half = bfloat16(tiny, tmp_path / "half")
    moved = {}
    for precision in ("float32", "parameter"):
        keys = {"iters": 40, "learning_rate": 3e-4, "optimizer_precision": precision}
        trained = train(half, tmp_path / precision, **keys)
        assert {value.dtype for value in trained.weights().values()} == {mx.bfloat16}
        start = dict(tree_flatten(load_model(trained.job)[0].trainable_parameters()))
        moved[precision] = sum(
            scalar(mx.abs(value.astype(mx.float32) - start[name].astype(mx.float32)).sum())
            for name, value in trained.weights().items()
            if "norm" in name
        )
        saved = mx.load(str(trained.job.adapter_path / "adapters.safetensors"))
        assert isinstance(saved, dict)
        assert all(mx.array_equal(saved[name], value).item() for name, value in trained.weights().items())
    assert moved["parameter"] == 0 < moved["float32"]


def test_a_loss_that_is_not_finite_is_reported_with_its_iteration(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(Diverged, match=r"^(loss|gradient) is not finite at iteration 2$"):
        train(tiny, tmp_path, optimizer="sgd", learning_rate=1e30, iters=5)


DROPOUT = {"fine_tune_type": "lora", "lora_parameters": {"rank": 4, "dropout": 0.3, "scale": 20.0}}
FULL = {"fine_tune_type": "full"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "own",
    [
        {"grad_accumulation_steps": 2},
        {"grad_checkpoint": 1, "grad_accumulation_steps": 2},
        {"grad_checkpoint": 1},
        {"grad_checkpoint": 1, "sequence_tiling": 8},
        {},
    ],
    ids=["accumulated", "recomputed and accumulated", "recomputed", "recomputed in tiles", "plain"],
)
@pytest.mark.parametrize("kind", [DROPOUT, FULL], ids=["lora with dropout", "full"])
def test_compiled_as_on_a_gpu_the_losses_are_the_same(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any], own: dict[str, Any]
) -> None:
    """On the CPU this builds kernels for half a minute."""
    keys = {**kind, **own, "iters": 6, "val_batches": 2, "steps_per_eval": 3}
    plain = train(tiny, tmp_path / "plain", **keys)
    mx.enable_compile()
    monkeypatch.setattr(data_parallel, "compiles", lambda job: True)
    compiled = train(tiny, tmp_path / "compiled", **keys)
    for event, value in (("step", "loss"), ("step", "grad_norm"), ("validation", "val_loss")):
        series = [[entry[value] for entry in run.of(event) if entry[value] is not None] for run in (plain, compiled)]
        assert series[0] == pytest.approx(series[1], rel=1e-4)


def test_a_whole_step_is_that_of_its_parts(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but not compiled: loss, norm, clipping and schedule; and a batch without targets."""
    keys = {"iters": 5, "max_grad_norm": 0.5, "optimizer": "adamw", "lr_schedule": SCHEDULE}
    plain = train(tiny, tmp_path / "plain", **keys)
    monkeypatch.setattr(data_parallel, "compiles", lambda job: True)
    whole = train(tiny, tmp_path / "whole", **keys)
    for value in ("loss", "own_loss", "grad_norm", "own_grad_norm", "tokens"):
        series = [[event[value] for event in run.of("step")] for run in (plain, whole)]
        assert series[0] == pytest.approx(series[1], rel=1e-5)
    assert all(mx.allclose(value, plain.weights()[name], atol=1e-5).item() for name, value in whole.weights().items())
    with pytest.raises(Diverged, match="is not finite at iteration 2"):
        train(tiny, tmp_path / "diverged", optimizer="sgd", learning_rate=1e30, iters=5)
    test_a_batch_without_targets_changes_nothing(tiny, tmp_path)


@pytest.mark.parametrize("keys", [FULL, DROPOUT], ids=["full", "lora with dropout"])
@pytest.mark.parametrize(("layers", "expected"), [(1, [True, False]), (True, [True, True]), ("auto", [False, False])])
def test_recomputed_layers_change_no_bit(
    tiny: Tiny, tmp_path: Path, layers: bool | int | str, expected: list[bool], keys: dict[str, Any]
) -> None:
    plain = train(tiny, tmp_path / "plain", iters=3, grad_checkpoint=False, **keys)
    checkpointed = train(tiny, tmp_path / "checkpointed", iters=3, grad_checkpoint=layers, **keys)
    assert [type(layer) is not TransformerBlock for layer in checkpointed.model.layers] == expected
    losses = [[event["loss"] for event in run.of("step")] for run in (plain, checkpointed)]
    assert losses[0] == losses[1]
    assert all(mx.array_equal(value, plain.weights()[name]).item() for name, value in checkpointed.weights().items())


def test_each_recomputed_layer_lowers_the_peak(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """By MLX's own count of bytes; only layers that are trained count."""
    # About a layer's, as those of larger models: evaluated at once, all layers would be recomputed side by side.
    monkeypatch.setattr(exchange, "LEAST_BUCKET", 10_000)
    config = {**json.loads((tiny.model / "config.json").read_text()), "num_hidden_layers": 10, "vocab_size": 64}

    def peak(layers: bool | int) -> int:
        mx.random.seed(3)
        model = Model(ModelArgs.from_dict(config))
        model.freeze()
        for layer in model.layers[2:]:
            layer.unfreeze()
        mx.eval(model.parameters())
        recompute_layers(model.layers, layers)
        gradients = Gradients(model, held=True)
        tokens = np.arange(8 * 129, dtype=np.int32).reshape(8, 129) % 64
        batch = Batch(tokens, np.asarray([[1, 129]] * 8, np.int32), 8 * 128)
        mx.clear_cache()
        mx.reset_peak_memory()
        gradients.add(batch)
        return mx.get_peak_memory()

    peaks = [peak(layers) for layers in (False, 1, 2, 4, True)]
    assert all(more > less * 1.05 for more, less in itertools.pairwise(peaks)), peaks


def test_validation_is_the_token_mean_over_the_whole_set(tiny: Tiny, tmp_path: Path) -> None:
    job = make_job(tiny, tmp_path / "job", val_batches=-1, iters=1)
    model, tokenizer = load_model(job)
    valid = Split(job, "valid", row_format(job, tokenizer), lambda _: None)
    gradients = Gradients(model)
    batches = [valid.batch([index]) for index in range(len(valid))]
    expected = sum(gradients.loss(batch) for batch in batches) / sum(batch.targets for batch in batches)
    (validation,) = train(tiny, tmp_path / "run", val_batches=-1, iters=1).of("validation")
    assert validation["val_loss"] == pytest.approx(expected, abs=1e-5)
    assert validation["iteration"] == 0


def test_gradients_of_many_buckets_are_those_of_one(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(tiny, tmp_path / "whole", iters=4, grad_accumulation_steps=2)
    monkeypatch.setattr(exchange, "LEAST_BUCKET", 1_500)
    parts = train(tiny, tmp_path / "parts", iters=4, grad_accumulation_steps=2)
    gradients = Gradients(parts.model)
    gradients.add(load_batch(parts))
    assert len(list(gradients.pieces())) > 5
    assert all(mx.array_equal(value, whole.weights()[name]).item() for name, value in parts.weights().items())


def load_batch(trained: Trained) -> Batch:
    return Split(trained.job, "train", row_format(trained.job, load_model(trained.job)[1]), lambda _: None).batch(
        [0, 1]
    )


def test_the_checksum_distinguishes_models(tiny: Tiny, tmp_path: Path) -> None:
    job = make_job(tiny, tmp_path)
    model, _ = load_model(job)
    checksum = parameter_checksum(model)
    assert checksum == parameter_checksum(load_model(job)[0])
    norm = model.model.norm
    norm.weight = norm.weight + mx.array([1e-7] + [0.0] * (norm.weight.size - 1))
    assert checksum != parameter_checksum(model)


def test_a_stop_before_the_first_step_is_received_in_the_validation(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = train(tiny, tmp_path, stopped_control(monkeypatch), val_batches=-1)
    assert trained.outcome == Outcome(completed=False, stopped=True, iteration=0)
    assert trained.of("step") == trained.of("validation") == []
    assert list(trained.job.adapter_path.iterdir()) == []


def test_a_stop_is_taken_after_a_whole_update(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = train(tiny, tmp_path, stopped_control(monkeypatch), grad_accumulation_steps=3)
    assert trained.outcome == Outcome(completed=False, stopped=True, iteration=3)


def test_without_checkpoints_a_stop_saves_its_state_and_removes_older_ones(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "emergency" / "0" / "rank0" / "step-000000009").mkdir(parents=True)
    train(tiny, tmp_path, stopped_control(monkeypatch), grad_accumulation_steps=3)
    assert [path.name for path in (tmp_path / "emergency").iterdir()] == ["1"]
    found = latest(tmp_path / "emergency" / "1" / "rank0", lambda path, why: pytest.fail(why))
    assert found is not None and (found.manifest.update, found.manifest.iteration) == (1, 3)


def test_a_save_that_fails_on_the_way_is_a_warning(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "adapters" / "0000002_adapters.safetensors").mkdir(parents=True)
    trained = train(tiny, tmp_path, iters=5, save_every=2)
    assert trained.outcome is not None and trained.outcome.completed
    assert "iteration 2" in trained.of("warning")[0]["message"]
    assert [event["iteration"] for event in trained.of("checkpoint") if event["phase"] == "committed"] == [4, 5]
    assert not list(trained.job.adapter_path.glob(".*"))


def test_a_last_save_that_fails_is_a_failure(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "adapters" / "adapters.safetensors").mkdir(parents=True)
    with pytest.raises(OSError, match=r"adapters\.safetensors"):
        train(tiny, tmp_path, iters=1)


@pytest.mark.parametrize(
    ("keys", "output"),
    [
        ({"batch_size": 62}, "batch_size = 62: 61 examples do not fill one batch"),
        ({"optimizer_config": {"adam": {"speed": 1}}}, "optimizer_config.adam: .*speed"),
        ({"lr_schedule": {"name": "no_such"}}, "lr_schedule is not one that mlx-lm accepts"),
        ({"fine_tune_type": "lora", "lora_parameters": {"keys": [], "rank": 4}}, "there is nothing to train"),
        ({"resume_adapter_file": "nowhere.safetensors"}, "resume_adapter_file = 'nowhere.safetensors'"),
    ],
)
def test_settings_that_do_not_fit_are_named(tiny: Tiny, tmp_path: Path, keys: dict[str, Any], output: str) -> None:
    with pytest.raises(JobError, match=output):
        train(tiny, tmp_path, **keys)


def test_an_adapter_goes_on_in_part_with_a_warning_and_never_in_silence(tiny: Tiny, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"fine_tune_type": "lora", "lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.0}}
    own = {name: mx.ones(value.shape) for name, value in trained_of(load_model(make_job(tiny, tmp_path, **keys))[0])}
    some = {name: value for name, value in own.items() if "q_proj" in name}
    files = {"own.npz": own, "some.npz": some, "wrapped.npz": {f"language_model.{name}": own[name] for name in own}}
    for name, arrays in {**files, "odd.npz": {**own, min(own): mx.ones((1, 1))}}.items():
        mx.savez(str(tmp_path / name), **arrays)
    warnings: list[str] = []
    jobs = {name: make_job(tiny, tmp_path, **keys, resume_adapter_file=str(tmp_path / name)) for name in files}
    whole = load_model(jobs["own.npz"], warnings.append)[0]
    assert warnings == [] and all(mx.all(value == 1) for _, value in trained_of(whole))
    part = load_model(jobs["some.npz"], warnings.append)[0]
    assert f"has {len(some)} of the {len(own)} tensors that are trained: the others begin anew" in "".join(warnings)
    assert all(mx.all(value == 1) for name, value in trained_of(part) if name in some)
    with pytest.raises(JobError, match=f"none of its {len(own)} tensors is one of the job's"):
        load_model(jobs["wrapped.npz"])
    with pytest.raises(JobError, match=r"is \[1, 1\], and the job's"):
        load_model(make_job(tiny, tmp_path, **keys, resume_adapter_file=str(tmp_path / "odd.npz")))


def trained_of(model: Any) -> list[tuple[str, mx.array]]:
    return tree_flatten(model.trainable_parameters())  # type: ignore[no-any-return]


@pytest.mark.parametrize("what", ["model", "data"])
def test_a_directory_that_is_not_there_is_named(tiny: Tiny, tmp_path: Path, what: str) -> None:
    with pytest.raises(JobError, match=f"the {what} /nowhere/{what} is not a directory on this node"):
        make_job(tiny, tmp_path, **{what: f"/nowhere/{what}"})


@pytest.mark.parametrize(
    ("content", "output"),
    [
        (b'{"text": "a"}\n{"text": oops}\n', "line 2 is no JSON"),
        (b'{"text": "a"}\n[1]\n', "line 2 is no JSON object"),
        (b'{"words": "a"}\n', "line 1 has none of text, prompt .* it has words"),
    ],
)
def test_data_that_cannot_be_read_is_named(tiny: Tiny, tmp_path: Path, content: bytes, output: str) -> None:
    (tmp_path / "train.jsonl").write_bytes(content)
    job = make_job(tiny, tmp_path, data=str(tmp_path))
    with pytest.raises(JobError, match=output) as caught:
        Split(job, "train", row_format(job, load_model(job)[1]), lambda _: None)
    assert "\n" not in str(caught.value) and "train.jsonl" in str(caught.value)


def test_an_example_of_another_format_is_named_by_its_number(tiny: Tiny, tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", [{"text": "tower"}, {"prompt": "hold"}])
    job = make_job(tiny, tmp_path, data=str(tmp_path))
    examples = Split(job, "train", row_format(job, load_model(job)[1]), lambda _: None)
    with pytest.raises(JobError, match="line 2 does not have the format of the first one"):
        examples.batch([1])


def test_half_of_a_surrogate_pair_is_named_with_its_line(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(b'{"text": "tower"}\n\n{"text": "hold \\ud83d"}\n')
    for streams in (False, True):
        job = make_job(tiny, tmp_path, data=str(tmp_path), chunking=streams, chunk_size=2)
        split = Split(job, "train", row_format(job, load_model(job)[1]), lambda _: None)
        with pytest.raises(JobError, match=r"train\.jsonl: line 3 has half of a surrogate pair \(\\ud83d\)"):
            split.batch([1])


def test_long_examples_are_truncated_and_reported(tiny: Tiny, tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", [{"text": "tower " * 100}])
    job = make_job(tiny, tmp_path, data=str(tmp_path), max_seq_length=20)
    output: list[int] = []
    batch = Split(job, "train", row_format(job, load_model(job)[1]), output.append).batch([0])
    assert batch.tokens.shape == (1, 20) and batch.targets == 19 and output[0] > 20


@pytest.mark.parametrize(
    ("requested", "available", "layers"),
    [
        (("full", None), 4, -1),
        (("lora", None), 4, 4),
        (("lora", None), 40, 16),
        (("lora", -1), 4, -1),
        (("full", 2), 4, 2),
    ],
)
def test_how_many_layers_are_trained(
    tiny: Tiny, tmp_path: Path, requested: tuple[str, int | None], available: int, layers: int
) -> None:
    kind, number = requested
    assert make_job(tiny, tmp_path, fine_tune_type=kind, num_layers=number).layers(available) == layers


def test_a_validation_is_computed_in_pieces_that_are_halved_after_a_late_one(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tiny, tmp_path)
    model, tokenizer = load_model(job)
    examples = Split(job, "train", row_format(job, tokenizer), lambda _: None)
    gradients, rows = Gradients(model), list[int]()
    compute = gradients.loss

    def loss(batch: Batch) -> float:
        rows.append(len(batch.tokens))
        return compute(batch)

    monkeypatch.setattr(gradients, "loss", loss)
    whole = gradients.share_loss(examples, np.arange(8))
    monkeypatch.setattr(data_parallel, "PIECE_S", 0.0)
    pieces = [gradients.share_loss(examples, np.arange(8)) for _ in range(2)]
    assert rows == [8, 8, 4, 2, 1, 1]
    assert [loss for loss, _ in pieces] == pytest.approx([whole[0]] * 2, rel=1e-5)
    assert {targets for _, targets in pieces} == {whole[1]}


@pytest.mark.parametrize(
    ("keys", "rates"),
    [({}, [1e-2, 1e-2]), ({"warmup_init": True}, [1e-6, 2e-6]), ({"relative_step": False}, [1e-3, 1e-3])],
    ids=["relative", "warmed up", "given"],
)
def test_the_rate_that_is_reported_of_adafactor_is_the_one_that_is_used(
    tiny: Tiny, tmp_path: Path, keys: dict[str, Any], rates: list[float]
) -> None:
    config: dict[str, Any] = {"optimizer": "adafactor", "optimizer_config": {"adafactor": keys}}
    trained = train(tiny, tmp_path, iters=2, steps_per_report=1, **config)
    assert [event["learning_rate"] for event in trained.of("report")] == pytest.approx(rates)


def test_a_learning_rate_that_adafactor_ignores_is_a_warning(tiny: Tiny, tmp_path: Path) -> None:
    run = launch(tmp_path, tiny.job(iters=1, optimizer="adafactor")).succeeded()
    assert any("adafactor takes a relative step" in event["message"] for event in run.events(0, "warning"))


def test_ranks_agree_on_the_test_data_too(tiny: Tiny, tmp_path: Path) -> None:
    job = make_job(tiny, tmp_path, test=True)
    splits = [Split(job, name, lambda _: lambda _: ([1, 2], 0), lambda _: None) for name in ("train", "valid", "test")]
    facts = rank_facts(spec(), splits[0], splits[1], splits[2], "crc32 00000001")
    with pytest.raises(GroupError, match=r"^test\.jsonl of rank 1 differs from rank 0's"):
        check_equal([facts, rank_facts(spec(), splits[0], splits[1], splits[0], "crc32 00000001")])
