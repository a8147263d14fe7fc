"""The training step of every node alone: nodes of different machines at the same time, ranks of one machine one after
another. Everything of it on a node is leased: a head that is killed or cut off leaves nothing there.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from engine.calibration.answers import Figures, Said
from engine.config.models import FlightConfig, NodeConfig
from engine.errors import FlightDeckError, LaunchError, NodeUnreachable
from engine.launch.asking import at_once
from engine.launch.place import Place
from engine.launch.staging import hosts_of
from engine.launch.trainer_job import trainer_job
from engine.measured import CalibrationProgress, MemoryProbe, NodeMeasure
from engine.preflight.leases import Leases
from engine.preflight.scene import Scene, read
from engine.runs.layout import node_root
from engine.security.home import make_private
from engine.security.sanitise import plain
from engine.transport.base import Channel
from engine.worker.wire import CHECK_PREFIX, NONCE_ENV, MeasureSpec

Tell = Callable[[CalibrationProgress], None]

STAND_IN_BATCH = 4
"""Sequences of each step of the stand-in, on every node."""
_LOAD_LIMIT_S = 900.0
"""A large model from a slow disk."""
_END_LIMIT_S = 4.0
_READ_BYTES = 1 << 16
_LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class Alone:
    """What each node did by itself."""

    nodes: tuple[NodeMeasure, ...]
    """In rank order."""
    gradient_bytes: int | None
    """None where they differ, or no node was measured."""
    left: str
    """In words, what could not be ended."""


def step_batch(config: FlightConfig) -> int:
    """Sequences of a measured step: an equal part of the global batch, rounded up."""
    if config.job.command is not None:
        return STAND_IN_BATCH
    return -(-int(config.job.mlx_lm.get("batch_size") or 1) // len(config.nodes))


async def measure_nodes(scene: Scene, seconds: float, tell: Tell) -> Alone:
    """Measure every node of the scene, `seconds` each; one that cannot be measured says why. Cancelled, it ends what
    it has started first. Raises LaunchError, NodeUnreachable when nothing can be started on one of them."""
    check = _Check.new(scene, seconds, tell)
    make_private(node_root())
    leases = Leases(scene, check.nonce)
    with tempfile.TemporaryDirectory(prefix=CHECK_PREFIX, dir=node_root(), ignore_cleanup_errors=True) as here:
        try:
            await leases.take(check.check_id, Path(here))
            await at_once(check.put(place) for place in await scene.places())
            hosts = hosts_of(scene.config.nodes).values()
            measured = [found for host in await at_once(check.host(ranks) for ranks in hosts) for found in host.items()]
        finally:
            left = await asyncio.shield(leases.give_back())
    figures: Mapping[int, tuple[NodeMeasure, int | None]] = dict(measured)
    sizes = {size for _, size in figures.values() if size is not None}
    nodes = tuple(figures[rank][0] for rank in sorted(figures))
    return Alone(nodes, sizes.pop() if len(sizes) == 1 else None, left)


@dataclass(frozen=True)
class _Check:
    """One measurement on its way."""

    scene: Scene
    seconds: float
    tell: Tell
    nonce: str
    check_id: str
    """Names its folders on the nodes; the prefix is what a lease removes."""

    @classmethod
    def new(cls, scene: Scene, seconds: float, tell: Tell) -> _Check:
        nonce = secrets.token_hex(16)
        return cls(scene, seconds, tell, nonce, f"{CHECK_PREFIX}{nonce[:12]}")

    async def put(self, place: Place) -> None:
        """What each rank of the host measures."""
        files = {f"rank{rank}.json": self._spec(rank, place).to_json().encode() for rank in place.ranks}
        node = self.scene.config.nodes[place.ranks[0]]
        try:
            await self.scene.transport(node).put_tree(self._folder(place), files)
        except OSError as error:
            why, where = error.strerror or str(error), f"{node.name}:{self._folder(place)}"
            raise LaunchError("the calibration's files could not be written", where=where, why=why) from error

    async def host(self, ranks: tuple[int, ...]) -> dict[int, tuple[NodeMeasure, int | None]]:
        """The measures of a machine's ranks, one after another, and the bytes of their gradients."""
        return {rank: await self._rank(rank) for rank in ranks}

    async def _rank(self, rank: int) -> tuple[NodeMeasure, int | None]:
        node = self.scene.config.nodes[rank]
        try:
            figures = await self._measured(rank, node)
        except (FlightDeckError, OSError, TimeoutError) as error:
            figures = Figures(problem=plain(str(error) or "no answer in time", 300))
        found = "not measured" if figures.examples_per_s is None else "measured"
        self._tell(node, found, figures.measured_s, figures.examples_per_s, figures.problem or "")
        return _measure(node, figures), figures.gradient_bytes

    async def _measured(self, rank: int, node: NodeConfig) -> Figures:
        place = await self.scene.place_of(node)
        spec = self._folder(place) / f"rank{rank}.json"
        argv = ["/usr/bin/env", f"{NONCE_ENV}={self.nonce}", place.expanded(node.python)]
        argv += ["-m", "worker.calibrate", str(spec)]
        channel = await self.scene.transport(node).open(argv, directory=PurePosixPath(place.bundle))
        try:
            async with asyncio.timeout(_LOAD_LIMIT_S + 5 * self.seconds):
                async for line in _lines(channel):
                    said = read(line, Said)
                    if said is not None and said.measured is not None:
                        return said.measured
                    if said is not None and (now := said.progress) is not None:
                        self._tell(node, now.phase, now.elapsed_s, now.examples_per_s)
            raise LaunchError("measuring has ended without a result", where=node.name, why=plain(channel.last_words))
        finally:
            # A node that does not answer is left to its lease.
            with contextlib.suppress(NodeUnreachable, OSError, TimeoutError):
                async with asyncio.timeout(_END_LIMIT_S):
                    await channel.close()

    def _tell(
        self, node: NodeConfig, phase: str, elapsed_s: float, examples_per_s: float | None, note: str = ""
    ) -> None:
        self.tell(CalibrationProgress(node.name, phase, elapsed_s, self.seconds, examples_per_s, note))

    def _spec(self, rank: int, place: Place) -> MeasureSpec:
        config, node = self.scene.config, self.scene.config.nodes[rank]

        def there(path: str | None) -> str | None:
            return place.expanded(self.scene.path(node, path)) if path is not None else None

        job = trainer_job(config)
        if job is not None and job.get("resume_adapter_file") is not None:
            job["resume_adapter_file"] = there(job["resume_adapter_file"])
        return MeasureSpec(
            workdir=place.expanded(node.workdir),
            job=job,
            model=there(node.model or config.job.model),
            data=there(node.data or config.job.data),
            batch=step_batch(config),
            seconds=self.seconds,
            env=dict(config.job.env),
        )

    def _folder(self, place: Place) -> PurePosixPath:
        return PurePosixPath(place.root) / "runs" / self.check_id / "calibration"


async def _lines(channel: Channel) -> AsyncIterator[bytes]:
    """What a program says, line by line; of one without end the last part. Raises NodeUnreachable."""
    words = b""
    while block := await channel.read(_READ_BYTES):
        *lines, words = (words + block).split(b"\n")
        words = words[-_LINE_BYTES:]
        for line in lines:
            yield line


def _measure(node: NodeConfig, figures: Figures) -> NodeMeasure:
    known = figures.model_dump(exclude={"probes", "gradient_bytes"})
    probes = tuple(MemoryProbe(batch=batch, peak_bytes=peak) for batch, peak in figures.probes)
    return NodeMeasure(node=node.name, host=node.ssh, probes=probes, **known)
