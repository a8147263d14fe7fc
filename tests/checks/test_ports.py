"""ports_free binds the real ports and names who holds one; what it says to do frees it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.checks import ports as check
from engine.checks.context import CheckContext
from engine.cluster.transport.fleet import Fleet
from engine.config.models import Config
from engine.errors import InputError
from engine.models import CheckStatus
from engine.protocol.attempt import NONCE_ENV
from engine.security.paths import state_home
from tests.checks.conftest import make_config, run_check
from tests.machine import WATCHED

LISTEN = """
import socket, sys, time
while True:
    listener, before = socket.socket(), socket.socket()
    listener.bind(("127.0.0.1", 0))
    try:
        before.bind(("127.0.0.1", listener.getsockname()[1] - 1))
    except OSError:
        continue
    before.close()
    break
listener.listen()
print(listener.getsockname()[1], flush=True)
time.sleep(600)
"""


@pytest.fixture
def squatter() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """An orphan of an earlier run: it listens on a port and carries a nonce."""
    environment = {**os.environ, NONCE_ENV: "an-old-run"}
    command = [sys.executable, "-c", LISTEN, WATCHED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


async def test_another_program_at_a_port_is_not_ended_by_a_fix(model: Path, data: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as theirs:
        config = make_config(model, data, tmp_path, starting_port=theirs.getsockname()[1])
        result = await run_check(check.run, config)
    assert (result.status, result.fix_command) == (CheckStatus.FAIL, None)
    assert f"held by pid {os.getpid()}" in result.summary
    assert "leave starting_port out" in result.summary


async def check_address(config: Config, host: str, port: int) -> None:
    async with Fleet(state_home()) as fleet, CheckContext(config, fleet) as context:
        await check.check_address(context, host, port)


@pytest.mark.parametrize(
    ("host", "family"), [("127.0.0.1", socket.AF_INET), ("localhost", socket.AF_INET), ("::1", socket.AF_INET6)]
)
async def test_a_server_may_listen_where_nobody_does(
    host: str, family: socket.AddressFamily, model: Path, data: Path, tmp_path: Path
) -> None:
    config = make_config(model, data, tmp_path)
    with socket.socket(family) as free:
        free.bind((host, 0))
        port = free.getsockname()[1]
    await check_address(config, host, port)
    await check_address(config, host, 0)
    # A name with an empty label is refused without asking a name server.
    for refused in ("192.0.2.1", "no..host"):
        with pytest.raises(InputError, match=f"node0 cannot listen on {refused}: .* is not an address of this machine"):
            await check_address(config, refused, port)


async def test_who_holds_the_port_of_a_server_is_said(model: Path, data: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as theirs:
        port = theirs.getsockname()[1]
        with pytest.raises(
            InputError, match=rf"node0 cannot listen on port {port}: .*held by pid {os.getpid()}.*--port"
        ):
            await check_address(make_config(model, data, tmp_path), "127.0.0.1", port)


async def test_fresh_ports_per_attempt_need_no_fixed_one(model: Path, data: Path, tmp_path: Path) -> None:
    result = await run_check(check.run, make_config(model, data, tmp_path))
    assert (result.status, "2 from " in result.summary) == (CheckStatus.PASS, True)


async def test_a_held_port_names_its_holder_and_the_fix_frees_it(
    model: Path, data: Path, tmp_path: Path, squatter: tuple[subprocess.Popen[str], int]
) -> None:
    process, port = squatter
    config = make_config(model, data, tmp_path, starting_port=port - 1)
    result = await run_check(check.run, config)
    assert (result.status, result.blames) == (CheckStatus.FAIL, (1, "node1"))
    assert f"held by pid {process.pid}" in result.summary
    assert "a rank of a Flight Deck run, perhaps an orphan" in result.summary
    assert result.fix_command == f"kill {process.pid}"
    await asyncio.to_thread(subprocess.run, result.fix_command, shell=True, check=True)
    await asyncio.to_thread(process.wait, 10)
    assert (await run_check(check.run, config)).status is CheckStatus.PASS
