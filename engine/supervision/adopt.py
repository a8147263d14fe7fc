"""Finds runs whose supervisor is gone, and gives each a new one that goes on with it or ends it.

A run that has ended is such a one, too, while there are nodes on which its end could not be proved.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

from engine.errors import LaunchError, StateError
from engine.runs.journal import parse_entry
from engine.runs.layout import RunDir
from engine.runs.watch import supervisor_alive
from engine.supervision import spawn

_BEING_LAUNCHED_S = 20.0
"""A plan younger than this may be one whose launch is under way."""
AFTERMATH_S = 3600.0
"""A node on which the stop could not be proved is waited for after the run's end, as long."""
_TAIL_BYTES = 65_536
_ENDED = frozenset({"succeeded", "failed", "aborted", "lost"})


def orphans(home: Path) -> list[RunDir]:
    """The runs below `home` that are not ended and have no supervisor. Reads the end of each journal only."""
    try:
        found = [RunDir(path) for path in (home / "runs").iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []
    return [run_dir for run_dir in sorted(found, key=lambda run_dir: run_dir.id) if _is_orphan(run_dir)]


def adopt_orphans(home: Path) -> list[str]:
    """Start a supervisor for every orphan; the ids of the runs that got one. One that cannot be adopted does not keep
    the others from it: it is tried again by whoever starts next."""
    adopted = []
    for run_dir in orphans(home):
        try:
            spawn.start(run_dir, adopt=True)
        except (LaunchError, StateError):
            # Somebody else was faster, or its own supervisor.log says what is wrong.
            continue
        adopted.append(run_dir.id)
    return adopted


def _is_orphan(run_dir: RunDir) -> bool:
    try:
        age_s = time.time() - run_dir.plan.stat().st_mtime
    except FileNotFoundError:
        return False
    if not run_dir.journal.exists() and age_s < _BEING_LAUNCHED_S:
        return False
    return not _is_done(run_dir) and not supervisor_alive(run_dir)


def _is_done(run_dir: RunDir) -> bool:
    """Whether the journal's last state is an end, and nothing is left to do after it."""
    try:
        with run_dir.journal.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return False
    confirmed = set()
    for line in reversed(lines):
        entry = parse_entry(line)
        if entry is not None and entry["event"] == "confirmed":
            confirmed.add(entry.get("node"))
        elif entry is not None and entry["event"] == "reopened":
            return False
        elif entry is not None and entry["event"] == "state":
            missing = set(entry.get("unconfirmed") or ()) - confirmed
            return entry.get("state") in _ENDED and not (missing and _seconds_since(entry["at"]) < AFTERMATH_S)
    return False


def _seconds_since(at: str) -> float:
    """Since a journal entry's time."""
    return (datetime.now(UTC) - datetime.fromisoformat(at)).total_seconds()
