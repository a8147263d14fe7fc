"""Forks processes from one that has imported what they need: PyTorch costs each rank five seconds of a core, and the
engine each supervisor more than half a second. Run with a socket as standard input; it ends with its peer.

    python -m tests.fork_server MODULE [FUNCTION ARGUMENT...]

imports a module, and calls one of its functions. A message has a module to run, its arguments and environment, its
folder, and the descriptors of its output and of what else it is handed, whose numbers are in the environment and take
the place of their names in the arguments; or the pid of such a process. The answer: its pid, or its exit code."""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MESSAGE_BYTES = 1 << 20


def run(request: Mapping[str, Any], descriptors: list[int]) -> None:
    """As a process of its own would."""
    output, *numbers = descriptors
    handed = dict(zip(request["handed"], map(str, numbers), strict=True))
    os.environ.clear()
    os.environ.update({**request["environment"], **handed})
    if request["session"]:
        os.setsid()
    os.chdir(request["folder"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, number in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, number)
    os.close(nothing)
    os.close(output)
    sys.argv = ["", *(handed.get(argument, argument) for argument in request["arguments"])]
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


def main(module: str, function: str | None = None, *arguments: str) -> None:
    peer = socket.socket(fileno=os.dup(0))
    imported = importlib.import_module(module)
    if function is not None:
        getattr(imported, function)(*arguments)
    # runpy warns of a module that is there before it is run.
    del sys.modules[module]
    gc.freeze()
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
    main(*sys.argv[1:])
