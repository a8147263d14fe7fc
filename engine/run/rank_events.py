"""The newest report of one rank, from the mirror of its event file; its steps are hardly ever parsed."""

from __future__ import annotations

import contextlib
import re
import statistics
from collections import deque
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.protocol.events import STEP_FIELD
from engine.run.json_lines import LineTail, parse_json_line
from engine.security.sanitise import count_or_none, finite_or_none, moment_or_none, plain, text_or_none
from engine.snapshots import ChunkProgress, RankReport, Sample, ServedRequests

NAME_END = 32
"""The name of an event stands in the first bytes of its line."""
PHASE_LIMIT = 40
"""Characters."""
_WARNING_LIMIT, _MOST_WARNINGS = 500, 20
_SAMPLE_LIMIT, _MOST_SAMPLES = 4000, 3 * 8
"""Characters of a text, and answers: three to each prompt."""
_TYPICAL_OF = 20
"""Steps."""
_SIGN_OF_LIFE = re.compile(rb'"event": "(report|validation|activity|going_on|group)"')
"""Events of which nothing but their time counts."""
_STANDING = ("processes", "group", "going_on")
"""Events that come again and again, also from a rank that makes no progress."""
_UNREAD = (None, "loading", "running", "suspended")
"""Phases of a rank of which no step was read, or none since it was stopped."""


class RankEvents:
    """Follows one rank's events. Bounded memory: status, and the iterations of its checkpoints."""

    def __init__(self, path: Path) -> None:
        self._tail = LineTail(path)
        self.report = RankReport()
        self.checkpoints: list[int] = []
        """Iterations at which a checkpoint was committed, ascending."""
        self._step_times: deque[float] = deque(maxlen=_TYPICAL_OF)
        self._moved = False
        """Since the last poll."""
        self._started_at: float | None = None
        """The start event's time, on the node's monotonic clock."""

    def poll(self) -> RankReport:
        # In a long history most lines are such: only the last ones before another event, or at the end, are parsed.
        steps, signs = deque[bytes](maxlen=_TYPICAL_OF), deque[bytes](maxlen=1)
        for line in self._tail.lines():
            if STEP_FIELD in (name := line[:NAME_END]):
                steps.append(line)
                signs.clear()
            elif _SIGN_OF_LIFE.search(name):
                signs.append(line)
            else:
                self._read(*deque(steps, 1), line)
                steps.clear()
                signs.clear()
        self._read(*steps, *signs)
        if self._moved:
            # The newest line came then, the one that counts at the latest.
            with contextlib.suppress(OSError):
                at = datetime.fromtimestamp(self._tail.path.stat().st_mtime, UTC)
                self.report, self._moved = replace(self.report, moved_at=at), False
        return self.report

    def _read(self, *lines: bytes) -> None:
        for event in filter(None, map(parse_json_line, lines)):
            self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        attempt = event.get("attempt")
        if isinstance(attempt, int) and attempt != self.report.attempt:
            # A new attempt begins with a new process: no earlier report holds for it.
            kept = {name: getattr(self.report, name) for name in ("seen_at", "samples")}
            self.report = replace(RankReport(phase="loading", attempt=attempt), **kept)
            self._step_times.clear()
            self._started_at = None
        changes = self._changes(event)
        self._moved |= event.get("event") not in _STANDING
        if (clock := finite_or_none(event.get("t"))) is not None:
            self._started_at = clock if event.get("event") == "start" else self._started_at
            if self._started_at is not None:
                changes["training_s"] = max(0.0, clock - self._started_at)
        seen_at = moment_or_none(event.get("at")) or self.report.seen_at
        if event.get("event") == "step":
            changes["stepped_at"] = seen_at
        self.report = replace(self.report, **changes, seen_at=seen_at)

    def _changes(self, event: dict[str, Any]) -> dict[str, Any]:
        """The fields of the report that `event` changes."""
        changes: dict[str, Any] = {}
        match event.get("event"):
            case "start":
                changes = {"phase": "loading"}
                changes |= {name: count_or_none(event.get(name)) for name in ("iterations", "world_size")}
                changes |= {name: text_or_none(event.get(name), 40) for name in ("backend", "device")}
            case "replica_check":
                agreed = event.get("agreed")
                changes = {"compared_at": count_or_none(event.get("iteration"))}
                changes["replicas_agree"] = agreed if isinstance(agreed, bool) else None
            case "chunk" | "served" as name:
                changes = _chunk(event) if name == "chunk" else _served(event)
            case "warning" if (text := text_or_none(event.get("message"), _WARNING_LIMIT)) is not None:
                changes = {"warnings": tuple(dict.fromkeys((*self.report.warnings, text)))[-_MOST_WARNINGS:]}
            case "sample":
                changes = {"samples": _with_sample(self.report.samples, event)}
            case "phase":
                changes = {"phase": plain(event.get("phase"), PHASE_LIMIT)}
            case "processes" if self.report.phase in _UNREAD or event.get("state") == "stopped":
                changes = {"phase": "suspended" if event.get("state") == "stopped" else "running"}
            case "step":
                changes = self._step(event)
            case "checkpoint" if event.get("phase") == "committed":
                # One that is written in the background only holds the training up in part.
                waited = finite_or_none(event.get("blocking_seconds" if event.get("background") else "seconds"))
                changes = {"saved_bytes": count_or_none(event.get("bytes"))}
                changes["saving_s"] = self.report.saving_s + max(0.0, waited or 0.0)
                iteration = count_or_none(event.get("iteration"))
                # One that was written in the background may be reported after a newer one.
                if iteration is not None and iteration > max(self.checkpoints[-1:], default=-1):
                    self.checkpoints.append(iteration)
            case "failure" | "end":
                changes = {"phase": "ended"}
        return changes

    def _step(self, event: dict[str, Any]) -> dict[str, Any]:
        compute = finite_or_none(event.get("compute_s"))
        if compute is not None:
            self._step_times.append(compute)
        # Only the last of the iterations that make one update has its gradients' norms.
        norms = {
            "global_grad_norm": finite_or_none(event.get("grad_norm")),
            "grad_norm": finite_or_none(event.get("own_grad_norm")),
        }
        return {
            "phase": "training" if self.report.phase in _UNREAD else self.report.phase,
            "iteration": count_or_none(event.get("iteration")),
            "step_s": compute,
            "typical_s": statistics.median(self._step_times) if self._step_times else None,
            "exchange_s": finite_or_none(event.get("communicate_s")),
            "memory_bytes": count_or_none(event.get("peak_memory_bytes")),
            **{name: norm for name, norm in norms.items() if norm is not None},
        }


def _with_sample(samples: tuple[Sample, ...], event: dict[str, Any]) -> tuple[Sample, ...]:
    prompt, text = (plain(event.get(name) or "", _SAMPLE_LIMIT) for name in ("prompt", "text"))
    iteration, tokens = (count_or_none(event.get(name)) or 0 for name in ("iteration", "tokens"))
    seconds, share = (finite_or_none(event.get(name)) for name in ("seconds", "share"))
    sample = Sample(iteration, prompt, text, tokens, seconds or 0.0, share)
    # A resumed training repeats what came after its checkpoint.
    before = [past for past in samples if past.prompt == prompt and past.iteration < iteration]
    others = [past for past in samples if past.prompt != prompt]
    return (*others, *before[:1], *before[1:][-1:], sample)[-_MOST_SAMPLES:]


def _chunk(event: dict[str, Any]) -> dict[str, Any]:
    done, of, epoch = (count_or_none(event.get(name)) for name in ("chunk", "num_chunks", "epoch"))
    if done is None or of is None or not 0 < done <= of:
        return {}
    return {"chunk": ChunkProgress(done, of, (epoch or 0) + 1)}


def _served(event: dict[str, Any]) -> dict[str, Any]:
    requests, tokens = (count_or_none(event.get(name)) for name in ("requests", "tokens"))
    rate = finite_or_none(event.get("tokens_per_second"))
    if requests is None or tokens is None or rate is None:
        return {}
    return {"served": ServedRequests(requests, tokens, rate)}
