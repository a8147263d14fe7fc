"""The step against the recorded attempts of tests/data/attempts: what the supervisor saw of each is given to it, tick
for tick, and what follows is compared with what the supervisor of that time did: each verdict with its cause, each
decision, and all effects in their order. Where both may differ is in TOLERANCES, `_comparable` and DIFFERENCES, each
with the reason; no rule there moves a command to a rank, a stage of a stop or a restart."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from engine.models import PreflightReport, RunState
from engine.run import decide, effects, events, recovery
from engine.run import step as step_module
from engine.run.decide import FailedRun, Finish, Restart, Wait
from engine.run.effects import Effect, RequestProcesses
from engine.run.failure_evidence import FailureEvidence
from engine.run.observation import Cancelled, Checked, Found, HostView, Judged, Observation, Planned, Settled, Started
from engine.run.running import begin_watch
from engine.run.shutdown import _REQUEST_AGAIN_S, CleanupProof
from engine.run.state import Phase, State, Transition
from engine.run.step import begin, step
from engine.run.verdict import verdict_on, with_cause
from engine.store.layout import RunDir
from tests.unit.run.recordings import Decision, JudgedOn, MayRestart, RecordedAttempt, Tick, recorded_attempts

ANSWERS: Mapping[type[Effect], tuple[type[Any], ...]] = {
    effects.Judge: (JudgedOn,),
    effects.PlanAttempt: (Planned, Cancelled),
    effects.Start: (Started, Cancelled),
}
NOT_COMPARED = (effects.PlanAttempt, effects.Start, effects.EndTrackers, effects.Settle)
"""The first two are recorded by their results. To end the trackers, and to settle a host that answers again, was no act
of its own; what the host's files lack is recorded."""

TOLERANCES: Mapping[str, float] = {
    # Recorded to the millisecond in an observation, finer in an act; the wall clock was read again for each event.
    "failed_at": 0.02,
    "since": 0.002,
    "seconds": 0.02,
    "silent_s": 0.001,
    "head_slept_s": 0.001,
    "waited_s": 0.001,
    "delay_s": 0.001,
    # A second passes between two answers of a host; of its silence meanwhile the ticks that were left out had more.
    "cut_off_s": 1.0,
}
"""How far numbers of these fields may be apart, s."""

SINCE_THEN = ("outlived", "answered_since", "dispensable")
"""Not compared as such, but by the verdicts, which are given on them: whether a rank outlived its attempt, and whether
its node has answered since, was not asked; whether the others go on without a rank is settled now when the attempt is
to end, and once rank 0 of an elastic job has done its work, they do without all others."""

IN_ONE_PROCESS = ("tests/unit/", "drawn in one process")
"""Where nothing was asked or decided after the last verdict: what the step decides then has no counterpart."""

DIFFERENCES: Mapping[tuple[str, int], tuple[tuple[str, ...], str]] = {
    ("drawn 2039: torch", 1): (
        ("effects: [Judge, attempt_failed, restart_refused] is now [Judge, attempt_failed, restart_refused, state]",),
        "Its supervisor was killed after it had decided, and before it recorded the end.",
    ),
    ("drawn 2028: elastic", 1): (
        (
            *("state: failed is now succeeded", "reason: disk_full is now completed", "cause: disk full", "rank: 1 is"),
            *("host: right is", "exit_code: 1 is", "fix: make room", "signature: disk.full is"),
            *(
                "effects: [Judge, attempt_failed, restart_refused, state] is now [Judge, state]",
                "decisions: [Decision]",
            ),
        ),
        "Rank 0 had done its work when the adopter came; another node's failure takes nothing from that.",
    ),
    ("drawn 1042: local", 1): (
        (
            *("reason: rank_killed is now hung", "cause: its keeper was killed", "rank: 1 is now 0", "host: right is"),
            *("fix: None is now see where each rank waits", "why: recovers from rank 1's death"),
        ),
        "Rank 0 was stopped, and hung; rank 1 was killed when the attempt was ended for that.",
    ),
    ("drawn in one process 24", 1): (
        (
            *("reason: rank_failed is now launch_failed", "cause: exited with code 1", "rank: 2 is now 1"),
            *("host: node2 is now node1", "exit_code: 1 is"),
        ),
        "Rank 1 did not start in time; rank 2 ended with 1 when the attempt was ended for that.",
    ),
    ("drawn in one process 31", 2): (
        (
            *("reason: node_lost is now hung", "cause: node1 has not answered for 13 s", "rank: 1 is now 0"),
            *("host: node1 is now node0", "fix: None is now see where each rank waits"),
        ),
        "Rank 0 hung, and node1 was away only when the attempt was ended for that.",
    ),
    ("drawn in one process 19", 1): (
        ("cause: exited with code 5: PeerLost", "rank: 1 is now None", "host: node1 is now None", "exit_code: 5 is"),
        "It had only lost the others: the ends of both are not known, and none of the three is named.",
    ),
    ("tests/faults/test_cluster_completion.py::test_an_adopter_fetches_what_was_missing", 1): (
        (
            *("event: logs_missing is now cleanup_confirmed", "event: cleanup_confirmed is now logs_missing"),
            "lost: False is now True",
        ),
        "Two hosts were proved in one look, and what their files lack was recorded before both; now it is recorded "
        "with the first host whose files are settled. A rank whose loss was recorded stays lost for an adopter.",
    ),
}
"""By attempt: its differences, and why the step does otherwise."""


class Replay:
    """One attempt, given to the step."""

    def __init__(self, attempt: RecordedAttempt, kept: Mapping[str, CleanupProof]) -> None:
        """`kept`: the proofs on the hosts of attempts before it."""
        state = _first_state(attempt)
        self.attempt = attempt
        self.state = replace(state, proofs={**state.proofs, **kept})
        self.differences: list[str] = []
        self.compared: Counter[str] = Counter()
        self._tick: Tick
        self._effects: list[Effect] = []
        self._may_restart: list[MayRestart] = []
        self._decisions: list[Decision] = []
        self._results: list[Any] = []
        self._silences: dict[str, float] = {}
        self._sent: dict[effects.Send, float] = {}
        """When, between two attempts."""
        self._waits = False
        """A decision has been made after this attempt."""

    @property
    def key(self) -> tuple[str, int]:
        return self.attempt.life.origin, self.attempt.number

    def play(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(step_module, "_may_restart", self._noting_may_restart(step_module._may_restart))
        patch.setattr(recovery, "decide", self._noting(decide.decide))
        patch.setattr(recovery, "refusal", self._noting(decide.refusal))
        for name, limit in self.attempt.limits.items():
            patch.setattr(f"engine.run.{name.replace('attempt_monitor', 'running')}", limit)
        for tick in self.attempt.ticks:
            if tick.kind != "alone":
                # Of ten looks a second only those that showed something new are recorded: the supervisor was held up
                # where 15 s are missing, and nothing of them counted then.
                held_up = tick.observation.now - self.state.watch.looked_at > 15.0 if self.state.watch else False
                patch.setattr("engine.run.running._OF_ONE_LOOK", 0.0 if held_up else float("inf"))
                self._play(tick)
                self._compare()

    def _play(self, tick: Tick) -> None:
        self._tick, self._effects, self._may_restart, self._decisions = tick, [], [], []
        decided = tuple(event for event in tick.recorded if isinstance(event, events.LaunchDecided))
        self._results = [
            replace(act, decided=decided) if isinstance(act, Planned) else act
            for act in tick.acts
            if isinstance(act, JudgedOn | Judged | Planned | Started | Cancelled)
        ]
        seen = tick.observation
        # An attempt lets go of the hosts of earlier ones of whose nodes it has some; the recorder saw them still.
        members = set(self.attempt.nodes)
        hosts = [host for host in seen.hosts if host.current or members.isdisjoint(host.names)]
        seen = replace(seen, hosts=tuple(replace(host, longest_silence_s=self._longest_s(host)) for host in hosts))
        for decision in tick.of(Decision)[:1]:
            seen = replace(seen, jitter=decision.jitter)
            if self.state.phase is Phase.DECIDING and not self._waits:
                # The verdict was given a moment after the tick that asked for it; here it comes with that tick.
                self.state = replace(self.state, since=seen.now - decision.waited_s)
            self._waits = True
        self._step(seen)
        if self.state.phase is Phase.BACKING_OFF and any(isinstance(e, events.AttemptPlanned) for e in tick.recorded):
            # The end of the delay was awaited within the tick.
            assert self.state.restart is not None
            over = max(seen.now, self.state.since + self.state.restart.delay_s + 1e-6)
            self._step(replace(seen, now=over, news=(), finished=()))

    def _longest_s(self, host: HostView) -> float:
        """It was not recorded: by the ticks that were."""
        self._silences[host.key] = max(self._silences.get(host.key, 0.0), host.silent_s)
        return self._silences[host.key]

    def _step(self, seen: Observation) -> None:
        if self.state.phase is Phase.OVER:
            return
        self.state, done = step(self.state, seen)
        self._effects += done
        for effect in done:
            if isinstance(effect, effects.Settle) and self.state.phase is not Phase.SETTLING:
                if not effect.hosts or any(isinstance(result, Settled) for result in seen.finished):
                    # What files still lack is looked for again with every look.
                    continue
                # It was done within the tick.
                lists = [event.files for event in self._tick.recorded if isinstance(event, events.LogsMissing)]
                settled = Settled(effect.hosts, lists[-1] if lists else self.state.attempt.missing)
                self._step(replace(seen, news=(), finished=(settled,)))
            elif self._results and isinstance(self._results[0], ANSWERS.get(type(effect), ())):
                result = self._results.pop(0)
                if isinstance(result, JudgedOn):
                    assert isinstance(effect, effects.Judge)
                    result = self._judge(effect, result.evidence, self._results.pop(0))
                self._step(replace(seen, news=(), finished=(result,)))

    def _judge(self, how: effects.Judge, evidence: FailureEvidence, recorded: Judged) -> Judged:
        """The verdict is given anew: on what the step knows, and on the recorded evidence, which has what was read of
        the mirrors."""
        ranks = [
            replace(r, dispensable=s.dispensable, outlived=s.outlived, answered_since=s.answered_since)
            for r, s in zip(evidence.ranks, how.standings, strict=True)
        ]
        evidence = replace(evidence, ranks=ranks, trigger=how.trigger)
        redactor, no_mirrors = self.attempt.life.plan.config.job.redactor(), RunDir(Path("/nonexistent"))
        verdict = with_cause(verdict_on(evidence), evidence, no_mirrors, {}, redactor)
        self.differences += _unlike(recorded.verdict, verdict, "verdict")
        self.compared["verdicts"] += 1
        return replace(recorded, verdict=verdict)

    def _noting_may_restart(self, may_restart: Any) -> Any:
        def noting(t: Transition, verdict: events.Verdict) -> bool:
            answer: bool = may_restart(t, verdict)
            if self.attempt.life.origin.startswith("tests/unit/"):
                # The test answered.
                answer = self._tick.of(MayRestart)[0].answer
            self._may_restart.append(MayRestart(verdict, t.seen.progress.furthest, answer))
            return answer

        return noting

    def _noting(self, function: Any) -> Any:
        def noting(failed: FailedRun) -> Wait | Restart | Finish | None:
            decided: Wait | Restart | Finish | None = function(failed)
            how = (failed.nodes, failed.waited_s, failed.jitter, failed.needed, len(failed.failures))
            self._decisions.append(Decision(*how, decided))
            return decided

        return noting

    def _compare(self) -> None:
        tick, decisions = self._tick, self._decisions
        recorded, made = _comparable(self._without_repetitions(_news_first(tick))), _comparable(self._effects)
        if self.attempt.life.origin.startswith(IN_ONE_PROCESS) and tick.kind != "tick":
            made, decisions = made[: len(recorded)], decisions[: len(tick.of(Decision))]
        found = _unlike(recorded, made, "effects")
        found += _unlike(tick.of(MayRestart), self._may_restart, "may_restart")
        found += _unlike(tick.of(Decision), decisions, "decisions")
        self.differences += [f"{what} (at {tick.observation.now})" for what in found]
        self.compared.update(effects=len(recorded), decisions=len(decisions), restarts=len(self._may_restart))

    def _without_repetitions(self, recorded: Sequence[Effect]) -> Iterator[Effect]:
        """Between two attempts END was sent at each look, ten times a second. Now it goes with the request for the
        host's processes, once a second: a keeper that has it is ending its rank, and one that is away gets it when it
        is back, from its host's connection."""
        now, requested = self._tick.observation.now, {e.host for e in recorded if isinstance(e, RequestProcesses)}
        for effect in recorded:
            if isinstance(effect, effects.Send) and self._tick.kind == "confirm":
                if effect.host not in requested and now - self._sent.get(effect, float("-inf")) <= _REQUEST_AGAIN_S:
                    continue
                self._sent[effect] = now
            yield effect


def _first_state(attempt: RecordedAttempt) -> State:
    """That of the attempt's first tick."""
    state = begin(attempt.life.plan, attempt.history, attempt.number, adopting=attempt.adopted)
    if not attempt.adopted:
        ranks, slept_s = len(attempt.nodes), attempt.slept_s
        watch = begin_watch(attempt.number, attempt.began, ranks=ranks, slept_s=slept_s)
        watch = replace(watch, launched=attempt.launched)
        return replace(state, phase=Phase.RUNNING, watch=watch, since=attempt.began)
    seen = Observation(attempt.began, attempt.ticks[0].observation.at, slept_s=attempt.slept_s)
    if attempt.history.record.state is RunState.PREFLIGHT:
        checked = Checked(PreflightReport.model_construct(checks=()))
        return step(replace(state, phase=Phase.PREFLIGHT), replace(seen, finished=(checked,)))[0]
    state, _ = step(state, seen)
    if state.phase is Phase.FINDING:
        launcher = state.attempt.launcher if attempt.launched else None
        found = Found(launcher)
        state, _ = step(state, replace(seen, finished=(found,)))
    return state


def _news_first(tick: Tick) -> list[Effect]:
    """As recorded, but first what others found: then they wrote the journal themselves, in the middle of a tick."""
    news = [_fields(event) for event in tick.observation.news]
    return sorted(tick.effects, key=lambda done: not (isinstance(done, effects.Record) and _fields(done.event) in news))


def _comparable(done: Iterable[Effect]) -> list[Effect]:
    """What is compared of one tick. Ranks' starts and ends that are recorded one after the other are sorted by rank:
    those that the launcher had reported came last, and now they come in their place. The pipes were dropped once more
    where ranks had changed twice in a tick."""
    compared: list[Effect] = []
    for effect in done:
        repeated = isinstance(effect, effects.DropPipes) and effect in compared
        if not (repeated or isinstance(effect, NOT_COMPARED)):
            compared.append(effect)
    groups = itertools.groupby(compared, lambda effect: _rank_recorded(effect) is not None)
    return [
        effect
        for of_rank, group in groups
        for effect in (sorted(group, key=lambda e: _rank_recorded(e) or 0) if of_rank else group)
    ]


def _rank_recorded(effect: Effect) -> int | None:
    event = effect.event if isinstance(effect, effects.Record) else None
    return event.rank if isinstance(event, events.RankLaunched | events.RankExited) else None


def _unlike(recorded: Any, made: Any, name: str) -> list[str]:
    """Where they differ."""
    if isinstance(recorded, Mapping) and isinstance(made, Mapping) and recorded.keys() == made.keys():
        return [what for key in recorded for what in _unlike(recorded[key], made[key], str(key))]
    if isinstance(recorded, list | tuple) and isinstance(made, list | tuple) and len(recorded) == len(made):
        return [what for pair in zip(recorded, made, strict=True) for what in _unlike(*pair, name)]
    if type(recorded) is type(made) and (isinstance(recorded, BaseModel) or is_dataclass(recorded)):
        return _unlike(_fields(recorded), _fields(made), name)
    if recorded == made or _apart(recorded, made) <= TOLERANCES.get(name, -1):
        return []
    return [f"{name}: {_short(recorded)} is now {_short(made)}"]


def _short(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_short, value))}]"
    if isinstance(value, effects.Record):
        value = value.event
    return (
        type(value).__name__ if is_dataclass(value) else str(value.kind if isinstance(value, events.Event) else value)
    )


def _fields(value: Any) -> dict[str, Any]:
    named = dict(value) if isinstance(value, BaseModel) else {f.name: getattr(value, f.name) for f in fields(value)}
    # Not recorded then.
    if isinstance(value, events.StopStageReached):
        del named["trigger"]
    if isinstance(value, events.LogsMissing):
        del named["reached"]
    kind = {"event": value.kind} if isinstance(value, events.Event) else {}
    return kind | {name: one for name, one in named.items() if name not in ("at", *SINCE_THEN)}


def _apart(recorded: Any, made: Any) -> float:
    if isinstance(recorded, datetime) and isinstance(made, datetime):
        return abs((recorded - made).total_seconds())
    numbers = isinstance(recorded, int | float) and isinstance(made, int | float)
    return abs(recorded - made) if numbers else float("inf")


def _replayed(every: int) -> list[Replay]:
    replays: list[Replay] = []
    for attempt in recorded_attempts(every):
        if all(tick.kind == "alone" for tick in attempt.ticks):
            continue
        before = replays[-1] if replays and replays[-1].attempt.life is attempt.life else None
        with pytest.MonkeyPatch.context() as patch:
            replays.append(Replay(attempt, before.state.proofs if before is not None else {}))
            replays[-1].play(patch)
    return replays


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_the_step_does_with_each_recorded_attempt_what_was_done_then(every: int) -> None:
    replays = _replayed(every)
    unknown = [
        f"{replay.attempt.life.origin}, attempt {replay.attempt.number}: {what}"
        for replay in replays
        for what in replay.differences
        if not what.startswith(DIFFERENCES[replay.key][0] if replay.key in DIFFERENCES else ())
    ]
    assert unknown == []
    compared = sum((replay.compared for replay in replays), Counter[str]())
    assert len(replays) > 300 and min(compared[what] for what in ("verdicts", "restarts")) > 200, compared
    if every == 1:
        assert {replay.key for replay in replays if replay.differences} == DIFFERENCES.keys()
