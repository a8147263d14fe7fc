"""Rules of thumb about models, Macs and mlx-lm, as data, each with its source. Rules whose cause is disputed are
marked; rules that refuse a launch name the override."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.plan.context import PlanContext
from engine.plan.document import OVERRIDE, PlannedAdvice, Rationale
from engine.plan.memory.fit import MemoryFit

USER_REPORTS = "reported by users of M4 Max and M3 Ultra"
MAINTAINERS = "MLX's maintainers"
_DISPUTED = (
    "The cause is disputed. MLX's maintainers hold that a GPU waits for a slower peer inside a command buffer; our "
    "trainer evaluates the gradients first and communicates on the CPU stream, which is their remedy"
)


@dataclass(frozen=True)
class Rule:
    name: str
    applies: Callable[[PlanContext, MemoryFit], bool]
    text: str
    """May contain {nodes}, the M4 Max among them, and {share}, the trainable share."""
    source: str
    disputed: bool = False
    refuses: bool = False


def _size(name: str, least: float, below: float, text: str) -> Rule:
    """A rule of full fine-tuning with so many billion parameters."""
    full = f"full fine-tuning {text}"
    return Rule(name, lambda plan, memory: plan.full and memory.billions(least, below), full, USER_REPORTS)


RULES: tuple[Rule, ...] = (
    Rule(
        "full_copy",
        lambda plan, _: plan.full and plan.strategy == "data" and plan.ranks > 1,
        "data parallelism keeps a full copy of weights, gradients and moments on every machine: more machines "
        "make it faster, not smaller",
        "the strategy itself",
    ),
    _size("size_4b", 0.5, 4.6, "of up to 4B fits an M4 Max 128 GB and an M3 Ultra 512 GB"),
    _size("size_7b", 4.6, 10, "of 7B needs an M3 Ultra 512 GB"),
    _size("size_14b", 10, 20, "of 14B needs an M3 Ultra 512 GB, which suits it best"),
    _size("size_30b", 20, 31.5, "of 30B is tight on an M3 Ultra 512 GB: grad_checkpoint = true"),
    _size("size_32b", 31.5, 60, "of 32B needs an M3 Ultra 512 GB and grad_checkpoint = true"),
    Rule(
        "size_70b",
        lambda plan, memory: plan.full and memory.billions(60) and plan.strategy == "data" and not memory.fits,
        "full fine-tuning of 70B and more does not fit a single Mac: plan with --strategy sharded or pipeline",
        USER_REPORTS,
        refuses=True,
    ),
    Rule(
        "grad_checkpoint",
        lambda plan, memory: plan.full and memory.billions(20) and not plan.recomputes,
        "grad_checkpoint = true trades time for activation memory: at this size it decides whether the model fits",
        USER_REPORTS,
    ),
    Rule(
        "gpu_watchdog_validation",
        lambda plan, memory: bool(plan.m4_max) and plan.full and memory.billions(3, 4.6) and plan.strategy == "data",
        "{nodes}: an M4 Max with 128 GB has hit the GPU watchdog while validating a 4B model in full fine-tuning. "
        f"Turn validation off (val_batches = 0), or give it at most 8 layers of a pipeline. {_DISPUTED}",
        f"{USER_REPORTS}; {MAINTAINERS}",
        disputed=True,
    ),
    Rule(
        "gpu_watchdog_training",
        lambda plan, memory: bool(plan.m4_max) and plan.full and memory.billions(4.6) and plan.strategy == "data",
        "{nodes}: an M4 Max with 128 GB has hit the GPU watchdog while training 7B in full fine-tuning, even "
        "with gradient checkpointing and a batch of 2. Leave it out, or give it at most 8 layers of a pipeline. "
        f"{_DISPUTED}",
        f"{USER_REPORTS}; {MAINTAINERS}",
        disputed=True,
    ),
    Rule(
        "trained_layers",
        lambda _, memory: memory.trainable_share is not None,
        "{share} of the parameters are trained. mlx-lm trains the last num_layers layers (default 16; here all of them "
        'for full fine-tuning), and "full" keeps embeddings, final norm and head frozen',
        "mlx-lm's lora.py",
    ),
    Rule(
        "adam_in_16_bits",
        lambda plan, _: (
            plan.settings.get("optimizer_precision") == "parameter" and plan.settings.get("optimizer") != "sgd"
        ),
        "optimizer_precision = \"parameter\" keeps moments in the model's own type: in bfloat16 Adam's beta2 of 0.999 "
        "rounds to 1, so the second moment never decays and small steps vanish",
        "measured: 200 steps at 1e-5 move a weight by 0.0018 in bfloat16, by 0.0074 in float32",
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
        lambda plan, _: plan.strategy in ("sharded", "pipeline") and plan.ranks > 1,
        "the state is not replicated: after losing a node, training continues from the last periodic checkpoint, of "
        "which each rank writes its part on its own node. A restart waits for all nodes, whatever [recovery] min_nodes "
        "says, unless [checkpoint] destination is a folder that all of them can reach",
        "the strategy itself",
    ),
)


def advice_section(context: PlanContext, memory: MemoryFit, rationale: Rationale) -> tuple[PlannedAdvice, ...]:
    """The rules that apply, in the order of the table; those that refuse the launch are refusals too."""
    share = f"{memory.trainable_share:.2%}" if memory.trainable_share is not None else ""
    found = []
    for rule in RULES:
        if not rule.applies(context, memory):
            continue
        text = rule.text.format(nodes=", ".join(context.m4_max), share=share)
        override = OVERRIDE if rule.refuses else None
        if rule.refuses:
            rationale.refuse(rule.name, text, override)
        found.append(
            PlannedAdvice(name=rule.name, text=text, source=rule.source, disputed=rule.disputed, override=override)
        )
    return tuple(found)
