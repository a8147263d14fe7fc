"""The exception of a PyTorch program, read from what torchelastic left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.node.rank_process import reported_exception
from engine.protocol.attempt import NodeFiles


def left(path: Path, message: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"message": message}))


def test_a_ranks_error_file_is_its_exception(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path)
    extra = {"py_callstack": "Traceback (most recent call last):\n ...", "timestamp": "1700000000"}
    left(files.error(1), {"message": "torch.OutOfMemoryError: CUDA out of memory.", "extraInfo": extra})
    assert reported_exception(files, 0) is None
    found = reported_exception(files, 1)
    assert found is not None
    assert (found["error_type"], found["message"]) == ("OutOfMemoryError", "CUDA out of memory.")
    assert found["traceback"].startswith("Traceback")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"message": {}}', b'{"other": 1}', b"\xff", b"[" * 100_000], ids=range(7)
)
def test_a_damaged_file_is_none(tmp_path: Path, content: bytes) -> None:
    files = NodeFiles(tmp_path)
    files.error(0).write_bytes(content)
    assert reported_exception(files, 0) is None


def test_of_an_elastic_jobs_workers_the_first_failure_of_the_last_round_counts(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path)
    for round_number, worker, at in ((0, 0, 1), (1, 0, 30), (1, 1, 20)):
        path = files.workers(0) / "run_x" / f"attempt_{round_number}" / str(worker) / "error.json"
        left(path, {"message": f"ValueError: {round_number} {worker}", "extraInfo": {"timestamp": str(at)}})
    found = reported_exception(files, 0)
    assert found is not None and found["message"] == "1 1"


def test_an_exception_of_an_earlier_round_is_not_that_of_the_last(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path)
    run = files.workers(0) / "run_x"
    left(run / "attempt_9" / "0" / "error.json", {"message": "ValueError: old", "extraInfo": {"timestamp": "1"}})
    (run / "attempt_10" / "0").mkdir(parents=True)
    assert reported_exception(files, 0) is None


def test_a_text_without_a_type_is_an_error(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path)
    left(files.error(0), "signal 11 (SIGSEGV) received by PID 7")
    found = reported_exception(files, 0)
    assert found is not None
    assert (found["error_type"], found["message"]) == ("Error", "signal 11 (SIGSEGV) received by PID 7")
