"""checkpoint_strategy: what a run can go on from, how often it is kept, and where."""

from __future__ import annotations

from engine.planning.checkpointing import most, save_every, state_every
from engine.planning.document import CheckpointPart
from engine.planning.notes import Notes, Source
from engine.planning.situation import Situation

_KEY = "checkpoint_strategy."
_RECOVERY_TIME = "null: it depends on how fast the nodes load the model, which is not measured before a launch"
_COMMAND = "the job runs a command of its own, which saves by itself"


def checkpoints(now: Situation, notes: Notes) -> CheckpointPart:
    """What the trainer is told; a command of the user's own keeps its state itself."""
    notes.why(_KEY + "expected_recovery_time", Source.UNKNOWN, _RECOVERY_TIME)
    frequency = suggested = storage = None
    checkpoint = now.inputs.config.checkpoint
    if not now.settings:
        notes.why(_KEY + "approach", Source.USER, _COMMAND)
        notes.why(_KEY + "frequency", Source.UNKNOWN, _COMMAND)
    else:
        _approach(now, notes)
        frequency, suggested = int(now.settings["save_every"]), save_every(int(now.settings["iters"]), full=now.full)
        _frequency(now, notes, frequency, suggested)
        where = "the node of rank 0" if now.inputs.strategy == "data" else "each node, its own part"
        storage = checkpoint.destination or f"~/.flightdeck/runs/<run>/checkpoints on {where}"
    return CheckpointPart(
        async_=bool(now.settings) and checkpoint.enabled,
        compression=checkpoint.compression,
        storage=storage,
        frequency=frequency,
        retention=f"last_{checkpoint.keep}_checkpoints",
        expected_recovery_time=None,
        suggested_frequency=suggested,
        not_in_this_release={},
    )


def _approach(now: Situation, notes: Notes) -> None:
    """Replicas hold the state; where each rank has a part of it, the periodic checkpoint is all there is."""
    if now.inputs.strategy == "data" and now.ranks > 1:
        text = "when a rank is lost, the others have the state of the last finished step: the run goes on from there"
        notes.why(_KEY + "approach", Source.RULE, text)
        return
    alone = now.ranks == 1
    why = "one rank: nobody else has the state" if alone else f"{now.inputs.strategy}: no rank has the whole state"
    text = f"{why}; the last periodic checkpoint serves when one is lost"
    notes.why(_KEY + "approach", Source.RULE, text)
    if not now.inputs.config.checkpoint.enabled:
        notes.warn("checkpoint_strategy", f"{why}, and [checkpoint] enabled = false: a lost rank ends the run")


def _frequency(now: Situation, notes: Notes, frequency: int, suggested: int) -> None:
    said = Source.USER if now.given("save_every") else Source.DEFAULT
    limit = most(full=now.full)
    updates = state_every(now.inputs.config)
    state = f"the whole state every {updates} updates" if updates else "no state: [checkpoint] enabled = false"
    notes.why(
        _KEY + "frequency",
        said,
        f"save_every {'of the job' if said is Source.USER else 'as mlx-lm has it'}; {state}; "
        f"the rule, min(1000, iters/20){' and at most 500 in full fine-tuning' if now.full else ''}, gives {suggested}",
    )
    if frequency > limit:
        text = f"save_every = {frequency} loses as many iterations: at most {limit} (set save_every = {suggested})"
        notes.warn("checkpoint_strategy", text)
    if frequency > int(now.settings["iters"]):
        text = f"save_every = {frequency} is more than the {now.settings['iters']} iterations: only the end is kept"
        notes.warn("checkpoint_strategy", text)
