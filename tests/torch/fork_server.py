"""Forks ranks of the PyTorch trainer from one process that has imported PyTorch and what builds on it, which costs each
rank five seconds of a core. Run by the nodes' python, with a socket as its standard input; it ends with its peer.

A message has a module and its arguments and environment, and the descriptors of its output and of what else it is
handed, whose number goes into the environment; or the pid of such a process. The answer: its pid, or its exit code."""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.torch_trainer.main import import_trainer

MESSAGE_BYTES = 1 << 20


def run(request: Mapping[str, Any], descriptors: list[int]) -> None:
    """As a process of its own would."""
    output, *handed = descriptors
    os.environ.clear()
    os.environ.update(request["environment"])
    os.environ.update(zip(request["handed"], map(str, handed), strict=True))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.argv = ["", *request["arguments"]]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def fork(request: Mapping[str, Any], descriptors: list[int], peer: socket.socket) -> int:
    pid = os.fork()
    if pid:
        for descriptor in descriptors:
            os.close(descriptor)
        return pid
    peer.close()
    code = 1
    try:
        run(request, descriptors)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    peer = socket.socket(fileno=os.dup(0))
    import_trainer("gloo")
    # runpy warns of a module that is there before it is run.
    del sys.modules["engine.torch_trainer.main"]
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork has none of the other threads"
    running = set[int]()
    while True:
        message, descriptors, _, _ = socket.recv_fds(peer, MESSAGE_BYTES, 2)
        if not message:
            break
        request = json.loads(message)
        if "module" in request:
            answer: int | None = fork(request, list(descriptors), peer)
            assert answer is not None
            running.add(answer)
        else:
            pid, status = os.waitpid(request["pid"], os.WNOHANG)
            running.discard(pid)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        peer.send(json.dumps(answer).encode())
    for pid in running:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
