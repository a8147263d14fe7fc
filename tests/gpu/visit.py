"""One visit to a GPU machine: each part in a process of its own, one after the other, within a time for all of them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import IO, Final

from tests.gpu.part import MARK, ROOT, Part, kill_family
from tests.gpu.results import (
    LOG,
    MOST_BYTES,
    Row,
    Status,
    append_row,
    is_failure,
    newest,
    now,
    read_rows,
    write_table,
)
from tests.gpu.run_part import Task

GROUPS: Final = {"torch": "tests.gpu.torch_parts", "mlx": "tests.gpu.mlx_parts"}
"""The framework that a group's parts need -> the module that has them as PARTS."""
INTERPRETERS: Final = {"torch": ROOT / ".venv-torch" / "bin" / "python"}
"""Where a framework is looked for beside this interpreter's own packages."""
_END_S: Final = 5.0
"""Left of the visit's time for its table."""
_POLL_S: Final = 0.05
_HIDES_GPUS: Final = {"CUDA_VISIBLE_DEVICES": ""}


class Ended(BaseException):
    """The visit was told to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass(frozen=True)
class Chosen:
    """A part of a group, and the interpreter that has the group's framework (None: there is none here)."""

    part: Part
    module: str
    framework: str
    python: str | None


@dataclass
class VisitRunner:
    """Runs parts and writes what came of them into `out`."""

    out: Path
    dry: bool
    limit_s: float
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    _started: float = field(default_factory=time.monotonic)

    @property
    def remaining_s(self) -> float:
        return self._started + self.limit_s - time.monotonic()

    def run(self, chosen: Sequence[Chosen]) -> int:
        """Run all; the exit code: 0, 1 when a part of this visit failed or missed a target, 128 + N after signal N."""
        self.out.mkdir(parents=True, exist_ok=True)
        append_row(self.out, head_row(self.id, self.dry))
        code = 0
        waiting = list(chosen)
        with ending_by_signals():
            try:
                while waiting:
                    self._run_or_say_why(waiting[0])
                    waiting.pop(0)
                    write_table(self.out)
            except Ended as ended:
                code = 128 + ended.number
                for each in waiting:
                    self._end(each.part, Status.NOT_RUN, f"the visit was ended by {ended}")
        print(f"\n{write_table(self.out)}", flush=True)
        parts = {each.part.name for each in chosen}
        failed = any(is_failure(row) for row in newest(read_rows(self.out)) if row.part in parts)
        return code or int(failed)

    def _run_or_say_why(self, chosen: Chosen) -> None:
        part, left = chosen.part, self.remaining_s - _END_S
        limit_s = part.limit_of(dry=self.dry)
        if chosen.python is None:
            self._end(part, Status.CANNOT, f"no python here has {chosen.framework}: {sys.executable} lacks it")
        elif limit_s > left:
            why = f"it may take {limit_s:.0f} s, and {max(0.0, left):.0f} s are left; --only {part.name} runs it"
            self._end(part, Status.NOT_RUN, why)
        else:
            self._run(chosen, chosen.python, limit_s)

    def _run(self, chosen: Chosen, python: str, limit_s: float) -> None:
        part, before = chosen.part, len(read_rows(self.out))
        print(f"\n{part.name}: {part.what} (up to {limit_s:.0f} s)", flush=True)
        scratch = Path(tempfile.mkdtemp(prefix="fd-gpu-"))
        started = time.monotonic()
        try:
            task = Task(chosen.module, part.name, str(self.out), str(scratch), self.dry, python, self.id)
            code = self._process(task, limit_s)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        rows = [row for row in read_rows(self.out)[before:] if row.part == part.name]
        took = f"after {time.monotonic() - started:.1f} s"
        if code is None:
            self._end(part, Status.FAILED, f"killed at its limit of {limit_s:g} s")
        elif not rows or rows[-1].name != "":
            self._end(part, Status.FAILED, f"its process ended with {_ending(code)} {took}; see {LOG}")
        elif rows[-1].status == Status.ENDED and len(rows) == 1:
            self._end(part, Status.FAILED, "it recorded no figure")
        else:
            print(f"{part.name}: {rows[-1].status} {took} {rows[-1].note}", flush=True)

    def _process(self, task: Task, limit_s: float) -> int | None:
        """The exit code of the part's process; None when it was killed at its limit. Nothing of it is left behind."""
        mark = uuid.uuid4().hex
        limit = time.monotonic() + limit_s
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.run_part", json.dumps(asdict(task))],
            cwd=ROOT,
            env=self._environment(task, mark),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdout is not None
        copier = threading.Thread(target=self._copy_output, args=(process.stdout,), daemon=True)
        copier.start()
        try:
            while process.poll() is None and time.monotonic() < limit:
                time.sleep(_POLL_S)
            code = process.poll()
        finally:
            left = kill_family(process.pid, mark)
            # A process in an uninterruptible call of the driver outlives even KILL: the visit goes on without it.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2.0)
            copier.join(2.0)
            if left:
                print(f"processes that outlived KILL: {left}", flush=True)
        return code

    def _environment(self, task: Task, mark: str) -> dict[str, str]:
        path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **os.environ,
            **(_HIDES_GPUS if self.dry else {}),
            MARK: mark,
            "FLIGHTDECK_HOME": f"{task.scratch}/home",
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def _copy_output(self, stream: IO[bytes]) -> None:
        """To stdout and to the log, which stops at its limit; ends with the last process that holds the pipe."""
        with stream, (self.out / LOG).open("ab") as log:
            for line in stream:
                with contextlib.suppress(OSError):
                    if log.tell() + len(line) <= MOST_BYTES:
                        log.write(line)
                        log.flush()
                sys.stdout.write(line.decode(errors="replace"))
                sys.stdout.flush()

    def _end(self, part: Part, status: Status, note: str) -> None:
        print(f"{part.name}: {status}: {note}", flush=True)
        append_row(self.out, Row(now(), self.id, part.name, "", status, note=note, what=part.what, dry=self.dry))


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def parts_of(module: str) -> tuple[Part, ...]:
    """The parts of a group. A module that cannot be imported has one part, which fails with what was raised."""
    try:
        parts: tuple[Part, ...] = import_module(module).PARTS
    except Exception:
        text = traceback.format_exc()

        def fail(_: object) -> None:
            raise ImportError(text)

        return (Part(module.rpartition(".")[2], "its parts are imported", 10.0, fail),)
    return parts


def choose(names: Sequence[str], groups: Mapping[str, str] = GROUPS) -> list[Chosen]:
    """The parts of these names, or of groups of these names; all without names. Each group has its most valuable part
    first; here the groups take turns, for a visit with too little time for all. Raises ValueError for a name that is
    neither."""
    by_group = [
        [Chosen(part, module, framework, None) for part in parts_of(module)] for framework, module in groups.items()
    ]
    every = [each for turn in zip_longest(*by_group) for each in turn if each is not None]
    if unknown := set(names) - {each.part.name for each in every} - groups.keys():
        raise ValueError(f"no part or group is named {', '.join(sorted(unknown))}; --list shows them")
    chosen = [each for each in every if not names or {each.part.name, each.framework} & set(names)]
    pythons = {framework: interpreter_with(framework) for framework in {each.framework for each in chosen}}
    return [Chosen(each.part, each.module, each.framework, pythons[each.framework]) for each in chosen]


def interpreter_with(framework: str) -> str | None:
    """The python that has it: this one, or that of INTERPRETERS; None where neither does."""
    for python in (sys.executable, str(INTERPRETERS.get(framework, ""))):
        code = f"import sys, importlib.util; sys.exit(importlib.util.find_spec({framework!r}) is None)"
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            if python and subprocess.run([python, "-c", code], check=False, timeout=20).returncode == 0:
                return python
    return None


def head_row(visit: str, dry: bool) -> Row:
    """A visit's command and machine: a row of no part."""
    return Row(now(), visit, "", "visit", Status.MEASURED, " ".join(sys.argv[1:]), note=machine(), dry=dry)


def machine() -> str:
    """Card, memory and driver as nvidia-smi says them, beside this python; for the head of the table."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    cards = "no nvidia-smi"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
        cards = "; ".join(done.stdout.split("\n")).strip("; ") or done.stderr.strip()[:200]
    return f"{cards}; Python {sys.version.split()[0]}, {os.cpu_count()} cores"


@contextlib.contextmanager
def ending_by_signals() -> Iterator[None]:
    """SIGTERM and SIGINT raise Ended meanwhile, once: what is being written then is written to its end."""

    def end(number: int, _: FrameType | None) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        raise Ended(number)

    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, end) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def dry_of(out: Path) -> bool | None:
    """The folder's results are of dry visits; None where there are none."""
    rows = read_rows(out)
    return rows[0].dry if rows else None
