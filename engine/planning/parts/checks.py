"""pre_rdma_sync, worker_consistency and pre_flight_checklist: what is looked at before the launch, and while it
trains. Planning runs none of it."""

from __future__ import annotations

from engine.models import PreRdmaSync
from engine.planning.document import ChecklistPart, ConsistencyPart, Disabled, WatchPart
from engine.planning.notes import Notes, Source
from engine.planning.situation import Situation

_COMPARED = ("training script", "worker bundle", "job", "tokenizer", "model index")
_KRUM_FROM = 5
"""Workers: Krum needs n >= 2f + 3 (Blanchard et al., NeurIPS 2017)."""


def sync(now: Situation, notes: Notes) -> PreRdmaSync:
    """Preflight runs the script; until then there is nothing to tell of it."""
    settings = now.inputs.config.preflight
    reason = "flightdeck preflight runs it"
    enabled = settings.sync
    if not enabled:
        reason = "switched off by [preflight] sync"
    elif now.ranks == 1:
        enabled, reason = False, "one node: nothing is copied anywhere"
    elif "pre_rdma_sync" in settings.skip:
        enabled, reason = False, "left out by [preflight] skip"
    if not enabled and now.ranks > 1:
        notes.warn("pre_rdma_sync", reason)
    notes.why("pre_rdma_sync", Source.USER if not enabled and now.ranks > 1 else Source.RULE, reason)
    return PreRdmaSync(
        enabled=enabled,
        reason=reason,
        sync_script=settings.sync_script,
        validation_checks=("tree manifest of workdir (path, SHA-256) equal on every node",) if enabled else (),
        block_on_failure=settings.block_on_failure,
        sync_status="not_run",
    )


def consistency(now: Situation, notes: Notes) -> ConsistencyPart:
    """Before the launch by hashes; while it trains by what the ranks say of themselves."""
    settings = now.inputs.config.preflight
    reason = None
    if now.ranks == 1:
        reason = "one worker: there is nothing to compare"
    elif not settings.consistency:
        reason = "switched off by [preflight] consistency"
    elif "worker_consistency" in settings.skip:
        reason = "left out by [preflight] skip"
    if reason is not None and now.ranks > 1:
        notes.warn("worker_consistency", reason)
    text = f"{settings.consistency_threshold:g} of the workers must agree, that many included"
    notes.why("worker_consistency", Source.USER if reason else Source.RULE, reason or text)
    return ConsistencyPart(
        enabled=reason is None,
        reason=reason,
        threshold=settings.consistency_threshold,
        workers=now.ranks,
        compared=_COMPARED if reason is None else (),
        while_training=_watched(now, notes),
    )


def _watched(now: Situation, notes: Notes) -> WatchPart | Disabled:
    settings = now.inputs.config.consistency
    if now.ranks == 1:
        return Disabled(reason="one worker: there is nothing to compare")
    if now.job.command is not None:
        return Disabled(reason="the job runs a command of its own, which says nothing of its parameters")
    if now.inputs.strategy != "data":
        return Disabled(
            reason=f"{now.inputs.strategy}: every rank has a part of its own, and nothing to compare it with"
        )
    if not settings.enabled:
        notes.warn("consistency", "switched off by [consistency] enabled: corrupted replicas are not noticed")
        return Disabled(reason="switched off by [consistency] enabled")
    krum = now.ranks >= _KRUM_FROM
    return WatchPart(
        every_updates=settings.every,
        staleness_threshold=settings.staleness,
        kl_threshold=settings.kl,
        wasserstein_threshold=settings.wasserstein,
        byzantine_rule=f"Krum, f = {(now.ranks - 3) // 2}" if krum else "median and MAD: Krum needs 5 workers",
        on_corruption=settings.on_corruption,
    )


def checklist(now: Situation) -> ChecklistPart:
    return ChecklistPart(checks=now.inputs.checks, not_in_this_release=dict(now.inputs.checks_not_yet))
