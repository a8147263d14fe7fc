"""Live telemetry of the nodes while a console is open: the `telemetry` probe of each host, as NodeTelemetry."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from engine.cluster import hardware, sensors
from engine.cluster.agent_client import AgentClient, InterpreterMissing
from engine.cluster.staging import hosts_of
from engine.cluster.transport.fleet import Fleet
from engine.config.models import Config, NodeConfig
from engine.errors import FlightDeckError, HostKeyChanged, HostKeyUnknown, LoginRefused
from engine.models import Late, NodeTelemetry, RankUse
from engine.protocol.messages import RequestEnded
from engine.security.sanitise import json_or_none, plain

INTERVAL_S = 2.0
SILENCE_S = 20.0
"""Without samples for so long, or for ten intervals, a node's telemetry is started again."""
RETRY_S = (2.0, 30.0)
"""First and longest pause before it is started again; a login that was refused is not tried more often than after the
longest."""
RANK_LIMIT = 4096
_Natural = Annotated[int, Field(ge=0, strict=True)]
_RANK_ROW = TypeAdapter(tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,200}$")], _Natural, _Natural])


async def telemetry(
    config: Config,
    fleet: Fleet,
    clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    *,
    interval_s: float = INTERVAL_S,
) -> AsyncIterator[NodeTelemetry]:
    """Every node's values as they come, without end: a sample of each host every `interval_s` seconds. Nodes on one
    host get the same values, the ranks of the whole host among them, but each those of its own GPU. A node that does
    not answer yields its `problem`, and is tried again. A slow reader gets the newest of each node. Closing the
    iterator ends the nodes' probes."""
    newest: dict[str, NodeTelemetry] = {}
    arrived = asyncio.Event()

    def put(value: NodeTelemetry) -> None:
        newest[value.node] = value
        arrived.set()

    hosts = [[config.nodes[rank] for rank in ranks] for ranks in hosts_of(config.nodes).values()]
    by_gpu = not config.torchrun and "CUDA_VISIBLE_DEVICES" not in config.job.env
    streams = [_HostStream(fleet.agent(nodes[0]), nodes, put, clock, interval_s, by_gpu) for nodes in hosts]
    watches = [asyncio.create_task(stream.watch()) for stream in streams]
    for watch in watches:
        watch.add_done_callback(lambda _: arrived.set())
    try:
        while True:
            await arrived.wait()
            arrived.clear()
            for watch in watches:
                # Only a fault of ours ends one: it is raised here.
                if watch.done():
                    watch.result()
            while newest:
                yield newest.pop(next(iter(newest)))
    finally:
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)


@dataclass
class _HostStream:
    """One host: its agent's telemetry, and its problems."""

    agent: AgentClient
    nodes: list[NodeConfig]
    put: Callable[[NodeTelemetry], None]
    clock: Callable[[], datetime]
    interval_s: float
    by_gpu: bool
    """Several nodes of a host have its GPUs in order."""
    failures: int = 0

    async def watch(self) -> None:
        """Pass on samples; after each end report why, and start again."""
        while True:
            first, longest = RETRY_S
            try:
                problem = await self._stream()
            except (HostKeyUnknown, HostKeyChanged, LoginRefused) as error:
                problem, first = str(error), longest
            except InterpreterMissing:
                problem = f"no such interpreter: {self.nodes[0].python}"
            except (FlightDeckError, OSError) as error:
                problem = str(error)
            self._put(*self.nodes, problem=plain(problem, 200) or "no answer")
            await asyncio.sleep(min(longest, first * 2**self.failures) * random.uniform(0.75, 1.25))
            self.failures = min(self.failures + 1, 10)

    async def _stream(self) -> str:
        """Pass on the host's samples until they end; why they ended."""
        request = await self.agent.start_probe("telemetry", f"{self.interval_s:g}")
        several = self.by_gpu and len(self.nodes) > 1
        parsers = [TelemetryParser(number if several else None) for number in range(len(self.nodes))]
        patience = max(SILENCE_S, 10 * self.interval_s)
        with contextlib.closing(request):
            while True:
                line = await request.next_line(patience)
                if isinstance(line, Late):
                    return f"no values for {patience:g} s"
                if isinstance(line, RequestEnded):
                    return f"telemetry ended with {line.exit_code}: {line.stderr}"
                for node, parser in zip(self.nodes, parsers, strict=True):
                    values = parser.read(line)
                    if values is not None:
                        self.failures = 0
                        self._put(node, **values)

    def _put(self, *nodes: NodeConfig, **values: Any) -> None:
        for node in nodes:
            with contextlib.suppress(ValidationError):
                self.put(NodeTelemetry(node=node.name, at=self.clock(), **values))


class TelemetryParser:
    """The samples of one probe: counters need the one before, and slow readings stay until the next."""

    def __init__(self, gpu: int | None = None) -> None:
        """`gpu`: the number of the one whose values are taken, where it is listed; None for all."""
        self._gpu = gpu
        self._ticks: tuple[int, int] | None = None
        self._traffic: sensors.Traffic | None = None
        self._slow: dict[str, Any] = {}
        self._own: dict[str, Any] = {}
        """Told last by the system's own tools and files: where that costs much, they are not read for each sample."""

    def read(self, line: bytes) -> dict[str, Any] | None:
        """Fields of NodeTelemetry; None for a line that is not a sample."""
        sample = json_or_none(line)
        if not isinstance(sample, dict) or sample.get("system") not in ("Linux", "Darwin"):
            return None
        values = self._mac(sample) if sample["system"] == "Darwin" else self._linux(sample)
        if "ranks" in sample:
            self._slow["ranks"] = _ranks(sample["ranks"])
        if "thermal" in sample:
            self._slow["thermal"] = sensors.mac_thermal_pressure(_text(sample["thermal"]))
        if "network" in sample:
            before, self._traffic = self._traffic, sensors.traffic(sample["network"])
            self._slow |= sensors.traffic_rates(before, self._traffic)
        return values | self._slow

    def _linux(self, sample: dict[str, Any]) -> dict[str, Any]:
        if "cpu" in sample:
            _, memory_used, swap_used = hardware.linux_memory(_text(sample.get("meminfo")))
            self._own = {
                "cpu_use": self._cpu(sensors.cpu_ticks(_text(sample["cpu"]))),
                "memory_used_bytes": memory_used,
                "swap_used_bytes": swap_used,
                "cpu_temperature_c": sensors.number(sample.get("cpu_temperature_c")),
                "source": "/proc",
            }
        values, lines = self._own, sample.get("nvidia")
        if isinstance(lines, list):
            texts = [_text(line) for line in lines]
            texts = [text for text in texts if text.partition(",")[0].strip() == str(self._gpu)] or texts
            readings, memory = sensors.parse_nvidia_smi(texts)
            values = values | readings | {"gpu_memory": memory, "source": "/proc, nvidia-smi"}
        return values

    def _mac(self, sample: dict[str, Any]) -> dict[str, Any]:
        if "macmon" in sample:
            values: dict[str, Any] = {**sensors.parse_macmon(_text(sample["macmon"])), "source": "macmon"}
        elif "vm_stat" not in sample:
            values = self._own
        else:
            values = self._own = {
                "memory_used_bytes": hardware.mac_memory_used(_text(sample.get("vm_stat"))),
                "swap_used_bytes": sensors.mac_swap_used(_text(sample.get("swapusage"))),
                "gpu_use": sensors.mac_gpu_use(_text(sample.get("ioreg"))),
                "source": "vm_stat, sysctl, ioreg",
            }
        # The kernel's own counters mean the same on every system and with every macmon.
        use = self._cpu(sensors.mac_cpu_ticks(sample.get("ticks")))
        return values | ({"cpu_use": use} if use is not None else {})

    def _cpu(self, ticks: tuple[int, int] | None) -> float | None:
        use = sensors.cpu_use(self._ticks, ticks)
        self._ticks = ticks
        return use


_LINE_BYTES = 1 << 20
_MOST_SAMPLES = 8
_LONGEST_GAP_S, _MOST_WATTS = 60.0, 1e6
"""Between two samples that count; and more than a rack has."""


class PowerMeter:
    """The energy of a host by its samples, as they come: its whole power where that is known, else that of its GPUs."""

    def __init__(self) -> None:
        self._parser = TelemetryParser()
        self._torn = b""
        self.samples = deque[dict[str, Any]](maxlen=_MOST_SAMPLES)
        """The newest fields of NodeTelemetry: for whoever takes them out."""
        self._last: tuple[float, float] | None = None
        """When it came (s), and its watts."""
        self._measured = 0.0, 0.0

    def feed(self, data: bytes, now: float) -> None:
        """`data`: the telemetry probe's output, however it is cut. `now`: seconds on any clock."""
        *lines, torn = (self._torn + data).split(b"\n")
        self._torn = torn[-_LINE_BYTES:]
        for values in filter(None, map(self._parser.read, lines)):
            self.samples.append(values)
            watts = values.get("power_w") or values.get("gpu_power_w")
            if watts is not None and watts < _MOST_WATTS:
                began, before = self._last or (now, watts)
                if 0.0 < now - began <= _LONGEST_GAP_S:
                    joules, seconds = self._measured
                    self._measured = joules + (before + watts) / 2 * (now - began), seconds + now - began
                self._last = now, watts

    def take(self) -> tuple[float, float]:
        """Joules, and the seconds in which they were measured, since the last call."""
        measured, self._measured = self._measured, (0.0, 0.0)
        return measured


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _ranks(rows: object) -> tuple[RankUse, ...]:
    """From rows of (run id, rank, bytes), without those that make no sense."""
    uses = []
    for row in rows[:RANK_LIMIT] if isinstance(rows, list) else []:
        with contextlib.suppress(ValidationError):
            run_id, rank, rss_bytes = _RANK_ROW.validate_python(row)
            uses.append(RankUse(run_id=run_id, rank=rank, rss_bytes=rss_bytes))
    return tuple(uses)
