"""The training job as the trainer uses it: mlx-lm's keys with mlx-lm's defaults, and a few of ours; and
the ds_config.json of one."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal

from engine.protocol.partition import COORDINATOR_CHUNK_SIZE

Framework = Literal["mlx", "torch"]
Strategy = Literal["data", "sharded", "pipeline", "local", "auto", "ddp", "fsdp", "deepspeed"]
DataFormat = Literal["auto", "chat", "sharegpt", "alpaca", "completions", "preference", "text"]
DataColumn = Literal[
    "prompt", "completion", "messages", "text", "chosen", "rejected", "system", "input", "tools", "role", "content"
]
AUTO: Final = "auto"
"""The plan chooses."""
STRATEGIES: Final[dict[Framework, tuple[Strategy, ...]]] = {
    "mlx": ("data", "sharded", "pipeline", "local"),
    "torch": (AUTO, "ddp", "fsdp", "deepspeed"),
}
"""Those that each framework has; the first one is the default."""
OPTIMIZER_PRECISIONS = ("float32", "kahan", "stochastic", "parameter")
"""How trained weights of 16 bits are kept, the most precise first; those of float32 are the same in each.

"float32": beside a float32 master. "kahan": with the 16 bits that a float32 master has more. "stochastic": alone, each
update rounded up or down at random, so that small steps add up in the mean. "parameter": alone, rounded to the nearest
and computed in their own type, as stock mlx-lm does: small steps are lost."""
MOMENTS = ("float32", "bfloat16", "8bit")
"""Types of the optimizer's moments, the most precise first. With optimizer_precision "parameter", "float32" stands for
the weights' own type, as in stock mlx-lm."""
MOST_PRECISE_FIRST = (
    ("float32", "float32"),
    ("kahan", "float32"),
    ("kahan", "bfloat16"),
    ("kahan", "8bit"),
    ("stochastic", "8bit"),
)
"""Pairs of optimizer_precision and moments worth choosing for weights of 16 bits: each takes less memory than the one
before, and no other pair is as small and more precise."""
MOMENT_BLOCK = 64
"""Neighbouring elements of an 8-bit moment that share one float32 scale."""

ELEMENTWISE = ("adam", "adamw", "sgd")
"""Optimizers whose step of one element does not depend on the others, so that a parameter is updated in parts."""

_LORA = {"rank": 8, "dropout": 0.0, "scale": 20.0}


class JobError(ValueError):
    """The job cannot be trained as configured: one line that says what, where and what to do."""


@dataclass(frozen=True)
class Job:
    """One training job: the keys of engine.config.mlx_lm_keys, which has their meanings. Sizes and counts are mlx-lm's:
    batch_size is global, iters counts micro-batches."""

    model: Path
    data: Path
    adapter_path: Path
    home: Path
    """The run's folder on this node."""
    fine_tune_type: str = "lora"
    strategy: str = "data"
    layer_split: str | None = None
    """Each rank's layers in a pipeline, such as "0-8,8-36"; None: by the ranks' memory."""
    optimizer: str = "adam"
    optimizer_config: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    num_layers: int | None = None
    """Layers to train, counted from the last; -1: all. None: 16 as in mlx-lm, or all for "full"."""
    batch_size: int = 4
    batch_tokens: int | None = None
    """Padded inputs of a global batch, in place of batch_size."""
    iters: int = 1000
    """With `epochs`, the trainer computes it from its dataset."""
    epochs: float | None = None
    val_batches: int = 25
    learning_rate: float = 1e-5
    rate_by_rule: bool = False
    """learning_rate is "auto" where it depends on the examples, which the trainer has."""
    steps_per_report: int = 10
    steps_per_eval: int = 200
    save_best: bool = False
    patience: int | None = None
    resume_adapter_file: str | None = None
    sample_prompts: list[str] | None = None
    sample_every: int | None = None
    sample_tokens: int = 32
    save_every: int = 100
    test: bool = False
    test_batches: int = 500
    max_seq_length: int = 2048
    grad_checkpoint: bool | int = False
    sequence_tiling: int = 0
    """Tokens of a tile; 0: none."""
    grad_accumulation_steps: int = 1
    clear_cache_threshold: int = 0
    """Bytes of freed memory that MLX may keep; 0: 1 GiB."""
    compile_on_cpu: bool = False
    lr_schedule: dict[str, Any] | None = None
    lora_parameters: dict[str, Any] = field(default_factory=lambda: dict(_LORA))
    mask_prompt: bool = False
    prompt_feature: str = "prompt"
    completion_feature: str = "completion"
    chat_feature: str = "messages"
    text_feature: str = "text"
    report_to: str | None = None
    project_name: str | None = None
    trust_remote_code: bool = False
    max_grad_norm: float | None = None
    optimizer_precision: str = AUTO
    """One of OPTIMIZER_PRECISIONS. "auto", where no plan has resolved it: "float32"."""
    moments: str = AUTO
    """One of MOMENTS. "auto", where no plan has resolved it: "float32"."""
    wire: str = "auto"
    local_steps: int = 16
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.5
    chunking: bool = True
    """A split of chunk_size examples or more is streamed in chunks of that size."""
    chunk_size: int = COORDINATOR_CHUNK_SIZE
    data_options: dict[str, Any] = field(default_factory=dict)
    """The keys that [data] sets, for engine.node.standard_data."""

    @classmethod
    def from_spec(cls, raw: dict[str, Any], *, model: str | None, data: str | None, workdir: Path, home: Path) -> Job:
        """The job of one rank. `model` and `data`: this node's paths; paths are relative to `workdir`. The adapter goes
        below `home` unless the job names a path. engine.config has validated all other values. Raises JobError for a
        directory that is not set, or not on this node."""
        names = {entry.name for entry in fields(cls)}
        chosen = {key: value for key, value in raw.items() if key in names and value is not None}
        for key, path in (("model", model or raw.get("model")), ("data", data or raw.get("data"))):
            if not path:
                raise JobError(f"[job] {key} is not set: name a local directory")
            chosen[key] = workdir / Path(str(path)).expanduser()
        adapter_path = raw.get("adapter_path")
        chosen["adapter_path"] = workdir / Path(adapter_path).expanduser() if adapter_path else home / "adapters"
        chosen["home"] = home
        for key in ("grad_checkpoint", "sequence_tiling"):
            if chosen.get(key) == AUTO:
                del chosen[key]
        if chosen.get("learning_rate") == AUTO:
            del chosen["learning_rate"]
            chosen["rate_by_rule"] = True
        chosen["lora_parameters"] = {**_LORA, **(raw.get("lora_parameters") or {})}
        job = cls(**chosen)
        if not job.model.is_dir():
            raise JobError(f"the model {job.model} is not a directory on this node")
        if not job.data.exists():
            raise JobError(f"the data {job.data} is not a directory on this node, nor a file")
        return job

    @property
    def features(self) -> dict[str, str]:
        """Part of a row → its key, as engine.protocol.jsonl names them."""
        return {name: getattr(self, f"{name}_feature") for name in ("prompt", "completion", "chat", "text")}

    def validates_before(self, iteration: int) -> bool:
        """A validation is due before `iteration`, where there is something to validate on."""
        if self.val_batches == 0:
            return False
        return iteration in (1, self.iters) or iteration % self.steps_per_eval == 0

    def layers(self, available: int) -> int:
        """Layers to train of a model with `available`: -1, or at most that many."""
        layers = self.num_layers if self.num_layers is not None else (-1 if self.fine_tune_type == "full" else 16)
        return -1 if layers < 0 else min(layers, available)


@dataclass(frozen=True)
class TorchSettings:
    """How the ranks of a PyTorch job divide the training state, and in which precision they compute: the keys of [job]
    for this framework, with each "auto" resolved by the plan."""

    sharding: str = "full"
    """With fsdp: "full" frees a block's parameters after its forward pass (reshard_after_forward, FULL_SHARD);
    "grad_op" keeps them until after its backward pass (SHARD_GRAD_OP)."""
    zero_stage: int = 2
    """With deepspeed, partitioned are the optimizer's state (1), gradients, too (2), and parameters, too (3)."""
    offload: str = "none"
    """Where the optimizer's state is, and parameters where they are partitioned: "none" (the GPU), "cpu" or "nvme"."""
    nvme_path: str | None = None
    """Folder on the node, for offload = "nvme"."""
    precision: str = "fp32"
    """"fp32", "bf16", or "fp16" with loss scaling: the type of the computation; trained weights and the optimizer's
    state are kept in float32."""

    @classmethod
    def from_spec(cls, raw: dict[str, Any]) -> TorchSettings:
        return cls(**{entry.name: raw[entry.name] for entry in fields(cls) if raw.get(entry.name) not in (None, AUTO)})


def state_bytes(precision: str, moments: str, element_bytes: int, moments_per_element: int = 2) -> float:
    """Bytes of optimizer state per trained element beside the model's own weight of `element_bytes`: the master or the
    compensation, and moments with their scales. `moments_per_element`: those of the parameter's shape, 2 for Adam."""
    beside = {"float32": 4, "kahan": 2}.get(precision, 0) if element_bytes < 4 else 0
    full = element_bytes if precision == "parameter" else 4
    moment_bytes = {"float32": full, "bfloat16": 2, "8bit": 1 + 4 / MOMENT_BLOCK}[moments]
    return beside + moments_per_element * moment_bytes


ScalingRule = Literal["linear", "sqrt"]


@dataclass(frozen=True)
class BaseRate:
    """A learning rate that is known to work at a total batch size."""

    batch: int
    learning_rate: float
    source: str


BASE_RATES: dict[ScalingRule, BaseRate] = {
    "linear": BaseRate(64, 1e-3, "Goyal et al. 2017, Accurate, Large Minibatch SGD: the rate grows with the batch"),
    "sqrt": BaseRate(1, 1e-5, "Krizhevsky 2014; Malladi et al. 2022 for Adam: the rate grows with the batch's root"),
}


def scaling_rule(optimizer: str) -> ScalingRule:
    """Optimizers that normalise by the gradient's magnitude scale with the square root of the batch."""
    return "linear" if optimizer == "sgd" else "sqrt"


def scaled_rate(total: float, rule: ScalingRule) -> float:
    """The rule's learning rate at a batch of `total` sequences.

    linear: lr · total/batch (64 at 0.001 → 512 at 0.008). sqrt: lr · √(total/batch) (1 at 1e-5 → 8 at 2.8e-5)."""
    base = BASE_RATES[rule]
    ratio = total / base.batch
    return base.learning_rate * (ratio if rule == "linear" else math.sqrt(ratio))


def is_plain(precision: str, moments: str) -> bool:
    """An optimizer's state of this form is neither packed nor rounded at random."""
    return precision in ("float32", "parameter") and moments == "float32"


def update_elements(elements: int) -> int:
    """How many of so many trained elements an update computes at once: enough to be worth an evaluation, and few
    beside the model, since each takes up to 22 float32 numbers meanwhile."""
    return min(max(elements // 256, 2**16), 2**24) // MOMENT_BLOCK * MOMENT_BLOCK


def config_hash(raw: dict[str, Any]) -> str:
    """SHA-256 of the job as the head wrote it: equal on all ranks of all attempts. It does not depend on the layer
    split, so that another number of ranks can resume with another split; nor on tiles; nor on the form of the
    optimizer's state, which a saved state shows itself; nor on what it is asked meanwhile; nor on how the ranks of a
    PyTorch job divide it."""
    left_out = {"layer_split", "sequence_tiling", "optimizer_precision", "moments"}
    left_out |= {"sample_prompts", "sample_every", "sample_tokens"}
    if raw.get("framework") == "torch":
        left_out |= {"strategy", "grad_checkpoint", *(entry.name for entry in fields(TorchSettings))}
    job = {key: value for key, value in raw.items() if key not in left_out}
    return hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()


DEEPSPEED_CONFIG_ENV = "FLIGHTDECK_DEEPSPEED_CONFIG"
"""The path of a ds_config.json that the trainer takes instead of its own configuration."""
BUCKET_ELEMENTS = 200_000_000
"""Elements of one bucket of gradients (reduce_bucket_size) or of parameters, the size in DeepSpeed's own examples."""


def deepspeed_config(
    settings: TorchSettings, *, micro_batch: int, accumulation: int, world_size: int, max_grad_norm: float | None
) -> dict[str, Any]:
    """The content of ds_config.json, for DeepSpeed's own tools and the trainer. Keys and meanings:
    https://www.deepspeed.ai/docs/config-json/. `micro_batch`: sequences per rank and iteration. Any precision but
    "bf16" and "fp16" is float32."""
    stage, offload = settings.zero_stage, settings.offload
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": BUCKET_ELEMENTS,
    }
    if stage < 3:
        zero["allgather_bucket_size"] = BUCKET_ELEMENTS
    else:
        # In full when saved, so that what was trained loads elsewhere.
        zero |= {"stage3_prefetch_bucket_size": BUCKET_ELEMENTS // 4, "stage3_gather_16bit_weights_on_model_save": True}
    if offload != "none":
        place: dict[str, Any] = {"device": offload, "pin_memory": True}
        if offload == "nvme":
            place["nvme_path"] = settings.nvme_path
        zero["offload_optimizer"] = place
        if stage == 3:
            zero["offload_param"] = dict(place)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": micro_batch * accumulation * world_size,
        "zero_optimization": zero,
        # Optimizers of PyTorch and ours, not DeepSpeed's own.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # 0 is none; without the key Accelerate clips to 1.
        "gradient_clipping": max_grad_norm or 0.0,
    }
    if settings.precision in ("bf16", "fp16"):
        # Gradients travel compressed to 16 bits; it is DeepSpeed's default, too.
        config["communication_data_type"] = settings.precision
        # 0: the scale is dynamic.
        config[settings.precision] = {"enabled": True, **({"loss_scale": 0} if settings.precision == "fp16" else {})}
    return config
