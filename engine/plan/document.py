"""The training plan document, version 2.0.0, which `flightdeck plan` prints and every run stores, and the rationale
that explains it. Other programs read the first sections, so their keys are fixed. null means "unknown", with the reason
in `reasons`. Sizes are bytes, `*_s` seconds, and batches count sequences."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, Literal

from pydantic import ConfigDict, computed_field

from engine.errors import plural
from engine.models import CheckStatus, FrozenModel, PreRdmaSync, WorkerConsistency
from engine.plan.data_report import DataFindings, IfdScore
from engine.protocol.job import Strategy


class Source(StrEnum):
    """Origin of a value."""

    FACT = "fact"
    """Reported by a node."""
    CALIBRATION = "calibration"
    """Measured by `flightdeck calibrate`."""
    RULE = "rule"
    """Derived from other values; the reason names the rule."""
    USER = "user"
    """Set in the configuration."""
    DEFAULT = "default"
    """Default of mlx-lm or Flight Deck."""
    UNKNOWN = "unknown"
    """The value is null; the reason explains why."""


class ChoiceReason(FrozenModel):
    key: str
    """Path in the document: "batch_configuration.learning_rate"."""
    source: Source
    reason: str
    """One sentence."""


OVERRIDE: Final = "flightdeck launch --skip hardware_layer"


class PlanIssue(FrozenModel):
    """A named warning or refusal."""

    name: str
    text: str
    override: str | None = None
    """Command that launches anyway."""
    todo: str | None = None
    """The part of the text that says what would help."""


@dataclass(frozen=True)
class Rationale:
    """Reasons, warnings and refusals, collected while the sections of a plan are made, in their order."""

    reasons: list[ChoiceReason] = field(default_factory=list)
    warnings: list[PlanIssue] = field(default_factory=list)
    refusals: list[PlanIssue] = field(default_factory=list)

    def explain(self, key: str, source: Source, reason: str) -> None:
        self.reasons.append(ChoiceReason(key=key, source=source, reason=reason))

    def warn(self, name: str, text: str) -> None:
        self.warnings.append(PlanIssue(name=name, text=text))

    def refuse(self, name: str, text: str, override: str | None = None, todo: str | None = None) -> None:
        whole = f"{text}; {todo}" if todo else text
        self.refusals.append(PlanIssue(name=name, text=whole, override=override, todo=todo))


VERSION: Final = "2.0.0"
FIRST_SECTIONS: Final = (
    "strategy", "batch_configuration", "distributed_config", "rdma_config", "checkpoint_strategy",
    "performance_targets", "verification_steps",
)  # fmt: skip
"""All sections of version 1."""


class Disabled(FrozenModel):
    """A section that is switched off or does not apply."""

    enabled: Literal[False] = False
    reason: str


NOT_TORCH: Final = Disabled(reason="the job's framework is mlx")


class StrategySection(FrozenModel):
    approach: str
    total_gpus: int
    """World size: on Apple silicon each process drives one GPU."""
    nodes: int
    """Number of machines."""
    gpus_per_node: int | None
    """Ranks per machine; null if they differ."""
    parallelism: str
    """ "data", "sharded", "pipeline" or "local"; with PyTorch "ddp", "fsdp", "deepspeed" or "the script's own"."""
    layer_split: str | None
    """Layers of each pipeline rank as half-open ranges: "0-8,8-36"."""
    world_size: int
    bubble: float | None = None
    """Share of a pipeline step that a stage spends waiting."""
    pipeline_micro_batches: int | None = None
    local_steps: int | None = None
    """Updates of each rank by itself between two averagings; null but with local."""
    averaging_bytes: int | None = None
    """Sent by a rank other than 0 for an averaging; it gets as many back."""
    averaging_s: float | None = None
    """Duration of an averaging."""


class SuggestedBatch(FrozenModel):
    """The batch that the rules would choose; a launch uses the job's own."""

    per_gpu_batch_size: int
    gradient_accumulation_steps: int
    total_batch_size: int
    learning_rate: float
    learning_rate_rule: str
    warmup_steps: int | None
    warmup_epochs: float | None
    job_keys: str
    """Lines for [job], which `flightdeck plan --apply` writes. A job's own lr_schedule stays."""


class ChosenSettings(FrozenModel):
    """The keys of [job] that may be "auto", as the trainer gets them."""

    optimizer_precision: str = "float32"
    moments: str = "float32"
    grad_checkpoint: bool | int = False
    """Trained layers of each rank that are recomputed in the backward pass, from its first; true: all."""
    sequence_tiling: int = 0
    """Tokens of each sequence that attention and MLPs compute at a time; 0: all."""

    @property
    def text(self) -> str:
        count = self.grad_checkpoint
        layers = f", {'all layers' if count is True else plural(count, 'layer')} recomputed" if count else ""
        layers += f", in tiles of {self.sequence_tiling:,} tokens" if self.sequence_tiling else ""
        return f"optimizer_precision {self.optimizer_precision}, moments {self.moments}{layers}"


class ChosenTorchSettings(FrozenModel):
    """The keys of a PyTorch job that may be "auto", as the trainer gets them."""

    strategy: Strategy = "ddp"
    sharding: str = "full"
    zero_stage: int = 2
    offload: str = "none"
    precision: str = "fp32"
    grad_checkpoint: bool = False
    """All layers are recomputed in the backward pass."""

    @property
    def text(self) -> str:
        kind = {"fsdp": f" ({self.sharding})", "deepspeed": f" (ZeRO-{self.zero_stage})"}.get(self.strategy, "")
        offloaded = f", offloaded to {self.offload}" if self.offload != "none" else ""
        recomputed = ", layers recomputed" * self.grad_checkpoint
        return f"{self.strategy}{kind}, {self.precision}{offloaded}{recomputed}"


Settings = ChosenSettings | ChosenTorchSettings


class PaddingSection(FrozenModel):
    """How the batches are padded, from the lengths of some rows of the training data."""

    batch_tokens: int | None
    """The job's budget; null with batch_size."""
    real_share: float
    """Tokens of the examples over those computed, 0 to 1."""
    largest_step: tuple[int, int]
    """Sequences of the largest global batch, and tokens to which each is padded."""
    sequences_per_batch: float
    """The mean."""
    suggested_batch_tokens: int
    """The job's own, or in its place the one with as many updates; at most what fits."""
    suggested_real_share: float


class BatchSection(FrozenModel):
    """Batch and learning rate, as set in the job. With batch_tokens, numbers of sequences are means."""

    per_gpu_batch_size: int | float | None
    """Mean of `micro_batch`; an integer if the shares are equal."""
    total_batch_size: int | None
    """Sequences per update: per_gpu_batch_size · ranks · gradient_accumulation_steps."""
    gradient_accumulation_steps: int | None
    learning_rate: float | None
    """The highest rate of a schedule."""
    warmup_epochs: float | None
    micro_batch: dict[str, int] | None
    """Sequences of the global batch by node."""
    learning_rate_rule: str | None
    """How the rate of this optimizer scales with the batch: "linear" or "sqrt"."""
    base_learning_rate: float | None
    """Learning rate of the rule at `base_batch_size`."""
    base_batch_size: int | None
    rule_learning_rate: float | None
    """Learning rate of the rule at total_batch_size."""
    warmup_steps: int | None
    """Updates."""
    updates: int | None
    """Updates in the whole run."""
    epochs: float | None
    """Passes through the data in the whole run."""
    largest_per_gpu_batch_size: int | None
    """Largest batch per rank that fits every node according to the memory estimate."""
    suggested: SuggestedBatch | None
    padding: PaddingSection | None = None
    """Null where no row's length is known."""


class PlannedHostfile(FrozenModel):
    path: str | None
    """Where it was written on this machine."""
    document: dict[str, Any]


class Launching(FrozenModel):
    """How to start the ranks by hand."""

    mlx_launch_command: str | None = None
    """Shell command for this machine, with stock mlx.launch and stock mlx-lm."""
    hostfile: PlannedHostfile | None = None
    launch_notes: tuple[str, ...] = ()
    """How the command differs from `flightdeck launch`, or why it is null."""


class DistributedSection(Launching):
    gradient_sync: str
    unified_memory: bool | None
    mlx_env_vars: dict[str, str]
    """Variables that `flightdeck launch` sets for every rank."""


class RdmaSection(FrozenModel):
    enabled: bool
    platform: str
    """ "apple", "cuda" or "cpu"."""
    backend: str | None
    network: str | None
    """ "Thunderbolt" (RDMA), "InfiniBand", "TCP" or "none"; null if the ranks cannot be connected."""
    expected_speedup: float | None
    """Throughput of all ranks over that of the fastest node alone, calibrated with this backend."""
    env_vars: dict[str, str]
    """NCCL variables that `flightdeck launch` sets for every rank, and MLX's own that the job sets."""
    setup: tuple[str, ...]
    """Manual steps to run once."""
    reason: str
    latency_s: float | None = None
    """Measured latency of a small all_sum over all ranks."""
    bandwidth_bytes_per_s: float | None = None


class CheckpointSection(FrozenModel):
    approach: Literal["FlashRecovery"] = "FlashRecovery"
    async_: bool
    compression: str
    storage: str | None
    frequency: int | None
    """Iterations between two saves, as set in the job."""
    retention: str = "last_3_checkpoints"
    expected_recovery_time: float | None
    """Seconds from a failure to the first step after it, as measured in earlier runs of this job on this cluster."""
    suggested_frequency: int | None

    model_config = ConfigDict(alias_generator=lambda name: name.rstrip("_"), populate_by_name=True)


class PerformanceSection(FrozenModel):
    throughput: float | None
    """Samples per second over all ranks."""
    gpu_utilization: str = ">80%"
    checkpoint_overhead: str = "<5%"
    """These two are targets: neither measured nor predicted."""
    tokens_per_second: float | None
    step_s: float | None
    speed_up: float | None
    """Throughput over that of the fastest node alone."""
    efficiency: float | None
    """Throughput over the sum of all nodes running alone."""
    duration_s: float | None
    """Duration of all iterations, without validation and saving."""


class MeasuredNode(FrozenModel):
    """The part of engine.measurements.NodeMeasure that a plan shows."""

    spread: float | None
    tokens_per_s: float | None
    problem: str | None


class CalibrationSection(FrozenModel):
    enabled: Literal[True] = True
    measured_performance: dict[str, float | None]
    """Examples per second of each node alone; null if it was not measured."""
    measured_details: dict[str, MeasuredNode]
    workload_distribution: dict[str, float]
    """Share of the batch by node; they sum to 1."""
    macos_qos_api: str
    calibration_notes: tuple[str, ...]
    taken_at: datetime
    age_days: float


class NoCalibrationSection(Disabled):
    """Not calibrated; the shares are assumed."""

    workload_distribution: dict[str, float]
    macos_qos_api: str
    calibration_notes: tuple[str, ...]


class ReplicaWatch(FrozenModel):
    """Comparison of the replicas during training."""

    enabled: Literal[True] = True
    every_updates: int
    staleness_threshold: int
    staleness_rule: str
    """The measure compared with the threshold, since ranks in lockstep are never updates apart."""
    loss_spread_threshold: float
    wasserstein_threshold: float
    byzantine_rule: str
    on_corruption: str


class ConsistencySection(WorkerConsistency):
    """Comparison of the workers before the launch and during training."""

    workers: int
    validation_checks: tuple[str, ...]
    """The compared files."""
    byzantine_detection: bool
    """The ranks' losses and gradient norms are compared while they train."""
    while_training: ReplicaWatch | Disabled


class ChunkingSection(FrozenModel):
    enabled: Literal[True] = True
    dataset_size: int
    chunk_size: int
    num_chunks: int
    memory_management: str
    progress_reporting: str
    """Progress text of the first chunk."""


class PlannedCheck(FrozenModel):
    name: str
    what: str
    overridden: bool
    status: CheckStatus = CheckStatus.PENDING
    """ "pending" in a plan that is not a run's, and before its preflight has ended."""
    summary: str = ""


class ChecklistSection(FrozenModel):
    validation_layers: tuple[str, ...]
    """Names of the checks that are not overridden."""
    block_on_failure: Literal[True] = True
    """A check that fails and is not overridden blocks the launch."""
    overall_status: CheckStatus = CheckStatus.PENDING
    checks: tuple[PlannedCheck, ...]


class MemoryBreakdown(FrozenModel):
    """Memory that one rank needs."""

    weights_bytes: int
    """Weights as stored, adapters included."""
    gradients_bytes: int
    """Gradients alive at once before the update; 0 where each is applied as it is computed."""
    optimizer_bytes: int
    """Masters or compensation of 16-bit weights, and the optimizer's moments; with local also the last averaged weights
    and the momentum of their changes."""
    activations_bytes: int
    """Kept for the backward pass, and its working memory, without the logits."""
    logits_bytes: int
    """Added to that at the peak by the gradient of the loss: several arrays of tokens × vocabulary."""
    communication_bytes: int
    """Buffers of the exchange: a bucket of gradients (data), two gathered sections and the gradients of one (sharded),
    or the encoded changes of all weights (local)."""
    update_bytes: int
    """Working memory of the optimizer's step, of which a piece of the parameters is computed at once."""
    reserve_bytes: int
    """Memory of the process outside MLX's live arrays."""
    peak_bytes: int
    """MLX's peak: the larger of the backward pass and the update, each with the state alive at that time."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def needed_bytes(self) -> int:
        """Peak plus reserve."""
        return self.peak_bytes + self.reserve_bytes


class RankMemory(MemoryBreakdown):
    node: str
    source: Literal["estimate", "calibration"]
    """The peak's: config.json, or a measurement."""
    limit_bytes: int | None
    limit_from: str
    fits: bool | None
    """null if the limit is unknown."""


class WayOut(FrozenModel):
    """A change with which the job fits every node."""

    change: str
    """As it is written: "grad_checkpoint = true"."""
    needed_bytes: int
    """Memory of the rank that needs the most then."""


class MemorySection(FrozenModel):
    enabled: Literal[True] = True
    parameters: int
    trainable_parameters: int
    trainable_share: float
    layers: int
    assumptions: tuple[str, ...]
    ranks: tuple[RankMemory, ...]
    ways_out: tuple[WayOut, ...] = ()
    """Empty where the job fits."""
    attention: dict[str, str] | None = None
    """By node: MLX's own gradient from tiles of the scores is used, or why not."""


class TorchCandidate(FrozenModel):
    """One strategy, with the job's precision and recomputation, and what the rank that needs the most would need."""

    name: str
    """As people call it: "FSDP full, cpu offload"."""
    strategy: str
    sharding: str | None
    """null but with fsdp."""
    zero_stage: int | None
    """null but with deepspeed."""
    offload: str
    needed_bytes: int
    """On the GPU, or in all on the CPU; the reserve included."""
    host_bytes: int
    """Bytes of the machine's memory besides: to load the model, or for what is offloaded, whichever takes more."""
    fits: bool | None
    """null if a limit is unknown."""
    chosen: bool


class TorchSection(FrozenModel):
    """A PyTorch job: `settings` says what the trainer gets; this is how it comes about, and what other tools take."""

    enabled: Literal[True] = True
    strategy: str | None
    precision: str | None
    """null like the strategy where they are the script's own: `settings` has the reason."""
    on_gpu: bool
    gpus: dict[str, str | None]
    """By node; null where it is not known, {} on the CPU."""
    candidates: tuple[TorchCandidate, ...]
    """Empty where the memory is unknown."""
    gradient_accumulation_steps: int | None
    """Target batch / (batch per GPU · GPUs), rounded up."""
    wrap_classes: tuple[str, ...]
    """Block classes that FSDP wraps; empty for other strategies, and where the model itself names them."""
    prefetch: str
    activation_checkpointing: bool | None
    """null for a custom command."""
    checkpoint_format: str
    backend: str | None
    interfaces: dict[str, str | None]
    """By node; null where it is not known."""
    infiniband: bool
    files: dict[str, str]
    """Name -> text; `flightdeck plan --write DIR` writes them."""
    commands: dict[str, str]
    """Launcher -> the command to paste."""
    notes: tuple[str, ...]
    """How these differ from `flightdeck launch`."""


class PlannedAdvice(FrozenModel):
    name: str
    text: str
    source: str
    disputed: bool = False
    override: str | None = None


class PlannedNode(FrozenModel):
    rank: int
    node: str
    host: str
    chip: str | None
    memory_bytes: int | None
    share: float | None
    validates: bool = True
    """Takes part in validation and test."""
    facts_age_s: float | None
    """null if the node was never probed."""
    problem: str | None
    """Why the node did not respond."""


class DataSection(FrozenModel):
    examples: int | None
    source: str


class DataQualitySection(DataFindings, IfdScore):
    enabled: Literal[True] = True


class TrainingPlan(FrozenModel):
    version: Literal["2.0.0"] = VERSION
    strategy: StrategySection
    batch_configuration: BatchSection
    distributed_config: DistributedSection
    rdma_config: RdmaSection
    checkpoint_strategy: CheckpointSection
    performance_targets: PerformanceSection
    verification_steps: tuple[str, ...]
    pre_rdma_sync: PreRdmaSync
    hardware_calibration: CalibrationSection | NoCalibrationSection
    worker_consistency: ConsistencySection
    coordinator_chunking: ChunkingSection | Disabled
    pre_flight_checklist: ChecklistSection
    cluster: str
    job: str
    made_at: datetime
    nodes: tuple[PlannedNode, ...]
    settings: ChosenSettings | ChosenTorchSettings | Disabled
    memory: MemorySection | Disabled
    torch: TorchSection | Disabled = NOT_TORCH
    data: DataSection
    data_quality: DataQualitySection | Disabled
    advice: tuple[PlannedAdvice, ...]
    warnings: tuple[PlanIssue, ...]
    refusals: tuple[PlanIssue, ...]
    """Reasons against launching it; empty if it can be launched."""
    reasons: tuple[ChoiceReason, ...]
    """Reason of each choice, in the order of the document."""

    @property
    def refused(self) -> bool:
        return bool(self.refusals)

    @property
    def chosen(self) -> dict[str, Any]:
        """The values that it gives to keys, as --set names them, for which a configuration says "auto" or nothing."""
        settings = {} if isinstance(self.settings, Disabled) else self.settings.model_dump()
        backend = self.rdma_config.backend if self.strategy.total_gpus > 1 else None
        return {**settings, "layer_split": self.strategy.layer_split, "cluster.backend": backend}

    def document(self, form: Literal["v1", "v2"] = "v2") -> dict[str, Any]:
        """JSON values; "v1" has only the first seven sections and no version."""
        whole: dict[str, Any] = self.model_dump(mode="json", by_alias=True)
        return {name: whole[name] for name in FIRST_SECTIONS} if form == "v1" else whole
