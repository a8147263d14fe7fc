"""One supervisor per run, for as long as its process lives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from engine.run import supervisor_process
from engine.store.layout import RunDir

HOLDER = """
import sys
from pathlib import Path
from engine.store.layout import RunDir
from engine.run.supervisor_process import take_lock
assert take_lock(RunDir(Path(sys.argv[1]))) is not None
print("held", flush=True)
sys.stdin.read()
"""


def test_it_is_taken_once(tmp_path: Path) -> None:
    held = supervisor_process.take_lock(RunDir(tmp_path))
    assert held is not None
    assert supervisor_process.take_lock(RunDir(tmp_path)) is None
    os.close(held)
    again = supervisor_process.take_lock(RunDir(tmp_path))
    assert again is not None
    os.close(again)


def test_a_killed_holder_leaves_it_free(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        assert supervisor_process.take_lock(RunDir(tmp_path)) is None
        holder.kill()
        holder.wait()
    taken = supervisor_process.take_lock(RunDir(tmp_path))
    assert taken is not None
    os.close(taken)
