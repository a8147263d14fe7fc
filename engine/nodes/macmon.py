"""macmon's JSON lines (`macmon pipe`), read. Its keys were renamed from release to release: all of them are known here.

| value | 0.6, 0.7 | 0.8 | since |
|---|---|---|---|
| GPU | gpu_usage: [MHz, ratio] | gpu_active_ratio, gpu_freq_mhz, and the old pair | gpu_active_ratio, gpu_freq_mhz |
| CPU | ecpu_usage, pcpu_usage | cpu_active_ratio | cpu_active_ratio |

A ratio "active" is the share of the time in which it worked at all; "scaled" or "usage" counts a lower clock as less.
"""

from __future__ import annotations

import json
import math
from typing import Any, TypedDict


class Gauges(TypedDict, total=False):
    """Fields of NodeTelemetry; one that was not measured is not there."""

    cpu_use: float
    gpu_use: float
    gpu_mhz: float
    memory_used_bytes: int
    swap_used_bytes: int
    power_w: float
    gpu_power_w: float
    cpu_temperature_c: float
    gpu_temperature_c: float
    thermal: str


def macmon(line: str) -> Gauges:
    """What one line tells; empty for one that is not macmon's."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(said, dict):
        return {}
    gauges: Gauges = {}
    cpu = _first(said, "cpu_active_ratio", "cpu_usage_ratio", "cpu_usage_pct", "cpu_scaled_ratio")
    gpu = _first(said, "gpu_active_ratio", "gpu_usage_ratio", "gpu_scaled_ratio")
    megahertz, ratio = _pair(said.get("gpu_usage"))
    gpu = ratio if gpu is None else gpu
    megahertz = _first(said, "gpu_freq_mhz") or megahertz
    if cpu is not None and cpu <= 1.001:
        gauges["cpu_use"] = min(cpu, 1.0)
    if gpu is not None and gpu <= 1.001:
        gauges["gpu_use"] = min(gpu, 1.0)
    if megahertz is not None:
        gauges["gpu_mhz"] = megahertz
    _memory(gauges, said.get("memory"))
    # Machines without the sensor say 0.
    if power := _first(said, "sys_power") or _first(said, "all_power"):
        gauges["power_w"] = power
    if (power := _first(said, "gpu_power")) is not None:
        gauges["gpu_power_w"] = power
    temperatures = said.get("temp")
    if isinstance(temperatures, dict):
        if warm := _first(temperatures, "cpu_temp_avg"):
            gauges["cpu_temperature_c"] = warm
        if warm := _first(temperatures, "gpu_temp_avg"):
            gauges["gpu_temperature_c"] = warm
    return gauges


def _memory(gauges: Gauges, memory: object) -> None:
    if not isinstance(memory, dict):
        return
    if (used := _first(memory, "ram_usage")) is not None:
        gauges["memory_used_bytes"] = int(used)
    if (used := _first(memory, "swap_usage")) is not None:
        gauges["swap_used_bytes"] = int(used)


def number(value: object) -> float | None:
    """A finite number that is not negative, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


def _first(said: dict[str, Any], *names: str) -> float | None:
    return next((found for name in names if (found := number(said.get(name))) is not None), None)


def _pair(value: object) -> tuple[float | None, float | None]:
    return (number(value[0]), number(value[1])) if isinstance(value, list) and len(value) == 2 else (None, None)
