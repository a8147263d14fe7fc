"""The journal of a run: append-only JSON lines, the truth about its states. Written by its supervisor alone.

Every entry is `{"at": UTC ISO time, "event": …, …}`:

    planned       run (RunRecord), nonce: what is to be, before anything starts
    replanned     excluded [nodes], why, world_size: the preflight left these out, and plan.json is another from here on
    shares        source, reason, parts {node: part of the batch}, and what was predicted of that (measured.Division)
    supervisor    pid, start, boot_id, adopted: who watches from here on
    state         state; at the end also reason, rank, host, cause, fix, exit_code, signal, iteration, train_loss,
                  val_loss, tokens_per_second, unconfirmed
    reopened      the run had ended, and is to go on from the state that it has saved; preflight comes next
    attempt       attempt, nonce, members [[rank, node]], resume, reached (the run's iteration before), starting_port,
                  log_bases {source: size of the head's log when the attempt began}, event_bases {rank: the same for its
                  events}
    hung          rank, node (null: not known which), silent_s, limit_s, doing, iteration: no step for too long
    attempt_ended attempt, reason, rank, host, cause, fix, signature, exit_code, signal, reached (the last iteration
                  that any rank finished), failed_at (when that was noticed), unconfirmed [nodes]
    recovery      attempt (the next), after, members [nodes], left_out [nodes], delay_s, why: what follows from that
    recovery_waits after, why: for which nodes, before that
    recovered     attempt, iteration (gone on after it), update, source, from_rank, repeated (steps), seconds (from the
                  failure to the first step)
    given_up      after, why: no restart follows
    launcher      pid, start: mlx.launch's process, leader of its group
    rank_started  rank, host, pid, start, pgid, started_at (wall, seconds since the epoch, on the node), identity
    rank_ended    rank, host, code, signal, stopped_by, error
    request       request, now, by: what a face asked for
    stop          stage (asked, stop, rescue, term, kill, verifying, stopped, unconfirmed), purpose (abort, fence, end),
                  acknowledged [ranks whose keeper has written an exit record], left ["node pid command"]
    node          node, condition (connected, unreachable, lost), since, why, silent_s (engine.supervision.conditions):
                  a node with a connection answers, or does not
    alarm         alarm (an issue's name), ranks, workers, iteration, message: found of the ranks while they train
                  (engine.supervision.consistency_watch)
    confirmed     node: what could not be proved at the run's end has been proved there since
    note          message: anything else worth knowing, a full disk for example
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.errors import StateError
from engine.models import RunRecord, RunState
from engine.runs.line_file import LineFile

_SYNCED = frozenset(
    {
        "planned",
        "replanned",
        "reopened",
        "state",
        "attempt",
        "attempt_ended",
        "recovery",
        "launcher",
        "request",
        "stop",
        "confirmed",
    }
)
_END_FIELDS = (
    "reason",
    "rank",
    "host",
    "cause",
    "fix",
    "exit_code",
    "signal",
    "iteration",
    "train_loss",
    "val_loss",
    "tokens_per_second",
    "unconfirmed",
)


def _now() -> datetime:
    return datetime.now(UTC)


class Journal:
    """The writing side. One per run at a time: the supervisor's lock sees to that."""

    def __init__(self, path: Path, clock: Callable[[], datetime] = _now) -> None:
        """Opens `path` for appending; what a killed writer left of a line is cut off."""
        self._clock = clock
        self._file = LineFile(path)

    def append(self, event: str, **fields: Any) -> dict[str, Any]:
        """Append one entry by one write; a change of state is on the disk when this returns.

        On a full disk the entry waits in memory and goes out with the next one (or `flush`), so training is not stopped
        for want of a journal. Any other fault raises OSError.
        """
        entry = {"at": self._clock().isoformat(), "event": event, **fields}
        line = json.dumps(entry, ensure_ascii=False, default=str).encode(errors="backslashreplace")
        self._file.append(line, sync=event in _SYNCED)
        return entry

    def flush(self) -> bool:
        """Write what a full disk held back; False while there is still no room."""
        return self._file.flush(sync=True)

    def close(self) -> None:
        self._file.close()


def read_journal(path: Path) -> list[dict[str, Any]]:
    """All whole entries in order, [] when there is no journal. A torn last line is not an entry; neither is a line that
    a crash of the machine has left unreadable."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    whole, _, _torn = content.rpartition(b"\n")
    return [entry for line in whole.split(b"\n") if (entry := parse_entry(line)) is not None]


def parse_entry(line: bytes) -> dict[str, Any] | None:
    """One line of a journal; None when it is no entry."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("event"), str) else None


def replay(entries: Iterable[dict[str, Any]]) -> RunRecord:
    """The run's record as the journal has it. Raises StateError when nothing says which run it is."""
    record: dict[str, Any] | None = None
    for entry in entries:
        if entry["event"] == "planned" and record is None:
            record = dict(entry["run"])
        elif record is not None:
            _apply(record, entry)
    if record is None:
        raise StateError("the journal does not begin with a plan")
    return RunRecord.model_validate(record)


def _apply(record: dict[str, Any], entry: dict[str, Any]) -> None:
    match entry["event"]:
        case "state":
            record["state"] = entry["state"]
            record.update({key: entry[key] for key in _END_FIELDS if entry.get(key) is not None})
            if RunRecord.model_validate(record).state.ended:
                record["ended_at"] = entry["at"]
        case "reopened":
            record["state"] = RunState.PLANNED
            record.update(dict.fromkeys((*_END_FIELDS, "ended_at")))
            record["unconfirmed"] = []
        case "replanned":
            record["excluded"] = [*(record.get("excluded") or []), *entry["excluded"]]
            record["world_size"] = entry["world_size"]
        case "attempt":
            record["attempts"] = entry["attempt"]
            # What "auto" has come to; attempts of before had nothing to choose.
            record["backend"] = (entry.get("wiring") or {}).get("backend", record["backend"])
            record["world_size"] = len(entry.get("members") or ()) or record["world_size"]
        case "confirmed":
            record["unconfirmed"] = [node for node in record.get("unconfirmed") or [] if node != entry["node"]]
        case "rank_started":
            started = datetime.fromtimestamp(entry["started_at"], UTC)
            earliest = record.get("started_at")
            record["started_at"] = min(started, datetime.fromisoformat(str(earliest))) if earliest else started
