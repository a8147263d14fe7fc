"""How often a run saves, and the plan's checkpoint_strategy section: what a run can resume from, and where it lies."""

from __future__ import annotations

import statistics

from engine.config.mlx_lm_keys import DEFAULTS
from engine.config.models import Config
from engine.plan.context import PlanContext
from engine.plan.document import CheckpointSection, Source
from engine.security.redact import redact

MAX_SAVE_EVERY = 1000
"""Most iterations between two saves: with a longer interval a user lost 1,780 iterations twice."""
MAX_SAVE_EVERY_FULL = 500
"""The same for full fine-tuning, whose iterations take longer."""
MIN_SAVES = 20
"""Fewest saves per run."""


def save_every(iterations: int, *, full: bool) -> int:
    """Iterations between two saves: min(1000, iterations / 20), at most 500 in full fine-tuning, at least 1."""
    return max(1, min(max_save_every(full=full), iterations // MIN_SAVES))


def state_every(config: Config) -> int:
    """Optimizer updates between two checkpoints of the training state; 0 means none. By default as often as the job
    saves its adapters, which it counts in iterations."""
    if not config.checkpoint.enabled or config.job.kind.own_model is not None:
        return 0
    if config.checkpoint.every is not None:
        return config.checkpoint.every
    settings = {**DEFAULTS, **config.job.mlx_lm}
    return max(1, int(settings["save_every"]) // int(settings["grad_accumulation_steps"]))


def max_save_every(*, full: bool) -> int:
    return MAX_SAVE_EVERY_FULL if full else MAX_SAVE_EVERY


_KEY = "checkpoint_strategy."
_RECOVERIES = 5
"""The newest recoveries that count."""
_COMMAND = "the job runs a custom command, which saves by itself"


def checkpoint_section(context: PlanContext) -> CheckpointSection:
    measured = context.recoveries_s[:_RECOVERIES]
    source, reason = Source.UNKNOWN, "null: no run of this job on this cluster has recovered from a failure yet"
    if measured:
        times = ", ".join(f"{seconds:.1f} s" for seconds in measured)
        source, reason = Source.FACT, f"the median of the newest recoveries of this job on this cluster: {times}"
    context.explain(_KEY + "expected_recovery_time", source, reason)
    frequency = suggested = storage = None
    checkpoint, framework = context.config.checkpoint, context.job.kind.framework
    if not context.settings:
        context.explain(_KEY + "approach", Source.USER, _COMMAND)
        context.explain(_KEY + "frequency", Source.UNKNOWN, _COMMAND)
    else:
        _approach(context)
        frequency = int(context.settings["save_every"])
        if context.iterations is not None:
            suggested = save_every(context.iterations, full=context.full)
        _frequency(context, frequency, suggested)
        where = {
            "data": "the node of rank 0",
            "ddp": "each node, which stores the whole state",
            "local": "each node, which stores its own state",
        }.get(context.strategy, "each node, which stores its own part")
        storage = redact(checkpoint.destination or "", {}) or f"~/.flightdeck/runs/<run>/checkpoints on {where}"
    if not context.settings and checkpoint.model_fields_set:
        context.warn("checkpoint_strategy", f"[checkpoint] is unused: {_COMMAND}")
    elif not framework.compresses and checkpoint.compression != "none":
        text = f"compression = {checkpoint.compression} is unused: {framework.title}'s states are not compressed"
        context.warn("checkpoint_strategy", text)
    return CheckpointSection(
        async_=bool(context.settings) and checkpoint.enabled,
        compression=checkpoint.compression if framework.compresses else "none",
        storage=storage,
        frequency=frequency,
        retention=f"last_{checkpoint.keep}_checkpoints" if context.settings else "the command's own",
        expected_recovery_time=statistics.median(measured) if measured else None,
        suggested_frequency=suggested,
    )


def _approach(context: PlanContext) -> None:
    """Replicas hold the whole state, and with local every rank one of its own; when it is partitioned, only the
    periodic checkpoint has all of it."""
    replicas = {
        "data": "when a rank is lost, the others have the state of the last finished step, and the run continues from "
        "there",
        "local": "the others go on without a lost rank, unless it is rank 0, and it joins again at an averaging. Each "
        "rank stores its own state: any of them is enough to resume, and with all of them the resume is exact",
    }
    if context.ranks > 1 and context.strategy in replicas:
        context.explain(_KEY + "approach", Source.RULE, replicas[context.strategy])
        return
    why = f"with strategy {context.strategy} no rank has the whole state"
    if context.ranks == 1:
        why = "with one rank there is no replica of the state"
    elif context.strategy == "ddp":
        why = "the others' group ends with a lost rank, whose peers do not keep the state of the step"
    text = f"{why}; when a rank is lost, the run continues from the last periodic checkpoint"
    context.explain(_KEY + "approach", Source.RULE, text)
    if not context.config.checkpoint.enabled:
        context.warn("checkpoint_strategy", f"{why}, and [checkpoint] enabled = false: a lost rank costs all steps")


def _frequency(context: PlanContext, frequency: int, suggested: int | None) -> None:
    source, origin = Source.DEFAULT, "save_every is the default"
    if context.given("save_every"):
        source, origin = Source.USER, "the job sets save_every"
    limit, updates = max_save_every(full=context.full), state_every(context.config)
    state = f"the training state {f'every {updates} updates' if updates else 'never: [checkpoint] enabled = false'}"
    gives = f"gives {suggested}" if suggested is not None else "needs the number of examples, which is not known"
    rule = f"the rule, min(1000, iters/20){' and at most 500 in full fine-tuning' * context.full}, {gives}"
    context.explain(_KEY + "frequency", source, f"{origin}; {state}; {rule}")
    if frequency > limit:
        rule = f" (the rule: {suggested})" if suggested is not None else ""
        text = f"save_every = {frequency} can lose that many iterations: use at most {limit}{rule}"
        context.warn("checkpoint_strategy", text)
    if context.iterations is not None and frequency > context.iterations:
        text = f"save_every = {frequency} exceeds the {context.iterations} iterations: only the end is saved"
        context.warn("checkpoint_strategy", text)
