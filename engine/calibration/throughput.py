"""Node throughput: each node gets the job in its own paths, and measures its training step alone.

Nodes on different hosts are measured concurrently, ranks of one host one after another. Everything started on a node
is held by a lease, so a head that dies leaves nothing there."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath

from engine.checks.context import CheckContext
from engine.checks.leases import Leases, leased
from engine.cluster.probe_results import ShortText, parse_line
from engine.cluster.staging import HostLayout, gather_all, hosts_of
from engine.config.mlx_lm_keys import full_sequences
from engine.config.models import Config, NodeConfig
from engine.errors import FlightDeckError, LaunchError, NodeUnreachable
from engine.failures.explanation import explained
from engine.launch.rank_environment import rank_spec, trainer_job
from engine.measurements import CalibrationProgress, Count, NodeMeasure
from engine.models import NodeFacts
from engine.plan.network import gpu_of
from engine.protocol.attempt import NONCE_ENV
from engine.protocol.measurements import MeasureSpec
from engine.protocol.messages import RequestEnded
from engine.security.sanitise import plain


class MeasureResult(NodeMeasure):
    """engine.protocol.measurements.MeasureReport; a node does not say which one it is."""

    node: str = ""
    host: str = ""
    gradient_bytes: Count | None = None
    qos: ShortText | None = None
    problem: ShortText | None = None
    phase: ShortText


OnProgress = Callable[[CalibrationProgress], None]

SYNTHETIC_BATCH = 4
"""Sequences in each step of the synthetic model, on every node."""
_LOAD_LIMIT_S = 900.0
"""A large model from a slow disk."""
_END_LIMIT_S = 4.0


def step_batch(config: Config) -> int:
    """Sequences of a measured step: an equal part of the global batch, rounded up; of batch_tokens as many of full
    length."""
    if config.job.kind.own_model is not None:
        return SYNTHETIC_BATCH
    return -(-full_sequences(config.job.mlx_lm) // len(config.nodes))


async def measure_nodes(
    context: CheckContext, config: Config, seconds: float, on_progress: OnProgress, too_large: Mapping[str, str]
) -> tuple[list[NodeMeasure], int | None, str]:
    """Measure every node for `seconds` with the job of `config`, in which nothing is "auto". The measures in rank
    order, with a problem where there was one, or the job is `too_large`, by the node's name; the bytes of the gradients
    (None where they differ); and a message about processes that could not be ended ("" for none). Cancelled, it first
    ends what it has started. Raises LaunchError, NodeUnreachable when nothing can be started on a node."""
    async with leased(context) as leases:
        measurement = _Measurement(context, config, seconds, on_progress, leases, too_large)
        await leases.acquire()
        await gather_all(measurement.put(layout) for layout in await context.layouts())
        hosts = hosts_of(context.config.nodes).values()
        measured = await gather_all(measurement.host(ranks) for ranks in hosts)
    figures = {rank: figure for host in measured for rank, figure in host.items()}
    sizes = {figure.gradient_bytes for figure in figures.values()} - {None}
    nodes = [_measure(node, figures[rank]) for rank, node in enumerate(context.config.nodes)]
    return nodes, sizes.pop() if len(sizes) == 1 else None, leases.leftovers


@dataclass(frozen=True)
class _Measurement:
    context: CheckContext
    config: Config
    seconds: float
    on_progress: OnProgress
    leases: Leases
    too_large: Mapping[str, str] = field(default_factory=dict)

    async def put(self, layout: HostLayout) -> None:
        facts = await self.context.facts()
        specs = {rank: asdict(self._spec(rank, layout, facts)) for rank in layout.ranks}
        files = {f"rank{rank}.json": json.dumps(spec) for rank, spec in specs.items()}
        await self.leases.write(layout, self._folder(layout), files)

    async def host(self, ranks: tuple[int, ...]) -> dict[int, MeasureResult]:
        """The measures of a machine's ranks, one after another."""
        return {rank: await self._rank(rank) for rank in ranks}

    async def _rank(self, rank: int) -> MeasureResult:
        node = self.context.config.nodes[rank]
        if (needed := self.too_large.get(node.name)) is not None:
            why = f"not measured by itself: the whole job needs {needed}"
            self._report(node, "not measured", 0.0, None, why)
            return MeasureResult(problem=why, phase="not measured")
        try:
            figures = await self._measured(rank, node)
        except (FlightDeckError, OSError, TimeoutError) as error:
            figures = MeasureResult(problem=plain(str(error) or "no answer in time", 300), phase="not measured")
        phase = "not measured" if figures.examples_per_s is None else "measured"
        self._report(node, phase, figures.measured_s, figures.examples_per_s, figures.problem or "")
        return figures

    async def _measured(self, rank: int, node: NodeConfig) -> MeasureResult:
        layout = await self.context.layout_of(node)
        spec = self._folder(layout) / f"rank{rank}.json"
        argv = ["/usr/bin/env", f"{NONCE_ENV}={self.leases.nonce}", layout.expanded(node.python)]
        argv += ["-m", "engine.trainer.calibrate", str(spec)]
        # From one report to the next: the node reports every step, and ends late ones itself.
        limit_s = _LOAD_LIMIT_S + 5 * self.seconds
        started = await self.context.agent(node).start_command(argv, directory=layout.bundle)
        with contextlib.closing(started) as request:
            try:
                while isinstance(line := await request.next_line(limit_s), bytes):
                    figures = parse_line(line, MeasureResult)
                    if figures is not None and figures.phase == "measured":
                        return figures
                    if figures is not None:
                        self._report(node, figures.phase, figures.measured_s, figures.examples_per_s)
                output_at_end = line.stderr.strip() if isinstance(line, RequestEnded) else str(line)
                why = explained(plain(output_at_end.rpartition("\n")[2]), output_at_end.splitlines())
                raise LaunchError("the measurement ended without a result", where=node.name, why=why)
            finally:
                # A node that does not answer is left to its lease.
                with contextlib.suppress(NodeUnreachable, TimeoutError):
                    async with asyncio.timeout(_END_LIMIT_S):
                        await request.cancel()

    def _report(
        self, node: NodeConfig, phase: str, elapsed_s: float, examples_per_s: float | None, note: str = ""
    ) -> None:
        self.on_progress(CalibrationProgress(node.name, phase, elapsed_s, self.seconds, examples_per_s, note))

    def _spec(self, rank: int, layout: HostLayout, facts: Mapping[str, NodeFacts]) -> MeasureSpec:
        config = self.config
        gpu = gpu_of(config, rank, facts.get(config.nodes[rank].name))
        there, job = rank_spec(config, rank, layout, 1.0), trainer_job(config)
        if job is not None and there.resume_adapter_file is not None:
            job["resume_adapter_file"] = there.resume_adapter_file
        return MeasureSpec(
            workdir=there.workdir,
            job=job,
            model=there.model,
            data=there.data,
            batch=step_batch(config),
            seconds=self.seconds,
            env=dict(config.job.env) | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}),
            ranks=len(config.nodes),
        )

    def _folder(self, layout: HostLayout) -> PurePosixPath:
        return self.leases.folder(layout) / "calibration"


def _measure(node: NodeConfig, figures: MeasureResult) -> NodeMeasure:
    return NodeMeasure.model_validate(figures.model_dump() | {"node": node.name, "host": node.ssh})
