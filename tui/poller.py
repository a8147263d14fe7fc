"""The thread that loads the engine and polls the shown run and the list of runs, at most ten times a second. It
posts a message when something has changed; a newer message replaces a waiting one of the same kind.

The engine's modules (pydantic, the store) are imported here, after the first paint, never on the app's loop.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from textual.message import Message

from engine import api
from engine.api import ExitCode
from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine.api import Config, Engine, Prediction, QueueSnapshot, RunWatch, Scaling
    from engine.models import NodeFacts, RunRecord
    from engine.snapshots import RunSnapshot


class _Newest(Message):
    """A newer message of the same type replaces a waiting one."""

    def can_replace(self, message: Message) -> bool:
        return type(message) is type(self)


@dataclass
class EngineReady(Message):
    """The engine is loaded; with the configuration, where there is one, and its nodes' stored facts."""

    engine: Engine
    config: Config | None
    facts: tuple[NodeFacts, ...] = ()
    prediction: Prediction | None = None
    scaling: Scaling | None = None
    accepted: bool = True
    """It may run what it names, without a question."""


@dataclass
class ConfigEdited(Message):
    """The configuration's file is another one than was read."""

    ready: EngineReady | None
    fault: str | None = None
    """Why it cannot be read, without `ready`."""


@dataclass
class EngineFailed(Message):
    """The engine cannot be loaded, or the configuration has faults."""

    fault: str
    exit_code: int


@dataclass
class SnapshotTaken(_Newest):
    """The followed run as it is now."""

    run: str
    snapshot: RunSnapshot


@dataclass
class RunsRead(_Newest):
    """All runs, newest first."""

    runs: tuple[RunRecord, ...]


@dataclass
class QueueRead(_Newest):
    """The queue as it is now."""

    queue: QueueSnapshot


@dataclass
class Trouble(Message):
    """Something cannot be read; posted once until the text changes."""

    text: str


POLL_S: Final = 0.1
"""Between two reads of an active run that changes."""
QUIET_POLLS: Final = 2.5
"""How many times as long it takes while nothing changes."""
ENDED_POLL_S: Final = 1.0
RUNS_S: Final = 1.0
"""Between two reads of the list of runs."""


class RunPoller:
    """Polls the followed run and the list of runs; `post` must be callable from any thread."""

    def __init__(
        self,
        engine: Callable[[], Engine],
        config: Config | Path | None,
        post: Callable[[Message], object],
        *,
        poll_s: float = POLL_S,
        adopts: bool = True,
    ) -> None:
        """`adopts`: runs that have lost their supervisor get another one."""
        self._make_engine = engine
        self._config = config
        self.overrides: Mapping[str, Any] = {}
        """Other values of keys of the configuration's file."""
        self._post = post
        self._poll_s = poll_s
        self._adopts = adopts
        self._engine: Engine | None = None
        self._wanted: str | None = None
        self._read: str | None = None
        self._wake = threading.Event()
        self._ended = False
        self._paused = False
        self._reported: str | None = None
        self._config_seen: tuple[int, int] | None = None
        self._queue: QueueSnapshot | None = None
        self._thread = threading.Thread(target=self._run, name="poller", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def follow(self, run: str | None) -> None:
        """Poll this run from now on (None: no run)."""
        self._wanted = run
        self._wake.set()

    def read_file(self, path: Path) -> None:
        """Another configuration's file from now on, as it is."""
        self._config, self.overrides, self._config_seen = path, {}, None

    def pause(self) -> None:
        """Read nothing until `resume`."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._wake.set()

    @property
    def caught_up(self) -> bool:
        """The followed run has been read at least once."""
        return self._read == self._wanted

    def stop(self) -> None:
        """End the thread; waits at most a second for the read under way."""
        self._ended = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        engine = self._load()
        if engine is None:
            return
        watch: RunWatch | None = None
        followed: str | None = None
        snapshot: RunSnapshot | None = None
        runs: tuple[RunRecord, ...] | None = None
        runs_due = 0.0
        wait_s = self._poll_s
        while not self._ended:
            if self._paused:
                self._wake.wait(ENDED_POLL_S)
                self._wake.clear()
                continue
            if self._wanted != followed:
                followed, watch, snapshot = self._wanted, None, None
            try:
                if followed is not None:
                    watch = watch or engine.runs.watch(followed)
                    fresh = watch.poll()
                    if snapshot is None or _differs(fresh, snapshot):
                        self._post(SnapshotTaken(followed, fresh))
                        wait_s = self._poll_s
                    else:
                        wait_s = min(wait_s * 1.25, QUIET_POLLS * self._poll_s)
                    snapshot = fresh
                self._read = followed
                if monotonic() >= runs_due:
                    read = tuple(engine.runs.all())
                    if read != runs:
                        self._post(RunsRead(read))
                    if runs is None and self._adopts:
                        threading.Thread(target=self._adopt, args=(engine,), name="adopt", daemon=True).start()
                    runs, runs_due = read, monotonic() + RUNS_S
                    self._read_edited(engine)
                    self._read_queue(engine)
                self._reported = None
            except Exception as trouble:  # a reader must outlive any one unreadable file
                self._report(_error_text(trouble))
                watch = None
            ended = snapshot is not None and snapshot.record.state.ended
            idle = snapshot is None or ended or self._reported is not None
            self._wake.wait(max(self._poll_s, ENDED_POLL_S) if idle else wait_s)
            self._wake.clear()

    def _load(self) -> Engine | None:
        try:
            engine = self._make_engine()
        except Exception as trouble:
            self._post(EngineFailed(f"the engine cannot be loaded: {_error_text(trouble)}", ExitCode.FAILED))
            return None
        self._config_seen = self._config_state()
        try:
            config = (
                engine.load_config(self._config, self.overrides) if isinstance(self._config, Path) else self._config
            )
        except Exception as trouble:
            self._post(EngineFailed(_error_text(trouble), ExitCode.USAGE))
            return None
        self._post(self._ready(engine, config))
        return engine

    def _config_state(self) -> tuple[int, int] | None:
        """Another one after each edit of the configuration's file."""
        with contextlib.suppress(OSError):
            if isinstance(self._config, Path):
                status = self._config.stat()
                return status.st_mtime_ns, status.st_size
        return None

    def _read_edited(self, engine: Engine) -> None:
        if not isinstance(self._config, Path) or (state := self._config_state()) == self._config_seen:
            return
        self._config_seen = state
        try:
            self._post(ConfigEdited(self._ready(engine, engine.load_config(self._config, self.overrides))))
        except Exception as trouble:  # what was read before stays
            self._post(ConfigEdited(None, _with_lines(trouble)))

    def _read_queue(self, engine: Engine) -> None:
        """Nothing is loaded for one that was never used."""
        if (engine.home / "queue").is_dir() and (queue := engine.queue.snapshot()) != self._queue:
            self._queue = queue
            self._post(QueueRead(queue))

    def _ready(self, engine: Engine, config: Config | None) -> EngineReady:
        ready = EngineReady(engine, config)
        if config is not None and isinstance(self._config, Path):
            ready.accepted = engine.nodes.is_accepted(config)
        if config is not None:
            try:
                # Shown with their age until the nodes answer.
                ready.facts = tuple(engine.nodes.last_facts(config))
            except Exception as trouble:
                self._report(_error_text(trouble))
            try:
                ready.prediction = engine.calibrations.predict(config, engine.calibrations.latest(config))
                ready.scaling = engine.calibrations.latest_scaling(config)
            except Exception as trouble:
                self._report(_error_text(trouble))
        return ready

    def _adopt(self, engine: Engine) -> None:
        try:
            engine.runs.adopt_orphans()
        except Exception as trouble:
            self._report(f"adopting runs without a supervisor: {trouble}")

    def _report(self, text: str) -> None:
        if text != self._reported:
            self._post(Trouble(text))
        self._reported = text


def _error_text(trouble: Exception) -> str:
    return str(trouble) or type(trouble).__name__


def _with_lines(trouble: Exception) -> str:
    """Each fault, with its line of the file where it has one."""
    if not isinstance(trouble, ConfigError):
        return _error_text(trouble)
    texts = []
    for placed in api.placed(trouble):
        texts += [f"line {placed.line}: {placed.text}"] * (placed.line is not None)
        texts.append(placed.what)
    return "\n".join(texts)


def _differs(fresh: RunSnapshot, last: RunSnapshot) -> bool:
    return replace(fresh, taken_at=None) != replace(last, taken_at=None)
