"""hostfile_valid asks MLX's own parser in a process of its own, and this machine about its addresses."""

from __future__ import annotations

import pytest

from engine.config.models import FlightConfig
from engine.models import CheckStatus
from engine.preflight import hostfile as check
from tests.unit.preflight.conftest import looked


async def test_a_local_ring_is_valid(config: FlightConfig) -> None:
    result = await looked(check.look, config)
    assert (result.status, result.summary) == (CheckStatus.PASS, "MLX reads 2 ranks, ring")


@pytest.mark.parametrize(
    ("ip", "problem"),
    [("localhost", "no IP address"), ("192.0.2.1", "no address of this machine"), ("::1", "IPv6")],
)
async def test_an_address_that_a_rank_could_not_listen_on_is_named(config: FlightConfig, ip: str, problem: str) -> None:
    nodes = (config.nodes[0], config.nodes[1].model_copy(update={"ips": (ip,)}))
    result = await looked(check.look, config.model_copy(update={"nodes": nodes}))
    assert (result.status, result.blames) == (CheckStatus.FAIL, (1, "node1"))
    assert problem.rsplit(maxsplit=1)[-1] in result.summary
