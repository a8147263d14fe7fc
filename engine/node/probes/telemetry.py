# ruff: noqa: PTH207
# As short and as cheap as can be: this runs on the node, beside the training.
"""The `telemetry` probe: what a node uses, one JSON line an interval, until its stdin ends. The system's own output is
parsed on the head. Every reading is repeated no more often than its own cost allows, so that all of them together stay
below BUDGET of a core, whatever the machine."""

from __future__ import annotations

import collections
import ctypes
import glob
import json
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from engine.node.probes import content, mac_gpu_statistics
from engine.node.processes import ProcessRow, process_table, tool_output, variables_of

BUDGET = 0.008
"""Share of a core, for this process, what it runs, and the pipe that it reads; the promise to the outside is 0.01."""
RESCAN_EVERY = 16
"""A process that was no rank's is looked at again in one of so many scans: it may have been caught before its exec."""
NONCE, SPEC, RANK = "FLIGHTDECK_NONCE", "FLIGHTDECK_SPEC", "MLX_RANK"
SPEC_PATH = re.compile(r"/runs/([^/]+)/attempts/\d+/spec\.json")
SLOW_S = 10.0
"""Period of what a Mac has to start a program for."""
LINE_EVERY_S, TOOLS_WAIT_S = 4.0, 1.0
"""A Mac's samples are at most the sum apart, far below the head's patience, however long its tools take: so long from
one to the next, and so long each waits for the tools."""
MACMON_PLACES = ("/opt/homebrew/bin", "/usr/local/bin", "/opt/local/bin", "~/.cargo/bin", "~/.local/bin")
"""Beside PATH: a shell that ssh starts knows none of them."""
NVIDIA_FIELDS = "index,utilization.gpu,clocks.sm,power.draw,temperature.gpu,memory.used,memory.total"


class ProcessOwner(NamedTuple):
    run: str
    rank: int


def spent_s() -> float:
    """CPU seconds of this process and of the commands that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class Paced:
    """A reading that waits after each time until `share` of a core would have paid for it, and `period` at least."""

    def __init__(self, read: Callable[[], dict[str, object]], period: float, share: float) -> None:
        self.read = read
        self.period = period
        self.share = share
        self.due = 0.0

    def take(self, now: float) -> dict[str, object]:
        if now < self.due:
            return {}
        before = spent_s()
        report = self.read()
        # A little early is on time: the rhythm is the main loop's.
        self.due = now + max(self.period * 0.9, (spent_s() - before) / self.share)
        return report


class Stream:
    """A program that goes on printing, where there is one; it is slowed down when it costs more than its share of a
    core."""

    def __init__(self, argv: Callable[[float], list[str]] | None, interval: float, share: float) -> None:
        self.argv = argv
        self.interval = interval
        self.share = share
        self.lines: collections.deque[str] = collections.deque(maxlen=64)
        self.torn = b""
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        self.began = time.monotonic()
        if self.argv is None:
            return
        try:
            self.process = subprocess.Popen(
                self.argv(self.interval), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError:
            self.process = None
            return
        os.set_blocking(self.fileno(), False)

    def fileno(self) -> int:
        assert self.process is not None and self.process.stdout is not None
        return self.process.stdout.fileno()

    def take_in(self) -> None:
        """Read what there is; a program that has ended is not started again."""
        try:
            data = os.read(self.fileno(), 65536)
        except BlockingIOError:
            return
        if not data:
            self.stop()
            return
        *whole, self.torn = (self.torn + data).split(b"\n")
        self.torn = self.torn[-65536:]
        self.lines.extend(line.decode(errors="replace") for line in whole)

    def settle(self, cpu_s: float) -> None:
        """Takes its CPU time so far; starts it anew with twice the interval when that was too much."""
        ran = time.monotonic() - self.began
        if self.process is not None and ran > 20 and cpu_s / ran > self.share and self.interval < 60:
            self.stop()
            self.interval *= 2
            self.start()

    def stop(self) -> None:
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(1)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.process = None


class Ranks:
    """Memory of each rank's processes. What a process is, is remembered; only new ones are read whole."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, str], ProcessOwner | None] = {}
        """By pid and start."""
        self.scans = 0
        self.table: dict[int, ProcessRow] = {}
        """The last list."""

    def read(self) -> dict[str, object]:
        self.scans += 1
        others = {key for key, owner in self.known.items() if owner is None and (key[0] + self.scans) % RESCAN_EVERY}
        try:
            table = process_table({pid for pid, _ in others})
            present = {(pid, row.start): row.rss_bytes for pid, row in table.items()}
            kept = {key: owner for key, owner in self.known.items() if key in (present if owner else others)}
            unknown = present.keys() - kept.keys()
            values = variables_of([pid for pid, _ in unknown], NONCE, SPEC, RANK) if unknown else {}
        except (OSError, ValueError, subprocess.SubprocessError):
            return {"ranks": None}
        self.table, self.known = table, kept | {key: process_owner(values.get(key[0], {})) for key in unknown}
        return by_rank((owner, present[key]) for key, owner in self.known.items() if owner is not None)

    def cpu_s(self, process: subprocess.Popen[bytes] | None) -> float:
        """CPU seconds of one of ours; 0 where the last list does not have it."""
        row = self.table.get(process.pid) if process is not None else None
        return row.cpu_s if row is not None else 0.0


def by_rank(used: Iterable[tuple[ProcessOwner, int]]) -> dict[str, object]:
    """The bytes of each rank's processes together."""
    sums = collections.Counter[ProcessOwner]()
    for owner, rss in used:
        sums[owner] += rss
    return {"ranks": [[run, rank, rss] for (run, rank), rss in sorted(sums.items()) if rss]}


def process_owner(environment: Mapping[str, str]) -> ProcessOwner | None:
    """Whose the process with this environment is; None for one of no rank."""
    spec = SPEC_PATH.search(environment.get(SPEC, ""))
    rank = environment.get(RANK, "")
    if not environment.get(NONCE) or spec is None or not re.fullmatch(r"[0-9]{1,6}", rank):
        return None
    return ProcessOwner(spec.group(1), int(rank))


class Linux:
    """Values that Linux reports without root: /proc, /sys, and nvidia-smi where there is one."""

    def __init__(self, interval: float) -> None:
        self.ranks = Ranks()
        self.readings = [Paced(self.quick, interval, BUDGET / 4), Paced(self.ranks.read, interval, BUDGET / 2)]
        self.thermometer = cpu_thermometer()
        smi = shutil.which("nvidia-smi")
        fields = [f"--query-gpu={NVIDIA_FIELDS}", "--format=csv,noheader,nounits"]
        looping = (lambda every: [smi, *fields, f"--loop={max(1, round(every))}"]) if smi is not None else None
        self.stream = Stream(looping, interval, BUDGET / 4)
        self.leads = False
        self.interval = interval

    def rest_s(self, now: float) -> float:
        return self.interval

    def quick(self) -> dict[str, object]:
        report: dict[str, object] = {
            "cpu": content("/proc/stat", 1024).split("\n", 1)[0],
            "meminfo": content("/proc/meminfo"),
            "network": [time.monotonic(), content("/proc/net/dev", 65_536)],
        }
        millidegrees = content(self.thermometer).strip()
        if millidegrees.isdigit():
            report["cpu_temperature_c"] = int(millidegrees) / 1000
        return report

    def sample(self, now: float) -> dict[str, object]:
        report: dict[str, object] = {"system": "Linux"}
        for reading in self.readings:
            report.update(reading.take(now))
        if self.stream.lines:
            report["nvidia"] = list(self.stream.lines)
            self.stream.lines.clear()
        return report


def cpu_thermometer() -> str:
    """A file of millidegrees; "" where the machine has none."""
    for name in sorted(glob.glob("/sys/class/hwmon/*/name")):
        if content(name).strip() in ("coretemp", "k10temp", "zenpower", "cpu_thermal"):
            return name.replace("/name", "/temp1_input")
    return ""


class Mac:
    """Values that macOS reports without root: macmon where it is installed, else its own tools."""

    def __init__(self, interval: float) -> None:
        macmon = shutil.which("macmon", path=os.pathsep.join([os.environ.get("PATH", ""), *map(os.path.expanduser, MACMON_PLACES)]))  # noqa: E501  # fmt: skip
        # The option before the subcommand: so do all versions take it.
        piping = (lambda every: [macmon, "-i", str(int(every * 1000)), "pipe"]) if macmon is not None else None
        self.stream = Stream(piping, interval, BUDGET / 2)
        self.ticks = MacTicks()
        self.own = Paced(self.tools, interval, BUDGET / 2)
        self.interval = interval
        self.ranks = Ranks()
        self.slow = [Paced(self.ranks.read, SLOW_S, BUDGET / 4)]
        self.slow += [Paced(reading, SLOW_S, BUDGET / 8) for reading in (thermal, mac_network)]
        self.read: collections.deque[dict[str, object]] = collections.deque()
        """Reports of the tools since the last sample."""
        self.reader = threading.Thread()

    @property
    def leads(self) -> bool:
        """Samples are sent when macmon prints a line."""
        return self.stream.process is not None

    def rest_s(self, now: float) -> float:
        """To the next sample: when macmon has nothing to say, or when the tools may be asked again."""
        rest_s = self.interval * 2.5 if self.leads else max(self.interval, self.own.due - now)
        return min(rest_s, max(self.interval, LINE_EVERY_S))

    def tools(self) -> dict[str, object]:
        return {
            "vm_stat": tool_output("/usr/bin/vm_stat"),
            "swapusage": tool_output("/usr/sbin/sysctl", "vm.swapusage"),
            "ioreg": mac_gpu_statistics(8192),
        }

    def sample(self, now: float) -> dict[str, object]:
        report: dict[str, object] = {"system": "Darwin", "ticks": self.ticks.read()}
        if self.stream.lines:
            report["macmon"] = self.stream.lines[-1]
            self.stream.lines.clear()
        if not self.reader.is_alive():
            readings = self.slow if "macmon" in report else [self.own, *self.slow]
            self.reader = threading.Thread(target=self.take, args=(readings, now), daemon=True)
            self.reader.start()
        self.reader.join(TOOLS_WAIT_S)
        while self.read:
            report.update(self.read.popleft())
        return report

    def take(self, readings: list[Paced], now: float) -> None:
        """In a thread: on a busy Mac each tool may take seconds."""
        for reading in readings:
            self.read.append(reading.take(now))


def thermal() -> dict[str, object]:
    return {"thermal": tool_output("/usr/bin/notifyutil", "-g", "com.apple.system.thermalpressurelevel")}


def mac_network() -> dict[str, object]:
    return {"network": [time.monotonic(), tool_output("/usr/sbin/netstat", "-ibn")]}


class MacTicks:
    """user, system, idle, nice since boot, summed over the cores: host_statistics(HOST_CPU_LOAD_INFO)."""

    def __init__(self) -> None:
        try:
            self.system: ctypes.CDLL | None = ctypes.CDLL("/usr/lib/libSystem.dylib")
            self.system.mach_host_self.restype = ctypes.c_uint
            self.system.host_statistics.argtypes = [ctypes.c_uint, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
            # Once: each call gives another right to the port, which nobody returns.
            self.host = self.system.mach_host_self()
        except (OSError, AttributeError):
            self.system = None

    def read(self) -> list[int] | None:
        if self.system is None:
            return None
        ticks, count = (ctypes.c_uint * 4)(), ctypes.c_uint(4)
        failed = self.system.host_statistics(self.host, 3, ctypes.byref(ticks), ctypes.byref(count))
        return None if failed else list(ticks)


def stream_samples(machine: Linux | Mac, interval: float) -> None:
    """Print samples until stdin ends or nobody reads them."""
    os.set_blocking(1, False)
    unsent, stream = b"", machine.stream
    now = due = time.monotonic()
    while True:
        readers = [0] if stream.process is None else [0, stream.fileno()]
        ready, writable, _ = select.select(readers, [1] if unsent else [], [], max(0.0, due - now))
        now = time.monotonic()
        if 0 in ready and not os.read(0, 4096):
            return
        if stream.process is not None and stream.fileno() in ready:
            stream.take_in()
            if machine.leads and stream.lines:
                due = now
        # What could not be sent is not piled up: the next sample waits until the reader has taken the last one.
        if now >= due and not unsent:
            unsent = json.dumps(machine.sample(now)).encode() + b"\n"
            stream.settle(machine.ranks.cpu_s(stream.process))
            due = now + machine.rest_s(now)
        if unsent or writable:
            try:
                unsent = unsent[os.write(1, unsent) :]
            except BlockingIOError:
                pass
            except OSError:
                return
        if unsent and now >= due:
            due = now + interval


def probe_telemetry(interval_s: str) -> Iterator[dict[str, object]]:
    interval = float(interval_s)
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    machine = Mac(interval) if sys.platform == "darwin" else Linux(interval)
    try:
        stream_samples(machine, interval)
    finally:
        machine.stream.stop()
    # It has printed its samples itself.
    return iter(())
