"""What finding the cause of a failure costs, measured: `uv run python -m tests.bench.failure_cause`.

Each log is made of what the signatures look for, over and over, and read in two lengths, of which one is four times the
other: a cost that grows with the length alone is four times as high, one that grows with its square sixteen times.
Then a log of 200 MB is diagnosed, of which only the ends are read. Exits 1 when a target is missed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.failures.explanation import explain, findings
from engine.failures.signatures import SIGNATURES
from engine.run.failure_cause import HEAD_BYTES, LINE_BYTES, TAIL_BYTES, LogEnds

GROWTH = 8.0
"""Between 4, for a cost in proportion, and 16."""
WHOLE_LOG_S = 2.0
REPEATS = 5
BYTES = 200_000_000
CAUSE = b"RuntimeError: [ring] Couldn't bind socket (error: 98)\n"
TRACEBACK = ["Traceback (most recent call last):", '  File "x.py"']


def logs() -> dict[str, list[str]]:
    """Lines as long as they are ever searched, by what they are made of."""
    hostile = {
        known.id: [(known.example[: len(known.example) * 2 // 3] * LINE_BYTES)[:LINE_BYTES]] for known in SIGNATURES
    }
    return {**hostile, "tracebacks without an error": TRACEBACK * 20, "empty lines": [""] * 2000}


def seconds(lines: list[str]) -> float:
    """Processor time of the fastest of a few runs: others are at work on the machine."""
    best = float("inf")
    for _ in range(REPEATS):
        begun = time.process_time()
        findings(lines)
        best = min(best, time.process_time() - begun)
    return best


def main() -> int:
    missed = False
    print(f"{'made of':<30} {'KB':>7} {'ms':>8}   {'4 times as long':>15}")
    for name, lines in logs().items():
        short, long = lines * 8, lines * 32
        once, more = seconds(short), seconds(long)
        missed |= more > GROWTH * once
        kilobytes = sum(len(line) + 1 for line in short) / 1e3
        print(f"{name:<30} {kilobytes:>7.0f} {once * 1e3:>8.2f}   {more / once:>13.1f} x")
    with TemporaryDirectory() as place:
        log = Path(place) / "rank0.log"
        with log.open("wb") as file:
            file.write(CAUSE)
            while file.tell() < BYTES:
                file.write(b"[ring] Socket 3 was closed by the peer\n" * 100_000)
        begun = time.process_time()
        found = explain(LogEnds.of(log, 0).lines)
        took = time.process_time() - begun
    cause = found.cause if found is not None else "nothing"
    missed |= took > WHOLE_LOG_S or found is None
    print(f"\n200 MB of consequences, cause in the first line: {cause!r} in {took:.2f} s (target {WHOLE_LOG_S:g} s)")
    print(f"read of each log: {HEAD_BYTES // 1024} KiB of its head, {TAIL_BYTES // 1024} KiB of its tail")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
