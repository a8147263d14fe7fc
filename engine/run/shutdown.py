"""Ends everything of an attempt, in stages, and proves on every host that nothing is left. Driven by the supervisor's
clock.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.cluster.agent_client import TransportProvider
from engine.cluster.host_connection import HostConnection
from engine.cluster.staging import HostLayout
from engine.config.models import NodeConfig, RecoveryConfig
from engine.errors import FlightDeckError
from engine.launch.mlx_launch import Launcher
from engine.node import processes
from engine.node.processes import Process
from engine.protocol.attempt import EMERGENCY_CHECKPOINT, END, STOP
from engine.run.events import StopStage
from engine.run.progress import AttemptProgress
from engine.run.ranks import Ranks

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


@dataclass(frozen=True)
class StopPlan:
    recovery: RecoveryConfig
    """Its grace periods."""
    progress: AttemptProgress
    """Shows whether a trainer saves, as far as its events have come."""
    cooperative: bool = False
    """Begin with a cooperative stop."""
    save_state: bool = False
    """Begin with an emergency checkpoint of the surviving ranks."""
    first_failure: int | None = None
    """The rank that is ended at once meanwhile; None when it is not known which."""


@dataclass
class CleanupProof:
    """The proof that nothing of the attempt is left on one host."""

    connection: HostConnection
    requested_at: float = float("-inf")
    left: list[Process] = field(default_factory=list)
    """The processes of the last answer."""
    found: bool = False

    def seek(self, now: float) -> None:
        """Take in the last answer, and ask again when it was not the proof. Kills what is left."""
        if self.found:
            return
        answer = self.connection.processes() if self.requested_at > float("-inf") else None
        if answer is not None:
            self.left = answer
            self.found = not answer
        if not self.found and (answer is not None or now - self.requested_at > _REQUEST_AGAIN_S):
            self.requested_at = now
            self.connection.request_processes(kill=True)
            if (at_once := self.connection.processes()) is not None:
                self.left, self.found = at_once, not at_once


class Shutdown:
    """The end of one attempt. Call `advance` at every tick until `done`; everything in it may happen twice."""

    def __init__(
        self, ranks: Ranks, launcher: Launcher | None, plan: StopPlan, on_stage: Callable[[StopStage], None]
    ) -> None:
        self._ranks = ranks
        self._connections = ranks.connections
        self._launcher = launcher
        self._plan = plan
        self._recovery = plan.recovery
        self._on_stage = on_stage
        self._wanted = StopStage.STOP if plan.cooperative else StopStage.TERM
        if plan.save_state:
            self._wanted = StopStage.EMERGENCY_CHECKPOINT
        # A trainer may be in the middle of a step before it starts to save.
        self._save_start_s = max(self._recovery.stop_grace_s, 2 * (plan.progress.long_step_s() or 0.0))
        self._written_at: float | None = None
        self._killing_since: float | None = None
        self._others_proved_at: float | None = None
        self._since = self._started_at = self._last_saving = 0.0
        self.stage: StopStage | None = None
        self.proofs = [CleanupProof(connection) for connection in ranks.connections]

    @property
    def done(self) -> bool:
        return self.stage in (StopStage.STOPPED, StopStage.UNCONFIRMED)

    def skip_grace(self) -> None:
        """Skip what is left of the cooperative stop, or of the emergency checkpoint."""
        if self.stage in (None, StopStage.STOP, StopStage.EMERGENCY_CHECKPOINT):
            self._wanted = StopStage.TERM

    def advance(self, now: float) -> None:
        """Do what is due at `now` (monotonic seconds)."""
        if self.done:
            return
        if self.stage is None:
            self._started_at = now
            self._last_saving = float("-inf")
        if self._all_ended() and self.stage not in (StopStage.VERIFYING, StopStage.KILL):
            if self.stage is None and not all(connection.state.answering for connection in self._connections):
                # A host that is away must get the command when it is back.
                self._ranks.send_command(END)
            self._enter(StopStage.VERIFYING, now)
        elif self.stage is None or (
            self._wanted is StopStage.TERM and self.stage in (StopStage.STOP, StopStage.EMERGENCY_CHECKPOINT)
        ):
            self._enter(self._wanted, now)
        match self.stage:
            case StopStage.STOP:
                self._while_stopping(now)
            case StopStage.EMERGENCY_CHECKPOINT if self._checkpoint_is_over(now):
                self._enter(StopStage.TERM, now)
            case StopStage.TERM if now - self._since > self._recovery.term_grace_s + _KEEPER_MARGIN_S:
                self._enter(StopStage.KILL, now)
            case StopStage.VERIFYING | StopStage.KILL:
                self._while_verifying(now)

    def _while_stopping(self, now: float) -> None:
        """The keepers end their ranks by themselves; only one that does not has to be killed from here."""
        if self._plan.progress.saving:
            self._last_saving = now
        stop_s, save_s = self._recovery.stop_grace_s, self._recovery.save_grace_s
        limit = max(self._started_at + stop_s, min(self._last_saving + stop_s, self._started_at + save_s))
        if now > limit + self._recovery.term_grace_s + _KEEPER_MARGIN_S:
            # TERM and KILL were due long ago: the keepers themselves do not respond.
            self._enter(StopStage.KILL, now)

    def _checkpoint_is_over(self, now: float) -> bool:
        """Each rank has ended, has written its state, or has had its time."""
        waited, phases = now - self._since, self._plan.progress.checkpoint_phases
        first_failure, sizes = self._plan.first_failure, self._plan.progress.checkpoint_bytes
        awaited = [
            rank.number
            for rank in self._ranks.all
            if not (rank.ended or rank.number == first_failure or self._gone(self._connections.to(rank.number)))
        ]
        if all(phases.get(rank) == "committed" for rank in awaited):
            # What has written its state is on its way out.
            self._written_at = self._written_at or now
            return not awaited or now - self._written_at > _LEAVES_S
        if not any(phases.get(rank) == "begin" for rank in awaited):
            return waited > min(self._save_start_s, self._recovery.save_grace_s)
        # The ranks of one host share its disk.
        largest = max(sum(sizes.get(rank, 0) for rank in each.ranks) for each in self._connections)
        return waited > self._recovery.save_grace_s + largest / CHECKPOINT_BYTES_PER_S

    def _while_verifying(self, now: float) -> None:
        if self.stage is StopStage.VERIFYING and now - self._since < _LAUNCHER_LEAVES_S and self._launcher_alive():
            return
        if self.stage is StopStage.KILL and now - self._since < _KEEPER_MARGIN_S and not self._all_ended():
            # Their ranks are dead: the keepers have a moment to write that down.
            return
        for proof in self.proofs:
            proof.seek(now)
        if all(proof.found for proof in self.proofs) and not self._launcher_alive():
            self._enter(StopStage.STOPPED, now)
            return
        self._signal_launcher(signal.SIGKILL)
        self._killing_since = self._killing_since or now
        if now - self._killing_since > UNCONFIRMED_S or self._only_silent_ones_are_missing(now):
            self._enter(StopStage.UNCONFIRMED, now)

    def _only_silent_ones_are_missing(self, now: float) -> bool:
        """Every host that answers is proved, and the others have had their time to answer."""
        missing = [proof.connection for proof in self.proofs if not proof.found]
        if self._launcher_alive() or any(connection.state.answering for connection in missing):
            self._others_proved_at = None
            return False
        self._others_proved_at = self._others_proved_at or now
        return now - self._others_proved_at > SILENT_S

    def _enter(self, stage: StopStage, now: float) -> None:
        self.stage, self._since = stage, now
        match stage:
            case StopStage.STOP:
                self._ranks.send_command(STOP)
            case StopStage.EMERGENCY_CHECKPOINT:
                first_failure = self._plan.first_failure
                self._ranks.send_command(EMERGENCY_CHECKPOINT, but=first_failure)
                if first_failure is not None:
                    self._ranks.send_command(END, only=first_failure)
            case StopStage.TERM:
                self._ranks.send_command(END)
                self._signal_launcher(signal.SIGTERM)
            case StopStage.KILL:
                self._ranks.send_command(END)
                for connection in self._connections:
                    connection.kill_ranks()
        self._on_stage(stage)

    def _all_ended(self) -> bool:
        """Every rank on a host that answers has ended."""
        return all(rank.ended or self._gone(self._connections.to(rank.number)) for rank in self._ranks.all)

    def _gone(self, connection: HostConnection) -> bool:
        """The host is not waited for now."""
        asking = self._wanted is StopStage.STOP and self.stage in (None, StopStage.STOP)
        return connection.state.silent_s > _AWAY_S if asking else not connection.state.answering

    def _launcher_alive(self) -> bool:
        return self._launcher is not None and self._launcher.alive()

    def _signal_launcher(self, number: signal.Signals) -> None:
        if self._launcher is not None:
            self._launcher.signal_group(number)


_KILL_LIMIT_S = 10.0


async def kill_everywhere(
    fleet: TransportProvider, nodes: Sequence[NodeConfig], layouts: Sequence[HostLayout], nonce: str
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
