"""Runs the attempts of one run, one at a time: each is planned, launched or adopted, monitored to its end and fenced.

Never two at once: the next is planned when nothing of the last is left on any node that answers, and when the lease of
every node that does not answer has expired. The proof is still sought on nodes that a run goes on without."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from engine.checks.context import CheckContext
from engine.checks.plan_inputs import launch_decisions
from engine.cluster.awake_clock import AwakeClock
from engine.cluster.host_connection import HostConnection
from engine.cluster.staging import HostLayout, hosts_of
from engine.cluster.transport.fleet import Fleet
from engine.config.models import NodeConfig
from engine.errors import FlightDeckError, LaunchError, NodeUnreachable
from engine.launch.hostfile import fresh_ports
from engine.launch.mlx_launch import Launcher
from engine.models import Reason, RunState
from engine.node import processes
from engine.node.bootstrap import ROOT
from engine.plan.decisions import LaunchDecisions
from engine.protocol.attempt import END, read_regular
from engine.run import events
from engine.run.attempt import AttemptOrigin, launch, new_attempt, next_attempt
from engine.run.attempt_monitor import TICK_S, AbortSource, AttemptMonitor
from engine.run.decide import NodePresence, describe_failure, failed_run, refusal
from engine.run.failure_evidence import succeeded
from engine.run.history import AttemptHistory, RunHistory
from engine.run.journal import RunRecorder
from engine.run.preflight import preflight_context
from engine.run.ranks import AttemptContext, HostConnections, any_rank_started, host_connections
from engine.run.run_plan import RunPlan
from engine.run.shutdown import SILENT_S, CleanupProof
from engine.security.identifiers import SshTarget
from engine.store.layout import LAUNCHER_SOURCE, RunDir

_PROOF_LIMIT_S = 30.0
"""For every node to show that nothing is left of a run that is taken up again."""
_LOST_IN_LAUNCH = "its supervisor was lost in the middle of the launch"
T = TypeVar("T")


class Aborted(Exception):
    """An abort was requested while something was awaited; that has been cancelled."""


async def until_abort(work: Coroutine[Any, Any, T], abort: AbortSource) -> T:
    """The result of `work`. Raises Aborted when an abort is requested; `work` has then been cancelled."""
    task = asyncio.create_task(work)
    while not task.done():
        if abort() is not None:
            task.cancel()
            await asyncio.wait({task})
            raise Aborted
        await asyncio.wait({task}, timeout=TICK_S)
    return task.result()


@dataclass(frozen=True)
class RunContext:
    run_dir: RunDir
    whole_plan: RunPlan
    """As launched."""
    recorder: RunRecorder
    fleet: Fleet
    node_root: Path
    """This machine's own."""
    clock: AwakeClock = field(default_factory=AwakeClock)

    @property
    def history(self) -> RunHistory:
        return self.recorder.history

    @property
    def unknown_attempt(self) -> str | None:
        """Why an attempt that was launched is not known, in one line; None when all are."""
        number = self.run_dir.newest_attempt()
        return f"attempt {number} is not in journal.jsonl" if number > self.history.record.attempts else None

    @property
    def plan(self) -> RunPlan:
        """Without the nodes that preflight has excluded, and with what was decided."""
        return self._decided(self.whole_plan.without(self.history.record.excluded))

    def plan_on(self, nodes: Sequence[str]) -> RunPlan:
        """The plan of these nodes alone, which preflight may have excluded since; of all when none is named."""
        return self._decided(self.whole_plan.among(nodes))

    def _decided(self, plan: RunPlan) -> RunPlan:
        return plan.decided(self.history.decisions_for(plan.nodes) or next(iter(self.history.decisions), None))


class AttemptRunner:
    def __init__(self, run: RunContext, abort: AbortSource) -> None:
        self._run = run
        self._recorder = run.recorder
        self._abort = abort
        self._last: events.Attempt | None = None
        """The last one that this supervisor planned."""
        self._context: AttemptContext | None = None
        """The attempt whose hosts are connected."""
        self._monitor: AttemptMonitor | None = None
        self._left_behind: list[CleanupProof] = []
        """On nodes that the run goes on without, each with a connection of its own."""
        self._awaited: list[HostConnection] = []
        """The hosts of the ranks, from 0 on, that must have succeeded in an attempt that is not known."""
        self.figures = events.Figures()

    @property
    def unconfirmed(self) -> list[str]:
        """Nodes on which it is not proved that nothing of the run is left."""
        return [name for proof in self._proofs if not proof.found for name in proof.connection.names]

    @property
    def _proofs(self) -> list[CleanupProof]:
        return [*(self._monitor.proofs if self._monitor is not None else ()), *self._left_behind]

    async def launch_first(self, checks: CheckContext) -> events.Verdict:
        """The first attempt since the run was launched or reopened, to its end. Raises Aborted before anything of it
        has started."""
        try:
            if self._run.history.attempts or self._run.unknown_attempt is not None:
                await until_abort(self._prove_last_attempt(), self._abort)
                known = await self.reconsider()
                if known is not None and known.state is RunState.SUCCEEDED:
                    return known
            self._recorder.change(RunState.LAUNCHING)
            attempt = await until_abort(self._plan_attempt(self._run.plan, checks), self._abort)
            return await self._launch(await self._connect_next(attempt))
        except (LaunchError, NodeUnreachable) as error:
            return _launch_failed(error)

    async def relaunch(self, plan: RunPlan) -> events.Verdict:
        """Another attempt, with the nodes of `plan`, to its end. Raises Aborted before anything of it has started."""
        number = next_attempt(self._run.run_dir, self._run.history)
        self._recorder.change(RunState.LAUNCHING)
        try:
            async with preflight_context(plan, self._run.fleet) as checks:
                attempt = await until_abort(self._plan_attempt(plan, checks), self._abort)
        except FlightDeckError as error:
            # The nodes and connections of the last attempt are what there still is.
            self._recorder.change(RunState.RECOVERING)
            return self._record_failure(number, _launch_failed(error))
        context = await self._connect_next(attempt)
        try:
            return await self._launch(context)
        except (LaunchError, NodeUnreachable) as error:
            await self._fence_again(context)
            return self._record_failure(number, _launch_failed(error))

    async def adopt(self, attempt: AttemptHistory) -> events.Verdict:
        """Go on with the last attempt of an earlier supervisor, to its end."""
        context = self._connect_adopted(attempt)
        if attempt.status.reason is not None and self._recorder.state in (RunState.RECOVERING, RunState.LAUNCHING):
            await self._fence_again(context)
            return self._run.history.failures[-1].verdict
        rebooted = not processes.same_boot(attempt.boot_id or "", processes.boot_id())
        # After a restart of the machine its old pids may be anybody's.
        launcher = None if rebooted else find_launcher(self._run, attempt)
        if launcher is None and not rebooted and not await any_rank_started(context.connections):
            if not self._run.history.failures:
                return events.Verdict(RunState.FAILED, Reason.SUPERVISOR_LOST, _LOST_IN_LAUNCH)
            # It had been running before: it goes on.
            await self._fence_again(context)
            lost = events.Verdict(RunState.FAILED, Reason.LAUNCH_FAILED, _LOST_IN_LAUNCH)
            return self._record_failure(attempt.number, lost)
        return await self._observe(context, AttemptOrigin(launcher, adopted=True, rebooted=rebooted))

    async def end_unknown(self) -> events.Verdict | None:
        """Kill all that carries the run's nonce on any of its nodes, for an attempt of which only the number is known,
        let nothing of it start any more, and seek the proof for a while; `confirm_all` goes on. As `reconsider`."""
        run, (plan, world_size) = self._run, self._plan_of_unknown()
        nodes = plan.config.nodes
        layouts = [
            HostLayout(ssh, ranks, "~", str(run.node_root) if nodes[ranks[0]].local else f"~/{ROOT}", "", "")
            for ssh, ranks in hosts_of(nodes).items()
        ]
        attempt = events.Attempt.model_construct(
            number=run.run_dir.newest_attempt(), nonce=run.history.nonce, layouts=layouts
        )
        connections = self._new_connections(plan, attempt)
        self._awaited = [connections.to(rank) for rank in range(1 if plan.config.job.outlives_ranks else world_size)]
        for connection in connections:
            self._seek_proof(connection)
        await self._confirm_while(lambda: self.unconfirmed, _PROOF_LIMIT_S)
        return await self.reconsider()

    async def prove_ended(self, attempt: AttemptHistory, unconfirmed: Sequence[str]) -> None:
        """In place of an attempt: the run has ended, and on `unconfirmed` that is not proved yet. Follow with
        `confirm_all`."""
        await self._prove_again(self._connect_adopted(attempt), unconfirmed)

    async def reconsider(self) -> events.Verdict | None:
        """Another verdict on the last attempt, once the end of a rank is known that was not known before; else None.
        Follow `confirm` or `confirm_all` with it: a node that was away may have the record of a rank that completed."""
        if self._run.unknown_attempt is not None:
            return self._verdict_on_unknown()
        if self._monitor is None or (evidence := await self._monitor.new_evidence()) is None:
            return None
        self.figures = self._monitor.intake.latest
        return await asyncio.to_thread(self._monitor.verdict, evidence)

    def _verdict_on_unknown(self) -> events.Verdict | None:
        """Success, where the ranks of an attempt of which only the number is known have left records of it."""
        job = self._run.whole_plan.config.job
        ends = [(host.observe(rank).record, host.exit_output(rank).end) for rank, host in enumerate(self._awaited)]
        if not ends or not all(succeeded(*end, trainer=job.command is None) for end in ends):
            return None
        whose = "rank 0" if job.outlives_ranks else "every rank"
        cause = f"{self._run.unknown_attempt}; the exit record of {whose} shows that it completed"
        return events.Verdict(RunState.SUCCEEDED, Reason.COMPLETED, cause)

    def _plan_of_unknown(self) -> tuple[RunPlan, int]:
        """The run's plan with the nodes of the attempt of which only the number is known before all others, in the
        order of its ranks, as its hostfile has their hosts; and how many they are."""
        plan, run_dir, members = self._run.whole_plan, self._run.run_dir, list[NodeConfig]()
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            hosts = json.loads(read_regular(run_dir.attempt(run_dir.newest_attempt()) / "hostfile.json"))["hosts"]
            # A plan for fewer nodes keeps their order.
            for node in plan.config.nodes:
                members += [node] if hosts[len(members)]["ssh"] == SshTarget.parse(node.ssh).openssh else []
        nodes = tuple(sorted(plan.config.nodes, key=lambda node: node not in members))
        config = plan.config.model_copy(update={"nodes": nodes})
        return plan.model_copy(update={"config": config}), len(members) or len(nodes)

    async def confirm(self) -> None:
        """Poll once the nodes on which it is not proved that nothing is left, or that have unsent logs."""
        if self._monitor is not None:
            await self._monitor.confirm()
        for proof in self._left_behind:
            if not proof.found and proof.connection.state.answering:
                proof.seek(self._run.clock())
                if proof.found:
                    for name in proof.connection.names:
                        self._recorder.append(events.CleanupConfirmed(node=name))

    async def confirm_all(self, limit_s: float) -> None:
        """After the end: wait for the nodes on which it is not proved, and for their logs."""
        await self._confirm_while(lambda: self.unconfirmed or (self._monitor and self._monitor.unsent), limit_s)

    async def abort_recovery(self) -> events.Verdict:
        """There is nothing to stop but what was fenced, and that is proved, except for nodes that do not answer."""
        self._recorder.append(events.StopStageReached(stage=events.StopStage.ASKED))
        await self._confirm_while(lambda: self.unconfirmed, SILENT_S)
        self._recorder.append(
            events.StopStageReached(
                stage=events.StopStage.UNCONFIRMED if self.unconfirmed else events.StopStage.STOPPED
            )
        )
        return self._aborted()

    def presence(self) -> tuple[NodePresence, ...]:
        """Every node of the run, as it answers now."""
        head_proved = all(proof.found for proof in self._proofs if proof.connection.local)
        nodes = {node: NodePresence(node, head_proved) for node in self._run.plan.nodes}
        for proof in reversed(self._proofs):
            state = proof.connection.state
            proved = proof.found and state.answering and head_proved
            nodes |= {name: NodePresence(name, proved, state.silent_s) for name in proof.connection.names}
        return tuple(nodes[node] for node in self._run.plan.nodes)

    async def close(self) -> None:
        await self._let_go(())

    async def _prove_last_attempt(self) -> None:
        """Nothing of a run that is taken up again may be left anywhere. Raises LaunchError."""
        if self._run.history.attempts:
            await self.prove_ended(self._run.history.attempts[-1], self._run.whole_plan.nodes)
        if self._run.unknown_attempt is not None:
            await self.end_unknown()
        await self._confirm_while(lambda: self.unconfirmed, _PROOF_LIMIT_S)
        if self.unconfirmed:
            where = ", ".join(self.unconfirmed)
            why = "its last attempt is not proved to be gone there"
            todo = "see that the node answers"
            raise LaunchError("the run cannot be taken up yet", where=where, why=why, todo=todo)

    async def _decide(self, plan: RunPlan, checks: CheckContext) -> LaunchDecisions:
        """As recorded for the nodes of `plan`, with the addresses that they have now; else by a plan, with the settings
        of the run. Raises LaunchError when there can be none."""
        history = self._run.history
        if (recorded := history.decisions_for(plan.nodes)) is not None:
            return recorded.model_copy(update={"network": await checks.network_plan()})
        if history.attempts and not history.decisions:
            why, todo = "the decisions of its launch are missing there", "launch it anew"
            raise LaunchError("the run cannot be continued as launched", where="journal.jsonl", why=why, todo=todo)
        made = await launch_decisions(checks)
        return made.model_copy(update={"settings": history.decisions[0].settings}) if history.decisions else made

    async def _plan_attempt(self, plan: RunPlan, checks: CheckContext) -> events.Attempt:
        """The next attempt, in the journal before anything of it starts."""
        recorded, last = self._run.history.decisions_for(plan.nodes), self._reusable_placement(plan)
        if recorded is not None and last is not None:
            decisions, layouts = recorded, last.layouts
        else:
            decisions, layouts = await asyncio.gather(self._decide(plan, checks), checks.layouts())
        wanted = plan.config.cluster.starting_port
        port = await fresh_ports(self._run.fleet, plan.config.nodes, decisions.network, wanted)
        if self._monitor is not None:
            # Only now: until then its nodes may have sent more.
            await self._monitor.stop_copying()
        attempt = new_attempt(self._run.run_dir, plan, self._run.history, layouts=layouts, starting_port=port)
        if decisions != recorded:
            self._recorder.append(events.LaunchDecided(decisions=decisions))
        self._recorder.append(events.AttemptPlanned(attempt=attempt))
        self._last = attempt
        return attempt

    def _reusable_placement(self, plan: RunPlan) -> events.Attempt | None:
        """The last attempt, when it was on the same nodes and its failure does not change what is known of them. If
        something was removed there meanwhile, the launch fails, and the nodes are probed again."""
        failures = self._run.history.failures
        if self._last is None or not failures or not failures[-1].verdict.reason.traits.nodes_unchanged:
            return None
        return self._last if self._last.nodes == plan.nodes else None

    async def _connect_next(self, attempt: events.Attempt) -> AttemptContext:
        """Connect the hosts of the next attempt, and let go of the last one, except for what is still to be proved on
        nodes that the next one leaves out."""
        remote = [proof for proof in self._proofs if not proof.connection.local]
        await self._let_go([proof for proof in remote if not set(proof.connection.names) & set(attempt.nodes)])
        return self._connect(attempt)

    async def _let_go(self, kept: Sequence[CleanupProof]) -> None:
        """Close the attempt's files, and every connection but those of `kept`."""
        monitor, self._monitor = self._monitor, None
        context, self._context = self._context, None
        left, self._left_behind = self._left_behind, list(kept)
        if monitor is not None:
            await asyncio.to_thread(monitor.close)
        connections = {*(context.connections if context is not None else ()), *(proof.connection for proof in left)}
        # All at once: each may wait for a host that does not answer any more.
        await asyncio.gather(*(each.close() for each in connections - {proof.connection for proof in kept}))

    async def _launch(self, context: AttemptContext) -> events.Verdict:
        """Start the ranks, while their hosts are being connected, and monitor them to their end. When an abort comes in
        between, the monitor ends whatever has started by then."""
        decisions = context.history.decisions
        assert decisions is not None
        starting = launch(context.run_dir, context.plan, context.attempt, decisions, self._run.fleet)
        try:
            origin = await until_abort(starting, self._abort)
        except Aborted:
            origin = AttemptOrigin()
        if (launcher := origin.launcher) is not None:
            # Not on the loop: the ranks have started, and a disk that stalls must not hold up their heartbeats.
            started = events.LauncherStarted(pid=launcher.pid, start=launcher.start)
            await asyncio.to_thread(self._recorder.append, started)
        return await self._observe(context, origin)

    async def _observe(self, context: AttemptContext, origin: AttemptOrigin) -> events.Verdict:
        """Monitor the attempt to its end, which the journal has when it is a failure."""
        self._monitor = monitor = await self._new_monitor(context, origin)
        evidence = await monitor.run(self._abort)
        self.figures = monitor.intake.latest
        verdict = await asyncio.to_thread(monitor.verdict, evidence)
        if verdict.state is not RunState.FAILED:
            return verdict
        reached = monitor.intake.progress.furthest
        self._recorder.append(self._failure(context.attempt.number, verdict, reached, monitor.failed_at))
        return self._aborted() if monitor.aborted_in_recovery else verdict

    async def _fence_again(self, context: AttemptContext) -> None:
        """Prove once more that nothing is left of an attempt that was ended, or never got going."""
        await self._prove_again(context, [name for each in context.connections for name in each.names])
        if self._recorder.state is not RunState.RECOVERING:
            self._recorder.change(RunState.RECOVERING)

    async def _prove_again(self, context: AttemptContext, nodes: Sequence[str]) -> None:
        self._monitor = await self._new_monitor(context, AttemptOrigin(adopted=True))
        self._monitor.prove_again(nodes)

    async def _new_monitor(self, context: AttemptContext, origin: AttemptOrigin) -> AttemptMonitor:
        def may_restart(verdict: events.Verdict, reached: int) -> bool:
            failure = self._failure(context.attempt.number, verdict, reached)
            state = failed_run(self._run.plan, self._run.history, failure)
            return verdict.state is RunState.FAILED and refusal(state) is None

        # Not on the loop: the indices of a week of logs may have to be repaired, and the ranks want their heartbeats.
        return await asyncio.to_thread(AttemptMonitor, context, origin, may_restart, self._run.clock)

    def _connect(self, attempt: events.Attempt) -> AttemptContext:
        plan = self._run.plan_on(attempt.nodes)
        connections = self._new_connections(plan, attempt)
        for connection in connections:
            connection.start()
        self._context = AttemptContext(self._run.run_dir, plan, attempt, connections, self._recorder)
        return self._context

    def _new_connections(self, plan: RunPlan, attempt: events.Attempt) -> HostConnections:
        planned = [each for each in self._run.history.attempts if each.number == attempt.number]
        known = {rank: event.identity for each in planned[-1:] for rank, event in each.started.items()}
        connections = host_connections(plan, attempt, self._run.fleet, self._run.node_root, known)
        for connection in connections:
            connection.clock = self._run.clock
        return connections

    def _connect_adopted(self, attempt: AttemptHistory) -> AttemptContext:
        """An earlier supervisor's attempt. Of the run's nodes that it went on without, the proof is sought anew."""
        for name in self._run.plan.nodes:
            earlier = next((each for each in reversed(self._run.history.attempts) if name in each.plan.nodes), None)
            sought = any(name in proof.connection.names for proof in self._left_behind)
            if name not in attempt.plan.nodes and not sought and earlier is not None:
                for connection in self._new_connections(self._run.plan_on(earlier.plan.nodes), earlier.plan):
                    if name in connection.names and not connection.local:
                        self._seek_proof(connection)
        return self._connect(attempt.plan)

    def _seek_proof(self, connection: HostConnection) -> None:
        connection.start()
        for rank in connection.ranks:
            connection.send_command(rank, END)
        self._left_behind.append(CleanupProof(connection))

    async def _confirm_while(self, condition: Callable[[], object], limit_s: float) -> None:
        deadline = self._run.clock() + limit_s
        while condition() and self._run.clock() < deadline:
            await self.confirm()
            await asyncio.sleep(TICK_S)

    def _failure(
        self, number: int, verdict: events.Verdict, reached: int = 0, failed_at: datetime | None = None
    ) -> events.AttemptFailed:
        """An attempt that never got going (`reached` 0) leaves the run where it was."""
        failures, failed_at = self._run.history.failures, failed_at or datetime.now(UTC)
        ran_s, monitor = self._ran_s(number, failed_at), self._monitor
        outputs = monitor.outputs if monitor is not None and monitor.number == number else 0
        return events.AttemptFailed(
            attempt=number,
            verdict=verdict,
            reached=reached or (failures[-1].reached if failures else 0),
            failed_at=failed_at,
            ran_long=not reached and (ran_s > self._run.plan.config.recovery.stall_s or outputs > events.LONG_OUTPUT_S),
            outputs=0 if reached else outputs,
            unconfirmed=tuple(self.unconfirmed),
        )

    def _ran_s(self, number: int, until: datetime) -> float:
        """For how long all ranks of a command had run in an attempt, seconds; 0 for a trainer, which reports."""
        job = self._run.plan.config.job
        attempt = next((each for each in self._run.history.attempts if each.number == number), None)
        if attempt is None or job.command is None or not attempt.started:
            return 0.0
        return (until - max(event.at for event in attempt.started.values())).total_seconds()

    def _record_failure(self, number: int, verdict: events.Verdict) -> events.Verdict:
        self._recorder.append(self._failure(number, verdict))
        return verdict

    def _aborted(self) -> events.Verdict:
        failure = describe_failure(self._run.history.failures[-1])
        return events.Verdict(
            RunState.ABORTED, Reason.USER_ABORT, f"stopped as requested, while it recovered from {failure}"
        )


def _launch_failed(error: FlightDeckError) -> events.Verdict:
    return events.Verdict(RunState.FAILED, Reason.LAUNCH_FAILED, str(error))


def find_launcher(run: RunContext, attempt: AttemptHistory) -> Launcher | None:
    """The mlx.launch of an earlier supervisor's attempt; one that was never recorded is found by its nonce, and
    recorded. None where its start is not known, or the processes are not: the proof of the end covers it, too."""
    launcher = attempt.launcher
    if launcher is None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            found = [each.pid for each in processes.with_nonce(attempt.plan.nonce) if "mlx.launch" in each.command]
            leader = next((pid for pid in found if os.getpgid(pid) == pid), -1)
            launcher = events.LauncherStarted(pid=leader, start=processes.start_time(leader) or "")
    if launcher is None or not launcher.start:
        return None
    if attempt.launcher is None:
        run.recorder.append(launcher)
    return Launcher(
        launcher.pid,
        launcher.start,
        run.run_dir.attempt(attempt.number) / "launcher.in",
        run.run_dir.log(LAUNCHER_SOURCE),
        attempt.plan.log_bases[LAUNCHER_SOURCE],
    )
