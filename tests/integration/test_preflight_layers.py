"""The layers of preflight on the test cluster: what one node is broken by is named, and the printed fix, pasted as it
is, makes the check pass."""

from __future__ import annotations

import asyncio
import time

import pytest

from engine.checks import connectivity, hardware, health, versions, workers
from engine.checks.check import CheckFunction
from engine.checks.context import CheckContext
from engine.checks.runner import run_checks
from engine.cluster.transport.fleet import Fleet
from engine.config.models import Config
from engine.models import CheckResult, CheckStatus
from tests.cluster.cluster import Cluster
from tests.integration.checks import LISTEN, PORT, as_user, config_of, furnish, run_check_on, unheard


async def pasted(cluster: Cluster, result: CheckResult) -> str:
    """What the fix says, pasted by a person into a shell of this machine."""
    assert result.fix_command is not None, result
    done = await asyncio.to_thread(as_user, cluster, result.fix_command)
    assert done.returncode == 0, (result.fix_command, done.stdout, done.stderr)
    return done.stdout


async def fixed(
    cluster: Cluster, check: CheckFunction, config: Config, fleet: Fleet, broken: CheckResult
) -> CheckResult:
    await pasted(cluster, broken)
    return await run_check_on(check, config, fleet)


async def test_a_rank_of_an_earlier_run_is_named_and_its_fix_ends_it(cluster: Cluster, fleet: Fleet) -> None:
    third, config = cluster.nodes[2], config_of(cluster)
    third.run(["/bin/sh", "-c", "FLIGHTDECK_NONCE=of-an-earlier-run setsid sleep 600 >/dev/null 2>&1 &"])
    result = await run_check_on(workers.run, config, fleet)
    assert (result.status, result.blames) == (CheckStatus.FAIL, (2, third.name)), result
    assert set(result.fixes) == {third.name}
    assert "a rank of an earlier run is alive: pid " in result.summary
    assert (await fixed(cluster, workers.run, config, fleet, result)).status is CheckStatus.PASS
    assert third.processes("of-an-earlier-run") == []


async def test_a_held_port_of_the_ring_is_told_with_its_holder_and_its_fix_frees_it(
    isolated_cluster: Cluster, fleet: Fleet
) -> None:
    for node in isolated_cluster.nodes:
        furnish(node)
    second, config = isolated_cluster.nodes[1], config_of(isolated_cluster, starting_port=PORT)
    orphan = ["/usr/bin/env", "FLIGHTDECK_NONCE=of-an-earlier-run", second.python]
    channel = await fleet.reach(second.ssh).open([*orphan, "-c", LISTEN.format(port=PORT + 1)])
    assert await channel.read(10) == b"up\n"
    result = await run_check_on(hardware.run, config, fleet)
    assert (result.status, result.blames) == (CheckStatus.FAIL, (1, second.name))
    assert f"{second.ip}:{PORT + 1} on {second.name} is held by pid " in result.summary
    again = await fixed(isolated_cluster, hardware.run, config, fleet, result)
    await channel.close()
    assert again.status is CheckStatus.PASS, again


async def test_a_full_disk_fails_and_its_fix_shows_what_takes_the_room(isolated_cluster: Cluster, fleet: Fleet) -> None:
    last, config = isolated_cluster.nodes[3], config_of(isolated_cluster)
    # The worker is there by then: only the room is wanting.
    assert (await run_check_on(connectivity.run, config, fleet)).status is CheckStatus.PASS
    last.fill_disk(leave=10_000_000)
    result = await run_check_on(health.run, config, fleet)
    assert (result.status, result.blames) == (CheckStatus.FAIL, (3, last.name)), result
    assert " MB free" in result.summary
    biggest = (await pasted(isolated_cluster, result)).splitlines()[1].split("\t")[1]
    # A person has chosen.
    assert last.run(["/bin/rm", "-f", biggest]).returncode == 0
    assert (await run_check_on(health.run, config, fleet)).status is not CheckStatus.FAIL


async def test_another_mlx_lm_is_found_by_a_real_import_and_not_by_an_earlier_proof(
    cluster: Cluster, fleet: Fleet
) -> None:
    third, config = cluster.nodes[2], config_of(cluster)
    assert (await run_check_on(versions.run, config, fleet)).status is CheckStatus.PASS
    assert "mlx_lm" in third.run(["/bin/sh", "-c", "cat ~/.flightdeck/imports/*.json"]).stdout
    third.write("~/shadow/mlx_lm/__init__.py", "raise ImportError('half a download')\n")
    wrapper = f'#!/bin/sh\nPYTHONPATH={third.home}/shadow exec {third.python.replace("~", third.home)} "$@"\n'
    third.write("~/other/bin/python", wrapper, mode=0o755)
    nodes = tuple(
        node.model_copy(update={"python": "~/other/bin/python"}) if node.name == third.name else node
        for node in config.nodes
    )
    result = await run_check_on(versions.run, config.model_copy(update={"nodes": nodes}), fleet)
    third.run(["/bin/sh", "-c", "rm -r ~/shadow ~/other"])
    assert (result.status, result.blames) == (CheckStatus.FAIL, (2, third.name)), result
    assert "ImportError: half a download" in result.summary


@pytest.mark.slow
async def test_a_node_that_went_away_from_an_open_connection_is_named_by_one_check_alone(
    isolated_cluster: Cluster, fleet: Fleet
) -> None:
    third, config = isolated_cluster.nodes[2], config_of(isolated_cluster)
    assert (await run_check_on(connectivity.run, config, fleet)).status is CheckStatus.PASS
    third.cut()
    context, begun = CheckContext(config, fleet), time.monotonic()
    report = await run_checks(context, on_result=lambda _: None, audit=unheard)
    await context.close()
    assert time.monotonic() - begun < 60
    failed = [
        result for result in report.checks if result.status is CheckStatus.FAIL and result.name != "pre_rdma_sync"
    ]
    assert [(result.name, result.blames) for result in failed] == [("ssh_connectivity", (2, third.name))]
    assert "no answer within 10 s" in failed[0].summary
    assert failed[0].duration_s is not None and failed[0].duration_s < 15
