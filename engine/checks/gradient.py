"""gradient_layer: a real all_sum over all ranks, started the way an attempt starts them, with its own nonce and ports.

Without the right environment MLX silently makes a group of size 1 and every rank would train alone. So the group size
is compared with the configuration, and every sum must be exact. Everything it starts is held by leases."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import PurePosixPath
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from engine.checks import connectivity, hostfile, sync, versions
from engine.checks.check import Check
from engine.checks.context import CheckContext
from engine.checks.interpreter import Interpreter
from engine.checks.leases import Leases, leased
from engine.checks.plan_inputs import chosen_job
from engine.checks.ports import fresh_block
from engine.cluster.agent_client import AgentClient
from engine.cluster.staging import HostLayout, gather_all
from engine.cluster.transport.base import Completed
from engine.config.models import Config, JobConfig, NodeConfig
from engine.errors import FlightDeckError, size_text
from engine.failures.explanation import explain, explained
from engine.failures.signature import SignatureKind
from engine.launch import mlx_launch, ssh_shim
from engine.launch.hostfile import write_hostfile
from engine.launch.mlx_launch import arguments
from engine.launch.rank_environment import (
    RankEnvironment,
    gpu_environment,
    job_command,
    network_environment,
    rank_environment,
)
from engine.launch.ssh_shim import launcher_environment
from engine.launch.start_script import RankProgram, ranks_script, run_start_script
from engine.models import CheckResult, CheckStatus
from engine.plan.network import NetworkPlan
from engine.protocol.attempt import NONCE_ENV
from engine.protocol.events import tail
from engine.protocol.job import TorchSettings
from engine.protocol.launchers import joined_options, split_launcher
from engine.protocol.measurements import AllSumResult
from engine.security.sanitise import plain

START_ALLOWANCE_S = 55.0
"""For the ranks to connect; engine.trainer.allreduce_check gives up by itself a little earlier."""
_ATTEMPT = 1
_LAUNCHER_POLL_S = 0.1
_RESULT_BYTES = 1 << 20
_OUTPUT_BYTES = 16_384
_RESULT = TypeAdapter(AllSumResult)
_ALL_SUM = "engine.trainer.allreduce_check"
_ALL_REDUCE = "engine.torch_trainer.allreduce_check"
_TRIED = ("ACCELERATE_", "CUDA_", "GLOO_", "TORCH_")
"""Variables of [job] env that decide how a group of PyTorch's comes about; others may be secrets."""
_TORCH_ALLOWANCE_S = 110.0
"""START_ALLOWANCE_S of engine.torch_trainer.allreduce_check."""
_ACCELERATE_LAUNCH = "engine/torch_trainer/accelerate_launch.py"
"""In the bundle, where every rank is started."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class GroupProgram:
    """A module of the trainer that every rank runs once, all of them in one group. `--out` is added, the file for its
    result, a JSON object."""

    module: str
    arguments: Sequence[str]
    """ "{folder}" is replaced by the folder of `files` on the node, "{workdir}" by the rank's workdir."""
    limit_s: float
    environment: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)
    """By name, the same on every host."""
    launcher: Sequence[str] = ()
    """Words between python and `-m module`, with the same replacements."""


@dataclass(frozen=True)
class GroupOutcome(Generic[Result]):
    """How each rank ended."""

    results: Mapping[int, Result | None]
    """None for one that wrote no result."""
    outputs: Mapping[int, Sequence[str]]
    """The last lines of its output, else what was reported about it."""
    codes: Mapping[int, int]
    """Exit codes other than 0, as far as they are known."""
    leftovers: str
    """Processes that could not be ended, as a message; "" for none."""


AllSumOutcome = GroupOutcome[AllSumResult]


async def run_all_sum(context: CheckContext) -> AllSumOutcome:
    """Run an all_sum on all ranks. Cancelled, it ends them first. Raises LaunchError, NodeUnreachable at the start."""
    config, job = context.config, await chosen_job(context)

    def program(network: NetworkPlan, _: Sequence[HostLayout]) -> GroupProgram:
        seconds = config.preflight.all_sum_s
        arguments = ["--seconds", str(seconds), "--world-size", str(len(config.nodes)), "--backend", network.backend]
        limit_s = START_ALLOWANCE_S + 5 * seconds
        if network.framework == "torch":
            limit_s = _TORCH_ALLOWANCE_S + 5 * seconds
            asked, launcher = _accelerate(job)
            arguments += ["--accelerate", json.dumps(asked)] if asked else []
            environment = network_environment(network, config.job.env)
            environment |= {name: text for name, text in config.job.env.items() if name.startswith(_TRIED)}
            return GroupProgram(_ALL_REDUCE, arguments, limit_s, environment, launcher=launcher)
        return GroupProgram(_ALL_SUM, arguments, limit_s, network_environment(network, config.job.env))

    return await run_group(context, program, _RESULT)


def _accelerate(job: JobConfig) -> tuple[dict[str, Any], list[str]]:
    """The request of the job's ranks to Accelerate, empty if they do not use it, and the words that give them the
    environment of `accelerate launch`."""
    launcher, options, _ = split_launcher(job_command(job))
    if job.kind.own_model is None:
        settings = {entry.name: job.mlx_lm.get(entry.name) for entry in fields(TorchSettings)}
        return {"strategy": job.strategy, "recipe": settings}, []
    if launcher != "accelerate":
        return {}, []
    given = dict(zip(options[::2], options[1::2], strict=True))
    if "--config_file" in given:
        # Relative to the workdir; an absolute path stays as it is.
        given["--config_file"] = str(PurePosixPath("{workdir}", given["--config_file"]))
    words = [word for name, value in given.items() if name != "--module" for word in (name, value)]
    return {"strategy": job.strategy}, [_ACCELERATE_LAUNCH, *joined_options(words)]


async def run_group(
    context: CheckContext,
    make: Callable[[NetworkPlan, Sequence[HostLayout]], GroupProgram],
    result_type: TypeAdapter[Result],
) -> GroupOutcome[Result]:
    """Run a program on all ranks, started the way an attempt starts them. Cancelled, it ends them first. Raises
    LaunchError, NodeUnreachable when they could not be started."""
    async with leased(context) as leases:
        network, layouts = await context.network_plan(), await context.layouts()
        group = _Group(context, leases, network, layouts, make(network, layouts))
        starting_port, *_ = await gather_all([fresh_block(context, network), leases.acquire()])
        assert starting_port is not None
        codes, ssh_output = await group.run(starting_port)
        answers = await context.on_all_nodes(group.read)
    results: dict[int, Result | None] = {}
    outputs: dict[int, Sequence[str]] = {}
    for rank, node in enumerate(context.config.nodes):
        answer = answers[node.name]
        result, output = (b"", [str(answer)]) if isinstance(answer, FlightDeckError) else answer
        outputs[rank] = output or ssh_output.get(rank, ())
        results[rank] = None
        with contextlib.suppress(ValidationError):
            results[rank] = result_type.validate_json(result)
    return GroupOutcome(results, outputs, codes, leases.leftovers)


@dataclass(frozen=True)
class _Group:
    context: CheckContext
    leases: Leases
    network: NetworkPlan
    layouts: tuple[HostLayout, ...]
    program: GroupProgram

    async def run(self, starting_port: int) -> tuple[dict[int, int], dict[int, Sequence[str]]]:
        """Write the files and run all ranks to their end: their exit codes, and what ssh or the launcher reported."""
        direct = self.context.config.starts_directly
        environment = rank_environment(self.network, starting_port, os.environ)
        await gather_all(self._put(layout, environment if direct else None) for layout in self.layouts)
        if direct:
            return await self._run_direct(environment)
        return await self._with_launcher(starting_port)

    async def read(self, node: NodeConfig) -> tuple[bytes, Sequence[str]]:
        """The result that the node's rank wrote, and the last lines of its output."""
        layout, rank = await self.context.layout_of(node), self.context.config.nodes.index(node)
        agent, folder = self._agent(layout), self._folder(layout)
        result = await agent.read_end(folder / f"rank{rank}.json", _RESULT_BYTES)
        return result, _lines(await agent.read_end(folder / f"rank{rank}.log", _OUTPUT_BYTES))

    async def _put(self, layout: HostLayout, environment: RankEnvironment | None) -> None:
        """Write start.sh, and without mlx.launch the files that it would have written."""
        launcher_here = self.context.config.nodes[layout.ranks[0]].local and environment is None
        script = ranks_script(
            {rank: self._program(rank, layout) for rank in layout.ranks},
            PurePosixPath(layout.bundle),
            backend=self.network.backend,
            world_size=len(self.context.config.nodes),
            environment={**self.program.environment, **({"PATH": os.environ.get("PATH")} if launcher_here else {})},
        )
        files = {"start.sh": script, **self.program.files}
        if environment is not None:
            files |= environment.files
        await self.leases.write(layout, self._folder(layout), files)

    def _program(self, rank: int, layout: HostLayout) -> RankProgram:
        folder, python = self._folder(layout), layout.expanded(self.context.config.nodes[rank].python)
        workdir = layout.expanded(self.context.config.nodes[rank].workdir)
        words = [*self.program.launcher, "-m", self.program.module, *self.program.arguments]
        argv = [python, *(word.replace("{folder}", str(folder)).replace("{workdir}", workdir) for word in words)]
        argv += ["--out", str(folder / "rank{rank}.json")]
        output = f">{shlex.quote(str(folder / f'rank{rank}.log'))} 2>&1"
        return RankProgram(argv, output, gpu_environment(self.network, rank, self.program.environment))

    async def _with_launcher(self, starting_port: int) -> tuple[dict[int, int], dict[int, Sequence[str]]]:
        check_id, here, nonce = self.leases.check_id, self.leases.here, {NONCE_ENV: self.leases.nonce}
        write_hostfile(here / "hostfile.json", self.network)
        argv = arguments(
            hostfile=here / "hostfile.json",
            starting_port=starting_port,
            program=ssh_shim.program(check_id, _ATTEMPT),
            environment=nonce,
            backend=self.network.backend,
        )
        home, nodes = self.context.fleet.home, self.context.config.nodes
        launcher_variables = launcher_environment(
            here, nodes, self.layouts, home=home, run_id=check_id, attempt=_ATTEMPT
        )
        launcher = mlx_launch.start(
            argv,
            stdin=here / "launcher.in",
            output=here / "launcher.log",
            environment={**nonce, **launcher_variables},
            directory=here,
        )
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.program.limit_s):
                    while launcher.alive():
                        launcher.drop_pipes()
                        await asyncio.sleep(_LAUNCHER_POLL_S)
        finally:
            launcher.kill()
        by_ssh = {rank: _lines(tail(ssh_shim.ssh_log_path(here, rank)).encode()) for rank in range(len(nodes))}
        outputs = {rank: printed or _lines(launcher.tail().encode()) for rank, printed in by_ssh.items()}
        return dict(launcher.rank_ends()), outputs

    async def _run_direct(self, environment: RankEnvironment) -> tuple[dict[int, int], dict[int, Sequence[str]]]:
        nodes = self.context.config.nodes
        ended = await asyncio.gather(*(self._rank(rank, node, environment) for rank, node in enumerate(nodes)))
        codes = {rank: end.code for rank, end in enumerate(ended) if end.code}
        return codes, {rank: _lines(end.exit_output.encode()) for rank, end in enumerate(ended)}

    async def _rank(self, rank: int, node: NodeConfig, environment: RankEnvironment) -> Completed:
        layout = await self.context.layout_of(node)
        folder = self._folder(layout)
        variables = {NONCE_ENV: self.leases.nonce, **environment.of_rank(rank, folder)}
        try:
            return await run_start_script(self._agent(layout), folder / "start.sh", variables, self.program.limit_s)
        except FlightDeckError as error:
            return Completed(None, b"", str(error).encode())

    def _agent(self, layout: HostLayout) -> AgentClient:
        """The host's first node's: a rank's own python may be missing, which start.sh reports."""
        return self.context.agent(self.context.config.nodes[layout.ranks[0]])

    def _folder(self, layout: HostLayout) -> PurePosixPath:
        # Like an attempt's, so that what starts an attempt's ranks starts these.
        return self.leases.folder(layout) / "attempts" / str(_ATTEMPT)


def _lines(output: bytes) -> Sequence[str]:
    return [plain(line) for line in output[-_OUTPUT_BYTES:].decode(errors="replace").splitlines() if line.strip()]


NAME = "gradient_layer"
_LIMIT_S = _TORCH_ALLOWANCE_S + 5 * 60 + 30
"""For the longest all_sum that a configuration allows."""

_LOST = re.compile(r"PeerLost|ended with -15\b|DistStoreError|DistNetworkError|a peer does not respond")
"""Faults of ranks that only lost a peer; -15 is the launcher's TERM, once another rank has ended."""


def is_consequence(fault: str, output: Sequence[str]) -> bool:
    """The rank that printed `output` only lost a peer."""
    finding = explain([*output, fault])
    if finding is None or finding.signature is None:
        return _LOST.search(fault) is not None
    return finding.kind is SignatureKind.CONSEQUENCE


async def run(context: CheckContext) -> CheckResult:
    # Not versions_match as a whole: importing mlx-lm takes seconds and may run meanwhile.
    seen, backend = await asyncio.gather(context.interpreters(), versions.planned_backend(context))
    if unfit := [name for name, interpreter in seen.items() if not _fit(context.config, interpreter, backend)]:
        why = seen[unfit[0]].problem or f"no {backend} there"
        summary = f"not run: no rank can start on {', '.join(unfit)}: {why}"
        first = next(rank for rank, node in enumerate(context.config.nodes) if node.name == unfit[0])
        return CheckResult(name=NAME, status=CheckStatus.FAIL, summary=summary, blames=(first, unfit[0]))
    return evaluate(context.config, await run_all_sum(context))


def _fit(config: Config, seen: Interpreter, backend: str) -> bool:
    # Which backends PyTorch has is known only once it is imported.
    has_backend = not seen.backends or versions.backend_name(backend) in seen.backends
    return config.job.kind.framework.packages[0] in seen.packages and has_backend


def evaluate(config: Config, outcome: AllSumOutcome) -> CheckResult:
    """A rank that only lost its peers is not blamed while another has a cause of its own."""
    world_size, results = len(config.nodes), outcome.results
    faults = {rank: _fault(results[rank], config, outcome.outputs[rank], outcome.codes.get(rank)) for rank in results}
    described = {rank: faults[rank] or _describe(results[rank]) for rank in results}
    evidence = {node.name: f"rank {rank}: {described[rank]}" for rank, node in enumerate(config.nodes)}
    failed = {rank: fault for rank, fault in faults.items() if fault is not None}
    status, blames = CheckStatus.PASS, None
    if failed:
        first = min(failed, key=lambda rank: (is_consequence(failed[rank], outcome.outputs[rank]), rank))
        status, blames = CheckStatus.FAIL, (first, config.nodes[first].name)
        summary = f"rank {first} on {config.nodes[first].name}: {explained(failed[first], outcome.outputs[first])}"
    elif world_size == 1:
        summary = "one rank, a group of 1 as planned: nothing is exchanged"
    else:
        measured = [result for result in results.values() if result is not None]
        slowest = max(result.latency_s or 0.0 for result in measured)
        narrowest = min(result.bandwidth_bytes_per_s or 0.0 for result in measured)
        summary = f"{world_size} ranks, exact, {slowest * 1e3:.2f} ms, {size_text(narrowest)}/s"
    if outcome.leftovers:
        status, summary = CheckStatus.FAIL, f"{summary}; {outcome.leftovers}"
    return CheckResult(name=NAME, status=status, summary=summary, evidence=evidence, blames=blames)


def _fault(result: AllSumResult | None, config: Config, output: Sequence[str], code: int | None) -> str | None:
    if result is None:
        ended = f"ended with {code}" if code is not None else "wrote no result"
        return f"{ended}: {output[-1].strip()}" if output else ended
    if result.error is not None:
        return plain(result.error, 300)
    world_size, framework = len(config.nodes), config.job.kind.framework.title
    if result.size != world_size:
        return f"{framework} made a group of {result.size} where {world_size} are planned"
    return None if result.exact else "the sum is not exact"


def _describe(result: AllSumResult | None) -> str:
    if result is None or result.latency_s is None or result.bandwidth_bytes_per_s is None:
        return "not measured"
    if result.size == 1:
        return "one rank"
    chosen = f", Accelerate chose {plain(result.chosen, 100)}" if result.chosen else ""
    return f"exact, {result.latency_s * 1e3:.2f} ms, {size_text(result.bandwidth_bytes_per_s)}/s{chosen}"


CHECK = Check(
    NAME, "a real all_sum over all ranks, by the job's own framework and backend", run, time_limit_s=_LIMIT_S,
    label="gradient sum", needs=(connectivity.NAME, hostfile.NAME, sync.NAME),
)  # fmt: skip
