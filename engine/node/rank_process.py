"""A rank's process, the trainer or the user's own command, the log of its output, and the exception that it left."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.node import processes
from engine.protocol import attempt
from engine.protocol.attempt import AttemptSpec, NodeFiles, RankSpec, open_regular
from engine.protocol.launchers import option_value, rank_command

_CHUNK_BYTES = 65_536
_BUNDLE = Path(__file__).resolve().parents[2]
"""The folder that `engine` is imported from."""
TORCHRUN_ID_ENV = "TORCHELASTIC_RUN_ID"
_ACCELERATE_LAUNCH = _BUNDLE / "engine" / "torch_trainer" / "accelerate_launch.py"


class RankLog:
    """An append-only file. Errors of the disk never raise."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._unreported = 0
        self._marker = b""
        self.dropped_bytes = 0

    def append(self, data: bytes) -> None:
        """Store `data`, or as much of its beginning as fits on the disk."""
        lost = len(data) - self._store(data) if self._write_gap_marker() else len(data)
        self._unreported += lost
        self.dropped_bytes += lost

    def close(self) -> None:
        self._write_gap_marker()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _write_gap_marker(self) -> bool:
        """Write the marker of an earlier gap; False while not even that fits on the disk."""
        self._marker = self._marker[self._store(self._marker) :] if self._marker else b""
        if self._unreported and not self._marker:
            marker = f"\n[flightdeck] {self._unreported} bytes of output are missing here: disk full\n".encode()
            # Until its first byte is stored, the marker's number may still grow.
            if stored := self._store(marker):
                self._unreported, self._marker = 0, marker[stored:]
        return not self._unreported and not self._marker

    def _store(self, data: bytes) -> int:
        """Append what fits; returns the bytes stored."""
        stored, view = 0, memoryview(data)
        with contextlib.suppress(OSError):
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            while stored < len(data):
                stored += os.write(self._descriptor, view[stored:])
        return stored


class Pump:
    """A thread that copies bytes from the program's pipe to its log until the pipe ends, or until `finish`."""

    def __init__(self, source: int, log: RankLog, observe: Callable[[bytes], None] | None = None) -> None:
        """`observe` is given what the log is given."""
        self._observe = observe
        self._source = source
        self._log = log
        self._wake_read, self._wake_write = os.pipe()
        self._drain_deadline = float("inf")
        os.set_blocking(source, False)
        self._thread = threading.Thread(target=self._run, name="pump", daemon=True)
        self._thread.start()

    def finish(self, within_s: float) -> bool:
        """Read what is in the pipe now, without waiting for a process that still holds it; False when the log's disk
        did not take it within `within_s` seconds."""
        self._drain_deadline = time.monotonic() + within_s
        os.write(self._wake_write, b".")
        self._thread.join(within_s + 1.0)
        if self._thread.is_alive():
            return False
        os.close(self._wake_read)
        os.close(self._wake_write)
        return True

    def _run(self) -> None:
        # poll, not select, whose limit is descriptor 1,024.
        waiting = select.poll()
        waiting.register(self._source, select.POLLIN)
        waiting.register(self._wake_read, select.POLLIN)
        while time.monotonic() < self._drain_deadline:
            waiting.poll()
            try:
                chunk = os.read(self._source, _CHUNK_BYTES)
            except BlockingIOError:
                if self._drain_deadline != float("inf"):
                    break
                continue
            if not chunk:
                break
            self._log.append(chunk)
            if self._observe is not None:
                self._observe(chunk)
        os.close(self._source)
        self._log.close()


class RankProcess:
    """The rank's program in its own session and process group, with its output pipe and its control descriptor."""

    def __init__(self, spec: AttemptSpec, rank: RankSpec, files: NodeFiles) -> None:
        """Start it. Raises OSError, ValueError."""
        self.cooperative = spec.command is None
        control_read, self._control = os.pipe()
        self.output, output_write = os.pipe()
        self.environment = environment = _environment(spec, rank, files)
        environment[attempt.CONTROL_FD_ENV] = str(control_read)
        if not Path(rank.workdir).is_dir():
            raise FileNotFoundError(2, "no such working directory", rank.workdir)
        try:
            # The trainer imports from the bundle and changes to its working directory by itself.
            folder, passed = (_BUNDLE, (control_read,)) if self.cooperative else (Path(rank.workdir), ())
            self._process = processes.start_session(
                _arguments(spec, rank, files), folder, output_write,
                env=environment, stdin=subprocess.DEVNULL, pass_fds=passed,
            )  # fmt: skip
        finally:
            os.close(control_read)
            os.close(output_write)
        self.pid = self._process.pid

    def returncode(self) -> int | None:
        """As subprocess has it: negative for a signal, None while it runs."""
        return self._process.poll()

    def send(self, command: bytes) -> None:
        """STOP or EMERGENCY_CHECKPOINT, to a trainer."""
        # One that has already exited is seen by its return code.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._control, command)

    def close(self) -> None:
        """It has ended."""
        os.close(self._control)


def _environment(spec: AttemptSpec, rank: RankSpec, files: NodeFiles) -> dict[str, str]:
    own_files = {attempt.SPEC_ENV: str(files.spec), attempt.EVENTS_ENV: str(files.events(rank.rank))}
    environment = {**os.environ, **spec.env, attempt.NONCE_ENV: spec.nonce, **own_files}
    environment |= {"MLX_RANK": str(rank.rank), "PYTHONUNBUFFERED": "1"}
    if spec.as_torchrun and not spec.torchrun:
        # As torchrun does for its workers, whose store its agent has.
        role = environment.get("RANK", "0"), environment.get("WORLD_SIZE", "1")
        environment |= {
            "TORCHELASTIC_ERROR_FILE": str(files.error(rank.rank)),
            TORCHRUN_ID_ENV: torchrun_id(spec),
            "TORCHELASTIC_RESTART_COUNT": str(spec.attempt - 1),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            **dict(zip(("ROLE_RANK", "ROLE_WORLD_SIZE"), role)),  # noqa: B905  (Python 3.9)
            "ROLE_NAME": option_value(spec.command, "--role", "default"),
        }
    if spec.as_torchrun and int(environment.get("LOCAL_WORLD_SIZE", "1")) > 1:
        # As torchrun does: each rank would else have a thread for every core.
        environment.setdefault("OMP_NUM_THREADS", "1")
    if spec.torchrun:
        environment["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "[rank ${rank}] "
        # A store of their own for the workers of each round. In the agents' common one they would find what those of
        # the last round have left: they tell rounds apart by restarts, which the agents count differently.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    environment.setdefault("MLX_ENABLE_CACHE_THRASHING_CHECK", "0")  # as engine/trainer/__init__.py, for commands
    paths = [path for path in environment.pop("PYTHONPATH", "").split(os.pathsep) if path not in ("", str(_BUNDLE))]
    if paths:
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def torchrun_id(spec: AttemptSpec) -> str:
    """The name of an elastic job's rendezvous, which its workers have as TORCHRUN_ID_ENV."""
    return f"{spec.run_id}.{spec.attempt}"


def _torchrun(spec: AttemptSpec, rank: RankSpec, files: NodeFiles) -> list[str]:
    """torchrun and its options, as the agent of one node; the script and its arguments follow. It tells the lines of
    its workers apart by their ranks."""
    host = os.environ["MASTER_ADDR"]
    options = {
        **spec.torchrun,
        "--nproc-per-node": rank.processes,
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": f"{host}:{os.environ['MASTER_PORT']}",
        "--rdzv-id": torchrun_id(spec),
        "--rdzv-conf": f"is_host={int(rank.rank == 0)}",
        "--local-addr": rank.address or host,
        "--log-dir": files.workers(rank.rank),
        "--tee": 3,
    }
    return ["-m", "torch.distributed.run", *(str(word) for option in options.items() for word in option)]


def _arguments(spec: AttemptSpec, rank: RankSpec, files: NodeFiles) -> list[str]:
    """The program's arguments, with this node's python and paths in place of the placeholders."""
    if spec.command is None:
        return [sys.executable, "-m", spec.trainer]
    given = spec.command
    if spec.as_torchrun:
        given = rank_command(given, int(os.environ.get("LOCAL_RANK", "0")), str(_ACCELERATE_LAUNCH))
    if not given:
        raise ValueError("the command is empty")
    if spec.torchrun:
        script = given[1:]
        if script and script[0].startswith("-") and script[0] != "-m":
            # An option of python's, which torchrun does not know.
            script = ["--no-python", rank.python, *script]
        given = ["python", *_torchrun(spec, rank, files), *script]
    values = {"{workdir}": rank.workdir, "{model}": rank.model or "", "{data}": rank.data or ""}
    values |= {"{python}": rank.python, "{rank}": str(rank.rank)}
    program, *arguments = given
    if program in ("python", "python3"):
        program = rank.python
    elif os.sep not in program:
        program = processes.find_program(program, rank.python) or program
    command = [program, *arguments]
    for placeholder, value in values.items():
        command = [argument.replace(placeholder, value) for argument in command]
    return command


_MOST_BYTES = 1 << 20
_TEXT, _TRACEBACK = 2000, 20_000
"""Characters that are kept."""


def reported_exception(files: NodeFiles, rank: int) -> dict[str, Any] | None:
    """The fields of the `failure` event of a rank whose PyTorch program left an error file, as torchelastic's `record`
    does (torch/distributed/elastic/multiprocessing/errors); None without one that can be read.
    Of an elastic job's workers, the first failure of the last round."""
    rounds = files.workers(rank).glob("*/attempt_*")
    last = max(rounds, key=lambda folder: (len(folder.name), folder.name), default=None)
    reports = [_read(path) for path in ([files.error(rank)] if last is None else last.glob("*/error.json"))]
    readable = [report for report in reports if report is not None]
    return min(readable, key=lambda report: float(report["raised_at"]), default=None)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        with open_regular(path) as file:
            message = json.loads(file.read(_MOST_BYTES))["message"]
        # An exception, or the text of what a handler in C++ has left.
        text = message["message"] if isinstance(message, dict) else message
        extra = message.get("extraInfo", {}) if isinstance(message, dict) else {}
        kind, _, rest = str(text).partition(": ")
        named = kind.replace(".", "").isidentifier() and bool(rest)
        return {
            "error_type": kind.rpartition(".")[2] if named else "Error",
            "message": (rest if named else str(text))[:_TEXT],
            "traceback": str(extra.get("py_callstack", ""))[-_TRACEBACK:],
            "raised_at": float(extra.get("timestamp", 0)),
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
