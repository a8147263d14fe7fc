"""Observes a run: its hosts, the attempt that is watched, and what else has happened, as one Observation.

Requests for aborts come as files, and from signal handlers; their files go once the step has recorded them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from engine.cluster.host_connection import HostConnection
from engine.run import events
from engine.run.attempt_hosts import UnknownAttempt
from engine.run.observation import HostView, Observation, ProgressView, Result
from engine.run.run_context import RunContext
from engine.run.series.keeper import SeriesKeeper
from engine.run.supervisor_process import read_requests
from engine.run.tracker import RunTrackers
from engine.run.watched_attempt import WatchedAttempt


@dataclass
class LiveHost:
    connection: HostConnection
    key: str
    current: bool
    asked: bool = False
    """The attempt's processes there were requested, and killed. Who only lists them proves nothing."""

    def view(self, attempt: WatchedAttempt | None) -> HostView:
        connection = self.connection
        state, facts = connection.state, connection.facts
        left = connection.processes() if self.asked else None
        return HostView(
            key=self.key,
            names=connection.names,
            ranks=connection.ranks,
            local=connection.local,
            current=self.current,
            silent_s=state.silent_s,
            longest_silence_s=state.longest_silence_s,
            answered=state.answered,
            problem=state.problem,
            boot_id=facts.boot_id if facts is not None else None,
            memory_kills=facts.memory_kills if facts is not None else None,
            processes=tuple(left) if left is not None else None,
            unsent=self.current and attempt is not None and attempt.lacks_files_of(connection),
        )


class Observer:
    """`observe` may wait for the head's disk."""

    def __init__(self, run: RunContext) -> None:
        config = run.whole_plan.config
        # Who starts a task on a result waits for it.
        notifies = config.notify.active and config.job.task is None
        self.trackers = RunTrackers(run.run_dir, config.job, notifies=notifies)
        self.series = SeriesKeeper(run.run_dir)
        self.hosts: dict[str, LiveHost] = {}
        self.attempt: WatchedAttempt | None = None
        self.unknown: UnknownAttempt | None = None
        self.news: list[events.Event] = []
        """Not recorded yet."""
        self._taken = 0
        """How many of these have been shown."""
        self._run = run
        self.requests: list[Path] = []
        """The files of requests that have been shown."""
        self._rng = random.Random()

    def observe(self, finished: Iterable[Result]) -> Observation:
        run, attempt = self._run, self.attempt
        now = run.clock()
        # Hosts before ranks: what a host had answered by then is seen of its ranks.
        hosts = tuple(host.view(attempt) for host in self.hosts.values())
        if attempt is not None:
            attempt.poll()
        self.series.poll(now, (host.connection for host in self.hosts.values()))
        intake = attempt.intake if attempt is not None else None
        return Observation(
            now=now,
            at=datetime.now(UTC),
            slept_s=run.clock.slept_s,
            sleep_s=run.clock.sleep_s,
            news=self.take_news(),
            launcher_alive=attempt is not None and attempt.launcher_alive,
            ranks=attempt.ranks if attempt is not None else (),
            hosts=hosts,
            progress=intake.progress.view if intake is not None else ProgressView(),
            command=attempt.command if attempt is not None else None,
            receiving=intake is None or not intake.blocked,
            figures=intake.latest if intake is not None else events.Figures(),
            unknown=self.unknown.verdict() if self.unknown is not None else None,
            jitter=self._rng.uniform(0.5, 1.0),
            finished=tuple(finished),
        )

    def take_news(self) -> tuple[events.Event, ...]:
        """All that has happened and is not recorded yet."""
        for path, request in read_requests(self._run.run_dir):
            if path not in self.requests:
                self.requests.append(path)
                self.news.append(request)
        self.news += self.trackers.faults()
        taken = tuple(self.news)
        # Others may add to it meanwhile.
        self._taken = len(taken)
        return taken

    def drop_news(self) -> None:
        """The news that was taken is recorded. A supervisor that was killed before leaves the requests for the next."""
        del self.news[: self._taken]
        self._taken = 0
        for path in list(self.requests):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                self.requests.remove(path)
