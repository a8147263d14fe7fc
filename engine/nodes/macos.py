"""What macOS says of itself, read: sysctl, vm_stat, sw_vers, system_profiler. Tested on what they print, never run."""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.nodes.words import document, rows, whole, word

_PAGE_SIZE = re.compile(r"page size of (\d{1,9}) bytes")
_PAGES = re.compile(r'^"?([^":\n]{1,60})"?:\s+(\d{1,18})\.?\s*$', re.MULTILINE)
_USED = ("Anonymous pages", "Pages wired down", "Pages occupied by compressor")
_EFFICIENCY = "efficiency"
_LEVELS = 4
_MEGABYTE = 2**20


def sysctl(text: str) -> dict[str, str]:
    """`sysctl NAME…` as name → value; names that a machine lacks are simply not there."""
    pairs = (line.split(": ", 1) for line in text.splitlines() if ": " in line)
    return {name.strip(): value.strip() for name, value in pairs}


def chip(sysctl_text: str) -> str | None:
    """For example "Apple M3 Ultra"."""
    return sysctl(sysctl_text).get("machdep.cpu.brand_string") or None


def memory_total(sysctl_text: str) -> int | None:
    return whole(sysctl(sysctl_text).get("hw.memsize"))


def cores(sysctl_text: str) -> int | None:
    return whole(sysctl(sysctl_text).get("hw.ncpu"))


def performance_cores(sysctl_text: str) -> int | None:
    """Those of every level that is not called Efficiency: the M5 Max has the levels Super and Performance alone."""
    values = sysctl(sysctl_text)
    found = []
    for level in range(_LEVELS):
        name = values.get(f"hw.perflevel{level}.name", "").lower()
        count = whole(values.get(f"hw.perflevel{level}.physicalcpu"))
        if name and count is not None and name != _EFFICIENCY:
            found.append(count)
    return sum(found) if found else None


def gpu_limit(sysctl_text: str) -> int | None:
    """iogpu.wired_limit_mb in bytes; None for 0, which is the system's default."""
    megabytes = whole(sysctl(sysctl_text).get("iogpu.wired_limit_mb"))
    return megabytes * _MEGABYTE if megabytes else None


@dataclass(frozen=True)
class Profile:
    """What `system_profiler SPHardwareDataType SPDisplaysDataType -json` adds to sysctl."""

    model: str | None = None
    chip: str | None = None
    cores: int | None = None
    gpu_cores: int | None = None


def profile(system_profiler: str) -> Profile:
    """`number_processors` is "proc TOTAL:…", and what follows has had three orders: only the total is taken."""
    report = document(system_profiler)
    if not isinstance(report, dict):
        return Profile()
    hardware = next(iter(rows(report.get("SPHardwareDataType"))), {})
    processors = str(hardware.get("number_processors", "")).removeprefix("proc ").partition(":")[0]
    counts = [whole(gpu.get("sppci_cores")) for gpu in rows(report.get("SPDisplaysDataType"))]
    return Profile(
        model=word(hardware.get("machine_model"), 40),
        chip=word(hardware.get("chip_type"), 60),
        cores=whole(processors),
        gpu_cores=max((count for count in counts if count), default=None),
    )


def memory_used(vm_stat: str) -> int | None:
    """Bytes in use as Activity Monitor counts them: applications (anonymous less purgeable), wired, compressed. The
    page size is the one that vm_stat states: 16384 on Apple silicon, 4096 on Intel."""
    size = _PAGE_SIZE.search(vm_stat)
    pages = {name.strip(): int(count) for name, count in _PAGES.findall(vm_stat)}
    if size is None or any(name not in pages for name in _USED):
        return None
    return (sum(pages[name] for name in _USED) - pages.get("Pages purgeable", 0)) * int(size[1])


def os_name(sw_vers: str) -> str | None:
    """For example "macOS 26.4.1 (25E253)"."""
    version, build = os_version(sw_vers)
    if version is None:
        return None
    return f"{_versions(sw_vers).get('ProductName') or 'macOS'} {version}" + (f" ({build})" if build else "")


def os_version(sw_vers: str) -> tuple[str | None, str | None]:
    """(version, build): ("26.4.1", "25E253")."""
    fields = _versions(sw_vers)
    return word(fields.get("ProductVersion"), 20), word(fields.get("BuildVersion"), 20)


def _versions(sw_vers: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in sw_vers.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
