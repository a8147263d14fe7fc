"""What works a node hard: on this machine, and as `ps` of macOS prints it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from engine.node.probes import load
from engine.node.processes import ps_time_s

MAC = """
  501  98.7 93206736    02:11:40 /Applications/Ollama.app/Contents/Resources/ollama runner --model x
   88   3.2   104448 12-04:00:01 /System/Library/SkyLight.framework/WindowServer -daemon
  777 180.0    20480       00:04 python -m engine.node.probes
  900   0.0        0          - (zombie)
"""


def test_processes_as_ps_prints_them_without_what_has_just_begun() -> None:
    ollama, server = load._ps_processes(MAC.splitlines()[1:])
    assert (ollama["pid"], ollama["cores"], ollama["rss_bytes"]) == (501, 0.987, 93206736 * 1024)
    assert ollama["command"].startswith("/Applications/Ollama.app/")
    assert (server["pid"], server["cores"]) == (88, 0.032)


def test_a_program_that_has_cleared_its_own_command_hides_no_other() -> None:
    own, other = load._ps_processes(["  501  98.7 93206736    02:11:40 ", "   88  90.0   104448 12-04:00:01 ollama"])
    assert (own["pid"], own["command"], other["command"]) == (501, "?", "ollama")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("00:04", 4), ("1:35.69", 95.69), ("02:11:40", 7_900), ("12-04:00:01", 1_051_201), ("ELAPSED", 0)],
)
def test_times_of_ps(text: str, seconds: float) -> None:
    assert ps_time_s(text) == seconds


@pytest.fixture
def spinning() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


@pytest.mark.needs("linux")
def test_a_process_that_keeps_a_core_busy_is_found_once_it_is_old_enough(
    monkeypatch: pytest.MonkeyPatch, spinning: int
) -> None:
    """Others may want the cores of this machine, too: it gets a share."""
    monkeypatch.setattr(load, "BUSY_CORES", 0.02)
    monkeypatch.setattr(load, "_MOST", 1000)
    assert spinning not in {process["pid"] for process in load.probe_load()["processes"]}
    monkeypatch.setattr(load, "_OLDER_S", -1.0)
    found = {process["pid"]: process for process in load.probe_load()["processes"]}[spinning]
    assert (found["run"], "while True" in found["command"]) == (False, True)
    assert 0.02 <= found["cores"] <= os.cpu_count() * 1.2  # type: ignore[operator]
