"""start.sh, run by a real /bin/sh."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from engine.launch.start_script import start_script
from engine.protocol.attempt import AttemptSpec, NodeFiles, RankSpec, read_exit, read_identity, write_atomic
from tests.bundles import link_bundle
from tests.waiting import wait_until


def prepared(directory: Path, *pythons: str, command: list[str] | None = None, **options: Any) -> NodeFiles:
    files = NodeFiles.for_attempt(directory, "run", 1)
    files.directory.mkdir(parents=True)
    ranks = [RankSpec(k, f"n{k}", python, str(directory)) for k, python in enumerate(pythons)]
    # Its own: a keeper ends what its rank leaves behind, by the nonce, also another worker's.
    nonce = uuid.uuid4().hex
    spec = AttemptSpec("run", 1, nonce, "ring", len(ranks), ranks, command=command or ["python", "-c", "print(1)"])
    write_atomic(files.spec, spec.to_json())
    files.start.write_text(start_script(spec, files, link_bundle(directory), **options))
    return files


def start(files: NodeFiles, rank: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    variables = {**os.environ, "MLX_RANK": rank, **environment}
    return subprocess.run(["/bin/sh", str(files.start)], env=variables, capture_output=True, check=False)


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


SHOW_HOSTFILE = ["python", "-c", "import os; print(os.environ['MLX_HOSTFILE'])"]
SHOW = ["python", "-c", "import os; print({name: os.environ.get(name) for name in ('TMPDIR', 'KEPT', 'GONE')})"]


@pytest.mark.parametrize(("kept", "own"), [("/var/tmp", "/var/tmp"), ("", None)])
def test_the_rank_has_its_own_environment_and_not_the_launchers(tmp_path: Path, kept: str, own: str | None) -> None:
    files = prepared(tmp_path, sys.executable, command=SHOW, environment={"KEPT": 'it\'s "mine"', "GONE": None})
    done = start(files, "0", TMPDIR=str(tmp_path), FLIGHTDECK_TMPDIR=kept, KEPT="another's", GONE="here")
    assert done.returncode == 0
    assert files.log(0).read_text().strip() == str({"TMPDIR": own, "KEPT": 'it\'s "mine"', "GONE": None})


def test_a_rank_has_its_own_gpu_and_not_the_launchers(tmp_path: Path) -> None:
    own = {0: {"CUDA_VISIBLE_DEVICES": "GPU-0"}, 1: {"CUDA_VISIBLE_DEVICES": "GPU-1"}}
    show = ["python", "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]
    files = prepared(tmp_path, "/nowhere", sys.executable, command=show, variables=own)
    assert start(files, "1", CUDA_VISIBLE_DEVICES="0").returncode == 0
    assert files.log(1).read_text().strip() == "GPU-1"


def test_without_a_launcher_in_between_the_temporary_directory_is_the_nodes(tmp_path: Path) -> None:
    files = prepared(tmp_path, sys.executable, command=SHOW)
    start(files, "0", TMPDIR=str(tmp_path))
    assert str(tmp_path) in files.log(0).read_text()


@pytest.mark.parametrize("content", [None, ""])
def test_a_rank_whose_hostfile_could_not_be_written_does_not_start_alone(tmp_path: Path, content: str | None) -> None:
    files = prepared(tmp_path, sys.executable, sys.executable)
    hostfile = tmp_path / "hostfile"
    if content is not None:
        hostfile.write_text(content)
    done = start(files, "0", MLX_HOSTFILE=str(hostfile) if content is not None else "")
    assert done.returncode == 125
    log = files.keeper_log(0).read_bytes()
    assert (b"names an empty file: the disk of" if content is not None else b"names no file: temporary files") in log
    hostfile.write_text("[[]]")
    assert start(files, "0", MLX_HOSTFILE=str(hostfile)).returncode == 0


def test_a_hostfile_named_relative_to_where_it_was_started_is_found_by_its_rank(tmp_path: Path) -> None:
    here = tmp_path / "Application Support"
    files = prepared(here, sys.executable, sys.executable, command=SHOW_HOSTFILE)
    (here / "tmp").mkdir()
    (here / "tmp" / "x").write_text("[[]]")
    done = subprocess.run(
        ["/bin/sh", str(files.start)],
        env={**os.environ, "MLX_RANK": "0", "MLX_HOSTFILE": "tmp/x"},
        cwd=here,
        check=False,
    )
    assert done.returncode == 0
    assert files.log(0).read_text().strip() == str(here / "tmp" / "x")


def test_a_detached_keeper_leaves_and_the_rank_goes_on(tmp_path: Path) -> None:
    program = "import pathlib, time; [time.sleep(0.01) for _ in iter(lambda: pathlib.Path('go').exists(), True)]"
    files = prepared(tmp_path, sys.executable, command=["python", "-c", program], detached=[0])
    assert start(files, "0").returncode == 0
    assert read_identity(files.identity(0)) is not None and read_exit(files.exit(0)) is None
    (tmp_path / "go").touch()
    wait_until(lambda: read_exit(files.exit(0)) is not None)


def test_a_host_starts_its_own_ranks_alone(tmp_path: Path) -> None:
    files = prepared(tmp_path, sys.executable, sys.executable, ranks=[1])
    assert [start(files, rank).returncode for rank in ("0", "1")] == [126, 0]
