"""Parsers for a node's hardware and operating system: sysctl, vm_stat, sw_vers and system_profiler of macOS; /proc,
os-release and nvidia-smi of Linux; and a table of Apple's chips. What a machine reports takes precedence over the
table.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from engine.security.sanitise import count_or_none, json_objects, json_or_none, text_or_none


@dataclass(frozen=True)
class Chip:
    memory_gb_s: Mapping[int, float]
    """Number of GPU cores → memory bandwidth, GB/s (10^9): one entry for each variant sold."""
    thunderbolt: int
    """Generation of the ports of Macs with it; RDMA needs 5."""

    @property
    def gpu_cores(self) -> int | None:
        """None where the variants differ."""
        return next(iter(self.memory_gb_s)) if len(self.memory_gb_s) == 1 else None


# Apple's technical specifications of the Macs with each chip (support.apple.com, "Tech Specs"), as sold until mid-2026.
# Thunderbolt: the M3 Ultra has 5 while the other M3's have 4 and less; base chips have 4 at most.
CHIPS: Mapping[str, Chip] = {
    "Apple M1": Chip({7: 68, 8: 68}, 3),
    "Apple M1 Pro": Chip({14: 200, 16: 200}, 4),
    "Apple M1 Max": Chip({24: 400, 32: 400}, 4),
    "Apple M1 Ultra": Chip({48: 800, 64: 800}, 4),
    "Apple M2": Chip({8: 100, 10: 100}, 4),
    "Apple M2 Pro": Chip({16: 200, 19: 200}, 4),
    "Apple M2 Max": Chip({30: 400, 38: 400}, 4),
    "Apple M2 Ultra": Chip({60: 800, 76: 800}, 4),
    "Apple M3": Chip({8: 100, 10: 100}, 4),
    "Apple M3 Pro": Chip({14: 150, 18: 150}, 4),
    "Apple M3 Max": Chip({30: 300, 40: 400}, 4),
    "Apple M3 Ultra": Chip({60: 819, 80: 819}, 5),
    "Apple M4": Chip({8: 120, 10: 120}, 4),
    "Apple M4 Pro": Chip({16: 273, 20: 273}, 5),
    "Apple M4 Max": Chip({32: 410, 40: 546}, 5),
    "Apple M5": Chip({8: 153, 10: 153}, 4),
    "Apple M5 Pro": Chip({16: 307, 20: 307}, 5),
    "Apple M5 Max": Chip({32: 460, 40: 614}, 5),
}

# The port next to Ethernet: https://github.com/exo-explore/exo/pull/1551. By model: M4 Max and M3 Ultra Mac Studio.
_WITHOUT_RDMA = {"Mac16,9": "en2", "Mac15,14": "en2"}


def apple_chip(name: str | None) -> Chip | None:
    """`name` is sysctl's, for example "Apple M3 Ultra"."""
    return CHIPS.get(name or "")


def port_without_rdma(model: str | None) -> str | None:
    """The interface of this model's one Thunderbolt 5 port that has no RDMA."""
    return _WITHOUT_RDMA.get(model or "")


_PAGE_SIZE = re.compile(r"page size of (\d{1,9}) bytes")
_PAGES = re.compile(r'^"?([^":\n]{1,60})"?:\s+(\d{1,18})\.?\s*$', re.MULTILINE)
_USED = ("Anonymous pages", "Pages wired down", "Pages occupied by compressor")
_EFFICIENCY = "efficiency"
_LEVELS = 4
_MIB = 2**20


def parse_sysctl(text: str) -> dict[str, str]:
    """`sysctl NAME…` as name → value, without names that the machine does not have."""
    return _fields(text, ": ")


def mac_performance_cores(sysctl: Mapping[str, str]) -> int | None:
    """The cores of every level but Efficiency: the M5 Max has only the levels Super and Performance."""
    found = []
    for level in range(_LEVELS):
        name = sysctl.get(f"hw.perflevel{level}.name", "").lower()
        count = count_or_none(sysctl.get(f"hw.perflevel{level}.physicalcpu"))
        if name and count is not None and name != _EFFICIENCY:
            found.append(count)
    return sum(found) if found else None


def mac_gpu_limit(sysctl: Mapping[str, str]) -> int | None:
    """iogpu.wired_limit_mb in bytes; None for 0, which is the system's default."""
    megabytes = count_or_none(sysctl.get("iogpu.wired_limit_mb"))
    return megabytes * _MIB if megabytes else None


@dataclass(frozen=True)
class MacProfile:
    """Values of `system_profiler SPHardwareDataType SPDisplaysDataType -json` that sysctl does not have."""

    model: str | None = None
    chip: str | None = None
    cores: int | None = None
    gpu_cores: int | None = None


def mac_profile(system_profiler: str) -> MacProfile:
    """`number_processors` is "proc TOTAL:…"; the order of what follows has changed, so only the total is used."""
    report = json_or_none(system_profiler)
    if not isinstance(report, dict):
        return MacProfile()
    hardware = next(iter(json_objects(report.get("SPHardwareDataType"))), {})
    processors = str(hardware.get("number_processors", "")).removeprefix("proc ").partition(":")[0]
    counts = [count_or_none(gpu.get("sppci_cores")) for gpu in json_objects(report.get("SPDisplaysDataType"))]
    return MacProfile(
        model=text_or_none(hardware.get("machine_model"), 40),
        chip=text_or_none(hardware.get("chip_type"), 60),
        cores=count_or_none(processors),
        gpu_cores=max((count for count in counts if count), default=None),
    )


def mac_memory_used(vm_stat: str) -> int | None:
    """Bytes in use as Activity Monitor counts them: applications (anonymous less purgeable), wired, compressed. The
    page size is part of the output: 16384 on Apple silicon, 4096 on Intel."""
    size = _PAGE_SIZE.search(vm_stat)
    pages = {name.strip(): int(count) for name, count in _PAGES.findall(vm_stat)}
    if size is None or any(name not in pages for name in _USED):
        return None
    return (sum(pages[name] for name in _USED) - pages.get("Pages purgeable", 0)) * int(size[1])


def mac_os(sw_vers: str) -> tuple[str | None, str | None, str | None]:
    """(name, version, build), for example ("macOS 26.4.1 (25E253)", "26.4.1", "25E253")."""
    fields = _fields(sw_vers, ":")
    version, build = text_or_none(fields.get("ProductVersion"), 20), text_or_none(fields.get("BuildVersion"), 20)
    name = f"{fields.get('ProductName') or 'macOS'} {version}" + (f" ({build})" if build else "")
    return name if version is not None else None, version, build


def _fields(text: str, separator: str) -> dict[str, str]:
    """Lines of `name SEPARATOR value`; of equal names the first counts."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(separator)
        if value.strip():
            found.setdefault(name.strip(), value.strip())
    return found


def linux_chip(cpuinfo: str) -> str | None:
    """The processor's name: x86 has "model name"; some ARM boards have only "Hardware" or "Model"."""
    fields = {name.lower(): value for name, value in _fields(cpuinfo, ":").items()}
    return fields.get("model name") or fields.get("hardware") or fields.get("model")


def linux_memory(meminfo: str) -> tuple[int | None, int | None, int | None]:
    """(total, used, swap used) in bytes; used is the total less MemAvailable."""
    sizes = {}
    for name, value in _fields(meminfo, ":").items():
        count = count_or_none(value.removesuffix(" kB"))
        sizes[name] = count * 1024 if count is not None and value.endswith(" kB") else None
    return sizes.get("MemTotal"), _used(sizes, "MemTotal", "MemAvailable"), _used(sizes, "SwapTotal", "SwapFree")


def _used(sizes: Mapping[str, int | None], total: str, free: str) -> int | None:
    whole, rest = sizes.get(total), sizes.get(free)
    return max(0, whole - rest) if whole is not None and rest is not None else None


def nvidia_gpu_memory(nvidia_smi: str) -> int | None:
    """Bytes of the smallest GPU, as a rank uses one. From `--query-gpu=name,memory.total`, in MiB."""
    counts = [count_or_none(line.rpartition(",")[2]) for line in nvidia_smi.splitlines()]
    return min((count * _MIB for count in counts if count), default=None)


def linux_os(os_release: str) -> tuple[str | None, str | None]:
    """(PRETTY_NAME, VERSION_ID), for example ("Debian GNU/Linux 12 (bookworm)", "12")."""
    fields = _fields(os_release, "=")
    return _unquoted(fields.get("PRETTY_NAME", "")), _unquoted(fields.get("VERSION_ID", ""))


def _unquoted(value: str) -> str | None:
    try:
        return " ".join(shlex.split(value)) or None
    except ValueError:
        return None
