"""Looks on a host for a python that has mlx and mlx-lm, in one round trip: for `init`, before there is a configuration
that names one."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from engine.config.models import NodeConfig
from engine.errors import HostKeyUnknown, NodeUnreachable
from engine.models import HostKeyOffer
from engine.security.paths import path_fault
from engine.security.sanitise import sanitise
from engine.transport.base import Completed, Transport
from engine.transport.fleet import Fleet

TIME_LIMIT_S = 30.0
_MARK = "flightdeck-init"
_ASK = """
import importlib.metadata, importlib.util, platform
import mlx.core
assert importlib.util.find_spec("mlx_lm")
print(platform.python_version(), *map(importlib.metadata.version, ("mlx", "mlx-lm")))
"""
_PLACES = (
    "mlx/.venv", "mlx/venv", ".venv", "venv", "venvs/*", ".venvs/*", "envs/*", ".virtualenvs/*", "*/.venv", "*/venv",
    ".local/share/uv/tools/mlx-lm", ".local/pipx/venvs/mlx-lm", "miniforge3", "miniforge3/envs/*", "miniconda3",
    "miniconda3/envs/*", "anaconda3/envs/*", ".pyenv/versions/*", "mambaforge/envs/*",
)  # fmt: skip
"""Below the home, each with bin/python; the first that will do is taken."""
_SYSTEM = ("/opt/homebrew/bin/python3", "/usr/local/bin/python3", "/opt/mlx/bin/python", "/opt/*/bin/python")
_SCRIPT = f"""
say() {{ printf '{_MARK}\\t%s\\t%s\\n' "$1" "$2"; }}
ask=$1; shift
say home "$HOME"; say system "$(uname -s)"; say hostname "$(hostname 2>/dev/null || uname -n)"
try() {{
  [ -x "$1" ] && [ ! -d "$1" ] || return 0
  case "$1" in
    # Apple's stub opens a window that offers the developer tools where they are missing.
    /usr/bin/*) [ "$(uname -s)" != Darwin ] || xcode-select -p >/dev/null 2>&1 || return 0 ;;
  esac
  if told=$("$1" -c "$ask" </dev/null 2>/dev/null); then say python "$1"; say versions "$told"; exit 0; fi
  say without "$1"
}}
for python in "$@" {" ".join(f'"$HOME"/{place}/bin/python' for place in _PLACES)} {" ".join(_SYSTEM)}; do
  try "$python"
done
for name in python3 python; do
  if python=$(command -v "$name"); then try "$python"; fi
done
exit 0
"""


@dataclass(frozen=True)
class FoundPython:
    """What a host said."""

    python: str | None = None
    """`~/…` where it lies in the home."""
    about: str = ""
    """Versions and system, one line."""
    hostname: str | None = None
    problem: str = ""
    """Why there is none, one line."""
    todo: str = ""
    host_key: HostKeyOffer | None = None
    """The key to accept, when that is the problem."""


async def find_python(transport: Transport, *, time_limit_s: float = TIME_LIMIT_S) -> FoundPython:
    """Never raises for a host that cannot answer: `problem` then says why."""
    # On this machine the python that runs us has mlx, as a dependency.
    first = [sys.executable] if transport.target.local else []
    try:
        done = await transport.run(["/bin/sh", "-c", _SCRIPT, "sh", _ASK, *first], timeout_s=time_limit_s)
    except HostKeyUnknown as unknown:
        offer = HostKeyOffer(target=unknown.target, key=unknown.key, fingerprint=unknown.fingerprint)
        return FoundPython(problem=_line(unknown.what), todo=_line(unknown.todo), host_key=offer)
    except NodeUnreachable as away:
        return FoundPython(problem=_line(away.what + (f": {away.why}" if away.why else "")), todo=_line(away.todo))
    except OSError as broken:
        return FoundPython(problem=_line(broken.strerror or str(broken)))
    if done.code is None:
        return FoundPython(problem=f"no answer within {time_limit_s:g} s")
    return read_answer(done)


async def find_pythons(hosts: Sequence[str], home: Path) -> list[FoundPython]:
    """`find_python` on all of them at once, in their order. `home` is the state directory, with its known_hosts.
    Raises InputError for what is no host."""
    nodes = tuple(
        NodeConfig(name=f"node{number}", ssh=host, python="python3", workdir="~") for number, host in enumerate(hosts)
    )
    async with Fleet(nodes, home) as fleet, asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(find_python(fleet.to(node))) for node in nodes]
    return [task.result() for task in asked]


def read_answer(done: Completed) -> FoundPython:
    """What the script printed, with whatever a shell's start files printed around it."""
    said: dict[str, str] = {}
    without: list[str] = []
    for line in done.stdout.decode(errors="replace").splitlines():
        mark, _, rest = line.partition("\t")
        key, _, value = rest.partition("\t")
        if mark == _MARK and key == "without":
            without.append(value)
        elif mark == _MARK:
            said[key] = value
    hostname = said.get("hostname")
    python = _usable(said.get("python"), said.get("home"))
    if python is not None:
        versions = said.get("versions", "").split()
        names = ("python", "mlx", "mlx-lm")
        told = [f"{name} {version}" for name, version in zip(names, versions, strict=False)]
        return FoundPython(python, _line(", ".join(told)), hostname)
    if "home" not in said:
        words = _line(done.last_words)
        return FoundPython(problem=f"its shell ended with {done.code}" + (f": {words}" if words else ""))
    problem = "no python with mlx and mlx-lm was found there"
    if without:
        problem += f" ({_line(without[0])} has none)"
    return FoundPython(hostname=hostname, problem=problem, todo="docs/two-macs.md, step 2, or set `python` yourself")


def _usable(python: str | None, home: str | None) -> str | None:
    """The path as a configuration takes it."""
    if python is None or path_fault(python) is not None or not python.startswith("/"):
        return None
    if home and home != "/" and PurePosixPath(python).is_relative_to(home):
        return f"~/{PurePosixPath(python).relative_to(home)}"
    return python


def _line(text: str) -> str:
    return sanitise(text.encode(errors="replace"), 160)
