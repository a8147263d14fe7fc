"""Benchmarks of this checkout beside those of another one, in turns on the same machine.

    uv run python -m tests.bench.compare [--rounds N] [--limit 1.1] OTHER [BENCH ARGUMENT…]

OTHER is a folder with another commit and its own .venv (`git worktree add`, then `uv sync` there). Without a BENCH
those of LIST are run. Figures are matched by their place in the output, since names may have changed; shown are the
medians of each number over the rounds, and the ratio where the number has a unit of time or is a share of a core. Exits
1 when one that should be small is above `--limit` times the other's.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from tests.bench.figures import machine

LIST: Final = (
    ("startup",),
    ("flood", "--seconds", "20"),
    ("preflight", "--rounds", "3"),
    ("launch", "--rounds", "3"),
    ("abort", "--rounds", "3"),
    ("recovery", "--seeds", "3"),
)
HERE: Final = Path(__file__).parents[2]
_FIGURE: Final = re.compile(r"^ *(?P<name>\S.*?) {2,}(?P<value>\S.*)$")
_NUMBER: Final = re.compile(r"[+-]?\d[\d,]*\.?\d*(?= ?(s\b|ms\b|%))")


def figures(checkout: Path, bench: Sequence[str]) -> Iterator[tuple[str, list[float]]]:
    """Name and numbers of each line that a bench prints. Raises RuntimeError when it prints none."""
    argv = [str(checkout / ".venv" / "bin" / "python"), "-m", f"tests.bench.{bench[0]}", *bench[1:]]
    done = subprocess.run(argv, check=False, cwd=checkout, capture_output=True, text=True)
    found = [match for line in done.stdout.splitlines() if (match := _FIGURE.match(line))]
    if not found:
        raise RuntimeError(f"{' '.join(argv)} in {checkout}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    for match in found:
        # What follows two blanks is the target.
        value = match["value"].split("  ")[0]
        yield match["name"], [float(number[0].replace(",", "")) for number in _NUMBER.finditer(value)]


def compare(other: Path, bench: Sequence[str], rounds: int, limit: float) -> bool:
    """Print the figures of both; whether none of ours is above the limit."""
    runs: dict[Path, list[list[tuple[str, list[float]]]]] = {other: [], HERE: []}
    for _ in range(rounds):
        for checkout, taken in runs.items():
            taken.append(list(figures(checkout, bench)))
    print(f"\n{' '.join(bench)}", flush=True)
    met = True
    for theirs, ours in zip(zip(*runs[other], strict=True), zip(*runs[HERE], strict=True), strict=True):
        before, after = _medians(theirs), _medians(ours)
        ratios = [new / old for old, new in zip(before, after, strict=False) if old > 0]
        over = any(ratio > limit for ratio in ratios)
        met = met and not over
        columns = (_text(before), _text(after), " ".join(f"{ratio:.2f}x" for ratio in ratios))
        print(f"  {ours[0][0]:<54} {columns[0]:>18} {columns[1]:>18}  {columns[2]}{'  ABOVE' if over else ''}")
    return met


def _medians(runs: Sequence[tuple[str, list[float]]]) -> list[float]:
    return [median(values) for values in zip(*(numbers for _, numbers in runs), strict=False)]


def _text(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("other", type=Path)
    parser.add_argument("bench", nargs=argparse.REMAINDER)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=1.1)
    options = parser.parse_args()
    print(machine())
    print(f"{'':56} {'other':>18} {'here':>18}")
    benches = [tuple(options.bench)] if options.bench else LIST
    verdicts = [compare(options.other.resolve(), bench, options.rounds, options.limit) for bench in benches]
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
