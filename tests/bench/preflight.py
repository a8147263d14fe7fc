"""The whole preflight over SSH, measured: `uv run python -m tests.bench.preflight [--rounds N] [--phases]`.

Four real nodes of the test cluster, all of them reachable, then one of them a black hole from which no packet comes
back. Connecting is part of it, and so is the real all_sum, of the length that a configuration has by default.
`--phases` tells when each check began and ended. Exits 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.checks.context import CheckContext
from engine.checks.runner import run_checks
from engine.cluster.transport.fleet import Fleet
from engine.config.models import Config, PreflightConfig
from engine.models import CheckResult, CheckStatus, PreflightReport
from tests.bench.figures import Figure, machine, report
from tests.cluster.cluster import Cluster
from tests.integration.checks import config_of, furnish, unheard

REACHABLE_S, BLACK_HOLED_S = 6.0, 15.0


async def measured(config: Config, home: Path, *, phases: bool = False) -> tuple[float, PreflightReport]:
    """Seconds of one preflight with new connections, and what it found."""
    begun = time.perf_counter()

    def on_result(result: CheckResult) -> None:
        if phases:
            print(f"  {time.perf_counter() - begun:6.2f} s  {result.status.value:8} {result.name}  {result.summary}")

    async with Fleet(home) as fleet:
        context = CheckContext(config, fleet)
        try:
            found = await run_checks(context, on_result=on_result, audit=unheard)
            return time.perf_counter() - begun, found
        finally:
            await context.close()


def figures(rounds: int, folder: Path, *, phases: bool) -> Iterator[Figure]:
    with Cluster(4) as cluster:
        os.environ["FLIGHTDECK_SSH_CONFIG"] = str(cluster.ssh_config)
        os.environ["FLIGHTDECK_HOME"] = str(folder)
        for node in cluster.nodes:
            furnish(node)
        config = config_of(cluster).model_copy(update={"preflight": PreflightConfig(sync=False)})
        # Once for nothing: the worker is staged, and caches are warm.
        asyncio.run(measured(config, folder))
        taken = []
        for _ in range(rounds):
            seconds, found = asyncio.run(measured(config, folder, phases=phases))
            failed = [result.summary for result in found.checks if result.status is CheckStatus.FAIL]
            assert not failed, failed
            taken.append(seconds)
        yield Figure(f"4 reachable nodes, median of {rounds}", f"{statistics.median(taken):.2f} s")
        worst = max(taken)
        yield Figure("4 reachable nodes, slowest", f"{worst:.2f} s", f"<= {REACHABLE_S:g} s", worst <= REACHABLE_S)
        lost = cluster.nodes[2]
        lost.cut()
        seconds, found = asyncio.run(measured(config, folder, phases=phases))
        lost.heal()
        blamed = {result.blames for result in found.checks if result.status is CheckStatus.FAIL}
        assert blamed == {(2, lost.name)}, found
        met = seconds <= BLACK_HOLED_S
        yield Figure("one of 4 is a black hole: it is named", f"{seconds:.2f} s", f"<= {BLACK_HOLED_S:g} s", met)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--phases", action="store_true", help="tell when each check begins and ends")
    options = parser.parse_args()
    print(machine())
    with TemporaryDirectory() as folder:
        return report(figures(options.rounds, Path(folder), phases=options.phases))


if __name__ == "__main__":
    sys.exit(main())
