"""batch_configuration: what the job trains with, and what the rules would choose."""

from __future__ import annotations

import math

from engine.planning.batch import BASES, ROBUST_TOTAL, START_PER_RANK, rule_for, scaled, suggest, warmup_steps
from engine.planning.document import BatchPart, SuggestedBatch
from engine.planning.notes import Notes, Source
from engine.planning.situation import Situation

_KEY = "batch_configuration."


def batch(now: Situation, fits: int | None, notes: Notes) -> BatchPart:
    """`fits` is the largest batch of a rank that fits every node; None when that is not known."""
    total, settings = now.total_batch, now.settings
    if total is None:
        notes.why(_KEY + "total_batch_size", Source.UNKNOWN, "the job runs a command of its own")
        return _unknown()
    _why_batch(now, fits, notes)
    rule = rule_for(str(settings["optimizer"]))
    base = BASES[rule]
    by_rule = scaled(base.learning_rate, base.batch, total, rule)
    warm = int((settings.get("lr_schedule") or {}).get("warmup", 0))
    per_epoch = now.updates_per_epoch
    _why_rate(now, rule, by_rule, notes)
    ranks = now.ranks
    per_rank = int(settings["batch_size"]) / ranks
    return BatchPart(
        per_gpu_batch_size=int(per_rank) if per_rank.is_integer() else per_rank,
        total_batch_size=total,
        gradient_accumulation_steps=now.accumulation,
        learning_rate=_peak_rate(now),
        warmup_epochs=warm / per_epoch if per_epoch else (0.0 if warm == 0 else None),
        micro_batch=dict(now.micro) if now.micro is not None else None,
        learning_rate_rule=rule,
        base_learning_rate=base.learning_rate,
        base_batch_size=base.batch,
        rule_learning_rate=by_rule,
        warmup_steps=warm,
        updates=now.updates,
        epochs=now.updates / per_epoch if now.updates is not None and per_epoch else None,
        largest_per_gpu_batch_size=fits,
        suggested=_suggested(now, fits, notes),
    )


def _why_batch(now: Situation, fits: int | None, notes: Notes) -> None:
    settings = now.settings
    said = Source.USER if now.given("batch_size") else Source.DEFAULT
    named = "the job says" if now.given("batch_size") else "mlx-lm's default is"
    notes.why(
        _KEY + "total_batch_size",
        said,
        f"{named} batch_size = {settings['batch_size']}, over all ranks, and {now.accumulation} of them an update",
    )
    if now.inputs.strategy == "pipeline":
        notes.why(_KEY + "micro_batch", Source.RULE, "every stage of a pipeline sees the whole batch")
    else:
        source = {"fixed": Source.USER, "calibrated": Source.CALIBRATION, "equal": Source.RULE}[now.divided.source]
        notes.why(_KEY + "micro_batch", source, now.divided.reason)
    if fits is None:
        notes.why(_KEY + "largest_per_gpu_batch_size", Source.UNKNOWN, "memory or its limit is not known of every node")
    else:
        notes.why(_KEY + "largest_per_gpu_batch_size", Source.RULE, f"{fits} fit every node by the memory estimate")


def _why_rate(now: Situation, rule: str, by_rule: float, notes: Notes) -> None:
    settings = now.settings
    if settings.get("lr_schedule"):
        notes.why(_KEY + "learning_rate", Source.USER, "the highest of lr_schedule")
    elif now.given("learning_rate"):
        notes.why(_KEY + "learning_rate", Source.USER, "the job says so")
    else:
        notes.why(_KEY + "learning_rate", Source.DEFAULT, "mlx-lm's default; the job names none")
    base = BASES["linear" if rule == "linear" else "sqrt"]
    notes.why(
        _KEY + "rule_learning_rate",
        Source.RULE,
        f"{rule} for {settings['optimizer']}: {base.learning_rate:g} at a batch of {base.batch} is {by_rule:.2g} at "
        f"{now.total_batch} ({base.source})",
    )
    warm = (settings.get("lr_schedule") or {}).get("warmup")
    notes.why(
        _KEY + "warmup_steps",
        Source.USER if warm else Source.DEFAULT,
        "lr_schedule says so" if warm else "mlx-lm warms up only where lr_schedule says so",
    )


def _peak_rate(now: Situation) -> float | None:
    """The highest of a schedule's own numbers, else the constant rate: every schedule of mlx-lm begins with it, a
    linear one may end with it."""
    schedule = now.settings.get("lr_schedule")
    if not schedule:
        return float(now.settings["learning_rate"])
    arguments = [float(number) for number in schedule["arguments"]]
    rates = arguments[:2] if schedule["name"] == "linear_schedule" else arguments[:1]
    return max(rates, default=None)


def _suggested(now: Situation, fits: int | None, notes: Notes) -> SuggestedBatch | None:
    """None when nothing fits, or the batch is the user's own and fits."""
    named = now.given("batch_size", "grad_accumulation_steps")
    too_large = fits is not None and now.micro is not None and max(now.micro.values()) > fits
    if (named and not too_large) or (fits is not None and fits < 1):
        return None
    platform = now.platform if now.platform in START_PER_RANK else "cpu"
    target = now.total_batch if named and now.total_batch is not None else ROBUST_TOTAL[0]
    choice = suggest(
        ranks=now.ranks,
        start=START_PER_RANK[platform],
        fits=fits,
        target=target,
        optimizer=str(now.settings["optimizer"]),
    )
    updates = math.ceil(int(now.settings["iters"]) / choice.accumulation)
    per_epoch = now.inputs.examples / choice.total if now.inputs.examples else None
    warm = warmup_steps(updates, per_epoch)
    keys = (
        f"batch_size = {choice.per_rank * now.ranks}",
        f"grad_accumulation_steps = {choice.accumulation}",
        f"learning_rate = {choice.learning_rate:.2g}",
    )
    aim = "the job's own total" if named else f"{target} an update, where fine-tuning is robust (to {ROBUST_TOTAL[1]})"
    start = START_PER_RANK[platform]
    notes.why(
        _KEY + "suggested",
        Source.RULE,
        f"{aim}: begins with {start} a rank on {platform}"
        + (f", no more than the {fits} that fit" if fits is not None and fits < start else "")
        + "; the rest is accumulated. The launch does what the job says",
    )
    return SuggestedBatch(
        per_gpu_batch_size=choice.per_rank,
        gradient_accumulation_steps=choice.accumulation,
        total_batch_size=choice.total,
        learning_rate=choice.learning_rate,
        learning_rate_rule=choice.rule,
        warmup_steps=warm,
        warmup_epochs=warm / per_epoch if per_epoch else None,
        job_keys="\n".join(keys),
    )


def _unknown() -> BatchPart:
    return BatchPart.model_validate(dict.fromkeys(BatchPart.model_fields))
