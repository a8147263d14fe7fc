"""Processes forked by tests.fork_server, with what the tests need of a subprocess.Popen."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests import IMPORTS
from tests.fork_server import MESSAGE_BYTES

ROOT = Path(__file__).parents[1]
LIMIT_S = 400.0


class ForkServer:
    """A running tests.fork_server, which ends with this process; `start` are its arguments."""

    def __init__(self, python: str, *start: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        path = os.pathsep.join(map(str, (ROOT, *IMPORTS)))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        command = [python, "-P", "-W", "ignore", "-m", "tests.fork_server", *start]
        with theirs:
            self._process = subprocess.Popen(command, env=environment, stdin=theirs.fileno())
        atexit.register(self.close)

    def close(self) -> None:
        """It kills what it has started and what has not ended."""
        with self._lock:
            self._socket.close()
            self._process.wait(LIMIT_S)

    def ask(self, request: Mapping[str, Any], descriptors: tuple[int, ...] = ()) -> int | None:
        with self._lock:
            if self._process.returncode is not None:
                return -signal.SIGKILL
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            answer: int | None = json.loads(self._socket.recv(MESSAGE_BYTES))
        return answer


class Forked:
    """A process that runs a module with these arguments."""

    def __init__(
        self,
        server: ForkServer,
        module: str,
        *arguments: str,
        environment: Mapping[str, str],
        output: int,
        handed: Mapping[str, int] = MappingProxyType({}),
        folder: Path | None = None,
        session: bool = False,
    ) -> None:
        """`output`: the descriptor of its standard output and error; `handed`: descriptors by the names that stand for
        them in its environment and arguments; `session`: it leads one of its own."""
        self._server = server
        request = {"module": module, "arguments": arguments, "environment": {**environment}, "handed": [*handed]}
        place = {"folder": str(folder or Path.cwd()), "session": session}
        pid = server.ask({**request, **place}, (output, *handed.values()))
        assert pid is not None
        self.pid = pid
        self.returncode: int | None = None
        # One thread may wait for its end while another one polls.
        self._polling = threading.Lock()
        self._ended = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._ended).atexit = False

    def poll(self) -> int | None:
        with self._polling:
            if self.returncode is None:
                self.returncode = self._server.ask({"pid": self.pid})
            return self.returncode

    def wait(self, limit_s: float = LIMIT_S) -> int:
        if self.returncode is None:
            ended, _, _ = select.select([self._ended], [], [], limit_s)
            assert ended, f"not within {limit_s} s"
        code = self.poll()
        assert code is not None
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
