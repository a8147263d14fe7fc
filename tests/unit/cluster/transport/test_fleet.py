"""A fleet has one way to each host, shared by its nodes, and opens nothing by itself."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from engine.cluster.transport.fleet import Fleet
from engine.cluster.transport.local import LocalTransport
from engine.config.models import NodeConfig
from engine.errors import InputError


def test_nodes_of_one_host_share_its_way(tmp_path: Path) -> None:
    nodes = [
        NodeConfig(name=name, ssh=host, python="python3", workdir="~")
        for name, host in (("a", "ana"), ("b", "ana"), ("c", "me@ana"))
    ]
    fleet = Fleet(tmp_path)
    a, b, c = map(fleet.to, nodes)
    assert a is b
    assert a is not c
    assert str(c.target) == "me@ana"
    assert isinstance(fleet.reach("127.0.0.1"), LocalTransport)


def test_it_may_open_more_files_than_a_shell_on_a_mac(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        Fleet(tmp_path)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_this_machine_has_no_host_key(tmp_path: Path) -> None:
    async with Fleet(tmp_path) as fleet:
        with pytest.raises(InputError, match="has no host key"):
            await fleet.accept("127.0.0.1", "SHA256:x")


def test_asyncssh_is_imported_when_a_host_that_needs_it_is_asked() -> None:
    program = """
import asyncio, sys
from pathlib import Path
from engine.errors import NodeUnreachable
from engine.cluster.transport.fleet import Fleet

async def main():
    async with Fleet(Path("/nonexistent")) as fleet:
        await fleet.reach("127.0.0.1").run(["true"], timeout_s=5)
        assert "asyncssh" not in sys.modules
        over_ssh = fleet.reach("127.0.0.1:1")
        try:
            await over_ssh.run(["true"], timeout_s=5)
        except NodeUnreachable:
            assert "asyncssh" in sys.modules
        else:
            raise AssertionError("who listens on port 1?")

asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", program], check=True)
