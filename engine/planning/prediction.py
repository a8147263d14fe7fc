"""What a job's ranks will do together, from what each did alone and from the links between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.config.models import FlightConfig
from engine.measured import Calibration, LinkMeasure, NodeMeasure
from engine.planning.shares import Shares
from engine.worker.wire import ALL_SUM_LARGE_BYTES


@dataclass(frozen=True)
class Prediction:
    """Of all ranks together. None is "cannot be known", and `why_not` says why."""

    examples_per_s: float | None = None
    tokens_per_s: float | None = None
    step_s: float | None = None
    """Of one iteration over the global batch, the communication's part included."""
    compute_s: Mapping[str, float] = field(default_factory=dict)
    """Node → its own part of that."""
    communicate_s: float | None = None
    """Of one iteration."""
    speed_up: float | None = None
    """Over the fastest node alone with the whole batch."""
    efficiency: float | None = None
    """Throughput over the sum of what the nodes do alone, 0 to 1."""
    why_not: str | None = None

    def withheld(self, why_not: str) -> Prediction:
        """Without what is said of all ranks together; each node's own part stays."""
        return Prediction(compute_s=self.compute_s, why_not=why_not)


def prediction(config: FlightConfig, calibration: Calibration | None, divided: Shares) -> Prediction:
    """What `calibration` says of the job's global batch, divided as `divided` says."""
    if calibration is None:
        return Prediction(why_not="not calibrated")
    measures = [measure for name in divided.parts if (measure := calibration.of(name)) is not None]
    missing = [name for name in divided.parts if (found := calibration.of(name)) is None or not found.examples_per_s]
    if missing:
        return Prediction(why_not=f"not measured: {', '.join(missing)}")
    batch = int(config.job.mlx_lm.get("batch_size") or len(measures))
    try:
        counts = divided.micro_batches(batch)
    except ValueError as error:
        return Prediction(why_not=str(error))
    accumulation = int(config.job.mlx_lm.get("grad_accumulation_steps") or 1)
    communicate_s = 0.0
    if len(measures) > 1:
        seconds = all_sum_s(calibration.everyone, calibration.gradient_bytes)
        if seconds is None:
            return Prediction(why_not="the all_sum over all ranks was not measured")
        communicate_s = seconds / accumulation
    return predict(measures, counts, communicate_s)


def predict(measures: list[NodeMeasure], micro_batches: Mapping[str, int], communicate_s: float) -> Prediction:
    """A synchronous data-parallel iteration: everybody waits for the slowest, then for the sum.

        compute_i = overhead_i + (step_i - overhead_i) · micro_i / batch_i
        step      = max(compute_i) + communicate_s

    `measures` have a throughput above 0, `communicate_s` is per iteration. A node's step is affine in its batch; where
    the overhead was not measured it is 0, the step then proportional. Source: the bulk-synchronous model, w + h·g + l
    (Valiant, "A bridging model for parallel computation", CACM 33(8), 1990), with the measured all_sum for h·g + l.
    Speed-up and efficiency of unequal nodes as by Pastor and Bosque, "An efficiency and scalability model for
    heterogeneous clusters" (IEEE Cluster 2001): against the fastest node, and against the sum of all.
    """
    batch = sum(micro_batches[measure.node] for measure in measures)
    compute = {measure.node: step_s(measure, micro_batches[measure.node]) for measure in measures}
    step = max(compute.values()) + communicate_s
    alone = [batch / step_s(measure, batch) for measure in measures]
    throughput = batch / step
    return Prediction(
        examples_per_s=throughput,
        tokens_per_s=_tokens_per_s(measures, throughput),
        step_s=step,
        compute_s=compute,
        communicate_s=communicate_s,
        speed_up=throughput / max(alone),
        efficiency=throughput / sum(alone),
    )


def step_s(measure: NodeMeasure, batch: int) -> float:
    """Seconds of one step of this node alone with `batch` sequences. Its throughput must be known and above 0."""
    assert measure.examples_per_s
    if measure.step_s is None or not measure.batch:
        return batch / measure.examples_per_s
    # By the throughput and not by the median step: what now and then takes longer is waited for, too.
    whole = measure.batch / measure.examples_per_s
    overhead = min(measure.overhead_s or 0.0, whole)
    return overhead + (whole - overhead) * batch / measure.batch


def all_sum_s(link: LinkMeasure | None, nbytes: int | None) -> float | None:
    """Seconds of an all_sum of `nbytes`: latency + bytes · β, the line through the two measured points, one number and
    ALL_SUM_LARGE_BYTES (Hockney, "The communication challenge for MPP", Parallel Computing 20(3), 1994). None when not
    measured."""
    if link is None or nbytes is None or link.latency_s is None or not link.bandwidth_bytes_per_s:
        return None
    per_byte = max(0.0, 1 / link.bandwidth_bytes_per_s - link.latency_s / ALL_SUM_LARGE_BYTES)
    return link.latency_s + nbytes * per_byte


def _tokens_per_s(measures: list[NodeMeasure], examples_per_s: float) -> float | None:
    """By the mean length that the nodes have seen."""
    known = [(m.tokens_per_s, m.examples_per_s) for m in measures if m.tokens_per_s is not None and m.examples_per_s]
    if not known:
        return None
    return examples_per_s * sum(tokens / examples for tokens, examples in known) / len(known)
