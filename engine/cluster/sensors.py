"""Parsers for utilisation, power and temperature: macmon, ioreg, pmset, notifyutil and sysctl of macOS; /proc, power
supplies, thermal zones and nvidia-smi of Linux.

`macmon pipe` prints JSON lines whose keys differ by release; all are supported:
    0.6, 0.7   gpu_usage: [MHz, ratio]                             ecpu_usage, pcpu_usage
    0.8        gpu_active_ratio, gpu_freq_mhz, and the old pair    cpu_active_ratio
    later      gpu_active_ratio, gpu_freq_mhz                      cpu_active_ratio
An "active" ratio is the share of time in which the unit did any work; "scaled" or "usage" weights it by the clock."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from engine.models import GpuMemory
from engine.security.sanitise import (
    count_or_none,
    finite_or_none,
    json_object,
    json_objects,
    json_or_none,
    text_or_none,
)

Readings = dict[str, float]
"""Fields of NodeTelemetry, without those that were not measured."""


def parse_macmon(line: str) -> Readings:
    """Empty for a line that is not macmon's."""
    sample = json_object(json_or_none(line))
    old = sample.get("gpu_usage")
    megahertz, ratio = map(number, old) if isinstance(old, list) and len(old) == 2 else (None, None)
    gpu_use = _first(sample, "gpu_active_ratio", "gpu_usage_ratio", "gpu_scaled_ratio")
    memory, temperatures = (json_object(sample.get(name)) for name in ("memory", "temp"))
    # Machines without a sensor report 0 for its power or temperature.
    return _measured(
        cpu_use=_share(_first(sample, "cpu_active_ratio", "cpu_usage_ratio", "cpu_usage_pct", "cpu_scaled_ratio")),
        gpu_use=_share(ratio if gpu_use is None else gpu_use),
        gpu_mhz=_first(sample, "gpu_freq_mhz") or megahertz,
        memory_used_bytes=count_or_none(memory.get("ram_usage")),
        swap_used_bytes=count_or_none(memory.get("swap_usage")),
        power_w=_first(sample, "sys_power") or _first(sample, "all_power") or None,
        gpu_power_w=_first(sample, "gpu_power"),
        cpu_temperature_c=_first(temperatures, "cpu_temp_avg") or None,
        gpu_temperature_c=_first(temperatures, "gpu_temp_avg") or None,
    )


def _measured(**values: float | None) -> Readings:
    return {name: value for name, value in values.items() if value is not None}


def number(value: object) -> float | None:
    """A finite number that is not negative, else None."""
    return finite if (finite := finite_or_none(value)) is not None and finite >= 0 else None


def _first(sample: Mapping[str, Any], *names: str) -> float | None:
    return next((value for name in names if (value := number(sample.get(name))) is not None), None)


def _share(value: float | None) -> float | None:
    return min(value, 1.0) if value is not None and value <= 1.001 else None


_THERMAL = ("nominal", "moderate", "heavy", "trapping", "sleeping")
"""OSThermalPressureLevel of macOS, from 0."""
_LEVEL = re.compile(r"com\.apple\.system\.thermalpressurelevel\s+(\d{1,3})\s*")
_SWAP = re.compile(r"\bused = (\d{1,9}(?:\.\d{1,3})?)([KMGT])")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_DEVICE_USE = re.compile(r'"Device Utilization %"\s*=\s*(\d{1,3})\s*[,}]')


def cpu_ticks(line: str) -> tuple[int, int] | None:
    """(busy, total) of the first line of /proc/stat, in ticks since boot; iowait counts as idle."""
    words = line.split()
    if len(words) < 5 or words[0] != "cpu" or not all(word.isdecimal() and len(word) < 20 for word in words[1:]):
        return None
    # guest and guest_nice are included in user and nice.
    ticks = [int(word) for word in words[1:9]]
    idle = ticks[3] + (ticks[4] if len(ticks) > 4 else 0)
    return sum(ticks) - idle, sum(ticks)


def mac_cpu_ticks(ticks: object) -> tuple[int, int] | None:
    """(busy, total) of HOST_CPU_LOAD_INFO: user, system, idle, nice."""
    if not isinstance(ticks, list) or len(ticks) != 4 or not all(type(tick) is int and tick >= 0 for tick in ticks):
        return None
    return sum(ticks) - ticks[2], sum(ticks)


def cpu_use(before: tuple[int, int] | None, now: tuple[int, int] | None) -> float | None:
    """The busy share between two readings; None when one is missing or the counters were reset."""
    if before is None or now is None:
        return None
    busy, whole = now[0] - before[0], now[1] - before[1]
    return busy / whole if 0 <= busy <= whole != 0 else None


class Traffic(NamedTuple):
    """Counters since boot, over all interfaces but the loopback."""

    at: float
    """Seconds on the node's monotonic clock."""
    received: int
    sent: int
    """Bytes."""


def traffic(report: object) -> Traffic | None:
    """From a time and /proc/net/dev, or `netstat -ibn` of macOS."""
    if not (isinstance(report, list) and len(report) == 2 and isinstance(report[1], str)):
        return None
    at, counters = number(report[0]), list[list[int]]()
    for line in report[1].splitlines():
        name, colon, words = line.partition(":")
        if colon and len(fields := words.split()) == 16:
            places = fields[0], fields[8]
        elif len(fields := line.split()) >= 10 and fields[2].startswith("<Link#"):
            # An interface without an address has a column less.
            name, places = fields[0], (fields[-5], fields[-2])
        else:
            continue
        if not name.strip().startswith("lo") and all(place.isdecimal() and len(place) < 20 for place in places):
            counters.append([int(place) for place in places])
    return Traffic(at, *map(sum, zip(*counters, strict=True))) if at is not None and counters else None


def traffic_rates(before: Traffic | None, now: Traffic | None) -> Readings:
    """Fields of NodeTelemetry between two readings; none when one is missing or a counter was reset."""
    if before is None or now is None or now.at <= before.at:
        return {}
    seconds, received, sent = (later - earlier for earlier, later in zip(before, now, strict=True))
    if min(received, sent) < 0:
        return {}
    return {"received_bytes_per_s": received / seconds, "sent_bytes_per_s": sent / seconds}


def mac_swap_used(swapusage: str) -> int | None:
    """Bytes, from `sysctl vm.swapusage`: "… used = 512.25M …"."""
    return int(float(used[1]) * _UNITS[used[2]]) if (used := _SWAP.search(swapusage)) else None


def mac_gpu_use(ioreg: str) -> float | None:
    """The busiest accelerator in `ioreg -r -d 1 -c IOAccelerator`, 0 to 1."""
    shares = [int(share) for share in _DEVICE_USE.findall(ioreg)]
    return min(max(shares), 100) / 100 if shares else None


def mac_thermal_pressure(notifyutil: str) -> str | None:
    """The name of the level in `notifyutil -g com.apple.system.thermalpressurelevel`."""
    match = _LEVEL.fullmatch(notifyutil.strip())
    level = int(match[1]) if match else len(_THERMAL)
    return _THERMAL[level] if level < len(_THERMAL) else None


def parse_nvidia_smi(lines: Iterable[str]) -> tuple[Readings, tuple[GpuMemory, ...]]:
    """nvidia-smi's CSV lines (index, use %, MHz, W, °C, MiB used, MiB in all): the last of each GPU counts. Use is the
    mean of the GPUs, power the sum, clock and temperature the maximum; memory is each one's, in their order."""
    newest: dict[int, Sequence[float | None]] = {}
    for line in lines:
        index, *words = (word.strip() for word in line.split(","))
        if len(words) == 6 and index.isdecimal() and len(index) <= 4:
            newest[int(index)] = [_number(word) for word in words]
    columns = [[value for row in newest.values() if (value := row[at]) is not None] for at in range(4)]
    use, clocks, power, temperatures = columns
    readings = _measured(
        gpu_use=sum(use) / len(use) / 100 if use and max(use) <= 100 else None,
        gpu_mhz=max(clocks, default=None),
        gpu_power_w=sum(power) if power else None,
        gpu_temperature_c=max(temperatures, default=None),
    )
    sizes = {index: [None if size is None else int(size) * 2**20 for size in row[4:]] for index, row in newest.items()}
    memory = [
        GpuMemory(index=index, used_bytes=used, total_bytes=total or None)
        for index, (used, total) in sorted(sizes.items())
    ]
    return readings, tuple(memory)


def _number(text: str) -> float | None:
    try:
        return number(float(text))
    except ValueError:
        # "[N/A]", "[Not Supported]".
        return None


_SOURCE = re.compile(r"Now drawing from '([^']{1,40})'")
_CHARGE = re.compile(r"InternalBattery\S*.*?\b(\d{1,3})%")
_POWER_MODE = re.compile(r"^\s*(low)?powermode\s+([0-2])\b", re.MULTILINE)
_SPEED_LIMIT = re.compile(r"^\s*CPU_Speed_Limit\s*=\s*(\d{1,3})\s*\n", re.MULTILINE)
_WARNING_LEVEL = re.compile(
    r"^(?:Note: )?(Thermal|CPU Power|Performance) Warning Level\D{0,20}(\d{1,2})\b", re.I | re.MULTILINE
)
_NO_LEVELS = ("No thermal warning level has been recorded", "No performance warning level has been recorded")


def mac_power_source(pmset_batt: str) -> str | None:
    """ "AC", "battery 63 %", or another source as the system names it ("UPS Power")."""
    drawing = _SOURCE.search(pmset_batt)
    if drawing is None:
        return None
    if drawing[1] == "AC Power":
        return "AC"
    if drawing[1] != "Battery Power":
        return text_or_none(drawing[1], 40)
    charge = _CHARGE.search(pmset_batt)
    return f"battery {min(int(charge[1]), 100)} %" if charge else "battery"


def mac_low_power_mode(pmset: str) -> bool | None:
    """`pmset -g`: lowpowermode, or powermode 1 on Macs with a high power mode as well."""
    modes = dict(_POWER_MODE.findall(pmset))
    mode = modes.get("low", modes.get(""))
    return mode == "1" if mode else None


def mac_thermal_warning(pmset_therm: str) -> str | None:
    """ "nominal", or how `pmset -g therm` describes the throttling."""
    limit = _SPEED_LIMIT.search(pmset_therm)
    if limit is not None and int(limit[1]) < 100:
        return f"CPU limited to {int(limit[1])} %"
    for level in _WARNING_LEVEL.finditer(pmset_therm):
        if level[2] != "0":
            return f"{level[1].lower()} warning level {level[2]}"
    return "nominal" if limit is not None or all(text in pmset_therm for text in _NO_LEVELS) else None


def linux_power_source(power_supply: object) -> str | None:
    """From the probe's list of /sys/class/power_supply; None where that is empty, as on most servers."""
    # A mouse's battery has the scope "Device".
    supplies = [row for row in json_objects(power_supply) if row.get("scope") != "Device"]
    batteries = [row for row in supplies if row.get("type") == "Battery"]
    mains = [row for row in supplies if row.get("type") in ("Mains", "USB")]
    if any(row.get("online") == "1" for row in mains):
        return "AC"
    if not batteries:
        return None
    if not mains and all(row.get("status") != "Discharging" for row in batteries):
        return "AC"
    charge = count_or_none(batteries[0].get("capacity"))
    return f"battery {charge} %" if charge is not None and charge <= 100 else "battery"


def linux_low_power_mode(platform_profile: str) -> bool | None:
    profile = platform_profile.strip()
    return profile in ("low-power", "quiet") if profile else None


def linux_thermal(zones: object) -> str | None:
    """ "nominal", or the first zone above one of its limits; None where there are no zones."""
    listed = json_objects(zones)
    for zone in listed:
        temperature = count_or_none(zone.get("temp"))
        for point in range(6):
            kind, limit = zone.get(f"trip_point_{point}_type"), count_or_none(zone.get(f"trip_point_{point}_temp"))
            if temperature and limit and kind in ("passive", "hot", "critical") and temperature >= limit:
                name = text_or_none(zone.get("type"), 40) or "a zone"
                return f"{name} at {temperature / 1000:.0f} °C, {kind} limit {limit / 1000:.0f} °C"
    return "nominal" if listed else None
