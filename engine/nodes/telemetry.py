"""What the nodes use, moment by moment, while somebody looks: one `telemetry_script` per host, its lines merged."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from engine.config.models import FlightConfig, NodeConfig
from engine.errors import HostKeyChanged, HostKeyUnknown, LoginRefused, NodeUnreachable
from engine.models import NodeTelemetry, RankUse
from engine.nodes import gauges, linux, macos
from engine.nodes.macmon import Gauges, macmon, number
from engine.security.hosts import SshTarget
from engine.security.sanitise import sanitise
from engine.transport.base import Transport

SCRIPT = Path(__file__).with_name("telemetry_script.py")
INTERVAL_S = 2.0
SILENCE_S = 20.0
"""A node that says nothing for so long, or ten intervals, is asked anew."""
RETRY_S = (2.0, 30.0)
"""First and longest pause before a node is asked again; a login that was refused is not tried more often than the
longest."""
LINE_LIMIT = 1 << 17
RANK_LIMIT = 4096
_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,200}")


class Ways(Protocol):
    """Who knows the way to each node: a Fleet."""

    def to(self, node: NodeConfig) -> Transport: ...


async def telemetry(
    config: FlightConfig,
    fleet: Ways,
    clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    *,
    interval_s: float = INTERVAL_S,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    rng: random.Random | None = None,
) -> AsyncIterator[NodeTelemetry]:
    """Every node's values as they come, without end: each host speaks every `interval_s` seconds. Nodes on one host
    get the same values, the ranks of the whole host among them. A node that does not answer yields its `problem`, and
    is asked again. A slow reader gets the newest of each node. Closing the iterator ends the programs on the nodes."""
    hosts: dict[SshTarget, list[NodeConfig]] = {}
    for node in config.nodes:
        hosts.setdefault(SshTarget.parse(node.ssh), []).append(node)
    board = _Board()
    rng = rng or random.Random()
    watches = [
        asyncio.create_task(_Host(fleet.to(nodes[0]), nodes, board, clock, interval_s).watch(pause, rng))
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


class _Board:
    """The newest value of each node that nobody has taken yet."""

    def __init__(self) -> None:
        self._newest: dict[str, NodeTelemetry] = {}
        self._some = asyncio.Event()

    def put(self, value: NodeTelemetry) -> None:
        self._newest[value.node] = value
        self._some.set()

    async def take(self, watches: list[asyncio.Task[None]]) -> list[NodeTelemetry]:
        """All there is, once there is any. Raises what a watch has died of."""
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


class _Host:
    """One host: its program, its lines, its problems."""

    def __init__(
        self,
        transport: Transport,
        nodes: list[NodeConfig],
        board: _Board,
        clock: Callable[[], datetime],
        interval_s: float,
    ) -> None:
        self._transport = transport
        self._nodes = nodes
        self._board = board
        self._clock = clock
        self._interval_s = interval_s
        self._text = SCRIPT.read_text(encoding="utf-8")
        self._failures = 0

    async def watch(self, pause: Callable[[float], Awaitable[None]], rng: random.Random) -> None:
        """Listen, and after every end say why and begin again."""
        while True:
            first, longest = RETRY_S
            try:
                problem = await self._listen()
            except (HostKeyUnknown, HostKeyChanged, LoginRefused) as error:
                problem, first = str(error), longest
            except FileNotFoundError:
                problem = f"no such interpreter: {self._nodes[0].python}"
            except (NodeUnreachable, OSError) as error:
                problem = str(error)
            self._tell(problem=sanitise(problem.encode(errors="replace"), 200) or "no answer")
            await pause(min(longest, first * 2**self._failures) * rng.uniform(0.75, 1.25))
            self._failures = min(self._failures + 1, 10)

    async def _listen(self) -> str:
        """Pass on what the host says until it ends; why it ended."""
        python = self._nodes[0].python
        channel = await self._transport.open([python, "-I", "-S", "-c", self._text, f"{self._interval_s:g}"])
        state = Reader()
        torn = b""
        patience = max(SILENCE_S, 10 * self._interval_s)
        try:
            while True:
                try:
                    async with asyncio.timeout(patience):
                        data = await channel.read(65536)
                except TimeoutError:
                    return f"no values for {patience:g} s"
                if not data:
                    # What it last said comes with its end.
                    code = await channel.close()
                    said = channel.last_words
                    return f"{python} ended with {code}" + (f": {said}" if said else "")
                *whole, torn = (torn + data).split(b"\n")
                if len(torn) > LINE_LIMIT:
                    return f"a line of more than {LINE_LIMIT:,} bytes"
                for line in whole:
                    self._take(state, line)
                if whole:
                    await channel.write(b"\n")
        finally:
            # Bounded: a node that is gone must not hold up whoever stops looking.
            with contextlib.suppress(NodeUnreachable, OSError, TimeoutError):
                async with asyncio.timeout(5):
                    await channel.close()

    def _take(self, state: Reader, line: bytes) -> None:
        values = state.read(line, self._clock())
        if values is not None:
            self._failures = 0
            self._tell(**values)

    def _tell(self, **values: Any) -> None:
        for node in self._nodes:
            with contextlib.suppress(ValidationError):
                self._board.put(NodeTelemetry(node=node.name, at=self._clock(), **values))


class Reader:
    """The lines of one program, read: counters need the one before, and slow readings stay until the next."""

    def __init__(self) -> None:
        self._ticks: tuple[int, int] | None = None
        self._slow: dict[str, Any] = {}

    def read(self, line: bytes, at: datetime) -> dict[str, Any] | None:
        """Fields of NodeTelemetry; None for a line that is not the program's."""
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(said, dict) or said.get("system") not in ("Linux", "Darwin"):
            return None
        on_mac = said["system"] == "Darwin"
        values: dict[str, Any] = dict(self._mac(said) if on_mac else self._linux(said))
        if "ranks" in said:
            self._slow |= {"ranks": _ranks(said["ranks"]), "slow_at": at}
        if "thermal" in said:
            self._slow["thermal"] = gauges.mac_thermal(_text(said["thermal"]))
        return values | self._slow

    def _linux(self, said: dict[str, Any]) -> dict[str, Any]:
        meminfo = _text(said.get("meminfo"))
        values: dict[str, Any] = {
            "cpu_use": self._cpu(gauges.cpu_ticks(_text(said.get("cpu")))),
            "memory_used_bytes": linux.memory(meminfo)[1],
            "swap_used_bytes": gauges.linux_swap_used(meminfo),
            "cpu_temperature_c": number(said.get("cpu_temperature_c")),
            "source": "/proc",
        }
        lines = said.get("nvidia")
        if isinstance(lines, list):
            values |= gauges.nvidia(map(_text, lines))
            values["source"] = "/proc, nvidia-smi"
        return values

    def _mac(self, said: dict[str, Any]) -> dict[str, Any]:
        if "macmon" in said:
            values: dict[str, Any] = {**macmon(_text(said["macmon"])), "source": "macmon"}
        else:
            used = macos.memory_used(_text(said.get("vm_stat")))
            swap, gpu = gauges.mac_swap_used(_text(said.get("swapusage"))), gauges.mac_gpu_use(_text(said.get("ioreg")))
            values = {
                "memory_used_bytes": used,
                "swap_used_bytes": swap,
                "gpu_use": gpu,
                "source": "vm_stat, sysctl, ioreg",
            }
        # The kernel's own counters mean the same on every system and with every macmon.
        use = self._cpu(gauges.mac_cpu_ticks(said.get("ticks")))
        return values | ({"cpu_use": use} if use is not None else {})

    def _cpu(self, ticks: tuple[int, int] | None) -> float | None:
        use = gauges.cpu_use(self._ticks, ticks)
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


__all__ = ["Gauges", "Reader", "telemetry"]
