"""Predicts the throughput of a launch from each node's calibration and the links between them, with the shares of the
batch, and what another form of the exchange would change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from engine.config.mlx_lm_keys import DEFAULTS, full_sequences
from engine.config.models import Config
from engine.job.traits import PARTITIONED
from engine.measurements import (
    Calibration,
    Division,
    GroupMeasure,
    LinkMeasure,
    NodeMeasure,
    Shares,
    ThroughputPrediction,
)
from engine.plan.fingerprint import is_stale
from engine.plan.shares import divide_batch
from engine.protocol.exchange import BUCKETS, Averaging, AveragingSchedule, Exchange, averaging, buckets, exchange
from engine.protocol.measurements import ALL_SUM_LARGE_BYTES


def predict_throughput(config: Config, calibration: Calibration | None, shares: Shares) -> ThroughputPrediction:
    """Predict the job's global batch, divided by `shares`: with "data" and "local" from each node's own step, with the
    others from the steps of all ranks together."""
    if calibration is None:
        return ThroughputPrediction(why_not="not calibrated")
    if calibration.synthetic_model:
        why_not = "calibrated with a synthetic model: the throughput of the job's command is unknown"
        return ThroughputPrediction(why_not=why_not)
    measures = [measure for measure in calibration.nodes if measure.node in shares.parts and measure.examples_per_s]
    if (strategy := config.job.strategy) in PARTITIONED:
        return _of_group(calibration.group, strategy, shares, measures)
    measured = {measure.node for measure in measures}
    if missing := [name for name in shares.parts if name not in measured]:
        return ThroughputPrediction(why_not=f"not measured: {', '.join(missing)}")
    batch = full_sequences(config.job.mlx_lm, len(measures))
    try:
        counts = shares.micro_batches(batch)
        exchanged = _exchange_of(config, calibration, len(measures))
    except ValueError as error:
        return ThroughputPrediction(why_not=str(error))
    backward = _FULL_BACKWARD if config.job.fine_tune_type == "full" else _ADAPTER_BACKWARD
    return predict_iteration(measures, counts, exchanged, backward)


def _of_group(
    group: GroupMeasure | None, strategy: str, shares: Shares, measures: Sequence[NodeMeasure]
) -> ThroughputPrediction:
    """Speed-up and efficiency are known where every node was measured by itself too."""
    why_not = None
    if group is None or group.strategy != strategy:
        why_not = f"the steps of all ranks together were not measured with strategy {strategy}: calibrate with it"
    elif group.step_s is None:
        why_not = f"the steps of all ranks together were not measured: {group.problem}"
    elif group.compute_s.keys() != shares.parts.keys():
        why_not = f"the steps were measured on {', '.join(group.compute_s)} together"
    if why_not is not None or group is None or not group.step_s:
        return ThroughputPrediction(why_not=why_not)
    throughput = group.batch / group.step_s
    alone = [group.batch / step_s(measure, group.batch) for measure in measures]
    all_measured = len(alone) == len(shares.parts)
    return ThroughputPrediction(
        examples_per_s=throughput,
        tokens_per_s=group.tokens_per_s,
        step_s=group.step_s,
        compute_s=dict(group.compute_s),
        communicate_s=max(0.0, group.step_s - max(group.compute_s.values())),
        speed_up=throughput / max(alone) if all_measured else None,
        efficiency=throughput / sum(alone) if all_measured else None,
    )


def _exchange_of(config: Config, calibration: Calibration, ranks: int) -> UpdateExchange:
    """Raises ValueError where it was not measured."""
    settings, strategy = {**DEFAULTS, **config.job.mlx_lm}, config.job.strategy
    chosen, accumulation = str(settings["wire"]), int(settings["grad_accumulation_steps"])
    link, size = calibration.all_ranks, calibration.gradient_bytes
    local, summed = strategy == "local", exchange(chosen, ranks, calibration.element_bytes, accumulation)
    seconds = exchange_s(link, size, averaging(chosen, ranks) if local else summed)
    if seconds is None:
        raise ValueError("the all_sum over all ranks was not measured")
    if ranks > 1 and (name := "local" if local else "data") not in calibration.connected_as:
        backend = f" with {calibration.backend}" if calibration.backend else ""
        raise ValueError(f"the links were measured{backend}, not as strategy {name} connects the ranks: calibrate it")
    if not local:
        return UpdateExchange(seconds, buckets((size or 0) // _FLOAT32_BYTES), accumulation)
    # After each update a message goes to rank 0 and back, for about as long as an all_sum of one number.
    message_s = link.latency_s if link is not None and link.latency_s is not None else 0.0
    return UpdateExchange(seconds, 1, accumulation, mean_updates(settings), message_s)


def mean_updates(settings: Mapping[str, Any]) -> float:
    """Updates from one averaging of strategy "local" to the next, with these mlx-lm keys. With epochs, which need the
    number of examples, over as many iterations as are the default."""
    effective = {**DEFAULTS, **settings}
    numbers = {key: int(effective[key]) for key in ("iters", "grad_accumulation_steps", "local_steps", "save_every")}
    return AveragingSchedule(
        **numbers, steps_per_eval=int(effective["steps_per_eval"]) if effective["val_batches"] else None
    ).updates


_FLOAT32_BYTES = 4
_FULL_BACKWARD, _ADAPTER_BACKWARD = 2 / 3, 1 / 2
"""Share of the backward pass in a step. It takes twice the operations of the forward pass (Kaplan et al. 2020, Scaling
Laws for Neural Language Models), and as many where the weights are frozen; recomputed layers only add to it."""


@dataclass(frozen=True)
class UpdateExchange:
    """The exchange of one update, or of several."""

    seconds: float
    parts: int = BUCKETS
    """Buckets, one after the other; 1: nothing of it is beside the backward pass."""
    accumulation: int = 1
    """Iterations of an update."""
    updates: float = 1
    """Updates from one exchange to the next, in the mean."""
    message_s: float = 0.0
    """Seconds of what each update waits for besides."""


def predict_iteration(
    measures: list[NodeMeasure],
    micro_batches: Mapping[str, int],
    exchanged: UpdateExchange,
    backward: float = _FULL_BACKWARD,
) -> ThroughputPrediction:
    """A synchronous data-parallel iteration: all ranks wait for the slowest, and for what is left of the exchange when
    its backward pass, beside which the buckets travel, has ended; the last bucket only begins then.

        compute_i = overhead_i + (step_i - overhead_i) · micro_i / batch_i
        left      = max(exchange - backward · max(compute_i), exchange / parts)
        step      = max(compute_i) + (left / updates + message) / accumulation

    `measures` have a positive throughput, `backward` is the share of the backward pass in a step. A node's step is
    affine in its batch; without a measured overhead it is proportional. Source: the bulk-synchronous model, w + h·g + l
    (Valiant, "A bridging model for parallel computation", CACM 33(8), 1990), with the measured exchange as h·g + l.
    Speed-up relative to the fastest node and efficiency relative to the sum of all nodes follow Pastor and Bosque, "An
    efficiency and scalability model for heterogeneous clusters" (IEEE Cluster 2001)."""
    batch = sum(micro_batches[measure.node] for measure in measures)
    compute = {measure.node: step_s(measure, micro_batches[measure.node]) for measure in measures}
    slowest = max(compute.values())
    left = max(exchanged.seconds - backward * slowest, exchanged.seconds / exchanged.parts)
    communicate_s = (left / exchanged.updates + exchanged.message_s) / exchanged.accumulation
    step = slowest + communicate_s
    alone = [batch / step_s(measure, batch) for measure in measures]
    throughput = batch / step
    return ThroughputPrediction(
        examples_per_s=throughput,
        tokens_per_s=_tokens_per_s(measures, throughput),
        step_s=step,
        compute_s=compute,
        communicate_s=communicate_s,
        exchange_s=exchanged.seconds,
        speed_up=throughput / max(alone),
        efficiency=throughput / sum(alone),
    )


def step_s(measure: NodeMeasure, batch: int) -> float:
    """Seconds of one step of this node alone with `batch` sequences. Its throughput must be known and positive."""
    assert measure.examples_per_s
    if measure.step_s is None or not measure.batch:
        return batch / measure.examples_per_s
    # Uses the throughput, not the median step: the other ranks wait for occasional slow steps too.
    whole = measure.batch / measure.examples_per_s
    overhead = min(measure.overhead_s or 0.0, whole)
    return overhead + (whole - overhead) * batch / measure.batch


def exchange_s(link: LinkMeasure | None, float32_bytes: int | None, form: Exchange | Averaging) -> float | None:
    """Seconds of an exchange of gradients, `float32_bytes` in float32: buckets · latency + sent · β, one bucket after
    the other, each on the line through the two measured sizes of an all_sum (one number, and ALL_SUM_LARGE_BYTES),
    after Hockney, "The communication challenge for MPP", Parallel Computing 20(3), 1994. An averaging of strategy
    "local" is one message on that line. 0 for one rank; None if not measured."""
    if form.ranks == 1:
        return 0.0
    if float32_bytes is None or link is None or link.latency_s is None or not link.bandwidth_bytes_per_s:
        return None
    elements = float32_bytes / _FLOAT32_BYTES
    messages = buckets(int(elements)) if isinstance(form, Exchange) else 1
    all_sum = max(0.0, 1 / link.bandwidth_bytes_per_s - link.latency_s / ALL_SUM_LARGE_BYTES)
    # An all_sum of a byte sends more than that, or less.
    sent = exchange("float32", form.ranks, _FLOAT32_BYTES).sent / _FLOAT32_BYTES
    return link.latency_s * messages + elements * form.sent * all_sum / sent


def _tokens_per_s(measures: list[NodeMeasure], examples_per_s: float) -> float | None:
    """Uses the mean length of the sequences in the calibration."""
    rates = [(m.tokens_per_s, m.examples_per_s) for m in measures if m.tokens_per_s is not None and m.examples_per_s]
    if not rates:
        return None
    return examples_per_s * sum(tokens / examples for tokens, examples in rates) / len(rates)


@dataclass(frozen=True)
class Prediction:
    calibration: Calibration | None
    """The newest calibration of this job on these nodes, however old."""
    stale: bool
    """The calibration is older than [calibration] max_age_days."""
    shares: Shares
    """Computed without a stale calibration."""
    throughput: ThroughputPrediction
    micro_batches: Mapping[str, int] | None
    """Sequences of the global batch by node; None for a custom command, and for a batch that is too small."""


def predict(
    config: Config, calibration: Calibration | None, now: datetime, division: Division | None = None
) -> Prediction:
    """With the `division` of an existing run its shares are used, else those that the calibration gives now. Raises
    ValueError when no node has any throughput."""
    shares = division or divide_batch(config, calibration, now=now)
    predicted = predict_throughput(config, calibration, shares)
    if division is not None and division.why_not is not None:
        predicted = ThroughputPrediction(compute_s=predicted.compute_s, why_not=division.why_not)
    stale, batch = calibration is not None and is_stale(config, calibration, now), config.job.mlx_lm.get("batch_size")
    micro = shares.micro_batches(batch) if isinstance(batch, int) and batch >= len(shares.parts) else None
    return Prediction(calibration, stale, shares, predicted, micro)


def division_of(prediction: Prediction) -> Division:
    """The division that a new run stores."""
    return Division.model_validate({**vars(prediction.shares), **vars(prediction.throughput)})
