"""One attempt of a run: how it is planned, its files on the nodes, and its launch."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath

from engine.cluster.staging import HostLayout, gather_all
from engine.cluster.transport.fleet import Fleet
from engine.errors import LaunchError, NodeUnreachable
from engine.launch import mlx_launch, ssh_shim
from engine.launch.hostfile import write_hostfile
from engine.launch.mlx_launch import Launcher
from engine.launch.rank_environment import (
    SECRETS,
    RankEnvironment,
    common_environment,
    gpu_environment,
    job_command,
    path_there,
    rank_environment,
    rank_spec,
    trainer_job,
)
from engine.launch.ssh_shim import launcher_environment
from engine.launch.start_script import RankStart, StartFailure, start_ranks, start_script
from engine.node.processes import oom_kill_count
from engine.plan.checkpoints import state_every
from engine.plan.decisions import LaunchDecisions
from engine.plan.network import NetworkPlan
from engine.protocol.attempt import NONCE_ENV, AttemptSpec, RankSpec, read_regular, write_atomic
from engine.run.decide import needs_state
from engine.run.events import Attempt
from engine.run.history import RunHistory
from engine.run.run_plan import RunPlan
from engine.security.sanitise import json_object
from engine.store.layout import LAUNCHER_SOURCE, RunDir


def keep_secrets(
    run_dir: RunDir, environment: MutableMapping[str, str], *, adopted: bool, named: Collection[str] = ()
) -> None:
    """Give every attempt of the run the secrets of its launch, whoever supervises it, with the `named` variables. A
    launch writes those of its `environment` to a file of the run, mode 0600; an adopter takes them from there into its
    own, by which they are also redacted. Raises OSError when they cannot be written."""
    if not adopted:
        write_atomic(run_dir.secrets, json.dumps(_kept(environment, named)))
        return
    with contextlib.suppress(OSError, ValueError):
        kept = json_object(json.loads(read_regular(run_dir.secrets)))
        environment.update(_kept({name: value for name, value in kept.items() if isinstance(value, str)}, named))


def _kept(environment: Mapping[str, str], named: Collection[str]) -> dict[str, str]:
    """The secrets, and W&B's other variables: which mode and server a run reports to."""
    names = {*SECRETS, *named}
    return {name: text for name, text in environment.items() if name in names or name.startswith("WANDB_")}


@dataclass(frozen=True)
class AttemptOrigin:
    """How an attempt came to be monitored, and what is known of its start by then."""

    launcher: Launcher | None = None
    """None: there never was one, or it is no longer ours to watch."""
    start_failures: tuple[StartFailure, ...] = ()
    """Ranks that did not start, where there is no mlx.launch to report them."""
    adopted: bool = False
    """An earlier supervisor started it."""
    rebooted: bool = False
    """This machine was restarted since."""


def new_attempt(
    run_dir: RunDir,
    plan: RunPlan,
    history: RunHistory,
    *,
    layouts: Sequence[HostLayout],
    starting_port: int,
) -> Attempt:
    """The attempt that follows those of `history`; it begins at the end of the head's files."""
    ranks, number = range(len(plan.nodes)), history.next_attempt(run_dir.newest_attempt())
    return Attempt(
        number=number,
        nonce=f"{history.nonce}.{number}",
        starting_port=starting_port,
        log_bases={source: _size(run_dir.log(source)) for source in (*ranks, LAUNCHER_SOURCE)},
        event_bases={rank: _size(run_dir.events(rank)) for rank in ranks},
        layouts=tuple(layouts),
        memory_kills=oom_kill_count(),
        nodes=plan.nodes,
        needs_state=needs_state(plan, history),
        accept_changed_data=history.reopened.accept_changed_data,
        manifests=[entry for saved in history.manifests.values() for entry in saved],
    )


async def launch(
    run_dir: RunDir, plan: RunPlan, attempt: Attempt, decisions: LaunchDecisions, fleet: Fleet
) -> AttemptOrigin:
    """Put the attempt's files in place on every host, all at the same time, and start the ranks.

    Raises LaunchError, naming the node, when a host's files could not be written or mlx.launch not be started: no rank
    runs then. A rank that does not start is no error here: it is in `start_failures`, or mlx.launch reports it.
    Cancelled, it leaves no mlx.launch behind, but perhaps ranks."""
    spec, network = attempt_spec(plan, attempt, decisions, os.environ), decisions.network
    environment = rank_environment(network, attempt.starting_port, os.environ)
    files = environment.files if plan.config.starts_directly else {}
    await gather_all(
        _put_files(fleet, plan, attempt, layout, spec=spec, network=network, files=files) for layout in attempt.layouts
    )
    here = run_dir.attempt(attempt.number)
    try:
        await asyncio.to_thread(_write_hostfile, here, network)
        if not plan.config.starts_directly:
            return AttemptOrigin(await _with_launcher(run_dir, plan, attempt, network.backend))
    except OSError as error:
        raise _not_written("this machine", str(error.filename or here), error) from error
    return AttemptOrigin(None, await start_ranks(fleet, _starts(plan, attempt, environment)))


def _write_hostfile(here: Path, network: NetworkPlan) -> None:
    here.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_hostfile(here / "hostfile.json", network)


async def _with_launcher(run_dir: RunDir, plan: RunPlan, attempt: Attempt, backend: str) -> Launcher:
    starting = asyncio.create_task(asyncio.to_thread(_start_launcher, run_dir, plan, attempt, backend))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        # The thread goes on: what it starts would belong to nobody.
        with contextlib.suppress(OSError, LaunchError):
            await asyncio.to_thread((await starting).kill)
        raise


def _start_launcher(run_dir: RunDir, plan: RunPlan, attempt: Attempt, backend: str) -> Launcher:
    here = run_dir.attempt(attempt.number)
    argv = mlx_launch.arguments(
        hostfile=here / "hostfile.json",
        starting_port=attempt.starting_port,
        program=ssh_shim.program(plan.run_id, attempt.number),
        environment={NONCE_ENV: attempt.nonce},
        backend=backend,
    )
    variables = launcher_environment(
        here, plan.config.nodes, attempt.layouts, home=run_dir.home, run_id=plan.run_id, attempt=attempt.number
    )
    return mlx_launch.start(
        argv,
        stdin=here / "launcher.in",
        output=run_dir.log(LAUNCHER_SOURCE),
        environment={NONCE_ENV: attempt.nonce, **variables},
        directory=here,
    )


def _starts(plan: RunPlan, attempt: Attempt, environment: RankEnvironment) -> list[RankStart]:
    starts = []
    for rank in range(len(plan.nodes)):
        files = attempt.files(plan.run_id, rank)
        variables = {NONCE_ENV: attempt.nonce, **environment.of_rank(rank, files.directory)}
        host = plan.config.nodes[attempt.layout(rank).ranks[0]]
        starts.append(RankStart(rank, host, files, variables))
    return starts


async def _put_files(
    fleet: Fleet,
    plan: RunPlan,
    attempt: Attempt,
    layout: HostLayout,
    *,
    spec: AttemptSpec,
    network: NetworkPlan,
    files: Mapping[str, str],
) -> None:
    """Write spec.json, start.sh and `files` on one host."""
    there, node = attempt.files_at(layout, plan.run_id), plan.config.nodes[layout.ranks[0]]
    here = node.local and not plan.config.starts_directly
    script = start_script(
        spec,
        there,
        PurePosixPath(layout.bundle),
        ranks=layout.ranks,
        detached=() if here else layout.ranks,
        environment={"PATH": os.environ.get("PATH")} if here else {},
        variables={rank: gpu_environment(network, rank) for rank in layout.ranks},
    )
    # The FIFOs before the keepers make them, so that no early command is lost.
    fifos = {there.control(rank).name: None for rank in layout.ranks}
    contents = {there.spec.name: spec.to_json(), there.start.name: script, **files, **fifos}
    try:
        await fleet.agent(node).write(there.directory, contents)
    except OSError as error:
        raise _not_written(node.name, f"{node.ssh}:{there.directory}", error) from error
    except NodeUnreachable as error:
        what = f"{node.name} was lost in the middle of the launch"
        raise LaunchError(what, where=node.ssh, why=str(error)) from error


def _not_written(node: str, where: str, error: OSError) -> LaunchError:
    todo = "make room or fix the permissions there"
    return LaunchError(f"the attempt's files could not be written on {node}", where=where, why=error, todo=todo)


def attempt_spec(
    plan: RunPlan, attempt: Attempt, decisions: LaunchDecisions, environment: Mapping[str, str]
) -> AttemptSpec:
    """The specification that keepers and trainers work from: every path is absolute on the node of its rank.

    It also takes the secrets of `environment`, the supervisor's: it is written 0600, and nothing else of a launch may
    hold them."""
    config = plan.config
    recovery, network = config.recovery, decisions.network
    secrets = {name: environment[name] for name in SECRETS if name in environment}
    gradient = plan.calibration.gradient_bytes if plan.calibration is not None else None
    return AttemptSpec(
        run_id=plan.run_id,
        attempt=attempt.number,
        nonce=attempt.nonce,
        backend=network.backend,
        world_size=len(plan.nodes),
        ranks=[_rank_spec(plan, rank, attempt.layout(rank), decisions) for rank in range(len(plan.nodes))],
        job=trainer_job(config, decisions.layer_split),
        command=job_command(config.job),
        trainer=config.job.kind.framework.trainer,
        task=asdict(config.job.task) if config.job.task is not None else None,
        as_torchrun=config.job.kind.framework.takes_launchers and bool(config.job.words),
        logging_dir=config.job.logging_dir,
        metrics=config.job.metrics,
        env=common_environment(network, {**secrets, **config.job.env}, gradient_bytes=gradient),
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
        resume=attempt.number > 1 and config.job.kind.keeps_state,
        torchrun=config.torchrun,
        needs_state=attempt.needs_state,
        accept_changed_data=attempt.accept_changed_data,
        manifests=attempt.manifests,
    )


def _rank_spec(plan: RunPlan, rank: int, layout: HostLayout, decisions: LaunchDecisions) -> RankSpec:
    config, node, network = plan.config, plan.config.nodes[rank], decisions.network
    destination = config.checkpoint.destination
    local = destination and "://" not in destination
    return replace(
        rank_spec(config, rank, layout, decisions.division.parts[node.name]),
        adapter_path=path_there(config, node, layout, config.job.mlx_lm.get("adapter_path")),
        validates=node.name in decisions.validators,
        restarts=config.job.kind.rank_restarts(rank, config.recovery.max_restarts),
        prints_metrics=config.job.kind.prints_metrics(rank),
        display_sleep=config.job.display_sleep and rank == layout.ranks[0],
        address=next(iter(network.hosts[rank].ips), None),
        checkpoint_folder=path_there(config, node, layout, destination) if local else destination,
    )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
