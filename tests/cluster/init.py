"""Pid 1 of a node: starts sshd, reaps whatever dies, and leaves (and with it all processes of the node) when the
process that owns the cluster is gone.

Run as `python -I -S init.py OWNER_FD`, where OWNER_FD is a pidfd of the owner. Standard library alone.
"""

from __future__ import annotations

import os
import select
import signal
import sys

SSHD = ("/usr/sbin/sshd", "-E", "/var/log/sshd.log")


def reap() -> None:
    """Collect every child that has ended: orphans of the node become ours."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        pass


def main(owner: int) -> None:
    os.set_inheritable(owner, False)
    signalled, waker = os.pipe()
    for end in (signalled, waker):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    os.posix_spawn(SSHD[0], SSHD, {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
    poll = select.poll()
    poll.register(owner, select.POLLIN)
    poll.register(signalled, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if owner in ready:
            return
        os.read(signalled, 4096)
        reap()


if __name__ == "__main__":
    main(int(sys.argv[1]))
