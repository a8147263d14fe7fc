"""What macOS says of itself, read: sysctl, vm_stat, sw_vers. Tested on what these commands print, not run here."""

from __future__ import annotations

import re

_PAGE_SIZE = re.compile(r"page size of (\d+) bytes")
_PAGES = re.compile(r'^"?([^":]+)"?:\s+(\d+)\.?\s*$', re.MULTILINE)
_USED = ("Anonymous pages", "Pages wired down", "Pages occupied by compressor")


def sysctl(text: str) -> dict[str, str]:
    """`sysctl NAME…` as name → value; names that a machine lacks are simply not there."""
    pairs = (line.split(": ", 1) for line in text.splitlines() if ": " in line)
    return {name.strip(): value.strip() for name, value in pairs}


def chip(sysctl_text: str) -> str | None:
    """For example "Apple M3 Ultra"."""
    return sysctl(sysctl_text).get("machdep.cpu.brand_string") or None


def memory_total(sysctl_text: str) -> int | None:
    value = sysctl(sysctl_text).get("hw.memsize", "")
    return int(value) if value.isdecimal() else None


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
    fields = {}
    for line in sw_vers.splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    version = fields.get("ProductVersion")
    if not version:
        return None
    build = fields.get("BuildVersion")
    return f"{fields.get('ProductName') or 'macOS'} {version}" + (f" ({build})" if build else "")
