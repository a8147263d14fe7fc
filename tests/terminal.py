"""A real program on a real pseudo-terminal: started, read, typed at, killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from types import TracebackType


class Terminal:
    """Runs `argv` with a pseudo-terminal of its own as its controlling terminal; keeps what it wrote."""

    def __init__(
        self, argv: Sequence[str], *, size: tuple[int, int] = (120, 36), env: Mapping[str, str] | None = None
    ) -> None:
        self._master, slave = pty.openpty()
        columns, rows = size
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", **(env or {})}
        self._process = subprocess.Popen(
            argv, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True, close_fds=True
        )
        os.close(slave)
        self.output = bytearray()

    @property
    def pid(self) -> int:
        return self._process.pid

    def read_until(self, text: bytes, timeout: float = 30.0) -> None:
        """Read until `text` has been written, from wherever the last call ended. Raises TimeoutError with the tail."""
        deadline = time.monotonic() + timeout
        start = len(self.output)
        while text not in self.output[max(0, start - len(text)) :]:
            if not self._read_some(deadline):
                raise TimeoutError(f"no {text!r} in: …{bytes(self.output[-2000:])!r}")

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def flood(self, keys: bytes, size: int) -> None:
        """Type `keys` until `size` bytes have been taken; what is drawn is thrown away."""
        left = size
        while left > 0:
            readable, writable, _ = select.select([self._master], [self._master], [], 10.0)
            if readable:
                os.read(self._master, 65536)
            if writable:
                left -= os.write(self._master, keys)

    def hang_up(self) -> int:
        """Close the terminal, as a window that goes does; the exit status."""
        os.close(self._master)
        return self._process.wait(60.0)

    @property
    def cooked(self) -> bool:
        """Lines are edited and echoed, as a shell needs it."""
        modes = termios.tcgetattr(self._master)[3]
        return bool(modes & termios.ICANON and modes & termios.ECHO)

    def kill(self) -> None:
        """SIGKILL, as a closed lid or a crash would: nothing of the program runs any more."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def wait(self, timeout: float = 30.0) -> int:
        """Read to the end; the exit status."""
        deadline = time.monotonic() + timeout
        while self._read_some(deadline):
            pass
        return self._process.wait(max(0.1, deadline - time.monotonic()))

    def interrupt(self) -> int:
        """SIGINT to the program alone, again when it has not helped: one that comes just before a read begins is only
        heard after it. The exit status."""
        while True:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.wait(10.0)

    def _read_some(self, deadline: float) -> bool:
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not select.select([self._master], [], [], remaining)[0]:
            return False
        try:
            chunk = os.read(self._master, 65536)
        except OSError:  # EIO: the program has closed the terminal
            return False
        self.output += chunk
        return bool(chunk)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self.kill()
        with contextlib.suppress(OSError):
            os.close(self._master)
