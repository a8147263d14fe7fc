"""The configuration as the engine uses it: validated, with paths resolved and defaults filled in. `engine.config.load`
makes a Config from flightdeck.toml; nothing else creates one from user input.

The docstrings of the fields are the text of docs/configuration.md (`python -m tests.docs.generate`)."""

from __future__ import annotations

import posixpath
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from engine.config import formats
from engine.config.faults import accepts
from engine.config.mlx_lm_keys import HEAD_TRACKERS, services
from engine.errors import InputError
from engine.job.kinds import JobKind, job_kind
from engine.models import FrozenModel
from engine.protocol.job import DataColumn, DataFormat, Framework, Strategy
from engine.protocol.manifest import DATA_PREFIX
from engine.protocol.task import Task
from engine.security.identifiers import SshTarget
from engine.security.redact import Redactor

FineTuneType = Literal["lora", "dora", "full"]
MAX_ADDRESSES: Final = 8
"""The most of one rank."""
RdmaRow = tuple[Annotated[str | tuple[str, ...], BeforeValidator(accepts(formats.device_form))] | None, ...]
"""RDMA device to each rank (several devices with several cables); None for the rank itself and without a cable."""

_HeadPath = Annotated[str, AfterValidator(accepts(formats.path_form))]
_NodePath = Annotated[str, AfterValidator(accepts(formats.remote_path_form))]


class _Section(FrozenModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class ClusterConfig(_Section):
    """How the nodes are connected and how the ranks are started. The whole table may be left out."""

    name: str = "cluster"
    """Name of the cluster: letters, digits, `.`, `_`, `-`."""
    backend: Literal["auto", "ring", "jaccl", "jaccl-ring", "nccl", "gloo"] = "auto"
    """The communication backend. `auto` uses RDMA (`jaccl`, `jaccl-ring`) if the Macs are cabled for it, `nccl` if
    MLX computes on CUDA on every node, with a GPU for each rank, and the strategy is not `pipeline`, else `ring` (TCP).
    With framework `torch`, `nccl` if every node has an NVIDIA GPU for each of
    its processes, else `gloo` (TCP)."""
    launcher: Literal["mlx.launch", "direct"] = "mlx.launch"
    """Starts the ranks with `mlx.launch`, or directly over Flight Deck's own connections with the same environment.
    Strategy `local` and framework `torch` always start them directly: `mlx.launch` ends all ranks when one has ended,
    and cannot start PyTorch's."""
    starting_port: int | None = Field(default=None, ge=1024, le=65000)
    """First TCP port that the ranks listen on. Default: free ports, chosen for each attempt."""
    hostfile: str | None = None
    """Reads the nodes from a hostfile instead of `[[node]]` tables: MLX's JSON, or lines of `host:slots`. Default:
    none."""


class NodeConfig(_Section):
    """One table per rank, rank 0 first. Paths are those of the node itself: absolute or below `~`, the home directory
    of its user; if the node is this machine, also relative to the configuration file."""

    name: str
    """Unique name of the node. Default: `node0`, `node1`, …"""
    ssh: Annotated[str, AfterValidator(accepts(formats.host_form))] = "127.0.0.1"
    """How to reach the node: `[user@]host[:port]`. `127.0.0.1` is this machine, without ssh."""
    ips: tuple[Annotated[str, AfterValidator(accepts(formats.address_form))], ...] = Field(
        default=("127.0.0.1",), max_length=MAX_ADDRESSES
    )
    """Up to 8 IPv4 addresses on which the rank listens. Default: chosen from the network interfaces of the nodes."""
    python: str
    """Python interpreter that has mlx and mlx-lm, or for framework `torch` torch; required for a remote node. Default:
    on this machine, the interpreter that runs flightdeck."""
    workdir: str
    """Directory in which the rank runs. Default: `~`; on this machine the folder of the configuration file."""
    model: str | None = None
    """Where the model is on this node. Default: `model` in `[job]`."""
    data: str | None = None
    """Where the training data is on this node. Default: `data` in `[job]`."""
    rdma: RdmaRow | None = None
    """RDMA device towards each rank, in their order, a list of them with several cables, and `""` for the node itself:
    `["", "rdma_en5"]`. Default: chosen from the Thunderbolt cables."""
    processes: int = Field(default=1, ge=1, le=64)
    """Ranks on this node: usually its number of NVIDIA GPUs. They are nodes of their own in all that is shown:
    `<name>.0`, `<name>.1`, …; but for an `elastic` job."""
    share: float | None = Field(default=None, ge=1e-6, le=1e6)
    """Relative share of the global batch. Default: by the calibration, or equal shares."""
    validates: bool | None = Field(default=None, alias="validate")
    """Take part in validation and test, with strategy `data` or `local`. `false`: the node waits while the others
    compute them. Default: `false` for an M4 Max in full fine-tuning of 4B parameters or more, if another node takes
    part."""

    model_config = ConfigDict(populate_by_name=True)

    @property
    def local(self) -> bool:
        return SshTarget.parse(self.ssh).local


class JobConfig(_Section):
    """The training: either mlx-lm fine-tuning (`model`, `data` and the keys of the second table) or a custom
    `command`."""

    name: str
    """Name of the job. Default: the name of the model's folder, or of the script."""
    framework: Framework = "mlx"
    """`mlx` trains with MLX and mlx-lm, `torch` with PyTorch and Accelerate, FSDP2 or DeepSpeed, from the same keys."""
    command: tuple[str, ...] | None = None
    """A custom program and its arguments instead of the built-in training: `["python", "my_script.py"]`. `{rank}` in an
    argument is the rank. With framework `torch` also `["torchrun", "my_script.py"]`, `["accelerate", "launch",
    "my_script.py"]` or `["deepspeed", "my_script.py"]`: Flight Deck takes the launcher's place. Default: none."""
    elastic: bool = False
    """With framework `torch` and a command: one `torchrun` on each node starts its `processes` and finds the others by
    the c10d rendezvous, which rank 0's node holds. A lost node leaves the others training, as long as `min_nodes` of
    `[recovery]` remain; failed workers are started again, `max_restarts` times."""
    logging_dir: _HeadPath | None = None
    """With framework `torch` and a command: folder on rank 0's node, absolute or below its workdir, in which the script
    writes TensorBoard files, as `Accelerator(log_with="tensorboard")` and the Trainer's `report_to` do. The run's
    metrics are then read from them. Default: none, and they are read from what the script prints."""
    metrics: Annotated[str, AfterValidator(accepts(formats.pattern_form))] | None = None
    """With a command that prints its metrics in a form that is not known: a regular expression for its lines, whose
    named groups are numbers: `step`, `loss` or `val_loss`, and also `total` (steps), `epoch`, `epochs`, `lr`,
    `grad_norm`, `tokens_per_second`. No other line is read then. In alternatives, `iter` is a step, too, and
    `train_loss` a loss. `flightdeck metrics --try FILE` tries it. Default: none."""
    script: str | None = None
    """A short way to write a command: `"train.py --lr 1e-4"` is `["python", "train.py", "--lr", "1e-4"]`. Default:
    none."""
    model: str | None = None
    """The model's path as written; `NodeConfig.model` is the path on a node."""
    data: str | None = None
    """The data's path as written; `NodeConfig.data` is the path on a node."""
    fine_tune_type: FineTuneType = "lora"
    strategy: Strategy = "data"
    """With framework `mlx`: `data`: every rank has the whole model. `sharded`: parameters, gradients and optimizer
    state are partitioned. `pipeline`: every rank has some of the layers. `local`: every rank trains the whole model by
    itself, and the weights are averaged every `local_steps` updates: another algorithm. With framework `torch`: `ddp`,
    `fsdp` (FSDP2), `deepspeed` (ZeRO), or `auto`, by the memory of the GPUs. Default: `data` with `mlx`, `auto` with
    `torch`."""
    layer_split: Annotated[str, AfterValidator(accepts(formats.split_form))] | None = None
    """Layers of each pipeline rank as half-open ranges: `"0-8,8-36"`. Default: by the memory of the nodes."""
    mlx_lm: dict[str, Any] = Field(default_factory=dict)
    """All keys of an mlx-lm training YAML with defaults filled in; [job] has priority over the YAML file."""
    given: tuple[str, ...] = ()
    """The keys of `mlx_lm` that the configuration sets; the others are defaults."""
    unused: tuple[str, ...] = ()
    """Keys that the configuration sets, and that are of the other framework alone."""
    rate_by_rule: bool = False
    """learning_rate = "auto": its value in `mlx_lm` is the rule's."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables for every rank, also `MLX_*` that a launch does not set itself: `FLIGHTDECK_*`, `MLX_RANK`,
    `MLX_HOSTFILE`, `MLX_IBV_DEVICES`, `MLX_WORLD_SIZE` and `MLX_JACCL_*` are reserved. Default: none."""
    data_quality_report: _HeadPath | None = None
    """JSON report on the training data, on this machine: its number of examples, and whether training on it is allowed.
    Default: none."""
    chunking: bool = True
    """Stream large datasets in chunks instead of keeping them in memory."""
    chunk_size: int = Field(default=50_000, ge=1)
    """Examples per chunk. Smaller datasets are not streamed."""
    display_sleep: bool = False
    """Put each Mac's display to sleep when an attempt starts, and wake it at its end: a display that is lit can panic
    a Mac that trains ([mlx#3267](https://github.com/ml-explore/mlx/issues/3267)). On Linux it does nothing."""
    task: Task | None = None
    """The use of another run's result in place of a training; the other keys are those of that run."""

    def redactor(self) -> Redactor:
        """Takes the values of `env`, and this process's secrets, out of texts."""
        return Redactor(self.env)

    @property
    def words(self) -> tuple[str, ...]:
        """The command's; none for a training."""
        return self.command or ()

    @property
    def shown_command(self) -> tuple[str, ...]:
        """Its words without credentials."""
        return tuple(self.redactor().words(self.words))

    @property
    def trackers(self) -> tuple[str, ...]:
        """Services of `report_to` that the head writes from the run's metrics."""
        return tuple(name for name in HEAD_TRACKERS if name in services(self.mlx_lm.get("report_to")))

    @property
    def node_reporters(self) -> tuple[str, ...]:
        """The other services of `report_to`, which rank 0 reports to."""
        return tuple(name for name in services(self.mlx_lm.get("report_to")) if name not in HEAD_TRACKERS)

    @property
    def kind(self) -> JobKind:
        task = self.task.kind if self.task is not None else None
        command = self.command is not None
        return job_kind(self.framework, self.strategy, command=command, elastic=self.elastic, task=task)


Share = Annotated[float, Field(ge=0, le=0.9)]


class DataConfig(_Section):
    """How `data` of `[job]` is read where it is no folder of mlx-lm's train, valid and test.jsonl: a file, or a folder
    of files, of JSONL, JSON, CSV, TSV, Parquet, text or Markdown. The whole table may be left out."""

    format: DataFormat = "auto"
    """The shape of the rows. `auto` recognises each row's: `chat` (OpenAI's messages), `sharegpt`, `alpaca`,
    `completions` (a prompt and its answer), `preference` (the chosen answer is trained on) or `text`."""
    columns: dict[DataColumn, str] = Field(default_factory=dict)
    """The file's keys of the parts of a row: `{ prompt = "Q", completion = "A" }`, of a conversation's messages `role`
    and `content`. Default: as they are often called."""
    subset: Annotated[str, AfterValidator(accepts(formats.subset_form))] | None = None
    """One of a data set's subsets, as its card (README.md) declares them, or one of its folders: `"main"` of
    `hf:openai/gsm8k`. Default: the one that the card has as default; all folders where it declares none."""
    splits: Annotated[dict[Literal["train", "valid", "test"], str], AfterValidator(accepts(formats.splits_form))] = (
        Field(default_factory=dict)
    )
    """The rows that are trained on, validated and tested, where the names of files do not say it: `{ train =
    "train_sft[:80%]", valid = "train_sft[-10%:]" }`, as Hugging Face's `load_dataset` names splits and their rows.
    Default: by the names of files."""
    valid: Share | None = None
    """Share of the rows that is split off for validation where there is no such file, by the hash of each row. Default:
    0.05; none from a folder with mlx-lm's train.jsonl, or with `splits`."""
    test: Share | None = None
    """The same for the test. Default: none."""
    push: bool = False
    """Copy this machine's `data` to the nodes at each launch, into a folder of Flight Deck's own there, named by its
    content: only what has changed is sent, each file verified by its hash."""

    @property
    def options(self) -> dict[str, Any]:
        """All that differs from the defaults, as the nodes get it."""
        return self.model_dump(exclude_defaults=True, exclude={"push"})


CheckName = Literal[
    "ssh_connectivity", "pre_rdma_sync", "versions_match", "hostfile_valid", "ports_free", "model_present",
    "data_matches", "program_present", "checkpoint_layer", "gradient_layer", "worker_consistency", "worker_layer",
    "hardware_layer", "performance_layer", "health_check",
]  # fmt: skip
"""The checks of engine.checks.runner, which is above the configuration."""


class PreflightConfig(_Section):
    """The checks before a launch."""

    all_sum_s: float = Field(default=2.0, gt=0, le=60)
    """Duration of the all_sum test over all ranks, seconds."""
    skip: tuple[CheckName, ...] = ()
    """Checks to skip, by name. Default: none."""
    roots: tuple[_NodePath, ...] = ()
    """Folders in which scripts and checkpoints may be, besides the home, workdir and state directories; symlinks that
    leave all of them are refused. Default: none."""
    sync: bool = True
    """Run the sync script before a launch."""
    sync_script: _HeadPath = "~/Dev/sync-dev.sh"
    """Script on this machine that copies the project to the nodes. If it does not exist, that is a warning where it is
    named here, or the job is a command."""
    block_on_failure: bool = True
    """A failing sync script blocks the launch; otherwise it is a warning."""
    consistency: bool = True
    """Compare the files of the nodes before a launch."""
    consistency_threshold: float = Field(default=0.95, gt=0, le=1)
    """Smallest share of nodes that must agree."""
    exclude_divergent: bool = False
    """Launch without a divergent minority of nodes instead of blocking."""


class ConsistencyConfig(_Section):
    """Comparison of the ranks during training with strategy `data`, whose ranks are replicas."""

    enabled: bool = True
    """Compare the ranks."""
    every: int = Field(default=50, ge=1)
    """Optimizer updates between two comparisons of the parameters."""
    staleness: int = Field(default=5, ge=0)
    """Updates that a rank may be behind before an alarm."""
    loss_spread: float = Field(default=0.1, ge=0)
    """Spread of the ranks' losses that raises an alarm: log(1 + variance) / 10."""
    wasserstein: float = Field(default=1.0, ge=0)
    """Spread of the ranks' gradient norms that raises an alarm: mean distance from their mean."""
    on_corruption: Literal["stop", "warn"] = "stop"
    """When the parameters of replicas differ: stop at the last step at which all agreed, or continue with an alarm."""


class CalibrationConfig(_Section):
    """Measured speed of the nodes and their links."""

    enabled: bool = True
    """Use the stored calibration for the plan, the checks and the shares of the batch."""
    seconds: float = Field(default=120.0, gt=0, le=3600)
    """Measuring time per node, seconds; `--quick` takes 10."""
    max_age_days: float = Field(default=30.0, gt=0)
    """Days after which a calibration is no longer used."""


class CheckpointConfig(_Section):
    """Checkpoints of the whole training state, from which a run continues exactly. They are written in the
    background."""

    enabled: bool = True
    """Write checkpoints of the training state."""
    every: int | None = Field(default=None, ge=1)
    """Optimizer updates between two checkpoints. Default: as often as the job saves its adapters (`save_every`)."""
    keep: int = Field(default=3, ge=1, le=1000)
    """Checkpoints to keep. Older ones are removed after a newer one was verified."""
    compression: Literal["none", "gzip", "zstd"] = "none"
    """Compression of the checkpoints. MLX only."""
    destination: str | None = None
    """Folder for the checkpoints (another disk, NFS) on each node that writes, or an fsspec URL (`s3://…`, `gs://…`) to
    which they are copied (MLX only). With a partitioned strategy it must be a folder that all nodes can reach. Default:
    the run's folder on the node."""


class RecoveryConfig(_Section):
    """Restarts after a lost rank or connection, and limits of a stop. Times are in seconds."""

    lease_s: float = Field(default=60.0, ge=3)
    """A node that has been without contact for this long ends its ranks."""
    on_lease_expiry: Literal["end", "continue"] = "end"
    """End the ranks of a node whose lease has expired, or let them continue."""
    stop_grace_s: float = Field(default=2.5, ge=0)
    """Time to finish the current step after a stop request."""
    save_grace_s: float = Field(default=30.0, ge=0)
    """Time for a rank that is saving when the stop is requested."""
    term_grace_s: float = Field(default=0.8, ge=0)
    """Time between SIGTERM and SIGKILL."""
    max_restarts: int = Field(default=3, ge=0, le=1000)
    """Automatic restarts per run; 0 means that the first failure ends the run. With strategy `local` also the restarts
    of each rank but rank 0 by its own node, while the others go on."""
    min_nodes: int | None = Field(default=None, ge=1)
    """A restart may leave out lost nodes if this many remain. With a partitioned strategy and no shared
    `[checkpoint] destination` all nodes are needed. Default: all nodes."""
    backoff_s: float = Field(default=1.0, ge=0, le=3600)
    """Wait before the second restart without progress; doubles with each further one."""
    node_wait_s: float = Field(default=600.0, ge=0)
    """How long a restart waits for a node that it needs."""
    hang_s: float = Field(default=60.0, ge=1)
    """A run without a step for this long, and for 5 times its longest steps, is hung; so is a command with a stopped
    process."""
    stall_s: float = Field(default=600.0, ge=1)
    """The same limit while a rank loads or saves, for a batch of a validation, for the first steps, and for a command
    that neither prints nor works."""
    restart_commands: bool = False
    """Restart a custom `command` too. It must restore its own state."""
    without_state: Literal["restart", "fail"] = "restart"
    """Begin a training anew that made steps and saved no state, within the two limits that follow, or end it."""
    restart_from_scratch_within: int | None = Field(default=None, ge=0)
    """Most iterations that a training that begins anew repeats. Default: those from one checkpoint to the next."""
    restart_from_scratch_within_s: float = Field(default=1800.0, ge=0)
    """Most time that it repeats."""


NotifiedEvent = Literal["end", "failure", "recovery", "stall", "plateau", "queue_empty"]
_Variable = Annotated[str, Field(pattern="^env:[A-Za-z_][A-Za-z0-9_]{0,99}$")]


class WebhookConfig(_Section):
    """One table per receiver by HTTP. `env:NAME` is the value of a variable of the environment that launches."""

    url: Annotated[str, AfterValidator(accepts(formats.web_address_form))]
    """`https://…`, or `env:NAME`."""
    format: Literal["json", "ntfy", "slack", "discord"] = "json"
    """The service that takes it, or `json` for one object."""
    token: _Variable | None = None
    """`env:NAME`, sent as `Authorization: Bearer …`."""


class NotifyConfig(_Section):
    """Who is told how a run goes on, each event once. Off without `desktop`, `terminal`, `command`, `webhooks` or
    `apprise`. See [notifications](notifications.md)."""

    on: tuple[NotifiedEvent, ...] = ("end", "failure", "recovery", "stall", "plateau", "queue_empty")
    """The events that are told. `stall`: no step for half of the time after which a run is hung. `plateau`: see
    `plateau_validations`. `recovery`: a restart has made a step again."""
    desktop: bool = False
    """A notification of macOS (`osascript`), elsewhere by `notify-send`."""
    terminal: bool = False
    """The bell, and a notification of the terminal (OSC 9), by a console that is open."""
    command: tuple[str, ...] = ()
    """A program and its arguments, run on this machine with the event as JSON on its standard input."""
    webhooks: tuple[WebhookConfig, ...] = Field(default=(), max_length=8)
    """Receivers by HTTP: `[{ url = "https://ntfy.sh/topic", format = "ntfy" }]`. Default: none."""
    apprise: tuple[_Variable, ...] = Field(default=(), max_length=8)
    """Addresses for [Apprise](https://github.com/caronc/apprise), each as `"env:NAME"`. Needs the extra `notify`.
    Default: none."""
    plateau_validations: int = Field(default=5, ge=1)
    """Validations without a new best loss that are a plateau."""

    @property
    def active(self) -> bool:
        return bool(self.desktop or self.terminal or self.command or self.webhooks or self.apprise)

    @property
    def variables(self) -> tuple[str, ...]:
        """The names of those whose values are sent or are addresses."""
        named = [text for webhook in self.webhooks for text in (webhook.url, webhook.token or "")]
        return tuple(text.removeprefix("env:") for text in (*named, *self.apprise) if text.startswith("env:"))


class EnvironmentConfig(_Section):
    """The python environment that `flightdeck environments make` makes on nodes. The whole table may be left out."""

    requirements: Annotated[
        tuple[str, ...] | str | None, BeforeValidator(accepts(formats.listed_requirements_form))
    ] = None
    """Its packages: a list as in `["mlx==0.32.1", "mlx-lm"]`, or a requirements file on this machine. The lines are
    requirements by name, `--index-url` or `--extra-index-url`. Default: mlx and mlx-lm with all that they need, in the
    versions of this machine; required for framework `torch`."""
    python: Annotated[str, Field(pattern=r"^3\.1[0-9]$")] | None = None
    """Its Python: `"3.12"`. Default: this machine's where every node can have it, else the newest that all have."""
    wheels: _HeadPath | None = None
    """Folder on this machine with the wheels of all packages, which are sent to the nodes: nothing then comes from a
    package index. Default: none; a node that reaches no index gets the wheels that this machine downloads for it."""


Theme = Literal[
    "textual-dark", "textual-light", "nord", "gruvbox", "catppuccin-mocha", "dracula", "tokyo-night", "monokai",
    "flexoki", "catppuccin-latte", "catppuccin-frappe", "catppuccin-macchiato", "solarized-light", "solarized-dark",
    "rose-pine", "rose-pine-moon", "rose-pine-dawn", "atom-one-dark", "atom-one-light", "ansi-dark", "ansi-light",
]  # fmt: skip
"""Textual's own, which the engine does not import."""


class UiConfig(_Section):
    """The console."""

    theme: Theme = "textual-dark"
    """A theme of Textual."""
    ascii: bool = False
    """Draw with ASCII characters only."""


class Config(_Section):
    """A whole flightdeck.toml."""

    file: Path | None = None
    """The file it was read from; None for the demo."""
    digest: str = Field(default="", exclude=True, repr=False)
    """SHA-256 of what it makes run (load.programs_digest). Not part of a stored plan."""
    overrides: dict[str, Any] = Field(default_factory=dict, exclude=True, repr=False)
    """Settings that were given beside the file (overrides.Settings). Not part of a stored plan either."""
    cluster: ClusterConfig
    nodes: tuple[NodeConfig, ...] = Field(min_length=1)
    job: JobConfig
    data: DataConfig = DataConfig()
    preflight: PreflightConfig = PreflightConfig()
    consistency: ConsistencyConfig = ConsistencyConfig()
    calibration: CalibrationConfig = CalibrationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    notify: NotifyConfig = NotifyConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    ui: UiConfig = UiConfig()

    @property
    def folder(self) -> Path:
        """Where relative paths of this machine begin."""
        return self.file.parent if self.file is not None else Path("/")

    @property
    def torchrun(self) -> dict[str, str | int]:
        """Options of an elastic job's torchrun; none for any other."""
        return self.job.kind.torchrun(len(self.nodes), self.recovery.min_nodes, self.recovery.max_restarts)

    @property
    def starts_directly(self) -> bool:
        return self.job.kind.starts_directly(self.cluster.launcher)


SECTIONS: Final[dict[str, type[BaseModel]]] = {
    name: type(field.default) for name, field in Config.model_fields.items() if isinstance(field.default, BaseModel)
}
"""The tables with defaults for all keys."""
TABLES: Final = ("cluster", "node_defaults", "node", "job", *SECTIONS)


def on_node(text: str, node: NodeConfig, base: Path) -> str:
    """A path of [job] on `node`. On this machine relative paths are below `base`, the configuration's folder; on
    another machine they are below the node's workdir. The name of a data set of the Hub is no path."""
    if text.startswith(DATA_PREFIX):
        return text
    if node.local:
        return formats.resolved(text, base)
    below = text if text == "~" or text.startswith(("/", "~/")) else posixpath.join(node.workdir, text)
    return posixpath.normpath(below)


def select_nodes(config: Config, names: Collection[str], *, first: str | None = None) -> Config:
    """The configuration with only the nodes in `names`, in its own order, or in the same circle from `first` on. Ranks
    are renumbered; RDMA devices towards the other nodes are dropped, and a pipeline's layer_split where that is not for
    these. Raises InputError when no node is left."""
    kept = [rank for rank, node in enumerate(config.nodes) if node.name in names]
    if not kept:
        raise InputError("no node of the configuration is left")
    place = next((place for place, rank in enumerate(kept) if config.nodes[rank].name == first), 0)
    kept = kept[place:] + kept[:place]
    nodes = tuple(
        node.model_copy(update={"rdma": node.rdma and tuple(node.rdma[rank] for rank in kept)})
        for node in (config.nodes[rank] for rank in kept)
    )
    changed: dict[str, object] = {"nodes": nodes}
    if kept != [*range(len(config.nodes))] and config.job.layer_split is not None:
        changed["job"] = config.job.model_copy(update={"layer_split": None})
    return config.model_copy(update=changed)


def needs_all_nodes(config: Config) -> bool:
    """True if each node has a part of the training state that exists nowhere else, so that no restart can do without
    it."""
    local = config.checkpoint.enabled and config.checkpoint.destination is None
    return config.job.kind.state_needs_all(len(config.nodes), local_checkpoints=local)
