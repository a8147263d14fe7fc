"""start.sh, run by a real /bin/sh."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from engine.launch.bundle import stage_bundle
from engine.launch.start_script import start_script
from engine.worker.wire import AttemptSpec, NodeFiles, RankSpec, read_exit, write_atomic


def prepared(directory: Path, *pythons: str, command: list[str] | None = None) -> NodeFiles:
    files = NodeFiles.of(directory, "run", 1)
    files.directory.mkdir(parents=True)
    ranks = [RankSpec(k, f"n{k}", "127.0.0.1", python, str(directory)) for k, python in enumerate(pythons)]
    spec = AttemptSpec("run", 1, "nonce", "ring", len(ranks), ranks, command=command or ["python", "-c", "print(1)"])
    write_atomic(files.spec, spec.to_json())
    files.start.write_text(start_script(spec, files, stage_bundle(directory)))
    return files


def start(files: NodeFiles, rank: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["/bin/sh", str(files.start)], env={**os.environ, "MLX_RANK": rank}, capture_output=True, check=False
    )


def test_it_becomes_the_keeper_of_its_rank_and_prints_nothing(tmp_path: Path) -> None:
    directory = tmp_path / 'a node\'s home; with $signs and "quotes"'
    directory.mkdir()
    files = prepared(directory, "/nowhere", sys.executable, command=["python", "-c", "print('from rank {rank}')"])
    done = start(files, "1")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert files.log(1).read_bytes() == b"from rank 1\n"
    record = read_exit(files.exit(1))
    assert record is not None and record.code == 0


def test_a_missing_interpreter_is_127_and_named_in_the_keepers_log(tmp_path: Path) -> None:
    files = prepared(tmp_path, "/no/such/python")
    done = start(files, "0")
    assert (done.returncode, done.stdout, done.stderr) == (127, b"", b"")
    assert b"/no/such/python" in files.keeper_log(0).read_bytes()


def test_a_rank_that_is_not_in_the_attempt_is_refused(tmp_path: Path) -> None:
    done = start(prepared(tmp_path, sys.executable), "7")
    assert (done.returncode, done.stderr) == (126, b"start.sh: no rank 7 in this attempt\n")
