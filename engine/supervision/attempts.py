"""The attempts of one run, one after the other: each is prepared, launched, watched to its end and fenced; then another
one follows, or the run has ended.

Never two at once: the next one is prepared when nothing of the last is left on any node that answers, and when the
lease of every node that does not has run out.
"""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine.errors import FlightDeckError, LaunchError, NodeUnreachable
from engine.launch.ports import fresh_ports
from engine.models import Reason, RunState
from engine.preflight.scene import Scene
from engine.runs.layout import LAUNCHER_SOURCE, RunDir
from engine.runs.plan_file import Plan
from engine.supervision.abort import SILENT_S, Proof, Stage
from engine.supervision.attempt import Attempt, Launched, intend, launch, plan_of
from engine.supervision.flight import Flight
from engine.supervision.history import Failures, utc_now
from engine.supervision.inheritance import anybody_came, old_launcher
from engine.supervision.interruption import TICK_S, Aborted, Asked, until_abort
from engine.supervision.judging.verdict import Verdict
from engine.supervision.launcher_watch import LauncherWatch
from engine.supervision.links.links import Links, links_to
from engine.supervision.logbook import Logbook
from engine.supervision.outset import Outset
from engine.supervision.rank_entries import known_identities, of_attempt
from engine.supervision.recovery import End, Present, Retry, Wait, next_step
from engine.supervision.remnants import Remnants
from engine.transport.fleet import Fleet
from engine.worker.wire import END

_PROOF_LIMIT_S = 30.0
"""For every node to show that nothing of a run is left that is taken up again."""
_OF_A_RANK = frozenset({Reason.RANK_KILLED, Reason.RANK_FAILED, Reason.HUNG, Reason.OUT_OF_MEMORY})
"""Failures of a program, which leave the nodes as they were."""
_LOST_IN_LAUNCH = "its supervisor was lost in the middle of the launch"


class Attempts:
    """Of one run, by one supervisor."""

    def __init__(
        self,
        run_dir: RunDir,
        plan: Plan,
        logbook: Logbook,
        fleet: Fleet,
        *,
        nonce: str,
        nodes: Path,
        asked: Asked,
        whole: Plan | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """`plan` has every node that the run may use, `whole` also those that a preflight has left out since (None:
        none); `nodes` is this machine's own node root; `nonce` the run's."""
        self._run_dir = run_dir
        self._plan = plan
        self._whole = whole or plan
        self._logbook = logbook
        self._fleet = fleet
        self._nonce = nonce
        self._nodes = nodes
        self._asked = asked
        self._rng = rng or random.Random()
        self._failures = Failures(plan, logbook)
        self._last: Attempt | None = None
        """The last one that was entered, by this supervisor."""
        self._links: Links | None = None
        self._flight: Flight | None = None
        self._remnants = Remnants(logbook.append)
        self.figures: dict[str, Any] = {}

    @property
    def _number(self) -> int:
        """Of the last attempt that was entered, 0 before the first."""
        return self._logbook.record.attempts if self._logbook.record is not None else 0

    @property
    def unconfirmed(self) -> list[str]:
        """Nodes on which it could not be proved that nothing of the run is left."""
        return [*(self._flight.unconfirmed if self._flight is not None else ()), *self._remnants.unconfirmed]

    @property
    def _owed(self) -> bool:
        """Whether a node has not sent the end of its files yet."""
        return self._flight is not None and self._flight.owes

    async def fly(self, scene: Scene) -> Verdict:
        """From a launch to the run's end; `scene` is the plan's. Raises Aborted before anything has started."""
        try:
            if self._number:
                await until_abort(self._prove_the_last(), self._asked)
            self._logbook.change(RunState.LAUNCHING)
            attempt = await until_abort(self._prepare(self._plan, scene), self._asked)
            await self._hand_over([node.name for node in self._plan.config.nodes])
            return await self._to_the_end(await self._launch(self._plan, attempt))
        except (LaunchError, NodeUnreachable) as error:
            return Verdict(RunState.FAILED, Reason.LAUNCH_FAILED, str(error))

    async def take_up(self, planned: dict[str, Any], *, rebooted: bool) -> Verdict:
        """Go on where an earlier supervisor stopped; `planned` is its last attempt's entry."""
        attempt = Attempt.from_entry(planned, self._nonce)
        plan = plan_of(attempt, self._plan, self._whole)
        self._look_after_the_left_out(plan)
        ended = any(entry["event"] == "attempt_ended" for entry in of_attempt(self._logbook, attempt.number))
        links = self._link(plan, attempt)
        if ended and self._logbook.state in (RunState.RECOVERING, RunState.LAUNCHING):
            await self._fence_again(plan, attempt, links)
            return await self._to_the_end(self._failures.last.verdict)
        # Pids of before a restart of the machine are anybody's.
        launcher = None if rebooted else old_launcher(self._run_dir, self._logbook, attempt)
        if launcher is None and not rebooted and not await anybody_came(links):
            if not self._failures:
                return Verdict(RunState.FAILED, Reason.SUPERVISOR_LOST, _LOST_IN_LAUNCH)
            # The run had been going: it goes on.
            await self._fence_again(plan, attempt, links)
            verdict = Verdict(RunState.FAILED, Reason.LAUNCH_FAILED, _LOST_IN_LAUNCH)
            return await self._to_the_end(self._enter_failure(attempt.number, verdict, 0, utc_now()))
        return await self._to_the_end(
            await self._watch(plan, attempt, Outset(launcher, adopted=True, rebooted=rebooted))
        )

    async def after_the_end(self, planned: dict[str, Any], unconfirmed: Sequence[str]) -> None:
        """In place of a life: the run has ended, and on `unconfirmed` that has not been proved yet."""
        attempt = Attempt.from_entry(planned, self._nonce)
        plan = plan_of(attempt, self._plan, self._whole)
        self._look_after_the_left_out(plan)
        links = self._link(plan, attempt)
        self._flight = await asyncio.to_thread(self._make_flight, plan, attempt, links, Outset(adopted=True))
        self._flight.resume_aftermath(unconfirmed)

    async def aftermath(self, limit_s: float) -> None:
        """After the end: wait for the nodes on which it could not be proved."""
        await self._tend_while(lambda: bool(self.unconfirmed) or self._owed, limit_s)

    async def close(self) -> None:
        if self._flight is not None:
            await asyncio.to_thread(self._flight.close)
            self._flight = None
        if self._links is not None:
            await self._links.close()
            self._links = None
        await self._remnants.close()

    async def _to_the_end(self, verdict: Verdict) -> Verdict:
        """From the end of an attempt to the end of the run: another one for as long as one may follow."""
        while self._logbook.state is RunState.RECOVERING and verdict.state is RunState.FAILED:
            try:
                step = await self._next_step()
                if isinstance(step, End):
                    return self._failures.give_up(step)
                verdict = await self._retry(step)
            except Aborted:
                return await self._aborted()
        if verdict.state is RunState.FAILED and (no := self._failures.refusal()) is not None:
            return self._failures.give_up(no)
        return verdict

    async def _prove_the_last(self) -> None:
        """Of a run that is taken up again: nothing of it may be left anywhere. Raises LaunchError."""
        planned = next(entry for entry in reversed(self._logbook.entries) if entry["event"] == "attempt")
        await self.after_the_end(planned, [node.name for node in self._whole.config.nodes])
        await self._tend_while(lambda: bool(self.unconfirmed), _PROOF_LIMIT_S)
        if self.unconfirmed:
            where = ", ".join(self.unconfirmed)
            why = "its last attempt is not proved to be gone there"
            raise LaunchError("the run cannot be taken up yet", where=where, why=why, todo="see that the node answers")

    async def _next_step(self) -> Retry | End:
        """Once it is known who is there. Raises Aborted."""
        begun, told = time.monotonic(), None
        failures = self._failures
        while True:
            if self._asked() is not None:
                raise Aborted
            await self._tend()
            step = next_step(failures.policy, failures.all, self._roll(), time.monotonic() - begun, self._rng)
            if not isinstance(step, Wait):
                return step
            if step.why != told:
                told = step.why
                self._logbook.append("recovery_waits", after=failures.last.failure.attempt, why=told)
            await asyncio.sleep(TICK_S)

    def _roll(self) -> list[Present]:
        """Every node of the run, as it answers now."""
        proofs = list(self._flight.proofs) if self._flight is not None else []
        elsewhere = [proof for proof in proofs if proof.link.local and not proof.found]
        roll = []
        for node in self._plan.config.nodes:
            proof = next((each for each in proofs if node.name in each.link.names), None) or self._remnants.of(
                node.name
            )
            state = proof.link.state if proof is not None else None
            proved = proof is None or (proof.found and proof.link.state.answering)
            roll.append(Present(node.name, proved and not elsewhere, state.silent_s if state is not None else 0.0))
        return roll

    async def _retry(self, step: Retry) -> Verdict:
        """The next attempt, to its end. Raises Aborted before anything of it has started."""
        number = self._number + 1
        self._logbook.append(
            "recovery",
            attempt=number,
            after=self._failures.last.failure.attempt,
            members=list(step.members),
            left_out=list(step.left_out),
            delay_s=round(step.delay_s, 3),
            why=step.why,
        )
        await self._pause(step.delay_s)
        plan = self._plan.among(step.members)
        self._logbook.change(RunState.LAUNCHING)
        scene = Scene(plan.config, self._fleet)
        try:
            attempt = await until_abort(self._prepare(plan, scene), self._asked)
        except FlightDeckError as error:
            # The nodes and links of the last attempt are what there still is.
            self._logbook.change(RunState.RECOVERING)
            return self._enter_failure(number, _unlaunched(error), 0, utc_now())
        finally:
            await scene.close()
        await self._hand_over(step.members)
        try:
            return await self._launch(plan, attempt)
        except (LaunchError, NodeUnreachable) as error:
            assert self._links is not None
            await self._fence_again(plan, attempt, self._links)
            return self._enter_failure(number, _unlaunched(error), 0, utc_now())

    async def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._asked() is not None:
                raise Aborted
            await self._tend()
            await asyncio.sleep(min(TICK_S, left))

    async def _tend_while(self, condition: Callable[[], bool], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while condition() and time.monotonic() < deadline:
            await self._tend()
            await asyncio.sleep(TICK_S)

    async def _tend(self) -> None:
        if self._flight is not None:
            await self._flight.tend()
        self._remnants.look(time.monotonic())

    async def _hand_over(self, members: Sequence[str]) -> None:
        """Let go of the last attempt, apart from what is to be proved of nodes that the next one leaves out."""
        flight, links = self._flight, self._links
        self._flight = self._links = None
        left: list[Proof] = []
        if flight is not None:
            left = [
                proof for proof in flight.proofs if not proof.link.local and not set(proof.link.names) & set(members)
            ]
            await asyncio.to_thread(flight.close)
        kept = {id(proof.link) for proof in left}
        if links is not None:
            await asyncio.gather(*(link.close() for link in links if id(link) not in kept))
        await self._remnants.release(members)
        self._remnants.keep(left)

    async def _aborted(self) -> Verdict:
        """There is nothing to stop: only what was fenced, and that is proved, but for nodes that do not answer."""
        self._logbook.append("stop", stage=Stage.ASKED.value, purpose="abort", acknowledged=[], left=[])
        await self._tend_while(lambda: bool(self.unconfirmed), SILENT_S)
        stage = Stage.UNCONFIRMED if self.unconfirmed else Stage.STOPPED
        self._logbook.append("stop", stage=stage.value, purpose="abort", acknowledged=[], left=[])
        return self._stopped()

    def _stopped(self) -> Verdict:
        why = f"stopped as asked, while it recovered from {self._failures.last.failure.words}"
        return Verdict(RunState.ABORTED, Reason.USER_ABORT, why)

    def _enter_failure(self, attempt: int, verdict: Verdict, reached: int, failed_at: str) -> Verdict:
        self._failures.enter(attempt, verdict, reached, failed_at, self.unconfirmed)
        return verdict

    def _look_after_the_left_out(self, plan: Plan) -> None:
        """Those of the run's nodes that an earlier supervisor has gone on without: the proof is sought anew."""
        here = {node.name for node in plan.config.nodes}
        for node in self._plan.config.nodes:
            if node.name in here or self._remnants.of(node.name) is not None:
                continue
            for entry in reversed([each for each in self._logbook.entries if each["event"] == "attempt"]):
                attempt = Attempt.from_entry(entry, self._nonce)
                if node.name in [name for _, name in attempt.members]:
                    self._keep_link(attempt, node.name)
                    break

    def _keep_link(self, attempt: Attempt, node: str) -> None:
        plan = plan_of(attempt, self._plan, self._whole)
        links = links_to(plan, attempt, self._fleet, self._nodes, known_identities(self._logbook, attempt.number))
        for link in links:
            if node in link.names and not link.local:
                link.start()
                for rank in link.ranks:
                    link.tell(rank, END)
                self._remnants.keep([Proof(link)])

    async def _prepare(self, plan: Plan, scene: Scene) -> Attempt:
        """What the next attempt will be, entered in the journal before anything of it starts."""
        number = self._number + 1
        config = plan.config
        last = self._as_it_was(plan)
        if last is not None:
            wiring, places = last.wiring, last.places
        else:
            wiring, places = await asyncio.gather(scene.wiring(), scene.places())
        port = await fresh_ports(self._fleet, config.nodes, wiring, config.cluster.starting_port)
        if self._flight is not None:
            # Only now: until then its nodes may have sent more.
            await self._flight.ground()
        attempt = intend(
            self._run_dir,
            plan,
            number,
            self._nonce,
            places,
            wiring,
            port,
            resume=number > 1,
            reached=self._failures.reached,
        )
        self._logbook.append("attempt", **attempt.entry())
        self._last = attempt
        return attempt

    def _as_it_was(self, plan: Plan) -> Attempt | None:
        """The last attempt, when it was on the same nodes and nothing that happened to it changes what is known of
        them: they answer, or there would be no other. What has been removed there meanwhile fails the launch, and the
        nodes are asked again."""
        if self._last is None or not self._failures or self._failures.last.failure.reason not in _OF_A_RANK:
            return None
        same = [node for _, node in self._last.members] == [rank.node for rank in plan.ranks]
        return self._last if same else None

    async def _launch(self, plan: Plan, attempt: Attempt) -> Verdict:
        """Start the ranks and watch them to their end. When an abort comes in between, whatever has started by then is
        left to the watch."""
        # The links connect while the ranks start.
        self._link(plan, attempt)
        try:
            launched = await until_abort(launch(self._run_dir, plan, attempt, self._fleet), self._asked)
        except Aborted:
            launched = Launched(None)
        # Not on the loop: the ranks have started, and a disk that stalls must not hold up their beats.
        launcher = await asyncio.to_thread(self._watch_on, launched, attempt)
        return await self._watch(plan, attempt, Outset(launcher, _refusals(launched)))

    def _watch_on(self, launched: Launched, attempt: Attempt) -> LauncherWatch | None:
        if launched.launcher is None:
            return None
        log = self._run_dir.log(LAUNCHER_SOURCE)
        launcher = LauncherWatch.of(launched.launcher, log, attempt.log_bases[LAUNCHER_SOURCE])
        self._logbook.append("launcher", pid=launcher.pid, start=launcher.start)
        return launcher

    def _link(self, plan: Plan, attempt: Attempt) -> Links:
        """The links to the attempt's hosts, started."""
        known = known_identities(self._logbook, attempt.number)
        self._links = links_to(plan, attempt, self._fleet, self._nodes, known)
        self._links.start()
        return self._links

    async def _watch(self, plan: Plan, attempt: Attempt, outset: Outset) -> Verdict:
        """The attempt's whole life, and its end in the journal when that is a failure."""
        assert self._links is not None
        # Not on the loop: the indices of a week of logs may want mending, and the ranks want their beats.
        flight = await asyncio.to_thread(self._make_flight, plan, attempt, self._links, outset)
        self._flight = flight
        evidence = await flight.watch(self._asked)
        self.figures = flight.intake.latest
        verdict = await asyncio.to_thread(flight.judged, evidence)
        if verdict.state is not RunState.FAILED:
            return verdict
        self._enter_failure(attempt.number, verdict, flight.intake.progress.furthest, flight.failed_at)
        return self._stopped() if flight.hurried else verdict

    async def _fence_again(self, plan: Plan, attempt: Attempt, links: Links) -> None:
        """An attempt that has been ended, or never got going: prove once more that nothing of it is left."""
        self._flight = await asyncio.to_thread(self._make_flight, plan, attempt, links, Outset(adopted=True))
        self._flight.resume_aftermath([name for link in links for name in link.names])
        if self._logbook.state is not RunState.RECOVERING:
            self._logbook.change(RunState.RECOVERING)

    def _make_flight(self, plan: Plan, attempt: Attempt, links: Links, outset: Outset) -> Flight:
        return Flight(
            self._run_dir,
            plan,
            attempt,
            links=links,
            logbook=self._logbook,
            outset=outset,
            recovers=functools.partial(self._failures.may_follow, attempt.number),
            on_first_step=functools.partial(self._failures.overcome, attempt.number) if attempt.resume else None,
        )


def _unlaunched(error: FlightDeckError) -> Verdict:
    return Verdict(RunState.FAILED, Reason.LAUNCH_FAILED, str(error))


def _refusals(launched: Launched) -> dict[int, tuple[int, str]]:
    """The ranks that did not start, where nobody else tells of them → (exit code, words)."""
    unknown = 255
    return {each.rank: (unknown if each.code is None else each.code, each.words) for each in launched.failures}
