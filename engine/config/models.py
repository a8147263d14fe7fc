"""The configuration as the engine uses it: validated, paths resolved, defaults filled in.

`engine.config.load` makes a FlightConfig from flightdeck.toml; nothing else constructs one from user text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.security.hosts import SshTarget

FineTuneType = Literal["lora", "dora", "full"]
Strategy = Literal["data", "sharded", "pipeline"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ClusterConfig(_Section):
    """[cluster]"""

    name: str = "cluster"
    backend: Literal["auto", "ring", "jaccl", "jaccl-ring", "nccl"] = "auto"
    """auto chooses by the nodes' facts and their cables (engine.planning)."""
    launcher: Literal["mlx.launch", "direct"] = "mlx.launch"
    """What starts the ranks: MLX's launcher over our ssh, or our own connections with the same environment."""
    starting_port: int | None = Field(default=None, ge=1024, le=65000)
    """First port that the ranks listen on; None picks fresh ports for each attempt."""
    hostfile: str | None = None
    """A hostfile that the nodes were read from, as written: MLX's JSON, or `host:slots` lines."""


class NodeConfig(_Section):
    """One [[node]]: one rank. Paths are the node's own: absolute, or below `~`, the home of the node's user; those of
    a node that is this machine are absolute by now."""

    name: str
    ssh: str = "127.0.0.1"
    """`[user@]host[:port]` (engine.security.hosts); 127.0.0.1 is this machine, without ssh."""
    ips: tuple[str, ...] = ("127.0.0.1",)
    """IPv4 addresses on which its rank listens; empty: those are chosen from the nodes' facts."""
    python: str
    """The interpreter on the node; for this machine by default the one that runs flightdeck."""
    workdir: str
    """Directory on the node in which the rank's program runs."""
    model: str | None = None
    """Where the model lies on this node; filled in from the job's where the node says nothing."""
    data: str | None = None
    rdma: tuple[str | None, ...] | None = None
    """The RDMA device towards each rank, None for itself, as in MLX's hostfile; None: chosen from the cables."""
    share: float | None = Field(default=None, gt=0)
    """Fixed relative share of the global batch; None is an equal share."""

    @property
    def local(self) -> bool:
        """Whether it is this machine."""
        return SshTarget.parse(self.ssh).local


class JobConfig(_Section):
    """[job]: either mlx-lm training (`model`, `data`, …) or the user's own `command`."""

    name: str
    command: tuple[str, ...] | None = None
    model: str | None = None
    """As written, like the paths in `mlx_lm`: what it is on a node says NodeConfig.model."""
    data: str | None = None
    fine_tune_type: FineTuneType = "lora"
    strategy: Strategy = "data"
    layer_split: str | None = None
    """Of a pipeline, per rank its layers, half-open: "0-8,8-36". None: by memory."""
    mlx_lm: dict[str, Any] = Field(default_factory=dict)
    """Every key of an mlx-lm training YAML with its default filled in (batch_size, iters, learning_rate, …),
    [job] keys winning over the YAML file's."""
    given: tuple[str, ...] = ()
    """Those of its keys that the configuration names itself; the others are defaults."""
    env: dict[str, str] = Field(default_factory=dict)
    data_quality_report: str | None = None
    """A JSON report on the data, on this machine (engine.planning): its number of examples, and whether they may be
    trained on."""
    chunking: bool = True
    """Whether a large dataset is streamed in chunks."""
    chunk_size: int = Field(default=50_000, ge=1)
    """Examples of one chunk; a dataset of as many or more is chunked."""


class PreflightConfig(_Section):
    """[preflight]"""

    all_sum_s: float = Field(default=2.0, gt=0, le=60)
    """How long the real all_sum runs, seconds."""
    skip: tuple[str, ...] = ()
    roots: tuple[str, ...] = ()
    """Folders, beside the home, the workdir and the state directory of a machine, in which scripts and checkpoints may
    lie; a symlink out of all of them is refused."""
    sync: bool = True
    """Whether the sync script runs before the launch."""
    sync_script: str = "~/Dev/sync-dev.sh"
    """On this machine; where there is none, that is a warning."""
    block_on_failure: bool = True
    """Whether a sync script that fails blocks the launch; else it warns."""
    consistency: bool = True
    """Whether the workers' files are compared before the launch."""
    consistency_threshold: float = Field(default=0.95, gt=0, le=1)
    """Agreeing workers over all, inclusive."""
    exclude_divergent: bool = False
    """Leave a divergent minority out and plan for the others, instead of blocking."""


class ConsistencyConfig(_Section):
    """[consistency]: what is watched of the workers while they train."""

    enabled: bool = True
    every: int = Field(default=50, ge=1)
    """Updates between two comparisons of the replicas' parameters."""
    staleness: int = Field(default=5, ge=0)
    kl: float = Field(default=0.1, ge=0)
    wasserstein: float = Field(default=1.0, ge=0)
    on_corruption: Literal["stop", "warn"] = "stop"
    """When replicas differ: stop at the last step where all agreed, or go on with an alarm."""


class CalibrationConfig(_Section):
    """[calibration]"""

    enabled: bool = True
    """Whether plan, preflight and shares use a stored calibration."""
    seconds: float = Field(default=120.0, gt=0, le=3600)
    """Of measuring per node; --quick takes 10."""
    max_age_days: float = Field(default=30.0, gt=0)
    """An older one is a warning."""


class CheckpointConfig(_Section):
    """[checkpoint]: the state from which a training goes on exactly, written beside it."""

    enabled: bool = True
    every: int | None = Field(default=None, ge=1)
    """Optimizer updates from one to the next; None: as often as the job saves its adapters (save_every)."""
    keep: int = Field(default=3, ge=1, le=1000)
    """Older ones are removed when a newer one has been read back."""
    compression: Literal["none", "gzip", "zstd"] = "none"
    destination: str | None = None
    """A folder (NFS, another disk) on the node that writes: rank 0's, or each where no rank has the whole state; or an
    address that fsspec knows (s3://…, gs://…), to which each is copied. None: below the run's folder on that node.
    Every run has a folder of its own in it. Where the state is divided it must be one that all nodes reach."""


class RecoveryConfig(_Section):
    """[recovery]: the lease and the graces of a stop, and what is done when a rank is lost. Times in seconds."""

    lease_s: float = Field(default=60.0, ge=3)
    on_lease_expiry: Literal["end", "continue"] = "end"
    stop_grace_s: float = Field(default=2.5, ge=0)
    save_grace_s: float = Field(default=30.0, ge=0)
    term_grace_s: float = Field(default=0.8, ge=0)
    max_restarts: int = Field(default=3, ge=0, le=1000)
    """How often a run is started anew by itself; 0: its first failure ends it."""
    min_nodes: int | None = Field(default=None, ge=1)
    """With as many nodes a restart goes on without those that are gone; None: all of them are needed, and so they are
    when each has a part of the state that lies nowhere else (strategy, [checkpoint] destination)."""
    backoff_s: float = Field(default=1.0, ge=0, le=3600)
    """Before a second restart without progress; twice as long before each further one."""
    node_wait_s: float = Field(default=600.0, ge=0)
    """How long a restart waits for a node that it needs and that does not answer."""
    hang_s: float = Field(default=60.0, ge=1)
    """Without a step for as long, and for 5 times the longest steps, the training hangs."""
    stall_s: float = Field(default=600.0, ge=1)
    """The same while a rank loads, validates or saves, and for the first steps."""
    restart_commands: bool = False
    """Whether a program of the user's own is started anew: it has to find its own state."""


class UiConfig(_Section):
    """[ui]"""

    theme: str = "textual-dark"
    ascii: bool = False


class FlightConfig(_Section):
    """A whole flightdeck.toml."""

    file: Path | None = None
    """Where it was read from; None for the demo."""
    cluster: ClusterConfig
    nodes: tuple[NodeConfig, ...] = Field(min_length=1)
    job: JobConfig
    preflight: PreflightConfig = PreflightConfig()
    consistency: ConsistencyConfig = ConsistencyConfig()
    calibration: CalibrationConfig = CalibrationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    ui: UiConfig = UiConfig()
