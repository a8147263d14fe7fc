"""Gather, on a machine with a network, the wheels that a GPU machine lacks; see `wheels`.

What Flight Deck needs is read from uv.lock, for the GPU machine's Python; mlx's CUDA build from mlx's own metadata.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from email.parser import HeaderParser
from pathlib import Path
from typing import Any, Final

from packaging.markers import Marker, default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.gpu.part import ROOT

PYTHON: Final = "3.12"
_GLIBC: Final = range(35, 4, -1)
"""manylinux_2_N: the newest glibc that MLX's CUDA wheels need."""
_TARGET: Final = {
    **{name: str(value) for name, value in default_environment().items()},
    "python_version": PYTHON,
    "python_full_version": f"{PYTHON}.0",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "os_name": "posix",
}


def read_names(file: Path) -> list[str]:
    """The packages of a pip list, a pip freeze or plain names, one a line; * stands for any characters."""
    lines = [line.split("#")[0].split() for line in file.read_text(encoding="utf-8").splitlines()]
    names = [re.split(r"[=<>@\[]", words[0])[0] for words in lines if words and not words[0].startswith("-")]
    return [canonicalize_name(name) if "*" not in name else name.lower() for name in names]


def has(name: str, have: Iterable[str]) -> bool:
    return any(re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name) for pattern in have)


def locked_requirements(lock: Path, root: str, have: Sequence[str]) -> dict[str, str]:
    """Name -> version of what `root` needs on the GPU machine, without what is there already, whose own needs are there
    as well, and without MLX's build, an extra of mlx. Raises KeyError for a name that the lock lacks."""
    packages: dict[str, list[dict[str, Any]]] = {}
    for package in tomllib.loads(lock.read_text(encoding="utf-8"))["package"]:
        packages.setdefault(package["name"], []).append(package)
    needed: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(root, "")]
    while waiting:
        name, extra = waiting.pop()
        package = _fork(packages[name])
        needs = package.get("optional-dependencies", {}).get(extra, ()) if extra else package.get("dependencies", ())
        for dependency in needs:
            name, extras = dependency["name"], dependency.get("extra", ()) if dependency["name"] != "mlx" else ()
            if not has(name, have) and _applies(dependency.get("marker", "")):
                needed[name] = _fork(packages[name])["version"]
                new = {(name, ""), *((name, extra) for extra in extras)} - seen
                seen |= new
                waiting += new
    return needed


def _fork(packages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The entry of a package that is for the GPU machine's Python, where there are several."""
    fitting = [each for each in packages if any(map(_applies, each.get("resolution-markers", [""])))]
    return (fitting or list(packages))[0]


def _applies(marker: str, extra: str = "") -> bool:
    return not marker or Marker(marker).evaluate({**_TARGET, "extra": extra})


def requirements_of(wheel: Path, extra: str = "") -> list[Requirement]:
    """What a wheel's metadata says that it needs on the GPU machine; with an extra, what that adds."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    required = [Requirement(text) for text in metadata.get_all("Requires-Dist") or ()]
    added = [each for each in required if each.marker is None or _applies(str(each.marker), extra)]
    return [each for each in added if not extra or (each.marker and not _applies(str(each.marker)))]


def download(requirements: Sequence[str], folder: Path) -> list[Path]:
    """The wheels of these, without their needs, with pip. Raises RuntimeError with what pip says."""
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [f"manylinux_2_{number}_x86_64" for number in _GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    argv = [
        *_pip(),
        *("download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder)),
        *("--python-version", PYTHON, "--implementation", "cp"),
        *(word for platform in platforms for word in ("--platform", platform)),
    ]
    before = set(folder.iterdir())
    done = subprocess.run([*argv, *requirements], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"pip download of {' '.join(requirements)}: {done.stderr.strip()[-2000:]}")
    return sorted(set(folder.iterdir()) - before)


def _pip() -> list[str]:
    """uv has no download; environments that it makes have no pip."""
    for argv in ([sys.executable, "-m", "pip"], ["uvx", "pip"], ["python3", "-m", "pip"]):
        if (
            shutil.which(argv[0])
            and not subprocess.run([*argv, "--version"], capture_output=True, check=False).returncode
        ):
            return argv
    raise RuntimeError("there is no pip here: pip install pip, or uv")


def gather(folder: Path, have: Sequence[str], mlx: str) -> Iterator[Path]:
    """Download into `folder` what a machine lacks that has `have`, with MLX's build of the extra `mlx`; yields the
    wheels. What that build needs beyond `have` is printed by name: NVIDIA's libraries are too big to bring."""
    lock = ROOT / "uv.lock"
    if not lock.exists():
        subprocess.run(["uv", "lock", "--quiet"], cwd=ROOT, check=True)
    needed = locked_requirements(lock, "mlx-flightdeck", have)
    yield from (wheels := download([f"{name}=={version}" for name, version in sorted(needed.items())], folder))
    backend = [each for wheel in wheels if wheel.name.startswith("mlx-") for each in requirements_of(wheel, mlx)]
    for requirement in backend:
        (wheel,) = download([f"{requirement.name}{requirement.specifier}"], folder)
        yield wheel
        for other in requirements_of(wheel):
            if not has(canonicalize_name(other.name), have):
                print(f"{wheel.name} needs {other}, which must be on the machine, or be brought by hand", flush=True)
