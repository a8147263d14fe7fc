"""The unfinished weights of a task that was killed are taken away by the next task on the node."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from engine.training.result_tasks import remove_leftovers
from tests.machine import WATCHED

TASK = """
import sys
from pathlib import Path
from engine.training.result_tasks import remove_leftovers

home = Path(sys.argv[1])
remove_leftovers(home)
(home / sys.argv[2]).mkdir()
(home / sys.argv[2] / "weights.safetensors").write_bytes(b"half")
print("going on", flush=True)
sys.stdin.read()
"""


def begun(home: Path, folder: str) -> subprocess.Popen[str]:
    """A task that goes on, and has made a part of its weights."""
    home.mkdir(parents=True)
    command = [sys.executable, "-c", TASK, str(home), folder, WATCHED]
    task = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert task.stdout is not None and task.stdout.readline() == "going on\n"
    return task


def test_what_a_killed_task_has_left_is_removed_and_what_another_uses_is_not(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    tasks = [begun(runs / "served", "assembled-0"), begun(runs / "fused", "..fused.fusing.a1b2")]
    other = begun(runs / "other", "assembled")
    (runs / "fused" / "fused").mkdir()
    (runs / "next").mkdir()
    try:
        remove_leftovers(runs / "next")
        assert sorted(path.name for path in runs.glob("*/*") if path.is_dir()) == [
            "..fused.fusing.a1b2", "assembled", "assembled-0", "fused",
        ]  # fmt: skip
        for task in tasks:
            task.kill()
            task.wait()
        remove_leftovers(runs / "next")
        assert sorted(path.name for path in runs.glob("*/*") if path.is_dir()) == ["assembled", "fused"]
    finally:
        for task in (*tasks, other):
            task.kill()
            task.communicate()
