"""Rules of thumb about models, Macs and mlx-lm, as data, each with its source. Rules whose cause is disputed are
marked; rules that refuse a launch name the override."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.plan.context import PlanContext
from engine.plan.document import OVERRIDE, PlannedAdvice, Rationale
from engine.plan.memory.fit import MemoryFit
from engine.plan.strategy import is_m4_max

USER_REPORTS = "reported by users of M4 Max and M3 Ultra"
MAINTAINERS = "MLX's maintainers"
_DISPUTED = (
    "The cause is disputed. MLX's maintainers hold that a GPU waits for a slower peer inside a command buffer; our "
    "trainer evaluates the gradients first and communicates on the CPU stream, which is their remedy"
)
_BILLION = 1e9


@dataclass(frozen=True)
class Case:
    """The input of the rules."""

    context: PlanContext
    memory: MemoryFit

    @property
    def full(self) -> bool:
        return self.context.full

    @property
    def strategy(self) -> str:
        return self.context.inputs.strategy

    @property
    def ranks(self) -> int:
        return self.context.ranks

    @property
    def m4_max(self) -> list[str]:
        return [name for name, facts in self.context.inputs.facts.items() if is_m4_max(facts)]

    def sets(self, key: str) -> object:
        return self.context.settings.get(key)

    def billions(self, least: float, below: float = float("inf")) -> bool:
        parameters = self.memory.parameters
        return parameters is not None and least * _BILLION <= parameters < below * _BILLION


@dataclass(frozen=True)
class Rule:
    name: str
    applies: Callable[[Case], bool]
    text: str
    """May contain {nodes}, the M4 Max among them, and {share}, the trainable share."""
    source: str
    disputed: bool = False
    refuses: bool = False


RULES: tuple[Rule, ...] = (
    Rule(
        "full_copy",
        lambda case: case.full and case.strategy == "data" and case.ranks > 1,
        "data parallelism keeps a full copy of weights, gradients and moments on every machine: more machines "
        "make it faster, not smaller",
        "the strategy itself",
    ),
    Rule(
        "size_4b",
        lambda case: case.full and case.billions(0.5, 4.6),
        "full fine-tuning of up to 4B fits an M4 Max 128 GB and an M3 Ultra 512 GB",
        USER_REPORTS,
    ),
    Rule(
        "size_7b",
        lambda case: case.full and case.billions(4.6, 10),
        "full fine-tuning of 7B needs an M3 Ultra 512 GB",
        USER_REPORTS,
    ),
    Rule(
        "size_14b",
        lambda case: case.full and case.billions(10, 20),
        "full fine-tuning of 14B needs an M3 Ultra 512 GB, which suits it best",
        USER_REPORTS,
    ),
    Rule(
        "size_30b",
        lambda case: case.full and case.billions(20, 31.5),
        "full fine-tuning of 30B is tight on an M3 Ultra 512 GB: grad_checkpoint = true",
        USER_REPORTS,
    ),
    Rule(
        "size_32b",
        lambda case: case.full and case.billions(31.5, 60),
        "full fine-tuning of 32B needs an M3 Ultra 512 GB and grad_checkpoint = true",
        USER_REPORTS,
    ),
    Rule(
        "size_70b",
        lambda case: case.full and case.billions(60) and case.strategy == "data" and not case.memory.fits,
        "full fine-tuning of 70B and more does not fit a single Mac: plan with --strategy sharded or pipeline",
        USER_REPORTS,
        refuses=True,
    ),
    Rule(
        "grad_checkpoint",
        lambda case: case.full and case.billions(20) and not case.sets("grad_checkpoint"),
        "grad_checkpoint = true trades time for activation memory: at this size it decides whether the model fits",
        USER_REPORTS,
    ),
    Rule(
        "gpu_watchdog_validation",
        lambda case: bool(case.m4_max) and case.full and case.billions(3, 4.6) and case.strategy == "data",
        "{nodes}: an M4 Max with 128 GB has hit the GPU watchdog while validating a 4B model in full fine-tuning. "
        f"Turn validation off (val_batches = 0), or give it at most 8 layers of a pipeline. {_DISPUTED}",
        f"{USER_REPORTS}; {MAINTAINERS}",
        disputed=True,
    ),
    Rule(
        "gpu_watchdog_training",
        lambda case: bool(case.m4_max) and case.full and case.billions(4.6) and case.strategy == "data",
        "{nodes}: an M4 Max with 128 GB has hit the GPU watchdog while training 7B in full fine-tuning, even "
        "with gradient checkpointing and a batch of 2. Leave it out, or give it at most 8 layers of a pipeline. "
        f"{_DISPUTED}",
        f"{USER_REPORTS}; {MAINTAINERS}",
        disputed=True,
    ),
    Rule(
        "trained_layers",
        lambda case: case.memory.trainable_share is not None,
        "{share} of the parameters are trained. mlx-lm trains the last num_layers layers (default 16; here all of them "
        'for full fine-tuning), and "full" keeps embeddings, final norm and head frozen',
        "mlx-lm's lora.py",
    ),
    Rule(
        "adam_in_16_bits",
        lambda case: case.sets("optimizer_precision") == "parameter" and case.sets("optimizer") != "sgd",
        "optimizer_precision = \"parameter\" keeps moments in the model's own type: in bfloat16 Adam's beta2 of 0.999 "
        "rounds to 1, so the second moment never decays and small steps vanish",
        "measured: 200 steps at 1e-5 move a weight by 0.0018 in bfloat16, by 0.0074 in float32",
    ),
    Rule(
        "sharded_on_ring",
        lambda case: case.strategy == "sharded" and case.context.backend == "ring",
        "sharded training reduces gradients with sum_scatter, which the ring backend lacks: it uses all_sum instead, "
        "and sends the whole gradient over the network",
        "MLX's ring backend",
    ),
    Rule(
        "partitioned_state",
        lambda case: case.strategy in ("sharded", "pipeline") and case.ranks > 1,
        "the state is not replicated: after losing a node, training continues from the last periodic checkpoint, of "
        "which each rank writes its part on its own node. A restart waits for all nodes, whatever [recovery] min_nodes "
        "says, unless [checkpoint] destination is a folder that all of them can reach",
        "the strategy itself",
    ),
)


def advice_section(context: PlanContext, memory: MemoryFit, rationale: Rationale) -> tuple[PlannedAdvice, ...]:
    """The rules that apply, in the order of the table; those that refuse the launch are refusals too."""
    case = Case(context, memory)
    share = f"{memory.trainable_share:.2%}" if memory.trainable_share is not None else ""
    found = []
    for rule in RULES:
        if not rule.applies(case):
            continue
        text = rule.text.format(nodes=", ".join(case.m4_max), share=share)
        override = OVERRIDE if rule.refuses else None
        if rule.refuses:
            rationale.refuse(rule.name, text, override)
        found.append(
            PlannedAdvice(name=rule.name, text=text, source=rule.source, disputed=rule.disputed, override=override)
        )
    return tuple(found)
