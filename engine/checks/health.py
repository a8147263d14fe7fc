"""health_check: every node answers now, has free disk and memory, is not busy otherwise, and will not go to sleep."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping

from engine.checks import connectivity
from engine.checks.check import THIS_MACHINE, Check, Findings, NodeFindings
from engine.checks.context import CheckContext
from engine.checks.fixes import LISTS, Fix
from engine.cluster.probe_results import BusyProcess, SystemLoad
from engine.cluster.sensors import mac_gpu_use
from engine.cluster.transport.base import quoted
from engine.config.models import Config, NodeConfig
from engine.errors import FlightDeckError, memory_text, plural, size_text
from engine.models import CheckResult, NodeFacts
from engine.node.probes.load import UPDATES
from engine.security.sanitise import plain

NAME = "health_check"
DISK_WARN_BYTES = 1_000_000_000
"""Logs grow by some hundred megabytes a day; checkpoints are checkpoint_layer's subject."""
DISK_FAIL_BYTES = 50_000_000
"""A launch writes its files there, and its logs would be cut off."""
SWAP_SHARE = 0.05
"""Share of all memory. macOS always swaps a little; a rank whose pages come from the disk is a hundred times slower."""
SHM_BYTES = 1_000_000_000
"""A container's is 64 MB unless one asks for more."""
_MEMLOCK = "/etc/security/limits.d/flightdeck.conf"
GPU_SHARE = 0.20
"""Share of the GPU's time, before any rank has started."""
GPU_MEMORY_BYTES = 1 << 30
"""About twice what the context of a process takes that computes nothing, such as one of our own probes."""
_PROBE_LIMIT_S = 20.0
_PREVENTED = re.compile(r"^\s*(PreventUserIdleSystemSleep|PreventSystemSleep)\s+([01])\s*$", re.MULTILINE)
_NVIDIA = re.compile(r"^\s*(\d{1,10})\s*,\s*(\d{1,9})\s*,\s*(.{1,200}?)\s*$", re.MULTILINE)

_POWER_EVENT = re.compile(r"^\s*(?:\[\d+\]\s+)?((?:sleep|shutdown|restart) at .{1,100})$", re.MULTILINE)
_ENERGY = re.compile(r"^ (\w+) +(\d{1,6})\s*$", re.MULTILINE)
_LIT = "its display never sleeps, and can panic a Mac that trains (mlx#3267); or set display_sleep = true in [job]"

HeartbeatResult = tuple[float | None, float] | FlightDeckError
"""A node's round trip in seconds (None for this machine), and when that was, by the monotonic clock."""
LoadResult = SystemLoad | FlightDeckError


async def run(context: CheckContext) -> CheckResult:
    async def heartbeat(node: NodeConfig) -> tuple[float | None, float]:
        return await context.agent(node).round_trip_s(), time.monotonic()

    loads, facts = await asyncio.gather(
        context.on_all_nodes(
            lambda node: context.probe(node, "load", result_type=SystemLoad, timeout_s=_PROBE_LIMIT_S)
        ),
        context.facts(),
    )
    # Last, so that a node that goes away meanwhile is noticed.
    heartbeats = await context.on_all_nodes(heartbeat)
    return evaluate(context.config, facts, heartbeats, loads)


def evaluate(
    config: Config,
    facts: Mapping[str, NodeFacts],
    heartbeats: Mapping[str, HeartbeatResult],
    loads: Mapping[str, LoadResult],
) -> CheckResult:
    findings = Findings(NAME, config)
    for node in config.nodes:
        on_node, seen, load = findings.on(node), facts[node.name], loads[node.name]
        _check_heartbeat(node, heartbeats[node.name], on_node)
        _check_disk(node, seen, on_node)
        _check_swap(seen, on_node)
        _check_power(seen, on_node)
        if isinstance(load, FlightDeckError):
            on_node.warn(f"its load is not known: {load}")
            continue
        _check_load(seen, load, on_node)
        _check_energy(config, load, on_node)
        if config.job.framework == "torch" or seen.mlx_device == "CUDA":
            _check_limits(load, on_node)
    return findings.verdict(f"{plural(len(config.nodes), 'node')} alive and idle")


def _check_heartbeat(node: NodeConfig, heartbeat: HeartbeatResult, findings: NodeFindings) -> None:
    if isinstance(heartbeat, FlightDeckError):
        findings.fault(f"no heartbeat: {heartbeat}")
        return
    taken, at = heartbeat
    what = THIS_MACHINE if node.local else "heartbeat" if taken is None else f"heartbeat in {taken * 1e3:.1f} ms"
    findings.passed.append(f"{what}, {time.monotonic() - at:.1f} s ago")


def _check_disk(node: NodeConfig, facts: NodeFacts, findings: NodeFindings) -> None:
    free = facts.disk_free_bytes
    if free is None:
        findings.warn(f"its disk is not known{f': {facts.problem}' if facts.problem else ''}")
        return
    space = f"{size_text(free)} free on the disk of {node.workdir}"
    message = f"{space}: make room, the command lists the largest folders"
    largest = Fix(f"du -xak {quoted(node.workdir)} 2>/dev/null | sort -rn | head -n 20", LISTS)
    if free < DISK_FAIL_BYTES:
        findings.fault(message, largest)
    elif free < DISK_WARN_BYTES:
        findings.warn(message, largest)
    else:
        findings.passed.append(space)


def _check_swap(facts: NodeFacts, findings: NodeFindings) -> None:
    swap, memory = facts.swap_used_bytes, facts.memory_total_bytes
    if swap is None or memory is None:
        findings.passed.append("swap not known")
    elif swap > SWAP_SHARE * memory:
        findings.warn(f"{memory_text(swap)} of its memory are in swap: end what fills it, or restart it")
    else:
        findings.passed.append(f"swap {memory_text(swap)}")


def _check_power(facts: NodeFacts, findings: NodeFindings) -> None:
    if facts.low_power_mode:
        mac = "sudo pmset -a lowpowermode 0"
        linux = "echo balanced | sudo tee /sys/firmware/acpi/platform_profile"
        effect = "switches Low Power Mode off; the same setting switches it on again"
        findings.warn("Low Power Mode is on", Fix(mac if facts.system == "Darwin" else linux, effect))
    elif facts.low_power_mode is False:
        findings.passed.append("Low Power Mode off")


def _check_load(facts: NodeFacts, load: SystemLoad, findings: NodeFindings) -> None:
    for process in load.processes:
        # No fix: it may be somebody's work, or a training of ours.
        findings.warn(describe_busy(process, load.memory_bytes))
    _check_gpu_memory(facts, load, findings)
    if (use := mac_gpu_use(load.ioreg)) is not None:
        if use > GPU_SHARE:
            findings.warn(f"its GPU is {use:.0%} busy already; macOS reports only to root by which process")
        else:
            findings.passed.append(f"GPU {use:.0%} busy")
    if not findings.warnings:
        findings.passed.append("no other process is busy")
    if facts.system != "Darwin":
        return
    if load.caffeinate is False:
        findings.warn("it has no caffeinate: a run would not keep it awake")
    else:
        now = {True: "is prevented now", False: "may come now", None: "now is not known"}
        findings.passed.append(f"sleep {now[sleep_prevented(load.assertions)]}, a run holds caffeinate")


def _check_energy(config: Config, load: SystemLoad, findings: NodeFindings) -> None:
    """Settings of a Mac by which a night's work ends. A run's caffeinate holds off idle sleep, but no event."""
    repeated, _, once = load.energy.partition("Scheduled power events")
    for text, command, zone in ((repeated, "repeat cancel", ""), (once, "schedule cancelall", " UTC")):
        for event in _POWER_EVENT.findall(text)[:3]:
            effect = "cancels these power events, also those that wake it; pmset makes them again"
            findings.warn(f"macOS is to {plain(event, 100)}{zone}", Fix(f"sudo pmset {command}", effect))
    if "AutomaticallyInstallMacOSUpdates = 1;" in load.energy:
        command = f"sudo defaults write {UPDATES} AutomaticallyInstallMacOSUpdates -bool"
        effect = f"updates of macOS wait for somebody; `{command} true` takes that back"
        findings.warn("macOS installs its updates by itself, and restarts for them", Fix(f"{command} false", effect))
    settings = dict(_ENERGY.findall(load.energy.rpartition("AC Power:")[2]))
    for name, value, message in (
        ("sleep", 0, "it goes to sleep when no run keeps it awake, as between two runs"),
        *([] if config.job.display_sleep else [("displaysleep", 10, _LIT)]),
        ("autorestart", 1, "it stays off after a power failure"),
    ):
        if name in settings and (settings[name] == "0") is (value > 0):
            back = f"`sudo pmset -c {name} {settings[name]}` takes that back"
            findings.warn(message, Fix(f"sudo pmset -c {name} {value}", back))


def _check_gpu_memory(facts: NodeFacts, load: SystemLoad, findings: NodeFindings) -> None:
    if load.nvidia is None:
        findings.warn("what holds its GPU's memory is not known: nvidia-smi gave no list")
    held = [(pid, int(mib) << 20, name) for pid, mib, name in _NVIDIA.findall(load.nvidia or "")]
    for pid, size, name in held:
        if size > GPU_MEMORY_BYTES:
            findings.warn(f"pid {pid} ({name[:80]}) holds {memory_text(size)} of the GPU's memory")
    # nvidia-smi lists no process of another container.
    taken = [(gpu.memory_bytes or 0) - (gpu.free_bytes or 0) for gpu in facts.gpus if gpu.free_bytes is not None]
    if load.nvidia is not None and not held and (most := max(taken, default=0)) > 2 * GPU_MEMORY_BYTES:
        findings.warn(f"{memory_text(most)} of a GPU's memory are in use, and nvidia-smi lists no process")


def _check_limits(load: SystemLoad, findings: NodeFindings) -> None:
    """Shared memory, by which NCCL and the workers of a DataLoader exchange, and what InfiniBand may lock."""
    shared, locked = load.shm_bytes, load.memlock_bytes
    if shared is not None and shared < SHM_BYTES:
        message = f"its /dev/shm has {memory_text(shared)}, less than NCCL and DataLoader workers need"
        advice = "in a container start that with --ipc=host or --shm-size=8g"
        back = f"sudo mount -o remount,size={shared} /dev/shm"
        effect = f"enlarges it until the next restart; `{back}` takes that back"
        findings.warn(f"{message}; {advice}", Fix("sudo mount -o remount,size=8g /dev/shm", effect))
    elif shared is not None:
        findings.passed.append(f"/dev/shm {memory_text(shared)}")
    if locked is not None:
        message = f"a process may lock {memory_text(locked)} (ulimit -l), which InfiniBand registers its buffers in"
        lines = "* soft memlock unlimited\\n* hard memlock unlimited\\n"
        command = f"printf '{lines}' | sudo tee {_MEMLOCK}"
        findings.warn(message, Fix(command, f"holds from the next login on; sudo rm {_MEMLOCK} takes it back"))


def describe_busy(process: BusyProcess, memory_bytes: int) -> str:
    share = f", {memory_text(process.rss_bytes)} of {memory_text(memory_bytes)}"
    rank = ", a rank of a Flight Deck run" if process.run else ""
    command = process.command if len(process.command) <= 80 else f"{process.command[:79]}…"
    return f"pid {process.pid} ({command}{rank}) keeps {process.cores:.1f} cores busy{share}"


def sleep_prevented(assertions: str) -> bool | None:
    """`assertions` is the output of `pmset -g assertions`; None where it does not tell."""
    states = dict(_PREVENTED.findall(assertions))
    return True if "1" in states.values() else False if len(states) == 2 else None


CHECK = Check(
    NAME, "heartbeat, disk, swap, other load, energy settings, updates", run, time_limit_s=_PROBE_LIMIT_S + 30,
    label="health", needs=(connectivity.NAME,),
)  # fmt: skip
