"""pre_rdma_sync, worker_consistency and pre_flight_checklist: what is looked at before the launch, and while it
trains. Planning runs none of it."""

from __future__ import annotations

from collections.abc import Callable

from engine.config.models import FlightConfig
from engine.models import PreRdmaSync
from engine.planning.before_launch import (
    compared,
    comparison_not_applicable,
    comparison_switched_off,
    manifests,
    sync_not_applicable,
    sync_switched_off,
)
from engine.planning.document import ChecklistPart, ConsistencyPart, Disabled, WatchPart
from engine.planning.notes import Notes, Source
from engine.planning.situation import Situation

Applies = Callable[[FlightConfig], str | None]
_STALENESS_RULE = (
    "updates heard of each rank: ranks in lockstep wait for one another, so one that hangs stops all and is shown as "
    "silent; stale is one whose events stop coming while the others' go on"
)
_KRUM_FROM = 5
"""Workers: Krum needs n >= 2f + 3 (Blanchard et al., NeurIPS 2017)."""


def sync(now: Situation, notes: Notes) -> PreRdmaSync:
    """Preflight runs the script; until then there is nothing to tell of it."""
    config = now.inputs.config
    settings = config.preflight
    left_out = _left_out(now, "pre_rdma_sync", sync_not_applicable, sync_switched_off, notes)
    reason = left_out or "flightdeck preflight runs it"
    if left_out is None:
        notes.why("pre_rdma_sync", Source.RULE, reason)
    return PreRdmaSync(
        enabled=left_out is None,
        reason=reason,
        sync_script=settings.sync_script,
        validation_checks=manifests(config) if left_out is None else (),
        block_on_failure=settings.block_on_failure,
        sync_status="not_run",
    )


def consistency(now: Situation, notes: Notes) -> ConsistencyPart:
    """Before the launch by hashes; while it trains by what the ranks say of themselves."""
    config = now.inputs.config
    settings = config.preflight
    left_out = _left_out(now, "worker_consistency", comparison_not_applicable, comparison_switched_off, notes)
    if left_out is None:
        text = f"{settings.consistency_threshold:g} of the workers must agree, that many included"
        notes.why("worker_consistency", Source.RULE, text)
    return ConsistencyPart(
        enabled=left_out is None,
        reason=left_out,
        threshold=settings.consistency_threshold,
        workers=now.ranks,
        compared=compared(config) if left_out is None else (),
        while_training=_watched(now, notes),
    )


def _left_out(now: Situation, check: str, not_applicable: Applies, switched_off: Applies, notes: Notes) -> str | None:
    """Why preflight will not run a check, by its own rules; what somebody has chosen warns."""
    config = now.inputs.config
    overridden = check in config.preflight.skip or any(
        each.overridden for each in now.inputs.checks if each.name == check
    )
    chosen = "left out by name (skip)" if overridden else None
    if chosen is None and (reason := not_applicable(config)) is not None:
        notes.why(check, Source.RULE, reason)
        return reason
    if (chosen := chosen or switched_off(config)) is not None:
        notes.why(check, Source.USER, chosen)
        notes.warn(check, chosen)
    return chosen


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
        staleness_rule=_STALENESS_RULE,
        kl_threshold=settings.kl,
        wasserstein_threshold=settings.wasserstein,
        byzantine_rule=f"Krum, f = {(now.ranks - 3) // 2}" if krum else "median and MAD: Krum needs 5 workers",
        on_corruption=settings.on_corruption,
    )


def checklist(now: Situation) -> ChecklistPart:
    return ChecklistPart(checks=now.inputs.checks, not_in_this_release=dict(now.inputs.checks_not_yet))
