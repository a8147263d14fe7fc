"""Hostile lines of events, journals and metrics, as a node or a damaged disk may leave them: whoever reads them gives
what can be known, or a StateError, and what is shown is JSON."""

from __future__ import annotations

import contextlib
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import StateError
from engine.protocol.attempt import Identity
from engine.run.consistency_watch import ConsistencyWatch
from engine.run.events import (
    AlarmRaised,
    AttemptFailed,
    AttemptResumed,
    EnergyMeasured,
    Event,
    Hang,
    HangDetected,
    LogsMissing,
    NodeConditionChanged,
    RankExited,
    RankLaunched,
    RequestReceived,
    RestartPlanned,
    Resumed,
    SavedFiles,
    StateSaved,
    StopStage,
    StopStageReached,
    TrainingStarted,
    WeightsSaved,
)
from engine.run.progress import EventIntake
from engine.run.watch import RunWatch
from tests.unit.run.run_maker import START, MadeRun, end, report, validation
from tui.commands.terminal import print_json

EVENTS_OF_A_RANK = (
    {"event": "start", "iterations": 9, "world_size": 2, "backend": "ring", "device": "gpu", "t": 1.5},
    {"event": "phase", "phase": "training"},
    {"event": "step", "iteration": 3, "compute_s": 0.1, "communicate_s": 0.1, "grad_norm": 1.0, "own_grad_norm": 1.0,
     "peak_memory_bytes": 9, "t": 2.5},
    {"event": "replica_check", "iteration": 3, "agreed": True},
    {"event": "chunk", "chunk": 1, "num_chunks": 2, "epoch": 0},
    {"event": "warning", "message": "cut"},
    {"event": "processes", "state": "stopped"},
    {"event": "checkpoint", "phase": "committed", "iteration": 3, "update": 3, "bytes": 5, "seconds": 0.1,
     "path": "/a/b.safetensors", "kind": "adapters", "background": True, "blocking_seconds": 0.1},
    {"event": "resume", "source": "checkpoint", "iteration": 2, "update": 2, "from_rank": 0},
    {"event": "failure", "error": "ValueError", "message": "no", "traceback": "x"},
    {"event": "end", "completed": True, "iteration": 9},
)  # fmt: skip
ROWS = (
    report(3, 4.0, iterations=9),
    validation(3, 5.0),
    {"kind": "test", "attempt": 1, "iteration": 9, "test_loss": 2.0},
)
HOSTILE = (
    *("null", "true", '""', '"\\u001b[2J\\u0000\\ud800"', f'"{"x" * 70_000}"', "-1", "0.5", "1e400", "-1e308", "NaN"),
    *("Infinity", "9" * 400, f"{2**63}", f"-{2**70}", "[]", "[[1], {}]", '{"": {"a": null}}', "[" * 60 + "]" * 60),
)
MARK = "\x01"
TORN = (
    *(b"{", b"[1, 2", b'{"event": "step", "iteration": ', b"\0" * 40, b"\xff\xfe{}", b"[" * 5000, b'{"a":' * 5000),
    *(b"1" * 5000, b"null", b""),
)


def mutants(document: dict[str, Any]) -> Iterator[bytes]:
    """`document` with each of its fields, at any depth, as each hostile value, without it and under another name."""
    for place in places(document):
        for value in (*HOSTILE, "", "renamed"):
            copy = inner = json.loads(json.dumps(document))
            for name in place[:-1]:
                inner = inner[name]
            before, inner[place[-1]] = inner[place[-1]], MARK
            if value == "renamed" and isinstance(inner, dict):
                inner["\x1b[2J 1"] = before
            if value in ("", "renamed"):
                del inner[place[-1]]
            yield json.dumps(copy).replace(json.dumps(MARK), value).encode()


def some(count: int, document: dict[str, Any]) -> list[bytes]:
    everything = [*mutants(document)]
    return random.Random(0).sample(everything, min(count, len(everything)))


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inner:
        yield (*at, name)
        yield from places(each, (*at, name))


def shown(run: MadeRun) -> None:
    """The run's files are read by a frontend, and its snapshot is printed."""
    with contextlib.suppress(StateError):
        snapshot = RunWatch(run.directory).poll()
        with contextlib.redirect_stdout(io.StringIO()) as out:
            print_json(vars(snapshot))
        json.loads(out.getvalue(), parse_constant=pytest.fail)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[MadeRun]:
    made = MadeRun(tmp_path).state("preflight", "launching").attempt().state("running")
    yield made.metrics(ROWS)
    made.close()


def identity(rank: int) -> Identity:
    return Identity(rank, "r", 1, "n", "boot", 1, "then", 2, 2, "then", START.timestamp())


FAILURE = end(
    "failed", reason="rank_failed", rank=1, host="node1", exit_code=3, cause="no", iteration=3, train_loss=1.0
)
assert FAILURE.verdict is not None
JOURNAL = (
    RankLaunched(rank=0, node="node0", identity=identity(0)),
    RankExited(rank=1, node="node1", code=3, stopped_by="stop", error="no"),
    NodeConditionChanged(node="node1", condition="lost", since=START, why="away", silent_s=2.0, memory_kills=1),
    AlarmRaised(alarm="KL", ranks=(1,), workers=("node1",), iteration=3, message="apart"),
    HangDetected(hang=Hang(9.0, 5.0, "training", 3, 1), node="node1"),
    RequestReceived(request="abort", by="me"),
    StopStageReached(stage=StopStage.TERM, acknowledged=(0,), left=("node1 7 python",)),
    AttemptFailed(attempt=1, verdict=FAILURE.verdict, reached=3, failed_at=START, unconfirmed=("node1",)),
    RestartPlanned(attempt=2, after=1, members=("node0",), left_out=("node1",), delay_s=1.0, why="again"),
    AttemptResumed(attempt=1, resumed=Resumed("checkpoint", 3, 3, 0), repeated=1, seconds=1.0),
    StateSaved(rank=0, state="3.0", manifest="0" * 64),
    WeightsSaved(
        rank=0,
        node="node0",
        attempt=1,
        holds="adapter",
        val_loss=1.5,
        saved=SavedFiles(folder="/a", iteration=3, files=(("adapters.safetensors", 7, "0" * 64),)),
    ),
    TrainingStarted(attempt=1, versions={"mlx": "1"}, inputs={"train.jsonl": "crc32 1"}, from_base=True),
    EnergyMeasured(node="node0", joules=5.0, seconds=1.0),
    LogsMissing(attempt=1, files={"rank0.log": 7}),
    FAILURE,
)


@pytest.mark.parametrize("event", JOURNAL, ids=lambda event: event.kind)
def test_a_hostile_line_of_the_journal_is_an_event_or_damage(run: MadeRun, event: Event) -> None:
    before = run.directory.journal.read_bytes()
    run.append(event)
    line = run.directory.journal.read_bytes()[len(before) :]
    for mutant in some(90, json.loads(line)):
        run.directory.journal.write_bytes(before + mutant + b"\n")
        shown(run)


@pytest.mark.parametrize("number", [0, 3], ids=["planned", "attempt"])
def test_a_hostile_line_that_the_others_rest_on(run: MadeRun, number: int) -> None:
    lines = run.directory.journal.read_bytes().splitlines()
    for mutant in (*some(200, json.loads(lines[number])), *TORN):
        run.directory.journal.write_bytes(b"\n".join([*lines[:number], mutant, *lines[number + 1 :], b""]))
        shown(run)


def test_hostile_events_and_rows_are_read_as_far_as_they_are_known(run: MadeRun) -> None:
    for path, documents in ((run.directory.events(0), EVENTS_OF_A_RANK), (run.directory.metrics, ROWS)):
        for document in documents:
            lines = [*mutants({"rank": 0, "attempt": 1, "at": 1.7e9, **document}), *TORN]
            for number in range(0, len(lines), 8):
                # Few at a time: a later line takes the place of an earlier one.
                path.write_bytes(b"\n".join([*lines[number : number + 8], b""]))
                shown(run)
            path.write_bytes(b"\n".join([*lines, b""]))
            consistency = ConsistencyWatch(run.plan.config.consistency, {0: "node0"}, lambda alarm: None)
            intake = EventIntake(run.directory, 1, {0: 0}, consistency)
            intake.poll()
            intake.close()
