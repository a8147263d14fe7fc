"""The lines in which programs of other people print their steps and losses, and the names that they give to them.

A pattern's named groups are values: `step`, which counts from the training's beginning, or with `in_epoch` from its
epoch's; `total`, of the same count; `epoch`, `epochs`; all others by the names of mlx-lm's reports. In alternatives
`iter` and `global_step` are steps, too. `<name>` in a pattern stands for a group that is a number. What else stands in
such a line is read by its names (`named_numbers`), and so is a line of another form that has a step or an epoch, and a
loss.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

LONGEST_LINE = 1000
"""Characters of a line on which a job's own pattern is tried, which may try it in many ways; and of such a pattern."""
LONGEST_NUMBER = 25
"""Digits and points in a row of such a line."""
LOSSES = frozenset(("train_loss", "val_loss"))
_NUMBER = (
    r"[-+]?(?:\d{1,3}(?:,\d{3}){1,6}|\d{1,20})(?:\.\d{0,20})?(?:[eE][-+]?\d{1,4})?"
    r"|[-+]?\.\d{1,20}|[-+]?(?:nan|inf)\b"
)


class MetricPattern(NamedTuple):
    program: str
    source: str
    regex: str
    examples: str
    """One a line, without colours."""
    in_epoch: bool = False


PATTERNS = (
    MetricPattern(
        "nanoGPT",
        "karpathy/nanoGPT train.py",
        r"\biter <step>: loss <train_loss>,|\bstep <iter>: (?:train loss [\d.]{1,20}, )?val loss <val_loss>",
        "iter 10: loss 3.2101, time 65.49ms, mfu 0.00%\nstep 250: train loss 1.9712, val loss 2.0623",
    ),
    MetricPattern(
        "minGPT",
        "karpathy/minGPT projects/chargpt/chargpt.py",
        r"\biter_dt [\d.]{1,20}ms; iter <step>: train loss <train_loss>",
        "iter_dt 12.05ms; iter 100: train loss 1.85123",
    ),
    MetricPattern(
        "nanochat",
        "karpathy/nanochat scripts/base_train.py, chat_sft.py",
        r"(?i)\bstep <step>(?:/<total>)?(?: \([\d.]{1,8}%\))? \| (?:(?:training )?loss: <loss>\s?\||"
        r"validation loss: <val_loss>)",
        "step 00020/21400 (0.09%) | loss: 9.123456 | grad norm: 0.5200 | lrm: 1.00 | dt: 512.10ms | tok/sec: 1,024,000"
        " | mfu: 47.10\nstep 00020 (0.09%) | loss: 1.456789 | lrm: 1.00 | tok/sec: 1,024,000 | mfu: 47.10 | epoch: 1\n"
        "Step 00010/00701 | Training loss: 1.012345| lrm: 0.985735\nStep 00200 | Validation loss: 1.201234",
    ),
    MetricPattern(
        "torchtitan",
        "pytorch/torchtitan torchtitan/components/metrics.py",
        r"\bvalidate step: {1,8}<iter> {2}loss: {1,8}<val_loss>"
        r"|(?<!validate )\bstep: {1,8}<step> {2}loss: {1,8}<loss> {2}",
        "[titan] 2026-01-02 10:00:00,000 - root - INFO - step: 10  loss:  7.32101  grad_norm:  1.2005  memory: 40.20GiB"
        "(42.32%)  tps: 6,112  tflops: 353.97  mfu: 35.79%\n"
        "[titan] 2026-01-02 10:00:00,000 - root - INFO - validate step: 20  loss:  6.9123  memory:  1.20GiB(2.1%)",
    ),
    MetricPattern(
        "torchtune",
        "meta-pytorch/torchtune recipes/full_finetune_distributed.py, torchtune/training/metric_logging.py",
        r"^Step <step> \| (?:.{1,400} )?loss:<train_loss>(?: |$)|^(?:<epoch>\|)?<iter>\|Loss: <loss>:",
        "Step 20 | loss:1.2345678 lr:2e-05 tokens_per_second_per_gpu:512.25 grad_norm:0.75 \n"
        "1|20|Loss: 1.2345678806304932:  10%|#         | 20/200 [00:40<06:00,  2.00s/it]",
    ),
    MetricPattern(
        "DeepSpeed",
        "deepspeedai/DeepSpeed deepspeed/runtime/pipe/engine.py, runtime/engine.py, utils/timer.py",
        r"\bsteps: <step> loss: <train_loss> .{0,200}?iter time \(s\):|\bstep=<iter>, skipped=\d{1,12}, lr=\[<lr>"
        r"|/global_step=<global_step>, RunningAvgSamplesPerSec=",
        "steps: 200 loss: 5.5508 lm loss: 5.5103 moe loss: 0.0405 iter time (s): 0.936 samples/sec: 136.706\n"
        "[2026-08-01 10:00:00,123] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=0, lr=[0.001], mom=[[0.8, "
        "0.9]]\n[2026-08-01 10:00:00,124] [INFO] [timer.py:260:stop] epoch=0/micro_step=10/global_step=10, "
        "RunningAvgSamplesPerSec=123.4, CurrSamplesPerSec=125.0, MemAllocated=0.1GB, MaxMemAllocated=0.2GB",
    ),
    MetricPattern(
        "Megatron-LM",
        "NVIDIA/Megatron-LM megatron/training/training.py",
        r"\biteration {1,12}<step>/ {0,12}<total> \|.{1,300}?\bloss: <train_loss> \|"
        r"|\bvalidation loss at iteration <iter> .{0,80}?\| lm loss value: <val_loss>",
        " [2026-01-02 10:00:00] iteration       10/     500 | consumed samples:          320 | elapsed time per "
        "iteration (ms): 512.1 | learning rate: 1.500E-05 | lm loss: 1.034512E+01 | grad norm: 2.105 |\n"
        " validation loss at iteration 100 | lm loss value: 6.512345E+00 | lm loss PPL: 6.734021E+02 | ",
    ),
    MetricPattern(
        "mlx-lm",
        "ml-explore/mlx-lm mlx_lm/tuner/trainer.py to 0.31; mlx-examples",
        r"\bIter <step>: (?:Train loss <loss>,|Val loss <val_loss>, (?:Val ppl [\d.]{1,30}, )?Val took <val_time>)"
        r"|^Starting training\.\.\., iters: <total>",
        "Iter 10: Train loss 2.345, Learning Rate 1.000e-05, It/sec 3.100, Tokens/sec 302.100, Trained Tokens 1345, "
        "Peak mem 0.004 GB\nIter 20: Val loss 2.100, Val took 1.200s\nStarting training..., iters: 600",
    ),
    MetricPattern(
        "mlx-lm",
        "ml-explore/mlx-lm mlx_lm/cli_ui.py from 0.32",
        r"^ {2,8}<step> {4}(?:val <val_loss> {4,8}<val_time>s|<loss> [\u25b2\u25bc] {4,12}<tokens_per_second> )"
        r"|^\u2502 {1,8}batch \u00b7 iters {1,8}\d{1,9} \u00b7 <total> ",
        "     5    5.815 \u25bc        8      1.1k\n    10    val 5.473    2.23s\n"
        "\u2502    batch \u00b7 iters   4 \u00b7 30    \u2502",
    ),
    MetricPattern(
        "Lightning",
        "Lightning-AI/pytorch-lightning src/lightning/pytorch/callbacks/progress/rich_progress.py",
        r"^Epoch <epoch>/\d{1,9} {1,4}[\u2501\u2578\u257a]{1,300} <step>/<total> .{1,200}?\b(?:train_)?loss: <loss>",
        "Epoch 2/2  \u2501\u2501\u2501\u2501\u2501\u2501 40/40 0:00:00 \u2022 0:00:00 121.16it/s train_loss: 0.006",
        in_epoch=True,
    ),
    MetricPattern(
        "PyTorch MNIST",
        "pytorch/examples mnist/main.py; its steps are examples",
        r"\bTrain Epoch: <epoch> \[<step>/<total> \([\d.]{1,6}%\)\]\s{1,8}Loss: <train_loss>"
        r"|\bTest set: Average loss: <val_loss>,",
        "Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.298765\nTest set: Average loss: 0.0559, Accuracy: 9815/10000 (98%)",
        in_epoch=True,
    ),
    MetricPattern(
        "PyTorch ImageNet",
        "pytorch/examples imagenet/main.py; pytorch/vision references",
        r"\bEpoch: \[<epoch>\] {0,2}\[ {0,12}<step>/ {0,12}<total>\].{0,200}?\b[Ll]oss:? <train_loss> \(",
        "Epoch: [0][ 10/391]\tTime  0.101 ( 0.203)\tData  0.001 ( 0.010)\tLoss 6.9012e+00 (6.9523e+00)\tAcc@1   0.00\n"
        "Epoch: [0]  [ 10/391]  eta: 0:01:10  lr: 0.1  img/s: 512.1  loss: 2.3012 (2.4101)  acc1: 10.0 (9.1)",
        in_epoch=True,
    ),
    MetricPattern(
        "PyTorch CIFAR-10",
        "pytorch/tutorials cifar10_tutorial.py; deepspeedai/DeepSpeedExamples training/cifar",
        r"^\s{0,8}\[ {0,8}<epoch>, {0,12}<step>\] loss: {1,4}<train_loss>",
        "[1,  2000] loss: 2.213",
        in_epoch=True,
    ),
    MetricPattern(
        "MLX MNIST",
        "ml-explore/mlx-examples mnist/main.py; its steps are epochs",
        r"\bEpoch <step>: Test accuracy [\d.]{1,12}",
        "Epoch 3: Test accuracy 0.921, Time 0.512 (s)",
    ),
)


def compiled(regex: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"(?<!\?P)<([a-z_]+)>", lambda name: f"(?P{name[0]}{_NUMBER})", regex))


_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
_STEP = frozenset(("step", "iter", "iteration", "update"))
_STEPS = frozenset(("steps", "iters", "iterations", "updates"))
_OF_STEPS = _STEP | _STEPS | {"global", "train", "training", "trainer", "max", "total", "num"}
_VALIDATION = frozenset(("val", "valid", "validation", "eval", "evaluation", "test", "dev"))
_OF_LOSSES = _VALIDATION | _STEP | {"loss", "train", "training", "batch", "epoch", "samples", "metrics", "global", "lm"}
_OF_LOSSES |= {"avg", "average", "mean", "running", "total", "ce", "nll"}
_PER_SECOND = frozenset(("s", "sec", "second"))
_FIGURES: tuple[tuple[str, frozenset[str], frozenset[str]], ...] = (
    ("learning_rate", frozenset(("lr",)), frozenset()),
    ("learning_rate", frozenset(("learning", "rate")), frozenset()),
    ("grad_norm", frozenset(("grad", "norm")), frozenset()),
    ("iterations_per_second", frozenset(("it",)), _PER_SECOND),
    ("iterations_per_second", frozenset(("iterations",)), _PER_SECOND),
    ("tokens_per_second", frozenset(("tok",)), _PER_SECOND),
    ("tokens_per_second", frozenset(("tokens",)), _PER_SECOND),
    ("trained_tokens", frozenset(("trained", "tokens")), frozenset()),
    ("peak_memory", frozenset(("peak", "mem")), frozenset()),
)
"""Our name; the words that a program's name has, and those of which it has one."""
_OTHERS = frozenset(("max", "min", "best", "worst", "last", "aux", "moe"))
_SAME = frozenset(("total", "epoch", "epochs"))


def metric_name(name: str) -> str | None:
    """The name in mlx-lm's reports, or "step", "steps", "total", "epochs", for a program's own or a TensorBoard tag."""
    words = _words(name)
    validation = words & _VALIDATION
    own = None
    if "loss" in words and words <= _OF_LOSSES:
        own = "val_loss" if validation else "train_loss"
    elif validation:
        own = "val_time" if words <= validation | {"runtime", "time"} and words > validation else None
    elif words & (_STEP | _STEPS) and words <= _OF_STEPS:
        own = "total" if words & {"max", "total", "num"} else "step" if words & _STEP else "steps"
    elif len(words & _SAME) == len(words) == 1:
        own = name.lower()
    elif "gpu" not in words:
        # What one GPU does is not what the run does.
        matching = (own for own, all_of, any_of in _FIGURES if all_of <= words and (not any_of or any_of & words))
        own = next(matching, None)
    return own


def _words(name: str) -> frozenset[str]:
    return frozenset(word.lower() for word in _WORD.findall(name))


def metrics_of(values: Mapping[str, float]) -> dict[str, float]:
    """A program's own values by the names of mlx-lm's reports, with "step" and "total". Where several have the same
    name it is the one that is said in the fewest words, and not an epoch's."""
    found: dict[str, float] = {}
    for name in sorted(values, key=lambda name: ("epoch" in _words(name), len(_words(name)))):
        if (own := metric_name(name)) is not None:
            found.setdefault(own, values[name])
    if (steps := found.pop("steps", None)) is not None:
        # {"iter": 10, "iters": 100}, but {"steps": 10}.
        found.setdefault("total" if "step" in found else "step", steps)
    return found


_NAMED = re.compile(
    r"(?i)(?<![\w/.-])([a-z_][\w/.-]{0,60}(?: [a-z][\w/.-]{0,30})?)['\"\])]{0,2}[ \t]{0,2}[:=]{0,2}[ \t]{0,12}"
    rf"(?:tensor)?[\[('\"#]{{0,2}}({_NUMBER})(?:\s?(?:/|of)\s?(\d{{1,12}})(?![\d.]))?"
)


def named_numbers(text: str) -> dict[str, float]:
    """The numbers of a line that have a name before them ("Step 20/300, Learning Rate 1e-5, loss=2.5"), the first for
    each name; what follows a step or epoch after a slash is the `total` or `epochs`."""
    found: dict[str, float] = {}
    for name, number, most in _NAMED.findall(text):
        # "then step 20" is a step; "val loss" is more than a loss, and "best loss" is none.
        own = name if metric_name(name) is not None or _words(name) & _OTHERS else name.rpartition(" ")[2]
        found.setdefault(own, float(number.replace(",", "")))
        if most and (of := {"step": "total", "steps": "total", "epoch": "epochs"}.get(metric_name(own) or "")):
            found.setdefault(of, float(most))
    return found


def group_values(match: re.Match[str]) -> dict[str, float]:
    """The groups that took part and are numbers, by the names of mlx-lm's reports."""
    values = {}
    for name, text in match.groupdict().items():
        try:
            values[name] = float(text.strip().replace(",", ""))
        except (AttributeError, ValueError):
            continue
    return metrics_of(values)


def as_count(value: float | None) -> int | None:
    """A step, or a number of them; None for anything else."""
    return int(value) if value is not None and math.isfinite(value) and 0 <= value < 1e15 else None


def speaks_of_validation(text: str) -> bool:
    return any(word == "val" or word.startswith(("valid", "eval", "sanity", "testing")) for word in _words(text))
