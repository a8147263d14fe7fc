"""One attempt of a run: its files on the nodes, its intent in the journal, its launcher."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from engine.config.models import FlightConfig, NodeConfig
from engine.config.places import on_node
from engine.errors import LaunchError, NodeUnreachable
from engine.launch import direct, mlx_launch, ssh_shim
from engine.launch.asking import at_once
from engine.launch.environment import (
    RankEnvironment,
    common_environment,
    file_name,
    of_rank,
    rank_environment,
    ranks_per_host,
)
from engine.launch.hostfile import write_hostfile
from engine.launch.launchers_own import launchers_own
from engine.launch.place import Place
from engine.launch.staging import Ways
from engine.launch.start_script import start_script
from engine.launch.trainer_job import trainer_job
from engine.planning.checkpointing import state_every
from engine.planning.wiring import LaunchHost, Wiring
from engine.runs.layout import LAUNCHER_SOURCE, RunDir
from engine.runs.plan_file import Plan, PlannedRank
from engine.security.hosts import LOCAL
from engine.supervision.planned_layers import planned_layers
from engine.worker.memory_kills import memory_kills
from engine.worker.processes import kill_group
from engine.worker.wire import NONCE_ENV, AttemptSpec, NodeFiles, RankSpec, write_atomic

SECRETS = ("HF_TOKEN", "WANDB_API_KEY")
"""Of the supervisor's environment: the ranks of every node get them."""


@dataclass(frozen=True)
class Attempt:
    """What the journal's `attempt` entry says: enough to go on with it after the supervisor's death."""

    number: int
    nonce: str
    """Of its own, `<nonce of the run>.<number>`: that nothing of it is left says nothing of the others."""
    starting_port: int
    log_bases: dict[int, int]
    """Source → size of the head's log when the attempt began, bytes."""
    event_bases: dict[int, int]
    places: tuple[Place, ...]
    """Where the nodes' files are: whoever adopts the run may have another environment."""
    wiring: Wiring
    memory_kills: int | None = None
    """The system's count when the attempt began."""
    members: tuple[tuple[int, str], ...] = ()
    """(rank, node): a run that goes on without a node counts its ranks anew. Empty: all of the plan's, as planned."""
    resume: bool = False
    """Whether its trainers go on from what an earlier attempt has left."""
    reached: int = 0
    """The iteration that the run had reached before."""

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
            "nonce": self.nonce,
            "members": [list(member) for member in self.members],
            "resume": self.resume,
            "reached": self.reached,
            "starting_port": self.starting_port,
            "log_bases": {str(source): size for source, size in self.log_bases.items()},
            "event_bases": {str(rank): size for rank, size in self.event_bases.items()},
            "places": [asdict(place) for place in self.places],
            "wiring": self.wiring.model_dump(mode="json"),
            "memory_kills": self.memory_kills,
        }

    @classmethod
    def from_entry(cls, entry: dict[str, Any], nonce: str) -> Attempt:
        """`nonce` is the run's, which attempts of before had as their own."""
        event_bases = {int(rank): int(size) for rank, size in entry["event_bases"].items()}
        if "places" in entry:
            places = tuple(Place(**{**place, "ranks": tuple(place["ranks"])}) for place in entry["places"])
            wiring = Wiring.model_validate(entry["wiring"])
        else:
            places, wiring = _of_before(Path(entry["node_root"]), tuple(event_bases))
        return cls(
            number=int(entry["attempt"]),
            nonce=str(entry.get("nonce") or nonce),
            starting_port=int(entry["starting_port"]),
            log_bases={int(source): int(size) for source, size in entry["log_bases"].items()},
            event_bases=event_bases,
            places=places,
            wiring=wiring,
            memory_kills=entry.get("memory_kills"),
            members=tuple((int(rank), str(node)) for rank, node in entry.get("members") or ()),
            resume=entry.get("resume") is True,
            reached=int(entry.get("reached") or 0),
        )


@dataclass(frozen=True)
class Launched:
    """What a launch has set going."""

    launcher: mlx_launch.Launcher | None
    """mlx.launch's process; None when the ranks were started over our own connections."""
    failures: tuple[direct.StartFailure, ...] = ()
    """Without mlx.launch: the ranks that did not start."""


def intend(  # noqa: PLR0917  (each is a fact of its own; nothing here groups them)
    run_dir: RunDir,
    plan: Plan,
    number: int,
    nonce: str,
    places: Sequence[Place],
    wiring: Wiring,
    starting_port: int,
    *,
    resume: bool = False,
    reached: int = 0,
) -> Attempt:
    """What the attempt will be, and where it begins in the head's files. `nonce` is the run's, `reached` the iteration
    that it has reached."""
    sources = [rank.rank for rank in plan.ranks]
    return Attempt(
        number=number,
        nonce=f"{nonce}.{number}",
        starting_port=starting_port,
        log_bases={source: _size(run_dir.log(source)) for source in (*sources, LAUNCHER_SOURCE)},
        event_bases={rank: _size(run_dir.events(rank)) for rank in sources},
        places=tuple(places),
        wiring=wiring,
        memory_kills=memory_kills(),
        members=tuple((rank.rank, rank.node) for rank in plan.ranks),
        resume=resume,
        reached=reached,
    )


def plan_of(attempt: Attempt, plan: Plan, whole: Plan) -> Plan:
    """The plan of an earlier attempt's own nodes. `plan` is the run's by now, `whole` as it was before a preflight left
    nodes out."""
    members = {node for _, node in attempt.members}
    known = members <= {node.name for node in plan.config.nodes}
    return (plan if known else whole).among(members)


async def launch(run_dir: RunDir, plan: Plan, attempt: Attempt, fleet: Ways) -> Launched:
    """Put the attempt's files in place on every host, all at the same time, and start the ranks.

    Raises LaunchError, naming the node, when a host's files could not be written or mlx.launch not be started: no rank
    runs then. A rank that does not start is no error here: it is in `failures`, or mlx.launch tells of it. Cancelled,
    it leaves no mlx.launch behind, but perhaps ranks.
    """
    layers = await asyncio.to_thread(planned_layers, run_dir, plan)
    spec = spec_of(plan, attempt, os.environ, layer_split=layers)
    direct_ = plan.config.cluster.launcher == "direct"
    environment = rank_environment(attempt.wiring, attempt.starting_port, os.environ)
    files = environment.files if direct_ else {}
    await at_once(_put_files(plan, attempt, place, spec, fleet, files=files) for place in attempt.places)
    here = run_dir.attempt(attempt.number)
    try:
        here.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_hostfile(here / "hostfile.json", attempt.wiring)
        if not direct_:
            return Launched(await _with_launcher(run_dir, plan, attempt))
    except OSError as error:
        raise _not_written("this machine", str(error.filename or here), error) from error
    return Launched(None, await direct.start(fleet, _starts(plan, attempt, environment)))


def _of_before(node_root: Path, ranks: tuple[int, ...]) -> tuple[tuple[Place, ...], Wiring]:
    """What an entry leaves unsaid that was written when every node was this machine."""
    place = Place(LOCAL, ranks, str(Path.home()), str(node_root), bundle="", python="")
    return (place,), Wiring(backend="ring", hosts=tuple(LaunchHost(ssh=LOCAL, ips=(LOCAL,)) for _ in ranks))


async def _with_launcher(run_dir: RunDir, plan: Plan, attempt: Attempt) -> mlx_launch.Launcher:
    starting = asyncio.create_task(asyncio.to_thread(_start_launcher, run_dir, plan, attempt))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        # The thread knows nothing of it: what it starts would be nobody's.
        with contextlib.suppress(OSError, LaunchError):
            launcher = await starting
            kill_group(launcher.pid, signal.SIGKILL)
            await asyncio.to_thread(launcher.process.wait)
        raise


def _start_launcher(run_dir: RunDir, plan: Plan, attempt: Attempt) -> mlx_launch.Launcher:
    here = run_dir.attempt(attempt.number)
    argv = mlx_launch.arguments(
        hostfile=here / "hostfile.json",
        starting_port=attempt.starting_port,
        program=ssh_shim.program(plan.run_id, attempt.number),
        environment={NONCE_ENV: attempt.nonce},
        backend=attempt.wiring.backend,
        ranks_per_host=ranks_per_host(attempt.wiring),
    )
    home = run_dir.path.parent.parent
    own = launchers_own(here, plan.config.nodes, attempt.places, home=home, run_id=plan.run_id, attempt=attempt.number)
    return mlx_launch.start(
        argv,
        stdin=here / "launcher.in",
        output=run_dir.log(LAUNCHER_SOURCE),
        environment={NONCE_ENV: attempt.nonce, **own},
        directory=here,
    )


def _is_local(plan: Plan, place: Place) -> bool:
    return plan.config.nodes[place.ranks[0]].local


def _starts(plan: Plan, attempt: Attempt, environment: RankEnvironment) -> list[direct.Start]:
    starts = []
    for rank in (planned.rank for planned in plan.ranks):
        files = attempt.files(plan.run_id, rank)
        variables = {NONCE_ENV: attempt.nonce, **of_rank(environment, attempt.wiring, rank)}
        variables |= {name: str(files.directory / file_name(name)) for name in environment.files}
        starts.append(direct.Start(rank, plan.config.nodes[rank], files, variables))
    return starts


async def _put_files(
    plan: Plan, attempt: Attempt, place: Place, spec: AttemptSpec, fleet: Ways, *, files: Mapping[str, str]
) -> None:
    """Write what is needed on one host: spec.json, start.sh, and `files`, the contents of what variables name."""
    there, local = attempt.files_at(place, plan.run_id), _is_local(plan, place)
    direct_ = plan.config.cluster.launcher == "direct"
    script = start_script(
        spec,
        there,
        PurePosixPath(place.bundle),
        ranks=place.ranks,
        detached=() if local and not direct_ else place.ranks,
        environment={"PATH": os.environ.get("PATH")} if local and not direct_ else {},
    )
    texts = {there.spec.name: spec.to_json(), there.start.name: script}
    texts |= {file_name(name): content + "\n" for name, content in files.items()}
    node = plan.config.nodes[place.ranks[0]]
    try:
        if local:
            await asyncio.to_thread(_write_here, there, texts, place.ranks)
        else:
            contents = {name: text.encode() for name, text in texts.items()}
            await fleet.to(node).put_tree(there.directory, contents)
    except OSError as error:
        raise _not_written(node.name, f"{node.ssh}:{there.directory}", error) from error
    except NodeUnreachable as error:
        raise LaunchError(
            f"{node.name} was lost in the middle of the launch", where=node.ssh, why=str(error)
        ) from error


def _write_here(there: NodeFiles, texts: Mapping[str, str], ranks: Sequence[int]) -> None:
    there.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, text in texts.items():
        write_atomic(there.directory / name, text)
    for rank in ranks:
        # Before the keeper makes it: what it is told early is then not lost.
        if not there.control(rank).exists():
            os.mkfifo(there.control(rank), 0o600)


def _not_written(node: str, where: str, error: OSError) -> LaunchError:
    todo = "make room or mend the permissions there"
    why = error.strerror or str(error)
    return LaunchError(f"the attempt's files could not be written on {node}", where=where, why=why, todo=todo)


def spec_of(
    plan: Plan, attempt: Attempt, environment: Mapping[str, str], *, layer_split: str | None = None
) -> AttemptSpec:
    """What the keepers and trainers are told, on whatever node: every path is absolute on the node of its rank.
    `layer_split` is a pipeline's, where the job names none.

    The secrets that are in `environment`, the supervisor's, go in it too: it is written 0600, and nothing else of a
    launch may hold them.
    """
    config = plan.config
    recovery = config.recovery
    secrets = {name: environment[name] for name in SECRETS if name in environment}
    gradient = plan.calibration.gradient_bytes if plan.calibration is not None else None
    return AttemptSpec(
        run_id=plan.run_id,
        attempt=attempt.number,
        nonce=attempt.nonce,
        backend=attempt.wiring.backend,
        world_size=len(plan.ranks),
        ranks=[
            _rank_spec(config, rank, node, attempt.place(rank.rank))
            for rank, node in zip(plan.ranks, config.nodes, strict=True)
        ],
        job=trainer_job(config, layer_split),
        command=list(config.job.command) if config.job.command is not None else None,
        env=common_environment(attempt.wiring, {**secrets, **config.job.env}, gradient_bytes=gradient),
        lease_s=recovery.lease_s,
        on_lease_expiry=recovery.on_lease_expiry,
        stop_grace_s=recovery.stop_grace_s,
        save_grace_s=recovery.save_grace_s,
        term_grace_s=recovery.term_grace_s,
        replica_check_every=config.consistency.every if config.consistency.enabled else 0,
        on_corruption=config.consistency.on_corruption,
        checkpoint_every=state_every(config),
        checkpoint_keep=config.checkpoint.keep,
        checkpoint_compression=config.checkpoint.compression,
        resume=attempt.resume,
        reached=attempt.reached,
    )


def _rank_spec(config: FlightConfig, rank: PlannedRank, node: NodeConfig, place: Place) -> RankSpec:
    base = config.file.parent if config.file is not None else Path("/")
    destination = config.checkpoint.destination

    def there(path: str | None) -> str | None:
        return place.expanded(on_node(path, node, base)) if path is not None else None

    return RankSpec(
        rank=rank.rank,
        node=node.name,
        host=node.ssh,
        python=place.expanded(node.python),
        workdir=place.expanded(node.workdir),
        model=there(node.model or config.job.model),
        data=there(node.data or config.job.data),
        adapter_path=there(config.job.mlx_lm.get("adapter_path")),
        resume_adapter_file=there(config.job.mlx_lm.get("resume_adapter_file")),
        share=rank.share,
        checkpoint_folder=there(destination) if destination and "://" not in destination else destination,
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
