"""Batch size, gradient accumulation, learning rate and warm-up: the rules, and the plan's
batch_configuration section."""

from __future__ import annotations

import math

from engine.config.mlx_lm_keys import SCHEDULE_ARGUMENTS, STEPS
from engine.errors import plural
from engine.plan.context import PlanContext, job_iterations
from engine.plan.document import BatchSection, PaddingSection, Source, SuggestedBatch
from engine.plan.padding import shapes, suggested_budget
from engine.protocol.job import AUTO, BASE_RATES, scaled_rate, scaling_rule

START_PER_RANK = {"apple": 4, "cuda": 64, "cpu": 4}
"""Initial sequences per rank. On Apple silicon users report the same throughput for any batch (about 340 tokens/s at 4
and at 16 in full fine-tuning), so a larger batch only costs memory; the CPU build is treated the same."""
ROBUST_TOTAL = (32, 128)
"""Sequences per update: a target by rule of thumb, not a measurement. The lower end counts without a batch."""
WARMUP_EPOCHS = 5
WARMUP_SHARE = (0.05, 0.10)
"""Shortest and longest warm-up, as a share of all updates."""


def warmup_steps(updates: int, per_epoch: float | None) -> int:
    """Warm-up in updates: 5 epochs, limited to 5-10 % of all updates; 5 % if the length of an epoch is unknown."""
    least, most = (max(1, math.ceil(updates * share)) for share in WARMUP_SHARE)
    if per_epoch is None:
        return least
    return min(most, max(least, math.ceil(WARMUP_EPOCHS * per_epoch)))


def suggest_batch(*, ranks: int, start: int, fits: int | None, target: int) -> tuple[int, int]:
    """(sequences per rank, micro-batches per update) of at least `target` sequences per update. Each rank starts with
    `start` sequences, or with as many as `fits` its memory (at least 1; None if unknown); the rest is accumulated."""
    per_rank = min(start, fits if fits is not None else start, -(-target // ranks))
    return per_rank, -(-target // (per_rank * ranks))


_KEY = "batch_configuration."


def batch_section(context: PlanContext, fits: int | None) -> BatchSection:
    """`fits` is the largest batch per rank that fits every node; None if unknown."""
    total, settings = context.total_batch, context.settings
    if total is None:
        context.explain(_KEY + "total_batch_size", Source.UNKNOWN, "the job runs a custom command")
        return BatchSection.model_validate(dict.fromkeys(BatchSection.model_fields))
    _explain_batch(context, fits)
    rule = scaling_rule(str(settings["optimizer"]))
    base = BASE_RATES[rule]
    by_rule = scaled_rate(context.sequences * context.accumulation, rule)
    warm = int((settings.get("lr_schedule") or {}).get("warmup", 0))
    per_epoch = context.updates_per_epoch
    _explain_rate(context)
    _check_schedule(context)
    _check_examples(context)
    basis = f"{rule} for {settings['optimizer']}: {base.learning_rate:g} at batch {base.batch}"
    reason = f"{basis} gives {by_rule:.2g} at batch {total} ({base.source})"
    context.explain(_KEY + "rule_learning_rate", Source.RULE, reason)
    source, reason = Source.DEFAULT, "mlx-lm warms up only if lr_schedule sets it"
    if warm:
        source, reason = Source.USER, "set by lr_schedule"
    context.explain(_KEY + "warmup_steps", source, reason)
    per_rank = int(settings["batch_size"]) / context.ranks
    return BatchSection(
        per_gpu_batch_size=int(per_rank) if per_rank.is_integer() else per_rank,
        total_batch_size=total,
        gradient_accumulation_steps=context.accumulation,
        learning_rate=_peak_rate(context),
        warmup_epochs=warm / per_epoch if per_epoch else (0.0 if warm == 0 else None),
        micro_batch=dict(context.micro_batches) if context.micro_batches is not None else None,
        learning_rate_rule=rule,
        base_learning_rate=base.learning_rate,
        base_batch_size=base.batch,
        rule_learning_rate=by_rule,
        warmup_steps=warm,
        updates=context.updates,
        epochs=context.updates / per_epoch if context.updates is not None and per_epoch else None,
        largest_per_gpu_batch_size=fits,
        suggested=_suggested(context, fits),
        padding=_padding(context, fits),
    )


def _padding(context: PlanContext, fits: int | None) -> PaddingSection | None:
    rows, settings = context.rows, context.settings
    longest, sequences = int(settings["max_seq_length"]), int(settings["batch_size"])
    if (now := context.shapes) is None:
        context.explain(_KEY + "padding", Source.UNKNOWN, "no node has tokenised rows of the training data")
        return None
    budget = context.budget or suggested_budget(rows, sequences, longest)
    if fits is not None:
        fitting = min(tokens for _, tokens in context.steps)
        budget = max(1, min(budget, fits * fitting * context.ranks))
    measured = f"the lengths of {sum(context.lengths.values()):,} rows, which a node has tokenised: an estimate"
    context.explain(_KEY + "padding", Source.FACT, measured)
    return PaddingSection(
        batch_tokens=context.budget,
        real_share=now.real,
        largest_step=now.largest,
        sequences_per_batch=now.rows,
        suggested_batch_tokens=budget,
        suggested_real_share=shapes(rows, longest, budget=budget).real,
    )


def _explain_batch(context: PlanContext, fits: int | None) -> None:
    settings = context.settings
    source, origin = Source.DEFAULT, "mlx-lm's default is"
    if context.given("batch_size", "batch_tokens"):
        source, origin = Source.USER, "the job sets"
    sizes = f"batch_size = {settings['batch_size']} over all ranks, {context.accumulation} of them per update"
    if context.budget is not None:
        mean = f"about {settings['batch_size']} sequences" + ("" if context.rows else " of full length")
        sizes = f"batch_tokens = {context.budget} over all ranks: {mean}, {context.accumulation} of them per update"
    context.explain(_KEY + "total_batch_size", source, f"{origin} {sizes}")
    if context.strategy == "pipeline":
        context.explain(_KEY + "micro_batch", Source.RULE, "every stage of a pipeline processes the whole batch")
    else:
        context.explain(_KEY + "micro_batch", context.shares_source, context.shares.reason)
    source, reason = Source.UNKNOWN, "the memory or its limit is not known for every node"
    if fits is not None:
        source, reason = Source.RULE, f"{fits} fit every node according to the memory estimate"
    context.explain(_KEY + "largest_per_gpu_batch_size", source, reason)


def _explain_rate(context: PlanContext) -> None:
    source, reason = Source.DEFAULT, "mlx-lm's default; the job sets none"
    if context.settings.get("lr_schedule"):
        source, reason = Source.USER, "the highest rate in lr_schedule"
    elif context.settings.get("learning_rate") == AUTO:
        reason = 'learning_rate = "auto": as rule_learning_rate, at the mean sequences that the trainer counts'
        source = Source.RULE
    elif context.job.rate_by_rule:
        source, reason = Source.RULE, 'learning_rate = "auto": as rule_learning_rate'
    elif context.given("learning_rate"):
        source, reason = Source.USER, "the job sets it"
    context.explain(_KEY + "learning_rate", source, reason)


def _check_schedule(context: PlanContext) -> None:
    """Warn of a warm-up or schedule, both counted in updates, that the run ends before."""
    schedule, updates = context.settings.get("lr_schedule"), context.updates
    if not schedule or updates is None:
        return
    arguments = dict(zip(SCHEDULE_ARGUMENTS[schedule["name"]], schedule["arguments"], strict=False))
    warm, steps = int(schedule.get("warmup", 0)), int(arguments.get(STEPS, 0))
    of = f" ({context.iterations:,} iterations, {context.accumulation} per update)" if context.accumulation > 1 else ""
    run = f"the run has {plural(updates, 'update')}{of}"
    if warm >= updates:
        text = f"lr_schedule warms up for {plural(warm, 'update')}, and {run}"
        context.warn("lr_schedule", f"{text}: the rate never gets to {arguments['rate']:g}")
    elif steps + warm > updates and arguments["rate"] != arguments.get("last rate", 0.0):
        after = f" after {warm:,} of warm-up" if warm else ""
        takes = f"{'takes its first step' if 'factor' in arguments else 'ends'} after {plural(steps, 'update')}{after}"
        context.warn("lr_schedule", f"{schedule['name']} in lr_schedule {takes}, and {run}")


def _check_examples(context: PlanContext) -> None:
    """Warn of data that fills no batch, or that leaves ranks without an example."""
    count, size = context.examples, int(context.settings["batch_size"])
    if count is None:
        return
    if context.budget is None and count < size:
        context.warn("data", f"fewer examples ({count}) than batch_size = {size}: nothing can be trained")
    elif count < context.ranks and context.strategy != "pipeline":
        context.warn("data", f"fewer examples ({count}) than ranks ({context.ranks}): in each batch some have none")


def _peak_rate(context: PlanContext) -> float | None:
    """The constant rate, or the highest rate of a schedule: the first one, or of a linear one perhaps the last."""
    schedule = context.settings.get("lr_schedule")
    if not schedule:
        rate, rule = context.settings["learning_rate"], scaling_rule(str(context.settings["optimizer"]))
        return scaled_rate(context.sequences * context.accumulation, rule) if rate == AUTO else float(rate)
    arguments = [float(number) for number in schedule["arguments"]]
    rates = arguments[:2] if schedule["name"] == "linear_schedule" else arguments[:1]
    return max(rates, default=None)


def _suggested(context: PlanContext, fits: int | None) -> SuggestedBatch | None:
    """None when nothing fits."""
    settings, examples = context.settings, context.examples
    if examples is not None:
        # A batch has no example twice.
        fits = max(0, min(examples // context.ranks, examples if fits is None else fits))
    if fits == 0:
        return None
    given = context.given("batch_size", "batch_tokens", "grad_accumulation_steps")
    platform = context.platform if context.platform in START_PER_RANK else "cpu"
    start = START_PER_RANK[platform]
    target = context.total_batch if given and context.total_batch is not None else ROBUST_TOTAL[0]
    low, high = ROBUST_TOTAL
    aim = "the job's own total" if given else f"{target} per update, a target by rule of thumb ({low} to {high})"
    most = f", at most the {fits} that fit" if fits is not None and fits < start else ""
    reason = f"{aim}; starts with {start} per rank on {platform}{most}, and accumulates the rest"
    use = "The launch uses the job's own settings; flightdeck plan --apply writes these"
    context.explain(_KEY + "suggested", Source.RULE, f"{reason}. {use}")
    per_rank, steps = suggest_batch(ranks=context.ranks, start=start, fits=fits, target=target)
    batch, total = per_rank * context.ranks, per_rank * context.ranks * steps
    rule = scaling_rule(str(settings["optimizer"]))
    rate = float(f"{scaled_rate(total, rule):.2g}")
    per_epoch = examples / total if examples else None
    iterations = job_iterations(settings, examples // batch if examples is not None else None)
    updates = math.ceil(iterations / steps) if iterations is not None else None
    warm = warmup_steps(updates, per_epoch) if updates is not None else None
    keys = [f"batch_size = {batch}", f"grad_accumulation_steps = {steps}"]
    if context.budget is not None:
        # As much more or less as there are more or fewer sequences.
        keys[0] = f"batch_tokens = {max(1, round(context.budget * batch / context.sequences))}"
    if not settings.get("lr_schedule"):
        keys.append(f"learning_rate = {rate:g}")
        if warm is not None:
            # The schedule of mlx-lm that stays at one rate once it is warm.
            constant = f'name = "linear_schedule", arguments = [{rate:g}, {rate:g}, {updates}], warmup = {warm}'
            keys.append(f"lr_schedule = {{{constant}}}")
    return SuggestedBatch(
        per_gpu_batch_size=per_rank,
        gradient_accumulation_steps=steps,
        total_batch_size=total,
        learning_rate=rate,
        learning_rate_rule=rule,
        warmup_steps=warm,
        warmup_epochs=warm / per_epoch if warm is not None and per_epoch else None,
        job_keys="\n".join(keys),
    )
