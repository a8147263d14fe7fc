"""The context collects each fact once for all checks; a host that fails does not fail the others."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from engine.checks import connectivity
from engine.checks.context import CheckContext
from engine.cluster.agent_client import AgentClient
from engine.cluster.probe_results import AddressProblems
from engine.cluster.transport.base import Channel
from engine.cluster.transport.local import LocalTransport
from engine.config.models import Config, NodeConfig
from engine.errors import LaunchError, NodeUnreachable
from engine.models import Failed, Late, NoValue, Unparsable
from tests.unit.cluster.fake_agent import FakeFleet, FakeNode


class FakeTransport(LocalTransport):
    """This machine, under another name: counts what it is asked, and answers when it may."""

    def __init__(self, *, lost: bool = False) -> None:
        self.asked = 0
        self.may = asyncio.Event()
        self.may.set()
        self._lost = lost

    async def open(self, argv: Sequence[str]) -> Channel:
        self.asked += 1
        await self.may.wait()
        if self._lost:
            raise NodeUnreachable("does not answer", where="mac")
        return await super().open(argv)


def on(config: Config, *hosts: str) -> Config:
    nodes = tuple(
        NodeConfig(name=f"node{rank}", ssh=host, python=sys.executable, workdir="~") for rank, host in enumerate(hosts)
    )
    return config.model_copy(update={"nodes": nodes})


def context_of(config: Config, transports: Mapping[str, LocalTransport]) -> CheckContext:
    return CheckContext(config, FakeFleet(**transports))


async def test_all_who_ask_share_one_answer(config: Config) -> None:
    transport = FakeTransport()
    context = context_of(on(config, "mac"), {"mac": transport})
    first, second = await asyncio.gather(context.interpreters(), context.interpreters())
    assert first is second
    assert (first["node0"].python is not None, transport.asked) == (True, 1)


async def test_who_gives_up_spoils_it_for_nobody(config: Config) -> None:
    transport = FakeTransport()
    transport.may.clear()
    context = context_of(on(config, "mac"), {"mac": transport})
    impatient, patient = (asyncio.create_task(context.interpreters()) for _ in range(2))
    while not transport.asked:
        await asyncio.sleep(0)
    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    transport.may.set()
    assert (await patient)["node0"].python is not None
    assert transport.asked == 1


async def test_a_failure_is_remembered_and_told_again(config: Config) -> None:
    transport = FakeTransport(lost=True)
    context = context_of(on(config, "mac"), {"mac": transport})
    for _ in range(2):
        with pytest.raises(NodeUnreachable, match="does not answer"):
            await context.layouts()
    assert transport.asked == 1


async def test_a_host_that_cannot_be_prepared_is_the_only_one_without_a_layout(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    context = context_of(
        on(config, "good", "lost", "good"), {"good": FakeTransport(), "lost": FakeTransport(lost=True)}
    )
    good, lost, again = context.config.nodes
    assert (await context.layout_of(good)).ranks == (0, 2)
    assert await context.layout_of(again) == await context.layout_of(good)
    with pytest.raises(NodeUnreachable):
        await context.layout_of(lost)
    with pytest.raises(NodeUnreachable):
        await context.layouts()


async def test_a_host_that_is_connected_for_the_first_time_has_its_bundle_verified_once(config: Config) -> None:
    node = FakeNode()
    context = context_of(on(config, "mac"), {"mac": node})
    assert (await connectivity.run(context)).evidence["node0"].startswith("answers in ")
    assert (len(node.channels), node.probes) == (1, []), "the bootstrap has verified it"
    await context.fleet.close()


async def test_closing_ends_what_is_still_being_found_out(config: Config) -> None:
    transport = FakeTransport()
    transport.may.clear()
    context = context_of(on(config, "mac"), {"mac": transport})
    asking = asyncio.create_task(context.interpreters())
    while not transport.asked:
        await asyncio.sleep(0)
    await context.close()
    with pytest.raises(asyncio.CancelledError):
        await asking


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (Late(command="the addresses probe", after_s=5), "node0: the addresses probe gave no answer within 5 s"),
        (Failed(command="the addresses probe", exit_code=3, stderr="worse"), "ended with 3: worse"),
        (Unparsable(command="the addresses probe", output="no json"), "printed what cannot be read: no json"),
    ],
)
async def test_an_outcome_without_a_value_is_an_error_in_one_line(
    config: Config, monkeypatch: pytest.MonkeyPatch, outcome: NoValue, message: str
) -> None:
    async def probe(self: AgentClient, *arguments: object, **options: object) -> NoValue:
        return outcome

    monkeypatch.setattr(AgentClient, "probe", probe)
    context = context_of(on(config, "mac"), {"mac": FakeTransport()})
    with pytest.raises(LaunchError, match=message):
        await context.probe(context.config.nodes[0], "addresses", result_type=AddressProblems, timeout_s=5)
