"""The keys of an mlx-lm training YAML: accepted values, defaults and meanings, as data.

Copied from `mlx_lm.lora.CONFIG_DEFAULTS` of mlx-lm 0.32.2, since the console's process must not import mlx_lm; a test
compares the two. Intended differences: `train` is always true, `num_layers` is -1 (all) for full fine-tuning,
`adapter_path` defaults to the run's own directory, `grad_checkpoint` can be a number of layers or "auto",
`learning_rate` "auto" (by engine.protocol.job), `batch_tokens`, `optimizer_precision`, `moments`, `max_grad_norm`,
`wire`, LOCAL_KEYS, TORCH_KEYS, SAMPLE_KEYS, `epochs`, `save_best`, `patience`, `sequence_tiling` and `compile_on_cpu`
are ours, and model and data have no default."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError, model_validator

from engine.protocol.job import AUTO, MOMENTS, OPTIMIZER_PRECISIONS

_BELOW = 2**63
_Count = Annotated[int, Field(ge=1, lt=_BELOW)]
_NotNegative = Annotated[int, Field(ge=0, lt=_BELOW)]
_Text = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")]
_SERVICE = r"\s*(tensorboard|wandb|swanlab)\s*"
_Reporters = Annotated[str, Field(pattern=rf"^{_SERVICE}(,{_SERVICE})*$")]
_Prompt = Annotated[str, Field(min_length=1, max_length=2000, pattern=r"^[^\x00]*$")]
_Argument = FiniteFloat | bool | Annotated[list[FiniteFloat], Field(max_length=8)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", defer_build=True)


class OptimizerConfig(_Table):
    """Arguments in mlx.optimizers, except learning_rate, which is a separate key."""

    adam: dict[Literal["betas", "eps", "bias_correction"], _Argument] = {}
    adamw: dict[Literal["betas", "eps", "weight_decay", "bias_correction"], _Argument] = {}
    muon: dict[Literal["momentum", "weight_decay", "nesterov", "ns_steps"], _Argument] = {}
    sgd: dict[Literal["momentum", "weight_decay", "dampening", "nesterov"], _Argument] = {}
    adafactor: dict[Literal[
        "eps", "clip_threshold", "decay_rate", "beta_1", "weight_decay",
        "scale_parameter", "relative_step", "warmup_init",
    ], _Argument] = {}  # fmt: skip


STEPS = "steps"
SCHEDULE_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "cosine_decay": ("rate", STEPS, "last rate"),
    "exponential_decay": ("rate", "factor"),
    "linear_schedule": ("rate", "last rate", STEPS),
    "step_decay": ("rate", "factor", STEPS),
}
"""Those of the schedules of mlx.optimizers.schedulers that take only numbers; cosine_decay's third one is optional."""


class _Schedule(_Table):
    name: Literal["cosine_decay", "exponential_decay", "linear_schedule", "step_decay"]
    arguments: list[FiniteFloat]
    warmup: _NotNegative = 0
    warmup_init: FiniteFloat = 0.0

    @model_validator(mode="after")
    def _as_mlx_takes_them(self) -> _Schedule:
        names = SCHEDULE_ARGUMENTS[self.name]
        if not len(names) - (self.name == "cosine_decay") <= len(self.arguments) <= len(names):
            raise ValueError("too few or too many")
        if any(value < 1 for name, value in zip(names, self.arguments, strict=False) if name == STEPS):
            raise ValueError("steps below 1")
        return self


class _LoraParameters(_Table):
    rank: _Count = 8
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    scale: FiniteFloat = 20.0
    keys: Annotated[list[_Text], Field(max_length=1000)] = []


class LoadArguments(_Table):
    """Those of load_dataset that have a like here."""

    name: _Text | None = None
    revision: _Text | None = None


class HubDataset(_Table):
    """mlx-lm's hf_dataset, with its defaults."""

    path: _Text
    config: LoadArguments = LoadArguments()
    train_split: _Text = "train[:80%]"
    valid_split: _Text = "train[-10%:]"
    test_split: _Text | None = None
    prompt_feature: _Text | None = None
    completion_feature: _Text | None = None
    chat_feature: _Text | None = None
    text_feature: _Text | None = None


OPTIMIZERS = tuple(OptimizerConfig.model_fields)


@dataclass(frozen=True)
class Form:
    """The values that a key accepts: their type, and a description for error messages."""

    type: Any
    accepted: str

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.type)

    def fault(self, value: object) -> str | None:
        """The description of what is accepted instead of `value`; None if that is."""
        try:
            self._adapter.validate_python(value, strict=True)
        except ValidationError:
            return self.accepted
        return None


def one_of(*choices: str) -> Form:
    return Form(Annotated[str, Field(pattern=f"^({'|'.join(choices)})$")], "one of " + ", ".join(choices))


FLAG = Form(bool, "true or false")
COUNT = Form(_Count, "a whole number, 1 or more")
COUNT_OR_ALL = Form(Literal[-1] | _Count, "a whole number, 1 or more, or -1 for all")
TEXT = Form(_Text, "a string that is not empty")
POSITIVE = Form(Annotated[FiniteFloat, Field(gt=0)], "a finite number above 0")

_NO_DEFAULT: Final = object()


@dataclass(frozen=True)
class Key:
    """One key, as docs/configuration.md lists it."""

    form: Form
    default: Any
    meaning: str


KEYS: dict[str, Key] = {
    "model": Key(TEXT, None, "Directory of the model in mlx-lm's format, on every node."),
    "data": Key(TEXT, None, "Directory with train.jsonl, valid.jsonl, test.jsonl, or as `[data]` says, on every node."),
    "hf_dataset": Key(Form(HubDataset, 'a table with path = "org/set", and optionally config = {name, revision}, '
        "train_split, valid_split, test_split, and prompt_feature, completion_feature, chat_feature or text_feature"),
        _NO_DEFAULT, "A data set of the Hugging Face Hub, in place of data, as mlx-lm takes it: it stands for "
        '`data = "hf:org/set"`, `subset` and `splits` of `[data]`, and these features.'),
    "config": Key(TEXT, None,
        "An mlx-lm training YAML to read these keys from; keys in flightdeck.toml have priority."),
    "train": Key(Form(Literal[True], "true: flightdeck always trains"), True, "Accepted for mlx-lm's YAML files."),
    "fine_tune_type": Key(one_of("lora", "dora", "full"), "lora", "LoRA, DoRA or full fine-tuning."),
    "optimizer": Key(one_of(*OPTIMIZERS), "adam",
        "Optimizer. adafactor ignores learning_rate unless optimizer_config has relative_step = false for it."),
    "optimizer_config": Key(Form(OptimizerConfig,
        "a table of arguments for each optimizer, such as {adamw = {weight_decay = 0.01, betas = [0.9, 0.95]}}"),
        {name: {} for name in OPTIMIZERS}, "Arguments of the optimizers."),
    "optimizer_precision": Key(one_of(AUTO, *OPTIMIZER_PRECISIONS), AUTO,
        "How trained weights of 16 bits are kept: beside float32 masters, with 16 bits of compensation (kahan, as "
        "exact as float32), rounded stochastically, or as mlx-lm keeps them (parameter: small steps are lost). auto: "
        "the most precise that fits. Not in mlx-lm."),
    "moments": Key(one_of(AUTO, *MOMENTS), AUTO,
        "Type of the optimizer's moments; 8bit has a scale for each block of 64. With optimizer_precision parameter, "
        "float32 means the weights' own type, as in mlx-lm. auto: the most precise that fits. Not in mlx-lm."),
    "seed": Key(Form(_NotNegative, "a whole number, 0 or more"), 0, "Random seed."),
    "num_layers": Key(COUNT_OR_ALL, 16, "Number of layers to train, from the last; all of them for full fine-tuning."),
    "batch_size": Key(COUNT, 4, "Sequences per iteration over all ranks (the global batch)."),
    "batch_tokens": Key(COUNT, None,
        "Tokens per iteration over all ranks, padding included, in place of batch_size: examples of like length are "
        "gathered until they are so many, and one that is longer is a batch of its own. Not in mlx-lm."),
    "iters": Key(COUNT, 1000, "Training iterations."),
    "epochs": Key(Form(Annotated[FiniteFloat, Field(gt=0, le=1e6)],
        "a number above 0, at most 1000000; without iters"), None,
        "Passes over the training data, in place of iters; fractions are allowed. Not in mlx-lm."),
    "grad_accumulation_steps": Key(COUNT, 1, "Iterations whose gradients are accumulated for one update."),
    "learning_rate": Key(Form(Literal["auto"] | POSITIVE.type, f"{POSITIVE.accepted}, or {AUTO}"), 1e-5,
        "Learning rate without a schedule. auto: by the scaling rule of the optimizer for this batch_size and "
        "grad_accumulation_steps, as `flightdeck plan` shows it; with batch_tokens for the mean number of sequences of "
        "an update. Not in mlx-lm."),
    "lr_schedule": Key(Form(_Schedule, "name and arguments ("
        + "; ".join(f"{name}: [{', '.join(each)}]" for name, each in SCHEDULE_ARGUMENTS.items())
        + "; cosine_decay also without the last rate; steps are 1 or more), and optionally warmup, warmup_init"), None,
        'Schedule, as in `{name = "cosine_decay", arguments = [1e-5, 1000], warmup = 100}`.'),
    "max_grad_norm": Key(POSITIVE, None, "Clip the norm of the global gradient to this value. Not in mlx-lm."),
    "wire": Key(one_of("auto", "float32", "int8"), "auto",
        'How gradients travel with strategy = "data": auto, in 16 bits where the weights have 16 and that is less, '
        "or else in float32; float32, always; int8, a quarter of float32, with what is rounded away added to the "
        'next update\'s gradient. With strategy = "local" changes of weights: auto, in 4 bits and a scale for each '
        "64; float32; int8. Not in mlx-lm."),
    "local_steps": Key(Form(Annotated[int, Field(ge=1, le=10_000)], "a whole number from 1 to 10000"), 16,
        'Updates of each rank by itself between two averagings with strategy = "local". Not in mlx-lm.'),
    "outer_learning_rate": Key(Form(Annotated[FiniteFloat, Field(gt=0, le=2)], "a number above 0, at most 2"), 0.7,
        'Factor of the averaged change with strategy = "local"; 1 with outer_momentum = 0 is plain averaging. Not in '
        "mlx-lm."),
    "outer_momentum": Key(Form(Annotated[FiniteFloat, Field(ge=0, lt=1)], "a number from 0 to below 1"), 0.5,
        'Nesterov momentum of the averaged changes with strategy = "local". Not in mlx-lm.'),
    "sharding": Key(one_of(AUTO, "full", "grad_op"), AUTO,
        'What strategy = "fsdp" frees: full, parameters after each pass of their block, too; grad_op, gradients and '
        "optimizer state alone. PyTorch only."),
    "zero_stage": Key(Form(Literal["auto", 1, 2, 3], '1, 2, 3 or "auto"'), AUTO,
        'What strategy = "deepspeed" partitions: the optimizer\'s state (1), gradients, too (2), and parameters, too '
        "(3). PyTorch only."),
    "offload": Key(one_of(AUTO, "none", "cpu", "nvme"), AUTO,
        "Where the optimizer's state is kept, and parameters where they are partitioned: on the GPU (none), in the "
        "machine's memory (cpu), or in files below nvme_path (DeepSpeed alone). PyTorch only."),
    "nvme_path": Key(TEXT, None, 'Folder on every node for offload = "nvme". PyTorch only.'),
    "precision": Key(one_of(AUTO, "fp32", "bf16", "fp16"), AUTO,
        "Type of the computation; trained weights and optimizer state stay in float32. auto: bf16 on GPUs from "
        "Ampere on, fp16 with loss scaling on older ones, else fp32. PyTorch only."),
    "max_seq_length": Key(Form(Annotated[int, Field(ge=2, lt=_BELOW)], "a whole number, 2 or more"), 2048,
        "Longest sequence, tokens."),
    "mask_prompt": Key(FLAG, False, "Exclude the prompt from the loss."),
    "lora_parameters": Key(Form(_LoraParameters,
        "rank (1 or more), dropout (0 to below 1), scale (no alpha: alpha / rank elsewhere, and scale · alpha / rank "
        "in mlx-lm before it dropped alpha), and optionally keys (module names)"),
        {"rank": 8, "dropout": 0.0, "scale": 20.0}, "Parameters of LoRA and DoRA."),
    "grad_checkpoint": Key(Form(bool | Literal["auto"] | _Count,
        'true or false for all layers or none, a whole number, 1 or more, or "auto"'), AUTO,
        "Layers of each rank whose activations are recomputed in the backward pass, to save memory."),
    "sequence_tiling": Key(Form(Literal["auto"] | _NotNegative, 'a whole number, 0 for none, or "auto"'), AUTO,
        "Tokens of each sequence that attention (where MLX does not do that itself) and MLPs compute at a time, and "
        "again in the backward pass, for long sequences. auto: where the job fits only with it. Not in mlx-lm."),
    "clear_cache_threshold": Key(
        Form(_NotNegative, 'bytes as a whole number, 0 or more, or as in "2GB" or "500MB" (10⁹ and 10⁶ bytes)'), 0,
        "Size of MLX's cache in bytes above which it is cleared; 0 means 1 GiB, and on a CUDA GPU all that is free."),
    "compile_on_cpu": Key(FLAG, False,
        "Have MLX build fused kernels where it computes on the CPU, too, if g++ is installed there. That takes about "
        "half a minute, once for each rank of a machine; then steps in float32 are about 5 % faster. Not in mlx-lm, "
        "which always does."),
    "val_batches": Key(Form(Annotated[int, Field(ge=-1, lt=_BELOW)], "a whole number, -1 for all, 0 for none"), 25,
        "Batches per validation."),
    "steps_per_eval": Key(COUNT, 200, "Iterations between two validations."),
    "save_best": Key(FLAG, False,
        "Also save the adapters or weights as best_adapters.safetensors after each validation that is better than "
        "all before it. Not in mlx-lm."),
    "patience": Key(COUNT, None,
        "End the training after this many validations in a row without a better loss. Not in mlx-lm."),
    "sample_prompts": Key(Form(Annotated[list[_Prompt], Field(min_length=1, max_length=8)],
        "a list of 1 to 8 strings, each of 1 to 2000 characters"), None,
        "Prompts that are answered greedily while it trains: before the first update, every sample_every iterations, "
        "and at the end. Where the data are texts, they are continued; else they go through the chat template. "
        "Answers in between are put off when all would take more than 5 % of the training time. Not in mlx-lm."),
    "sample_every": Key(COUNT, None,
        "Iterations between two answers to sample_prompts; by default steps_per_eval. Not in mlx-lm."),
    "sample_tokens": Key(Form(Annotated[int, Field(ge=1, le=256)], "a whole number from 1 to 256"), 32,
        "Longest answer to one of sample_prompts, tokens. Not in mlx-lm."),
    "steps_per_report": Key(COUNT, 10, "Iterations between two reports of the loss."),
    "save_every": Key(COUNT, 100, "Iterations between two saves of the adapters or weights."),
    "test": Key(FLAG, False, "Compute the test loss after training."),
    "test_batches": Key(COUNT_OR_ALL, 500, "Batches of the test."),
    "adapter_path": Key(TEXT, None, "Directory for the adapters or weights. By default the run's own directory."),
    "resume_adapter_file": Key(TEXT, None, "Adapters or weights to start from."),
    "report_to": Key(Form(_Reporters, "tensorboard, wandb, swanlab, or several separated by commas"), None,
        "Services to report to. This machine writes those of tensorboard and wandb from the run's metrics, into the "
        "run's own directory; rank 0 reports to swanlab."),
    "project_name": Key(TEXT, None, "Project at W&B and SwanLab."),
    "trust_remote_code": Key(FLAG, False, "Allow the tokenizer's own code to run."),
    "prompt_feature": Key(TEXT, _NO_DEFAULT, "Name of the prompt's field in the data."),
    "completion_feature": Key(TEXT, _NO_DEFAULT, "Name of the completion's field in the data."),
    "chat_feature": Key(TEXT, _NO_DEFAULT, "Name of the chat messages' field in the data."),
    "text_feature": Key(TEXT, _NO_DEFAULT, "Name of the text's field in the data."),
}  # fmt: skip

DEFAULTS: dict[str, Any] = {name: key.default for name, key in KEYS.items() if key.default is not _NO_DEFAULT}
"""The `*_feature` keys have no default: mlx-lm checks whether they are present."""

_OF_LORA = "lora_parameters = {{rank = 8, dropout = 0.0, scale = 20.0}}: this one is its {}"
FORMER_KEYS = {
    "lora_layers": "num_layers, as mlx-lm calls it today",
    "adapter_file": "adapter_path, the folder that adapters are saved in, or resume_adapter_file, those to start from",
    "use_dora": 'fine_tune_type = "dora", or "lora" for false',
    "train_type": "fine_tune_type",
    "wandb": 'report_to = "wandb", and the project in project_name',
    "weight_decay": "no value here: it is one of optimizer_config, as in {adamw = {weight_decay = 0.01}}",
    **dict.fromkeys(("gradient_accumulation_steps", "grad_accum_steps"), "grad_accumulation_steps"),
    **dict.fromkeys(("warmup", "warmup_steps"), "no value here: it is lr_schedule's warmup"),
    **{
        f"{lora}{name}": _OF_LORA.format(name)
        for lora in ("lora_", "")
        for name in ("rank", "dropout", "scale", "keys")
    },
    **dict.fromkeys(("lora_alpha", "alpha"), _OF_LORA.format("scale, as alpha / rank")),
    **dict.fromkeys(("prompt", "temp", "max_tokens"), "no value here: mlx_lm.generate generates text"),
}
"""Keys of earlier releases, and of files written for other trainers → what says the same today."""

_SAME = {"epochs": "iters", "batch_tokens": "batch_size", "hf_dataset": "data"}
SAME_KEYS = {**_SAME, **{usual: other for other, usual in _SAME.items()}}
"""A job has one or the other."""
SIZE_KEYS = ("clear_cache_threshold",)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*(?:([KMGT]?)B?)", re.IGNORECASE)


def in_bytes(size: object) -> object:
    """Bytes of a size as mlx_lm.lora's option takes it ("2GB", "1.5 g"); anything else as it is."""
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    return int(Decimal(match[1]) * _UNITS[match[2].upper()]) if match is not None else size


HEAD_TRACKERS = ("tensorboard", "wandb")
"""Services of report_to that the head writes."""


def services(report_to: object) -> tuple[str, ...]:
    """The services that a value of report_to names, each once."""
    return tuple(dict.fromkeys(name.strip() for name in report_to.split(","))) if isinstance(report_to, str) else ()


LOCAL_KEYS = ("local_steps", "outer_learning_rate", "outer_momentum")
"""Those of strategy "local" alone."""
TORCH_KEYS = ("sharding", "zero_stage", "offload", "nvme_path", "precision")
"""Those of framework "torch" alone."""
SAMPLE_KEYS = ("sample_prompts", "sample_every", "sample_tokens")
_OF_MLX = ("optimizer_precision", "moments", "sequence_tiling", "wire", "compile_on_cpu", "clear_cache_threshold")
MLX_KEYS = (*_OF_MLX, *LOCAL_KEYS, *SAMPLE_KEYS)
"""Those of framework "mlx" alone."""
TORCH_OPTIMIZERS = ("adam", "adamw", "sgd")
"""The optimizers that the trainer for PyTorch has; others are MLX's alone."""


def full_sequences(settings: Mapping[str, Any], least: int = 1) -> int:
    """batch_size; with batch_tokens as many sequences of full length as it has, and at least so many."""
    batch_size, tokens = settings.get("batch_size"), settings.get("batch_tokens")
    if batch_size is None and tokens is not None:
        return max(least, int(tokens) // int(settings["max_seq_length"]))
    return int(batch_size or least)


def with_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """All keys, with defaults for those not given; no iters with epochs, no batch_size with batch_tokens. null counts
    as not given, as in mlx-lm."""
    present = {key: value for key, value in given.items() if value is not None}
    # All of them for full fine-tuning: mlx-lm's 16 refuses models with fewer layers.
    fill = DEFAULTS | ({"num_layers": -1} if present.get("fine_tune_type") == "full" else {})
    absent = {SAME_KEYS[key] for key in ("epochs", "batch_tokens") if key in present}
    return deepcopy({key: value for key, value in fill.items() if key not in absent}) | present
