"""The watch over one attempt, from its launch until nothing of it is left: mirrors, liveness, the end and its proof."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from engine.models import RunState
from engine.runs.layout import LAUNCHER_SOURCE, RunDir
from engine.runs.mirror import Gap, Mirror
from engine.runs.plan_file import Plan
from engine.security.audit import audit_log
from engine.supervision.abort import Graces, Proof, Stage, Stop
from engine.supervision.attempt import Attempt
from engine.supervision.conditions import Conditions, lost_after_s
from engine.supervision.consistency_watch import ConsistencyWatch
from engine.supervision.culprit import Evidence, Trigger, is_consequence
from engine.supervision.event_intake import EventIntake
from engine.supervision.evidence import Witnesses
from engine.supervision.launcher_watch import LauncherWatch
from engine.supervision.links.base import NodeLink
from engine.supervision.links.links import Links
from engine.supervision.logbook import Logbook
from engine.supervision.ranks import Rank, Ranks
from engine.supervision.requests import Request
from engine.worker.processes import Process
from engine.worker.wire import END, Identity

TICK_S = 0.1
_SECOND_S = 1.0
"""Between two looks at what costs more."""
START_LIMIT_S = 60.0
_SETTLE_S = 1.0
"""A rank that has only lost its peers waits this long for the one that began it."""
_LATE_BYTES_S = 10.0
"""The end of a log may take as long to come, after the last byte that came."""
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
        launcher: LauncherWatch | None,
        logbook: Logbook,
        refusals: Mapping[int, tuple[int, str]] | None = None,
        adopted: bool = False,
        rebooted: bool = False,
        start_limit_s: float = START_LIMIT_S,
    ) -> None:
        """`links` have been started. `refusals`: ranks that did not start, where mlx.launch does not tell of them →
        (exit code, words)."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="flight")
        self._plan = plan
        self._attempt = attempt
        self._links = links
        self._launcher = launcher
        self._logbook = logbook
        self._start_limit_s = start_limit_s
        self._ranks = Ranks(links, plan.ranks)
        self._entered = _entered(logbook)
        before = [entry for entry in _of_last_attempt(logbook) if entry["event"] == "node"]
        self._conditions = Conditions(links, logbook.append, lost_after_s(plan.config), before)
        self._refused = [(rank, code) for rank, (code, _) in (refusals or {}).items()]
        self._witnesses = Witnesses(
            plan,
            attempt,
            links,
            self._conditions,
            launcher,
            launching=run_dir.attempt(attempt.number),
            refusals={rank: words for rank, (_, words) in (refusals or {}).items()},
            adopted=adopted,
            rebooted=rebooted,
        )
        self._mirror = Mirror(run_dir, on_gap=self._note_gap)
        for number in (rank.number for rank in self._ranks.all):
            link, names = links.to(number), attempt.files(plan.run_id, number)
            log, events = link.file(names.log(number).name), link.file(names.events(number).name)
            self._mirror.follow(number, attempt.number, log, attempt.log_bases[number])
            self._mirror.follow_events(number, attempt.number, events, attempt.event_bases[number])
        self._mirror.follow(LAUNCHER_SOURCE, attempt.number, None, attempt.log_bases[LAUNCHER_SOURCE])
        self.intake = EventIntake(run_dir, attempt.number, attempt.event_bases, self._consistency(run_dir.path))
        self._began = time.monotonic()
        self._second_at = float("-inf")
        self._launcher_gone_at: float | None = None
        self._launcher_missed = False
        self._settling_since: float | None = None
        self._stop: Stop | None = None
        self._trigger = Trigger.ENDED
        self._owing: list[NodeLink] = []
        """Nodes on which nothing is left but the rest of their logs."""

    def _consistency(self, run: Path) -> ConsistencyWatch:
        """What judges the ranks while they train; its alarms go into the journal and the audit log."""

        def alarm(**fields: Any) -> None:
            self._logbook.append("alarm", **fields)
            audit_log("worker_consistency", "alarm", {"run": run.name, **fields}, home=run.parent.parent)

        before = [entry for entry in _of_last_attempt(self._logbook) if entry["event"] == "alarm"]
        nodes = {rank.rank: rank.node for rank in self._plan.ranks}
        return ConsistencyWatch(self._plan.config.consistency, nodes, alarm, before)

    @property
    def unconfirmed(self) -> list[str]:
        """Nodes on which the stop could not be proved."""
        if self._stop is None:
            return []
        return [name for proof in self._stop.proofs if not proof.found for name in proof.link.names]

    async def watch(self, requests: Callable[[], Request | None]) -> Evidence:
        """Watch until everything of the attempt is gone, as far as its nodes answer; what is then known of it.
        `requests` gives the abort that has been asked for, if any; it is asked in another thread."""
        # A thread of its own for all that touches the head's disk: a disk that stalls holds up no beat and no link.
        while not await self._aside(self._tick, requests):
            await asyncio.sleep(TICK_S)
        proved = [proof.link for proof in self._stop.proofs if proof.found] if self._stop is not None else []
        await self._aside(self._last_bytes, proved)
        await self._aside(self._mirror.settle)
        if missing := self._mirror.behind():
            lacking = f"the mirrors are not complete: the nodes hold what is missing of {', '.join(missing)}"
            self._logbook.append("note", message=lacking)
            self._owing = [link for link in proved if self._owes(link)]
        self.intake.poll()
        return await self._aside(self._witnesses.heard, self._ranks.all, self._trigger)

    async def aftermath(self, limit_s: float) -> None:
        """After the end: wait for the nodes on which it could not be proved, end there what is left, fetch what is
        missing of their logs, and enter each as confirmed. Those that were proved and then went away in the middle of
        their logs are waited for likewise."""
        deadline = time.monotonic() + limit_s
        while (self.unconfirmed or self._owing) and time.monotonic() < deadline:
            await self._aside(self._try_to_confirm)
            await asyncio.sleep(TICK_S)

    def resume_aftermath(self, nodes: Sequence[str]) -> None:
        """Before `aftermath`, in place of `watch`: the run has ended, and on `nodes` that has not been proved yet."""
        self._stop = self._new_stop(cooperative=False)
        for proof in self._stop.proofs:
            proof.found = not set(nodes) & set(proof.link.names)

    def close(self) -> None:
        """The files. The links are their maker's."""
        self._mirror.finish()
        self.intake.close()
        self._thread.shutdown(wait=False)

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
        self._mirror.pump()
        self.intake.poll()
        self._enter_changes(changed)
        if abort is not None and self._stop is None and not self._all_home():
            self._abort(abort)
        elif abort is not None and abort.now and self._stop is not None:
            # Whatever it is that ends the attempt, it has been judged worth ending: an abort can only hurry it.
            self._stop.hurry()
        if self._stop is None:
            self._decide(now, launcher_alive)
        if self._stop is not None:
            self._stop.advance(time.monotonic())
            return self._stop.done
        return False

    def _decide(self, now: float, launcher_alive: bool) -> None:
        """Whether it is time to end the attempt, and why."""
        ranks = self._ranks.all
        if launcher_alive or self._launcher_gone_at is None:
            self._launcher_gone_at = None if launcher_alive else now
        if all(rank.ended for rank in ranks):
            self._end(Trigger.ENDED)
        elif failed := [rank for rank in ranks if rank.ended and self._failed(rank)]:
            self._settling_since = self._settling_since or now
            own = any(not is_consequence(self._witnesses.of(rank)) for rank in failed)
            if own or now - self._settling_since > _SETTLE_S:
                self._end(Trigger.RANK)
        elif all(rank.started for rank in ranks):
            self._miss_launcher()
        elif self._launcher_gone_at is not None and self._nobody_else_will_start(now - self._launcher_gone_at):
            self._end(Trigger.LAUNCHER_GONE if self._launcher is not None else Trigger.NOT_STARTED)
        elif now - self._began > self._start_limit_s:
            self._end(Trigger.NOT_STARTED)

    def _miss_launcher(self) -> None:
        """It has done its part when all ranks have started; its end is worth no more than a note."""
        if self._launcher is not None and self._launcher_gone_at is not None and not self._launcher_missed:
            self._launcher_missed = True
            self._logbook.append("note", message="mlx.launch has ended; the ranks go on without it")

    def _nobody_else_will_start(self, launcher_gone_s: float) -> bool:
        """Whether the nodes have been heard since the launcher ended, and the ranks that are missing were not there."""
        if launcher_gone_s <= _SETTLE_S:
            return False
        missing = [self._links.to(rank.number).state for rank in self._ranks.all if not rank.started]
        return all(state.heard and state.silent_s < launcher_gone_s - _SETTLE_S / 2 for state in missing)

    def _all_home(self) -> bool:
        """Every rank has done what it was to do: there is nothing left to abort."""
        return all(rank.ended and not self._failed(rank) for rank in self._ranks.all)

    def _failed(self, rank: Rank) -> bool:
        if rank.record is None or rank.record.code != 0 or rank.record.stopped_by is not None:
            return True
        # A command may leave with 0 before the others do; our trainer may not, unless it has completed.
        return self._plan.config.job.command is None and not self._witnesses.completed(rank)

    def _abort(self, abort: Request) -> None:
        self._trigger = Trigger.ABORT
        self._logbook.append(
            "stop", stage=Stage.ASKED.value, purpose="abort", acknowledged=self._acknowledged(), left=[]
        )
        self._begin_stop(cooperative=not abort.now)

    def _end(self, trigger: Trigger) -> None:
        self._trigger = trigger
        self._begin_stop(cooperative=False)

    def _begin_stop(self, *, cooperative: bool) -> None:
        if self._logbook.state is not RunState.FINISHING:
            self._logbook.change(RunState.FINISHING)
        self._stop = self._new_stop(cooperative=cooperative)

    def _new_stop(self, *, cooperative: bool) -> Stop:
        recovery = self._plan.config.recovery
        return Stop(
            self._ranks,
            self._links,
            self._launcher,
            Graces(recovery.stop_grace_s, recovery.save_grace_s, recovery.term_grace_s),
            cooperative=cooperative,
            on_stage=self._enter_stage,
            saving=lambda: self.intake.saving,
        )

    def _enter_stage(self, stage: Stage, proofs: Sequence[Proof]) -> None:
        if stage is Stage.VERIFYING:
            for link in self._links:
                # Of a rank without an exit record, nobody has told the last words yet.
                link.hear_words()
        self._logbook.append(
            "stop",
            stage=stage.value,
            purpose=_PURPOSES.get(self._trigger, "fence"),
            acknowledged=self._acknowledged(),
            left=[_named(proof.link, process) for proof in proofs if not proof.found for process in proof.left],
        )

    def _owes(self, *links: NodeLink) -> bool:
        """Whether these nodes have not sent all of their files yet."""
        theirs = tuple(f"rank{rank}." for link in links for rank in link.ranks)
        return any(name.startswith(theirs) for name in self._mirror.behind())

    def _last_bytes(self, links: Sequence[NodeLink]) -> None:
        """Wait for what these nodes have not sent yet of their files, as long as it comes."""
        moved_at = time.monotonic()
        while self._owes(*links):
            if self._mirror.pump():
                moved_at = time.monotonic()
            elif time.monotonic() - moved_at > _LATE_BYTES_S:
                return
            else:
                time.sleep(TICK_S / 4)

    def _try_to_confirm(self) -> None:
        """One look at the nodes that are not confirmed yet."""
        assert self._stop is not None
        now = time.monotonic()
        self._conditions.look()
        self._ranks.look(thorough=False)
        self._mirror.pump()
        for link in [link for link in self._owing if not self._owes(link)]:
            self._owing.remove(link)
            self._logbook.append("note", message=f"the logs of {', '.join(link.names)} are complete")
        for proof in self._stop.proofs:
            if proof.found or not proof.link.state.answering:
                continue
            self._tell_the_end(proof.link)
            proof.seek(now)
            if not proof.found:
                continue
            self._last_bytes([proof.link])
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
        for rank in changed:
            if rank.identity is not None and not self._known("rank_started", rank):
                self._enter_start(rank, rank.identity)
            if rank.ended and not self._known("rank_ended", rank):
                self._enter_end(rank)
        if changed and all(rank.started for rank in self._ranks.all):
            if self._logbook.state is RunState.LAUNCHING:
                self._logbook.change(RunState.RUNNING)
            if self._launcher is not None:
                self._launcher.drop_pipes()

    def _enter_start(self, rank: Rank, identity: Identity) -> None:
        self._logbook.append(
            "rank_started",
            rank=rank.number,
            host=rank.planned.node,
            pid=identity.trainer_pid,
            start=identity.trainer_start,
            pgid=identity.trainer_pgid,
            started_at=identity.started_at,
            identity=asdict(identity),
        )

    def _enter_end(self, rank: Rank) -> None:
        record = rank.record
        self._logbook.append(
            "rank_ended",
            rank=rank.number,
            host=rank.planned.node,
            code=record.code if record is not None else rank.launcher_code,
            signal=record.signal if record is not None else None,
            stopped_by=record.stopped_by if record is not None else None,
            error=record.error if record is not None else "its node is lost" if rank.lost else "no exit record",
        )
        if record is not None and record.dropped_bytes:
            lost = f"rank {rank.number}: {record.dropped_bytes} bytes of output were lost to a full disk"
            self._logbook.append("note", message=f"{lost} on {rank.planned.node}")

    def _known(self, event: str, rank: Rank) -> bool:
        """Whether this attempt's journal has it already, by us or by an earlier supervisor."""
        key = (event, rank.number)
        if key in self._entered:
            return True
        self._entered.add(key)
        return False

    def _listen_to_launcher(self) -> list[Rank]:
        refused, self._refused = self._refused, []
        if self._launcher is not None:
            refused += self._launcher.rank_ends()
        return self._ranks.refused(refused)

    def _note_gap(self, gap: Gap) -> None:
        self._logbook.append("note", message=f"{gap.file}: {gap.problem}{': over' if gap.over else ''}", **asdict(gap))


def known_identities(logbook: Logbook) -> dict[int, Identity]:
    """The identities of the last attempt's ranks, as an earlier supervisor has entered them."""
    started = (entry for entry in _of_last_attempt(logbook) if entry["event"] == "rank_started")
    return {entry["rank"]: Identity(**entry["identity"]) for entry in started if "identity" in entry}


def _named(link: NodeLink, process: Process) -> str:
    return f"{link.names[0]} {process.pid} {process.command[:200]}"


def _of_last_attempt(logbook: Logbook) -> list[dict[str, Any]]:
    entries = logbook.entries
    begun = max((at for at, entry in enumerate(entries) if entry["event"] == "attempt"), default=len(entries))
    return entries[begun:]


def _entered(logbook: Logbook) -> set[tuple[str, int]]:
    """What an earlier supervisor has entered of the ranks of the last attempt."""
    ranks = (entry for entry in _of_last_attempt(logbook) if entry["event"] in ("rank_started", "rank_ended"))
    return {(entry["event"], entry["rank"]) for entry in ranks}
