"""engine.node.agent begins here: `python -I -S -c TEXT SHA256 [ROOT]`, with the node's own python (any from 3.9) and
the standard library. (`ps` shows this text for as long as the agent lives.)

It makes the node root and verifies the bundle of that hash: nothing that was staged earlier vouches for itself. It
prints one line of JSON, in which `missing` asks for the bundle; that comes over stdin, and a second line tells whether
it could be written. Then this process becomes the agent: from the bundle, or from memory where the disk takes none."""

from __future__ import annotations

import contextlib
import errno
import grp
import hashlib
import importlib.machinery
import json
import os
import pwd
import shlex
import shutil
import stat
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

PACKAGE = "engine"
SHIPPED = ("node", "protocol", "training", "trainer", "torch_trainer")
"""The subpackages that a node gets; the rest of `engine` stays on the head."""
ROOT = ".flightdeck"
"""The node root, below the home of the node's user."""
AGENT = "engine.node.agent"


def node_root() -> Path:
    """Where this machine keeps its files as a *node* (bundles, runs, data): below FLIGHTDECK_HOME when that is set, so
    that a test or a second instance shares nothing; else ~/.flightdeck."""
    configured = os.environ.get("FLIGHTDECK_HOME")
    return Path(configured).expanduser().absolute() / "node" if configured else Path.home() / ROOT


def read_package(package: Path) -> dict[str, bytes]:
    """The files of `engine` that a node gets, by their names in it."""
    shipped = [path for name in SHIPPED for path in (package / name).rglob("*.py")]
    files = [path for path in [package / "__init__.py", *shipped] if path.is_file()]
    return {path.relative_to(package).as_posix(): path.read_bytes() for path in files}


def hash_files(files: Mapping[str, bytes]) -> str:
    """SHA-256 over names and contents."""
    digest = hashlib.sha256()
    for path, content in sorted(files.items()):
        name = path.encode()
        # Lengths keep "a" + "bc" and "ab" + "c" apart.
        digest.update(b"%d %d\n" % (len(name), len(content)) + name + content)
    return digest.hexdigest()


def bundle_hash(package: Path) -> str:
    return hash_files(read_package(package))


def make_private(directory: Path) -> None:
    """Make the directory, and what is missing above it, for its owner alone. Raises OSError, also where `access_fault`
    finds one."""
    for folder in reversed((directory, *directory.parents)):
        folder.mkdir(mode=0o700, exist_ok=True)
    if fault := access_fault(directory):
        raise PermissionError(errno.EACCES, fault, str(directory))
    if directory.stat().st_mode & 0o077:
        directory.chmod(0o700)


def access_fault(path: Path) -> str:
    """How another user than root could change what lies at `path`, with the command that ends it; "" where nobody can.
    As sshd's StrictModes (sshd_config(5)): the path and each folder above belong to this user or root, and nobody else
    may write there, but for entries of their own in a sticky one such as /tmp. Raises OSError."""
    whole, real = path.absolute(), Path(os.path.realpath(path))
    # With the folders of a link on the way: who can replace the link decides where it leads.
    for place in dict.fromkeys((whole, *whole.parents, real, *real.parents)):
        try:
            status = place.lstat()
        except FileNotFoundError:
            continue
        if status.st_uid not in (0, os.geteuid()):
            return f"{place} belongs to another user"
        writable = status.st_mode & (stat.S_IWOTH if _is_own_group(status.st_gid) else stat.S_IWOTH | stat.S_IWGRP)
        sticky = status.st_mode & stat.S_ISVTX and place not in (whole, real)
        if writable and not sticky and not stat.S_ISLNK(status.st_mode):
            return f"other users can write there: chmod go-w {shlex.quote(str(place))}"
    return ""


def _is_own_group(group: int) -> bool:
    """The group has the user's name and no other member: many Linux systems let it write by default (umask 002)."""
    with contextlib.suppress(KeyError):
        user, entry = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
        return os.geteuid() != 0 and entry.gr_name == user and set(entry.gr_mem) <= {user}
    return False


def is_whole(bundle: Path) -> bool:
    """The bundle exists with the hash that is its name. Raises OSError."""
    return (bundle / PACKAGE).is_dir() and bundle_hash(bundle / PACKAGE) == bundle.name


def install(bundle: Path, files: Mapping[str, str]) -> None:
    """Write the bundle, all of it or nothing. Raises OSError, also when the files have another hash than its name."""
    partial = bundle.with_name(f".{bundle.name[:12]}-{os.urandom(4).hex()}.partial")
    damaged = partial.with_suffix(".damaged")
    try:
        for name, text in files.items():
            path = partial / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
        if bundle_hash(partial / PACKAGE) != bundle.name:
            raise OSError(0, "what arrived is not what was sent", str(bundle))
        if os.path.lexists(bundle) and not is_whole(bundle):
            # Not before there is another one to take its place: a running attempt may import from it.
            with contextlib.suppress(FileNotFoundError):
                bundle.rename(damaged)
        try:
            partial.rename(bundle)
        except OSError:
            # Somebody else has staged the same meanwhile.
            if not is_whole(bundle):
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if damaged.is_dir() and not damaged.is_symlink():
            shutil.rmtree(damaged, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                damaged.unlink()


def prepare_root(root: Path, expected: str) -> dict[str, Any]:
    """Contents of the first line: `missing`, and the `problem` with the `path` of the node root, if any."""
    try:
        make_private(root)
        make_private(root / "bundles")
        return {"missing": not is_whole(root / "bundles" / expected)}
    except OSError as error:
        return {"missing": True, **_problem(error, root)}


def main(expected: str, root: Path) -> None:
    bundle = root / "bundles" / expected
    prepared = prepare_root(root, expected)
    _report({"home": str(Path("~").expanduser()), **prepared})
    if prepared["missing"]:
        files = json.loads(zlib.decompress(_receive()))
        problem = prepared if "problem" in prepared else {}
        try:
            if not problem:
                install(bundle, files)
        except OSError as error:
            problem = _problem(error, bundle)
        _report({"staged": not problem, **problem})
        if problem:
            sys.meta_path.insert(0, MemoryImporter(files))
            _become_agent([])
    os.chdir(bundle)
    _become_agent([str(bundle)])


def _problem(error: OSError, path: Path) -> dict[str, Any]:
    """Includes the free space: a full disk is not always named as such."""
    free_bytes = None
    with contextlib.suppress(OSError):
        free_bytes = shutil.disk_usage(next(folder for folder in path.parents if folder.is_dir())).free
    return {"problem": error.strerror or str(error), "path": str(error.filename or path), "free_bytes": free_bytes}


def _report(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"kind": "bootstrap", **document}) + "\n")
    sys.stdout.flush()


def _receive() -> bytes:
    """The bundle: a line with its size, then that many bytes. Not one byte more is taken from the agent's stdin."""
    line = b""
    while not line.endswith(b"\n"):
        line += _read(1)
    size, data = int(line), b""
    while len(data) < size:
        data += _read(size - len(data))
    return data


def _read(size: int) -> bytes:
    if block := os.read(0, size):
        return block
    raise SystemExit("the head is gone")


class MemoryImporter:
    """Imports the bundle's modules from its files in memory: a finder and a loader without importlib.abc, which takes
    long to import."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = files

    def find_spec(self, fullname: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        base, loader = fullname.replace(".", "/"), cast("Any", self)
        for name, is_package in ((f"{base}/__init__.py", True), (f"{base}.py", False)):
            if name in self._files:
                return importlib.machinery.ModuleSpec(fullname, loader, origin=name, is_package=is_package)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """The default one."""

    def exec_module(self, module: Any) -> None:
        name = module.__spec__.origin
        module.__file__ = name
        exec(compile(self._files[name], name, "exec"), module.__dict__)


def _become_agent(path: list[str]) -> None:
    """Never returns. -I and -S have left out what a rank's python has: installed packages, PYTHONPATH, and the user's
    own packages."""
    site: Any = importlib.import_module("site")
    # None would be decided by -I; a virtual environment switches it off by itself.
    site.ENABLE_USER_SITE = not os.environ.get("PYTHONNOUSERSITE")
    site.main()
    sys.path[:0] = [*path, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.exit(importlib.import_module(AGENT).main())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]) if sys.argv[2:] else Path("~").expanduser() / ROOT)
