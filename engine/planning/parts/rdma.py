"""rdma_config: whether the ranks talk over RDMA, and what a person sets up for it."""

from __future__ import annotations

from engine.planning import nccl
from engine.planning.document import RdmaPart
from engine.planning.links import setup_commands
from engine.planning.notes import Notes, Source
from engine.planning.situation import Situation
from engine.planning.usable import usable

_OVER_RDMA = ("jaccl", "jaccl-ring")
_RECOVERY = "once per Mac, by hand: start it into Recovery OS, and in Terminal there: rdma_ctl enable"
_KNOWN = "other users' figures: about 50 µs against 300 µs for TCP, and about 5 GB/s"
_FAST_SYNCH = "MLX_METAL_FAST_SYNCH=1 is not set: MLX documents that it can deadlock the GPU; [job] env can set it"


def rdma(now: Situation, notes: Notes) -> RdmaPart:
    inputs = now.inputs
    wiring, backend = inputs.wiring, inputs.wiring.backend if inputs.wiring is not None else None
    infiniband = wiring is not None and wiring.infiniband
    enabled = backend in _OVER_RDMA or infiniband
    if wiring is None:
        reason = f"no backend: {inputs.unwired}"
    elif now.ranks == 1:
        reason = "one node: there is nobody to talk to"
    else:
        reason = "; ".join(wiring.reasons)
        for warning in wiring.warnings:
            notes.warn("rdma_config", warning)
    source = Source.USER if inputs.config.cluster.backend != "auto" else Source.FACT
    notes.why("rdma_config.backend", source if backend else Source.UNKNOWN, reason)
    speed_up = now.predicted.speed_up if enabled else None
    if speed_up is None:
        why = "no RDMA" if not enabled else now.predicted.why_not or "not predicted"
        notes.why("rdma_config.expected_speedup", Source.UNKNOWN, why)
    else:
        notes.why("rdma_config.expected_speedup", Source.CALIBRATION, "all ranks against the fastest node alone")
    taken = usable(inputs)
    measured = taken.everyone if taken is not None else None
    # A gradient is as large as ever, however old its calibration.
    gradient = inputs.calibration.gradient_bytes if inputs.calibration is not None else None
    wanted = nccl.environment(infiniband=infiniband, gradient_bytes=gradient) if backend == "nccl" else {}
    return RdmaPart(
        enabled=enabled,
        platform=now.platform,
        backend=backend if now.ranks > 1 else "none",
        expected_speedup=speed_up,
        env_vars={name: inputs.rank_environment.get(name, value) for name, value in wanted.items()},
        setup=_setup(now, enabled=enabled),
        reason=reason,
        latency_s=measured.latency_s if measured is not None else None,
        bandwidth_bytes_per_s=measured.bandwidth_bytes_per_s if measured is not None else None,
    )


def _setup(now: Situation, *, enabled: bool) -> tuple[str, ...]:
    inputs = now.inputs
    backend = inputs.wiring.backend if inputs.wiring is not None else None
    if now.ranks == 1:
        return ()
    if backend == "nccl":
        steps = [
            "flightdeck launch sets env_vars for every rank; [job] env overrides them",
            f"InfiniBand for training is supported from {nccl.PLATFORM}",
        ]
        if not enabled:
            steps.append("no active InfiniBand on every node: NCCL goes over TCP")
        return tuple(steps)
    if now.platform != "apple":
        return ()
    steps = [] if enabled else [f"{_RECOVERY} ({_KNOWN})"]
    facts = [fact for name in now.names if (fact := inputs.facts.get(name)) is not None]
    for node, commands in setup_commands(inputs.topology, facts).items():
        steps.append(f"{node}: {' && '.join(commands)}")
    return (*steps, _FAST_SYNCH)
