"""Who has machines for himself keeps others from them, for as long as he lives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.cluster.host_locks import exclusive_hosts, host_key, shared_hosts
from engine.errors import InputError, NodesInUse

HOLDER = """
import sys
from pathlib import Path
from engine.cluster.host_locks import exclusive_hosts
with exclusive_hosts(Path(sys.argv[1]), ["a.local", "b.local"], "a calibration of job"):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held(home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that has a.local and b.local for itself."""
    argv = [sys.executable, "-c", HOLDER, str(home)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_the_holder_is_named_and_a_dead_one_holds_nothing(tmp_path: Path) -> None:
    with held(tmp_path) as holder:
        with pytest.raises(NodesInUse) as refused, shared_hosts(tmp_path, ["c.local", "b.local"]):
            pass
        line = str(refused.value)
        assert line.startswith("b.local: a calibration of job is going on there: ") and f"pid {holder.pid} " in line
        with pytest.raises(NodesInUse, match="a calibration of job"), exclusive_hosts(tmp_path, ["a.local"], "another"):
            pass
        holder.kill()
        holder.wait()
        with shared_hosts(tmp_path, ["a.local", "b.local"]):
            pass


def test_launches_do_not_hinder_each_other_and_keep_a_calibration_out(tmp_path: Path) -> None:
    with shared_hosts(tmp_path, ["a", "b"]), shared_hosts(tmp_path, ["b", "c"]):
        beginning = "b: a launch or a calibration is starting there"
        with pytest.raises(NodesInUse, match=beginning), exclusive_hosts(tmp_path, ["b"], "a calibration"):
            pass
        # None of what it had taken by then is kept.
        with exclusive_hosts(tmp_path, ["d"], "a calibration"):
            pass


def test_other_machines_are_not_hindered(tmp_path: Path) -> None:
    with (
        exclusive_hosts(tmp_path, ["a", "b"], "one"),
        exclusive_hosts(tmp_path, ["c"], "another"),
        shared_hosts(tmp_path, ["d"]),
    ):
        pass


def test_what_a_dead_holder_has_written_is_not_believed(tmp_path: Path) -> None:
    with held(tmp_path) as holder:
        holder.kill()
        holder.wait()
    with (
        shared_hosts(tmp_path, ["a.local"]),
        pytest.raises(NodesInUse, match="is starting there"),
        exclusive_hosts(tmp_path, ["a.local"], "a calibration"),
    ):
        pass


def test_a_machine_is_the_same_whoever_goes_there() -> None:
    assert host_key("ana@Ultra.local") == host_key("bea@ultra.local") == host_key("ultra.local")
    assert len({host_key(host) for host in ("ultra", "ultra:22", "ultra:2222", "max", "[::1]:22")}) == 5
    with pytest.raises(InputError):
        host_key("a b")
