"""Every check of this release by name, and the checks of the design that it does not have yet."""

from __future__ import annotations

from engine.preflight import (
    checkpoint,
    connectivity,
    consistency,
    data,
    gradient,
    hardware,
    health,
    hostfile,
    model,
    performance,
    ports,
    program,
    sync,
    versions,
    workers,
)
from engine.preflight.check import Check

CHECKS: dict[str, Check] = {
    check.name: check
    for check in (
        connectivity.CHECK,
        sync.CHECK,
        versions.CHECK,
        hostfile.CHECK,
        ports.CHECK,
        model.CHECK,
        data.CHECK,
        program.CHECK,
        checkpoint.CHECK,
        gradient.CHECK,
        consistency.CHECK,
        workers.CHECK,
        hardware.CHECK,
        performance.CHECK,
        health.CHECK,
    )
}

NOT_YET: dict[str, str] = {}
"""Check of preflight.md → what it would look at, or why it is not there. Shown as "not checked in this release"."""
