"""From what is known to the plan: each part is made in turn, its reasons gathered on the way. Pure."""

from __future__ import annotations

from engine.planning.advice import OVERRIDE, Case, advice, text_of
from engine.planning.document import AdvicePart, NodePart, TrainingPlan
from engine.planning.inputs import PlanInputs
from engine.planning.notes import Notes
from engine.planning.parts.batch import batch
from engine.planning.parts.checkpoints import checkpoints
from engine.planning.parts.checks import checklist, consistency, sync
from engine.planning.parts.chunks import chunking, data, quality
from engine.planning.parts.distributed import distributed
from engine.planning.parts.memory import Need, need
from engine.planning.parts.performance import calibration, performance
from engine.planning.parts.rdma import rdma
from engine.planning.parts.strategy import split_layers, strategy
from engine.planning.parts.verification import verification
from engine.planning.situation import Situation, situation


def make_plan(inputs: PlanInputs) -> TrainingPlan:
    """The training plan. What stands in its way is in `refusals`; nothing is raised for it."""
    notes = Notes()
    now = situation(inputs, notes)
    _unanswered(now, notes)
    needed = need(now, lambda layers, limits: split_layers(now, layers, limits, notes), notes)
    advised = _advice(now, needed, notes)
    return TrainingPlan(
        strategy=strategy(now, needed.split, notes),
        batch_configuration=batch(now, needed.largest_batch, notes),
        distributed_config=distributed(now, notes),
        rdma_config=rdma(now, notes),
        checkpoint_strategy=checkpoints(now, notes),
        performance_targets=performance(now, notes),
        verification_steps=verification(now),
        pre_rdma_sync=sync(now, notes),
        hardware_calibration=calibration(now, notes),
        worker_consistency=consistency(now, notes),
        coordinator_chunking=chunking(now, notes),
        pre_flight_checklist=checklist(now),
        cluster=inputs.config.cluster.name,
        job=inputs.config.job.name,
        made_at=inputs.now,
        nodes=_nodes(now),
        memory=needed.part,
        data=data(now),
        data_quality=quality(now, notes),
        advice=advised,
        warnings=tuple(dict.fromkeys(notes.warnings)),
        refusals=tuple(dict.fromkeys(notes.refusals)),
        reasons=tuple(notes.reasons),
    )


def _unanswered(now: Situation, notes: Notes) -> None:
    for name, why in now.inputs.problems.items():
        seen = now.inputs.facts.get(name)
        age = f"what was seen of it {_ago((now.inputs.now - seen.probed_at).total_seconds())} is used" if seen else ""
        notes.warn("nodes", f"{name} does not answer ({why}): {age or 'nothing is known of it'}")


def _ago(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} seconds ago"


def _nodes(now: Situation) -> tuple[NodePart, ...]:
    rows = []
    for rank, node in enumerate(now.inputs.config.nodes):
        seen = now.inputs.facts.get(node.name)
        rows.append(
            NodePart(
                rank=rank,
                node=node.name,
                host=node.ssh,
                chip=seen.chip if seen is not None else None,
                memory_bytes=seen.memory_total_bytes if seen is not None else None,
                share=now.divided.parts.get(node.name),
                facts_age_s=max(0.0, (now.inputs.now - seen.probed_at).total_seconds()) if seen is not None else None,
                problem=now.inputs.problems.get(node.name),
            )
        )
    return tuple(rows)


def _advice(now: Situation, needed: Need, notes: Notes) -> tuple[AdvicePart, ...]:
    wiring = now.inputs.wiring
    case = Case(
        ranks=now.ranks,
        parameters=needed.parameters,
        strategy=now.inputs.strategy,
        fine_tune_type=now.job.fine_tune_type if now.settings else None,
        backend=wiring.backend if wiring is not None else None,
        settings=now.settings,
        facts=now.inputs.facts,
        trainable_share=needed.trainable_share,
        known_to_fit=needed.fits is True,
    )
    found = []
    for rule in advice(case):
        text = text_of(rule, case)
        if rule.refuses:
            notes.refuse(rule.name, text, OVERRIDE)
        found.append(
            AdvicePart(
                name=rule.name,
                text=text,
                source=rule.source,
                disputed=rule.disputed,
                override=OVERRIDE if rule.refuses else None,
            )
        )
    return tuple(found)
