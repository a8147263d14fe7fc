"""One attempt of a run: its files on the nodes, its intent in the journal, its launcher."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.config.models import FlightConfig
from engine.errors import LaunchError
from engine.launch import mlx_launch
from engine.launch.direct import StartFailure
from engine.launch.hostfile import write_hostfile
from engine.launch.place import Place
from engine.launch.staging import Ways
from engine.launch.start_script import start_script
from engine.planning.wiring import LaunchHost, Wiring
from engine.runs.layout import LAUNCHER_SOURCE, RunDir
from engine.runs.plan_file import Plan
from engine.security.hosts import LOCAL
from engine.supervision.memory_kills import memory_kills
from engine.worker.wire import NONCE_ENV, AttemptSpec, NodeFiles, RankSpec, write_atomic

_RANK_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True)
class Attempt:
    """What the journal's `attempt` entry says: enough to go on with it after the supervisor's death."""

    number: int
    nonce: str
    starting_port: int
    log_bases: dict[int, int]
    """Source → size of the head's log when the attempt began, bytes."""
    event_bases: dict[int, int]
    places: tuple[Place, ...]
    """Where the nodes' files are: whoever adopts the run may have another environment."""
    wiring: Wiring
    memory_kills: int | None = None
    """The system's count when the attempt began."""

    def place(self, rank: int) -> Place:
        """The host of `rank`."""
        return next(place for place in self.places if rank in place.ranks)

    def files(self, run_id: str, rank: int) -> NodeFiles:
        """The attempt's files on the node of `rank`."""
        return self.files_at(self.place(rank), run_id)

    def files_at(self, place: Place, run_id: str) -> NodeFiles:
        """The attempt's files on one host."""
        return NodeFiles.of(Path(place.root), run_id, self.number)

    def entry(self) -> dict[str, Any]:
        return {
            "attempt": self.number,
            "starting_port": self.starting_port,
            "log_bases": {str(source): size for source, size in self.log_bases.items()},
            "event_bases": {str(rank): size for rank, size in self.event_bases.items()},
            "places": [asdict(place) for place in self.places],
            "wiring": self.wiring.model_dump(mode="json"),
            "memory_kills": self.memory_kills,
        }

    @classmethod
    def from_entry(cls, entry: dict[str, Any], nonce: str) -> Attempt:
        event_bases = {int(rank): int(size) for rank, size in entry["event_bases"].items()}
        if "places" in entry:
            places = tuple(Place(**{**place, "ranks": tuple(place["ranks"])}) for place in entry["places"])
            wiring = Wiring.model_validate(entry["wiring"])
        else:
            places, wiring = _of_before(Path(entry["node_root"]), tuple(event_bases))
        return cls(
            number=int(entry["attempt"]),
            nonce=nonce,
            starting_port=int(entry["starting_port"]),
            log_bases={int(source): int(size) for source, size in entry["log_bases"].items()},
            event_bases=event_bases,
            places=places,
            wiring=wiring,
            memory_kills=entry.get("memory_kills"),
        )


@dataclass(frozen=True)
class Launched:
    """What a launch has set going."""

    launcher: mlx_launch.Launcher | None
    """mlx.launch's process; None when the ranks were started over our own connections."""
    failures: tuple[StartFailure, ...] = ()
    """Without mlx.launch: the ranks that did not start."""


def intend(  # noqa: PLR0917  (each is a fact of its own; nothing here groups them)
    run_dir: RunDir,
    plan: Plan,
    number: int,
    nonce: str,
    places: Sequence[Place],
    wiring: Wiring,
    starting_port: int,
) -> Attempt:
    """What the attempt will be, and where it begins in the head's files."""
    sources = [rank.rank for rank in plan.ranks]
    return Attempt(
        number=number,
        nonce=nonce,
        starting_port=starting_port,
        log_bases={source: _size(run_dir.log(source)) for source in (*sources, LAUNCHER_SOURCE)},
        event_bases={rank: _size(run_dir.events(rank)) for rank in sources},
        places=tuple(places),
        wiring=wiring,
        memory_kills=memory_kills(),
    )


async def launch(run_dir: RunDir, plan: Plan, attempt: Attempt, fleet: Ways) -> Launched:
    """Put the attempt's files in place on every host and start the ranks.

    Raises LaunchError when a host's files could not be written or mlx.launch not be started: no rank runs then. A rank
    that did not start by itself is no error here: it is in `failures`, or mlx.launch tells of it.
    """
    return Launched(await asyncio.to_thread(_launch_here, run_dir, plan, attempt))


def _of_before(node_root: Path, ranks: tuple[int, ...]) -> tuple[tuple[Place, ...], Wiring]:
    """What an entry leaves unsaid that was written when every node was this machine."""
    place = Place(LOCAL, ranks, str(Path.home()), str(node_root), bundle="", python="")
    return (place,), Wiring(backend="ring", hosts=tuple(LaunchHost(ssh=LOCAL, ips=(LOCAL,)) for _ in ranks))


def _launch_here(run_dir: RunDir, plan: Plan, attempt: Attempt) -> mlx_launch.Launcher:
    for node in plan.config.nodes:
        if node.ssh != LOCAL:
            raise LaunchError(
                f"node {node.name} is not this machine", where=node.ssh, why="remote nodes come with a later release"
            )
    bundle = Path(attempt.places[0].bundle)
    files = attempt.files(plan.run_id, 0)
    here = run_dir.attempt(attempt.number)
    try:
        temporary = _prepare(plan, attempt, files, here, bundle)
    except OSError as error:
        raise LaunchError(
            "the attempt's files could not be written",
            where=str(error.filename or files.directory),
            why=error.strerror or str(error),
        ) from error
    argv = mlx_launch.arguments(
        hostfile=here / "hostfile.json",
        starting_port=attempt.starting_port,
        program=["/bin/sh", str(files.start)],
        environment={NONCE_ENV: attempt.nonce},
        backend=attempt.wiring.backend,
    )
    return mlx_launch.start(
        argv,
        stdin=here / "launcher.in",
        output=run_dir.log(LAUNCHER_SOURCE),
        # What mlx.launch leaves in the temporary directory, and it removes nothing, goes with the run.
        environment={NONCE_ENV: attempt.nonce, "TMPDIR": str(temporary)},
        directory=here,
    )


def spec_of(plan: Plan, attempt: Attempt) -> AttemptSpec:
    """What the keepers and trainers are told."""
    config = plan.config
    recovery = config.recovery
    return AttemptSpec(
        run_id=plan.run_id,
        attempt=attempt.number,
        nonce=attempt.nonce,
        backend=attempt.wiring.backend,
        world_size=len(plan.ranks),
        ranks=[
            RankSpec(
                rank=rank.rank,
                node=node.name,
                host=node.ssh,
                python=node.python,
                workdir=node.workdir,
                model=node.model or config.job.model,
                data=node.data or config.job.data,
                share=rank.share,
            )
            for rank, node in zip(plan.ranks, config.nodes, strict=True)
        ],
        job=_job(config),
        command=list(config.job.command) if config.job.command is not None else None,
        env={**_RANK_ENVIRONMENT, **config.job.env},
        lease_s=recovery.lease_s,
        on_lease_expiry=recovery.on_lease_expiry,
        stop_grace_s=recovery.stop_grace_s,
        save_grace_s=recovery.save_grace_s,
        term_grace_s=recovery.term_grace_s,
    )


def _job(config: FlightConfig) -> dict[str, Any] | None:
    job = config.job
    if job.command is not None:
        return None
    named = {"model": job.model, "data": job.data, "fine_tune_type": job.fine_tune_type, "strategy": job.strategy}
    return {**job.mlx_lm, **{key: value for key, value in named.items() if value is not None}}


def _prepare(plan: Plan, attempt: Attempt, files: NodeFiles, here: Path, bundle: Path) -> Path:
    """Write what the nodes and the launcher read; returns the launcher's temporary directory."""
    spec = spec_of(plan, attempt)
    temporary = files.directory / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    files.directory.chmod(0o700)
    here.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomic(files.spec, spec.to_json())
    write_atomic(files.start, start_script(spec, files, bundle, os.environ.get("TMPDIR")))
    for rank in plan.ranks:
        if not files.control(rank.rank).exists():
            os.mkfifo(files.control(rank.rank), 0o600)
    write_hostfile(here / "hostfile.json", attempt.wiring)
    return temporary


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
