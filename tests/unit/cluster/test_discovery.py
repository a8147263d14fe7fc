"""Hosts that could be nodes: real Bonjour on the loopback interface, and a real ssh configuration."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from zeroconf import IPVersion, ServiceInfo
from zeroconf.asyncio import AsyncZeroconf

from engine.cluster.discovery import BONJOUR_SERVICE, FoundHost, discover, hosts_from_names
from engine.errors import InputError
from engine.security.identifiers import LOCAL


@contextlib.asynccontextmanager
async def announced(*services: tuple[str, str, str, int]) -> AsyncIterator[None]:
    """Hosts (name, server, address, port) that answer on 127.0.0.1, as Remote Login does."""
    network = AsyncZeroconf(interfaces=["127.0.0.1"], ip_version=IPVersion.V4Only)
    try:
        infos = [
            ServiceInfo(
                BONJOUR_SERVICE, f"{name}.{BONJOUR_SERVICE}", port, addresses=[socket.inet_aton(address)], server=server
            )
            for name, server, address, port in services
        ]
        for telling in [await network.async_register_service(info, cooperating_responders=True) for info in infos]:
            await telling
        yield
    finally:
        await network.async_close()


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing leaves this machine; the ssh configuration is the test's own."""
    config = tmp_path / "ssh_config"
    monkeypatch.setenv("FLIGHTDECK_BONJOUR", "127.0.0.1")
    monkeypatch.setenv("FLIGHTDECK_SSH_CONFIG", str(config))
    monkeypatch.setattr(socket, "gethostname", lambda: "head.local")
    return config


async def test_both_ways_are_one_list_each_host_once(alone: Path) -> None:
    alone.write_text("Host big\n HostName ultra.local\n User ana\nHost other\nHost me\n HostName head.local\n")
    async with announced(
        ("Ana's Studio", "ultra.local.", "192.0.2.3", 22),
        ("Bea \u202e\x9b31mMax", "max.local.", "192.0.2.4", 2222),
        ("evil", "-oProxyCommand=id.local.", "192.0.2.5", 22),
        ("own", "head-7.local.", "127.0.0.1", 22),
    ):
        # A busy machine's answers may come too late for one look.
        for _ in range(5):
            found = await discover(2.0)
            if len(found) == 4 and all("Bonjour" in found[place].sources for place in (0, 1, 3)):
                break
    assert found[:3] == [
        FoundHost("head", LOCAL, ("this machine", "Bonjour"), "own"),
        FoundHost("big", "big", ("ssh config", "Bonjour"), "user ana, at ultra.local"),
        FoundHost("other", "other", ("ssh config",)),
    ]
    assert found[3:] == [FoundHost("max", "max.local:2222", ("Bonjour",), "Bea Max")]


async def test_looking_takes_no_longer_than_asked_and_leaves_nothing_behind() -> None:
    before = asyncio.all_tasks()
    began = asyncio.get_running_loop().time()
    assert [host.ssh for host in await discover(0.3)] == [LOCAL]
    assert asyncio.get_running_loop().time() - began < 15
    assert asyncio.all_tasks() == before


async def test_without_a_network_to_ask_on_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLIGHTDECK_BONJOUR", "203.0.113.9")
    assert [host.ssh for host in await discover(0.3)] == [LOCAL]
    monkeypatch.setenv("FLIGHTDECK_BONJOUR", "nonsense")
    assert [host.ssh for host in await discover(0.3)] == [LOCAL]
    monkeypatch.setenv("FLIGHTDECK_BONJOUR", "off")
    assert [host.ssh for host in await discover(60)] == [LOCAL]


def test_named_hosts_are_checked_before_anything_is_asked() -> None:
    assert hosts_from_names(["ana@ultra.local", "192.0.2.7:2222", "ana@ultra.local"]) == [
        FoundHost("ultra", "ana@ultra.local", ("given",)),
        FoundHost("192.0.2.7", "192.0.2.7:2222", ("given",)),
    ]
    for hostile in ("-oProxyCommand=id", "a;id", "$(id)", "a\nb", "localhost", ""):
        with pytest.raises(InputError):
            hosts_from_names([hostile])
