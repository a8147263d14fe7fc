"""Which connection a program on a node is started on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.cluster.transport.ssh import ConnectionLimiter, transport
from engine.cluster.transport.ssh.connection import OpenConnection
from engine.cluster.transport.ssh.errors import SessionRefused
from engine.cluster.transport.ssh.transport import SshTransport
from engine.security.identifiers import SshTarget


class FakeConnection:
    """`sessions`: whether it gives one; None for a connection that is lost in that moment."""

    def __init__(self, sessions: bool | None) -> None:
        self.sessions = sessions
        self.alive = True

    def abort(self) -> None:
        self.alive = False


async def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *sessions: bool | None) -> tuple[int, bool]:
    """The connection among those with these `sessions`, in the order in which they are dialled, on which a program is
    started, and whether it is the program's own."""
    connections = [FakeConnection(each) for each in sessions]
    undialled = list(connections)

    async def dial(*arguments: object) -> FakeConnection:
        return undialled.pop(0)

    async def start(
        self: SshTransport, connection: Any, command: Sequence[str], *, exclusive: bool
    ) -> tuple[int, bool]:
        if connection.sessions:
            return connections.index(connection), exclusive
        connection.alive = connection.sessions is not None
        raise SessionRefused("cannot be reached", where="ana")

    monkeypatch.setattr(transport, "dial", dial)
    monkeypatch.setattr(SshTransport, "_start", start)
    opened = cast(Any, await SshTransport(SshTarget("ana"), tmp_path, ConnectionLimiter()).open(["true"]))
    assert not undialled
    return int(opened[0]), bool(opened[1])


async def test_a_program_whose_session_is_refused_has_a_connection_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert await started(monkeypatch, tmp_path, True) == (0, False)
    assert await started(monkeypatch, tmp_path, False, True) == (1, True)


async def test_programs_share_another_connection_when_theirs_is_lost_before_it_gives_a_session(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert await started(monkeypatch, tmp_path, None, True) == (1, False)
    assert await started(monkeypatch, tmp_path, None, False, True) == (2, True)
    assert await started(monkeypatch, tmp_path, None, None, True) == (2, True)


@pytest.mark.parametrize("turns", range(2))
async def test_closing_a_connection_is_cancelled_also_at_its_very_end(turns: int) -> None:
    closed = asyncio.Event()
    client = cast(Any, SimpleNamespace(close=lambda: None, abort=lambda: None, wait_closed=closed.wait))
    closing = asyncio.create_task(OpenConnection("ana", client).close(5.0))
    await asyncio.sleep(0.01)
    closed.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    if closing.cancel():
        with pytest.raises(asyncio.CancelledError):
            await closing
    else:
        await closing
