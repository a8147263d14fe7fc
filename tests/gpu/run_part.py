"""Run one part of a visit in this process: `python -m tests.gpu.run_part JSON`; the JSON is that of `Task`."""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from tests.gpu.part import Cannot, Part, Visit
from tests.gpu.results import Row, Status, append_row, now


@dataclass(frozen=True)
class Task:
    """What the visit's process tells the part's."""

    module: str
    part: str
    out: str
    scratch: str
    dry: bool
    python: str
    visit: str


def run(task: Task) -> int:
    """0 when the part ended by itself or cannot run here; its last row says which."""
    parts: tuple[Part, ...] = import_module(task.module).PARTS
    part = next(part for part in parts if part.name == task.part)
    device = "cpu" if task.dry else "cuda"
    limit_s = part.limit_of(dry=task.dry)
    visit = Visit(part.name, Path(task.out), Path(task.scratch), task.dry, device, task.python, limit_s, id=task.visit)
    status, note = Status.ENDED, ""
    try:
        part.run(visit)
    except Cannot as error:
        status, note = Status.CANNOT, str(error)
    except Exception as error:
        status, note = Status.FAILED, f"{type(error).__name__}: {error}"
        print(traceback.format_exc(), flush=True)
        visit.record("traceback", traceback.format_exc())
    append_row(visit.out, Row(now(), visit.id, part.name, "", status, note=note[:500], what=part.what, dry=visit.dry))
    return 0


if __name__ == "__main__":
    sys.exit(run(Task(**json.loads(sys.argv[1]))))
