"""The telemetry probe: what it reports of real processes, and that it never outlives its reader."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.node import processes
from engine.node.probes import telemetry
from tests.machine import WATCHED

pytestmark = pytest.mark.needs("linux")

START = "import sys; from engine.node.probes import telemetry; telemetry.BUDGET = 1.0; "
"""Unhurried by what it costs: tests.bench.telemetry measures that."""
RUN = "telemetry.probe_telemetry(sys.argv[1])"
ON_MAC = "sys.platform = 'darwin'; "
PATIENCE_S = 20.0


class Running:
    """The script with both its pipes in a test's hands."""

    def __init__(self, change: str = "", interval: str = "0.05", **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", START + change + RUN, interval],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment},
        )

    def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], PATIENCE_S)[0], "it says nothing"
        output = json.loads(self.process.stdout.readline())
        assert isinstance(output, dict)
        return output

    def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first line that holds, each answered as the head does."""
        assert self.process.stdin is not None
        limit = time.monotonic() + PATIENCE_S
        while time.monotonic() < limit:
            output = self.line()
            self.process.stdin.write(b"\n")
            self.process.stdin.flush()
            if holds(output):
                return output
        raise AssertionError("never said")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            # What was written to it and never read is of no use to anybody.
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def left(self) -> int:
        return self.process.wait(PATIENCE_S)


@pytest.fixture
def script() -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(*arguments: str, **more: str) -> Running:
        started.append(Running(*arguments, **more))
        return started[-1]

    yield start
    for running in started:
        running.end()


@contextlib.contextmanager
def ranks_process(code: str, *, run: str = "r1", rank: int = 1) -> Iterator[subprocess.Popen[bytes]]:
    """A program such as a keeper starts; it has printed a line when this returns."""
    marks = {
        "FLIGHTDECK_NONCE": "n0",
        "FLIGHTDECK_SPEC": f"/home/ana/.flightdeck/runs/{run}/attempts/1/spec.json",
        "MLX_RANK": str(rank),
    }
    program = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        f"{code}\nprint(flush=True); import time; time.sleep(100)",
        WATCHED,
    ]
    with subprocess.Popen(program, env={**os.environ, **marks}, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def rss(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def of_run(output: dict[str, Any], run: str = "r1") -> dict[int, int]:
    return {rank: used for name, rank, used in output.get("ranks", []) if name == run}


def test_it_says_what_a_ranks_processes_hold_while_they_are_there(script: Callable[..., Running]) -> None:
    running = script()
    assert of_run(running.until(lambda output: "ranks" in output)) == {}
    with ranks_process("x = bytearray(50_000_000)") as first, ranks_process("", rank=0) as other:
        # A process that has only just been started grows for a moment.
        running.until(lambda output: of_run(output).get(1, 0) == pytest.approx(rss(first.pid), rel=0.02))
        output = of_run(
            running.until(lambda output: of_run(output).get(0, 0) == pytest.approx(rss(other.pid), rel=0.05))
        )
        assert output[1] > 50e6
        with ranks_process("x = bytearray(30_000_000)") as second:
            # Of one rank, whoever is its parent.
            both = rss(first.pid) + rss(second.pid)
            running.until(lambda output: of_run(output)[1] == pytest.approx(both, rel=0.02))
    running.until(lambda output: "ranks" in output and of_run(output) == {})


def test_a_process_that_became_a_ranks_by_exec_is_found(script: Callable[..., Running]) -> None:
    # Sixteen scans may take long where both cores are busy.
    running = script("telemetry.RESCAN_EVERY = 2; ")
    code = (
        "import os, sys\nprint(flush=True)\nsys.stdin.readline()\n"
        "os.execve('/bin/sleep', ['engine.node.keeper', '100'], {'FLIGHTDECK_NONCE': 'n', 'MLX_RANK': '3',"
        " 'FLIGHTDECK_SPEC': '/x/runs/r1/attempts/2/spec.json'})"
    )
    program = [sys.executable, "-I", "-S", "-c", code]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        for _ in range(3):
            assert of_run(running.until(lambda output: "ranks" in output)) == {}
        process.stdin.write(b"\n")
        process.stdin.flush()
        running.until(lambda output: 3 in of_run(output))
        process.kill()


def test_it_says_what_the_machine_does(script: Callable[..., Running]) -> None:
    output = script().line()
    assert output["system"] == "Linux"
    assert output["cpu"].startswith("cpu ")
    assert "MemAvailable:" in output["meminfo"] and "SwapFree:" in output["meminfo"]


def test_it_leaves_when_its_stdin_ends(script: Callable[..., Running]) -> None:
    running = script("", "60")
    running.line()
    assert running.process.stdin is not None
    running.process.stdin.close()
    assert running.left() == 0


def test_it_leaves_when_nobody_reads(script: Callable[..., Running]) -> None:
    running = script()
    running.line()
    assert running.process.stdout is not None
    running.process.stdout.close()
    assert running.left() == 0


MACMON = """#!/bin/sh
[ "$*" = "-i 50 pipe" ] || exit 2
while sleep 0.05; do echo '{"gpu_active_ratio": 0.5, "sys_power": 20.0}'; done
"""


def test_on_a_mac_macmon_is_listened_to_and_ends_with_the_script(
    script: Callable[..., Running], tmp_path: Path
) -> None:
    """macOS's own tools are not here; how a macmon is started, read and ended is the same."""
    (tmp_path / "macmon").write_text(MACMON)
    (tmp_path / "macmon").chmod(0o755)
    running = script(ON_MAC, "0.05", PATH=f"{tmp_path}:{os.environ['PATH']}")
    output = running.until(lambda output: "macmon" in output)
    assert json.loads(output["macmon"])["sys_power"] == 20.0
    children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
    assert len(children) == 1
    assert running.process.stdin is not None
    running.process.stdin.close()
    assert running.left() == 0
    assert not Path(f"/proc/{children[0]}").exists()


def test_a_macmon_that_cannot_be_run_or_dies_leaves_the_systems_own_tools(
    script: Callable[..., Running], tmp_path: Path
) -> None:
    (tmp_path / "macmon").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "macmon").chmod(0o755)
    running = script(ON_MAC, "0.05", PATH=f"{tmp_path}:{os.environ['PATH']}")
    output = running.until(lambda output: "vm_stat" in output)
    assert "macmon" not in output


SLOW_TOOLS = (
    "import threading; telemetry.LINE_EVERY_S = telemetry.TOOLS_WAIT_S = 0.05; "
    "telemetry.tool_output = lambda *_: threading.Event().wait() or ''; "
)


def test_on_a_mac_whose_tools_do_not_come_back_there_are_lines_all_the_same(script: Callable[..., Running]) -> None:
    running = script(ON_MAC + SLOW_TOOLS, "0.05", PATH="/nowhere")
    for _ in range(3):
        assert running.line()["system"] == "Darwin"
    assert running.process.stdin is not None
    running.process.stdin.close()
    assert running.left() == 0


def test_on_a_slow_mac_a_line_is_at_most_five_seconds_from_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    mac = telemetry.Mac(2.0)
    mac.own.due = 1060.0
    assert mac.rest_s(1000.0) + telemetry.TOOLS_WAIT_S <= 5.0
    assert mac.own.take(1004.0) == {}, "the tools are paid for later"


PS = """\
  301    1 Ss     20480   1:35.69 Fri Nov 21 10:00:00 2026
  302  301 R+   1048576  12:01:35 Fri Nov 21 10:00:01 2026
"""
PS_E = """\
  301 Ss   /bin/zsh -l TERM=xterm MLX_RANK=9
  302 R+   /opt/python -m engine.trainer.main MLX_RANK=7 HOME=/Users/ana b FLIGHTDECK_NONCE=ab12 MLX_RANK=1 \
FLIGHTDECK_SPEC=/Users/ana b/.flightdeck/runs/r-1/attempts/2/spec.json SHELL=/bin/zsh
"""


def test_ps_on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_LINUX", False)
    listed = {"-ax": PS, "-Eww": PS_E}
    monkeypatch.setattr(processes, "own_list", lambda _, which, *options: listed[which].splitlines())
    ranks = telemetry.Ranks()
    assert ranks.read() == {"ranks": [["r-1", 1, 2**30]]}
    assert ranks.table[302].cpu_s == 43295.0
    listed["-ax"] = PS.replace("10:00:01", "10:00:02")
    listed["-Eww"] = PS_E.replace("r-1", "r-2")
    assert ranks.read() == {"ranks": [["r-2", 1, 2**30]]}, "another process has its pid"
    listed["-ax"] = "  302  301 R+\n"
    assert ranks.read() == {"ranks": None}


def test_a_reading_waits_until_its_share_has_paid_for_it() -> None:
    def read() -> dict[str, object]:
        end = time.process_time() + 0.02
        while time.process_time() < end:
            pass
        return {"a": 1}

    paced = telemetry.Paced(read, period=2.0, share=0.004)
    assert paced.take(100.0) == {"a": 1}
    # What it costs is measured: a busy machine makes it dearer.
    assert 105.0 <= paced.due < 200.0
    assert paced.take(104.0) == {}
    assert paced.take(paced.due) == {"a": 1}


def test_a_program_that_costs_too_much_is_asked_half_as_often(tmp_path: Path) -> None:
    stream = telemetry.Stream(lambda every: ["/bin/sleep", str(every * 50)], 2.0, 0.004)
    assert stream.process is not None
    first = stream.process.pid
    stream.settle(10.0)
    assert (stream.interval, stream.process.pid) == (2.0, first)  # too young to judge
    stream.began -= 100
    stream.settle(0.3)
    assert (stream.interval, stream.process.pid) == (2.0, first)
    stream.settle(1.0)
    assert stream.interval == 4.0
    assert stream.process is not None and stream.process.pid != first
    stream.stop()
    stream.stop()
