"""What only a machine with an NVIDIA GPU can show, measured there without a network.

    uv run python -m tests.gpu [--out DIR] [--only NAME …] [--dry] [--limit-s S]      or: python3 -m tests.gpu …

DIR holds results.jsonl, the same as a Markdown table, recordings.jsonl and log. A later visit with the same
DIR adds to them. Exits 1 when a target is missed, or a part failed, could not run or found no time; 128 + N when it was
ended by signal N. See README.md in this folder.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.gpu.visit import GROUPS, VisitRunner, choose, dry_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), metavar="DIR", help="default: gpu-results")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help=f"these parts or groups ({', '.join(GROUPS)})"
    )
    parser.add_argument("--list", action="store_true", help="the parts and their limits")
    parser.add_argument("--dry", action="store_true", help="without a GPU: CPU builds, the smallest sizes")
    parser.add_argument("--limit-s", type=float, default=420.0, metavar="S", help="for the whole visit (default: 420)")
    options = parser.parse_args()
    try:
        chosen = choose(options.only)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        for each in chosen:
            print(f"{each.framework:<6} {each.part.name:<26} {each.part.limit_s:>4.0f} s  {each.part.what}")
        print(f"{'':<6} {'all':<26} {sum(each.part.limit_s for each in chosen):>4.0f} s")
        return 0
    out = options.out.resolve()
    if dry_of(out) not in (None, options.dry):
        parser.error(f"{out} holds the results of {'real' if options.dry else 'dry'} visits: take another --out")
    return VisitRunner(out, options.dry, options.limit_s).run(chosen)


if __name__ == "__main__":
    sys.exit(main())
