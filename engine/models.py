"""Runs, checks and nodes, as the engine reports them to its frontends.

Pydantic models are what is written to disk or printed as JSON; frozen dataclasses are in memory only.
Times on disk are UTC, ISO 8601 with a zone; `*_s` are seconds, `*_bytes` bytes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class FrozenModel(BaseModel):
    """The base of all models. Unknown fields are ignored. The validator is built when it is first used, since a command
    uses few of the models; any thread may be the first (pydantic 2.14 holds a lock meanwhile)."""

    model_config = ConfigDict(frozen=True, defer_build=True)


class _NoValue(FrozenModel):
    """Why a node gave no value. The reason is a value too, so that a late, failed or cut reply is never read as "there
    is nothing"."""

    command: str
    """The command as a person would type it, or the name of the probe."""


class Late(_NoValue):
    """No reply within the time limit."""

    kind: Literal["late"] = "late"
    after_s: float

    def __str__(self) -> str:
        return f"{self.command} gave no answer within {self.after_s:g} s"


class Failed(_NoValue):
    """It ended with an error, and without a reply that could be used."""

    kind: Literal["failed"] = "failed"
    exit_code: int
    """Negative for a signal."""
    stderr: str = ""
    """Its last line, safe to show."""

    def __str__(self) -> str:
        return f"{self.command} ended with {self.exit_code}" + (f": {self.stderr}" if self.stderr else "")


class Unparsable(_NoValue):
    """It ended well, and what it printed is not what was expected."""

    kind: Literal["unparsable"] = "unparsable"
    output: str
    """The beginning of it, safe to show."""

    def __str__(self) -> str:
        return f"{self.command} printed what cannot be read" + (f": {self.output}" if self.output else " (nothing)")


NoValue = Late | Failed | Unparsable


class RunState(StrEnum):
    """The states of a run, in order; in the last five it has ended."""

    PLANNED = "planned"
    PREFLIGHT = "preflight"
    LAUNCHING = "launching"
    RUNNING = "running"
    RECOVERING = "recovering"
    FINISHING = "finishing"
    COMPLETED = "completed"
    """Every rank that can be asked has completed; the exit records of the others lie on nodes that do not answer. Once
    they are read, the run has succeeded, or failed."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    ABORTED = "aborted"
    LOST = "lost"

    @property
    def ended(self) -> bool:
        return self in ENDED


ENDED = frozenset({RunState.COMPLETED, RunState.SUCCEEDED, RunState.FAILED, RunState.ABORTED, RunState.LOST})


@dataclass(frozen=True)
class ReasonTraits:
    value: str
    noun: str = "failure"
    """In "rank 1's death"."""
    never_restarted: str | None = None
    """Why no other attempt may follow."""
    from_outside: bool = False
    """Does not count against what was launched, however early it comes."""
    nodes_unchanged: bool = False
    """A failure of a program, which leaves the nodes as they were."""
    state_sound: bool = True
    """An emergency checkpoint is worth going on from; else the state is wrong, or saved already."""
    end_unseen: bool = False
    """A rank may have ended otherwise: its node or the supervisor was away."""
    detailed: bool = False
    """The journal's cause has more detail (which file, which array) than a signature."""
    signature: str | None = None
    """Id of the failure signature whose fix is given where none better is known."""


class Reason(StrEnum):
    """Why a run ended."""

    traits: ReasonTraits

    def __new__(cls, traits: ReasonTraits) -> Reason:
        reason = str.__new__(cls, traits.value)
        reason._value_, reason.traits = traits.value, traits
        return reason

    COMPLETED = ReasonTraits("completed", state_sound=False)
    RANK_FAILED = ReasonTraits("rank_failed", nodes_unchanged=True)
    RANK_KILLED = ReasonTraits("rank_killed", "death", from_outside=True, nodes_unchanged=True)
    NODE_LOST = ReasonTraits("node_lost", "loss", from_outside=True, end_unseen=True)
    HUNG = ReasonTraits("hung", "hang", from_outside=True, nodes_unchanged=True, signature="ring.all_sum_stuck")
    LAUNCH_FAILED = ReasonTraits("launch_failed", "failure to start")
    SEPARATE_GROUPS = ReasonTraits(
        "separate_groups", never_restarted="the ranks would train apart from one another again"
    )
    """The ranks trained apart from one another, in groups that a launcher inside the command had started."""
    PREFLIGHT_FAILED = ReasonTraits("preflight_failed", never_restarted="preflight failed")
    USER_ABORT = ReasonTraits("user_abort", never_restarted="it was stopped as requested")
    BUDGET_SPENT = ReasonTraits("budget_spent", never_restarted="its time was up")
    """The time that it was launched for was up: it was stopped as if that had been requested, and can be resumed."""
    OUT_OF_MEMORY = ReasonTraits(
        "out_of_memory", "death for lack of memory", nodes_unchanged=True, detailed=True, signature="memory.killed"
    )
    DISK_FULL = ReasonTraits(
        "disk_full", never_restarted="a restart makes no room on a full disk", detailed=True, signature="disk.full"
    )
    DIVERGED = ReasonTraits("diverged", never_restarted="the training has diverged, and would again", state_sound=False)
    CORRUPTED = ReasonTraits(
        "corrupted",
        never_restarted="parameters differ between the ranks, and the reason must be found first",
        state_sound=False,
    )
    """Replicas of the parameters differ, because of bad memory or a bug."""
    SUPERVISOR_LOST = ReasonTraits(
        "supervisor_lost", never_restarted="its supervisor was lost: nothing is started by surprise", end_unseen=True
    )
    HEAD_SLEPT = ReasonTraits("head_slept", "sleep of this machine", from_outside=True)
    """This machine slept for longer than the ranks' lease, which has ended them."""


class RunRecord(FrozenModel):
    """One run, as it is stored and as `flightdeck runs --json` prints it."""

    id: str
    name: str
    state: RunState
    reason: Reason | None = None
    rank: int | None = None
    """The rank that ended the run, if one did."""
    host: str | None = None
    """Name of that rank's node."""
    cause: str | None = None
    """The first failure, one line; for a run that succeeded, why it ended before its last iteration."""
    fix: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    created_at: datetime
    started_at: datetime | None = None
    """When the first rank's keeper started; null before that."""
    ended_at: datetime | None = None
    attempts: int = 0
    world_size: int
    backend: str
    cluster: str = ""
    task: str | None = None
    """The use of the result of the run `source`: "evaluate", "fuse", "generate", "serve"; null for a training."""
    source: str | None = None
    repeats: str | None = None
    """The run whose configuration it has, perhaps with changes."""
    outcome: str | None = None
    """The task's findings so far, one line: its losses, the share of the gain that is kept, its address."""
    recovery_s: float | None = None
    """From the last failure that the run recovered from to the first step after it."""
    iteration: int | None = None
    iterations: int | None = None
    train_loss: float | None = None
    val_loss: float | None = None
    test_loss: float | None = None
    """With the job's test = true, after the last iteration."""
    tokens_per_second: float | None = None
    unconfirmed: list[str] = Field(default_factory=list)
    """Nodes on which the stop could not be confirmed."""
    excluded: list[str] = Field(default_factory=list)
    """Nodes that preflight left out because their files differed."""
    logs_missing: list[str] = Field(default_factory=list)
    """The head's files of the last attempt that lack bytes which its nodes have."""
    settings: dict[str, str | int | float] = Field(default_factory=dict)
    """Those of the job that runs are told apart by, under mlx-lm's names, and `command`; none of earlier releases."""
    tags: list[str] = Field(default_factory=list)
    """A person's, ascending. The store has them and the note, not the journal."""
    note: str | None = None


class CheckStatus(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


OVERRIDDEN = "overridden"
"""The summary of a check that was skipped by name."""


class PreRdmaSync(FrozenModel):
    """Result of the sync script, and of the comparison after it."""

    kind: Literal["pre_rdma_sync"] = "pre_rdma_sync"
    enabled: bool
    reason: str | None = None
    """Why it is not enabled or was not run."""
    sync_script: str
    validation_checks: tuple[str, ...] = ()
    """Descriptions of what was verified after the script."""
    block_on_failure: bool
    sync_status: Literal["success", "failed", "not_found", "not_run"]
    sync_output: tuple[str, ...] = ()
    """Last lines of its output, sanitised."""


class WorkerConsistency(FrozenModel):
    """Agreement of the workers' files with the reference."""

    kind: Literal["worker_consistency"] = "worker_consistency"
    enabled: bool
    reason: str | None = None
    consistency_threshold: float
    """Smallest share of workers that must agree."""
    is_consistent: bool | None = None
    """All workers that are not excluded agree with the reference; null if nothing was compared."""
    script_hash: str | None = None
    """SHA-256 of the training script in the reference: of the trainer's files, or of the command's own first file."""
    agreement: float | None = None
    """0 to 1; null if nothing was compared, or there is no reference."""
    reference: Literal["head", "plurality"] | None = None
    divergent: tuple[str, ...] = ()
    """Node names, in the configuration's order."""
    excluded: tuple[str, ...] = ()


class NodeSync(FrozenModel):
    """A node's tree compared with the reference, after a sync."""

    same: bool
    """The node has everything that the reference has."""
    problem: str | None = None
    """Why copying or comparing failed."""
    differing: tuple[str, ...] = ()
    """The first differing paths, relative to the workdir."""
    differing_count: int = 0
    missing: tuple[str, ...] = ()
    missing_count: int = 0
    own_count: int = 0
    """Files that only the node has; they are kept."""


class SyncReport(FrozenModel):
    """Result of `flightdeck sync`."""

    dry_run: bool
    method: Literal["script", "rsync"]
    synced: bool
    """Every node has everything that the reference has."""
    message: str
    reference: str | None = None
    """The node with the reference tree, or "this machine"; null if nothing was compared."""
    output: tuple[str, ...] = ()
    nodes: dict[str, NodeSync] = Field(default_factory=dict)
    """By node name, one for each compared workdir."""


class CheckResult(FrozenModel):
    name: str
    status: CheckStatus
    summary: str = ""
    evidence: dict[str, str] = Field(default_factory=dict)
    fix_command: str | None = None
    """A line for this machine's shell."""
    fix_effect: str | None = None
    """The change that this line makes, and how it is taken back."""
    fixes: dict[str, str] = Field(default_factory=dict)
    """Commands by node name that fix the problem there."""
    effects: dict[str, str] = Field(default_factory=dict)
    """The change that each of them makes, and how it is taken back."""
    duration_s: float | None = None
    blames: tuple[int, str] | None = None
    """(rank, node) of the first failing rank, if known."""
    excludes: tuple[str, ...] = ()
    """Nodes that a launch must leave out; the plan is then made again for the others."""
    detail: PreRdmaSync | WorkerConsistency | None = Field(default=None, discriminator="kind")
    """The section of the plan document with this result, if it has one."""


class PreflightReport(FrozenModel):
    """All checks of one preflight. `overall_status` is fail if a check fails that was not skipped by name."""

    checks: list[CheckResult]
    overall_status: CheckStatus
    overridden: list[str] = Field(default_factory=list)
    finished_at: datetime = Field(default_factory=lambda: datetime.now(UTC))


class HostKeyOffer(FrozenModel):
    """A host key that has not been accepted yet."""

    target: str
    """`[user@]host[:port]`."""
    key: str
    """In OpenSSH's form, "ssh-ed25519 AAAA…"."""
    fingerprint: str
    """"SHA256:…"."""


class HostKeyChange(FrozenModel):
    """A node's host key differs from the accepted one. It cannot be accepted from Flight Deck."""

    target: str
    accepted: str
    """Fingerprint of the accepted key, "SHA256:…"."""
    found: str
    """Fingerprint of the key that the node presents."""


class Interface(FrozenModel):
    name: str
    """Device: "en5", "bridge0", "eth0"."""
    ipv4: tuple[str, ...] = ()
    """Addresses with their prefix length: "192.168.0.1/30"."""
    active: bool | None = None
    bridge: str | None = None
    port_name: str | None = None
    """Localised name of the hardware port in macOS."""


class ThunderboltPort(FrozenModel):
    """One Thunderbolt port (bus) of a Mac."""

    domain_uuid: str
    receptacle: str | None = None
    """Number of the port in macOS: "1", "2", …"""
    device: str | None = None
    """Network interface: "en5"."""
    peer_uuid: str | None = None
    """Domain UUID of the computer at the other end; None for any other device, or nothing."""
    peer_name: str | None = None
    speed: str | None = None
    """Speed of the link as macOS reports it: "Up to 80 Gb/s"."""


class RdmaDevice(FrozenModel):
    name: str
    """ "rdma_en5"."""
    port_state: str | None = None
    """ "PORT_ACTIVE" or "PORT_DOWN"; None if ibv_devinfo does not report it."""
    ipv4_gid: bool | None = None
    """Its GID table has an IPv4 address, which queue pairs need; None if unknown."""


class NvidiaGpu(FrozenModel):
    """As nvidia-smi lists it, or MLX."""

    name: str
    """"NVIDIA H100 80GB HBM3"."""
    uuid: str | None = None
    """"GPU-6fc82c5e-…", which CUDA_VISIBLE_DEVICES takes."""
    memory_bytes: int | None = None
    free_bytes: int | None = None
    """As MLX reports it, of all processes."""
    compute_capability: str | None = None
    """"9.0"."""
    mig: bool | None = None
    """It is divided into instances (MIG): a rank then has a part of its memory."""


class NodeFacts(FrozenModel):
    """The last known facts of a node. None means "not measured"."""

    node: str
    host: str
    probed_at: datetime
    hostname: str | None = None
    user: str | None = None
    home: str | None = None
    os: str | None = None
    """ "macOS 26.4.1 (25E253)", "Debian GNU/Linux 12 (bookworm)"."""
    system: str | None = None
    """ "Darwin" or "Linux"."""
    os_version: str | None = None
    os_build: str | None = None
    model: str | None = None
    """Hardware model: "Mac15,14"."""
    chip: str | None = None
    cores: int | None = None
    performance_cores: int | None = None
    gpu: str | None = None
    """The MLX default device, for example "gpu" or "cpu"."""
    gpu_cores: int | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    gpu_limit_bytes: int | None = None
    """Memory limit of one GPU: iogpu.wired_limit_mb, else Metal's recommended working set; with CUDA MLX's own, or all
    memory of the smallest one; None where MLX computes on the CPU."""
    gpus: tuple[NvidiaGpu, ...] = ()
    """In the order of their numbers; where MLX computes on them, those that it can use."""
    nvidia_driver: str | None = None
    cuda: str | None = None
    """The newest CUDA that the driver supports: "12.4"."""
    swap_used_bytes: int | None = None
    disk_free_bytes: int | None = None
    disk_total_bytes: int | None = None
    power_source: str | None = None
    """ "AC", "battery 63 %"."""
    low_power_mode: bool | None = None
    thermal: str | None = None
    """ "nominal", or the system's description of throttling."""
    clock_skew_s: float | None = None
    """The node's wall clock minus the head's; accurate to half the round trip."""
    python: str | None = None
    mlx: str | None = None
    mlx_lm: str | None = None
    torch: str | None = None
    """For a PyTorch job alone, as the mlx ones are for the others."""
    mlx_cuda: str | None = None
    """The package of MLX's CUDA build, with its version: "mlx-cuda-13 0.32.4"."""
    mlx_problem: str | None = None
    """Why mlx cannot be imported."""
    backends: tuple[str, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    thunderbolt: tuple[ThunderboltPort, ...] = ()
    rdma_enabled: bool | None = None
    """From `rdma_ctl status`; None without that command."""
    rdma_devices: tuple[RdmaDevice, ...] = ()
    round_trip_s: float | None = None
    problem: str | None = None
    """Why the probe failed, in one line; the facts are then None."""
    problem_kind: str | None = None
    """"unreachable", "login refused", "key unknown", "key changed" or "no python"; None for any other problem."""
    fix: str | None = None
    host_key: HostKeyOffer | None = None
    """The key to accept, if that is the problem."""
    changed_key: HostKeyChange | None = None
    """The keys, if the node's differs from the accepted one."""
    unknown: dict[str, Late | Failed | Unparsable] = {}
    """Commands of the probe, by name, that ended without an answer: what they would tell is not known, and not
    absent."""

    @property
    def mlx_device(self) -> str | None:
        """The kind of device that MLX computes on: "Metal", "CUDA" or "CPU"; None where it is not known."""
        gpu = "Metal" if self.system == "Darwin" else "CUDA"
        return {"gpu": gpu, "cpu": "CPU"}.get(self.gpu or "")


class Cable(FrozenModel):
    """One Thunderbolt cable between two nodes; `a` comes first in the configuration."""

    a: str
    a_device: str | None
    b: str
    b_device: str | None
    speed: str | None = None


class Topology(FrozenModel):
    """The Thunderbolt cables between the nodes."""

    nodes: tuple[str, ...]
    cables: tuple[Cable, ...] = ()
    shape: str = "none"
    """ "mesh" (every pair cabled), "ring" (a cycle through all), "incomplete" (some cables), "none", "single", or
    "unknown" where the cables of some node are not known."""
    missing: tuple[tuple[str, str], ...] = ()
    """Pairs that a full mesh needs, and that are known to have no cable."""
    strangers: tuple[str, ...] = ()
    """Computers at the other end of a cable that are not nodes of this cluster, as "node en5: name"."""
    unknown: dict[str, str] = {}
    """Node -> why its cables are not known."""
    setup: dict[str, tuple[str, ...]] = {}
    """Node -> commands, in order, that give each of its cables a network of its own; empty where all have one."""


class RankUse(FrozenModel):
    """Memory of one rank's processes."""

    run_id: str
    rank: int
    rss_bytes: int


class GpuMemory(FrozenModel):
    """Memory of one NVIDIA GPU; None for what it does not report."""

    index: int
    used_bytes: int | None = None
    total_bytes: int | None = None


class NodeTelemetry(FrozenModel):
    """One telemetry sample of a node. None means "not measured"."""

    node: str
    at: datetime
    """When the head received it."""
    cpu_use: float | None = None
    """0 to 1, over all cores."""
    gpu_use: float | None = None
    """0 to 1."""
    gpu_mhz: float | None = None
    gpu_memory: tuple[GpuMemory, ...] = ()
    memory_used_bytes: int | None = None
    swap_used_bytes: int | None = None
    power_w: float | None = None
    """Power of the whole system if known, else of CPU and GPU."""
    gpu_power_w: float | None = None
    cpu_temperature_c: float | None = None
    gpu_temperature_c: float | None = None
    thermal: str | None = None
    received_bytes_per_s: float | None = None
    """Over all network interfaces but the loopback, since the sample before."""
    sent_bytes_per_s: float | None = None
    ranks: tuple[RankUse, ...] = ()
    """Those whose memory is known."""
    source: str | None = None
    """ "macmon", or the replacement for it."""
    problem: str | None = None
    """Why there is no sample, in one line."""
