"""The packages of an environment: those of this machine with their exact versions, and their wheels for a node that
reaches no package index."""

from __future__ import annotations

import asyncio
import fcntl
import filecmp
import importlib.metadata
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from engine.cluster.environments import BasePython, EnvironmentPlan
from engine.cluster.transport.local import LocalTransport
from engine.config.documents import read_text
from engine.config.formats import requirements_form, resolved
from engine.config.models import Config
from engine.errors import InputError, LaunchError
from engine.node.bootstrap import make_private
from engine.protocol.attempt import write_atomic
from engine.security.redact import redact

_DOWNLOAD_LIMIT_S = 7200.0
_LOCK_AGAIN_S = 1.0
_FROM_FILE = 'exec <"$1" && rm -f "$1" && shift && exec "$@"'
"""A program with a file as its stdin, which is gone before it begins: it may hold the password of an index."""
_OLDEST_GLIBC = 17
"""The minor version of manylinux2014's, the oldest that wheels are made for by now."""


def installed_here(markers: Mapping[str, str]) -> list[str]:
    """mlx and mlx-lm as this machine has them, and all that they need on a python with these markers, as requirements
    with exact versions. One that is not installed here (mlx-metal, on Linux) is as its dependant requires it."""
    waiting = [Requirement("mlx-lm"), Requirement("mlx[cpu]" if markers["sys_platform"] == "linux" else "mlx")]
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
            if marker is None or any(marker.evaluate({**markers, "extra": extra}) for extra in ("", *wanted.extras)):
                waiting.append(inner)
    return sorted(pins.values())


def given_requirements(config: Config) -> list[str] | None:
    """The lines of [environment] requirements; None without any. Raises InputError for one that is none, ConfigError
    for a file that cannot be read."""
    given = config.environment.requirements
    if isinstance(given, str):
        text = read_text(Path(resolved(given, config.folder)), "a requirements file").replace("\\\n", " ")
        given = tuple(line for line in (re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines()) if line)
        if fault := requirements_form(given):
            raise InputError("the requirements file cannot be used", where="[environment]", why=redact(fault))
    return list(given) if given is not None else None


def wheels_name(plan: EnvironmentPlan) -> str:
    """Environments with the same one have the same wheels."""
    assert plan.base is not None
    return f"{plan.id}-{wheel_platforms(plan.base)[0]}"


async def fetch_wheels(config: Config, plan: EnvironmentPlan, cache: Path, on_line: Callable[[str], None]) -> Path:
    """The folder with all wheels that the plan needs: kept in `cache` from an earlier time, else from [environment]
    wheels, or by this machine's pip from its index. Raises LaunchError, OSError."""
    folder, source = cache / wheels_name(plan), config.environment.wheels
    part = folder.with_suffix(".part")
    make_private(cache)
    with folder.with_suffix(".lock").open("ab") as lock:
        await _locked(lock, on_line)
        if source is None and folder.is_dir():
            return folder
        await asyncio.to_thread(shutil.rmtree, part, ignore_errors=True)
        make_private(part)
        await _download(config, plan, part, on_line)
        # Another process may be sending the same.
        same = await asyncio.to_thread(_is_same, part, folder)
        await asyncio.to_thread(shutil.rmtree, part if same else folder, ignore_errors=True)
        if not same:
            part.replace(folder)
        return folder


async def _locked(lock: BinaryIO, on_line: Callable[[str], None]) -> None:
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_line("the wheels are being loaded for another: waiting")
            await asyncio.sleep(_LOCK_AGAIN_S)


def _is_same(part: Path, folder: Path) -> bool:
    if not folder.is_dir():
        return False
    names, there = (sorted(file.name for file in one.iterdir()) for one in (part, folder))
    return names == there and filecmp.cmpfiles(part, folder, names)[0] == names


async def _download(config: Config, plan: EnvironmentPlan, part: Path, on_line: Callable[[str], None]) -> None:
    assert plan.base is not None
    source, listed = config.environment.wheels, part.with_suffix(".txt")
    argv = [*await _pip(), "download", "--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    argv += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", plan.base.minor]
    argv += [*(f"--platform={one}" for one in wheel_platforms(plan.base)), "--dest", str(part), "-r", "/dev/stdin"]
    if config.environment.requirements is None:
        # They name all: pip would ask for what packages need on this machine.
        argv.append("--no-deps")
    if source is not None:
        argv += ["--no-index", "--find-links", resolved(source, config.folder)]
    settings = {"PIP_CONFIG_FILE": "/dev/null", "PIP_FIND_LINKS": ""} if source is not None else {}
    write_atomic(listed, "\n".join(plan.requirements) + "\n")
    argv = ["/bin/sh", "-c", _FROM_FILE, "sh", str(listed), *argv]
    try:
        done = await LocalTransport().run(argv, timeout_s=_DOWNLOAD_LIMIT_S, environment=settings, on_line=on_line)
    finally:
        listed.unlink(missing_ok=True)
    if done.code != 0:
        why = redact(done.exit_output) if done.code is not None else f"{_DOWNLOAD_LIMIT_S:g} s are over"
        todo = "name a folder that has them all as `wheels` of [environment]"
        raise LaunchError("this machine cannot get the wheels", where=source or "", why=why, todo=todo)


async def _pip() -> list[str]:
    """That of this python, or of the one that its environment is made of, as uv's have none. Raises LaunchError."""
    for python in (sys.executable, f"{sys.base_prefix}/bin/python3"):
        argv = [python, "-m", "pip"]
        if Path(python).exists() and (await LocalTransport().run([*argv, "--version"], timeout_s=60)).code == 0:
            return argv
    raise LaunchError("this machine has no pip to load wheels with", where=sys.executable, todo="install pip there")


def wheel_platforms(base: BasePython) -> list[str]:
    """The platforms whose wheels run on it, as pip names them, the best first."""
    if base.system == "darwin":
        return [f"macosx_{base.release.partition('.')[0]}_0_{base.machine}"]
    newest = int(base.release[2:]) if base.release[2:].isdigit() else _OLDEST_GLIBC
    return [f"manylinux_2_{minor}_{base.machine}" for minor in range(newest, _OLDEST_GLIBC - 1, -1)] + [
        f"manylinux2014_{base.machine}"
    ]
