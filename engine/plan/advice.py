"""Rules of thumb about models, Macs and mlx-lm, as data, each with its source. Rules whose cause is disputed are
marked; rules that refuse a launch name the override."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.models import NodeFacts

USER_REPORTS = "reported by users of M4 Max and M3 Ultra"
MAINTAINERS = "MLX's maintainers"
OVERRIDE = "flightdeck launch --skip hardware_layer"
_DISPUTED = (
    "The cause is disputed. MLX's maintainers hold that a GPU waits for a slower peer inside a command buffer; our "
    "trainer evaluates the gradients first and communicates on the CPU stream, which is their remedy"
)
_BILLION = 1e9
_M4_MAX_BYTES = 136 * 10**9
"""Above the largest M4 Max (128 GiB)."""


@dataclass(frozen=True)
class Case:
    """The input of the rules."""

    ranks: int
    parameters: int | None
    strategy: str
    fine_tune_type: str | None
    """None for a custom command."""
    backend: str | None
    settings: Mapping[str, Any]
    facts: Mapping[str, NodeFacts]
    """Last known facts by node; nodes that were never probed are missing."""
    trainable_share: float | None = None
    known_to_fit: bool = False
    """According to the memory estimate, on every node."""
    m4_max: tuple[str, ...] = field(init=False)
    """Nodes that are an M4 Max."""

    def __post_init__(self) -> None:
        found = tuple(name for name, facts in self.facts.items() if is_m4_max(facts))
        object.__setattr__(self, "m4_max", found)

    @property
    def full(self) -> bool:
        return self.fine_tune_type == "full"

    def billions(self, least: float, below: float = float("inf")) -> bool:
        return self.parameters is not None and least * _BILLION <= self.parameters < below * _BILLION


@dataclass(frozen=True)
class Rule:
    name: str
    applies: Callable[[Case], bool]
    text: str
    """May contain {nodes}, the M4 Max among them, and {share}, the trainable share."""
    source: str
    disputed: bool = False
    refuses: bool = False


def is_m4_max(facts: NodeFacts | None) -> bool:
    """An M4 Max with at most 128 GB."""
    if facts is None or "M4 Max" not in (facts.chip or ""):
        return False
    return (facts.memory_total_bytes or 0) <= _M4_MAX_BYTES


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
        lambda case: case.full and case.billions(60) and case.strategy == "data" and not case.known_to_fit,
        "full fine-tuning of 70B and more does not fit a single Mac: plan with --strategy sharded or pipeline",
        USER_REPORTS,
        refuses=True,
    ),
    Rule(
        "grad_checkpoint",
        lambda case: case.full and case.billions(20) and not case.settings.get("grad_checkpoint"),
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
        lambda case: case.fine_tune_type is not None and case.trainable_share is not None,
        "{share} of the parameters are trained. mlx-lm trains the last num_layers layers (default 16; here all of them "
        'for full fine-tuning), and "full" keeps embeddings, final norm and head frozen',
        "mlx-lm's lora.py",
    ),
    Rule(
        "adam_in_16_bits",
        lambda case: (
            case.settings.get("optimizer_precision") == "parameter" and case.settings.get("optimizer") != "sgd"
        ),
        "optimizer_precision = \"parameter\" keeps moments in the model's own type: in bfloat16 Adam's beta2 of 0.999 "
        "rounds to 1, so the second moment never decays and small steps vanish",
        "measured: 200 steps at 1e-5 move a weight by 0.0018 in bfloat16, by 0.0074 in float32",
    ),
    Rule(
        "sharded_on_ring",
        lambda case: case.strategy == "sharded" and case.backend == "ring",
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


def text_of(rule: Rule, case: Case) -> str:
    share = f"{case.trainable_share:.2%}" if case.trainable_share is not None else "an unknown part"
    return rule.text.format(nodes=", ".join(case.m4_max), share=share)


def advice(case: Case) -> list[Rule]:
    """The rules that apply, in the order of the table."""
    return [rule for rule in RULES if rule.applies(case)]
