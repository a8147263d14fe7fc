"""Live telemetry of the nodes while a console is open: the `telemetry` probe of each host, as NodeTelemetry."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from engine.cluster import hardware, sensors
from engine.cluster.agent_client import AgentClient, InterpreterMissing, TransportProvider
from engine.cluster.sensors import number, parse_macmon
from engine.config.models import Config, NodeConfig
from engine.errors import FlightDeckError, HostKeyChanged, HostKeyUnknown, LoginRefused
from engine.models import NodeTelemetry, RankUse
from engine.outcomes import Late
from engine.protocol.messages import RequestEnded
from engine.security.identifiers import SshTarget
from engine.security.sanitise import sanitise

INTERVAL_S = 2.0
SILENCE_S = 20.0
"""Without samples for so long, or for ten intervals, a node's telemetry is started again."""
RETRY_S = (2.0, 30.0)
"""First and longest pause before it is started again; a login that was refused is not tried more often than after the
longest."""
RANK_LIMIT = 4096
_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,200}")


async def telemetry(
    config: Config,
    fleet: TransportProvider,
    clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    *,
    interval_s: float = INTERVAL_S,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    rng: random.Random | None = None,
) -> AsyncIterator[NodeTelemetry]:
    """Every node's values as they come, without end: a sample of each host every `interval_s` seconds. Nodes on one
    host get the same values, the ranks of the whole host among them. A node that does not answer yields its `problem`,
    and is tried again. A slow reader gets the newest of each node. Closing the iterator ends the nodes' probes."""
    hosts: dict[SshTarget, list[NodeConfig]] = {}
    for node in config.nodes:
        hosts.setdefault(SshTarget.parse(node.ssh), []).append(node)
    board = _LatestValues()
    rng = rng or random.Random()
    watches = [
        asyncio.create_task(_HostStream(fleet.agent(nodes[0]), nodes, board, clock, interval_s).watch(pause, rng))
        for nodes in hosts.values()
    ]
    try:
        while True:
            for value in await board.take(watches):
                yield value
    finally:
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)


class _LatestValues:
    """The newest value of each node that nobody has taken yet."""

    def __init__(self) -> None:
        self._newest: dict[str, NodeTelemetry] = {}
        self._some = asyncio.Event()

    def put(self, value: NodeTelemetry) -> None:
        self._newest[value.node] = value
        self._some.set()

    async def take(self, watches: list[asyncio.Task[None]]) -> list[NodeTelemetry]:
        """All there is, once there is any. Raises the exception that ended a watch."""
        waiting = asyncio.create_task(self._some.wait())
        try:
            await asyncio.wait([waiting, *watches], return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        for watch in watches:
            if watch.done():
                watch.result()
        values, self._newest = list(self._newest.values()), {}
        self._some.clear()
        return values


class _HostStream:
    """One host: its agent's telemetry, and its problems."""

    def __init__(
        self,
        agent: AgentClient,
        nodes: list[NodeConfig],
        board: _LatestValues,
        clock: Callable[[], datetime],
        interval_s: float,
    ) -> None:
        self._agent = agent
        self._nodes = nodes
        self._board = board
        self._clock = clock
        self._interval_s = interval_s
        self._failures = 0

    async def watch(self, pause: Callable[[float], Awaitable[None]], rng: random.Random) -> None:
        """Pass on samples; after each end report why, and start again."""
        while True:
            first, longest = RETRY_S
            try:
                problem = await self._stream()
            except (HostKeyUnknown, HostKeyChanged, LoginRefused) as error:
                problem, first = str(error), longest
            except InterpreterMissing:
                problem = f"no such interpreter: {self._nodes[0].python}"
            except (FlightDeckError, OSError) as error:
                problem = str(error)
            self._put(problem=sanitise(problem.encode(errors="replace"), 200) or "no answer")
            await pause(min(longest, first * 2**self._failures) * rng.uniform(0.75, 1.25))
            self._failures = min(self._failures + 1, 10)

    async def _stream(self) -> str:
        """Pass on the host's samples until they end; why they ended."""
        request = await self._agent.start_probe("telemetry", f"{self._interval_s:g}")
        parser = TelemetryParser()
        patience = max(SILENCE_S, 10 * self._interval_s)
        try:
            while True:
                line = await request.next_line(patience)
                if isinstance(line, Late):
                    return f"no values for {patience:g} s"
                if isinstance(line, RequestEnded):
                    return f"telemetry ended with {line.exit_code}: {line.stderr}"
                values = parser.read(line, self._clock())
                if values is not None:
                    self._failures = 0
                    self._put(**values)
        finally:
            request.close()

    def _put(self, **values: Any) -> None:
        for node in self._nodes:
            with contextlib.suppress(ValidationError):
                self._board.put(NodeTelemetry(node=node.name, at=self._clock(), **values))


class TelemetryParser:
    """The samples of one probe: counters need the one before, and slow readings stay until the next."""

    def __init__(self) -> None:
        self._ticks: tuple[int, int] | None = None
        self._slow: dict[str, Any] = {}

    def read(self, line: bytes, at: datetime) -> dict[str, Any] | None:
        """Fields of NodeTelemetry; None for a line that is not a sample."""
        try:
            sample = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(sample, dict) or sample.get("system") not in ("Linux", "Darwin"):
            return None
        on_mac = sample["system"] == "Darwin"
        values: dict[str, Any] = dict(self._mac(sample) if on_mac else self._linux(sample))
        if "ranks" in sample:
            self._slow |= {"ranks": _ranks(sample["ranks"]), "slow_at": at}
        if "thermal" in sample:
            self._slow["thermal"] = sensors.mac_thermal_pressure(_text(sample["thermal"]))
        return values | self._slow

    def _linux(self, sample: dict[str, Any]) -> dict[str, Any]:
        meminfo = _text(sample.get("meminfo"))
        values: dict[str, Any] = {
            "cpu_use": self._cpu(sensors.cpu_ticks(_text(sample.get("cpu")))),
            "memory_used_bytes": hardware.linux_memory(meminfo)[1],
            "swap_used_bytes": sensors.linux_swap_used(meminfo),
            "cpu_temperature_c": number(sample.get("cpu_temperature_c")),
            "source": "/proc",
        }
        lines = sample.get("nvidia")
        if isinstance(lines, list):
            values |= sensors.parse_nvidia_smi(map(_text, lines))
            values["source"] = "/proc, nvidia-smi"
        return values

    def _mac(self, sample: dict[str, Any]) -> dict[str, Any]:
        if "macmon" in sample:
            values: dict[str, Any] = {**parse_macmon(_text(sample["macmon"])), "source": "macmon"}
        else:
            used = hardware.mac_memory_used(_text(sample.get("vm_stat")))
            swap, gpu = (
                sensors.mac_swap_used(_text(sample.get("swapusage"))),
                sensors.mac_gpu_use(_text(sample.get("ioreg"))),
            )
            values = {
                "memory_used_bytes": used,
                "swap_used_bytes": swap,
                "gpu_use": gpu,
                "source": "vm_stat, sysctl, ioreg",
            }
        # The kernel's own counters mean the same on every system and with every macmon.
        use = self._cpu(sensors.mac_cpu_ticks(sample.get("ticks")))
        return values | ({"cpu_use": use} if use is not None else {})

    def _cpu(self, ticks: tuple[int, int] | None) -> float | None:
        use = sensors.cpu_use(self._ticks, ticks)
        self._ticks = ticks
        return use


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _ranks(rows: object) -> tuple[RankUse, ...]:
    found = []
    for row in rows[:RANK_LIMIT] if isinstance(rows, list) else []:
        run, rank, rss = row if isinstance(row, list) and len(row) == 3 else (None, None, None)
        if (
            isinstance(run, str)
            and _RUN_ID.fullmatch(run)
            and type(rank) is int
            and type(rss) is int
            and rank >= 0 <= rss
        ):
            found.append(RankUse(run_id=run, rank=rank, rss_bytes=rss))
    return tuple(found)
