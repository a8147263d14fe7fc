"""What Linux says of itself, read: /proc/cpuinfo, /proc/meminfo, /etc/os-release, nvidia-smi."""

from __future__ import annotations

import shlex

from engine.nodes.words import whole

_MIB = 2**20


def chip(cpuinfo: str) -> str | None:
    """The processor's name: x86 has "model name"; some ARM boards have "Hardware" or "Model" alone."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, colon, value = line.partition(":")
        if colon and value.strip():
            fields.setdefault(name.strip().lower(), value.strip())
    return fields.get("model name") or fields.get("hardware") or fields.get("model")


def memory(meminfo: str) -> tuple[int | None, int | None]:
    """(total, used) in bytes: used is what is not available without swapping."""
    fields = _meminfo(meminfo)
    total, available = fields.get("MemTotal"), fields.get("MemAvailable")
    return total, None if total is None or available is None else max(0, total - available)


def _meminfo(text: str) -> dict[str, int]:
    """In bytes."""
    fields: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB" and (count := whole(words[0])) is not None:
            fields[name] = count * 1024
    return fields


def gpu_memory(nvidia_smi: str) -> int | None:
    """Bytes of one GPU, the smallest: a rank has one of them. From `--query-gpu=name,memory.total` in MiB."""
    counts = [whole(line.rpartition(",")[2]) for line in nvidia_smi.splitlines()]
    return min((count * _MIB for count in counts if count), default=None)


def os_version(os_release: str) -> str | None:
    """VERSION_ID, for example "12"."""
    return _release(os_release, "VERSION_ID")


def os_name(os_release: str) -> str | None:
    """PRETTY_NAME, for example "Debian GNU/Linux 12 (bookworm)"."""
    return _release(os_release, "PRETTY_NAME")


def _release(text: str, wanted: str) -> str | None:
    for line in text.splitlines():
        name, _, value = line.partition("=")
        if name == wanted:
            try:
                return " ".join(shlex.split(value)) or None
            except ValueError:
                return None
    return None
