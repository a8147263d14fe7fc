"""The notifier of a run, a process beside its trackers: `python -m engine.run.notifier <run directory> notifier` tells
people what [notify] names, and ends when the run's supervisor has left.

An event is told at most once on each channel, over the deaths of supervisors and notifiers: it is written down before
it is sent. One that was being sent when the notifier was killed is not sent again, and its record says so."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from engine.config.models import Config
from engine.errors import plural
from engine.models import RunState
from engine.notify.channels import document, redactor_for, send_to_all
from engine.run.json_lines import LineFile
from engine.run.notifications import NotificationTail
from engine.run.run_plan import read_plan
from engine.run.tracker import END_LIMIT_S, VARIABLE, input_ended
from engine.run.watch import RunWatch
from engine.security.sanitise import plain
from engine.snapshots import Notification, RunSnapshot
from engine.store.layout import RunDir

_POLL_S = 5.0
"""macOS answers with a process whether the supervisor lives."""
_MOST_AN_HOUR = 6
"""Events of a run that goes on, which may recover again and again."""
_ENDINGS = {
    RunState.SUCCEEDED: ("end", "has succeeded"),
    RunState.COMPLETED: ("end", "has completed on the nodes that answer"),
    RunState.ABORTED: ("end", "was stopped"),
    RunState.FAILED: ("failure", "has failed"),
    RunState.LOST: ("failure", "is lost"),
}


def lasting(seconds: float) -> str:
    """For example "42 s", "5 min" or "3 h 12 min"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def news(snapshot: RunSnapshot, config: Config, now: datetime) -> Iterator[tuple[str, Notification]]:
    """All that is to be told by now, also what was told, each with a key that tells it from all others."""
    record = snapshot.record

    def keyed(key: object, event: str, title: str, text: str) -> tuple[str, Notification]:
        return f"{event} {key}", Notification(event, f"{record.name} {title}", text, now, record.id)

    for attempt in snapshot.attempts:
        if attempt.recovery_s is not None:
            first = f"attempt {attempt.number} made its first step {lasting(attempt.recovery_s)} after the failure"
            text = f"{first}, from iteration {attempt.resumed_at or 0:,}: {attempt.why or 'restarted'}"
            yield keyed(attempt.number, "recovery", "goes on", text)
    if snapshot.ended:
        event, title = _ENDINGS[record.state]
        title += f" on {record.host}" if record.host and event == "failure" else ""
        text = "; ".join(filter(None, (record.cause, record.fix, _figures(snapshot))))
        yield keyed(f"{record.state} {record.ended_at}", event, title, text)
        return
    if (stalled := _stall(snapshot, config, now)) is not None:
        yield keyed(f"{record.attempts}.{record.iteration or 0}", "stall", *stalled)
    losses = snapshot.series.val
    best = min(losses, key=lambda point: point[1], default=(0, 0.0))
    later = sum(iteration > best[0] for iteration, _ in losses)
    if later >= config.notify.plateau_validations:
        text = f"the best is {best[1]:.4g}, of iteration {best[0]:,}; the last is {losses[-1][1]:.4g}"
        yield keyed(best[0], "plateau", f"has no better validation loss in {plural(later, 'validation')}", text)


def _figures(snapshot: RunSnapshot) -> str:
    record, seconds = snapshot.record, snapshot.result.seconds if snapshot.result is not None else None
    losses = (("validation", record.val_loss), ("training", record.train_loss))
    texts = [f"{name} loss {loss:.4g}" for name, loss in losses if loss is not None]
    texts += [plural(record.iteration, "iteration")] if record.iteration else []
    return ", ".join(texts + ([f"ran {lasting(seconds)}"] if seconds else []))


def _stall(snapshot: RunSnapshot, config: Config, now: datetime) -> tuple[str, str] | None:
    """At half of hang_s, which 5 long steps extend, or of stall_s where no hang is judged."""
    if (quiet := snapshot.quiet) is None:
        return None
    record = snapshot.record
    left = (record.iterations or 0) - (record.iteration or 0)
    step_s = snapshot.eta_s / left if snapshot.eta_s is not None and left > 0 else 0.0
    limit_s = max(quiet.hang_s or config.recovery.stall_s, 5 * step_s)
    silent_s = (now - quiet.since).total_seconds()
    if silent_s < limit_s / 2:
        return None
    judged = f"; after {lasting(limit_s)} it is ended as hung" if quiet.hang_s is not None else ""
    return f"has shown no {quiet.sign} for {lasting(silent_s)}", f"since iteration {record.iteration or 0:,}{judged}"


class Notifier:
    def __init__(self, run_dir: RunDir, config: Config) -> None:
        """Writes down what became of those that a killed notifier was sending. Raises OSError, StateError."""
        self._run_dir, self._config = run_dir, config
        self._redactor = redactor_for(config)
        self._past = NotificationTail(run_dir.notifications)
        self._past.poll()
        self._file = LineFile(run_dir.notifications)
        with contextlib.suppress(OSError):
            run_dir.end_untold.touch(0o600)
        for key in sorted(self._past.unanswered):
            self._write(key, problems=["the notifier was killed while it sent this, which may have arrived"])

    def take(self, snapshot: RunSnapshot, now: datetime) -> None:
        """Tell what is new. Blocking. Raises OSError for a fault of the disk that is not a full one."""
        for key, notification in news(snapshot, self._config, now):
            if notification.event in self._config.notify.on and key not in self._past.keys:
                self._tell(key, notification)
        self._file.flush(sync=True)
        if snapshot.ended:
            self._run_dir.end_untold.unlink(missing_ok=True)

    def _tell(self, key: str, notification: Notification) -> None:
        since = notification.at - timedelta(hours=1)
        recent = sum(past.at > since for past in self._past.by_key.values())
        if notification.event not in ("end", "failure") and recent >= _MOST_AN_HOUR:
            self._write(key, event=notification.event, held=True)
            return
        summed = ", ".join(f"{count} × {event}" for event, count in Counter(self._past.held).items())
        text = notification.text + (f"; not told before: {summed}" if summed else "")
        title, text = (plain(self._redactor(words)) for words in (notification.title, text))
        notification = replace(notification, title=title, text=text)
        self._write(key, **{**document(notification), "at": notification.at.timestamp()})
        failed = [answer for answer in send_to_all(self._config, notification) if not answer.sent]
        self._write(key, problems=[f"{answer.channel}: {answer.answer}" for answer in failed])

    def _write(self, key: str, **fields: Any) -> None:
        entry = {"key": key, **fields}
        self._past.take(entry)
        self._file.append(json.dumps(entry, ensure_ascii=False).encode(errors="backslashreplace"), sync=True)


def main() -> None:
    """Tell what happens until standard input has ended, and then what had happened by that time."""
    # What a command of the user's own leaves running is none of ours.
    os.environ.pop(VARIABLE, None)
    run_dir = RunDir(Path(sys.argv[1]))
    notifier, watch, ended = Notifier(run_dir, read_plan(run_dir.plan).config), RunWatch(run_dir), False
    while not ended:
        if ended := input_ended(_POLL_S):
            signal.alarm(END_LIMIT_S)
        notifier.take(watch.poll(), datetime.now(UTC))


if __name__ == "__main__":
    main()
