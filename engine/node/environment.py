"""Makes a Python environment on this node: whole or not at all, and one at a time. Its requirements are in no file and
no argument: an index among them may have a password."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from engine.node.bootstrap import make_private
from engine.node.daemon import GroupReaper
from engine.node.probes import reason_of
from engine.protocol.attempt import write_atomic

MARKER = "flightdeck.json"
"""In an environment, written last: one without it is not whole."""
_TAIL = 5
_TRIES, _AGAIN_S = 50, 0.1
_LIST = """
import importlib.metadata, json, os, sys, time
size = sum(os.lstat(os.path.join(path, name)).st_size for path, _, names in os.walk(sys.argv[1]) for name in names)
packages = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}
made = {"id": os.path.basename(sys.argv[1]), "made_at": time.time(), "bytes": size, "packages": packages}
print(json.dumps(made))
"""


class _Failed(Exception):
    """A program has ended with an error."""


def made_environment() -> Iterator[dict[str, Any]]:
    """Take the request, a line of JSON, from stdin, whose end ends all; each `line` that uv or pip prints, and at last
    what is `made`, or the `problem`. The request has the `folder`, the `python` (its path, or for uv a version), `uv`
    or null, the `requirements`, and the folder with all `wheels` that they need, or null for the package index."""
    lines = os.fdopen(0, "rb", closefd=False)
    request = json.loads(lines.readline())
    folder = Path(request["folder"]).expanduser()
    reaper = GroupReaper(at_end=partial(_remove_half, folder))

    def follow() -> None:
        lines.read()
        # The reaper ends what was started, and removes what is half made.
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    os.umask(0o077)
    try:
        make_private(folder.parent)
        with folder.with_suffix(".lock").open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield {"line": "another head makes it: waiting for its end"}
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / MARKER).is_file():
                try:
                    yield from _make(folder, request, reaper)
                except Exception:
                    # Of no use to another try, and nothing lists it.
                    shutil.rmtree(folder, ignore_errors=True)
                    raise
            if request["wheels"]:
                # Also where another head has made it meanwhile.
                shutil.rmtree(Path(request["wheels"]).expanduser(), ignore_errors=True)
            yield {"made": json.loads((folder / MARKER).read_bytes())}
    except OSError as error:
        yield {"problem": f"no environment is made: {reason_of(error, Path(error.filename or folder))}"}
    except (_Failed, ValueError) as error:
        yield {"problem": f"no environment is made: {error}"}


def _remove_half(folder: Path) -> None:
    """An environment that is not whole, and that no other head is making."""
    for _ in range(_TRIES):
        with contextlib.suppress(OSError), folder.with_suffix(".lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (folder / MARKER).is_file() or not folder.exists():
                return
            shutil.rmtree(folder, ignore_errors=True)
        # What is being killed may still write there.
        time.sleep(_AGAIN_S)


def _make(folder: Path, request: Mapping[str, Any], reaper: GroupReaper) -> Iterator[dict[str, Any]]:
    """Raises OSError, _Failed."""
    shutil.rmtree(folder, ignore_errors=True)
    python, uv, options, environment = str(folder / "bin" / "python"), request["uv"], list[str](), dict(os.environ)
    wheels = Path(request["wheels"]).expanduser() if request["wheels"] else None
    if wheels is not None:
        # Nothing but the wheels counts, whatever the user has set for pip and uv.
        environment = {name: value for name, value in os.environ.items() if not re.match(r"(PIP|UV)_", name)}
        environment |= {"PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1", "UV_OFFLINE": "1"}
        options = ["--no-index", "--find-links", str(wheels)]
    if uv:
        make = [uv, "venv", "--quiet", "--python", request["python"], str(folder)]
        install = [uv, "pip", "install", "--python", python, *options, "-r", "-"]
    else:
        make = [request["python"], "-m", "venv", str(folder)]
        options += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
        install = [python, "-m", "pip", "install", *options, "-r", "/dev/stdin"]
    yield from _printed(make, environment, reaper)
    yield from _printed(install, environment, reaper, "".join(f"{line}\n" for line in request["requirements"]))
    *_, report = _printed([python, "-I", "-c", _LIST, str(folder)], environment, reaper)
    write_atomic(folder / MARKER, report["line"])


def _printed(
    argv: Sequence[str], environment: Mapping[str, str], reaper: GroupReaper, text: str = ""
) -> Iterator[dict[str, Any]]:
    """Run a program, with this text as stdin. Raises OSError, _Failed."""
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        cwd=Path.home(),
        start_new_session=True,
    )
    reaper.set_group(process.pid)
    assert process.stdin is not None and process.stdout is not None
    stdin, last = process.stdin, deque[str](maxlen=_TAIL)

    def feed() -> None:
        with contextlib.suppress(BrokenPipeError), stdin:
            stdin.write(text.encode())

    threading.Thread(target=feed, daemon=True).start()
    for line in process.stdout:
        if words := line.decode(errors="replace").strip():
            last.append(words)
            yield {"line": words}
    code = process.wait()
    reaper.set_group(0)
    if code:
        raise _Failed("; ".join(last) or f"{argv[0]} ended with {code}")
