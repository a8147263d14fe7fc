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

READ: dict[str, list[tuple[str, dict[str, float]]]] = {
    "nanoGPT": [
        ("iter 10: loss 3.2101, time 65.49ms, mfu 0.00%", {"step": 10, "train_loss": 3.2101}),
        ("step 250: train loss 1.9712, val loss 2.0623", {"step": 250, "val_loss": 2.0623}),
    ],
    "minGPT": [
        ("iter_dt 12.05ms; iter 100: train loss 1.85123", {"step": 100, "train_loss": 1.85123}),
    ],
    "nanochat": [
        (
            "step 00020/21400 (0.09%) | loss: 9.123456 | grad norm: 0.52 | dt: 512.10ms | tok/sec: 1,024,000",
            {"step": 20, "total": 21400, "train_loss": 9.123456},
        ),
        ("Step 00200 | Validation loss: 1.201234", {"step": 200, "val_loss": 1.201234}),
    ],
    "torchtitan": [
        (
            "INFO - step: 10  loss:  7.32101  grad_norm:  1.2005  memory: 40.20GiB(42.32%)  tps: 6,112  mfu: 35.79%",
            {"step": 10, "train_loss": 7.32101},
        ),
        ("root - INFO - validate step: 20  loss:  6.9123  memory:  1.20GiB(2.1%)", {"step": 20, "val_loss": 6.9123}),
    ],
    "torchtune": [
        (
            "Step 20 | loss:1.2345678 lr:2e-05 tokens_per_second_per_gpu:512.25 grad_norm:0.75",
            {"step": 20, "train_loss": 1.2345678},
        ),
        (
            "1|20|Loss: 1.2345678806304932:  10%|#         | 20/200 [00:40<06:00,  2.00s/it]",
            {"epoch": 1, "step": 20, "train_loss": 1.2345678806304932},
        ),
    ],
    "DeepSpeed": [
        (
            "steps: 200 loss: 5.5508 lm loss: 5.5103 moe loss: 0.0405 iter time (s): 0.936 samples/sec: 136.706",
            {"step": 200, "train_loss": 5.5508},
        ),
        (
            "[2026-08-01 10:00:00] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=0, lr=[0.001], mom=[0.9]",
            {"step": 10, "learning_rate": 0.001},
        ),
        (
            "[INFO] [timer.py:260:stop] epoch=0/micro_step=10/global_step=10, RunningAvgSamplesPerSec=123.4",
            {"step": 10},
        ),
    ],
    "Megatron-LM": [
        (
            "iteration     10/    500 | consumed samples:     320 | learning rate: 1.500E-05 | lm loss: 1.034512E+01 |",
            {"step": 10, "total": 500, "train_loss": 10.34512},
        ),
        (
            "validation loss at iteration 100 | lm loss value: 6.512345E+00 | lm loss PPL: 6.734021E+02 |",
            {"step": 100, "val_loss": 6.512345},
        ),
    ],
    "mlx-lm": [
        (
            "Iter 10: Train loss 2.345, Learning Rate 1.000e-05, It/sec 3.100, Tokens/sec 302.100, Trained Tokens 1345",
            {"step": 10, "train_loss": 2.345},
        ),
        ("Iter 20: Val loss 2.100, Val took 1.200s", {"step": 20, "val_loss": 2.1, "val_time": 1.2}),
        ("Starting training..., iters: 600", {"total": 600}),
        ("     5    5.815 ▼        8      1.1k", {"step": 5, "train_loss": 5.815, "tokens_per_second": 8}),
        ("    10    val 5.473    2.23s", {"step": 10, "val_loss": 5.473, "val_time": 2.23}),
        ("│    batch · iters   4 · 30                                          │", {"total": 30}),
    ],
    "Lightning": [
        (
            "Epoch 2/2  ━━━━━━━━━━━━ 40/40 0:00:00 • 0:00:00 121.16it/s train_loss: 0.006",
            {"epoch": 2, "step": 40, "total": 40, "train_loss": 0.006},
        ),
    ],
    "PyTorch MNIST": [
        (
            "Train Epoch: 1 [640/60000 (1%)] Loss: 2.298765",
            {"epoch": 1, "step": 640, "total": 60000, "train_loss": 2.298765},
        ),
        ("Test set: Average loss: 0.0559, Accuracy: 9815/10000 (98%)", {"val_loss": 0.0559}),
    ],
    "PyTorch ImageNet": [
        (
            "Epoch: [0][ 10/391] Time  0.101 ( 0.203) Data  0.001 ( 0.010) Loss 6.9012e+00 (6.9523e+00) Acc@1   0.00",
            {"epoch": 0, "step": 10, "total": 391, "train_loss": 6.9012},
        ),
    ],
    "PyTorch CIFAR-10": [
        ("[1,  2000] loss: 2.213", {"epoch": 1, "step": 2000, "train_loss": 2.213}),
    ],
    "PyTorch word_language_model": [
        (
            "| epoch   1 |   200/ 2983 batches | lr 20.00 | ms/batch 10.21 | loss  7.65 | ppl  2100.64",
            {"epoch": 1, "step": 200, "total": 2983, "train_loss": 7.65},
        ),
    ],
    "timm": [
        (
            "Train: 0 [  50/1251 (  4%)]  Loss: 6.95 (6.94)  Time: 0.400s, 640.0/s  LR: 1.000e-05  Data: 0.010 (0.012)",
            {"epoch": 0, "step": 50, "total": 1251, "train_loss": 6.95},
        ),
    ],
    "fairseq": [
        (
            "INFO | train_inner | epoch 002:    100 / 1500 loss=12.5, ppl=5792.6, wps=3000, num_updates=1600, lr=1e-05",
            {"step": 1600, "train_loss": 12.5},
        ),
    ],
    "MLX CIFAR-10": [
        (
            "Epoch 01 [010] | Train loss 2.105 | Train acc 0.211 | Throughput: 5120.00 images/second",
            {"epoch": 1, "step": 10, "train_loss": 2.105},
        ),
    ],
    "MLX MNIST": [
        ("Epoch 3: Test accuracy 0.921, Time 0.512 (s)", {"step": 3}),
    ],
}
"""Program → a line of each of its forms, and what is read of it."""


EXAMPLES = dict(zip(FORMS, (line for lines in READ.values() for line, _ in lines), strict=True))


def test_each_form_reads_a_line_of_its_program() -> None:
    found: dict[str, list[tuple[str, dict[str, float]]]] = {}
    for form, line in EXAMPLES.items():
        match = form.regex.search(line)
        assert match is not None and form.literal in line, form
        found.setdefault(form.program, []).append((line, group_values(match)))
    assert found == READ


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.program)
def test_no_form_matches_another_ones_line(form: MetricForm) -> None:
    assert [line for other, line in EXAMPLES.items() if other is not form and form.regex.search(line)] == []


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
