"""Real runs for the fault tests: a plan in a home of the test's own, a real supervisor, a real mlx.launch."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from engine.checks.runner import CHECKS
from engine.config.models import ClusterConfig, Config, JobConfig, NodeConfig, PreflightConfig, RecoveryConfig
from engine.errors import StateError
from engine.models import Reason, RunRecord, RunState
from engine.node import processes
from engine.node.bootstrap import node_root
from engine.node.processes import Process
from engine.protocol.attempt import Identity, NodeFiles, read_identity
from engine.run import supervisor_process
from engine.run.events import Event, LauncherStarted, Note
from engine.run.history import RunHistory, fold
from engine.run.journal import JournalTail
from engine.run.run_plan import RunPlan, write_plan
from engine.run.supervisor_process import request_abort
from engine.store.layout import LAUNCHER_SOURCE, RunDir

E = TypeVar("E", bound=Event)

SHORT_GRACES = RecoveryConfig(stop_grace_s=1.0, save_grace_s=5.0, term_grace_s=0.5)
ABORT_LIMIT_S = 60.0
"""Its own KILL is due after 3.6 s; the rest is for a busy machine. How fast it is: `python -m tests.bench.abort`."""

RING = """
import os, sys, time
import mlx.core as mx
group = mx.distributed.init(strict=True, backend="ring")
rank, step, enough = group.rank(), 0, False
print("rank", rank, "of", group.size(), "is up", flush=True)
while not enough:
    step += 1
    wish = mx.array(float(os.path.exists("enough")))
    enough = mx.distributed.all_sum(wish, group=group, stream=mx.cpu).item() > 0
    if step % 2 == 0:
        print("rank", rank, "step", step, flush=True)
    {fault}
    time.sleep(0.05)
print("rank", rank, "done", flush=True)
"""
"""Ranks that go round a real ring until they agree that "enough" is in their directory; `fault` runs in each step. They
do so at most 20 times a second: who waits for the others is busy, and they share the cores with what is tested."""

DEAF = "import signal; [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15)]\n"
"""Before a rank's program: it can only be killed."""
DOUBLE_FORK = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.wait()
"""
"""Before a rank's program: it has a child in another session."""


def ring(fault: str = "pass") -> str:
    """The ring's program; `fault` is one line in which `rank` and `step` are known."""
    return RING.format(fault=fault)


PLANNED: list[Run] = []
"""The runs of the test that is going on, for conftest to clear away."""


@dataclass
class Run:
    """One run and everything a test asks of it."""

    dir: RunDir
    plan: RunPlan
    workdir: Path

    @property
    def files(self) -> NodeFiles:
        return self.files_of(0)

    def files_of(self, rank: int, attempt: int = 1) -> NodeFiles:
        """An attempt's files on the node of `rank` in it, as the test sees them."""
        return NodeFiles.for_attempt(node_root(), self.plan.run_id, attempt)

    def attempts(self) -> dict[int, list[int]]:
        """Attempt → its ranks."""
        return {attempt.number: list(range(len(attempt.plan.nodes))) for attempt in self.history.attempts}

    def left(self) -> list[Process]:
        """All that carries the run's nonce, wherever the run has been."""
        return processes.with_nonce(self.nonce)

    @property
    def events(self) -> tuple[Event, ...]:
        return _events(self.dir.journal, _version(self.dir.journal))

    def events_of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def history(self) -> RunHistory:
        return _history(self.dir.journal, _version(self.dir.journal))

    @property
    def notes(self) -> list[str]:
        return [note.message for note in self.events_of(Note)]

    @property
    def record(self) -> RunRecord:
        return self.history.record

    @property
    def nonce(self) -> str:
        return self.plan.nonce

    @property
    def supervisor(self) -> int:
        return int(json.loads(self.dir.supervisor.read_text())["pid"])

    @property
    def launcher(self) -> int:
        return self.events_of(LauncherStarted)[0].pid

    def identity(self, rank: int, attempt: int = 1) -> Identity:
        """Awaits it."""
        self.wait(lambda: read_identity(self.files_of(rank, attempt).identity(rank)) is not None)
        identity = read_identity(self.files_of(rank, attempt).identity(rank))
        assert identity is not None
        return identity

    def await_output(self, text: str, rank: int = 0) -> None:
        """Awaits `text` in the head's mirror of a rank's log."""
        self.wait(lambda: self.dir.log(rank).exists() and text in self.dir.log(rank).read_text(errors="replace"))

    def await_state(self, state: RunState) -> None:
        self.wait(lambda: self.record.state is state)

    def finish(self) -> None:
        """Let the ring's ranks go home."""
        (self.workdir / "enough").touch()

    def abort(self, *, now: bool = False) -> float:
        """Ask for an abort and return the seconds until the run has ended."""
        begun = time.monotonic()
        request_abort(self.dir, now=now, by="test")
        self.ended()
        return time.monotonic() - begun

    def ended(self, within_s: float = 180.0) -> RunRecord:
        """Awaits the end. Then nothing with the nonce may be left, and the mirrors equal the nodes' logs."""
        self.wait(lambda: self.record.state.ended, within_s)
        self.nothing_left()
        self.mirrors_are_equal()
        return self.record

    def nothing_left(self) -> None:
        assert self.left() == [], self.troubles()

    def mirrors_are_equal(self) -> None:
        """The head's copies of logs and events are the nodes' files, byte for byte, attempt after attempt."""
        attempts = self.attempts()
        for rank in range(len(self.plan.nodes)):
            files = [self.files_of(rank, attempt) for attempt, ranks in attempts.items() if rank in ranks]
            for here, there in (
                (self.dir.log(rank), [each.log(rank) for each in files]),
                (self.dir.events(rank), [each.events(rank) for each in files]),
            ):
                whole = b"".join(path.read_bytes() for path in there if path.exists())
                assert (here.read_bytes() if here.exists() else b"") == whole, f"{here.name}\n{self.troubles()}"

    def wait(
        self,
        condition: Callable[[], bool],
        within_s: float = 180.0,
        *,
        every_s: float = 0.01,
        after_end: bool = False,
    ) -> None:
        """`after_end`: the condition may become true when the run has ended; else its end is the end of waiting."""
        deadline = time.monotonic() + within_s
        while True:
            # Before the condition, which may become true with the end.
            state = self.record.state
            if condition():
                return
            assert after_end or not state.ended, f"the run has ended: {state}\n{self.troubles()}"
            assert time.monotonic() < deadline, f"not within {within_s} s, but {state}\n{self.troubles()}"
            time.sleep(every_s)

    def clear_away(self) -> None:
        """Leave nothing behind of a test that has failed: the supervisor first, then all that it has started."""
        try:
            who = json.loads(self.dir.supervisor.read_text())
            if processes.alive(who["pid"], who["start"]):
                kill_and_await(who["pid"])
            while left := self.left():
                for process in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)
        except (FileNotFoundError, StateError):
            return

    def troubles(self) -> str:
        """Everything that explains why a test failed."""
        texts = ["", *(f"{event.kind} {event.model_dump_json(exclude_none=True)}" for event in self.events)]
        logs = [self.dir.supervisor_log, self.dir.log(LAUNCHER_SOURCE)]
        for rank in range(len(self.plan.nodes)):
            files = self.files_of(rank)
            logs += [files.log(rank), files.keeper_log(rank)]
        for log in logs:
            if log.exists():
                texts += [f"--- {log.name}", log.read_text(errors="replace")[-2000:]]
        return "\n".join(texts)


def _version(journal: Path) -> tuple[int, ...]:
    """Changes with each write. A test that waits asks for the events a hundred times a second."""
    with contextlib.suppress(FileNotFoundError):
        status = journal.stat()
        return status.st_ino, status.st_size, status.st_mtime_ns
    return ()


@functools.lru_cache(maxsize=4)
def _events(path: Path, version: tuple[int, ...]) -> tuple[Event, ...]:
    journal = JournalTail(path)
    events = tuple(journal.events())
    assert journal.damaged == []
    return events


@functools.lru_cache(maxsize=4)
def _history(path: Path, version: tuple[int, ...]) -> RunHistory:
    return fold(_events(path, version))


def aborted(run: Run, *, now: bool = False) -> None:
    """Abort; the run must then be aborted in time."""
    took = run.abort(now=now)
    record = run.record
    assert (record.state, record.reason, record.unconfirmed) == (RunState.ABORTED, Reason.USER_ABORT, []), record
    assert took < ABORT_LIMIT_S, f"{took:.1f} s\n{run.troubles()}"


def plan_run(
    home: Path,
    workdir: Path,
    *,
    script: str | None = None,
    job: JobConfig | None = None,
    nodes: tuple[NodeConfig, ...] | None = None,
    starting_port: int | None = None,
    recovery: RecoveryConfig = SHORT_GRACES,
    skip: tuple[str, ...] | None = None,
    all_sum_s: float = 0.3,
) -> Run:
    """A run's directory with its plan: two ranks of `script` (or `job`), without preflight unless `skip` is given."""
    workdir.mkdir(parents=True, exist_ok=True)
    if script is not None:
        (workdir / "script.py").write_text(script)
    config = Config(
        cluster=ClusterConfig(starting_port=starting_port),
        nodes=nodes or two_nodes(workdir),
        job=job or JobConfig(name="test", command=("python", "script.py")),
        preflight=PreflightConfig(all_sum_s=all_sum_s),
        recovery=recovery,
    )
    return plan_config(home, config, workdir=workdir, skip=skip)


def plan_config(home: Path, config: Config, *, workdir: Path | None = None, skip: tuple[str, ...] | None = None) -> Run:
    """A run's directory with the plan of `config`, without preflight unless `skip` is given."""
    run_dir = RunDir(home / "runs" / f"r{uuid.uuid4().hex[:8]}")
    run_dir.path.mkdir(mode=0o700, parents=True)
    left_out = tuple(CHECKS) if skip is None else skip
    plan = RunPlan(
        nonce=uuid.uuid4().hex, config=config, run_id=run_dir.id, created_at=datetime.now(UTC), skip=left_out
    )
    write_plan(run_dir.plan, plan)
    run = Run(run_dir, plan, workdir or Path(config.nodes[0].workdir))
    PLANNED.append(run)
    return run


def start_config(home: Path, config: Config, *, skip: tuple[str, ...] | None = None) -> Run:
    """A run of `config` that has been started."""
    run = plan_config(home, config, skip=skip)
    supervisor_process.start_supervisor(run.dir)
    return run


def two_nodes(workdir: Path, *pythons: str) -> tuple[NodeConfig, ...]:
    """Two nodes of this machine, "left" and "right"."""
    named = dict(zip(("left", "right"), pythons or (sys.executable, sys.executable), strict=True))
    return tuple(NodeConfig(name=name, python=python, workdir=str(workdir)) for name, python in named.items())


def start_run(home: Path, workdir: Path, **plan: Any) -> Run:
    """A run that has been started."""
    run = plan_run(home, workdir, **plan)
    supervisor_process.start_supervisor(run.dir)
    return run


def kill_and_await(pid: int) -> None:
    """kill -9, and wait until it is dead, with all of its threads: one in a call to the disk keeps the lock."""
    start = processes.start_time(pid)
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while start is not None and (processes.alive(pid, start) or _threads(pid) > 1):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _threads(pid: int) -> int:
    """Threads of a process that has been killed; 0 where the system does not list them."""
    try:
        return sum(1 for _ in Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return 0
