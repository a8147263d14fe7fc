"""One supervisor per run, for as long as its process lives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from engine.runs.layout import RunDir
from engine.supervision import lock

HOLDER = """
import sys
from pathlib import Path
from engine.runs.layout import RunDir
from engine.supervision import lock
assert lock.take(RunDir(Path(sys.argv[1]))) is not None
print("held", flush=True)
sys.stdin.read()
"""


def test_it_is_taken_once(tmp_path: Path) -> None:
    held = lock.take(RunDir(tmp_path))
    assert held is not None
    assert lock.take(RunDir(tmp_path)) is None
    os.close(held)
    again = lock.take(RunDir(tmp_path))
    assert again is not None
    os.close(again)


def test_a_killed_holder_leaves_it_free(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        assert lock.take(RunDir(tmp_path)) is None
        holder.kill()
        holder.wait()
    taken = lock.take(RunDir(tmp_path))
    assert taken is not None
    os.close(taken)
