"""The training plan, version 2.0.0: the document that `flightdeck plan` prints and that lies beside every run.

The keys of the first sections are fixed: others read them. A null says "not known", and `reasons` says why. Sizes are
bytes, `*_s` seconds, counts of sequences where "batch" is said.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict

from engine.models import PreRdmaSync, WorkerConsistency
from engine.planning.notes import Named, Reason

VERSION: Final = "2.0.0"
FIRST_SECTIONS: Final = (
    "strategy",
    "batch_configuration",
    "distributed_config",
    "rdma_config",
    "checkpoint_strategy",
    "performance_targets",
    "verification_steps",
)
"""All that the older document had."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class Disabled(_Part):
    """A part that was switched off, or does not apply."""

    enabled: Literal[False] = False
    reason: str


class StrategyPart(_Part):
    approach: str
    total_gpus: int
    """World size: on Apple one process drives one GPU."""
    nodes: int
    """Machines."""
    gpus_per_node: int | None
    """Ranks of each machine; None when they have not equally many."""
    parallelism: str
    """ "data", "sharded" or "pipeline"."""
    layer_split: str | None
    """Of a pipeline, per rank a half-open range: "0-8,8-36"."""
    world_size: int
    bubble: float | None = None
    """Of a pipeline: the part of a step in which a stage waits."""
    pipeline_micro_batches: int | None = None
    launchable: bool
    """Whether this release can launch it."""
    not_launchable: str | None = None
    """Why not."""


class SuggestedBatch(_Part):
    """What the rules would choose; the launch does what the job says."""

    per_gpu_batch_size: int
    gradient_accumulation_steps: int
    total_batch_size: int
    learning_rate: float
    learning_rate_rule: str
    warmup_steps: int | None
    warmup_epochs: float | None
    job_keys: str
    """The lines of [job] that choose it."""


class BatchPart(_Part):
    """What is trained with, as the job says."""

    per_gpu_batch_size: int | float | None
    """Mean of `micro_batch`: whole where the shares are equal."""
    total_batch_size: int | None
    """Sequences of an update: per_gpu_batch_size · ranks · gradient_accumulation_steps."""
    gradient_accumulation_steps: int | None
    learning_rate: float | None
    """At its highest where there is a schedule."""
    warmup_epochs: float | None
    micro_batch: dict[str, int] | None
    """Node → its sequences of a global batch."""
    learning_rate_rule: str | None
    """By which this optimizer's rate grows with the batch: "linear" or "sqrt"."""
    base_learning_rate: float | None
    """Of that rule, at `base_batch_size`."""
    base_batch_size: int | None
    rule_learning_rate: float | None
    """What the rule gives for total_batch_size."""
    warmup_steps: int | None
    """Updates."""
    updates: int | None
    """Of the whole run."""
    epochs: float | None
    """Passes through the data, of the whole run."""
    largest_per_gpu_batch_size: int | None
    """That fits every node by the memory estimate."""
    suggested: SuggestedBatch | None


class HostfilePart(_Part):
    path: str | None
    """Where `flightdeck plan` has written it, on this machine."""
    document: dict[str, Any]


class DistributedPart(_Part):
    mlx_launch_command: str | None
    """For a shell on this machine; stock mlx.launch and stock mlx-lm, without Flight Deck."""
    gradient_sync: str
    unified_memory: bool | None
    mlx_env_vars: dict[str, str]
    """Those that `flightdeck launch` sets for every rank."""
    hostfile: HostfilePart | None
    launch_notes: tuple[str, ...] = ()
    """In what the command differs from `flightdeck launch`; why it is null."""


class RdmaPart(_Part):
    enabled: bool
    platform: str
    """ "apple", "cuda" or "cpu"."""
    backend: str | None
    expected_speedup: float | None
    """All ranks together against the fastest node alone, by the calibration over this backend."""
    env_vars: dict[str, str]
    """Of NCCL, as `flightdeck launch` sets them for every rank."""
    setup: tuple[str, ...]
    """What a person does once."""
    reason: str
    latency_s: float | None = None
    """Of a small all_sum over all ranks, as calibrated."""
    bandwidth_bytes_per_s: float | None = None


class CheckpointPart(_Part):
    approach: Literal["FlashRecovery"] = "FlashRecovery"
    async_: bool
    compression: str
    storage: str | None
    frequency: int | None
    """Iterations between two saves, as the job says."""
    retention: str = "last_3_checkpoints"
    expected_recovery_time: float | None
    suggested_frequency: int | None
    not_in_this_release: dict[str, str]
    """Key → what this release does in its place."""

    model_config = ConfigDict(frozen=True, alias_generator=lambda name: name.rstrip("_"), populate_by_name=True)


class PerformancePart(_Part):
    throughput: float | None
    """Samples per second of all ranks."""
    gpu_utilization: str = ">80%"
    checkpoint_overhead: str = "<5%"
    tokens_per_second: float | None
    step_s: float | None
    speed_up: float | None
    """Against the fastest node alone."""
    efficiency: float | None
    """Against the sum of all nodes alone."""
    duration_s: float | None
    """Of all iterations, without validation and saving."""


class MeasuredNode(_Part):
    examples_per_s: float | None
    spread: float | None
    tokens_per_s: float | None
    problem: str | None


class CalibrationPart(_Part):
    enabled: Literal[True] = True
    measured_performance: dict[str, MeasuredNode]
    workload_distribution: dict[str, float]
    """Node → its share; they sum to 1."""
    macos_qos_api: str
    calibration_notes: tuple[str, ...]
    taken_at: datetime
    age_days: float


class NoCalibrationPart(Disabled):
    """Nothing was measured; the shares are there all the same."""

    workload_distribution: dict[str, float]
    macos_qos_api: str
    calibration_notes: tuple[str, ...]


class WatchPart(_Part):
    """What is watched of the workers while they train."""

    enabled: Literal[True] = True
    every_updates: int
    staleness_threshold: int
    staleness_rule: str
    """What is compared with it: ranks in lockstep are never updates apart."""
    kl_threshold: float
    wasserstein_threshold: float
    byzantine_rule: str
    on_corruption: str


class ConsistencyPart(WorkerConsistency):
    """Before the launch, and while it trains."""

    workers: int
    compared: tuple[str, ...]
    while_training: WatchPart | Disabled


class ChunkingPart(_Part):
    enabled: Literal[True] = True
    dataset_size: int
    chunk_size: int
    num_chunks: int
    progress: str
    """Of the first chunk, as it will read."""


class CheckPart(_Part):
    name: str
    what: str
    overridden: bool


class ChecklistPart(_Part):
    checks: tuple[CheckPart, ...]
    not_in_this_release: dict[str, str]


class RankMemory(_Part):
    """What a rank needs, and what its node has."""

    node: str
    weights_bytes: int | None = None
    gradients_bytes: int | None = None
    optimizer_bytes: int | None = None
    activations_bytes: int | None = None
    logits_bytes: int | None = None
    communication_bytes: int | None = None
    update_bytes: int | None = None
    """What the optimizer's step works with."""
    reserve_bytes: int | None = None
    """Of the process, beside MLX's arrays."""
    peak_bytes: int | None = None
    """Of MLX: state, and the larger of the backward pass and the update."""
    needed_bytes: int | None = None
    """peak_bytes and reserve_bytes."""
    source: str | None = None
    """ "estimate" from config.json, or "calibration"."""
    limit_bytes: int | None = None
    limit_from: str | None = None
    fits: bool | None = None
    """None when either is not known."""


class MemoryPart(_Part):
    enabled: Literal[True] = True
    parameters: int
    trainable_parameters: int
    trainable_share: float
    layers: int
    assumptions: tuple[str, ...]
    ranks: tuple[RankMemory, ...]


class AdvicePart(_Part):
    name: str
    text: str
    source: str
    disputed: bool = False
    override: str | None = None


class NodePart(_Part):
    rank: int
    node: str
    host: str
    chip: str | None
    memory_bytes: int | None
    share: float | None
    facts_age_s: float | None
    """None: never seen."""
    problem: str | None
    """Why it did not answer now."""


class DataPart(_Part):
    examples: int | None
    source: str


class DataQualityPart(_Part):
    enabled: Literal[True] = True
    overall_score: float | None
    quality_tier: str | None
    total_examples: int | None
    dpo_metrics: dict[str, Any] | None
    rlvr_verifiability: dict[str, Any] | float | None
    poisoning_detected: bool
    overall_ready: bool | None
    recommendations: tuple[str, ...]


class TrainingPlan(_Part):
    """The document."""

    version: Literal["2.0.0"] = VERSION
    strategy: StrategyPart
    batch_configuration: BatchPart
    distributed_config: DistributedPart
    rdma_config: RdmaPart
    checkpoint_strategy: CheckpointPart
    performance_targets: PerformancePart
    verification_steps: tuple[str, ...]
    pre_rdma_sync: PreRdmaSync
    hardware_calibration: CalibrationPart | NoCalibrationPart
    worker_consistency: ConsistencyPart
    coordinator_chunking: ChunkingPart | Disabled
    pre_flight_checklist: ChecklistPart
    cluster: str
    job: str
    made_at: datetime
    nodes: tuple[NodePart, ...]
    memory: MemoryPart | Disabled
    data: DataPart
    data_quality: DataQualityPart | Disabled
    advice: tuple[AdvicePart, ...]
    warnings: tuple[Named, ...]
    refusals: tuple[Named, ...]
    """Why it cannot be launched as it stands; empty when it can."""
    reasons: tuple[Reason, ...]
    """Of each choice, in the order of the document."""

    @property
    def refused(self) -> bool:
        return bool(self.refusals)

    def document(self, form: Literal["v1", "v2"] = "v2") -> dict[str, Any]:
        """As JSON writes it; "v1" is the older document: no version, the first seven sections only."""
        whole: dict[str, Any] = self.model_dump(mode="json", by_alias=True)
        return {name: whole[name] for name in FIRST_SECTIONS} if form == "v1" else whole
