"""Ring ports: fresh blocks, and who holds a busy one."""

from __future__ import annotations

import os
import random
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.config.models import NodeConfig
from engine.errors import LaunchError
from engine.launch import ports
from engine.launch.ports_script import bindable
from engine.transport.fleet import Fleet
from tests.unit.launch.places import as_configured, ring_ports


@contextmanager
def listening(ip: str, port: int = 0) -> Iterator[int]:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((ip, port))
        listener.listen(1)
        yield listener.getsockname()[1]


NODES = [NodeConfig(name=f"n{rank}", python=sys.executable, workdir="/") for rank in range(4)]
FLEET = Fleet((), Path("/"))


async def chosen(*, starting_port: int | None = None, seed: int | None = None) -> int:
    rng = random.Random(seed) if seed is not None else None
    return await ports.fresh_ports(FLEET, NODES, as_configured(NODES), starting_port, rng=rng)


async def test_the_whole_block_can_be_bound() -> None:
    first = await chosen()
    assert all(ports.LOWEST <= port < ports.HIGHEST for port in (first, first + 3))
    assert all(bindable("127.0.0.1", port) for port in range(first, first + 4))


async def test_a_block_with_a_busy_port_is_passed_over() -> None:
    first = await chosen(seed=7)
    with listening("127.0.0.1", first + 2):
        another = await chosen(seed=7)
    assert first + 2 not in range(another, another + 4)


async def test_a_configured_port_is_taken_as_it_is() -> None:
    with listening("127.0.0.1") as busy:
        assert await chosen(starting_port=busy) == busy


async def test_no_room_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "bindable", lambda _ip, _port: False)
    with pytest.raises(LaunchError, match="no 4 consecutive ports are free"):
        await chosen()


async def test_attempts_do_not_share_their_first_port() -> None:
    assert len({await chosen() for _ in range(20)}) > 1


def test_the_holder_of_a_port_is_named_by_pid_and_command() -> None:
    with listening("127.0.0.1") as busy:
        said = ports.holder(busy)
    assert said is not None and said.startswith(f"pid {os.getpid()} (") and "py" in said


def test_nobody_holds_a_free_port() -> None:
    assert ports.holder(ring_ports(1)) is None
