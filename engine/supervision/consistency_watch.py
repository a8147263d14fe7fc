"""Whether a run's ranks train the same thing, judged while they train from what each says of itself; alarms.

Ranks in lockstep cannot be updates apart: each waits for all others in the sum. What can differ is what is heard of
them, so that is what staleness is judged by: of a rank whose steps stop coming the others' go on only when its events
are not written, its node is cut off from this machine alone, or it trains apart.

An alarm is `{"event": "alarm", "alarm": its name, "ranks", "workers", "iteration", "message"}` in the journal. It
says; it does not act: ranks whose replicas differ stop by themselves.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from engine.config.models import ConsistencyConfig
from engine.judgement.workers import BYZANTINE, KL, STALENESS, WASSERSTEIN, ConsistencyMetrics, WorkerState
from engine.judgement.workers import validate_worker_consistency as validate
from engine.runs.json_lines import parse
from engine.security.sanitise import plain

REPLICAS_DIFFER: Final = "REPLICAS_DIFFER"
LOOK_EVERY_S: Final = 1.0
LASTING: Final = 3
"""Judgements in a row that must find the same: ranks train on different examples, and one batch may be odd."""
ALARM_LIMIT: Final = 50
"""Of one attempt: a run that is inconsistent throughout must not fill its journal."""
SILENT_S: Final = 10.0
"""Without a new update of a rank: longer than a link that is slow, or away in passing, holds events back."""
_UPDATE: Final = b'"update": '
_RECENT: Final = 64
"""Updates remembered per rank: as far as the ranks' mirrors may be apart."""

Enter = Callable[..., object]


class ConsistencyWatch:
    """Of one attempt. At most one judgement a second, of two parsed lines per rank in the usual case."""

    def __init__(
        self,
        config: ConsistencyConfig,
        nodes: Mapping[int, str],
        alarm: Enter,
        before: Sequence[Mapping[str, Any]] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`nodes`: rank → its node's name. `before`: the attempt's alarms that an earlier supervisor has entered."""
        self._config = config
        self._nodes = nodes
        self._alarm = alarm
        self._clock = clock
        self._lines: dict[int, deque[bytes]] = {rank: deque(maxlen=_RECENT) for rank in nodes}
        self._said = {(entry.get("alarm"), _whole(entry.get("ranks"))) for entry in before}
        self._count = len(before)
        self._lasting: dict[str, int] = {}
        self._standing: set[str] = set()
        self._judged: int | None = None
        self._heard: dict[int, int] = {}
        """Rank → the newest update that it has told of; 0 before its first."""
        self._heard_at: dict[int, float] = {}
        """Rank → when that was new."""
        self._looked_at = float("-inf")
        self._checkpoint: int | None = None

    def step(self, rank: int, line: bytes) -> None:
        """A `step` event as it came; parsed only when it is judged."""
        if rank in self._lines and _UPDATE in line:
            self._lines[rank].append(line)

    def checkpoint(self, event: Mapping[str, Any]) -> None:
        iteration = event.get("iteration")
        if event.get("phase") == "committed" and isinstance(iteration, int):
            self._checkpoint = iteration

    def replica_check(self, event: Mapping[str, Any]) -> None:
        """Every rank tells of the same comparison: what has been entered once is not entered again."""
        if event.get("agreed") is not False or not isinstance(event.get("iteration"), int):
            return
        ranks = [rank for rank in _whole(event.get("ranks")) if rank in self._nodes]
        if (key := (REPLICAS_DIFFER, tuple(ranks))) not in self._said:
            self._said.add(key)
            self._enter(REPLICAS_DIFFER, ranks, event["iteration"], plain(event.get("message"), 300))

    def look(self) -> ConsistencyMetrics | None:
        """When a second has passed, judge what is heard of each rank, and the newest update that all have told of: the
        verdict on the latter, None when there is none."""
        now = self._clock()
        if not self._config.enabled or len(self._nodes) < 2 or now - self._looked_at < LOOK_EVERY_S:
            return None
        self._looked_at = now
        newest = {rank: _parsed(lines[-1]) for rank, lines in self._lines.items() if lines}
        self._hear(newest, now)
        iteration, states = self._common(newest)
        if iteration is None or iteration == self._judged or len(states) < 2:
            return None
        self._judged = iteration
        limits = self._config
        metrics = validate(list(states.values()), limits.staleness, limits.kl, limits.wasserstein)
        for issue in (KL, WASSERSTEIN, BYZANTINE):
            self._weigh(issue, issue in metrics.consistency_issues, metrics, iteration, states)
        return metrics

    def _hear(self, newest: Mapping[int, Mapping[str, Any]], now: float) -> None:
        """Take in how far each rank has told, and enter those that stay silent while others go on."""
        told = {rank: version for rank, event in newest.items() if (version := _version(event)) is not None}
        if not told:
            return
        for rank in self._nodes:
            if rank not in self._heard or told.get(rank, 0) > self._heard[rank]:
                self._heard[rank], self._heard_at[rank] = told.get(rank, 0), now
        latest = max(self._heard.values())
        behind = [rank for rank, version in self._heard.items() if latest - version > self._config.staleness]
        stale = [rank for rank in behind if now - self._heard_at[rank] >= SILENT_S]
        if not stale:
            self._standing.discard(STALENESS)
        elif STALENESS not in self._standing:
            self._standing.add(STALENESS)
            who = ", ".join(f"rank {rank} on {self._nodes[rank]}" for rank in stale)
            heard = min(self._heard[rank] for rank in stale)
            words = f"nothing heard of it after update {heard}" if heard else "no update heard of"
            limit = f"over {self._config.staleness} apart"
            iteration = max(_iteration(event) for event in newest.values())
            self._enter(STALENESS, stale, iteration, f"{who}: {words}, and others are at {latest}, {limit}")

    def _weigh(
        self,
        issue: str,
        found: bool,
        metrics: ConsistencyMetrics,
        iteration: int,
        states: Mapping[int, WorkerState],
    ) -> None:
        self._lasting[issue] = self._lasting.get(issue, 0) + 1 if found else 0
        if not found:
            self._standing.discard(issue)
        elif self._lasting[issue] >= LASTING and issue not in self._standing:
            self._standing.add(issue)
            names = metrics.byzantine_workers if issue == BYZANTINE else metrics.divergent_workers
            ranks = [rank for rank, state in states.items() if state.worker_id in names]
            self._enter(issue, ranks, iteration, self._words(issue, metrics, ranks))

    def _words(self, issue: str, metrics: ConsistencyMetrics, ranks: Sequence[int]) -> str:
        who = ", ".join(f"rank {rank} on {self._nodes[rank]}" for rank in ranks)
        limits = self._config
        said = {
            KL: f"the ranks' losses are apart: KL proxy {metrics.kl_divergence:.3f}, over {limits.kl:g}",
            WASSERSTEIN: f"the ranks' gradient norms are apart: {metrics.wasserstein_distance:.3g} in the mean, "
            f"over {limits.wasserstein:g}",
            BYZANTINE: f"stands apart in loss or gradient norm ({metrics.byzantine_rule})",
        }[issue]
        return f"{who}: {said}" if who else said

    def _enter(self, name: str, ranks: Sequence[int], iteration: int, message: str) -> None:
        self._count += 1
        if self._count > ALARM_LIMIT:
            return
        workers = [self._nodes[rank] for rank in ranks]
        if self._count == ALARM_LIMIT:
            message += " (no more alarms of this attempt are entered)"
        self._alarm(alarm=name, ranks=list(ranks), workers=workers, iteration=iteration, message=message)

    def _common(self, newest: Mapping[int, dict[str, Any]]) -> tuple[int | None, dict[int, WorkerState]]:
        """The newest iteration that every rank's lines reach, and each rank's state at it; `newest` has the last line
        of each."""
        if len(newest) < len(self._lines):
            return None, {}
        common = min(_iteration(event) for event in newest.values())
        states = {}
        for rank, event in newest.items():
            at = next((told for told in self._backwards(rank, event) if _iteration(told) <= common), None)
            state = self._state(rank, at) if at is not None and _iteration(at) == common else None
            if state is not None:
                states[rank] = state
        return common, states

    def _backwards(self, rank: int, newest: dict[str, Any]) -> Any:
        yield newest
        for line in list(self._lines[rank])[-2::-1]:
            yield _parsed(line)

    def _state(self, rank: int, event: Mapping[str, Any]) -> WorkerState | None:
        """None for a rank that had nothing to learn from, and for figures that are none."""
        try:
            return WorkerState(
                worker_id=self._nodes[rank],
                parameter_version=event["update"],
                gradient_norm=event["own_grad_norm"],
                loss_value=event["own_loss"],
                timestamp=event["at"],
                checkpoint_version=self._checkpoint if rank == 0 else None,
            )
        except (KeyError, ValueError):
            return None


def _parsed(line: bytes) -> dict[str, Any]:
    return parse(line) or {}


def _iteration(event: Mapping[str, Any]) -> int:
    iteration = event.get("iteration")
    return iteration if isinstance(iteration, int) else -1


def _version(event: Mapping[str, Any]) -> int | None:
    version = event.get("update")
    return version if isinstance(version, int) else None


def _whole(value: object) -> tuple[int, ...]:
    return tuple(each for each in value if isinstance(each, int)) if isinstance(value, list) else ()
