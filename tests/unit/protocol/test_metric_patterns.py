"""The forms of lines that training programs print."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.metric_patterns import (
    FORMS,
    MetricForm,
    group_values,
    metric_name,
    metrics_of,
    named_numbers,
)

READ = {
    "nanoGPT": [{"step": 10, "train_loss": 3.2101}, {"step": 250, "val_loss": 2.0623}],
    "minGPT": [{"step": 100, "train_loss": 1.85123}],
    "nanochat": [{"step": 20, "total": 21400, "train_loss": 9.123456}, {"step": 200, "val_loss": 1.201234}],
    "torchtitan": [{"step": 10, "train_loss": 7.32101}, {"step": 20, "val_loss": 6.9123}],
    "torchtune": [{"step": 20, "train_loss": 1.2345678}, {"epoch": 1, "step": 20, "train_loss": 1.2345678806304932}],
    "DeepSpeed": [{"step": 200, "train_loss": 5.5508}, {"step": 10, "learning_rate": 0.001}, {"step": 10}],
    "Megatron-LM": [{"step": 10, "total": 500, "train_loss": 10.34512}, {"step": 100, "val_loss": 6.512345}],
    "mlx-lm": [
        {"step": 10, "train_loss": 2.345},
        {"step": 20, "val_loss": 2.1, "val_time": 1.2},
        {"total": 600},
        {"step": 5, "train_loss": 5.815, "tokens_per_second": 8},
        {"step": 10, "val_loss": 5.473, "val_time": 2.23},
        {"total": 30},
    ],
    "Lightning": [{"epoch": 2, "step": 40, "total": 40, "train_loss": 0.006}],
    "PyTorch MNIST": [{"epoch": 1, "step": 640, "total": 60000, "train_loss": 2.298765}, {"val_loss": 0.0559}],
    "PyTorch ImageNet": [{"epoch": 0, "step": 10, "total": 391, "train_loss": 6.9012}],
    "PyTorch CIFAR-10": [{"epoch": 1, "step": 2000, "train_loss": 2.213}],
    "PyTorch word_language_model": [{"epoch": 1, "step": 200, "total": 2983, "train_loss": 7.65}],
    "timm": [{"epoch": 0, "step": 50, "total": 1251, "train_loss": 6.95}],
    "fairseq": [{"step": 1600, "train_loss": 12.5}],
    "MLX CIFAR-10": [{"epoch": 1, "step": 10, "train_loss": 2.105}],
    "MLX MNIST": [{"step": 3}],
}


def test_each_form_reads_its_own_example_and_names_where_it_was_seen() -> None:
    found: dict[str, list[dict[str, float]]] = {}
    for form in FORMS:
        match = form.regex.search(form.example)
        assert match is not None and form.literal in form.example and form.source, form
        found.setdefault(form.program, []).append(group_values(match))
    assert found == READ


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.program)
def test_no_form_matches_another_ones_example(form: MetricForm) -> None:
    assert [other.example for other in FORMS if other is not form and form.regex.search(other.example)] == []


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        *(
            (name, "train_loss")
            for name in ("Train/loss", "Loss/train", "train_loss_step", "loss", "step_loss", "lm loss")
        ),
        *((name, "train_loss") for name in ("loss_metrics/global_avg_loss", "Train/Samples/train_loss", "trainLoss")),
        *((name, "train_loss") for name in ("reduced_train_loss", "train/CrossEntropyLoss")),
        *(
            (name, "val_loss")
            for name in ("eval_loss", "Loss/val", "validation_metrics/loss", "val/loss_epoch", "Loss/test")
        ),
        *(
            (name, None)
            for name in ("loss_metrics/global_max_loss", "loss_scale", "lossy", "eval_accuracy", "time", "mfu")
        ),
        *((name, None) for name in ("tokens_per_second_per_gpu", "eval_steps_per_second", "train_runtime", "gradient")),
        *((name, "step") for name in ("step", "iter", "global_step", "trainer/global_step", "Iteration")),
        *((name, "total") for name in ("total", "max_steps", "total_iters", "num_iterations")),
        *((name, "learning_rate") for name in ("lr", "lr-AdamW", "train/learning_rate", "Learning Rate", "lr/0")),
        *((name, "tokens_per_second") for name in ("tok/sec", "Tokens/sec", "tokens_per_second")),
        *((name, "grad_norm") for name in ("grad_norm", "grad norm", "train/grad_norm")),
    ],
)
def test_names_are_read_by_their_words(name: str, ours: str | None) -> None:
    assert metric_name(name) == ours


def test_of_several_losses_the_plainest_counts_and_not_an_epochs_mean() -> None:
    assert metrics_of({"train_loss_epoch": 3.0, "train_loss_step": 2.0, "lm_loss": 1.0}) == {"train_loss": 1.0}
    assert metrics_of({"loss_epoch": 3.0, "train_loss_step": 2.0}) == {"train_loss": 2.0}
    assert metrics_of({"iter": 10, "iters": 100}) == {"step": 10, "total": 100}
    assert metrics_of({"steps": 10, "loss": 1.0}) == {"step": 10, "train_loss": 1.0}


numbers = st.floats(allow_nan=False, allow_infinity=False, width=32)


@given(st.integers(0, 10**9), st.integers(0, 10**9), numbers, st.sampled_from([": ", "=", " ", " = ", "': '"]))
def test_numbers_are_read_by_the_names_before_them(step: int, total: int, loss: float, sign: str) -> None:
    found = metrics_of(
        named_numbers(f"[INFO] train: Step{sign}{step}/{total}, Learning Rate{sign}1e-4 | loss{sign}{loss}")
    )
    assert found == {"step": step, "total": total, "learning_rate": 1e-4, "train_loss": pytest.approx(loss)}


@given(st.text(max_size=200))
def test_any_text_has_finite_steps_or_none(text: str) -> None:
    assert all(isinstance(value, float) for value in metrics_of(named_numbers(text)).values())
