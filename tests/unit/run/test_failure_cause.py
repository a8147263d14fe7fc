"""A failed run's diagnosis is its first cause, from the log that proves it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from engine.failures.explanation import EXIT_OUTPUT_LINES, TRAILING_LINES
from engine.failures.signature import Signature, SignatureKind
from engine.failures.signatures import SIGNATURES
from engine.models import Reason, RunRecord, RunState
from engine.run.events import Attempt, AttemptPlanned, RankExited, RunPlanned
from engine.run.failure_cause import HEAD_BYTES, LINE_BYTES, TAIL_BYTES, LogEnds, diagnose, first_cause
from engine.run.journal import Journal
from engine.store.layout import LAUNCHER_SOURCE
from tests.unit.run.logs.run_logs import RunLogs
from tests.unit.run.run_maker import end

HOSTS = ("left", "right", "third")
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
    return RunLogs(tmp_path, (0, 1, 2, LAUNCHER_SOURCE))


def ended(
    logs: RunLogs,
    rank: int | None = None,
    cause: str | None = None,
    bases: dict[int, int] | None = None,
    **how: Any,
) -> None:
    journal = Journal(logs.run_dir.path / "journal.jsonl")
    record = RunRecord(
        id="r", name="r", state=RunState.PLANNED, created_at=datetime.now(UTC), world_size=2, backend="ring"
    )
    journal.append(RunPlanned(run=record, nonce="n"))
    attempt = Attempt(
        number=1,
        nonce="n.1",
        starting_port=1,
        log_bases=bases or {},
        event_bases={},
        layouts=(),
    )
    journal.append(AttemptPlanned(attempt=attempt))
    for number, host in enumerate(HOSTS):
        journal.append(RankExited(rank=number, node=host, code=1))
    host_of = None if rank is None else HOSTS[rank]
    ending = {"reason": "rank_failed", "exit_code": 1, "fix": "look", **how}
    journal.append(end(ending.pop("state", "failed"), rank=rank, host=host_of, cause=cause, **ending))
    journal.close()


def test_the_rank_that_raised_is_named_and_not_the_one_that_lost_it(logs: RunLogs) -> None:
    logs.write(1, PEER_LOST)
    logs.write(0, RAISED)
    logs.write(LAUNCHER_SOURCE, LAUNCHER)
    found = diagnose(logs.run_dir)
    assert found is not None
    assert (found.cause, found.rank, found.source) == ("ValueError: boom", 0, 0)
    assert logs.run_dir.log(0).read_bytes()[found.offset :] == b"ValueError: boom\n"


def test_the_journals_first_failure_goes_before_what_others_say(logs: RunLogs) -> None:
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
    ended(logs, rank=1, cause="rank 1 was killed (signal 9)", reason="rank_killed", signal=9)
    found = diagnose(logs.run_dir)
    assert found is not None
    assert (found.cause, found.rank, found.source) == ("rank 1 was killed (signal 9)", 1, 1)
    assert logs.run_dir.log(1).read_bytes()[found.offset :] == b"step 4\n"


def test_the_output_of_an_earlier_attempt_is_not_the_cause(logs: RunLogs) -> None:
    logs.write(0, "OSError: [Errno 28] No space left on device\n")
    base = logs.run_dir.log(0).stat().st_size
    logs.write(0, RAISED)
    ended(logs, rank=0, cause="rank 0 exited with code 1", bases={0: base})
    found = diagnose(logs.run_dir)
    assert found is not None
    assert found.cause == "ValueError: boom"


def test_a_lost_peer_is_the_cause_when_nothing_better_is_known(logs: RunLogs) -> None:
    logs.write(0, PEER_LOST)
    found = diagnose(logs.run_dir)
    assert found is not None
    assert found.cause == "a neighbouring rank went away"


def test_a_run_without_output_has_no_diagnosis(logs: RunLogs) -> None:
    assert diagnose(logs.run_dir) is None


@pytest.mark.parametrize(
    "signature", [known for known in SIGNATURES if known.kind is SignatureKind.CAUSE], ids=lambda s: s.id
)
def test_of_three_ranks_the_first_ones_cause_is_found(logs: RunLogs, signature: Signature) -> None:
    logs.write(2, "step 3\n" + PEER_LOST)
    logs.write(1, f"step 3\nstep 4\n\x1b[31m{signature.example}\x1b[0m\n" + PEER_LOST)
    logs.write(0, "step 3\n" + PEER_LOST)
    logs.write(LAUNCHER_SOURCE, LAUNCHER)
    unjudged = diagnose(logs.run_dir)
    assert unjudged is not None
    assert (unjudged.signature, unjudged.rank, unjudged.host) == (signature.id, 1, None)
    ended(logs, rank=1, cause="exited with code 1: RuntimeError: [ring] connection to a peer was lost")
    found = diagnose(logs.run_dir)
    assert found is not None
    assert (found.signature, found.rank, found.host, found.source) == (signature.id, 1, "right", 1)
    assert found.fix and found.cause and "{" not in found.cause + found.fix
    assert signature.example.encode() in logs.run_dir.log(1).read_bytes()[found.offset :].split(b"\n")[0]


@pytest.mark.parametrize(
    "signature", [s for s in SIGNATURES if s.kind is SignatureKind.CONSEQUENCE], ids=lambda s: s.id
)
def test_a_consequence_counts_only_where_no_rank_has_a_cause(logs: RunLogs, signature: Signature) -> None:
    for rank in (0, 1, 2):
        logs.write(rank, f"step 3\n{signature.example}\n")
    logs.write(LAUNCHER_SOURCE, LAUNCHER)
    alone = diagnose(logs.run_dir)
    assert alone is not None and (alone.signature, alone.rank) == (signature.id, 0)
    logs.write(2, "OSError: [Errno 28] No space left on device\n")
    found = diagnose(logs.run_dir)
    assert found is not None and (found.signature, found.rank) == ("disk.full", 2)


def test_what_was_survived_does_not_explain_the_end(logs: RunLogs) -> None:
    logs.write(0, "wandb: OSError: [Errno 28] No space left on device\n" + "step\n" * EXIT_OUTPUT_LINES + RAISED)
    found = diagnose(logs.run_dir)
    assert found is not None
    assert found.cause == "ValueError: boom"


HANDLED = "wandb: OSError: [Errno 28] No space left on device\nstep 5\n"
CHAIN = """Traceback (most recent call last):
  File "save.py", line 3, in save
OSError: [Errno 28] No space left on device

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "train.py", line 7, in <module>
RuntimeError: step 5 was not saved
"""


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (HANDLED + RAISED, "ValueError: boom"),
        (HANDLED + "JobError: no such optimizer\n", "JobError: no such optimizer"),
        (HANDLED + RAISED + "[ring] Socket 3 was closed by the peer\n", "ValueError: boom"),
        (HANDLED + "RuntimeError: [ring] Couldn't bind socket (error: 98)\n", "the port is in use (error 98)"),
        (RAISED + "step\n" * (TRAILING_LINES + 1) + "No space left on device\n", "the disk was full"),
        (HANDLED + CHAIN, "the disk was full"),
        (HANDLED + PEER_LOST, "the disk was full"),
        (HANDLED + RAISED.replace("ValueError: boom", "subprocess.CalledProcessError: 1"), "the disk was full"),
    ],
    ids=["traceback", "one line", "afterwords", "signature", "survived traceback", "chain", "consequence", "of others"],
)
def test_the_exception_that_ended_a_rank_goes_before_what_it_went_on_after(logs: RunLogs, log: str, cause: str) -> None:
    logs.write(1, log)
    ended(logs, rank=1, cause="exited with code 1")
    found = diagnose(logs.run_dir)
    assert found is not None
    assert cause in found.cause


MISSING = "ValueError: Missing 3 parameters: \nmodel.layers.0.a.weight,\nmodel.layers.0.b.weight,\nmodel.norm.weight."
BACKEND = """ValueError: Couldn't instantiate the backend tokenizer from one of:
(1) a `tokenizers` library serialization file,
(2) a slow tokenizer instance to convert or
(3) an equivalent slow tokenizer class to instantiate and convert.
You need to have sentencepiece or tiktoken installed"""
STATE = """RuntimeError: Error(s) in loading state_dict for Net:
\tMissing key(s) in state_dict: "a.weight", "b.weight".
\tsize mismatch for c.weight"""


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (MISSING, MISSING.replace("\n", " ").replace("  ", " ")),
        (BACKEND, BACKEND.replace("\n", " ").removesuffix(" You need to have sentencepiece or tiktoken installed")),
        (STATE, STATE.replace("\n\t", " ")),
        (
            "ValueError: 2 validation errors for Job\nname\n  Field required",
            "ValueError: 2 validation errors for Job name",
        ),
        ("ValueError: a list:\n" + "name_of_a_parameter,\n" * 1000, "ValueError: a list: name_of_a_parameter, "),
        ("ValueError: boom\nwandb: syncing is done", "ValueError: boom"),
        ("ValueError: boom:\n\nstep 3", "ValueError: boom:"),
        ("ValueError: boom:\nTraceback (most recent call last):", "ValueError: boom:"),
    ],
)
def test_a_cause_keeps_the_lines_that_its_message_announces(logs: RunLogs, message: str, cause: str) -> None:
    logs.write(1, f'step 4\nTraceback (most recent call last):\n  File "a.py", line 1, in f\n{message}\n')
    ended(logs, rank=1, cause="exited with code 1")
    found = diagnose(logs.run_dir)
    assert found is not None and found.cause.startswith(cause) and len(found.cause) <= 300
    assert "wandb" not in found.cause and "step" not in found.cause and "Traceback" not in found.cause


def test_a_model_type_that_mlx_lm_lacks_is_not_told_as_another_environment(logs: RunLogs) -> None:
    """mlx-lm raises its own error from the missing module's."""
    logs.write(
        1,
        """Traceback (most recent call last):
  File "utils.py", line 9, in _get_classes
ModuleNotFoundError: No module named 'mlx_lm.models.bert'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "train.py", line 7, in <module>
ValueError: Model type bert not supported.
""",
    )
    ended(logs, rank=1, cause="exited with code 1")
    found = diagnose(logs.run_dir)
    assert found is not None and found.signature == "import.model_type"
    assert found.cause == "the mlx-lm on this host has no model type bert"


def test_the_end_that_a_rank_reported_goes_before_its_log(logs: RunLogs) -> None:
    logs.write(1, HANDLED + RAISED)
    ended(logs, rank=1, cause="exited with code 1")
    found = first_cause(logs.run_dir, None, {}, reported=["ValueError: boom"])
    assert found is not None
    assert (found.cause, found.source) == ("ValueError: boom", 1), "as its log has it, too"
    unheard = first_cause(logs.run_dir, None, {}, reported=["TypeError: not in the log yet"])
    assert unheard is not None
    assert (unheard.cause, unheard.source) == ("TypeError: not in the log yet", None)


@pytest.mark.parametrize(
    "how",
    [
        {"reason": Reason.RANK_KILLED, "signal": 9, "exit_code": None},
        {"reason": Reason.NODE_LOST, "exit_code": None},
        {"reason": Reason.USER_ABORT, "state": "aborted", "exit_code": None},
        {"reason": Reason.RANK_FAILED, "exit_code": 0},
    ],
    ids=lambda how: how["reason"].value,
)
def test_an_end_from_outside_is_not_explained_by_the_ranks_output(logs: RunLogs, how: dict[str, Any]) -> None:
    logs.write(1, "matplotlib: Read-only file system\nstep 4\n")
    ended(logs, rank=1, cause="as its judge has it", **how)
    found = diagnose(logs.run_dir)
    assert found is not None
    assert (found.cause, found.fix, found.signature, found.rank) == ("as its judge has it", "look", None, 1)


def test_a_crash_is_explained_by_its_exit_output(logs: RunLogs) -> None:
    logs.write(1, "libc++abi: [METAL] Command buffer execution failed: Internal Error (0000000e:Internal Error)\n")
    ended(logs, rank=1, cause="killed by SIGABRT (signal 6)", reason="rank_killed", signal=6, exit_code=None)
    found = diagnose(logs.run_dir)
    assert found is not None and found.signature == "metal.internal"


def test_a_cause_that_names_the_file_is_not_made_general(logs: RunLogs) -> None:
    logs.write(1, "OSError: [Errno 28] No space left on device: '/data/a'\n")
    ended(logs, rank=1, cause="disk full: No space left on device: '/data/a'", reason="disk_full", fix=None)
    found = diagnose(logs.run_dir)
    assert found is not None and found.fix is not None
    assert (found.cause, found.signature) == ("disk full: No space left on device: '/data/a'", "disk.full")


def test_an_exception_is_not_quoted_with_its_secrets(logs: RunLogs) -> None:
    logs.write(0, "Traceback (most recent call last):\n  File x\nValueError: HF_TOKEN=raven-raven is refused\n")
    found = diagnose(logs.run_dir)
    assert found is not None
    assert found.cause == "ValueError: HF_TOKEN=[redacted] is refused"


CAUSE = "RuntimeError: [ring] Couldn't bind socket (error: 98)"
HOSTILE = {
    "a flood of consequences": f"{CAUSE}\n" + "[ring] Socket 3 was closed by the peer\n" * 50_000,
    "a line without an end": "." * 3_000_000 + CAUSE,
    "escape sequences": "\x1b[31m[\x1b]0;x\x07" * 100_000 + "\n\x1b[1mRuntimeError:\x1b[0m " + CAUSE,
    "a progress bar": "".join(f"\r{step}%" for step in range(1000)) * 300 + f"\r{CAUSE}",
}


@pytest.mark.parametrize("log", HOSTILE.values(), ids=HOSTILE)
def test_a_cause_is_found_in_a_huge_log_of_which_little_is_read(logs: RunLogs, log: str) -> None:
    logs.write(1, log)
    found = diagnose(logs.run_dir)
    assert found is not None and (found.signature, found.rank) == ("ring.bind", 1)
    ends = LogEnds.of(logs.run_dir.log(1), 0)
    assert sum(len(line.encode()) + 1 for line in ends.lines) <= HEAD_BYTES + TAIL_BYTES + 1


@pytest.mark.parametrize("size", [0, 1, HEAD_BYTES - 1, TAIL_BYTES, TAIL_BYTES + 50, HEAD_BYTES + TAIL_BYTES, 10**6])
def test_the_ends_of_a_log_are_its_lines_where_they_lie(tmp_path: Path, size: int) -> None:
    log = tmp_path / "log"
    data = b"".join(b"%07d\n" % number for number in range(size // 8 + 1))[:size]
    base = min(size, 24)
    log.write_bytes(data)
    ends = LogEnds.of(log, base)
    for offset, line in zip(ends.offsets, ends.lines, strict=True):
        assert data[offset : offset + len(line)] == line.encode()
    assert ends.offsets == sorted(set(ends.offsets))
    if size - base <= HEAD_BYTES + TAIL_BYTES:
        assert b"".join(line.encode() for line in ends.lines) == data[base:].replace(b"\n", b"")
    else:
        assert ends.lines[0].encode() == data[base : base + 7] and ends.lines[-1].encode() == data[-8:].strip()


def test_of_a_long_line_both_ends_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"begin" + b"x" * 3 * LINE_BYTES + b"end\n")
    (line,) = LogEnds.of(log, 0).lines
    assert line.startswith("begin") and line.endswith("end") and len(line) < LINE_BYTES + 10


SHARED_LINES = """[rank 1]  10%|#  | 3/30 [00:01][rank 0] [rank0]: Traceback (most recent call last):
[rank 0] [rank0]:   File "train.py", line 7, in <module>
[rank 1] [rank1]: Traceback (most recent call last):
[rank 0] [rank0]:     raise ValueError("boom")
[rank 1] [rank1]:   File "train.py", line 9, in <module>
[rank 0] [rank0]: ValueError: boom
[rank 1] [rank1]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:45723.
"""


def test_the_lines_of_torchruns_workers_are_told_apart_where_they_share_one(logs: RunLogs) -> None:
    logs.write(0, SHARED_LINES)
    found = diagnose(logs.run_dir)
    assert found is not None and found.cause == "ValueError: boom"
    assert logs.run_dir.log(0).read_bytes()[found.offset :].startswith(b"[rank 0] [rank0]: ValueError: boom\n")


def test_what_follows_another_workers_prefix_is_known(logs: RunLogs) -> None:
    logs.write(0, "[rank 1]  10%|#  | 3/30 [00:01][rank 0] KeyError: 'labels'\n")
    found = diagnose(logs.run_dir)
    assert found is not None and found.cause == "KeyError: 'labels'"
