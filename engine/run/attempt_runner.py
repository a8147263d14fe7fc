"""Runs the attempts of one run, one at a time: each is planned, launched or adopted, monitored to its end and fenced.

Never two at once: the next is planned when nothing of the last is left on any node that answers, and when the lease of
every node that does not answer has expired. Nodes that a run goes on without stay in PendingCleanup.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from engine.checks.context import CheckContext
from engine.cluster.transport.fleet import Fleet
from engine.errors import FlightDeckError, LaunchError, NodeUnreachable
from engine.launch.hostfile import fresh_ports
from engine.launch.mlx_launch import LauncherWatch
from engine.models import Reason, RunState
from engine.protocol.attempt import END
from engine.run.attempt import LaunchResult, Placement, launch, new_attempt, plan_for_attempt
from engine.run.attempt_monitor import AttemptMonitor
from engine.run.decide import Failure, NodePresence, failed_run, refusal
from engine.run.events import (
    Attempt,
    AttemptFailed,
    AttemptPlanned,
    Figures,
    LauncherStarted,
    StopStage,
    StopStageReached,
    Verdict,
)
from engine.run.failure_evidence import AttemptOrigin
from engine.run.history import AttemptHistory, RunHistory
from engine.run.ranks import AttemptContext, HostConnections, host_connections
from engine.run.recorder import RunRecorder
from engine.run.requests import TICK_S, Aborted, AbortSource, until_abort
from engine.run.run_plan import RunPlan
from engine.run.shutdown import SILENT_S, CleanupProof, PendingCleanup
from engine.run.takeover import any_rank_started, find_launcher
from engine.store.layout import LAUNCHER_SOURCE, RunDir

_PROOF_LIMIT_S = 30.0
"""For every node to show that nothing is left of a run that is taken up again."""
_PROGRAM_FAILED = frozenset({Reason.RANK_KILLED, Reason.RANK_FAILED, Reason.HUNG, Reason.OUT_OF_MEMORY})
"""Failures of a program, which leave the nodes as they were."""
_LOST_IN_LAUNCH = "its supervisor was lost in the middle of the launch"
_START_FAILED = 255
"""The exit code of a rank whose start failed without one."""


@dataclass(frozen=True)
class RunContext:
    """The run that all attempts belong to."""

    run_dir: RunDir
    plan: RunPlan
    """Every node that the run may use."""
    whole_plan: RunPlan
    """Also the nodes that preflight has excluded."""
    recorder: RunRecorder
    fleet: Fleet
    node_root: Path
    """This machine's own."""

    @property
    def history(self) -> RunHistory:
        assert self.recorder.history is not None
        return self.recorder.history


class AttemptRunner:
    """The attempts of one run, by one supervisor."""

    def __init__(self, run: RunContext, abort: AbortSource) -> None:
        self._run = run
        self._recorder = run.recorder
        self._abort = abort
        self._last: Attempt | None = None
        """The last one that this supervisor planned."""
        self._connections: HostConnections | None = None
        self._monitor: AttemptMonitor | None = None
        self._pending = PendingCleanup(run.recorder.append)
        self.figures = Figures()

    @property
    def unconfirmed(self) -> list[str]:
        """Nodes on which it is not proved that nothing of the run is left."""
        return [*(self._monitor.unconfirmed if self._monitor is not None else ()), *self._pending.unconfirmed]

    async def launch_first(self, checks: CheckContext) -> Verdict:
        """The first attempt since the run was launched or reopened, to its end. Raises Aborted before anything of it
        has started."""
        plan = self._run.plan
        try:
            if self._run.history.attempts:
                await until_abort(self._prove_last_attempt(), self._abort)
            self._recorder.change(RunState.LAUNCHING)
            attempt = await until_abort(self._plan_attempt(plan, checks), self._abort)
            await self._release([node.name for node in plan.config.nodes])
            return await self._launch(plan, attempt)
        except (LaunchError, NodeUnreachable) as error:
            return _launch_failed(error)

    async def relaunch(self, plan: RunPlan) -> Verdict:
        """Another attempt, with the nodes of `plan`, to its end. Raises Aborted before anything of it has started."""
        number = self._run.history.record.attempts + 1
        self._recorder.change(RunState.LAUNCHING)
        checks = CheckContext(plan.config, self._run.fleet)
        try:
            attempt = await until_abort(self._plan_attempt(plan, checks), self._abort)
        except FlightDeckError as error:
            # The nodes and connections of the last attempt are what there still is.
            self._recorder.change(RunState.RECOVERING)
            return self._record_failure(number, _launch_failed(error))
        finally:
            await checks.close()
        await self._release([node.name for node in plan.config.nodes])
        try:
            return await self._launch(plan, attempt)
        except (LaunchError, NodeUnreachable) as error:
            await self._fence_again(plan, attempt)
            return self._record_failure(number, _launch_failed(error))

    async def adopt(self, attempt: AttemptHistory, *, rebooted: bool) -> Verdict:
        """Go on with the last attempt of an earlier supervisor, to its end."""
        plan = self._adopt_plan(attempt)
        connections = self._connect(plan, attempt.plan)
        if attempt.failed is not None and self._recorder.state in (RunState.RECOVERING, RunState.LAUNCHING):
            await self._fence_again(plan, attempt.plan)
            return self._run.history.failures[-1].verdict
        # After a restart of the machine its old pids may be anybody's.
        launcher = None if rebooted else find_launcher(self._run.run_dir, self._recorder, attempt)
        if launcher is None and not rebooted and not await any_rank_started(connections):
            if not self._run.history.failures:
                return Verdict(RunState.FAILED, Reason.SUPERVISOR_LOST, _LOST_IN_LAUNCH)
            # It had been running before: it goes on.
            await self._fence_again(plan, attempt.plan)
            lost = Verdict(RunState.FAILED, Reason.LAUNCH_FAILED, _LOST_IN_LAUNCH)
            return self._record_failure(attempt.number, lost)
        return await self._observe(plan, attempt.plan, AttemptOrigin(launcher, adopted=True, rebooted=rebooted))

    async def prove_ended(self, attempt: AttemptHistory, unconfirmed: Sequence[str]) -> None:
        """In place of an attempt: the run has ended, and on `unconfirmed` that is not proved yet. Follow with
        `confirm_all`."""
        plan = self._adopt_plan(attempt)
        self._connect(plan, attempt.plan)
        self._monitor = await self._new_monitor(plan, attempt.plan, AttemptOrigin(adopted=True))
        self._monitor.prove_again(unconfirmed)

    async def confirm(self) -> None:
        """Poll once the nodes on which it is not proved that nothing is left, or that have unsent logs."""
        if self._monitor is not None:
            await self._monitor.confirm()
        self._pending.poll(time.monotonic())

    async def confirm_all(self, limit_s: float) -> None:
        """After the end: wait for the nodes on which it is not proved, and for their logs."""
        await self._confirm_while(lambda: bool(self.unconfirmed) or self._has_unsent_logs(), limit_s)

    async def abort_recovery(self) -> Verdict:
        """There is nothing to stop but what was fenced, and that is proved, except for nodes that do not answer."""
        self._recorder.append(StopStageReached(stage=StopStage.ASKED))
        await self._confirm_while(lambda: bool(self.unconfirmed), SILENT_S)
        self._recorder.append(StopStageReached(stage=StopStage.UNCONFIRMED if self.unconfirmed else StopStage.STOPPED))
        return self._aborted()

    def presence(self) -> tuple[NodePresence, ...]:
        """Every node of the run, as it answers now."""
        proofs = list(self._monitor.proofs) if self._monitor is not None else []
        head_proved = all(proof.found for proof in proofs if proof.connection.local)
        nodes = []
        for node in self._run.plan.config.nodes:
            own = next((proof for proof in proofs if node.name in proof.connection.names), None)
            proof = own or self._pending.proof(node.name)
            state = proof.connection.state if proof is not None else None
            proved = proof is None or (proof.found and proof.connection.state.answering)
            silent_s = state.silent_s if state is not None else 0.0
            nodes.append(NodePresence(node.name, proved and head_proved, silent_s))
        return tuple(nodes)

    async def close(self) -> None:
        if self._monitor is not None:
            await asyncio.to_thread(self._monitor.close)
            self._monitor = None
        if self._connections is not None:
            await self._connections.close()
            self._connections = None
        await self._pending.close()

    async def _prove_last_attempt(self) -> None:
        """Nothing of a run that is taken up again may be left anywhere. Raises LaunchError."""
        attempt = self._run.history.attempts[-1]
        await self.prove_ended(attempt, [node.name for node in self._run.whole_plan.config.nodes])
        await self._confirm_while(lambda: bool(self.unconfirmed), _PROOF_LIMIT_S)
        if self.unconfirmed:
            where = ", ".join(self.unconfirmed)
            why = "its last attempt is not proved to be gone there"
            todo = "see that the node answers"
            raise LaunchError("the run cannot be taken up yet", where=where, why=why, todo=todo)

    async def _plan_attempt(self, plan: RunPlan, checks: CheckContext) -> Attempt:
        """The next attempt, in the journal before anything of it starts."""
        if (last := self._reusable_placement(plan)) is not None:
            network, layouts = last.network, last.layouts
        else:
            network, layouts = await asyncio.gather(checks.network_plan(), checks.layouts())
        wanted = plan.config.cluster.starting_port
        port = await fresh_ports(self._run.fleet, plan.config.nodes, network, wanted)
        if self._monitor is not None:
            # Only now: until then its nodes may have sent more.
            await self._monitor.stop_copying()
        placement = Placement(layouts, network, port)
        attempt = new_attempt(self._run.run_dir, plan, placement, self._run.history)
        self._recorder.append(AttemptPlanned(attempt=attempt))
        self._last = attempt
        return attempt

    def _reusable_placement(self, plan: RunPlan) -> Attempt | None:
        """The last attempt, when it was on the same nodes and its failure does not change what is known of them. If
        something was removed there meanwhile, the launch fails, and the nodes are probed again."""
        failures = self._run.history.failures
        if self._last is None or not failures or failures[-1].verdict.reason not in _PROGRAM_FAILED:
            return None
        return self._last if list(self._last.nodes) == [rank.node for rank in plan.ranks] else None

    async def _release(self, members: Sequence[str]) -> None:
        """Let go of the last attempt, except for what is still to be proved of nodes that the next one leaves out."""
        monitor, connections = self._monitor, self._connections
        self._monitor = self._connections = None
        left: list[CleanupProof] = []
        if monitor is not None:
            remote = (proof for proof in monitor.proofs if not proof.connection.local)
            left = [proof for proof in remote if not set(proof.connection.names) & set(members)]
            await asyncio.to_thread(monitor.close)
        kept = {id(proof.connection) for proof in left}
        if connections is not None:
            await asyncio.gather(*(each.close() for each in connections if id(each) not in kept))
        await self._pending.release(members)
        self._pending.keep(left)

    async def _launch(self, plan: RunPlan, attempt: Attempt) -> Verdict:
        """Start the ranks and monitor them to their end. When an abort comes in between, the monitor ends whatever has
        started by then."""
        # The hosts are connected while the ranks start.
        self._connect(plan, attempt)
        try:
            launched = await until_abort(launch(self._run.run_dir, plan, attempt, self._run.fleet), self._abort)
        except Aborted:
            launched = LaunchResult(None)
        # Not on the loop: the ranks have started, and a disk that stalls must not hold up their heartbeats.
        launcher = await asyncio.to_thread(self._record_launcher, launched, attempt)
        failures = {
            each.rank: (_START_FAILED if each.code is None else each.code, each.message) for each in launched.failures
        }
        return await self._observe(plan, attempt, AttemptOrigin(launcher, failures))

    def _record_launcher(self, launched: LaunchResult, attempt: Attempt) -> LauncherWatch | None:
        if launched.launcher is None:
            return None
        log = self._run.run_dir.log(LAUNCHER_SOURCE)
        launcher = LauncherWatch.of(launched.launcher, log, attempt.log_bases[LAUNCHER_SOURCE])
        self._recorder.append(LauncherStarted(pid=launcher.pid, start=launcher.start))
        return launcher

    async def _observe(self, plan: RunPlan, attempt: Attempt, origin: AttemptOrigin) -> Verdict:
        """Monitor the attempt to its end, which the journal has when it is a failure."""
        self._monitor = monitor = await self._new_monitor(plan, attempt, origin)
        evidence = await monitor.run(self._abort)
        self.figures = monitor.intake.latest
        verdict = await asyncio.to_thread(monitor.verdict, evidence)
        if verdict.state is not RunState.FAILED:
            return verdict
        self._record_failure(attempt.number, verdict, monitor.intake.progress.furthest, monitor.failed_at)
        return self._aborted() if monitor.aborted_in_recovery else verdict

    async def _fence_again(self, plan: RunPlan, attempt: Attempt) -> None:
        """Prove once more that nothing is left of an attempt that was ended, or never got going."""
        assert self._connections is not None
        names = [name for connection in self._connections for name in connection.names]
        self._monitor = await self._new_monitor(plan, attempt, AttemptOrigin(adopted=True))
        self._monitor.prove_again(names)
        if self._recorder.state is not RunState.RECOVERING:
            self._recorder.change(RunState.RECOVERING)

    async def _new_monitor(self, plan: RunPlan, attempt: Attempt, origin: AttemptOrigin) -> AttemptMonitor:
        assert self._connections is not None
        context = AttemptContext(self._run.run_dir, plan, attempt, self._connections, self._recorder)

        def may_restart(verdict: Verdict, reached: int) -> bool:
            failure = self._failure(attempt.number, verdict, reached, datetime.now(UTC))
            return verdict.state is RunState.FAILED and self._refusal(failure) is None

        # Not on the loop: the indices of a week of logs may have to be repaired, and the ranks want their heartbeats.
        return await asyncio.to_thread(AttemptMonitor, context, origin, may_restart)

    def _refusal(self, failure: AttemptFailed) -> object:
        return refusal(failed_run(self._run.plan, self._run.history, failure))

    def _connect(self, plan: RunPlan, attempt: Attempt) -> HostConnections:
        self._connections = self._new_connections(plan, attempt)
        self._connections.start()
        return self._connections

    def _new_connections(self, plan: RunPlan, attempt: Attempt) -> HostConnections:
        history = self._recorder.attempt(attempt.number)
        known = history.identities if history is not None else {}
        return host_connections(plan, attempt, self._run.fleet, self._run.node_root, known)

    def _adopt_plan(self, attempt: AttemptHistory) -> RunPlan:
        """The plan of an earlier supervisor's attempt. Of the run's nodes that it went on without, the proof is sought
        anew."""
        plan = plan_for_attempt(attempt.plan, self._run.plan, self._run.whole_plan)
        members = {node.name for node in plan.config.nodes}
        for name in (node.name for node in self._run.plan.config.nodes):
            if name not in members and self._pending.proof(name) is None:
                earlier = self._run.history.last_attempt_on(name)
                if earlier is not None:
                    self._keep_connection(earlier.plan, name)
        return plan

    def _keep_connection(self, attempt: Attempt, node: str) -> None:
        plan = plan_for_attempt(attempt, self._run.plan, self._run.whole_plan)
        for connection in self._new_connections(plan, attempt):
            if node in connection.names and not connection.local:
                connection.start()
                for rank in connection.ranks:
                    connection.send_command(rank, END)
                self._pending.keep([CleanupProof(connection)])

    def _has_unsent_logs(self) -> bool:
        return self._monitor is not None and self._monitor.has_unsent_logs

    async def _confirm_while(self, condition: Callable[[], bool], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while condition() and time.monotonic() < deadline:
            await self.confirm()
            await asyncio.sleep(TICK_S)

    def _failure(self, number: int, verdict: Verdict, reached: int, failed_at: datetime) -> AttemptFailed:
        """An attempt that never got going (`reached` 0) leaves the run where it was."""
        failures = self._run.history.failures
        reached = reached or (failures[-1].reached if failures else 0)
        return AttemptFailed(
            attempt=number, verdict=verdict, reached=reached, failed_at=failed_at, unconfirmed=tuple(self.unconfirmed)
        )

    def _record_failure(
        self, number: int, verdict: Verdict, reached: int = 0, failed_at: datetime | None = None
    ) -> Verdict:
        self._recorder.append(self._failure(number, verdict, reached, failed_at or datetime.now(UTC)))
        return verdict

    def _aborted(self) -> Verdict:
        failure = Failure.of(self._run.history.failures[-1])
        return Verdict(RunState.ABORTED, Reason.USER_ABORT, f"stopped as requested, while it recovered from {failure}")


def _launch_failed(error: FlightDeckError) -> Verdict:
    return Verdict(RunState.FAILED, Reason.LAUNCH_FAILED, str(error))
