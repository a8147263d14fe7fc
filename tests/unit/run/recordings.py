"""The recorded attempts of tests/data/attempts: what the supervisor saw of real attempts and of a test's own, tick for
tick, and what it did, when one object of it still watched, decided and acted (commit 8a8e2b8e).

One gzipped file of JSON lines. The first says where they come from. Each life of a supervisor begins with the plan and
the journal so far ("run"); then come its attempts ("attempt"), and their ticks:

    {"k": "tick", "n": 12, "d": {"now": 3.21, "ranks": {"1": {"record": {…}}}}, "do": [["record", {…}], ["send", …]]}

    k      "tick": the attempt is watched, or ended; "settle": it is over, and the rest of its files has come;
           "confirm": one look between two attempts, or after the end; "alone": the same, made by a test
    n      ticks left out before this one: nothing was done, and nothing changed but times and numbers of steps
    d      what differs from the observation before; "-" names what is gone
    news   events that others found since the tick before; they are in "do", too, where they were recorded
    do     what was done, in order; a line without "k" goes on with the tick before it

Within a tick all is seen at one moment: the recorder held clock, hosts and their answers still. Not recorded: reports
of preflight, and what a step does not see (logs, metrics; exit output other than in the evidence of a verdict). A life
whose supervisor was killed may lack the end of what was done last. In attempts of tests/unit `MayRestart` is what the
test answers; in those, and in those "drawn in one process", nothing is decided after the verdict."""

from __future__ import annotations

import gzip
import itertools
import json
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter

from engine.job.kinds import JobKind
from engine.run import effects, events
from engine.run.decide import Finish, NodePresence, Restart, Wait
from engine.run.effects import Standing
from engine.run.failure_evidence import FailureEvidence
from engine.run.history import RunHistory, run_history
from engine.run.observation import Cancelled, Found, Judged, Observation, Planned, Settled, Started
from engine.run.run_plan import RunPlan
from tests.data import DATA

E = TypeVar("E", bound=events.Event)

BUNDLE = DATA / "attempts" / "attempts.jsonl.gz"


@dataclass(frozen=True)
class MayRestart:
    """The answer to whether another attempt may follow, by the verdict with which the last one is being ended."""

    verdict: events.Verdict
    reached: int
    answer: bool


@dataclass(frozen=True)
class Decision:
    """A decision after a failed attempt, and on what it was made; the failures are the history's."""

    nodes: tuple[NodePresence, ...]
    waited_s: float
    jitter: float
    needed: int
    failures: int
    decided: Wait | Restart | Finish | None
    """None: no other attempt is refused."""


@dataclass(frozen=True)
class JudgedOn:
    """The evidence of the Judge before it."""

    evidence: FailureEvidence


@dataclass(frozen=True)
class Otherwise:
    """Anything else, by the recorder's name: "adopt", "prove_again", "seek", "end_unknown", "checked" …"""

    name: str
    what: tuple[Any, ...]


Act = effects.Effect | Judged | Planned | Started | Found | Cancelled | MayRestart | Decision | JudgedOn | Otherwise
"""An effect, or the answer to the effect before it."""


@dataclass(frozen=True)
class Tick:
    kind: str
    folded: int
    observation: Observation
    acts: tuple[Act, ...]

    @property
    def effects(self) -> tuple[effects.Effect, ...]:
        return tuple(act for act in self.acts if isinstance(act, effects.Effect))

    @property
    def recorded(self) -> tuple[events.Event, ...]:
        return tuple(act.event for act in self.acts if isinstance(act, effects.Record))

    def of(self, kind: type[Any]) -> tuple[Any, ...]:
        return tuple(act for act in self.acts if isinstance(act, kind))


@dataclass
class RecordedAttempt:
    """One attempt under one supervisor; an adopted one is recorded once for each."""

    life: Life
    number: int
    nodes: tuple[str, ...]
    adopted: bool
    launched: bool
    """A launcher is known."""
    start_failures: tuple[tuple[int, int, str], ...]
    began: float
    """By the head's clock, s."""
    slept_s: float
    """For how long the head had slept by then."""
    before: tuple[events.Event, ...]
    """The journal when it began."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Constants of engine.run that its test had set otherwise: "shutdown.SILENT_S" → 0.3."""
    acts: list[Act] = field(default_factory=list)
    """Before its first tick."""
    ticks: list[Tick] = field(default_factory=list)

    @property
    def history(self) -> RunHistory:
        return run_history(self.before, self.life.plan)

    @property
    def kind(self) -> str:
        """ "lockstep", "local", "elastic", "command" or "torch"."""
        job = self.life.plan.config.job
        if job.elastic:
            return "elastic"
        if job.strategy == "local":
            return "local"
        if job.framework == "torch":
            return "torch"
        return "command" if job.command is not None else "lockstep"

    @property
    def judged(self) -> list[Judged]:
        return [judged for tick in self.ticks for judged in tick.of(Judged)]


@dataclass
class Life:
    """One supervisor's part of a run, from its start to its end or death."""

    origin: str
    """The test, or the drawn faults, that it comes from."""
    plan: RunPlan
    before: tuple[events.Event, ...]
    """The journal when it began."""
    acts: list[Act] = field(default_factory=list)
    """Before its first tick and its first attempt."""
    ticks: list[Tick] = field(default_factory=list)
    """Before its first attempt: those of an attempt of which the journal has nothing."""
    attempts: list[RecordedAttempt] = field(default_factory=list)


@cache
def recorded_lives(every: int = 1) -> tuple[Life, ...]:
    """Each one of `every` lives: all of them take seconds to read."""
    return tuple(_read(lines) for lines in itertools.islice(_lives(), 0, None, every))


def recorded_attempts(every: int = 1) -> list[RecordedAttempt]:
    return [attempt for life in recorded_lives(every) for attempt in life.attempts]


def _lives() -> Iterator[list[str]]:
    """The lines of each life. The first line says where all come from."""
    lines: list[str] = []
    with gzip.open(BUNDLE, "rt", encoding="utf-8") as file:
        for line in itertools.islice(file, 1, None):
            if line.startswith('{"run"') and lines:
                yield lines
                lines = []
            lines.append(line)
    yield lines


def _read(lines: Sequence[str]) -> Life:
    first, *more = map(json.loads, lines)
    reader = _Reader(first)
    for line in more:
        reader.read(line)
    return reader.finished()


_OBSERVATION = TypeAdapter(Observation)
_EVIDENCE = TypeAdapter(FailureEvidence)
_VERDICT = TypeAdapter(events.Verdict)
_DECISIONS: dict[str, TypeAdapter[Any]] = {kind.__name__: TypeAdapter(kind) for kind in (Wait, Restart, Finish)}


class _Reader:
    """Reads the lines of one life."""

    def __init__(self, line: dict[str, Any]) -> None:
        before = tuple(_events(line["before"]))
        self._life = Life(line["test"], RunPlan.model_validate(line["run"]), before)
        self._journal = list(before)
        self._seen: dict[str, Any] = {}
        self._tick: Tick | None = None
        self._done: list[list[Any]] = []

    def read(self, line: dict[str, Any]) -> None:
        if "attempt" in line:
            self._put()
            self._seen = {}
            self._life.attempts.append(self._attempt(line))
        elif "limits" in line:
            changed = {name.removeprefix("engine.run."): limit for name, limit in line["limits"].items()}
            self._life.attempts[-1].limits = changed
        elif "k" in line:
            self._put()
            _merge(self._seen, line["d"])
            self._tick = Tick(line["k"], line.get("n", 0), _observation(self._seen, line.get("news", ())), ())
            self._done = line.get("do", [])
        else:
            self._done += line["do"]

    def finished(self) -> Life:
        self._put()
        return self._life

    def _attempt(self, line: dict[str, Any]) -> RecordedAttempt:
        return RecordedAttempt(
            life=self._life,
            number=line["attempt"],
            nodes=tuple(line["nodes"]),
            adopted=line["adopted"],
            launched=line["launcher"],
            start_failures=tuple((rank, code, message) for rank, code, message in line["start_failures"]),
            began=line["began"],
            slept_s=line.get("slept_s", 0.0),
            before=tuple(self._journal),
        )

    def _put(self) -> None:
        tick, self._tick = self._tick, None
        done, self._done = self._done, []
        acts = tuple(self._acts(done))
        part = self._life.attempts[-1] if self._life.attempts else self._life
        if tick is None:
            part.acts += acts
            return
        observation = tick.observation
        if tick.kind == "settle":
            recorded = [act.event for act in acts if isinstance(act, effects.Record)]
            missing = next((event.files for event in recorded if isinstance(event, events.LogsMissing)), {})
            settled = tuple(host.key for host in observation.hosts if host.processes == ())
            observation = replace(observation, finished=(Settled(settled, missing),))
        part.ticks.append(replace(tick, observation=observation, acts=acts))

    def _acts(self, done: list[list[Any]]) -> Iterator[Act]:
        for place, (name, *what) in enumerate(done):
            match name:
                case "record":
                    for event in _events(what[:1]):
                        self._journal.append(event)
                        yield effects.Record(event)
                case "verdict":
                    yield from _judged(what[0], _VERDICT.validate_python(what[1]), self._life.plan.config.job.kind)
                case "may_restart":
                    yield MayRestart(_VERDICT.validate_python(what[0]), what[1], what[2])
                case "decide" | "refusal":
                    yield _decision(what[0], what[1])
                case "connect":
                    yield effects.Connect(self._newest(events.AttemptPlanned).attempt, tuple(what[1]))
                case "planned" | "started" | "found_launcher" | "found_rank":
                    yield from self._answer(name, what[0], done[place + 1 :])
                case _:
                    yield _effect(name, what)

    def _answer(self, name: str, how: Any, following: list[list[Any]]) -> Iterator[Act]:
        """The result of a task; `following` is what was done after it."""
        match name, how:
            case "planned" | "started", {"kind": "CancelledError"}:
                yield Cancelled()
            case "planned", {"error": error}:
                yield Planned(error=error)
            case "planned", _:
                yield Planned(self._newest(events.AttemptPlanned).attempt)
            case "started", {"error": error}:
                yield Started(error=error)
            case "started", _:
                recorded = _events(what for name, what, *_ in following[:1] if name == "record")
                yield Started(next((event for event in recorded if isinstance(event, events.LauncherStarted)), None))
            case "found_launcher", True:
                yield Found(self._newest(events.LauncherStarted))
            case "found_rank", _:
                yield Found(anything=how)

    def _newest(self, kind: type[E]) -> E:
        return next(event for event in reversed(self._journal) if isinstance(event, kind))


_EFFECTS: dict[str, Callable[..., effects.Effect]] = {
    "send": lambda host, rank, command: effects.Send(host, rank, command.encode()),
    "kill": effects.KillPrograms,
    "processes": lambda host, _kill: effects.RequestProcesses(host),
    "exit_output": effects.RequestExitOutput,
    "signal": lambda name: effects.SignalLauncher(signal.Signals[name]),
    "drop_pipes": effects.DropPipes,
    "settle": lambda hosts: effects.Settle(tuple(hosts)),
}


def _effect(name: str, what: list[Any]) -> Act:
    if name in _EFFECTS and (name, what[1:]) != ("processes", [False]):
        return _EFFECTS[name](*what)
    return Otherwise(name, tuple(what))


def _judged(how: dict[str, Any], verdict: events.Verdict, kind: JobKind) -> Iterator[Act]:
    facts = how["evidence"]
    standings = tuple(
        Standing(
            lost=rank["lost"],
            dispensable=rank["dispensable"],
            head_slept_s=rank["head_slept_s"],
            cut_off_s=rank["cut_off_s"],
        )
        for rank in facts["ranks"]
    )
    evidence = _EVIDENCE.validate_python({**facts, "trigger": events.Trigger[facts["trigger"]], "kind": kind})
    yield effects.Judge(evidence.trigger, standings, evidence.hang, how["over"])
    yield JudgedOn(evidence)
    yield Judged(verdict, how["ends_known"])


def _decision(how: dict[str, Any], decided: dict[str, Any] | None) -> Decision:
    taken = None
    if decided is not None:
        fields = {name: value for name, value in decided.items() if name != "is"}
        taken = _DECISIONS[decided["is"]].validate_python(fields)
    nodes = tuple(NodePresence(node, proved, float(silent_s)) for node, proved, silent_s in how["nodes"])
    return Decision(nodes, how["waited_s"], how["jitter"], how["needed"], how["failures"], taken)


def _observation(seen: Mapping[str, Any], news: Iterable[dict[str, Any]]) -> Observation:
    ranks = sorted((int(number), rank) for number, rank in seen.get("ranks", {}).items())
    fields = {
        **seen,
        "at": datetime.fromtimestamp(seen["at"], UTC),
        "hosts": tuple({"key": key, **host} for key, host in seen["hosts"].items()),
        "ranks": tuple({"number": number, **rank} for number, rank in ranks),
    }
    return replace(_OBSERVATION.validate_python(fields), news=tuple(_events(news)))


def _events(recorded: Iterable[dict[str, Any]]) -> Iterator[events.Event]:
    """Without those of a kind that the journal no longer has."""
    for fields in recorded:
        if (kind := events.EVENTS.get(fields["event"])) is not None:
            yield kind.model_validate(fields)


_DEPTHS = {"ranks": 2, "hosts": 2, "progress": 1, "command": 1}
"""How deep the parts of an observation are compared; deeper ones are written as a whole."""


def _merge(seen: dict[str, Any], changes: dict[str, Any], depth: int | None = None) -> None:
    for key in changes.get("-", ()):
        del seen[key]
    for key, value in changes.items():
        deeper = _DEPTHS.get(key, 0) if depth is None else depth - 1
        if deeper and isinstance(value, dict) and isinstance(seen.get(key), dict):
            _merge(seen[key], value, deeper)
        elif key != "-":
            seen[key] = value
