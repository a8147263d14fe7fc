"""Checks while a run trains that its ranks train the same thing, from the figures that each reports; raises alarms.

Ranks in lockstep cannot be updates apart: each waits for all others in the sum. What can differ is which events
arrive, so staleness is measured by those: a rank's events stop while the others' go on only when they are not written,
when its node is cut off from this machine alone, or when it trains apart.

An alarm is an AlarmRaised in the journal. It informs and does not act: ranks whose replicas differ stop by themselves.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from engine.config.models import ConsistencyConfig
from engine.protocol.events import UPDATE_FIELD
from engine.run.events import AlarmRaised
from engine.run.json_lines import parse_json_line
from engine.security.sanitise import count_or_none, plain
from engine.validators.workers import BYZANTINE, LOSS_SPREAD, STALENESS, WASSERSTEIN, ConsistencyMetrics, WorkerState
from engine.validators.workers import validate_worker_consistency as validate

REPLICAS_DIFFER: Final = "REPLICAS_DIFFER"
CHECK_INTERVAL_S: Final = 1.0
LASTING: Final = 3
"""Checks in a row that must find the same: ranks train on different examples, and one batch may be odd."""
ALARM_LIMIT: Final = 50
"""Per attempt: a run that is inconsistent throughout must not fill its journal."""
SILENT_S: Final = 10.0
"""Without a new update of a rank: longer than a slow or briefly lost link holds events back."""
_RECENT: Final = 64
"""Updates remembered per rank: as far as the ranks' mirrors may be apart."""


class ConsistencyWatch:
    """The consistency of one attempt. At most one check a second, of two parsed lines per rank in the usual case."""

    def __init__(
        self,
        config: ConsistencyConfig,
        nodes: Mapping[int, str],
        raise_alarm: Callable[[AlarmRaised], object],
        before: Sequence[AlarmRaised] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`nodes`: rank → its node's name. `before`: the attempt's alarms that an earlier supervisor raised."""
        self._config = config
        self._nodes = nodes
        self._raise_alarm = raise_alarm
        self._clock = clock
        self._lines: dict[int, deque[bytes]] = {rank: deque(maxlen=_RECENT) for rank in nodes}
        self._raised = {(event.alarm, event.ranks) for event in before}
        self._count = len(before)
        self._lasting: dict[str, int] = {}
        """Issue → how many checks in a row have found it."""
        self._checked: int | None = None
        self._newest: dict[int, int] = {}
        """Rank → the newest update that it reported; 0 before its first."""
        self._newest_at: dict[int, float] = {}
        """Rank → when that arrived."""
        self._checked_at = float("-inf")
        self._checkpoint: int | None = None

    def step(self, rank: int, line: bytes) -> None:
        """A `step` event as it came; parsed only when it is checked."""
        if rank in self._lines and UPDATE_FIELD in line:
            self._lines[rank].append(line)

    def checkpoint(self, event: Mapping[str, Any]) -> None:
        if event.get("phase") == "committed" and (iteration := _integer(event, "iteration")) >= 0:
            self._checkpoint = iteration

    def replica_check(self, event: Mapping[str, Any]) -> None:
        """Every rank reports the same comparison: the alarm is raised once."""
        if event.get("agreed") is not False or (iteration := _integer(event, "iteration")) < 0:
            return
        ranks = tuple(rank for rank in _whole(event.get("ranks")) if rank in self._nodes)
        if (key := (REPLICAS_DIFFER, ranks)) not in self._raised:
            self._raised.add(key)
            self._alarm(REPLICAS_DIFFER, ranks, iteration, plain(event.get("message"), 300))

    def poll(self) -> ConsistencyMetrics | None:
        """When a second has passed, check the updates of each rank, and the newest one that all have reported: the
        metrics of the latter, None when there are none."""
        now = self._clock()
        if not self._config.enabled or len(self._nodes) < 2 or now - self._checked_at < CHECK_INTERVAL_S:
            return None
        self._checked_at = now
        newest = {rank: _parsed(lines[-1]) for rank, lines in self._lines.items() if lines}
        self._check_staleness(newest, now)
        iteration, states = self._common(newest)
        if iteration is None or iteration == self._checked or len(states) < 2:
            return None
        self._checked = iteration
        limits = self._config
        metrics = validate(list(states.values()), limits.staleness, limits.loss_spread, limits.wasserstein)
        for issue in (LOSS_SPREAD, WASSERSTEIN, BYZANTINE):
            self._check_issue(issue, metrics, iteration, states)
        return metrics

    def _check_staleness(self, newest: Mapping[int, Mapping[str, Any]], now: float) -> None:
        """Raise an alarm for ranks that stay silent while others go on."""
        reported = {rank: update for rank, event in newest.items() if (update := _integer(event, "update")) >= 0}
        if not reported:
            return
        for rank in self._nodes:
            if rank not in self._newest or reported.get(rank, 0) > self._newest[rank]:
                self._newest[rank], self._newest_at[rank] = reported.get(rank, 0), now
        latest = max(self._newest.values())
        behind = [rank for rank, version in self._newest.items() if latest - version > self._config.staleness]
        stale = [rank for rank in behind if now - self._newest_at[rank] >= SILENT_S]
        if self._count_checks(STALENESS, present=bool(stale)) == 1:
            who = ", ".join(f"rank {rank} on {self._nodes[rank]}" for rank in stale)
            last = min(self._newest[rank] for rank in stale)
            silence = f"no update after {last}" if last else "no update yet"
            limit = f"over {self._config.staleness} apart"
            iteration = max(_integer(event, "iteration") for event in newest.values())
            self._alarm(STALENESS, stale, iteration, f"{who}: {silence}, while others are at {latest}, {limit}")

    def _check_issue(
        self, issue: str, metrics: ConsistencyMetrics, iteration: int, states: Mapping[int, WorkerState]
    ) -> None:
        if self._count_checks(issue, present=issue in metrics.consistency_issues) == LASTING:
            names = metrics.byzantine_workers if issue == BYZANTINE else metrics.divergent_workers
            ranks = [rank for rank, state in states.items() if state.worker_id in names]
            self._alarm(issue, ranks, iteration, self._message(issue, metrics, ranks))

    def _count_checks(self, issue: str, *, present: bool) -> int:
        """In a row that have found it, with this one."""
        self._lasting[issue] = self._lasting.get(issue, 0) + 1 if present else 0
        return self._lasting[issue]

    def _message(self, issue: str, metrics: ConsistencyMetrics, ranks: Sequence[int]) -> str:
        who = ", ".join(f"rank {rank} on {self._nodes[rank]}" for rank in ranks)
        limits = self._config
        message = {
            LOSS_SPREAD: f"the ranks' losses are apart: {metrics.kl_divergence:.3f}, over {limits.loss_spread:g}",
            WASSERSTEIN: f"the ranks' gradient norms are apart: {metrics.wasserstein_distance:.3g} in the mean, "
            f"over {limits.wasserstein:g}",
            BYZANTINE: f"stands apart in loss or gradient norm ({metrics.byzantine_rule})",
        }[issue]
        return f"{who}: {message}" if who else message

    def _alarm(self, name: str, ranks: Sequence[int], iteration: int, message: str) -> None:
        self._count += 1
        if self._count > ALARM_LIMIT:
            return
        workers = tuple(self._nodes[rank] for rank in ranks)
        if self._count == ALARM_LIMIT:
            message += " (no more alarms of this attempt are recorded)"
        alarm = AlarmRaised(alarm=name, ranks=tuple(ranks), workers=workers, iteration=iteration, message=message)
        self._raise_alarm(alarm)

    def _common(self, newest: Mapping[int, dict[str, Any]]) -> tuple[int | None, dict[int, WorkerState]]:
        """The newest iteration that every rank's lines reach, and each rank's state at it; `newest` has the last line
        of each."""
        if len(newest) < len(self._lines):
            return None, {}
        common = min(_integer(event, "iteration") for event in newest.values())
        states = {}
        for rank, lines in self._lines.items():
            backwards = map(_parsed, reversed(lines))
            at = next((event for event in backwards if _integer(event, "iteration") <= common), None)
            state = self._state(rank, at) if at is not None and _integer(at, "iteration") == common else None
            if state is not None:
                states[rank] = state
        return common, states

    def _state(self, rank: int, event: Mapping[str, Any]) -> WorkerState | None:
        """None for a rank without examples in this update, and for figures that are not numbers."""
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
    return parse_json_line(line) or {}


def _integer(event: Mapping[str, Any], name: str) -> int:
    """-1 where it is missing."""
    value = count_or_none(event.get(name))
    return -1 if value is None else value


def _whole(value: object) -> tuple[int, ...]:
    return tuple(number for number in value if isinstance(number, int)) if isinstance(value, list) else ()
