"""The `environment` probe, which makes a python environment below the node root, and `environments`, which lists them
and removes one. What it needs comes by stdin: neither a requirement nor an index is in any process's arguments."""

from __future__ import annotations

import configparser
import contextlib
import fcntl
import hashlib
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from engine.node.bootstrap import make_private
from engine.node.probes import nearest, reason_of
from engine.protocol.attempt import write_atomic

FOLDER = "environments"
"""Below the node root."""
MARKER = "flightdeck.json"
"""In an environment, written last: one without it is not finished."""
ACK_BYTES = 1 << 18
"""After so many of wheels the head is informed."""
_ID = re.compile(r"[0-9a-f]{16}")
_WHEEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,200}\.whl")
_REACH_S = 5.0
_SHOW_LIFE_S = 10.0
_SILENT_S = 1800.0
"""Without a line of output: a large package on a slow disk, or a slow network, takes its time."""
_TAIL = 5
_PYPI = "https://pypi.org/simple"
_PIP_FILES = (
    "/etc/pip.conf", "~/.pip/pip.conf", "~/.config/pip/pip.conf", "~/Library/Application Support/pip/pip.conf",
)  # fmt: skip
"""As pip reads them, the last one counts most."""
_PACKAGES = (
    "import importlib.metadata as m, json; "
    "print(json.dumps({d.metadata['Name']: d.version for d in m.distributions()}))"
)


class NotMadeError(Exception):
    """Why, for people."""


def probe_environments(root: str, remove: str = "") -> dict[str, Any]:
    """The finished environments, the room beside them, and whether the package index can be reached. With `remove`, the
    one of this id is removed first."""
    folder, problem = Path(root) / FOLDER, None
    if remove:
        try:
            with _lock(folder, remove):
                shutil.rmtree(folder / _checked(_ID, remove))
        except FileNotFoundError:
            problem = "it is not there"
        except BlockingIOError:
            problem = "it is being made"
        except (OSError, NotMadeError) as error:
            problem = reason_of(error, folder) if isinstance(error, OSError) else str(error)
    listed = [marker for path in sorted(folder.glob(f"*/{MARKER}")) if (marker := _marker(path)) is not None]
    free = shutil.disk_usage(nearest(folder)).free
    return {"environments": listed, "free_bytes": free, "online": _is_online(), "problem": problem}


def probe_environment(root: str) -> Iterator[dict[str, Any]]:
    """Make the environment of the JSON line on stdin: its `id`, `python`, `uv` (or null), `requirements`, `shown` (the
    same without secrets) and `wheels`, or null to take them from the index. The answer is a line for each thing that
    happens: the wheels that it `lacks`, whose bytes then come on stdin in that order, how much was `received`, `text`
    for people, and `made` or a `problem` as the last one. The end of stdin ends all that it has started."""
    os.umask(0o077)
    folder = Path(root) / FOLDER
    with os.fdopen(0, "rb", closefd=False) as source:
        try:
            request = json.loads(source.readline())
            name = _checked(_ID, request["id"])
            target, wheels = folder / name, folder / f"{name}.wheels"
            make_private(folder)
            with contextlib.ExitStack() as stack:
                yield from _enter_lock(stack, folder, name)
                if (marker := _marker(target / MARKER)) is None:
                    if request["wheels"] is not None:
                        yield from _receive(source, wheels, request["wheels"])
                    marker = yield from _make(target, wheels if request["wheels"] is not None else None, request)
                shutil.rmtree(wheels, ignore_errors=True)
                yield {"made": marker}
        except OSError as error:
            yield {"problem": reason_of(error, Path(error.filename or folder))}
        except (NotMadeError, subprocess.SubprocessError) as error:
            yield {"problem": str(error)}


def _checked(form: re.Pattern[str], text: str) -> str:
    if form.fullmatch(text) is None:
        raise NotMadeError(f"{text[:80]!r} is no name of an environment or a wheel")
    return text


@contextlib.contextmanager
def _lock(folder: Path, name: str) -> Iterator[None]:
    """Raises BlockingIOError while another process makes it."""
    descriptor = os.open(folder / f"{_checked(_ID, name)}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _enter_lock(stack: contextlib.ExitStack, folder: Path, name: str) -> Iterator[dict[str, Any]]:
    while True:
        try:
            stack.enter_context(_lock(folder, name))
        except BlockingIOError:
            yield {"text": "another flightdeck is making it: waiting"}
            # Readable only by its end: nothing else is sent before it is asked for.
            if select.select([0], [], [], _SHOW_LIFE_S)[0]:
                raise NotMadeError("the head is gone") from None
        else:
            return


def _marker(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        marker = json.loads(path.read_text())
        if isinstance(marker, dict) and marker.get("id") == path.parent.name:
            return marker
    return None


def _receive(source: BinaryIO, folder: Path, wheels: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Have all the wheels in the folder and no other; those that an earlier try has left are not asked for."""
    folder.mkdir(exist_ok=True)
    names = {_checked(_WHEEL, wheel["name"]) for wheel in wheels}
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()
    lacking = [wheel for wheel in wheels if _sha256(folder / wheel["name"]) != wheel["sha256"]]
    yield {"lacks": [wheel["name"] for wheel in lacking]}
    received = 0
    for wheel in lacking:
        path, left, digest = folder / wheel["name"], wheel["bytes"], hashlib.sha256()
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            while left:
                block = source.read(min(ACK_BYTES, left))
                if not block:
                    raise NotMadeError("the head is gone")
                file.write(block)
                digest.update(block)
                left, received = left - len(block), received + len(block)
                yield {"received": received}
        if digest.hexdigest() != wheel["sha256"]:
            raise NotMadeError(f"{path.name} did not arrive as it was sent")
        part.replace(path)


def _sha256(path: Path) -> str | None:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(ACK_BYTES):
                digest.update(block)
    except FileNotFoundError:
        return None
    return digest.hexdigest()


def _make(
    target: Path, wheels: Path | None, request: dict[str, Any]
) -> Generator[dict[str, Any], None, dict[str, Any]]:
    """Anew, whatever an earlier try has left. The value is its marker."""
    shutil.rmtree(target, ignore_errors=True)
    uv, python = request["uv"], str(target / "bin" / "python")
    environment = _environment(offline=wheels is not None)
    make = [uv, "venv", "--quiet", "--python", request["python"]] if uv else [request["python"], "-m", "venv"]
    yield {"text": f"makes {target.name} with {'uv' if uv else 'venv'}"}
    yield from _run([*make, str(target)], environment)
    listed = target / "requirements.txt"
    write_atomic(listed, "\n".join(request["requirements"]) + "\n")
    quiet = ["-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    install = [uv, "pip", "install", "--python", python] if uv else [python, *quiet]
    if wheels is not None:
        install += ["--no-index", "--find-links", str(wheels)]
    try:
        yield from _run([*install, "-r", str(listed)], environment)
    finally:
        # It may hold the password of an index.
        listed.unlink()
    packages = subprocess.run(
        [python, "-I", "-c", _PACKAGES], capture_output=True, check=True, timeout=_SILENT_S
    ).stdout
    size = sum(path.lstat().st_size for path in target.rglob("*"))
    marker = {"id": target.name, "requirements": request["shown"], "made_at": time.time(), "bytes": size}
    marker["packages"] = json.loads(packages)
    write_atomic(target / MARKER, json.dumps(marker))
    return marker


def _environment(*, offline: bool) -> dict[str, str]:
    """Without what the user has set for pip and uv where nothing but the wheels counts. uv reads no pip.conf: an index
    that is set there alone is uv's too."""
    if offline:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
        return {**kept, "PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1", "UV_OFFLINE": "1"}
    index = _index()
    return {"UV_DEFAULT_INDEX": index, **os.environ} if index != _PYPI else dict(os.environ)


def _run(argv: list[str], environment: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Its output as `text`. It ends with our stdin. Raises NotMadeError."""
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment,
        start_new_session=True, cwd=Path.home(),
    )  # fmt: skip
    assert process.stdout is not None
    pipe, pending, lines, spoke_at = process.stdout.fileno(), b"", list[str](), time.monotonic()
    try:
        while True:
            ready = select.select([pipe, 0], [], [], _SHOW_LIFE_S)[0]
            if 0 in ready:
                raise NotMadeError("the head is gone")
            if not ready:
                if time.monotonic() - spoke_at > _SILENT_S:
                    raise NotMadeError(f"{Path(argv[0]).name} printed nothing for {_SILENT_S:g} s")
                yield {}
                continue
            spoke_at = time.monotonic()
            block = os.read(pipe, 1 << 16)
            *ended, pending = (pending + block).split(b"\n") if block else (pending, b"")
            for line in ended:
                if text := line.decode(errors="replace").strip():
                    lines = [*lines, text][-_TAIL:]
                    yield {"text": text}
            if not block:
                break
        if code := process.wait():
            raise NotMadeError("; ".join(lines) or f"{Path(argv[0]).name} ended with {code}")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()


def _index() -> str:
    """The package index of the user's pip or uv."""
    parser = configparser.RawConfigParser(strict=False)
    with contextlib.suppress(configparser.Error, UnicodeError):
        parser.read([Path(path).expanduser() for path in _PIP_FILES])
    index: str = parser.get("global", "index-url", fallback=_PYPI)
    named = (os.environ.get(name) for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"))
    return next(filter(None, named), index)


def _is_online() -> bool:
    """The index answers; one behind a proxy is taken to."""
    url = urlsplit(_index())
    if url.scheme == "file" or os.environ.get(f"{url.scheme}_proxy") or os.environ.get(f"{url.scheme}_proxy".upper()):
        return True
    try:
        socket.create_connection(
            (url.hostname or "", url.port or (80 if url.scheme == "http" else 443)), _REACH_S
        ).close()
    except (OSError, ValueError):
        return False
    return True
