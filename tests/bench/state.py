"""How long the state takes with a thousand runs of history: `python -m tests.bench.state [RUNS]`."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from engine.models import RunState
from engine.store.store import Store
from tests.unit.store.records import record

OPEN_LIMIT_S, UPDATE_LIMIT_S = 0.3, 0.02


def main(runs: int) -> int:
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        cause = "rank 1 on ultra was killed (signal 9): out of memory"
        Store(home).rebuild(record(number, cause=cause, host="ultra") for number in range(runs))
        opening = []
        updates = []
        for number in range(50):
            began = time.perf_counter()
            assert len(Store(home).runs()) == runs
            opening.append(time.perf_counter() - began)
            began = time.perf_counter()
            Store(home).put_run(record(number * runs // 50, state=RunState.RUNNING, iteration=number))
            updates.append(time.perf_counter() - began)
        program = (
            "import sys\nfrom pathlib import Path\n"
            "from engine.store.store import Store\nStore(Path(sys.argv[1])).runs()"
        )
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", program, directory], check=True)
        cold = time.perf_counter() - began
        size = (home / "state.json").stat().st_size
    print(f"{runs} runs, {size / 1e3:.0f} kB")
    print(f"opening: median {statistics.median(opening) * 1e3:.1f} ms, worst {max(opening) * 1e3:.1f} ms", end="; ")
    print(f"in a new process, imports and all: {cold * 1e3:.0f} ms (limit {OPEN_LIMIT_S * 1e3:.0f})")
    print(f"an update: median {statistics.median(updates) * 1e3:.1f} ms, worst {max(updates) * 1e3:.1f} ms", end=" ")
    print(f"(limit {UPDATE_LIMIT_S * 1e3:.0f}, of the median)")
    return 0 if statistics.median(opening) < OPEN_LIMIT_S and statistics.median(updates) < UPDATE_LIMIT_S else 1


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000))
