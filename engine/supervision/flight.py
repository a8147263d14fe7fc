"""The watch over one attempt, from its launch until nothing of it is left: mirrors, liveness, the end and its proof."""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from engine.models import Reason, RunState
from engine.runs.layout import RunDir
from engine.runs.mirror import Gap
from engine.runs.plan_file import Plan
from engine.security.audit import audit_log
from engine.supervision.abort import Graces, Proof, Rescue, Stage, Stop
from engine.supervision.attempt import Attempt
from engine.supervision.conditions import Conditions, lost_after_s
from engine.supervision.consistency_watch import ConsistencyWatch
from engine.supervision.copies import Copies
from engine.supervision.event_intake import EventIntake
from engine.supervision.history import utc_now
from engine.supervision.interruption import TICK_S
from engine.supervision.judging.culprit import judge
from engine.supervision.judging.evidence import Evidence, Trigger
from engine.supervision.judging.explanation import explained
from engine.supervision.judging.verdict import Verdict
from engine.supervision.links.base import NodeLink
from engine.supervision.links.links import Links
from engine.supervision.logbook import Logbook
from engine.supervision.outset import Outset
from engine.supervision.progress import Progress
from engine.supervision.rank_entries import RankEntries, of_attempt
from engine.supervision.ranks import Rank, Ranks
from engine.supervision.requests import Request
from engine.supervision.signs import Signs
from engine.supervision.witnesses import Witnesses
from engine.worker.processes import Process
from engine.worker.wire import END

_SECOND_S = 1.0
"""Between two looks at what costs more."""
_NOT_WORTH_RESCUING = frozenset({Reason.CORRUPTED, Reason.DIVERGED})
"""Reasons of an end that speak against the state itself. After all others it is what the user may go on from, whether
the run restarts by itself or not."""
_PURPOSES = {Trigger.ABORT: "abort", Trigger.ENDED: "end"}

P = ParamSpec("P")
T = TypeVar("T")


class Flight:
    """One attempt in the air. `watch` is its whole life; it may begin in the middle of one (adoption)."""

    def __init__(
        self,
        run_dir: RunDir,
        plan: Plan,
        attempt: Attempt,
        *,
        links: Links,
        logbook: Logbook,
        outset: Outset,
        recovers: Callable[[Verdict, int], bool] = lambda _verdict, _reached: False,
        on_first_step: Callable[[Progress], None] | None = None,
    ) -> None:
        """`links` have been started. `recovers`: whether another attempt may follow such an end, at that iteration.
        `on_first_step` is told once that the attempt has made one."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="flight")
        self._run_dir = run_dir
        self._plan = plan
        self._attempt = attempt
        self._links = links
        self._launcher = outset.launcher
        self._logbook = logbook
        self._ranks = Ranks(links, plan.ranks)
        self._entries = RankEntries(logbook, attempt.number)
        before = [entry for entry in of_attempt(logbook, attempt.number) if entry["event"] == "node"]
        self._conditions = Conditions(links, logbook.append, lost_after_s(plan.config), before)
        self._refused = [(rank, code) for rank, (code, _) in outset.refusals.items()]
        self._witnesses = Witnesses(
            plan,
            attempt,
            links,
            self._conditions,
            outset,
            launching=run_dir.attempt(attempt.number),
        )
        self._copies = Copies(run_dir, plan, attempt, links, self._note_gap)
        self.intake = EventIntake(run_dir, attempt.number, attempt.event_bases, self._consistency(run_dir.path))
        self._signs = Signs(
            plan,
            attempt,
            ranks=self._ranks,
            links=links,
            witnesses=self._witnesses,
            intake=self.intake,
            logbook=logbook,
            launched=outset.launcher is not None,
        )
        self._second_at = float("-inf")
        self._stop: Stop | None = None
        self._trigger = Trigger.ENDED
        self._purpose: str | None = None
        self._failed_at: str | None = None
        self._recovers = recovers
        self._on_first_step = on_first_step
        self.recovering = False
        """Another attempt may follow: the state was RECOVERING when this one was ended."""
        self._owing: list[NodeLink] = []
        """Nodes on which nothing is left but the rest of their logs."""

    def _consistency(self, run: Path) -> ConsistencyWatch:
        """What judges the ranks while they train; its alarms go into the journal and the audit log."""

        def alarm(**fields: Any) -> None:
            self._logbook.append("alarm", **fields)
            audit_log("worker_consistency", "alarm", {"run": run.name, **fields}, home=run.parent.parent)

        before = [entry for entry in of_attempt(self._logbook, self._attempt.number) if entry["event"] == "alarm"]
        nodes = {rank.rank: rank.node for rank in self._plan.ranks}
        return ConsistencyWatch(self._plan.config.consistency, nodes, alarm, before)

    @property
    def unconfirmed(self) -> list[str]:
        """Nodes on which the stop could not be proved."""
        if self._stop is None:
            return []
        return [name for proof in self._stop.proofs if not proof.found for name in proof.link.names]

    @property
    def proofs(self) -> Sequence[Proof]:
        """Of every host of the attempt, once it is being ended."""
        return self._stop.proofs if self._stop is not None else ()

    @property
    def failed_at(self) -> str:
        """When it was noticed that it fails (UTC, ISO)."""
        return self._failed_at or utc_now()

    @property
    def hurried(self) -> bool:
        """An abort has come while it was being ended for a restart."""
        return self._purpose is not None

    @property
    def owes(self) -> bool:
        """A node that was proved has not sent the end of its files yet."""
        return bool(self._owing)

    async def watch(self, requests: Callable[[], Request | None]) -> Evidence:
        """Watch until everything of the attempt is gone, as far as its nodes answer; what is then known of it.
        `requests` gives the abort that has been asked for, if any; it is asked in another thread."""
        # A thread of its own for all that touches the head's disk: a disk that stalls holds up no beat and no link.
        while not await self._aside(self._tick, requests):
            await asyncio.sleep(TICK_S)
        proved = [proof.link for proof in self._stop.proofs if proof.found] if self._stop is not None else []
        await self._aside(self._copies.await_the_rest, proved)
        if missing := await self._aside(self._copies.settle):
            lacking = f"the mirrors are not complete: the nodes hold what is missing of {', '.join(missing)}"
            self._logbook.append("note", message=lacking)
            self._owing = [link for link in proved if self._copies.owed_by(link)]
        self.intake.poll()
        return await self._aside(self._witnesses.heard, self._ranks.all, self._trigger, self._signs.hang)

    async def tend(self) -> None:
        """After `watch`: one look at the nodes on which the end could not be proved, or that owe something."""
        await self._aside(self._try_to_confirm)

    async def ground(self) -> None:
        """After `watch`: nothing of the attempt is copied any more, since another one is to write the same files on the
        head. What a node has not sent by now stays there."""
        self._owing = []
        await self._aside(self._close_files)

    def judged(self, evidence: Evidence) -> Verdict:
        """The verdict on it, with the known failure text that explains it: whether a restart can mend it depends on
        that. Reads the mirrors."""
        environment = {**os.environ, **self._plan.config.job.env}
        return explained(judge(evidence), evidence, self._run_dir, self._attempt.log_bases, environment)

    def resume_aftermath(self, nodes: Sequence[str]) -> None:
        """Before `tend`, in place of `watch`: the run has ended, and on `nodes` that has not been proved yet."""
        self._stop = self._new_stop(cooperative=False)
        for proof in self._stop.proofs:
            proof.found = not set(nodes) & set(proof.link.names)

    def close(self) -> None:
        """The files. The links are their maker's."""
        self._close_files()
        self._thread.shutdown(wait=False)

    def _close_files(self) -> None:
        self._copies.close()
        self.intake.close()

    async def _aside(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`work` in the flight's own thread: the loop's common ones may all be waiting for the names of nodes that are
        not there."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, functools.partial(work, *args, **kwargs))

    def _tick(self, requests: Callable[[], Request | None]) -> bool:
        """One look at everything; True when the attempt is over."""
        abort = requests()
        now = time.monotonic()
        thorough = now - self._second_at >= _SECOND_S
        if thorough:
            self._second_at = now
        # Liveness is read before the last read of a log.
        launcher_alive = self._launcher is not None and self._launcher.alive(thorough=thorough)
        lost = self._conditions.look()
        changed = self._ranks.look(thorough=thorough) + self._listen_to_launcher() + self._ranks.lose(lost)
        self._copies.pump()
        self.intake.poll()
        self._enter_changes(changed)
        if self._on_first_step is not None and self.intake.progress.steps:
            self._on_first_step(self.intake.progress)
            self._on_first_step = None
        if abort is not None and self._stop is None and not self._signs.all_home:
            self._abort(abort)
        elif abort is not None and self._stop is not None:
            # Whatever it is that ends the attempt, it has been judged worth ending: an abort can only hurry it.
            self._abort_the_end(abort)
        if self._stop is None and (trigger := self._signs.look(now, launcher_alive)) is not None:
            self._end(trigger)
        if self._stop is not None:
            self._stop.advance(time.monotonic())
            return self._stop.done
        return False

    def _abort(self, abort: Request) -> None:
        self._trigger = Trigger.ABORT
        self._logbook.append(
            "stop", stage=Stage.ASKED.value, purpose="abort", acknowledged=self._acknowledged(), left=[]
        )
        self._begin_stop(RunState.FINISHING, cooperative=not abort.now)

    def _abort_the_end(self, abort: Request) -> None:
        assert self._stop is not None
        if self.recovering and self._purpose is None:
            # From here on it is the user's stop, and told as such.
            self._purpose = _PURPOSES[Trigger.ABORT]
            self._enter_stage(Stage.ASKED, self._stop.proofs)
        if abort.now:
            # Otherwise what the ranks are writing, perhaps the only newest state, is still of use.
            self._stop.hurry()

    def _end(self, trigger: Trigger) -> None:
        self._trigger = trigger
        if trigger is Trigger.HUNG:
            self._failed_at = utc_now()
        so_far = self.judged(self._witnesses.heard(self._ranks.all, trigger, self._signs.hang, over=False))
        going_on = self._logbook.state is not RunState.FINISHING
        self.recovering = going_on and self._recovers(so_far, self.intake.progress.furthest)
        rescue = self._rescue(so_far.rank) if so_far.reason not in _NOT_WORTH_RESCUING else None
        state = RunState.RECOVERING if self.recovering else RunState.FINISHING
        self._begin_stop(state, cooperative=False, rescue=rescue)

    def _rescue(self, culprit: int | None) -> Rescue | None:
        """What the ranks that are left may save: of replicas each has the whole state."""
        job = self._plan.config.job
        if job.command is not None or job.strategy != "data" or not self.intake.progress.steps:
            return None
        progress, graces = self.intake.progress, self._plan.config.recovery
        patience_s = max(graces.stop_grace_s, 2 * (progress.long_step_s() or 0.0))
        return Rescue(culprit, progress.rescues, patience_s, progress.rescue_bytes)

    def _begin_stop(self, state: RunState, *, cooperative: bool, rescue: Rescue | None = None) -> None:
        if self._logbook.state not in (state, RunState.FINISHING):
            self._logbook.change(state)
        self._stop = self._new_stop(cooperative=cooperative, rescue=rescue)

    def _new_stop(self, *, cooperative: bool, rescue: Rescue | None = None) -> Stop:
        recovery = self._plan.config.recovery
        return Stop(
            self._ranks,
            self._links,
            self._launcher,
            Graces(recovery.stop_grace_s, recovery.save_grace_s, recovery.term_grace_s),
            cooperative=cooperative,
            on_stage=self._enter_stage,
            saving=lambda: self.intake.saving,
            rescue=rescue,
        )

    def _enter_stage(self, stage: Stage, proofs: Sequence[Proof]) -> None:
        if stage is Stage.VERIFYING:
            for link in self._links:
                # Of a rank without an exit record, nobody has told the last words yet.
                link.hear_words()
        self._logbook.append(
            "stop",
            stage=stage.value,
            purpose=self._purpose or _PURPOSES.get(self._trigger, "fence"),
            acknowledged=self._acknowledged(),
            left=[_named(proof.link, process) for proof in proofs if not proof.found for process in proof.left],
        )

    def _try_to_confirm(self) -> None:
        """One look at the nodes that are not confirmed yet."""
        assert self._stop is not None
        now = time.monotonic()
        self._conditions.look()
        self._ranks.look(thorough=False)
        self._copies.pump()
        for link in [link for link in self._owing if not self._copies.owed_by(link)]:
            self._owing.remove(link)
            self._logbook.append("note", message=f"the logs of {', '.join(link.names)} are complete")
        for proof in self._stop.proofs:
            if proof.found or not proof.link.state.answering:
                continue
            self._tell_the_end(proof.link)
            proof.seek(now)
            if not proof.found:
                continue
            self._copies.await_the_rest([proof.link])
            # One that goes away again in the middle of its log is waited for once more.
            proof.found = proof.link.state.answering
            if proof.found:
                self._confirm(proof.link)

    def _tell_the_end(self, link: NodeLink) -> None:
        for rank in link.ranks:
            if self._ranks.all[rank].record is None:
                link.tell(rank, END)

    def _confirm(self, link: NodeLink) -> None:
        self._enter_changes([self._ranks.all[rank] for rank in link.ranks])
        for name in link.names:
            self._logbook.append("confirmed", node=name)

    def _acknowledged(self) -> list[int]:
        return [rank.number for rank in self._ranks.all if rank.record is not None]

    def _enter_changes(self, changed: Sequence[Rank]) -> None:
        self._entries.enter(changed)
        self._failed_at = self._failed_at or next(
            (utc_now() for rank in changed if rank.ended and self._signs.failed(rank)), None
        )
        if changed and all(rank.started for rank in self._ranks.all):
            if self._logbook.state is RunState.LAUNCHING:
                self._logbook.change(RunState.RUNNING)
            if self._launcher is not None:
                self._launcher.drop_pipes()

    def _listen_to_launcher(self) -> list[Rank]:
        refused, self._refused = self._refused, []
        if self._launcher is not None:
            refused += self._launcher.rank_ends()
        return self._ranks.refused(refused)

    def _note_gap(self, gap: Gap) -> None:
        self._logbook.append("note", message=f"{gap.file}: {gap.problem}{': over' if gap.over else ''}", **asdict(gap))


def _named(link: NodeLink, process: Process) -> str:
    return f"{link.names[0]} {process.pid} {process.command[:200]}"
