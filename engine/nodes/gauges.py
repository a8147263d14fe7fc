"""What `telemetry_script` sends beside macmon's lines, read: /proc, nvidia-smi, ioreg, sysctl and notifyutil."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from engine.nodes.macmon import Gauges, number

_THERMAL = ("nominal", "moderate", "heavy", "trapping", "sleeping")
"""OSThermalPressureLevel of macOS, by number."""
_LEVEL = re.compile(r"com\.apple\.system\.thermalpressurelevel\s+(\d{1,3})\s*")
_SWAP = re.compile(r"\bused = (\d{1,9}(?:\.\d{1,3})?)([KMGT])")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_DEVICE_USE = re.compile(r'"Device Utilization %"\s*=\s*(\d{1,3})\b')


def cpu_ticks(line: str) -> tuple[int, int] | None:
    """(busy, all) of /proc/stat's first line, in ticks since boot; waiting for a disk is idle."""
    words = line.split()
    if len(words) < 5 or words[0] != "cpu" or not all(word.isdecimal() and len(word) < 20 for word in words[1:]):
        return None
    # guest and guest_nice are counted in user and nice already.
    ticks = [int(word) for word in words[1:9]]
    idle = ticks[3] + (ticks[4] if len(ticks) > 4 else 0)
    return sum(ticks) - idle, sum(ticks)


def mac_cpu_ticks(ticks: object) -> tuple[int, int] | None:
    """(busy, all) of HOST_CPU_LOAD_INFO: user, system, idle, nice."""
    if not isinstance(ticks, list) or len(ticks) != 4 or not all(type(tick) is int and tick >= 0 for tick in ticks):
        return None
    return sum(ticks) - ticks[2], sum(ticks)


def cpu_use(before: tuple[int, int] | None, now: tuple[int, int] | None) -> float | None:
    """The busy share between two readings; None when one is missing or the counters have begun anew."""
    if before is None or now is None:
        return None
    busy, whole = now[0] - before[0], now[1] - before[1]
    return busy / whole if 0 <= busy <= whole != 0 else None


def linux_swap_used(meminfo: str) -> int | None:
    """Bytes, of /proc/meminfo."""
    fields = {name: words[0] for name, _, value in map(_colon, meminfo.splitlines()) if (words := value.split())}
    total, free = fields.get("SwapTotal", ""), fields.get("SwapFree", "")
    if not (total.isdecimal() and free.isdecimal() and len(total) < 16 and len(free) < 16):
        return None
    return max(0, int(total) - int(free)) * 1024


def _colon(line: str) -> tuple[str, str, str]:
    return line.partition(":")


def mac_swap_used(swapusage: str) -> int | None:
    """Bytes, of `sysctl vm.swapusage`: "… used = 512.25M …"."""
    found = _SWAP.search(swapusage)
    return int(float(found[1]) * _UNITS[found[2]]) if found else None


def mac_gpu_use(ioreg: str) -> float | None:
    """Of the busiest accelerator in `ioreg -r -d 1 -c IOAccelerator`."""
    shares = [int(share) for share in _DEVICE_USE.findall(ioreg)]
    return min(max(shares), 100) / 100 if shares else None


def mac_thermal(notifyutil: str) -> str | None:
    """The word for `notifyutil -g com.apple.system.thermalpressurelevel`."""
    found = _LEVEL.fullmatch(notifyutil.strip())
    level = int(found[1]) if found else len(_THERMAL)
    return _THERMAL[level] if level < len(_THERMAL) else None


def nvidia(lines: Iterable[str]) -> Gauges:
    """Of nvidia-smi's CSV lines (index, use %, MHz, W, °C): the newest of each GPU; use is the mean over the GPUs,
    power their sum, clock and temperature those of the highest."""
    newest: dict[str, Sequence[str]] = {}
    for line in lines:
        words = [word.strip() for word in line.split(",")]
        if len(words) == 5 and words[0].isdecimal():
            newest[words[0]] = words[1:]
    columns = [[value for words in newest.values() if (value := _number(words[at])) is not None] for at in range(4)]
    use, clocks, power, temperatures = columns
    gauges: Gauges = {}
    if use and max(use) <= 100:
        gauges["gpu_use"] = sum(use) / len(use) / 100
    if clocks:
        gauges["gpu_mhz"] = max(clocks)
    if power:
        gauges["gpu_power_w"] = sum(power)
    if temperatures:
        gauges["gpu_temperature_c"] = max(temperatures)
    return gauges


def _number(text: str) -> float | None:
    try:
        return number(float(text))
    except ValueError:
        # "[N/A]", "[Not Supported]".
        return None
