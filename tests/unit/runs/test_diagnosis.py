"""What is told of a failed run is its first cause, from the log that proves it."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from engine.models import RunRecord, RunState
from engine.runs.diagnosis import diagnose, explain, findings
from engine.runs.journal import Journal
from engine.runs.layout import LAUNCHER_SOURCE
from engine.runs.signatures import SIGNATURES, Kind
from tests.unit.runs.logs import RunLogs

FIXTURES = Path(__file__).resolve().parents[4] / "shared" / "fixtures" / "failure_signatures.json"
PEER_LOST = """[ring] Socket 3 was closed by the peer
[ring] Socket 3 was closed by the peer
[ring] Too many send/recv errors. Failing pending tasks...
Traceback (most recent call last):
  File "train.py", line 9, in <module>
    mx.eval(total)
RuntimeError: [ring] connection to a peer was lost
"""
RAISED = """step 4
Traceback (most recent call last):
  File "train.py", line 7, in <module>
    raise ValueError("boom")
ValueError: boom
"""
LAUNCHER = """[INFO] Running /bin/sh start.sh
\x1b[33m[WARN] Node with rank 0 exited with code 1 \x1b[0m
\x1b[33m[WARN] Node with rank 1 exited with code -15 \x1b[0m
"""


@pytest.fixture
def logs(tmp_path: Path) -> RunLogs:
    return RunLogs(tmp_path, (0, 1, LAUNCHER_SOURCE))


def ended(
    logs: RunLogs, rank: int | None = None, cause: str | None = None, bases: dict[int, int] | None = None
) -> None:
    journal = Journal(logs.run_dir.path / "journal.jsonl")
    record = RunRecord(
        id="r", name="r", state=RunState.PLANNED, created_at=datetime.now(UTC), world_size=2, backend="ring"
    )
    journal.append("planned", run=record.model_dump(mode="json"), nonce="n")
    journal.append("attempt", attempt=1, starting_port=1, log_bases=bases or {})
    for number, host in enumerate(("left", "right")):
        journal.append("rank_ended", rank=number, host=host, code=1)
    host_of = None if rank is None else ("left", "right")[rank]
    journal.append("state", state="failed", reason="rank_failed", rank=rank, host=host_of, cause=cause, fix="look")
    journal.close()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("RuntimeError: [ring] Couldn't bind socket (error: 98)", "the port is in use (error 98)"),
        ("RuntimeError: [ring] Couldn't connect (error: 61)", "it was refused (error 61)"),
        ("sh: 4: exec: /no/such/python: not found", "/no/such/python was not found"),
        ("/bin/bash: line 1: /no/such/python: No such file or directory", "/no/such/python does not exist"),
        ("OSError: [Errno 28] No space left on device", "the disk was full"),
        (
            "Dataset must have at least batch_size=128 examples but only has 64.",
            "64 examples, fewer than the batch of 128",
        ),
        ("ModuleNotFoundError: No module named 'mlx_lm'", "mlx_lm is not installed"),
        (RAISED, "ValueError: boom"),
        (PEER_LOST, "a neighbouring rank went away"),
    ],
)
def test_a_known_text_is_told_in_words(text: str, words: str) -> None:
    told = explain(text.split("\n"))
    assert told is not None
    assert words in told[0]


@pytest.mark.parametrize(
    "text", ["", "Iter 5: Train loss 5.8", "[ring] Attempt 0 waiting 1000 ms (error: 111 )", LAUNCHER]
)
def test_what_healthy_runs_say_too_explains_nothing(text: str) -> None:
    assert explain(text.split("\n")) is None


def test_the_rank_that_raised_is_told_and_not_the_one_that_lost_it(logs: RunLogs) -> None:
    logs.write(1, PEER_LOST)
    logs.write(0, RAISED)
    logs.write(LAUNCHER_SOURCE, LAUNCHER)
    found = diagnose(logs.run_dir)
    assert found is not None
    assert (found.cause, found.rank, found.source) == ("ValueError: boom", 0, 0)
    assert logs.run_dir.log(0).read_bytes()[found.offset :] == b"ValueError: boom\n"


def test_the_journals_culprit_goes_before_what_others_say(logs: RunLogs) -> None:
    logs.write(0, RAISED)
    logs.write(1, "OSError: [Errno 28] No space left on device\n")
    ended(logs, rank=1, cause="rank 1 exited with code 1")
    found = diagnose(logs.run_dir)
    assert found is not None
    assert (found.cause, found.rank, found.host, found.source) == ("the disk was full", 1, "right", 1)
    assert found.fix is not None


def test_a_rank_that_was_killed_is_not_explained_by_its_survivors(logs: RunLogs) -> None:
    logs.write(0, PEER_LOST)
    logs.write(1, "step 3\nstep 4\n")
    ended(logs, rank=1, cause="rank 1 was killed (signal 9)")
    found = diagnose(logs.run_dir)
    assert found is not None
    assert (found.cause, found.rank, found.source) == ("rank 1 was killed (signal 9)", 1, 1)
    assert logs.run_dir.log(1).read_bytes()[found.offset :] == b"step 4\n"


def test_what_an_earlier_attempt_said_is_not_the_cause(logs: RunLogs) -> None:
    logs.write(0, "OSError: [Errno 28] No space left on device\n")
    base = logs.run_dir.log(0).stat().st_size
    logs.write(0, RAISED)
    ended(logs, rank=0, cause="rank 0 exited with code 1", bases={0: base})
    found = diagnose(logs.run_dir)
    assert found is not None
    assert found.cause == "ValueError: boom"


def test_a_lost_peer_is_told_when_nothing_better_is_known(logs: RunLogs) -> None:
    logs.write(0, PEER_LOST)
    found = diagnose(logs.run_dir)
    assert found is not None
    assert found.cause == "a neighbouring rank went away"


def test_a_run_that_says_nothing_has_no_diagnosis(logs: RunLogs) -> None:
    assert diagnose(logs.run_dir) is None


def test_every_signature_has_words_a_source_and_a_name_of_its_own() -> None:
    assert len({signature.id for signature in SIGNATURES}) == len(SIGNATURES)
    for signature in SIGNATURES:
        groups = dict.fromkeys(re.compile(signature.pattern).groupindex, "x")
        assert signature.cause.format(**groups)
        assert signature.fix.format(**groups)
        assert signature.source


@pytest.mark.skipif(not FIXTURES.exists(), reason="needs shared/fixtures/failure_signatures.json beside the repository")
def test_recorded_failures_are_recognised_by_the_signature_of_their_name() -> None:
    recorded = {entry["id"]: entry for entry in json.loads(FIXTURES.read_text())}
    ours = {signature.id: signature for signature in SIGNATURES}
    common = recorded.keys() & ours.keys()
    assert len(common) >= 35
    for name in common:
        found = findings([recorded[name]["sample"]])
        assert found, name
        assert (found[0].kind is Kind.REMARK) == (recorded[name]["severity"] != "fatal"), name
        own = [signature.id for signature in SIGNATURES if re.search(signature.pattern, recorded[name]["sample"])]
        assert own[0] == name
