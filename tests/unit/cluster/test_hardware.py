"""What Linux and macOS print, read; the samples have the form of recorded ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cluster import hardware
from engine.cluster.facts import read_facts

VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                                    4000.
Pages active:                                195000.
Pages inactive:                              191000.
Pages speculative:                             3000.
Pages throttled:                                  0.
Pages wired down:                            159000.
Pages purgeable:                               1000.
"Translation faults":                     574000000.
Pages copy-on-write:                       38000000.
File-backed pages:                           141000.
Anonymous pages:                             247000.
Pages stored in compressor:                 1022000.
Pages occupied by compressor:                454000.
"""
SYSCTL = "hw.memsize: 549755813888\nmachdep.cpu.brand_string: Apple M3 Ultra\nhw.model: Mac15,14\n"
SW_VERS = "ProductName:\t\tmacOS\nProductVersion:\t\t26.4.1\nBuildVersion:\t\t25E253\n"

MEMINFO = (
    "MemTotal:       24684092 kB\nMemFree:        20000000 kB\nMemAvailable:   23684092 kB\nHugePages_Total:       0\n"
    "SwapTotal: 2097152 kB\nSwapFree: 1048576 kB\n"
)
X86 = "processor\t: 0\nmodel name\t: AMD EPYC\n\nprocessor\t: 1\nmodel name\t: AMD EPYC\n"
RASPBERRY = "processor\t: 0\nBogoMIPS\t: 108.00\n\nHardware\t: BCM2835\nModel\t\t: Raspberry Pi 4 Model B\n"
ARM_SERVER = "processor\t: 0\nBogoMIPS\t: 243.75\nCPU implementer\t: 0x41\n"


def test_a_mac() -> None:
    facts = read_facts({"system": "Darwin", "answers": {"sysctl": SYSCTL}})
    assert (facts["chip"], facts["memory_total_bytes"]) == ("Apple M3 Ultra", 512 * 2**30)
    assert hardware.mac_memory_used(VM_STAT) == (247_000 + 159_000 + 454_000 - 1000) * 16384
    assert hardware.mac_os(SW_VERS) == ("macOS 26.4.1 (25E253)", "26.4.1", "25E253")


def test_an_intel_mac_has_smaller_pages() -> None:
    assert hardware.mac_memory_used(VM_STAT.replace("16384", "4096")) == (247_000 + 159_000 + 454_000 - 1000) * 4096


@pytest.mark.parametrize(("cpuinfo", "name"), [(X86, "AMD EPYC"), (RASPBERRY, "BCM2835"), (ARM_SERVER, None)])
def test_a_linux_machines_chip(cpuinfo: str, name: str | None) -> None:
    assert hardware.linux_chip(cpuinfo) == name


def test_a_linux_machine() -> None:
    assert hardware.linux_memory(MEMINFO) == (24_684_092 * 1024, 1_000_000 * 1024, 2**30)
    debian = 'NAME="Debian"\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nVERSION_ID="12"\n'
    assert hardware.linux_os(debian) == ("Debian GNU/Linux 12 (bookworm)", "12")
    assert hardware.linux_os("PRETTY_NAME=Alpine\n") == ("Alpine", None)


@pytest.mark.parametrize(
    "text", ["", "Mach Virtual Memory Statistics:", "hw.memsize: lots", "PRETTY_NAME='torn", "MemTotal: x kB"]
)
def test_what_cannot_be_read_is_not_measured(text: str) -> None:
    facts = read_facts({"system": "Darwin", "answers": {"sysctl": text}})
    assert [facts["chip"], facts["memory_total_bytes"]] == [None] * 2
    assert (hardware.mac_memory_used(text), hardware.mac_os(text)) == (None, (None, None, None))
    assert (hardware.linux_chip(text), hardware.linux_os(text)) == (None, (None, None))
    assert hardware.linux_memory(text) == (None, None, None)


@given(st.text())
def test_no_text_whatever_upsets_them(text: str) -> None:
    for read in (
        hardware.parse_sysctl,
        hardware.mac_memory_used,
        hardware.mac_os,
        hardware.linux_chip,
        hardware.linux_memory,
        hardware.linux_os,
    ):
        read(text)
