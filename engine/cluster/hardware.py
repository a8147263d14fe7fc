"""Parsers for a node's hardware and operating system: sysctl, vm_stat, sw_vers and system_profiler of macOS; /proc,
os-release and nvidia-smi of Linux; and what is known of Apple's chips and models."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from engine.models import NvidiaGpu
from engine.security.sanitise import count_or_none, json_object, json_objects, json_or_none, plain, text_or_none

# Apple's technical specifications of the Macs with each chip (support.apple.com, "Tech Specs"), as sold until mid-2026.
# The M3 Ultra has 5 while the other M3's have 4 and less; base chips have 4 at most.
THUNDERBOLT_GENERATIONS: Mapping[str, int] = {
    "Apple M1": 3, "Apple M1 Pro": 4, "Apple M1 Max": 4, "Apple M1 Ultra": 4,
    "Apple M2": 4, "Apple M2 Pro": 4, "Apple M2 Max": 4, "Apple M2 Ultra": 4,
    "Apple M3": 4, "Apple M3 Pro": 4, "Apple M3 Max": 4, "Apple M3 Ultra": 5,
    "Apple M4": 4, "Apple M4 Pro": 5, "Apple M4 Max": 5,
    "Apple M5": 4, "Apple M5 Pro": 5, "Apple M5 Max": 5,
}  # fmt: skip
"""Generation of the ports of Macs with a chip, by sysctl's name of it; RDMA needs 5."""

# The port next to Ethernet: https://github.com/exo-explore/exo/pull/1551. By model: M4 Max and M3 Ultra Mac Studio.
PORT_WITHOUT_RDMA = {"Mac16,9": "en2", "Mac15,14": "en2"}
"""Model -> the interface of its one Thunderbolt 5 port that has no RDMA."""

_PAGE_SIZE = re.compile(r"page size of (\d{1,9}) bytes")
_PAGES = re.compile(r'^"?([^":\n]{1,60})"?:\s+(\d{1,12})\.\s*$', re.MULTILINE)
_USED = ("Anonymous pages", "Pages wired down", "Pages occupied by compressor")
_PURGEABLE = "Pages purgeable"
_EFFICIENCY = "Efficiency"
_LEVELS = 4
_MIB = 2**20


def parse_sysctl(text: str) -> dict[str, str]:
    """`sysctl NAME…` as name → value, without names that the machine does not have, and without a last line that has
    been cut off."""
    return _fields(text.rpartition("\n")[0], ": ")


def mac_performance_cores(sysctl: Mapping[str, str]) -> int | None:
    """The cores of every level but Efficiency: the M5 Max has only the levels Super and Performance. None where not all
    levels are known."""
    number = count_or_none(sysctl.get("hw.nperflevels")) or 0
    levels = [f"hw.perflevel{level}" for level in range(min(number, _LEVELS))]
    counts = [count_or_none(sysctl.get(f"{level}.physicalcpu")) for level in levels]
    names = [sysctl.get(f"{level}.name") for level in levels]
    if number > _LEVELS or None in (*counts, *names):
        return None
    return sum(count or 0 for count, name in zip(counts, names, strict=True) if name != _EFFICIENCY) or None


def mac_gpu_limit(sysctl: Mapping[str, str]) -> int | None:
    """iogpu.wired_limit_mb in bytes; None for 0, which is the system's default."""
    megabytes = count_or_none(sysctl.get("iogpu.wired_limit_mb"))
    return megabytes * _MIB if megabytes else None


def mac_gpu_cores(system_profiler: str) -> int | None:
    """From `system_profiler SPDisplaysDataType -json`."""
    report = json_object(json_or_none(system_profiler))
    counts = [count_or_none(gpu.get("sppci_cores")) for gpu in json_objects(report.get("SPDisplaysDataType"))]
    return max((count for count in counts if count), default=None)


def mac_memory_used(vm_stat: str) -> int | None:
    """Bytes in use as Activity Monitor counts them: applications (anonymous less purgeable), wired, compressed. The
    page size is part of the output: 16384 on Apple silicon, 4096 on Intel."""
    size = _PAGE_SIZE.search(vm_stat)
    pages = {name.strip(): int(count) for name, count in _PAGES.findall(vm_stat)}
    if size is None or any(name not in pages for name in (*_USED, _PURGEABLE)):
        return None
    return count_or_none((sum(pages[name] for name in _USED) - pages[_PURGEABLE]) * int(size[1]))


def mac_os(sw_vers: str) -> tuple[str | None, str | None, str | None]:
    """(name, version, build), for example ("macOS 26.4.1 (25E253)", "26.4.1", "25E253"). A line that does not end has
    been cut off."""
    fields = _fields(sw_vers.rpartition("\n")[0], ":")
    version, build = fields.get("ProductVersion", ""), fields.get("BuildVersion")
    if not re.fullmatch(r"\d{1,4}(\.\d{1,4}){0,3}", version, re.ASCII):
        return None, None, None
    build = build if build and re.fullmatch(r"[0-9A-Za-z]{1,20}", build) else None
    return f"{fields.get('ProductName') or 'macOS'} {version}" + (f" ({build})" if build else ""), version, build


def _fields(text: str, separator: str) -> dict[str, str]:
    """Lines of `name SEPARATOR value`; of equal names the first counts."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(separator)
        # Bytes that are no text are no value.
        if value.strip() and "\ufffd" not in line:
            values.setdefault(name.strip(), value.strip())
    return values


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


def nvidia_gpus(nvidia_smi: str, more: str = "") -> tuple[NvidiaGpu, ...]:
    """From `--query-gpu=name,memory.total,uuid,driver_version`, in MiB, and of `more`, `uuid,compute_cap,
    mig.mode.current`. What a GPU does not report ("[N/A]", "[Not Supported]") is None."""
    details = {words[0]: words[1:] for line in more.splitlines() if len(words := _columns(line)) == 3}
    gpus = []
    for line in nvidia_smi.splitlines():
        name, memory, uuid, _ = words if len(words := _columns(line)) == 4 else ("", "", "", "")
        if name and _UUID.fullmatch(uuid):
            capability, mig = details.get(uuid, ("", ""))
            gpus.append(
                NvidiaGpu(
                    name=plain(name, 60),
                    uuid=uuid,
                    memory_bytes=(count_or_none(memory) or 0) * _MIB or None,
                    compute_capability=capability if _VERSION.fullmatch(capability) else None,
                    mig={"Enabled": True, "Disabled": False}.get(mig),
                )
            )
    return tuple(gpus)


def mlx_gpus(devices: object, listed: Sequence[NvidiaGpu]) -> tuple[NvidiaGpu, ...]:
    """From MLX's device_info of each GPU that it can use (mlx/backend/cuda/device_info.cpp), in the order in which
    nvidia-smi has listed them. Parts of a divided one (MIG) have a uuid that CUDA_VISIBLE_DEVICES does not take."""
    uuids, gpus = [gpu.uuid for gpu in listed], []
    for device in map(json_object, devices[:_MOST_GPUS] if isinstance(devices, list) else ()):
        uuid = text_or_none(device.get("uuid"), 80) or ""
        capability = [count_or_none(device.get(f"compute_capability_{part}")) for part in ("major", "minor")]
        gpu = NvidiaGpu(
            name=text_or_none(device.get("device_name"), 60) or "NVIDIA GPU",
            uuid=uuid if uuid in uuids or (not listed and _UUID.fullmatch(uuid)) else None,
            memory_bytes=count_or_none(device.get("total_memory")),
            free_bytes=count_or_none(device.get("free_memory")),
            compute_capability=".".join(map(str, capability)) if None not in capability else None,
            mig=uuid not in uuids if listed else None,
        )
        gpus.append(gpu)
    return tuple(sorted(gpus, key=lambda gpu: uuids.index(gpu.uuid) if gpu.uuid in uuids else 0))


def nvidia_versions(nvidia_smi: str, table: str) -> tuple[str | None, str | None]:
    """(driver, newest CUDA that it supports), from the same query and from the table that nvidia-smi prints alone."""
    drivers = [words[3] for line in nvidia_smi.splitlines() if len(words := _columns(line)) == 4]
    cuda = re.search(r"CUDA Version:\s{0,9}(\d{1,3}\.\d{1,3})", table)
    return next(filter(_VERSION.fullmatch, drivers), None), cuda[1] if cuda else None


_MOST_GPUS = 64
_UUID = re.compile(r"[A-Z]{2,8}-[0-9a-f-]{8,60}")
_VERSION = re.compile(r"\d{1,5}(?:\.\d{1,5}){1,3}", re.ASCII)


def _columns(line: str) -> list[str]:
    return [word.strip() for word in line.split(",")]


def linux_os(os_release: str) -> tuple[str | None, str | None]:
    """(PRETTY_NAME, VERSION_ID), for example ("Debian GNU/Linux 12 (bookworm)", "12")."""
    fields = _fields(os_release, "=")
    return _unquoted(fields.get("PRETTY_NAME", "")), _unquoted(fields.get("VERSION_ID", ""))


def _unquoted(value: str) -> str | None:
    try:
        return " ".join(shlex.split(value)) or None
    except ValueError:
        return None
