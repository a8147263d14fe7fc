"""Who has machines for himself keeps others from them, for as long as he lives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.errors import InputError, NodesInUse
from engine.runs.occupancy import alone, machine, together

HOLDER = """
import sys
from pathlib import Path
from engine.runs.occupancy import alone
with alone(Path(sys.argv[1]), ["a.local", "b.local"], "a calibration of job"):
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
        with pytest.raises(NodesInUse) as refused, together(tmp_path, ["c.local", "b.local"]):
            pass
        line = str(refused.value)
        assert line.startswith("b.local: a calibration of job is going on there: ") and f"pid {holder.pid} " in line
        with pytest.raises(NodesInUse, match="a calibration of job"), alone(tmp_path, ["a.local"], "another"):
            pass
        holder.kill()
        holder.wait()
        with together(tmp_path, ["a.local", "b.local"]):
            pass


def test_launches_do_not_hinder_each_other_and_keep_a_calibration_out(tmp_path: Path) -> None:
    with together(tmp_path, ["a", "b"]), together(tmp_path, ["b", "c"]):
        beginning = "b: a launch or a calibration is just beginning there"
        with pytest.raises(NodesInUse, match=beginning), alone(tmp_path, ["b"], "a calibration"):
            pass
        # None of what it had taken by then is kept.
        with alone(tmp_path, ["d"], "a calibration"):
            pass


def test_other_machines_are_not_hindered(tmp_path: Path) -> None:
    with alone(tmp_path, ["a", "b"], "one"), alone(tmp_path, ["c"], "another"), together(tmp_path, ["d"]):
        pass


def test_what_a_dead_holder_has_written_is_not_believed(tmp_path: Path) -> None:
    with held(tmp_path) as holder:
        holder.kill()
        holder.wait()
    with (
        together(tmp_path, ["a.local"]),
        pytest.raises(NodesInUse, match="just beginning"),
        alone(tmp_path, ["a.local"], "a calibration"),
    ):
        pass


def test_a_machine_is_the_same_whoever_goes_there() -> None:
    assert machine("ana@Ultra.local") == machine("bea@ultra.local") == machine("ultra.local")
    assert len({machine(host) for host in ("ultra", "ultra:22", "ultra:2222", "max", "[::1]:22")}) == 5
    with pytest.raises(InputError):
        machine("a b")
