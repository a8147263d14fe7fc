"""The newest report of one rank, from the mirror of its event file; only a few of its lines are ever parsed."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from engine.run.json_lines import LineTail, parse_json_line
from engine.security.sanitise import count_or_none, finite_or_none, moment_or_none, text_or_none
from engine.snapshots import ChunkProgress

_STATUS_LINES = 40
"""At the end of the file: enough that a report or validation never hides the last step."""
_TYPICAL_OF = 20
"""Steps."""
_KEPT_EVENTS = (b'"checkpoint"', b'"replica_check"', b'"chunk"', b'"failure"', b'"warning"', b'"start"', b'"end"')
"""Events that count wherever they are, recognised without parsing. Steps and reports only count when they are last."""


@dataclass
class RankReport:
    phase: str | None = None
    iteration: int | None = None
    step_s: float | None = None
    typical_s: float | None = None
    exchange_s: float | None = None
    grad_norm: float | None = None
    """Norm of the global gradient at the last update; the next is this rank's own."""
    own_grad_norm: float | None = None
    memory_bytes: int | None = None
    seen_at: datetime | None = None
    attempt: int = 0
    iterations: int | None = None
    """The planned number, from the start event."""
    backend: str | None = None
    """From the start event, like the next two."""
    world_size: int | None = None
    device: str | None = None
    compared_at: int | None = None
    """Iteration of the last comparison of the replicas."""
    replicas_agree: bool | None = None
    saved_bytes: int | None = None
    """Size of the last committed checkpoint."""
    chunk: ChunkProgress | None = None
    """The last one that was finished of data that is streamed."""


class RankEvents:
    """Follows one rank's events. Bounded memory: status, and the iterations of its checkpoints."""

    def __init__(self, path: Path) -> None:
        self._tail = LineTail(path)
        self.report = RankReport()
        self.checkpoints: list[int] = []
        """Iterations at which a checkpoint was committed, ascending."""
        self._step_times: deque[float] = deque(maxlen=_TYPICAL_OF)

    def poll(self) -> RankReport:
        waiting = b""
        for block in self._tail.blocks():
            # In a long history only the last block has the status; the others are searched for a few events.
            for line in _kept(waiting):
                self._read(line)
            waiting = block
        if waiting:
            lines = waiting.rsplit(b"\n", _STATUS_LINES)
            if len(lines) > _STATUS_LINES:
                for line in _kept(lines.pop(0)):
                    self._read(line)
            for line in lines:
                self._read(line)
        return self.report

    def _read(self, line: bytes) -> None:
        event = parse_json_line(line)
        if event is not None:
            self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        at, attempt = event.get("at"), event.get("attempt")
        if isinstance(attempt, int) and attempt != self.report.attempt:
            # A new attempt begins with a new process: no earlier report holds for it.
            self.report = RankReport(phase="loading", attempt=attempt, seen_at=self.report.seen_at)
            self._step_times.clear()
        report = self.report
        report.seen_at = moment_or_none(at) or report.seen_at
        match event.get("event"):
            case "start":
                report.phase = "loading"
                report.iterations = count_or_none(event.get("iterations"))
                report.world_size = count_or_none(event.get("world_size"))
                report.backend = text_or_none(event.get("backend"), 40)
                report.device = text_or_none(event.get("device"), 40)
            case "replica_check":
                agreed = event.get("agreed")
                report.compared_at = count_or_none(event.get("iteration"))
                report.replicas_agree = agreed if isinstance(agreed, bool) else None
            case "chunk":
                self._take_chunk(event)
            case "phase":
                report.phase = str(event.get("phase"))
            case "step":
                self._take_step(event)
            case "checkpoint" if event.get("phase") == "committed":
                self._take_checkpoint(event)
            case "failure" | "end":
                report.phase = "ended"

    def _take_step(self, event: dict[str, Any]) -> None:
        report, compute = self.report, finite_or_none(event.get("compute_s"))
        if compute is not None:
            self._step_times.append(compute)
        if report.phase in (None, "loading"):
            report.phase = "training"
        report.iteration = count_or_none(event.get("iteration"))
        report.step_s = compute
        report.typical_s = statistics.median(self._step_times) if self._step_times else None
        report.exchange_s = finite_or_none(event.get("communicate_s"))
        report.memory_bytes = count_or_none(event.get("peak_memory_bytes"))
        # Only the last of the iterations that make one update has its gradients' norms.
        if (norm := _norm(event.get("grad_norm"))) is not None:
            report.grad_norm = norm
        if (own := _norm(event.get("own_grad_norm"))) is not None:
            report.own_grad_norm = own

    def _take_chunk(self, event: dict[str, Any]) -> None:
        done, of, epoch = (count_or_none(event.get(name)) for name in ("chunk", "num_chunks", "epoch"))
        if done is not None and of is not None and 0 < done <= of:
            self.report.chunk = ChunkProgress(done, of, (epoch or 0) + 1)

    def _take_checkpoint(self, event: dict[str, Any]) -> None:
        self.report.saved_bytes = count_or_none(event.get("bytes"))
        iteration = count_or_none(event.get("iteration"))
        # One that was written in the background may be reported after a newer one.
        if iteration is not None and iteration > max(self.checkpoints[-1:], default=-1):
            self.checkpoints.append(iteration)


def _kept(block: bytes) -> list[bytes]:
    """The lines of `block` that name one of the kept events, in order."""
    starts: set[int] = set()
    for name in _KEPT_EVENTS:
        place = block.find(name)
        while place >= 0:
            starts.add(block.rfind(b"\n", 0, place) + 1)
            place = block.find(name, place + len(name))
    ends = ((start, block.find(b"\n", start)) for start in sorted(starts))
    return [block[start : end if end >= 0 else len(block)] for start, end in ends]


def _norm(value: Any) -> float | None:
    """One that is not finite is shown as it is."""
    return value if isinstance(value, float) else finite_or_none(value)
