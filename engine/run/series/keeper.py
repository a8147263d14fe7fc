"""The supervisor's part of a run's series: the nodes' telemetry, and the pyramids while rows arrive."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable
from typing import Any, Final

from engine.cluster.host_connection import HostConnection
from engine.errors import StateError
from engine.run.json_lines import LineFile
from engine.run.series.builder import SeriesBuilder
from engine.store.layout import RunDir

EVERY_S: Final = 1.0
_LIMIT_S: Final = 0.05
"""The supervisor's time for a poll: what a run has from before is taken in bit by bit."""
_DIRECT: Final = ("gpu_use", "cpu_use", "memory_used_bytes", "received_bytes_per_s", "sent_bytes_per_s", "thermal")


class SeriesKeeper:
    """A fault of it, a full disk for example, holds up nothing: the next poll goes on."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._builder: SeriesBuilder | None = None
        self._telemetry: LineFile | None = None
        self._polled_at = float("-inf")

    def poll(self, now: float, hosts: Iterable[HostConnection]) -> None:
        """`now`: seconds on any clock."""
        if now - self._polled_at < EVERY_S:
            return
        self._polled_at = now
        with contextlib.suppress(OSError, StateError):
            for host in hosts:
                while host.power.samples:
                    self._keep_sample(host.names[0], host.power.samples.popleft())
            self._build(_LIMIT_S)

    def close(self) -> None:
        """The run's end: what is left is taken in."""
        with contextlib.suppress(OSError, StateError):
            self._build(float("inf"), ended=True)
        for file in (self._builder, self._telemetry):
            if file is not None:
                file.close()

    def _build(self, limit_s: float, *, ended: bool = False) -> None:
        if self._builder is None:
            # A console that has built what there was lets go of it at once.
            self._builder = SeriesBuilder.take(self._run_dir)
        if self._builder is not None:
            try:
                self._builder.poll(limit_s, ended=ended)
            except ValueError:
                # Somebody has cut a pyramid short: the next one to take them makes them anew.
                self._builder.close()
                self._builder = None

    def _keep_sample(self, node: str, values: dict[str, Any]) -> None:
        if self._telemetry is None:
            self._telemetry = LineFile(self._run_dir.telemetry)
        sample = {name: values.get(name) for name in _DIRECT}
        sample["power"] = values.get("power_w") or values.get("gpu_power_w")
        sample["temperature"] = values.get("gpu_temperature_c") or values.get("cpu_temperature_c")
        sample = {name: value for name, value in sample.items() if value is not None}
        if sample and not (self._telemetry.waits and not self._telemetry.flush()):
            self._telemetry.append(json.dumps({"at": round(time.time(), 3), "node": node, **sample}).encode())
