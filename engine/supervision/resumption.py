"""Taking up a run that has ended: the same run goes on from the state that it saved."""

from __future__ import annotations

from engine.errors import InputError, LaunchError
from engine.models import RunState
from engine.runs.journal import read_journal, replay
from engine.runs.layout import RunDir
from engine.runs.watch import supervisor_alive
from engine.supervision import spawn


def resume(run_dir: RunDir) -> None:
    """Start a supervisor that takes the run up again: preflight first, then the next attempt. Returns when it has taken
    over. Raises InputError for a run that has not ended or has succeeded, LaunchError, StateError."""
    record = replay(read_journal(run_dir.journal))
    if not record.state.ended:
        raise InputError(f"{record.id} has not ended", why=f"it is {record.state}", todo="nothing: it goes on")
    if record.state is RunState.SUCCEEDED:
        raise InputError(f"{record.id} has succeeded", why="there is nothing left to train", todo="launch a new run")
    if supervisor_alive(run_dir):
        nodes = ", ".join(record.unconfirmed)
        why = f"the stop is not proved yet on {nodes}" if nodes else "it is about to leave"
        raise LaunchError("its supervisor is still there", where=record.id, why=why, todo="try again when it has left")
    spawn.start(run_dir, resume=True)
