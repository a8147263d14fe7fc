"""What the engine tells its faces: runs, checks, nodes, and their words.

Pydantic models are what is written to disk or printed as JSON; frozen dataclasses live in memory only.
Times on disk are UTC, ISO 8601 with a zone; `*_s` are seconds, `*_bytes` bytes.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class RunState(StrEnum):
    """Where a run is in its life, in order; the last four are ends (reliability.md)."""

    PLANNED = "planned"
    PREFLIGHT = "preflight"
    LAUNCHING = "launching"
    RUNNING = "running"
    RECOVERING = "recovering"
    FINISHING = "finishing"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    ABORTED = "aborted"
    LOST = "lost"

    @property
    def ended(self) -> bool:
        return self in ENDED


ENDED = frozenset({RunState.SUCCEEDED, RunState.FAILED, RunState.ABORTED, RunState.LOST})


class Reason(StrEnum):
    """Why a run ended, apart from how (its state)."""

    COMPLETED = "completed"
    RANK_FAILED = "rank_failed"
    RANK_KILLED = "rank_killed"
    NODE_LOST = "node_lost"
    HUNG = "hung"
    LAUNCH_FAILED = "launch_failed"
    PREFLIGHT_FAILED = "preflight_failed"
    USER_ABORT = "user_abort"
    OUT_OF_MEMORY = "out_of_memory"
    DISK_FULL = "disk_full"
    DIVERGED = "diverged"
    CORRUPTED = "corrupted"
    """Replicas of the parameters differ: memory, or a bug."""
    SUPERVISOR_LOST = "supervisor_lost"


class RunRecord(BaseModel):
    """One run as `flightdeck runs --json` prints it and the store keeps it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    id: str
    name: str
    state: RunState
    reason: Reason | None = None
    rank: int | None = None
    """The rank that ended the run, where one did."""
    host: str | None = None
    """The name of that rank's node."""
    cause: str | None = None
    """One line, in words: what happened first."""
    fix: str | None = None
    """What to do about it, where that is known."""
    exit_code: int | None = None
    signal: int | None = None
    created_at: datetime
    started_at: datetime | None = None
    """When the first rank's keeper started, null until then."""
    ended_at: datetime | None = None
    attempts: int = 0
    world_size: int
    backend: str
    iteration: int | None = None
    iterations: int | None = None
    train_loss: float | None = None
    val_loss: float | None = None
    tokens_per_second: float | None = None
    unconfirmed: list[str] = Field(default_factory=list)
    """Nodes on which a stop could not be proved."""
    excluded: list[str] = Field(default_factory=list)
    """Nodes of the configuration that the preflight left out: their files were not those of the others."""


class CheckStatus(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


class PreRdmaSync(BaseModel):
    """What came of the sync script, and of the proof after it."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["pre_rdma_sync"] = "pre_rdma_sync"
    enabled: bool
    reason: str | None = None
    """Why it is not enabled, or was not run."""
    sync_script: str
    validation_checks: tuple[str, ...] = ()
    """What was proved after it, in words."""
    block_on_failure: bool
    sync_status: Literal["success", "failed", "not_found", "not_run"]
    sync_output: tuple[str, ...] = ()
    """Its last lines, sanitised."""


class WorkerConsistency(BaseModel):
    """How far the workers' files agree with the reference."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["worker_consistency"] = "worker_consistency"
    enabled: bool
    reason: str | None = None
    threshold: float
    """Agreeing workers over all, inclusive."""
    agreement: float | None = None
    """0 to 1; null when it was not compared, or no reference could be found."""
    reference: Literal["head", "plurality"] | None = None
    divergent: tuple[str, ...] = ()
    """Nodes, in the configuration's order."""
    excluded: tuple[str, ...] = ()


class NodeSync(BaseModel):
    """A node's tree against the reference, after a sync."""

    model_config = ConfigDict(frozen=True)

    same: bool
    """It has everything that the reference has."""
    problem: str | None = None
    """Why it could not be copied to, or compared."""
    differing: tuple[str, ...] = ()
    """Paths below the workdir, the first of them."""
    differing_count: int = 0
    missing: tuple[str, ...] = ()
    missing_count: int = 0
    own_count: int = 0
    """Files that only the node has; they stay."""


class SyncReport(BaseModel):
    """What `flightdeck sync` has done, and what the trees are now."""

    model_config = ConfigDict(frozen=True)

    dry_run: bool
    method: Literal["script", "rsync"]
    synced: bool
    """Every node has everything that the reference has."""
    words: str
    reference: str | None = None
    """The node whose tree is compared with, or "this machine"; null when nothing was compared."""
    output: tuple[str, ...] = ()
    """The script's last lines."""
    nodes: dict[str, NodeSync] = Field(default_factory=dict)
    """By name: one for each workdir that was compared."""


class CheckResult(BaseModel):
    """One preflight check's answer (preflight.md)."""

    model_config = ConfigDict(frozen=True)

    name: str
    status: CheckStatus
    summary: str = ""
    evidence: dict[str, str] = Field(default_factory=dict)
    """Per node name: what was seen there."""
    fix_command: str | None = None
    fixes: dict[str, str] = Field(default_factory=dict)
    """Per node name: a command that mends it there."""
    duration_s: float | None = None
    blames: tuple[int, str] | None = None
    """(rank, node) of the first failing rank, where one can be named."""
    excludes: tuple[str, ...] = ()
    """Nodes that a launch is to leave out; the plan is then made again for the others."""
    detail: PreRdmaSync | WorkerConsistency | None = Field(default=None, discriminator="kind")
    """What the plan document says of it, where it says anything."""


class PreflightReport(BaseModel):
    """All checks of one preflight. `overall_status` is fail when any check fails that was not skipped by name."""

    model_config = ConfigDict(frozen=True)

    checks: list[CheckResult]
    overall_status: CheckStatus
    overridden: list[str] = Field(default_factory=list)
    """Names given with --skip."""
    finished_at: datetime


class HostKeyOffer(BaseModel):
    """A host key that a node shows and nobody has accepted yet."""

    model_config = ConfigDict(frozen=True)

    target: str
    """`[user@]host[:port]`."""
    key: str
    """In OpenSSH's form, "ssh-ed25519 AAAA…"."""
    fingerprint: str
    """"SHA256:…"."""


class HostKeyChange(BaseModel):
    """A node shows another host key than the accepted one. Nobody accepts that from here."""

    model_config = ConfigDict(frozen=True)

    target: str
    accepted: str
    """Fingerprint of the accepted key, "SHA256:…"."""
    found: str
    """Fingerprint of the key that it shows."""


class Interface(BaseModel):
    """One network interface."""

    model_config = ConfigDict(frozen=True)

    name: str
    """Device: "en5", "bridge0", "eth0"."""
    ipv4: tuple[str, ...] = ()
    """Addresses with their prefix length: "192.168.0.1/30"."""
    active: bool | None = None
    bridge: str | None = None
    """The bridge that it is a member of."""
    port_name: str | None = None
    """macOS's (localised) name of the hardware port."""


class ThunderboltPort(BaseModel):
    """One Thunderbolt port (bus) of a Mac."""

    model_config = ConfigDict(frozen=True)

    domain_uuid: str
    receptacle: str | None = None
    """What macOS calls it: "1", "2", …"""
    device: str | None = None
    """Its interface: "en5"."""
    peer_uuid: str | None = None
    """Domain UUID of the computer at the other end; None for a display, a dock, a disk or nothing."""
    peer_name: str | None = None
    speed: str | None = None
    """Of the link, in macOS's words: "Up to 80 Gb/s"."""


class RdmaDevice(BaseModel):
    """One RDMA device."""

    model_config = ConfigDict(frozen=True)

    name: str
    """ "rdma_en5"."""
    port_state: str | None = None
    """ "PORT_ACTIVE", "PORT_DOWN"; None when ibv_devinfo did not tell."""
    ipv4_gid: bool | None = None
    """Whether its GID table has an IPv4 address: without one no queue pair comes up; None when not known."""


class NodeFacts(BaseModel):
    """What was last seen of a node. None is "not measured", never a guess."""

    model_config = ConfigDict(frozen=True, extra="ignore")

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
    """What the GPU may use: iogpu.wired_limit_mb, else Metal's recommended working set."""
    swap_used_bytes: int | None = None
    disk_free_bytes: int | None = None
    disk_total_bytes: int | None = None
    power_source: str | None = None
    """ "AC", "battery 63 %"."""
    low_power_mode: bool | None = None
    thermal: str | None = None
    """ "nominal", or the system's words for a throttled machine."""
    clock_skew_s: float | None = None
    """The node's wall clock minus the head's, seconds; good to half the round trip."""
    python: str | None = None
    mlx: str | None = None
    mlx_lm: str | None = None
    mlx_problem: str | None = None
    """Why mlx cannot be imported there."""
    backends: tuple[str, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    thunderbolt: tuple[ThunderboltPort, ...] = ()
    rdma_enabled: bool | None = None
    """`rdma_ctl status`; None where there is no such command."""
    rdma_devices: tuple[RdmaDevice, ...] = ()
    round_trip_s: float | None = None
    problem: str | None = None
    """Why the probe failed, in one line; the facts are then None."""
    problem_kind: str | None = None
    """`problem` in a word or two: "unreachable", "login refused", "key unknown", "key changed", "no python"; None for
    any other."""
    fix: str | None = None
    """What to do about `problem`, where that is known."""
    host_key: HostKeyOffer | None = None
    """The key to accept, when that is the problem."""
    changed_key: HostKeyChange | None = None
    """The keys, when it shows another one than the accepted."""
    late: tuple[str, ...] = ()
    """Commands of the probe that did not answer in their time; what they would tell is None."""


class Cable(BaseModel):
    """One Thunderbolt cable between two nodes, a before b in the configuration's order."""

    model_config = ConfigDict(frozen=True)

    a: str
    a_device: str | None
    b: str
    b_device: str | None
    speed: str | None = None


class Topology(BaseModel):
    """Who is cabled to whom over Thunderbolt."""

    model_config = ConfigDict(frozen=True)

    nodes: tuple[str, ...]
    cables: tuple[Cable, ...] = ()
    shape: str = "none"
    """ "mesh" (every pair cabled), "ring" (a cycle through all), "incomplete" (some cables), "none", "single"."""
    missing: tuple[tuple[str, str], ...] = ()
    """Pairs that a full mesh would need."""
    strangers: tuple[str, ...] = ()
    """Computers at the other end of a cable that are no node of this cluster, as "node en5: name"."""


class RankUse(BaseModel):
    """What one rank's processes use."""

    model_config = ConfigDict(frozen=True)

    run_id: str
    rank: int
    rss_bytes: int


class NodeTelemetry(BaseModel):
    """One moment of a node while somebody looks. None is "not measured"."""

    model_config = ConfigDict(frozen=True)

    node: str
    at: datetime
    """When the head got it."""
    cpu_use: float | None = None
    """0 to 1, over all cores."""
    gpu_use: float | None = None
    """0 to 1."""
    gpu_mhz: float | None = None
    memory_used_bytes: int | None = None
    swap_used_bytes: int | None = None
    power_w: float | None = None
    """Of the whole system where that is known, else of CPU + GPU."""
    gpu_power_w: float | None = None
    cpu_temperature_c: float | None = None
    gpu_temperature_c: float | None = None
    thermal: str | None = None
    ranks: tuple[RankUse, ...] = ()
    slow_at: datetime | None = None
    """When `ranks` came (and on a Mac `thermal`): what costs more is looked at less often than the rest."""
    source: str | None = None
    """ "macmon", or what was read in its place."""
    problem: str | None = None
    """Why there is none, in one line."""
