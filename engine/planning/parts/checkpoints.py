"""checkpoint_strategy: how often, where to, and what of it this release does."""

from __future__ import annotations

from engine.planning.checkpointing import most, save_every
from engine.planning.document import CheckpointPart
from engine.planning.notes import Notes, Source
from engine.planning.situation import Situation

_KEY = "checkpoint_strategy."
_NOT_YET = {
    "approach": "a lost rank ends the run; what was saved last is what is left",
    "async": "the trainer saves synchronously, and waits for the disk",
    "compression": "adapters and weights are written as they are",
    "retention": "every numbered file is kept",
    "expected_recovery_time": "null: a run does not yet go on by itself, so there is nothing to measure",
    "resume": "weights only: optimizer, data position and random state begin anew",
}


def checkpoints(now: Situation, notes: Notes) -> CheckpointPart:
    """The design's strategy, and in `not_in_this_release` what is done in its place."""
    notes.why(_KEY + "approach", Source.RULE, f"FlashRecovery is the design; in this release {_NOT_YET['approach']}")
    notes.why(_KEY + "expected_recovery_time", Source.UNKNOWN, _NOT_YET["expected_recovery_time"])
    frequency = suggested = storage = None
    if not now.settings:
        notes.why(_KEY + "frequency", Source.UNKNOWN, "the job runs a command of its own, which saves by itself")
    else:
        frequency, suggested = int(now.settings["save_every"]), save_every(int(now.settings["iters"]), full=now.full)
        limit = most(full=now.full)
        said = Source.USER if now.given("save_every") else Source.DEFAULT
        notes.why(
            _KEY + "frequency",
            said,
            f"save_every {'of the job' if said is Source.USER else 'as mlx-lm has it'}; the rule, min(1000, iters/20)"
            f"{' and at most 500 in full fine-tuning' if now.full else ''}, gives {suggested}",
        )
        if frequency > limit:
            text = f"save_every = {frequency} loses as many iterations: at most {limit} (set save_every = {suggested})"
            notes.warn("checkpoint_strategy", text)
        if frequency > int(now.settings["iters"]):
            text = f"save_every = {frequency} is more than the {now.settings['iters']} iterations: only the end is kept"
            notes.warn("checkpoint_strategy", text)
        storage = str(now.settings.get("adapter_path") or "~/.flightdeck/runs/<run>/adapters on the node of rank 0")
    return CheckpointPart(
        async_=False,
        compression="none",
        storage=storage,
        frequency=frequency,
        expected_recovery_time=None,
        suggested_frequency=suggested,
        not_in_this_release=dict(_NOT_YET),
    )
