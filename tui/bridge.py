"""One thread between the engine's files and the app: it reads at most ten times a second and posts what has changed.

The engine's modules (pydantic, the store) are imported here, after the first paint, and never on the app's loop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Final

from textual.message import Message

from tui.messages import EngineFailed, EngineReady, RunsRead, SnapshotTaken, Trouble

if TYPE_CHECKING:
    from engine.config.models import FlightConfig
    from engine.events import RunSnapshot
    from engine.models import NodeFacts, RunRecord
    from engine.planning.outlook import Outlook
    from engine.session import Engine, RunWatch

POLL_S: Final = 0.1
"""Between two looks at a run that goes on."""
ENDED_POLL_S: Final = 1.0
FAILED: Final = 1
USAGE: Final = 2
"""Exit codes (product.md)."""
RUNS_S: Final = 1.0
"""Between two looks at the list of runs."""


class Bridge:
    """Polls the followed run and the list of runs; `post` must be callable from any thread."""

    def __init__(
        self,
        engine: Callable[[], Engine],
        config: FlightConfig | Path | None,
        post: Callable[[Message], object],
        *,
        poll_s: float = POLL_S,
    ) -> None:
        self._make_engine = engine
        self._config = config
        self._post = post
        self._poll_s = poll_s
        self._engine: Engine | None = None
        self._wanted: str | None = None
        self._read: str | None = None
        self._wake = threading.Event()
        self._ended = False
        self._paused = False
        self._said: str | None = None
        self._thread = threading.Thread(target=self._run, name="bridge", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def follow(self, run: str | None) -> None:
        """Show this run from now on (None: no run)."""
        self._wanted = run
        self._wake.set()

    def pause(self) -> None:
        """Read nothing until `resume`."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._wake.set()

    def look(self) -> None:
        """Read now instead of at the next turn."""
        self._wake.set()

    @property
    def caught_up(self) -> bool:
        """What is followed has been read at least once."""
        return self._read == self._wanted

    def stop(self) -> None:
        """End the thread; waits for the read that is under way, at most a second."""
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
        while not self._ended:
            if self._paused:
                self._wake.wait(ENDED_POLL_S)
                self._wake.clear()
                continue
            if self._wanted != followed:
                followed, watch, snapshot = self._wanted, None, None
            try:
                if followed is not None:
                    watch = watch or engine.watch(followed)
                    fresh = watch.poll()
                    if snapshot is None or _differs(fresh, snapshot):
                        self._post(SnapshotTaken(followed, fresh))
                    snapshot = fresh
                self._read = followed
                if monotonic() >= runs_due:
                    read = tuple(engine.runs())
                    if read != runs:
                        self._post(RunsRead(read))
                    if runs is None:
                        threading.Thread(target=self._adopt, args=(engine,), name="adopt", daemon=True).start()
                    runs, runs_due = read, monotonic() + RUNS_S
                self._said = None
            except Exception as trouble:  # a reader must outlive any one unreadable file
                self._say(_words(trouble))
                watch = None
            ended = snapshot is not None and snapshot.record.state.ended
            idle = snapshot is None or ended or self._said is not None
            self._wake.wait(max(self._poll_s, ENDED_POLL_S) if idle else self._poll_s)
            self._wake.clear()

    def _load(self) -> Engine | None:
        try:
            engine = self._make_engine()
        except Exception as trouble:
            self._post(EngineFailed(f"the engine cannot be loaded: {_words(trouble)}", FAILED))
            return None
        try:
            config = engine.load_config(self._config) if isinstance(self._config, Path) else self._config
        except Exception as trouble:
            self._post(EngineFailed(_words(trouble), USAGE))
            return None
        facts, outlook = self._last_facts(engine, config), self._outlook(engine, config)
        self._post(EngineReady(engine, config, tuple(engine.checks_not_yet()), facts, outlook))
        return engine

    def _last_facts(self, engine: Engine, config: FlightConfig | None) -> tuple[NodeFacts, ...]:
        """What the store still knows of the nodes; shown with its age until they answer."""
        try:
            return tuple(engine.last_facts(config)) if config is not None else ()
        except Exception as trouble:
            self._say(_words(trouble))
            return ()

    def _outlook(self, engine: Engine, config: FlightConfig | None) -> Outlook | None:
        """What the newest calibration means for a launch."""
        try:
            return engine.outlook(config, engine.last_calibration(config)) if config is not None else None
        except Exception as trouble:
            self._say(_words(trouble))
            return None

    def _adopt(self, engine: Engine) -> None:
        try:
            engine.adopt_orphans()
        except Exception as trouble:
            self._say(f"adopting runs without a supervisor: {trouble}")

    def _say(self, text: str) -> None:
        if text != self._said:
            self._post(Trouble(text))
        self._said = text


def _words(trouble: Exception) -> str:
    return str(trouble) or type(trouble).__name__


def _differs(fresh: RunSnapshot, last: RunSnapshot) -> bool:
    return replace(fresh, taken_at=None) != replace(last, taken_at=None)
