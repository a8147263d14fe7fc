"""Ends everything of an attempt, in stages, and proves on every host that nothing is left: pure functions of what is
seen.

    stop                    every keeper receives a request for a cooperative stop (skipped by a fence, and by "now")
    emergency_checkpoint    only after a failure that leaves the state sound: END to the rank that failed first; the
                            trainers of all others write the state of their last finished step and leave
    term                    END to the keepers, which TERM and KILL their own groups; TERM to the launcher's group
    kill                    KILL to the ranks' groups, to the launcher's, and to whatever still carries the nonce
    verifying               nothing with the nonce may be left on any host; what is left is killed
    stopped                 proved; or "unconfirmed", when something outlived every KILL for UNCONFIRMED_S, or a host
                            did not answer

A stage is left as soon as its work is done, so a run whose ranks respond is gone in a fraction of the time allowed. A
host that does not answer gets every command as soon as it does, and holds up none of the others."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from engine.cluster.staging import HostLayout
from engine.cluster.transport.fleet import Fleet
from engine.config.models import NodeConfig, RecoveryConfig
from engine.errors import FlightDeckError
from engine.node import processes
from engine.node.processes import Process
from engine.protocol.attempt import EMERGENCY_CHECKPOINT, END, STOP
from engine.run.effects import Effect, KillPrograms, RequestProcesses, Send, SignalLauncher
from engine.run.events import StopStage
from engine.run.observation import HostView, Observation

UNCONFIRMED_S = 10.0
"""After the first KILL."""
SILENT_S = 4.0
"""For a host that does not answer, after all others are proved."""
_AWAY_S = 15.0
"""A host whose ranks are to stop cooperatively may be silent for as long: its ranks are not killed because it
was away for a moment."""
_REQUEST_AGAIN_S = 1.0
CHECKPOINT_BYTES_PER_S = 100e6
"""The slowest disk that is waited for until an emergency checkpoint is written."""
_KEEPER_MARGIN_S = 0.3
"""For a keeper, beyond its graces, to drain the log, sweep and write its exit record."""
_LEAVES_S = 1.0
"""A trainer that has written its state."""
_LAUNCHER_LEAVES_S = 0.3
"""After the last rank; the launcher would take up to a second, and nothing of it is needed any more."""
_NEVER = float("-inf")


@dataclass(frozen=True)
class CleanupProof:
    """The proof that nothing of an attempt is left on one host."""

    requested_at: float = _NEVER
    left: tuple[Process, ...] = ()
    """The processes of the last answer."""
    found: bool = False

    def seek(self, host: HostView, now: float) -> tuple[CleanupProof, list[Effect]]:
        """Take in the last answer, and ask again when it was not the proof. Kills what is left."""
        if self.found:
            return self, []
        answer = host.processes if self.requested_at > _NEVER else None
        proof = self if answer is None else replace(self, left=answer, found=not answer)
        if proof.found or not (answer is not None or now - self.requested_at > _REQUEST_AGAIN_S):
            return proof, []
        return replace(proof, requested_at=now), [RequestProcesses(host.key)]


@dataclass(frozen=True)
class StopPlan:
    cooperative: bool = False
    """Begin with a cooperative stop."""
    save_state: bool = False
    """Begin with an emergency checkpoint of the surviving ranks."""
    first_failure: int | None = None
    """The rank that is ended at once meanwhile; None when it is not known which."""

    @property
    def first_stage(self) -> StopStage:
        if self.save_state:
            return StopStage.EMERGENCY_CHECKPOINT
        return StopStage.STOP if self.cooperative else StopStage.TERM


@dataclass(frozen=True)
class AttemptView:
    """An attempt as it is seen while it is ended."""

    seen: Observation
    ended: frozenset[int]
    """The ranks of which nothing more will come."""
    launched: bool
    """A launcher is known, whose group may outlive it."""
    recovery: RecoveryConfig
    """Its grace periods."""

    def command(self, command: bytes, ranks: Iterable[int] | None = None) -> list[Effect]:
        """`command` for every keeper that may still take it, or for those of `ranks`."""
        wanted = [rank for rank in self.seen.ranks if not rank.end_known and (ranks is None or rank.number in ranks)]
        return [Send(self.seen.host_of(rank.number).key, rank.number, command) for rank in wanted]


@dataclass(frozen=True)
class Shutdown:
    """The end of one attempt, as far as it has come. Everything in it may happen twice."""

    plan: StopPlan
    wanted: StopStage
    save_start_s: float = 0.0
    """A trainer may be in the middle of a step before it starts to save."""
    stage: StopStage | None = None
    started_at: float = 0.0
    since: float = 0.0
    """When its stage began."""
    last_saving: float = _NEVER
    written_at: float | None = None
    killing_since: float | None = None
    others_proved_at: float | None = None
    proofs: Mapping[str, CleanupProof] = field(default_factory=dict)
    """Host → its proof."""

    @property
    def done(self) -> bool:
        return self.stage in (StopStage.STOPPED, StopStage.UNCONFIRMED)


Action = Effect | StopStage
"""An effect that is due, or a stage that begins: that is recorded after its commands."""


def begin_shutdown(plan: StopPlan, view: AttemptView) -> Shutdown:
    save_start_s = max(view.recovery.stop_grace_s, 2 * (view.seen.progress.long_step_s or 0.0))
    proofs = {host.key: CleanupProof() for host in view.seen.current_hosts}
    return Shutdown(plan, plan.first_stage, save_start_s, proofs=proofs)


def skip_grace(stop: Shutdown) -> Shutdown:
    """Skip what is left of the cooperative stop, or of the emergency checkpoint."""
    skippable = (None, StopStage.STOP, StopStage.EMERGENCY_CHECKPOINT)
    return replace(stop, wanted=StopStage.TERM) if stop.stage in skippable else stop


def advance(stop: Shutdown, view: AttemptView) -> tuple[Shutdown, list[Action]]:
    """The stop as it goes on now, and the actions that are due."""
    if stop.done:
        return stop, []
    stop, effects = _enter_due(stop, view)
    match stop.stage:
        case StopStage.STOP:
            stop, more = _while_stopping(stop, view)
        case StopStage.EMERGENCY_CHECKPOINT:
            over, stop = _checkpoint_is_over(stop, view)
            stop, more = _enter(stop, StopStage.TERM, view) if over else (stop, [])
        case StopStage.TERM if view.seen.now - stop.since > view.recovery.term_grace_s + _KEEPER_MARGIN_S:
            stop, more = _enter(stop, StopStage.KILL, view)
        case StopStage.VERIFYING | StopStage.KILL:
            stop, more = _while_verifying(stop, view)
        case _:
            more = []
    return stop, effects + more


def _enter_due(stop: Shutdown, view: AttemptView) -> tuple[Shutdown, list[Action]]:
    """The stage that begins whatever the one before has come to."""
    effects: list[Action] = []
    if stop.stage is None:
        stop = replace(stop, started_at=view.seen.now)
    if _all_ended(stop, view) and stop.stage not in (StopStage.VERIFYING, StopStage.KILL):
        if stop.stage is None and not all(host.answering for host in view.seen.current_hosts):
            # A host that is away must get the command when it is back.
            effects += view.command(END)
        stop, more = _enter(stop, StopStage.VERIFYING, view)
        return stop, effects + more
    skipped = stop.wanted is StopStage.TERM and stop.stage in (StopStage.STOP, StopStage.EMERGENCY_CHECKPOINT)
    return _enter(stop, stop.wanted, view) if stop.stage is None or skipped else (stop, effects)


def _while_stopping(stop: Shutdown, view: AttemptView) -> tuple[Shutdown, list[Action]]:
    """The keepers end their ranks by themselves; only one that does not has to be killed from here."""
    if "saving" in view.seen.progress.phases.values():
        stop = replace(stop, last_saving=view.seen.now)
    stop_s, save_s = view.recovery.stop_grace_s, view.recovery.save_grace_s
    limit = max(stop.started_at + stop_s, min(stop.last_saving + stop_s, stop.started_at + save_s))
    if view.seen.now <= limit + view.recovery.term_grace_s + _KEEPER_MARGIN_S:
        return stop, []
    # TERM and KILL were due long ago: the keepers themselves do not respond.
    return _enter(stop, StopStage.KILL, view)


def _checkpoint_is_over(stop: Shutdown, view: AttemptView) -> tuple[bool, Shutdown]:
    """Each rank has ended, has written its state, or has had its time."""
    waited, progress = view.seen.now - stop.since, view.seen.progress
    phases, sizes = progress.checkpoint_phases, progress.checkpoint_bytes
    awaited = [
        rank.number
        for rank in view.seen.ranks
        if not (
            rank.number in view.ended
            or rank.number == stop.plan.first_failure
            or _is_gone(stop, view.seen.host_of(rank.number))
        )
    ]
    if all(phases.get(rank) == "committed" for rank in awaited):
        # What has written its state is on its way out.
        written_at = view.seen.now if stop.written_at is None else stop.written_at
        return not awaited or view.seen.now - written_at > _LEAVES_S, replace(stop, written_at=written_at)
    if not any(phases.get(rank) == "begin" for rank in awaited):
        return waited > min(stop.save_start_s, view.recovery.save_grace_s), stop
    # The ranks of one host share its disk.
    largest = max(sum(sizes.get(rank, 0) for rank in host.ranks) for host in view.seen.current_hosts)
    return waited > view.recovery.save_grace_s + largest / CHECKPOINT_BYTES_PER_S, stop


def _while_verifying(stop: Shutdown, view: AttemptView) -> tuple[Shutdown, list[Action]]:
    waited = view.seen.now - stop.since
    if stop.stage is StopStage.VERIFYING and waited < _LAUNCHER_LEAVES_S and view.seen.launcher_alive:
        return stop, []
    if stop.stage is StopStage.KILL and waited < _KEEPER_MARGIN_S and not _all_ended(stop, view):
        # Their ranks are dead: the keepers have a moment to write that down.
        return stop, []
    effects: list[Action] = []
    proofs = dict(stop.proofs)
    for host in view.seen.current_hosts:
        proofs[host.key], requests = proofs[host.key].seek(host, view.seen.now)
        effects += requests
    stop = replace(stop, proofs=proofs)
    if all(proof.found for proof in proofs.values()) and not view.seen.launcher_alive:
        stop, more = _enter(stop, StopStage.STOPPED, view)
        return stop, effects + more
    if view.launched:
        effects.append(SignalLauncher(signal.SIGKILL))
    killing_since = view.seen.now if stop.killing_since is None else stop.killing_since
    only_silent, stop = _only_silent_ones_are_missing(replace(stop, killing_since=killing_since), view)
    if only_silent or view.seen.now - killing_since > UNCONFIRMED_S:
        stop, more = _enter(stop, StopStage.UNCONFIRMED, view)
        effects += more
    return stop, effects


def _only_silent_ones_are_missing(stop: Shutdown, view: AttemptView) -> tuple[bool, Shutdown]:
    """Every host that answers is proved, and the others have had their time to answer."""
    if view.seen.launcher_alive or any(
        host.answering and not stop.proofs[host.key].found for host in view.seen.current_hosts
    ):
        return False, replace(stop, others_proved_at=None)
    proved_at = view.seen.now if stop.others_proved_at is None else stop.others_proved_at
    return view.seen.now - proved_at > SILENT_S, replace(stop, others_proved_at=proved_at)


def _enter(stop: Shutdown, stage: StopStage, view: AttemptView) -> tuple[Shutdown, list[Action]]:
    stop = replace(stop, stage=stage, since=view.seen.now)
    return stop, [*_commands(stop, view), stage]


def _commands(stop: Shutdown, view: AttemptView) -> list[Effect]:
    """The commands with which its stage begins."""
    match stop.stage:
        case StopStage.STOP:
            return view.command(STOP)
        case StopStage.EMERGENCY_CHECKPOINT:
            first = stop.plan.first_failure
            others = [rank.number for rank in view.seen.ranks if rank.number != first]
            return view.command(EMERGENCY_CHECKPOINT, others) + view.command(END, [first] if first is not None else [])
        case StopStage.TERM:
            return [*view.command(END), *([SignalLauncher(signal.SIGTERM)] if view.launched else [])]
        case StopStage.KILL:
            return view.command(END) + [KillPrograms(host.key) for host in view.seen.current_hosts]
    return []


def _all_ended(stop: Shutdown, view: AttemptView) -> bool:
    """Every rank on a host that answers has ended."""
    return all(rank.number in view.ended or _is_gone(stop, view.seen.host_of(rank.number)) for rank in view.seen.ranks)


def _is_gone(stop: Shutdown, host: HostView) -> bool:
    """The host is not waited for now."""
    asking = stop.wanted is StopStage.STOP and stop.stage in (None, StopStage.STOP)
    return host.silent_s > _AWAY_S if asking else not host.answering


_KILL_LIMIT_S = 10.0


async def kill_everywhere(
    fleet: Fleet, nodes: Sequence[NodeConfig], layouts: Sequence[HostLayout], nonce: str
) -> tuple[str, ...]:
    """KILL everything that carries `nonce`: the last resort for an attempt that cannot be monitored. The names of the
    nodes that have not done so; there the leases end it."""

    async def kill(layout: HostLayout) -> tuple[str, ...]:
        argv = [layout.python, f"{layout.bundle}/engine/node/processes.py", nonce]
        with contextlib.suppress(FlightDeckError, OSError):
            if (await fleet.to(nodes[layout.ranks[0]]).run(argv, timeout_s=_KILL_LIMIT_S)).code == 0:
                return ()
        return tuple(nodes[rank].name for rank in layout.ranks)

    async def kill_here() -> tuple[str, ...]:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            if await asyncio.to_thread(processes.kill_with_nonce, nonce):
                return ()
        return tuple(node.name for node in nodes if node.local)

    remote = [layout for layout in layouts if not nodes[layout.ranks[0]].local]
    missed = await asyncio.gather(kill_here(), *map(kill, remote))
    return tuple(name for names in missed for name in names)
