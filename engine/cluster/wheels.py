"""The packages of an environment: those of this machine with their exact versions, and their wheels for a node that
reaches no package index."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from engine.cluster.transport.local import LocalTransport
from engine.config.documents import read_text
from engine.config.formats import requirement_form, resolved
from engine.config.models import EnvironmentConfig
from engine.errors import InputError, LaunchError
from engine.node.bootstrap import make_private
from engine.protocol.attempt import write_atomic
from engine.security.redact import redact

_LIMIT_S = 7200.0
_GLIBC = 17
"""The minor version of glibc of manylinux2014, the oldest that wheels are made for by now."""
_NO_SETTINGS = {"PIP_CONFIG_FILE": "/dev/null", "PIP_FIND_LINKS": "", "PIP_NO_INDEX": "1"}


@dataclass(frozen=True)
class Wheel:
    path: Path
    bytes: int
    sha256: str

    @property
    def name(self) -> str:
        return self.path.name


def installed_here(markers: Mapping[str, str]) -> list[str]:
    """mlx and mlx-lm as this machine has them, and all that they need on a python with these markers, as requirements
    with exact versions. One that is not installed here (mlx-metal, on Linux) is as its dependant requires it."""
    linux = markers.get("sys_platform") == "linux"
    waiting = [Requirement("mlx-lm"), Requirement("mlx[cpu]" if linux else "mlx")]
    pins, done = dict[str, str](), set[str]()
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if (key := f"{name} {sorted(wanted.extras)}") in done:
            continue
        done.add(key)
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            pins.setdefault(name, str(wanted))
            continue
        pins[name] = f"{name}=={package.version}"
        for inner in map(Requirement, package.requires or ()):
            marker, inner.marker = inner.marker, None
            extras = ("", *wanted.extras)
            if marker is None or any(marker.evaluate({**markers, "extra": extra}) for extra in extras):
                waiting.append(inner)
    return sorted(pins.values())


def given_requirements(environment: EnvironmentConfig, folder: Path) -> list[str] | None:
    """The lines of [environment] requirements; None without any. `folder`: the configuration's. Raises InputError for
    one that is none, ConfigError for a file that cannot be read."""
    given = environment.requirements
    if isinstance(given, str):
        text = read_text(Path(resolved(given, folder)), "a requirements file").replace("\\\n", " ")
        given = tuple(line for line in (re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines()) if line)
    for line in given or ():
        try:
            fault = requirement_form(line)
            if not line.startswith("-"):
                Requirement(line.partition(" --hash")[0])
        except InvalidRequirement as error:
            fault = str(error).partition("\n")[0]
        if fault:
            shown = redact(line)[:80]
            raise InputError(f"{shown!r} is no requirement", where="[environment]", why=fault)
    return list(given) if given is not None else None


@dataclass(frozen=True)
class WheelTarget:
    """The wheels of one environment on one platform."""

    key: str
    """The same for the same wheels on another day."""
    platforms: Sequence[str]
    minor: str
    """The Python, such as "3.12"."""
    requirements: Sequence[str]


class WheelCache:
    """Wheels on this machine, those of a target in a folder of its own, and had once for all nodes that need them."""

    def __init__(self, folder: Path, source: Path | None, *, pinned: bool) -> None:
        """`source`: a folder that has them; else they come by pip from this machine's index. `pinned`: requirements
        name every package that is needed."""
        self._folder, self._source, self._pinned = folder, source, pinned
        self._under_way: dict[str, asyncio.Task[list[Wheel]]] = {}

    def get(self, target: WheelTarget, on_line: Callable[[str], None]) -> asyncio.Task[list[Wheel]]:
        """Its result raises LaunchError, OSError."""
        if target.key not in self._under_way:
            self._under_way[target.key] = asyncio.create_task(self._get(target, on_line))
        return self._under_way[target.key]

    async def _get(self, target: WheelTarget, on_line: Callable[[str], None]) -> list[Wheel]:
        folder = self._folder / target.key
        if self._source is not None or not folder.is_dir():
            part = self._folder / f".{target.key}.part"
            await asyncio.to_thread(shutil.rmtree, part, ignore_errors=True)
            await asyncio.to_thread(make_private, part)
            await self._download(target, part, on_line)
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            part.replace(folder)
        return await asyncio.to_thread(lambda: [_wheel(path) for path in sorted(folder.glob("*.whl"))])

    async def _download(self, target: WheelTarget, part: Path, on_line: Callable[[str], None]) -> None:
        listed = part / "requirements.txt"
        write_atomic(listed, "\n".join(target.requirements) + "\n")
        argv = [*await self._pip(), "download", "--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
        argv += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", target.minor]
        argv += ["--dest", str(part), "-r", str(listed), *(f"--platform={platform}" for platform in target.platforms)]
        argv += ["--no-deps"] * self._pinned
        if self._source is not None:
            argv += ["--no-index", "--find-links", str(self._source)]
        environment = _NO_SETTINGS if self._source is not None else {}
        try:
            done = await LocalTransport().run(argv, timeout_s=_LIMIT_S, environment=environment, on_line=on_line)
        finally:
            # It may hold the password of an index.
            listed.unlink()
        if done.code != 0:
            why = redact(done.exit_output) if done.code is not None else f"{_LIMIT_S:g} s are over"
            todo = "name a folder that has them all as `wheels` of [environment]"
            raise LaunchError("this machine cannot get the wheels", where=str(self._source or ""), why=why, todo=todo)

    async def _pip(self) -> list[str]:
        """That of this python; where it has none, as in an environment of uv's, one in an environment of its own."""
        private = self._folder / "pip"
        for python in (sys.executable, f"{sys.base_prefix}/bin/python3", str(private / "bin" / "python")):
            argv = [python, "-m", "pip"]
            if Path(python).exists() and not (await LocalTransport().run([*argv, "--version"], timeout_s=60)).code:
                return argv
        done = await LocalTransport().run([sys.executable, "-m", "venv", "--clear", str(private)], timeout_s=300)
        if done.code != 0:
            todo = f"install pip into the environment of {sys.executable}"
            raise LaunchError("this machine has no pip", where=str(private), why=done.exit_output, todo=todo)
        return argv


def _wheel(path: Path) -> Wheel:
    with path.open("rb") as file:
        return Wheel(path, path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def wheel_platforms(tag: str, libc: str, mac: str) -> list[str]:
    """The platforms whose wheels run on it, as pip names them, the best first: `tag` is sysconfig.get_platform()."""
    system, _, machine = tag.rpartition("-")
    machine = machine.replace("-", "_")
    if system.startswith("macosx"):
        return [f"macosx_{mac.partition('.')[0] or 11}_0_{machine}"]
    if not libc:
        return [f"musllinux_1_2_{machine}", f"musllinux_1_1_{machine}"]
    newest = int(libc[2:]) if libc[2:].isdigit() else _GLIBC
    return [f"manylinux_2_{minor}_{machine}" for minor in range(newest, _GLIBC - 1, -1)] + [f"manylinux2014_{machine}"]
