"""This machine, as tests that go on at the same time share it: what is free, what is nobody's, and who has it alone."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.node.probes import leases

WATCHED = leases.WATCHED[0]
"""An argument that keeps a program with a nonce out of the sight of other tests: their runs are refused where a rank is
left behind that nobody watches."""

NONCE = f"nonce-of-a-test-{os.getpid()}"
"""The nonce of what a test starts without a run. Each process of pytest has its own: others end what carries theirs."""


NOBODY = 2**22 + 7
"""A pid above Linux's highest: a signal to it reaches nobody."""

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """A port of loopback on which nobody listens."""
    with socket.create_server((LOOPBACK, 0)) as free:
        return int(free.getsockname()[1])


@contextmanager
def used(folder: Path, *, alone: bool) -> Iterator[None]:
    """Wait for this machine, among all who name the same folder: with others, or `alone`."""
    folder.mkdir(parents=True, exist_ok=True)
    held = _opened(folder / "machine.lock")
    try:
        # Later ones wait at the gate behind one that wants to be alone, which would otherwise never have its turn.
        gate = _opened(folder / "gate.lock")
        try:
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(held, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        finally:
            os.close(gate)
        yield
    finally:
        os.close(held)


def _opened(path: Path) -> int:
    """Also closed by the end of the process, and not inherited by what a test starts."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
