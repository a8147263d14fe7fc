"""Advice about models, Macs and mlx-lm, as data, each with its source: rules of thumb, those whose cause is disputed
marked as such, and what the memory estimate says about other Macs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from engine.errors import memory_text
from engine.job.traits import PARTITIONED
from engine.measurements import ThroughputPrediction
from engine.plan.context import PlanContext
from engine.plan.document import ChosenSettings, PlannedAdvice, Source
from engine.plan.memory.choice import choose
from engine.plan.memory.fit import WORKING_SET, MemoryFit
from engine.plan.prediction import predict_throughput
from engine.protocol.job import AUTO, Strategy

USER_REPORTS = "reported by users of M4 Max and M3 Ultra"
MAINTAINERS = "MLX's maintainers"
_DISPUTED = (
    "The cause is disputed. MLX's maintainers hold that a GPU waits for a slower peer inside a command buffer; our "
    "trainer evaluates the gradients first and communicates on the CPU stream, which is their remedy"
)


@dataclass(frozen=True)
class Rule:
    name: str
    applies: Callable[[PlanContext, MemoryFit], bool | str | tuple[str, ...]]
    """False, or "", where it does not; texts fill the {} of its own."""
    text: str
    source: str
    disputed: bool = False


_WATCHDOG_BILLIONS = 3.5
"""Parameters of what is called a 4B model: Gemma 3 has 3.9, Qwen3 4.0."""


def _whole_on_m4_max(plan: PlanContext, memory: MemoryFit) -> str:
    """The M4 Max that have the whole model in full fine-tuning of 4B or more."""
    whole = plan.full and plan.strategy in ("data", "local") and memory.billions(_WATCHDOG_BILLIONS)
    return ", ".join(plan.m4_max) if whole else ""


def without_validation(context: PlanContext, memory: MemoryFit) -> tuple[str, ...]:
    """The nodes that are kept out of validation: those that the configuration names, and by rule an M4 Max in full
    fine-tuning of 4B or more, as long as another node takes part."""
    if not context.validates or context.strategy in PARTITIONED:
        return ()
    nodes = context.config.nodes
    named = tuple(node.name for node in nodes if node.validates is False)
    ruled = context.m4_max if _whole_on_m4_max(context, memory) else []
    ruled = [node.name for node in nodes if node.validates is None and node.name in ruled]
    if named:
        context.explain("nodes", Source.USER, f"{', '.join(named)}: [[node]] validate = false, no validation there")
    if ruled and len(named) + len(ruled) < len(nodes):
        text = f"{', '.join(ruled)}: no validation on an M4 Max in full fine-tuning of 4B or more; the others do it"
        context.explain("nodes", Source.RULE, f"{text} ([[node]] validate = true overrides)")
        named = (*named, *ruled)
    return named


RULES: tuple[Rule, ...] = (
    Rule(
        "full_copy",
        lambda plan, _: plan.full and plan.strategy not in PARTITIONED and plan.ranks > 1,
        "every machine keeps a full copy of weights, gradients and moments: more machines make it faster, not smaller",
        "the strategy itself",
    ),
    Rule(
        "sizes",
        lambda plan, memory: plan.full and _sizes(plan, memory),
        "full fine-tuning of this model on one Mac alone, {}",
        f"the memory estimate, with {WORKING_SET:.0%} of a Mac's memory for its GPU",
    ),
    Rule(
        "gpu_watchdog_validation",
        lambda plan, memory: plan.validates and _validation(plan, memory),
        "{}: an M4 Max with 128 GB has hit the GPU watchdog while validating a 4B model in full fine-tuning. "
        f"{{}}. {_DISPUTED}",
        f"{USER_REPORTS}; {MAINTAINERS}",
        disputed=True,
    ),
    Rule(
        "gpu_watchdog_training",
        lambda plan, memory: memory.billions(4.6) and _whole_on_m4_max(plan, memory),
        "{}: an M4 Max with 128 GB has hit the GPU watchdog while training 7B in full fine-tuning, even "
        "with gradient checkpointing and a batch of 2. Leave it out, or give it at most 8 layers of a pipeline. "
        f"{_DISPUTED}",
        f"{USER_REPORTS}; {MAINTAINERS}",
        disputed=True,
    ),
    Rule(
        "trained_layers",
        lambda _, memory: "" if memory.trainable_share is None else f"{memory.trainable_share:.2%}",
        "{} of the parameters are trained. mlx-lm trains the last num_layers layers (default 16; here all of them "
        'for full fine-tuning), and "full" keeps embeddings, final norm and head frozen',
        "mlx-lm's lora.py",
    ),
    Rule(
        "adam_in_16_bits",
        lambda plan, memory: (
            isinstance(memory.settings, ChosenSettings)
            and memory.settings.optimizer_precision == "parameter"
            and plan.settings.get("optimizer") != "sgd"
        ),
        "optimizer_precision = \"parameter\" keeps moments in the model's own type: in bfloat16 Adam's beta2 of 0.999 "
        "rounds to 1, so the second moment never decays and small steps vanish",
        "measured: 200 steps at 1e-5 move a weight by 0.0018 in bfloat16, by 0.0074 in float32",
    ),
    Rule(
        "wire",
        lambda plan, _: plan.strategy == "data" and _exchange(plan),
        'the links decide: {}. wire = "int8" rounds the gradients to 8 bits and adds what it has rounded away '
        "to the next update's: the losses differ slightly from those without, and each rank keeps 2 bytes more per "
        "trained parameter",
        "the calibrated nodes and links",
    ),
    Rule(
        "local",
        lambda plan, _: local_pays(plan) and _data_and_local(plan),
        "the exchange of an update takes longer than its computation: {}. local is another algorithm, whose "
        "result differs slightly: each rank trains by itself between two averagings of the weights. A rank keeps up to "
        "8 bytes more per trained parameter, and no sums of gradients",
        "the calibrated nodes and links",
    ),
    Rule(
        "local_gains_nothing",
        lambda plan, _: local_gains_nothing(plan) and _data_and_local(plan),
        "local gains nothing here with these local_steps, save_every and steps_per_eval: {}. The other two have "
        "the losses of one process",
        "the calibrated nodes and links",
    ),
    Rule(
        "sharded_on_ring",
        lambda plan, _: plan.strategy == "sharded" and plan.backend == "ring",
        "sharded training reduces gradients with sum_scatter, which the ring backend lacks: it uses all_sum instead, "
        "and sends the whole gradient over the network",
        "MLX's ring backend",
    ),
    Rule(
        "partitioned_state",
        lambda plan, _: plan.strategy in PARTITIONED and plan.ranks > 1,
        "the state is not replicated: after losing a node, training continues from the last periodic checkpoint, of "
        "which each rank writes its part on its own node. A restart waits for all nodes, whatever [recovery] min_nodes "
        "says, unless [checkpoint] destination is a folder that all of them can reach",
        "the strategy itself",
    ),
)


_MACS_GB = (64, 128, 512)
"""As Apple names them: 2^30 bytes each."""


_GAIN = 0.05
"""Part of a step that local must save to be worth another result."""


def local_pays(context: PlanContext) -> bool:
    """With data, the exchange of an update takes longer than its computation; local would shorten the step."""
    predicted = context.throughput
    if context.strategy != "data" or predicted.exchange_s is None or predicted.step_s is None:
        return False
    local = _predicted(context, "local", AUTO).step_s
    longer = predicted.exchange_s > context.accumulation * max(predicted.compute_s.values())
    return longer and local is not None and local < (1 - _GAIN) * predicted.step_s


def local_gains_nothing(context: PlanContext) -> bool:
    """With data, or on the fastest node alone, a step is predicted to be about as short."""
    local, data = context.throughput, _predicted(context, "data").step_s
    if context.strategy != "local" or local.step_s is None or local.speed_up is None or data is None:
        return False
    return local.step_s >= (1 - _GAIN) * min(data, local.step_s * local.speed_up)


def _predicted(context: PlanContext, strategy: Strategy, wire: str | None = None) -> ThroughputPrediction:
    """The job with another strategy or form of the exchange."""
    settings = context.job.mlx_lm if wire is None else {**context.job.mlx_lm, "wire": wire}
    job = context.job.model_copy(update={"strategy": strategy, "mlx_lm": settings})
    return predict_throughput(context.config.model_copy(update={"job": job}), context.calibration, context.shares)


def advice_section(context: PlanContext, memory: MemoryFit) -> Iterator[PlannedAdvice]:
    """The rules that apply, in the order of the table."""
    for rule in RULES:
        if texts := rule.applies(context, memory):
            text = rule.text.format(*(texts if isinstance(texts, tuple) else (texts,)))
            yield PlannedAdvice(name=rule.name, text=text, source=rule.source, disputed=rule.disputed)


def _validation(context: PlanContext, memory: MemoryFit) -> tuple[str, str] | str:
    """The M4 Max, and the sentence on them in validation: left out already, or how to leave them out; "" for none."""
    nodes = _whole_on_m4_max(context, memory)
    if not nodes:
        return ""
    # Its reasons are in the plan's already.
    kept_out = without_validation(replace(context, reasons=[]), memory)
    validating = [name for name in context.m4_max if name not in kept_out]
    if not validating:
        return nodes, "It is kept out of validation"
    off = "Turn validation off (val_batches = 0)"
    if len(validating) == context.ranks:
        return nodes, off
    return nodes, f"{off}, or leave it to the others ([[node]] validate = false on {', '.join(validating)})"


def _sizes(context: PlanContext, memory: MemoryFit) -> str:
    """The most precise settings with which a rank's batch fits a Mac of each size, or how much is missing."""
    if memory.shape is None:
        return ""
    first = memory.workloads[0]
    # The workload of a pipeline's stage is what it has in flight.
    even = max(1, context.steps[0][0] // context.ranks)
    batch = even if first.strategy == "pipeline" else first.batch
    alone = replace(first, strategy="data", world_size=1, layers=None, batch=batch, accumulation=context.accumulation)
    sizes = []
    for size in _MACS_GB:
        limit = int(size * 2**30 * WORKING_SET)
        choice = choose(memory.shape, [alone], [limit], dict.fromkeys(ChosenSettings.model_fields, AUTO))
        needed = f"{memory_text(choice.needed_bytes[0])} of {memory_text(limit)}"
        sizes.append(f"{size} GB: {choice.settings.text if choice.fits else 'too small'} ({needed})")
    return f"{alone.batch} × {alone.sequence:,} tokens: " + "; ".join(sizes)


def _exchange(context: PlanContext) -> str:
    """The step with each form of the exchange, where that of an update takes longer than the computation of its last
    iteration, and int8 would shorten it."""
    predicted = {wire: _predicted(context, "data", wire) for wire in ("float32", AUTO, "int8")}
    now, smaller = context.throughput.exchange_s, predicted["int8"].exchange_s
    if (
        now is None
        or smaller is None
        or now <= (compute := max(context.throughput.compute_s.values()))
        or smaller >= now
    ):
        return ""
    steps = [
        f'"{wire}" {step.step_s:.2f} s ({step.exchange_s:.2f} s of exchange)'
        for wire, step in predicted.items()
        if step.exchange_s is not None and step.step_s is not None
    ]
    return f"an iteration computes for {compute:.2f} s, and takes with wire = " + ", ".join(steps)


def _data_and_local(context: PlanContext) -> str:
    """The step of both, and of one node: of the job's own strategy in the form that it sets, of the other one in the
    same or, with local, in 4 bits."""
    current = context.throughput
    other = _predicted(context, "local", AUTO) if context.strategy == "data" else _predicted(context, "data")
    data, local = (current, other) if context.strategy == "data" else (other, current)
    form = ' and wire = "auto"' if local is other and context.settings.get("wire", AUTO) != AUTO else ""
    alone = (current.step_s or 0.0) * (current.speed_up or 0.0)
    return (
        f'an iteration takes {data.step_s:.2f} s with strategy "data", {local.step_s:.2f} s with "local"{form}, '
        f"{alone:.2f} s on the fastest node alone"
    )
