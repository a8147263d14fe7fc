"""The files of one attempt on a node (the head's specification, the keeper's identity and exit record), and the
commands on a rank's control FIFO."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

NONCE_ENV = "FLIGHTDECK_NONCE"
"""In the environment of every process of an attempt: an abort proves by it that no process is left."""
CHECK_PREFIX = "preflight-"
"""Begins the names of the folders of preflight's own attempts, so that the cleanup of a check never removes a run's."""
EVENTS_ENV = "FLIGHTDECK_EVENTS"
"""Path of the trainer's event file."""
SPEC_ENV = "FLIGHTDECK_SPEC"
"""Path of spec.json."""
CONTROL_FD_ENV = "FLIGHTDECK_CONTROL_FD"
"""File descriptor on which the trainer reads commands; its EOF means that the keeper is gone."""

STOP, END, EMERGENCY_CHECKPOINT = b"stop\n", b"end\n", b"emergency_checkpoint\n"
"""The head's commands to a keeper: stop cooperatively; end the group now; a peer is lost, so the trainer saves the
state of its last finished update and exits."""
_HEARTBEAT = b"heartbeat "
_LEASE_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def lease_clock() -> float:
    """Seconds on a clock that nobody sets, that counts while the machine sleeps, and is the same for all its processes:
    CLOCK_BOOTTIME on Linux, CLOCK_MONOTONIC on macOS (clock_gettime(2), (3)). time.monotonic() stands still in sleep: a
    lease on it would outlive what the other side waits for."""
    return time.clock_gettime(_LEASE_CLOCK)


def heartbeat(at: float) -> bytes:
    """The command that renews a keeper's lease as of `at`, by the node's `lease_clock`."""
    return b"%s%.3f\n" % (_HEARTBEAT, at)


def heartbeat_time(command: bytes) -> float | None:
    """The time of a heartbeat; None for another command."""
    with contextlib.suppress(ValueError):
        return float(command[len(_HEARTBEAT) :]) if command.startswith(_HEARTBEAT) else None
    return None


@dataclass(frozen=True)
class RankSpec:
    rank: int
    node: str
    """Its name, for messages."""
    python: str
    """Absolute path of the interpreter on the node."""
    workdir: str
    """Directory the rank's program runs in, on the node."""
    model: str | None = None
    data: str | None = None
    adapter_path: str | None = None
    resume_adapter_file: str | None = None
    address: str | None = None
    """The first of its addresses for the other ranks."""
    processes: int = 1
    """Workers that an elastic job's torchrun starts on the node."""
    restarts: int = 0
    """How often its keeper starts its program again while the other ranks go on."""
    prints_metrics: bool = False
    """They are read from what its program prints."""
    display_sleep: bool = False
    """Its keeper puts the Mac's display to sleep, and wakes it."""
    share: float = 1.0
    """Relative share of the global batch, > 0."""
    validates: bool = True
    """Takes part in validation and test, where each rank has the whole model."""
    checkpoint_folder: str | None = None
    """Path on the node or fsspec URL; None: below the run's folder on the node."""


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
    """mlx-lm's keys and ours; None when `command` is given."""
    command: list[str] | None = None
    """The user's own program instead of the trainer."""
    trainer: str = "engine.trainer.main"
    """The module that a rank runs where there is no `command`."""
    task: dict[str, Any] | None = None
    """The fields of engine.protocol.task.Task, where the run uses another one's result; None: it trains."""
    as_torchrun: bool = False
    """The command gets the variables of a torchrun's worker, and its launcher's place is taken."""
    logging_dir: str | None = None
    """Folder of the TensorBoard files of a PyTorch command, below the rank's workdir; None: it prints its metrics."""
    metrics: str | None = None
    """Regular expression for the lines of a command that have its metrics; None: the forms that are known."""
    env: dict[str, str] = field(default_factory=dict)
    lease_s: float = 60.0
    on_lease_expiry: str = "end"
    """"end" or "continue"."""
    stop_grace_s: float = 3.0
    """From "stop" to TERM, unless the trainer is saving."""
    save_grace_s: float = 30.0
    """From "stop" to TERM while the trainer is saving."""
    term_grace_s: float = 1.0
    """From TERM to KILL."""
    replica_check_every: int = 50
    """Updates from one comparison of the ranks' parameters to the next; 0: never."""
    on_corruption: str = "stop"
    """"stop" or "warn"."""
    checkpoint_every: int = 0
    """Updates from one checkpoint of the state to the next; 0: none."""
    checkpoint_keep: int = 3
    checkpoint_compression: str = "none"
    """"none", "gzip" or "zstd"."""
    resume: bool = False
    """Resume from the newest complete state that any rank has."""
    torchrun: dict[str, str | int] = field(default_factory=dict)
    """Options of the torchrun that each rank is, with workers of its own; none where the program is the rank."""
    needs_state: str = ""
    """Why `resume` must not begin at iteration 1 where no rank has a state; "" where it may."""
    accept_changed_data: bool = False
    """Resume although the data or the base model are not those of the state."""
    manifests: list[tuple[str, str]] = field(default_factory=list)
    """Saved states and the SHA-256 of their manifests, as the journal recorded them (Manifest.journal_entry)."""
    group_key: str = field(default_factory=lambda: secrets.token_hex(32))
    """By which the ranks of strategy "local" know one another: in this file alone, while the nonce stands in `ps`."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> AttemptSpec:
        """Raises ValueError, TypeError for other fields."""
        raw = json.loads(text)
        raw["ranks"] = [RankSpec(**rank) for rank in raw["ranks"]]
        return cls(**raw)

    def rank(self, number: int) -> RankSpec:
        """Raises ValueError."""
        if (spec := next((rank for rank in self.ranks if rank.rank == number), None)) is None:
            raise ValueError(f"it has no rank {number}")
        return spec


@dataclass(frozen=True)
class Identity:
    """A rank's processes: a pid alone is reused, a pid with start time and boot id is not."""

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
    """How a rank ended, by its own keeper. Either `code` or `signal` is set."""

    rank: int
    attempt: int
    code: int | None
    signal: int | None
    ended_at: float
    """Wall clock, seconds since the epoch, on the node."""
    log_bytes: int
    """Size of rank<k>.log after the program's last output."""
    dropped_bytes: int = 0
    """Output that could not be stored (disk full)."""
    stopped_by: str | None = None
    """Why the keeper ended it: "stop", "end", "lease", "signal TERM" …; None if it ended by itself."""
    error: str | None = None
    """Why the program could not be started, in one line."""
    asked_to_leave: bool = False
    """A supervisor had told it that a peer is lost, for it to save its state and exit."""


def _of_rank(ending: str) -> Callable[[NodeFiles, int], Path]:
    return lambda files, rank: files.directory / f"rank{rank}.{ending}"


@dataclass(frozen=True)
class NodeFiles:
    """The paths of one attempt on a node."""

    directory: Path

    @classmethod
    def for_attempt(cls, node_root: Path, run_id: str, attempt: int) -> NodeFiles:
        return cls(node_root / "runs" / run_id / "attempts" / str(attempt))

    @property
    def spec(self) -> Path:
        return self.directory / "spec.json"

    @property
    def start(self) -> Path:
        return self.directory / "start.sh"

    control = _of_rank("in")
    identity = _of_rank("identity.json")
    log = _of_rank("log")
    events = _of_rank("events.jsonl")
    exit = _of_rank("exit.json")
    keeper_log = _of_rank("keeper.log")
    error = _of_rank("error.json")
    """Where torchelastic's `record` leaves the exception of a PyTorch program."""
    workers = _of_rank("workers")
    """The logs and error files of an elastic job's torchrun: <run>/attempt_<n>/<local rank>/error.json."""

    @property
    def fenced(self) -> Path:
        return self.directory / "fenced"

    def fence(self) -> None:
        """No rank of the attempt starts here from now on. Does nothing on a full disk, or before the directory exists:
        the caller kills what has started in any case."""
        with contextlib.suppress(OSError):
            self.fenced.touch(mode=0o600)


def regular_descriptor(path: Path, flags: int) -> int:
    """The descriptor of a file, mode 0600 where it is made. Raises OSError, also for what is no regular file: a FIFO or
    a device may be waited for without end."""
    with contextlib.suppress(FileNotFoundError):
        kind = path.stat().st_mode
        if not stat.S_ISREG(kind):
            what = "it is a directory" if stat.S_ISDIR(kind) else "it is not a regular file"
            raise OSError(errno.EINVAL, what, str(path))
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def open_regular(path: Path) -> BufferedReader:
    """A file, to be read. Raises OSError as `regular_descriptor`."""
    return os.fdopen(regular_descriptor(path, os.O_RDONLY), "rb")


def read_regular(path: Path) -> bytes:
    """The content of a file. Raises OSError as `open_regular`."""
    with open_regular(path) as file:
        return file.read()


_FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)
"""On macOS fsync leaves the data in the drive's cache; fcntl(2)."""
_NO_FULL_SYNC = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.ENOSYS}
"""The answers of volumes without F_FULLFSYNC, which is "currently implemented on HFS, MS-DOS (FAT), UDF and APFS"
(fcntl(2)), so not of SMB, NFS and FUSE."""


def sync_file(descriptor: int) -> bool:
    """Flush to the disk itself; False where the volume can only be asked to store it (fsync). Raises OSError."""
    if _FULL_SYNC is not None:
        try:
            fcntl.fcntl(descriptor, _FULL_SYNC)
            return True
        except OSError as error:
            if error.errno not in _NO_FULL_SYNC:
                raise
    os.fsync(descriptor)
    return _FULL_SYNC is None


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # F_FULLFSYNC is for files.
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path, mode: int | None = None) -> Iterator[BinaryIO]:
    """A file for what will be at `path`: a reader sees all of it, on disk, or what was there before. `mode`: by default
    that of what was there. Raises OSError."""
    if mode is None:
        mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o666
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            sync_file(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, text: str) -> None:
    """Replace a small file, mode 0600."""
    with replacing(path, 0o600) as file:
        file.write(text.encode())


def read_identity(path: Path) -> Identity | None:
    """None while there is no file, and for one that is damaged."""
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
        return Identity(**json.loads(read_regular(path)))
    return None


def read_exit(path: Path) -> ExitRecord | None:
    """None while there is no file, and for one that is damaged."""
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
        return ExitRecord(**json.loads(read_regular(path)))
    return None


def size_of(path: Path) -> int | None:
    """Bytes; 0 without such a file, None when that cannot be found out."""
    try:
        return path.stat().st_size
    except OSError as error:
        return 0 if isinstance(error, FileNotFoundError) else None
