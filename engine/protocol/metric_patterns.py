"""The lines in which programs of other people print their steps and losses, and the names that they give to them."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

LONGEST_LINE = 1000
"""Characters of a line on which a job's own pattern is tried, which may try it in many ways; and of such a pattern."""
LONGEST_NUMBER = 25
"""Digits and points in a row of such a line."""
LOSSES = frozenset(("train_loss", "val_loss"))
_NUMBER = (
    r"[-+]?(?:\d{1,3}(?:,\d{3}){1,6}|\d{1,20})(?:\.\d{0,20})?(?:[eE][-+]?\d{1,4})?"
    r"|[-+]?\.\d{1,20}|[-+]?(?i:nan|inf(?:inity)?)\b"
)
_TABLE = r"""
nanoGPT: karpathy/nanoGPT train.py
    \biter <step>: loss <loss>,
    \bstep <step>: (?:train loss [\d.]{1,20}, )?val loss <val_loss>
minGPT: karpathy/minGPT projects/chargpt/chargpt.py
    \biter_dt [\d.]{1,20}ms; iter <step>: train loss <loss>
nanochat: karpathy/nanochat scripts/base_train.py, chat_sft.py
    \bstep <step>(?:/<total>)?(?: \([\d.]{1,8}%\))? \| loss: <loss> \|
    \bStep <step>(?:/<total>)? \| (?:Training loss: <loss>\||Validation loss: <val_loss>)
torchtitan: pytorch/torchtitan torchtitan/components/metrics.py
    (?<!validate )\bstep: {1,8}<step> {2}loss: {1,8}<loss> {2}
    \bvalidate step: {1,8}<step> {2}loss: {1,8}<val_loss> {2}
torchtune: meta-pytorch/torchtune recipes/full_finetune_distributed.py, torchtune/training/metric_logging.py
    ^Step <step> \| (?:.{1,400} )?loss:<loss>(?: |$)
    ^(?:<epoch>\|)?<step>\|Loss: <loss>:
DeepSpeed: deepspeedai/DeepSpeed deepspeed/runtime/pipe/engine.py, runtime/engine.py, utils/timer.py
    \bsteps: <step> loss: <loss> .{0,200}?iter time \(s\):
    \bstep=<step>, skipped=\d{1,12}, lr=\[<lr>
    /global_step=<step>, RunningAvgSamplesPerSec=
Megatron-LM: NVIDIA/Megatron-LM megatron/training/training.py
    \biteration {1,12}<step>/ {0,12}<total> \|.{1,300}?\bloss: <loss> \|
    \bvalidation loss at iteration <step> .{0,80}?\| lm loss value: <val_loss>
mlx-lm: ml-explore/mlx-lm mlx_lm/tuner/trainer.py to 0.31, and mlx-examples; mlx_lm/cli_ui.py from 0.32
    \bIter <step>: Train loss <loss>,
    \bIter <step>: Val loss <val_loss>, (?:Val ppl [\d.]{1,30}, )?Val took <val_time>
    ^Starting training\.\.\., iters: <total>
    ^ {2,8}<step> {4}<loss> [▲▼] {4,12}<tokens_per_second>\s
    ^ {2,8}<step> {4}val <val_loss> {4,8}<val_time>s
    ^│ {1,8}batch · iters {1,8}\d{1,9} · <total>\s
Lightning: Lightning-AI/pytorch-lightning src/lightning/pytorch/callbacks/progress/rich_progress.py
    ^Epoch <epoch>/\d{1,9} {1,4}[━╸╺]{1,300} <epoch_step>/<total> .{1,200}?\b(?:train_)?loss: <loss>
PyTorch MNIST: pytorch/examples mnist/main.py; its steps are examples
    \bTrain Epoch: <epoch> \[<epoch_step>/<total> \([\d.]{1,6}%\)\]\s{1,8}Loss: <loss>
    \bTest set: Average loss: <val_loss>,
PyTorch ImageNet: pytorch/examples imagenet/main.py; pytorch/vision references
    \bEpoch: \[<epoch>\] {0,2}\[ {0,12}<epoch_step>/ {0,12}<total>\].{0,200}?\b[Ll]oss:? <loss> \(
PyTorch CIFAR-10: pytorch/tutorials cifar10_tutorial.py; deepspeedai/DeepSpeedExamples training/cifar
    ^\s{0,8}\[ {0,8}<epoch>, {0,12}<epoch_step>\] loss: {1,4}<loss>
PyTorch word_language_model: pytorch/examples word_language_model/main.py
    \| epoch {1,4}<epoch> \| {1,6}<epoch_step>/ {0,6}<total> batches \|.{1,100}?\| loss {1,3}<loss> \|
timm: huggingface/pytorch-image-models train.py
    \bTrain: <epoch> \[ {0,8}<epoch_step>/<total> \([ \d]{1,4}%\)\] {1,4}Loss: {1,4}<loss> \(
fairseq: facebookresearch/fairseq fairseq/logging/progress_bar.py
    \bepoch \d{1,6}: {1,8}\d{1,9} / \d{1,9} loss=<loss>,.{1,400}?\bnum_updates=<step>(?:,|$)
MLX CIFAR-10: ml-explore/mlx-examples cifar/main.py
    \bEpoch <epoch> \[<epoch_step>\] \| Train loss <loss> \|
MLX MNIST: ml-explore/mlx-examples mnist/main.py; its steps are epochs
    \bEpoch <step>: Test accuracy [\d.]{1,12}
"""
"""Program and source, then each of its forms: a regular expression for lines without their colours. `<name>` stands for
a group that is a number. Such groups are `step`, from the training's beginning on, or `epoch_step`, `total` of the
same, and figures by their names. What else is in the line is read by its names (`named_numbers`), and so is a line of
no form that has a step or an epoch, and a loss."""


class MetricForm(NamedTuple):
    program: str
    regex: re.Pattern[str]
    literal: str
    """In every line that it matches: most lines need not be tried."""


def _forms() -> Iterator[MetricForm]:
    program = ""
    for line in _TABLE.strip().split("\n"):
        if line.startswith(" "):
            named = re.sub(r"(?<!\?P)<([a-z_]+)>", lambda name: f"(?P{name[0]}{_NUMBER})", line[4:])
            yield MetricForm(program, re.compile(named), _literal(line[4:]))
        else:
            program = line.partition(": ")[0]


def _literal(regex: str) -> str:
    """The longest text that stands outside all groups, classes and repeats."""
    for other in (r"\\.", r"\[[^]]*\]", r"<\w+>", *[r"\([^()]*\)[?]?"] * 3, r".(?:\{[\d,]*\}|[?*+])\??", r"[\^$.]"):
        regex = re.sub(other, "\0", regex)
    return max(regex.split("\0"), key=len)


FORMS = tuple(_forms())
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
_STEP = frozenset(("step", "iter", "iteration", "update"))
_STEPS = frozenset(("steps", "iters", "iterations", "updates"))
_OF_STEPS = _STEP | _STEPS | {"global", "train", "training", "trainer", "max", "total", "num", "epoch"}
_VALIDATION = frozenset(("val", "valid", "validation", "eval", "evaluation", "test", "dev"))
_OF_LOSSES = _VALIDATION | _STEP | {"loss", "train", "training", "batch", "epoch", "samples", "metrics", "global", "lm"}
_OF_LOSSES |= {"avg", "average", "mean", "running", "total", "ce", "nll", "cross", "entropy", "reduced"}
_OTHERS = frozenset(("max", "min", "best", "worst", "last", "aux", "moe"))
_FIGURES = {
    "learning_rate": "lr/learning rate",
    "grad_norm": "grad norm",
    "iterations_per_second": "it s/it sec/iterations second",
    "tokens_per_second": "tok s/tok sec/tokens s/tokens sec/tokens second",
    "trained_tokens": "trained tokens",
    "peak_memory": "peak mem",
    "total": "total",
    "epochs": "epochs",
    "epoch": "epoch",
}
"""Our name, and the words of a program's own."""


@functools.lru_cache(maxsize=1024)
def metric_name(name: str) -> str | None:
    """The name in mlx-lm's reports, or "step", "steps", "total", "epochs", for a program's own or a TensorBoard tag."""
    words = _words(name)
    validation = words & _VALIDATION
    if "loss" in words and words <= _OF_LOSSES:
        return "val_loss" if validation else "train_loss"
    if validation:
        return "val_time" if words <= validation | {"runtime", "time"} and words > validation else None
    if words & (_STEP | _STEPS) and words <= _OF_STEPS:
        return "total" if words & {"max", "total", "num"} else "step" if words & _STEP else "steps"
    # What one GPU does is not what the run does.
    named = (key for key, names in _FIGURES.items() if any(words >= {*part.split()} for part in names.split("/")))
    return next(named, None) if "gpu" not in words and (len(words) == 1 or not words & {"total", "epoch"}) else None


@functools.lru_cache(maxsize=1024)
def _words(name: str) -> frozenset[str]:
    return frozenset(word.lower() for word in _WORD.findall(name))


def metrics_of(values: Mapping[str, float]) -> dict[str, float]:
    """A program's own values by the names of mlx-lm's reports, with "step" and "total". Where several have the same
    name it is the one that is said in the fewest words, and not an epoch's."""
    metrics: dict[str, float] = {}
    for name in sorted(values, key=lambda name: ("epoch" in _words(name), len(_words(name)))):
        if (metric := metric_name(name)) is not None:
            metrics.setdefault(metric, values[name])
    if (steps := metrics.pop("steps", None)) is not None:
        # {"iter": 10, "iters": 100}, but {"steps": 10}.
        metrics.setdefault("total" if "step" in metrics else "step", steps)
    return metrics


_NAMED = re.compile(
    r"(?i)(?<![\w/.-])([a-z_][\w/.-]{0,60}(?: [a-z][\w/.-]{0,30})?)['\"\])]{0,2}[ \t]{0,2}[:=]{0,2}[ \t]{0,12}"
    rf"(?:tensor)?[\[('\"#]{{0,2}}({_NUMBER})(?:\s?(?:/|of)\s{{0,8}}(\d{{1,12}})(?![\d.]))?"
)


def named_numbers(text: str) -> dict[str, float]:
    """The numbers of a line that have a name before them ("Step 20/300, Learning Rate 1e-5, loss=2.5"), the first for
    each name; what follows a step or epoch after a slash is the `total` or `epochs`."""
    numbers: dict[str, float] = {}
    for name, number, most in _NAMED.findall(text):
        # "then step 20" is a step; "val loss" is more than a loss, and "best loss" is none.
        label = name if metric_name(name) is not None or _words(name) & _OTHERS else name.rpartition(" ")[2]
        numbers.setdefault(label, float(number.replace(",", "")))
        if most and (of := {"step": "total", "steps": "total", "epoch": "epochs"}.get(metric_name(label) or "")):
            numbers.setdefault(of, float(most))
    return numbers


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
