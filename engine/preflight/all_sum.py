"""A real sum over the real ranks: worker.all_sum, started as an attempt's ranks are, with a nonce and ports of its own.

Nothing of it outlives the check, on any host: everything of it is leased.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pydantic import TypeAdapter, ValidationError

from engine.config.models import NodeConfig
from engine.errors import FlightDeckError, LaunchError, NodeUnreachable
from engine.launch import ssh_shim
from engine.launch.asking import at_once
from engine.launch.environment import (
    RankEnvironment,
    file_name,
    network_environment,
    of_rank,
    rank_environment,
    ranks_per_host,
)
from engine.launch.hostfile import write_hostfile
from engine.launch.launchers_own import launchers_own
from engine.launch.mlx_launch import arguments, rank_ends
from engine.launch.place import Place
from engine.launch.start_script import RankProgram, ranks_script
from engine.planning.wiring import Wiring
from engine.preflight.check import ranks_of
from engine.preflight.leases import Leases
from engine.preflight.ports import fresh_block
from engine.preflight.process import run
from engine.preflight.scene import Scene
from engine.runs.layout import node_root
from engine.security.home import make_private
from engine.security.sanitise import plain
from engine.transport.base import Completed, Transport
from engine.worker.wire import CHECK_PREFIX, NONCE_ENV, AllSumResult

START_ALLOWANCE_S = 55.0
"""For the ranks to find one another; worker.all_sum gives up by itself a little earlier."""
_NEWLINE_S = 0.25
_ATTEMPT = 1
_READ_BYTES = 1 << 20
_WORDS_BYTES = 4096
_RESULT = TypeAdapter(AllSumResult)


@dataclass(frozen=True)
class Summed:
    """What has become of each rank."""

    results: Mapping[int, AllSumResult | None]
    """None for one that wrote nothing."""
    words: Mapping[int, str]
    """The last that was said by it or of it, one line."""
    codes: Mapping[int, int]
    """Exit codes, of those that are known to have ended badly."""
    left: str
    """In words, what could not be ended."""


async def summed(scene: Scene) -> Summed:
    """Let all ranks sum. Cancelled, it ends them first. Raises LaunchError, NodeUnreachable when they could not even be
    started."""
    nonce = secrets.token_hex(16)
    # A folder like an attempt's, so that what starts an attempt's ranks starts these.
    check_id = f"{CHECK_PREFIX}{nonce[:12]}"
    make_private(node_root())
    leases = Leases(scene, nonce)
    with tempfile.TemporaryDirectory(prefix=CHECK_PREFIX, dir=node_root(), ignore_cleanup_errors=True) as here:
        try:
            trial = _Trial(scene, check_id, nonce, Path(here), await scene.wiring(), await scene.places())
            starting_port, *_ = await at_once([fresh_block(scene, trial.wiring), leases.take(check_id, Path(here))])
            assert starting_port is not None
            codes, ssh_words = await trial.start(starting_port)
            found = await scene.on_all(trial.read)
        finally:
            left = await asyncio.shield(leases.give_back())
    results: dict[int, AllSumResult | None] = {}
    words: dict[int, str] = {}
    for rank, node in ranks_of(scene.config):
        answer = found[node.name]
        if isinstance(answer, FlightDeckError):
            results[rank], words[rank] = None, str(answer)
        else:
            results[rank], words[rank] = answer[rank][0], answer[rank][1] or ssh_words.get(rank, "")
    return Summed(results, words, codes, left)


@dataclass(frozen=True)
class _Trial:
    """One sum on its way."""

    scene: Scene
    check_id: str
    nonce: str
    here: Path
    """A folder on this machine."""
    wiring: Wiring
    places: tuple[Place, ...]

    async def start(self, starting_port: int) -> tuple[dict[int, int], dict[int, str]]:
        """Put the files there and let all ranks run to their end; their exit codes, and what their way has said."""
        direct = self.scene.config.cluster.launcher == "direct"
        environment = rank_environment(self.wiring, starting_port, os.environ)
        await at_once(self._put(place, environment if direct else None) for place in self.places)
        if direct:
            return await self._directly(environment)
        return await self._with_launcher(starting_port)

    async def read(self, node: NodeConfig) -> dict[int, tuple[AllSumResult | None, str]]:
        """What the ranks of a node's host measured, and the last that each of them said."""
        place, transport = await self.scene.place_of(node), self.scene.transport(node)
        found = {}
        for rank in place.ranks:
            if self.scene.config.nodes[rank].name == node.name:
                result = parse_result(await _content(transport, self._folder(place) / f"rank{rank}.json"))
                said = await _content(transport, self._folder(place) / f"rank{rank}.log")
                found[rank] = result, _last_line(said)
        return found

    async def _put(self, place: Place, environment: RankEnvironment | None) -> None:
        """start.sh; without mlx.launch also the files that it would have written."""
        node, folder = self.scene.config.nodes[place.ranks[0]], self._folder(place)
        launcher_here = node.local and environment is None
        script = ranks_script(
            {rank: self._program(rank, place) for rank in place.ranks},
            PurePosixPath(place.bundle),
            backend=self.wiring.backend,
            world_size=len(self.scene.config.nodes),
            environment={
                **network_environment(self.wiring, self.scene.config.job.env),
                **({"PATH": os.environ.get("PATH")} if launcher_here else {}),
            },
        )
        files = {"start.sh": script}
        if environment is not None:
            files |= {file_name(name): content + "\n" for name, content in environment.files.items()}
        try:
            await self.scene.transport(node).put_tree(folder, {name: text.encode() for name, text in files.items()})
        except OSError as error:
            why, where = error.strerror or str(error), f"{node.name}:{folder}"
            raise LaunchError("the check's files could not be written", where=where, why=why) from error

    def _program(self, rank: int, place: Place) -> RankProgram:
        config, folder = self.scene.config, self._folder(place)
        argv = [place.expanded(config.nodes[rank].python), "-m", "worker.all_sum"]
        argv += ["--seconds", str(config.preflight.all_sum_s), "--world-size", str(len(config.nodes))]
        argv += ["--backend", self.wiring.backend, "--out", str(folder / "rank{rank}.json")]
        return RankProgram(argv, f">{shlex.quote(str(folder / f'rank{rank}.log'))} 2>&1")

    async def _with_launcher(self, starting_port: int) -> tuple[dict[int, int], dict[int, str]]:
        write_hostfile(self.here / "hostfile.json", self.wiring)
        argv = arguments(
            hostfile=self.here / "hostfile.json",
            starting_port=starting_port,
            program=ssh_shim.program(self.check_id, _ATTEMPT),
            environment={NONCE_ENV: self.nonce},
            backend=self.wiring.backend,
            ranks_per_host=ranks_per_host(self.wiring),
        )
        home, nodes = self.scene.fleet.home, self.scene.config.nodes
        own = launchers_own(self.here, nodes, self.places, home=home, run_id=self.check_id, attempt=_ATTEMPT)
        finished = await run(
            argv,
            time_limit_s=self._limit_s,
            environment={NONCE_ENV: self.nonce, **own},
            newline_every_s=_NEWLINE_S,
        )
        last = _last_line(finished.stderr.encode())
        words = {rank: _ssh_words(self.here, rank) or last for rank, _ in ranks_of(self.scene.config)}
        return dict(rank_ends(finished.stderr + finished.stdout)), words

    async def _directly(self, environment: RankEnvironment) -> tuple[dict[int, int], dict[int, str]]:
        ranks = ranks_of(self.scene.config)
        ended = await asyncio.gather(*(self._rank(rank, node, environment) for rank, node in ranks))
        codes = {rank: end.code for (rank, _), end in zip(ranks, ended, strict=True) if end.code}
        words = {rank: plain(end.last_words) for (rank, _), end in zip(ranks, ended, strict=True)}
        return codes, words

    async def _rank(self, rank: int, node: NodeConfig, environment: RankEnvironment) -> Completed:
        folder = self._folder(await self.scene.place_of(node))
        variables = {NONCE_ENV: self.nonce, **of_rank(environment, self.wiring, rank)}
        variables |= {name: str(folder / file_name(name)) for name in environment.files}
        assignments = [f"{name}={value}" for name, value in variables.items()]
        argv = ["/usr/bin/env", *assignments, "/bin/sh", str(folder / "start.sh")]
        try:
            return await self.scene.transport(node).run(argv, timeout_s=self._limit_s)
        except NodeUnreachable as error:
            return Completed(None, b"", str(error).encode())

    @property
    def _limit_s(self) -> float:
        return START_ALLOWANCE_S + 5 * self.scene.config.preflight.all_sum_s

    def _folder(self, place: Place) -> PurePosixPath:
        return PurePosixPath(place.root) / "runs" / self.check_id / "attempts" / str(_ATTEMPT)


def parse_result(content: bytes) -> AllSumResult | None:
    """What one rank measured; None when it wrote nothing."""
    try:
        return _RESULT.validate_json(content)
    except ValidationError:
        return None


async def _content(transport: Transport, path: PurePosixPath) -> bytes:
    try:
        return await transport.read_from(path, 0, _READ_BYTES)
    except OSError:
        return b""


def _last_line(said: bytes) -> str:
    return plain(Completed(None, said[-_WORDS_BYTES:], b"").last_words)


def _ssh_words(here: Path, rank: int) -> str:
    """What ssh itself has said about a rank."""
    try:
        return _last_line(ssh_shim.words_of(here, rank).read_bytes())
    except OSError:
        return ""
