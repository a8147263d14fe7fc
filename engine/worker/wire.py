"""What the head and a node's processes say to each other: files, their names, and their JSON shapes.

This is the one owner of the format. The worker writes it with the standard library alone; the engine reads it here.

On a node, below `<node root>/runs/<run id>/attempts/<n>/` (0700):

    spec.json               AttemptSpec, written by the head before launch (0600)
    start.sh                what mlx.launch runs on every rank: execs this rank's python on the keeper
    rank<k>.in              FIFO, the head's word to keeper k: "beat", "stop", "end", "rescue" lines
    rank<k>.identity.json   Identity of keeper and trainer, written by the keeper
    rank<k>.log             every byte the rank's program prints, both streams
    rank<k>.events.jsonl    the trainer's structured events, one JSON object a line
    rank<k>.exit.json       ExitRecord, written last by the keeper
    rank<k>.keeper.log      the keeper's own troubles
    fenced                  made by whoever ends the attempt: a keeper that is late does not start its rank any more
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

WIRE_VERSION = 1

NONCE_ENV = "FLIGHTDECK_NONCE"
"""In the environment of every process of an attempt: what an abort looks for when it proves that nothing is left."""
CHECK_PREFIX = "preflight-"
"""How the folders of what preflight starts begin: no run's do, and what ends a check removes no other."""
EVENTS_ENV = "FLIGHTDECK_EVENTS"
"""Path of the trainer's event file."""
SPEC_ENV = "FLIGHTDECK_SPEC"
"""Path of spec.json."""
CONTROL_FD_ENV = "FLIGHTDECK_CONTROL_FD"
"""File descriptor on which the trainer reads "stop" lines; its EOF means that the keeper is gone."""

BEAT, STOP, END, RESCUE = b"beat\n", b"stop\n", b"end\n", b"rescue\n"
"""The head's words to a keeper: the lease goes on; stop cooperatively; end the group now; a peer is lost, so have the
trainer write the state of its last finished step and leave."""


@dataclass(frozen=True)
class RankSpec:
    """One rank: where it runs and with what."""

    rank: int
    node: str
    host: str
    """Address of the node, for messages."""
    python: str
    """Absolute path of the interpreter on the node."""
    workdir: str
    """Directory the rank's program runs in, on the node."""
    model: str | None = None
    data: str | None = None
    adapter_path: str | None = None
    resume_adapter_file: str | None = None
    share: float = 1.0
    """Relative share of the global batch, > 0."""
    checkpoint_folder: str | None = None
    """Where this run's checkpoints go, on the node, or an fsspec address; None: below the run's folder on the node."""


@dataclass(frozen=True)
class AttemptSpec:
    """One launch of a run, the same bytes on every node."""

    run_id: str
    attempt: int
    nonce: str
    backend: str
    world_size: int
    ranks: list[RankSpec]
    job: dict[str, Any] | None = None
    """mlx-lm's own keys plus `strategy`; None when `command` is given."""
    command: list[str] | None = None
    """The user's own program instead of the trainer."""
    env: dict[str, str] = field(default_factory=dict)
    lease_s: float = 60.0
    on_lease_expiry: str = "end"
    """"end" or "continue"."""
    stop_grace_s: float = 3.0
    """From "stop" to TERM, unless the trainer has said that it is saving."""
    save_grace_s: float = 30.0
    """From "stop" to TERM, once the trainer has begun to save."""
    term_grace_s: float = 1.0
    """From TERM to KILL."""
    replica_check_every: int = 50
    """Updates between two comparisons of the ranks' parameters; 0: never."""
    on_corruption: str = "stop"
    """"stop" or "warn"."""
    checkpoint_every: int = 0
    """Updates from one checkpoint of the state to the next; 0: none."""
    checkpoint_keep: int = 3
    checkpoint_compression: str = "none"
    """"none", "gzip" or "zstd"."""
    resume: bool = False
    """Go on from the newest whole state that any rank has, instead of from the beginning."""
    reached: int = 0
    """The iteration that the run had reached before this attempt: with `resume`, it then does not begin at 1 again."""
    version: int = WIRE_VERSION

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> AttemptSpec:
        """Raises ValueError when the document is of another wire version."""
        raw = json.loads(text)
        if raw.get("version") != WIRE_VERSION:
            raise ValueError(f"wire version {raw.get('version')}, this worker speaks {WIRE_VERSION}")
        raw["ranks"] = [RankSpec(**rank) for rank in raw["ranks"]]
        return cls(**raw)


@dataclass(frozen=True)
class Identity:
    """Who a rank's processes are: pid alone is reused, pid with start time and boot id is not."""

    rank: int
    run_id: str
    attempt: int
    nonce: str
    boot_id: str
    keeper_pid: int
    keeper_start: str
    trainer_pid: int
    trainer_pgid: int
    trainer_start: str
    started_at: float
    """Wall clock, seconds since the epoch, on the node."""


@dataclass(frozen=True)
class ExitRecord:
    """How a rank ended, as its own keeper saw it. Either `code` or `signal` is set."""

    rank: int
    attempt: int
    code: int | None
    signal: int | None
    ended_at: float
    """Wall clock, seconds since the epoch, on the node."""
    log_bytes: int
    """Size of rank<k>.log when the program's output had ended."""
    dropped_bytes: int = 0
    """Output that could not be stored (disk full)."""
    stopped_by: str | None = None
    """Why the keeper ended it: "stop", "end", "lease", "signal TERM" …; None when it ended by itself."""
    error: str | None = None
    """Why the program could not be started, in one line."""


ALL_SUM_LARGE_BYTES = 4 * 2**20
"""The largest array that `worker.all_sum` sums, the one that its bandwidth is of."""


@dataclass
class AllSumResult:
    """What one rank of the preflight's all_sum measured (`worker.all_sum` writes it)."""

    rank: int
    size: int = 0
    """Of MLX's group; 0 when there was none."""
    exact: bool = False
    """Sums of small and of large arrays came out to the bit."""
    latency_s: float | None = None
    """Median of one number's all_sum."""
    bandwidth_bytes_per_s: float | None = None
    """Median, payload bytes over time, of the largest array."""
    error: str | None = None
    """One line."""


@dataclass(frozen=True)
class MeasureSpec:
    """What `worker.calibrate` measures, on one node alone. Paths are absolute on it."""

    workdir: str
    job: dict[str, Any] | None
    """As AttemptSpec has it; None is a job with a command of its own, for which a stand-in is measured."""
    model: str | None
    data: str | None
    batch: int
    """Sequences of each step."""
    seconds: float
    """Of measuring, apart from loading and warming up."""
    env: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> MeasureSpec:
        return cls(**json.loads(text))


@dataclass
class MeasureProgress:
    """How far `worker.calibrate` has come."""

    phase: str
    """ "loading", "probing", "warming up" or "measuring"."""
    elapsed_s: float = 0.0
    """Of measuring."""
    steps: int = 0
    examples_per_s: float | None = None


@dataclass
class Measured:
    """What `worker.calibrate` measured; engine.measured.NodeMeasure says what each is."""

    examples_per_s: float | None = None
    spread: float | None = None
    windows: int = 0
    tokens_per_s: float | None = None
    step_s: float | None = None
    batch: int | None = None
    overhead_s: float | None = None
    steps: int = 0
    measured_s: float = 0.0
    state_bytes: int | None = None
    gradient_bytes: int | None = None
    probes: list[tuple[int, int]] = field(default_factory=list)
    """(batch, peak bytes)"""
    qos: str | None = None
    problem: str | None = None


@dataclass(frozen=True)
class NodeFiles:
    """The paths of one attempt on a node."""

    directory: Path

    @classmethod
    def of(cls, node_root: Path, run_id: str, attempt: int) -> NodeFiles:
        return cls(node_root / "runs" / run_id / "attempts" / str(attempt))

    @property
    def spec(self) -> Path:
        return self.directory / "spec.json"

    @property
    def start(self) -> Path:
        return self.directory / "start.sh"

    def control(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.in"

    def identity(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.identity.json"

    def log(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.log"

    def events(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.events.jsonl"

    def exit(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.exit.json"

    def keeper_log(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.keeper.log"

    @property
    def fenced(self) -> Path:
        return self.directory / "fenced"

    def fence(self) -> None:
        """Let no rank of the attempt start here from now on. On a full disk, or before the directory is there, nothing
        is done: what has started is killed all the same."""
        with contextlib.suppress(OSError):
            self.fenced.touch(mode=0o600)


def write_atomic(path: Path, text: str) -> None:
    """Write a small file so that a reader sees all of it or nothing: temp file, fsync, rename; 0600."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_identity(path: Path) -> Identity | None:
    """The identity at `path`, or None while there is none."""
    try:
        return Identity(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None


def read_exit(path: Path) -> ExitRecord | None:
    """The exit record at `path`, or None while there is none."""
    try:
        return ExitRecord(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
