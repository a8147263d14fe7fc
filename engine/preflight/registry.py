"""Every check of this release by name, and the checks of the design that it does not have yet."""

from __future__ import annotations

from engine.preflight import connectivity, consistency, data, gradient, hostfile, model, ports, program, sync, versions
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
        gradient.CHECK,
        consistency.CHECK,
    )
}

NOT_YET: dict[str, str] = {
    "hardware_layer": "GPU, macOS version, RDMA, power source, heat and memory against the plan; ports_free is a part",
    "worker_layer": "stale ranks on this machine; ssh_connectivity and versions_match are the rest",
    "checkpoint_layer": "checkpoints are not written yet",
    "performance_layer": "needs a calibration",
    "health_check": "swap, heavy processes, low power mode, sleep",
}
"""Check of preflight.md → what it would look at, or why it is not there. Shown as "not checked in this release"."""
