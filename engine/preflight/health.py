"""health_check: every node answers at this moment, has room and memory to work with, and nothing else works it hard or
lets it sleep.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping

from engine.config.models import FlightConfig, NodeConfig
from engine.errors import FlightDeckError
from engine.models import CheckResult, NodeFacts
from engine.nodes.gauges import mac_gpu_use
from engine.preflight import connectivity
from engine.preflight.answers import Busy, Load
from engine.preflight.check import Check, Findings
from engine.preflight.notes import NodeNotes
from engine.preflight.scene import Scene
from engine.transport.base import quoted

NAME = "health_check"
ROOM_BYTES = 1_000_000_000
"""Less is a warning: logs grow by some hundred megabytes a day, a run's checkpoints are checkpoint_layer's question."""
NO_ROOM_BYTES = 50_000_000
"""Less is a failure: a launch puts files there, and its logs would be cut off."""
SWAP_SHARE = 0.05
"""Of all memory. macOS keeps a little there always; a rank whose pages come from the disk is slower a hundredfold."""
GPU_SHARE = 0.20
"""Of the GPU's time, before any rank has begun."""
_LOOK_LIMIT_S = 20.0
_PREVENTED = re.compile(r"^\s*(?:PreventUserIdleSystemSleep|PreventSystemSleep)\s+1\s*$", re.MULTILINE)
_NVIDIA = re.compile(r"^\s*(\d{1,10})\s*,\s*(\d{1,9})\s*,\s*(.{1,200}?)\s*$", re.MULTILINE)


Beat = tuple[float | None, float] | FlightDeckError
"""A node's round trip in seconds (None: this machine), and when that was, by the monotonic clock."""
Loaded = Load | FlightDeckError


async def look(scene: Scene) -> CheckResult:
    async def beat(node: NodeConfig) -> tuple[float | None, float]:
        return await connectivity.round_trip_s(scene, node), time.monotonic()

    async def load(node: NodeConfig) -> Load:
        return await scene.look(node, "load", said=Load, timeout_s=_LOOK_LIMIT_S)

    loads, facts = await asyncio.gather(scene.on_all(load), scene.facts())
    # Last, so that a node that has gone away meanwhile is told.
    beats = await scene.on_all(beat)
    return judge(scene.config, facts, beats, loads)


def judge(
    config: FlightConfig, facts: Mapping[str, NodeFacts], beats: Mapping[str, Beat], loads: Mapping[str, Loaded]
) -> CheckResult:
    """The verdict over all nodes."""
    found = Findings(NAME, config)
    for node in config.nodes:
        notes = NodeNotes()
        _heartbeat(node, beats[node.name], notes)
        _room(node, facts[node.name], notes)
        _power(facts[node.name], notes)
        _load(facts[node.name], loads[node.name], notes)
        notes.tell(found, node)
    count = len(config.nodes)
    return found.verdict(f"{count} node{'s' * (count != 1)} alive and at rest")


def _heartbeat(node: NodeConfig, beat: Beat, notes: NodeNotes) -> None:
    if isinstance(beat, FlightDeckError):
        notes.fault(f"no heartbeat: {beat}")
        return
    taken, at = beat
    age = time.monotonic() - at
    words = "this machine" if node.local else "heartbeat" if taken is None else f"heartbeat in {taken * 1e3:.1f} ms"
    notes.seen.append(f"{words}, {age:.1f} s ago")


def _room(node: NodeConfig, facts: NodeFacts, notes: NodeNotes) -> None:
    """Disk and swap."""
    free = facts.disk_free_bytes
    if free is None:
        notes.warn(f"its disk is not known{_why(facts)}")
    else:
        largest = f"du -xak {quoted(node.workdir)} 2>/dev/null | sort -rn | head -n 20"
        words = f"{free / 1e9:,.1f} GB free on the disk of {node.workdir}"
        told = f"{words}: a person must choose what goes, the largest are shown by the command"
        if free < NO_ROOM_BYTES:
            notes.fault(told, largest)
        elif free < ROOM_BYTES:
            notes.warn(told, largest)
        else:
            notes.seen.append(words)
    swap, memory = facts.swap_used_bytes, facts.memory_total_bytes
    if swap is None or memory is None:
        notes.seen.append("swap not known")
    elif swap > SWAP_SHARE * memory:
        notes.warn(f"{swap / 1e9:,.1f} GB of its memory are in swap: end what fills it, or restart it")
    else:
        notes.seen.append(f"swap {swap / 1e9:,.1f} GB")


def _power(facts: NodeFacts, notes: NodeNotes) -> None:
    if facts.low_power_mode:
        mac = "sudo pmset -a lowpowermode 0"
        linux = "echo balanced | sudo tee /sys/firmware/acpi/platform_profile"
        notes.warn("Low Power Mode is on", mac if facts.system == "Darwin" else linux)
    elif facts.low_power_mode is False:
        notes.seen.append("Low Power Mode off")


def _load(facts: NodeFacts, load: Loaded, notes: NodeNotes) -> None:
    """What else works there, and whether it may sleep."""
    if isinstance(load, FlightDeckError):
        notes.warn(f"what else works there is not known: {load}")
        return
    for process in load.processes:
        # No command against it: it may be somebody's work, or a training of ours.
        notes.warn(busy_words(process, load.memory_bytes))
    for pid, megabytes, name in _NVIDIA.findall(load.nvidia):
        notes.warn(f"pid {pid} ({name[:80]}) holds {int(megabytes) / 1e3:,.1f} GB of the GPU's memory")
    if (use := mac_gpu_use(load.ioreg)) is not None:
        if use > GPU_SHARE:
            notes.warn(f"its GPU is {use:.0%} busy already; macOS tells only root with what")
        else:
            notes.seen.append(f"GPU {use:.0%} busy")
    if not notes.warnings:
        notes.seen.append("nothing else works hard")
    if facts.system != "Darwin":
        return
    if load.caffeinate is False:
        notes.warn("it has no caffeinate: a run would not keep it awake")
    else:
        now = "is prevented now" if sleep_prevented(load.assertions) else "may come now"
        notes.seen.append(f"sleep {now}, a run holds caffeinate")


def busy_words(process: Busy, memory_bytes: int) -> str:
    share = f", {process.rss_bytes / 1e9:,.1f} GB" + (f" of {memory_bytes / 1e9:,.0f}" if memory_bytes else "")
    rank = ", a rank of a Flight Deck run" if process.run else ""
    return f"pid {process.pid} ({process.command[:80]}{rank}) keeps {process.cores:.1f} cores busy{share}"


def sleep_prevented(assertions: str) -> bool:
    """Whether `pmset -g assertions` has one that keeps the system from sleeping."""
    return _PREVENTED.search(assertions) is not None


def _why(facts: NodeFacts) -> str:
    return f": {facts.problem}" if facts.problem else ""


CHECK = Check(
    NAME,
    "heartbeat, disk, swap, what else works the nodes, Low Power Mode, sleep",
    look,
    time_limit_s=_LOOK_LIMIT_S + 30,
    needs=(connectivity.NAME,),
)
