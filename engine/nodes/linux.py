"""What Linux says of itself, read: /proc/cpuinfo, /proc/meminfo, /etc/os-release."""

from __future__ import annotations

import shlex


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
    fields: dict[str, int] = {}
    for line in meminfo.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[0].isdecimal() and words[1] == "kB":
            fields[name] = int(words[0]) * 1024
    total, available = fields.get("MemTotal"), fields.get("MemAvailable")
    return total, None if total is None or available is None else max(0, total - available)


def os_name(os_release: str) -> str | None:
    """PRETTY_NAME, for example "Debian GNU/Linux 12 (bookworm)"."""
    for line in os_release.splitlines():
        name, _, value = line.partition("=")
        if name == "PRETTY_NAME":
            try:
                return " ".join(shlex.split(value)) or None
            except ValueError:
                return None
    return None
