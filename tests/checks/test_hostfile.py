"""hostfile_valid asks MLX's own parser in a process of its own, and this machine about its addresses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.checks import hostfile as check
from engine.checks import ports
from engine.checks.context import CheckContext
from engine.checks.runner import run_checks
from engine.config.models import ClusterConfig, Config
from engine.models import CheckStatus
from engine.plan.network import LaunchHost, NetworkPlan
from tests.checks.conftest import fleet_of, run_check

pytestmark = pytest.mark.usefixtures("shared_agent")


async def test_a_local_ring_is_valid(config: Config) -> None:
    result = await run_check(check.run, config)
    assert (result.status, result.summary) == (CheckStatus.PASS, "MLX reads 2 ranks, ring")


async def test_an_address_that_a_rank_could_not_listen_on_is_named(config: Config) -> None:
    nodes = (config.nodes[0], config.nodes[1].model_copy(update={"ips": ("192.0.2.1",)}))
    result = await run_check(check.run, config.model_copy(update={"nodes": nodes}))
    assert (result.status, result.blames) == (CheckStatus.FAIL, (1, "node1"))
    assert "192.0.2.1 is not an address of this machine" in result.summary


async def test_a_missing_interpreter_is_not_taken_for_a_wrong_address(config: Config, tmp_path: Path) -> None:
    missing = config.nodes[1].model_copy(update={"python": str(tmp_path / "python")})
    result = await run_check(check.run, config.model_copy(update={"nodes": (config.nodes[0], missing)}))
    assert (result.status, result.blames) == (CheckStatus.FAIL, (1, "node1"))
    assert "cannot be run on node1, see versions_match" in result.summary
    assert "give the node's own address" not in result.summary


def wired(backend: str, ranks: int) -> NetworkPlan:
    return NetworkPlan(
        backend=backend, hosts=tuple(LaunchHost(ssh=f"n{rank}", ips=("10.0.0.1",)) for rank in range(ranks))
    )


@pytest.mark.parametrize(
    ("backend", "ranks", "towards"),
    [
        ("ring", 1, {}),
        ("ring", 2, {0: 1, 1: 0}),
        ("ring", 3, {0: 1, 1: 2, 2: 0}),
        ("jaccl", 3, {1: 0, 2: 0}),
        ("jaccl-ring", 3, {1: 0, 2: 0}),
        ("nccl", 1, {}),
    ],
)
def test_each_rank_connects_to_whom_mlx_has_it_connect_to(backend: str, ranks: int, towards: dict[int, int]) -> None:
    assert check.neighbours(wired(backend, ranks)) == towards


def test_with_local_every_rank_connects_to_rank_0() -> None:
    assert check.connections(wired("ring", 3), local=True) == [{1: 0, 2: 0}]


async def test_a_backend_that_is_impossible_is_reported_once(config: Config) -> None:
    demanded = config.model_copy(update={"cluster": ClusterConfig(backend="jaccl")})
    checks = {each.name: replace(each, needs=()) for each in (check.CHECK, ports.CHECK)}
    async with fleet_of(demanded) as fleet:
        context = CheckContext(demanded, fleet)
        report = await run_checks(context, on_result=lambda _: None, checks=checks, audit=lambda *_: None)
        await context.close()
    valid, free = report.checks
    assert (valid.status, "jaccl is not possible" in valid.summary) == (CheckStatus.FAIL, True)
    assert (free.status, free.summary) == (
        CheckStatus.SKIP,
        "there is no network plan to take the ports from: see hostfile_valid",
    )
