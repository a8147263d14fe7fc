"""This node's Hugging Face cache: where its user's login shell says that it is, what lies in it, and downloads into
it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from engine.node.bootstrap import node_root
from engine.node.probes.model_files import CONFIGURATION, INDEX
from engine.node.processes import kill_group
from engine.protocol.attempt import read_regular
from engine.protocol.manifest import DIGEST, KINDS, PUSHED, REVISION, HubName, hub_name
from engine.protocol.safetensors import CheckpointError, check_header

_SHELL_LIMIT_S = 10.0
_MARK = "flightdeck-environment "
_VARIABLES = re.compile(r"HF_\w+|HUGGING\w+|XDG_CACHE_HOME|(?i:https?|all|no)_proxy|SSL_CERT_\w+|REQUESTS_CA_BUNDLE")
_PRINT = f"import json, os; print({_MARK!r} + json.dumps(dict(os.environ)))"
_COMMIT = re.compile(REVISION)
_NUMBERED = re.compile(r".*-([0-9]{5})-of-([0-9]{5})\.safetensors")
_MOST_NAMED = 20
_KEPT = 3
_REPORT_S = 1.0


def login_environment() -> dict[str, str]:
    """The variables that huggingface_hub reads, as the user's login shell sets them: the agent's own shell is none,
    and has read neither .zprofile nor .profile. That of the agent where such a shell tells nothing in time."""
    shell = os.environ.get("SHELL") or "/bin/sh"
    options = ["-c"] if shell.endswith("csh") else ["-lc"]
    command = f"exec {shlex.quote(sys.executable)} -I -S -c {shlex.quote(_PRINT)}"
    variables: Mapping[str, Any] = os.environ
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        process = subprocess.Popen(
            [shell, *options, command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            output = process.communicate(timeout=_SHELL_LIMIT_S)[0].decode(errors="replace")
        finally:
            with contextlib.suppress(OSError):
                kill_group(process.pid, signal.SIGKILL)
            process.wait()
        variables = json.loads(output.rpartition(_MARK)[2].partition("\n")[0])
    return {name: str(value) for name, value in variables.items() if _VARIABLES.fullmatch(name)}


def hub_cache(environment: Mapping[str, str]) -> Path:
    """As huggingface_hub.constants has it."""
    home = environment.get("HF_HOME") or f"{environment.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    named = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(named).expanduser().absolute()


def pushed_root() -> Path:
    """Laid out as the cache."""
    return node_root() / "pushed"


def root_of(hub: HubName, cache: Path | None = None) -> Path:
    """Where the repository lies here: the cache, or what was pushed."""
    return pushed_root() if hub.name.startswith(PUSHED) else cache or hub_cache(login_environment())


def drop_older(newest: Path, named: Container[str]) -> int:
    """Remove those revisions beside a pushed one that no run on this node names, nor the head, but the newest _KEPT;
    the bytes that were freed. Raises OSError."""
    os.utime(newest)
    repository = newest.parents[1]
    revisions = sorted(newest.parent.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    if not revisions[_KEPT:]:
        return 0
    specs = [read_regular(path).decode(errors="replace") for path in node_root().glob("runs/*/attempts/*/spec.json")]
    for path in revisions[_KEPT:]:
        if path.name not in named and not any(path.name in spec for spec in specs):
            shutil.rmtree(path)
    linked = {os.path.realpath(file) for file in files_below(repository / "snapshots")}
    freed = 0
    for blob in (repository / "blobs").iterdir():
        if os.path.realpath(blob) not in linked and re.fullmatch(DIGEST, blob.name):
            freed += blob.stat().st_size
            blob.unlink()
    return freed


class HubSnapshot(NamedTuple):
    """One revision of a repository in the cache."""

    hub: HubName
    """With its commit as revision."""
    refs: tuple[str, ...]
    """Branches and tags that are at it."""
    path: Path

    @property
    def repository(self) -> Path:
        return self.path.parents[1]

    def files(self) -> Iterator[Path]:
        """Also links to blobs that are not there."""
        return files_below(self.path)


def snapshots(cache: Path, wanted: HubName | None = None) -> Iterator[HubSnapshot]:
    """All of the cache, or those of a repository that fit its revision, the best first: what the ref is at, then the
    newest."""
    pattern = wanted.folder if wanted is not None else "*--*"
    for repository in sorted(cache.glob(pattern)):
        kind, _, rest = repository.name.partition("s--")
        hub = hub_name(f"{'hf:' * (kind == 'dataset')}{rest.replace('--', '/')}", kind) if kind in KINDS else None
        if hub is None or not (repository / "snapshots").is_dir():
            continue
        refs = dict[str, list[str]]()
        for file in files_below(repository / "refs"):
            with contextlib.suppress(OSError):
                commit = read_regular(file)[:200].decode(errors="replace").strip()
                refs.setdefault(commit, []).append(file.relative_to(repository / "refs").as_posix())
        here = [path for path in (repository / "snapshots").iterdir() if path.is_dir() and _COMMIT.fullmatch(path.name)]
        ref = (wanted.revision if wanted is not None else None) or "main"
        here.sort(key=lambda path: (ref in refs.get(path.name, ()), path.stat().st_mtime), reverse=True)
        for path in here:
            at = tuple(sorted(refs.get(path.name, ())))
            if wanted is None or wanted.revision in (None, path.name, *at):
                yield HubSnapshot(hub._replace(revision=path.name), at, path)


def files_below(folder: Path) -> Iterator[Path]:
    """Its files and links, hidden ones apart, in the order of their paths. Folders behind links are not entered: they
    may lead anywhere."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(place, name) for name in sorted(names) if not name.startswith("."))


def missing_files(folder: Path, kind: str, files: list[Path]) -> list[str]:
    """The files that a copy lacks, as far as it tells by itself, and those that are cut off."""
    names = {path.relative_to(folder).as_posix(): path for path in files}
    missing = [name for name, path in names.items() if not path.exists()]
    if kind == "dataset":
        unfinished = folder.parent.name == "snapshots" and any((folder.parents[1] / "blobs").glob("*.incomplete"))
        return missing or (["what its download has not brought yet"] if unfinished or not names else [])
    if CONFIGURATION not in names:
        missing.append(CONFIGURATION)
    shards = {name for name in names if name.endswith(".safetensors") and "/" not in name}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        listed = json.loads(read_regular(folder / INDEX))["weight_map"].values()
        missing += sorted({str(name) for name in listed} - names.keys())
    for match in list(filter(None, map(_NUMBERED.fullmatch, shards))):
        of = (match[0].replace(f"-{match[1]}-of-", f"-{number:05}-of-") for number in range(1, int(match[2]) + 1))
        missing += [name for name in of if name not in names and int(match[2]) <= 10_000]
    return list(dict.fromkeys(missing or ([] if shards else ["model.safetensors"])))


def cut_files(files: list[Path]) -> list[str]:
    """Safetensors files that are shorter than their headers say."""
    damaged = []
    for path in files:
        if path.suffix == ".safetensors":
            try:
                check_header(path, exact=False)
            except CheckpointError:
                damaged.append(path.name)
            except OSError:
                continue
    return damaged


def describe(folder: Path, kind: str) -> dict[str, Any]:
    """Its `path`, `files`, `bytes`, and what is `missing` or `damaged`, the first of them."""
    files = list(files_below(folder))
    present = [path for path in files if path.is_file()]
    missing, damaged = missing_files(folder, kind, files), cut_files(present)
    report = {"path": str(folder), "files": len(present), "bytes": sum(path.stat().st_size for path in present)}
    return {**report, "missing": missing[:_MOST_NAMED], "damaged": damaged[:_MOST_NAMED]}


def blob_digest(path: Path) -> str | None:
    """The hash by which the cache names the content of a snapshot's file; None for one that is no link to a blob."""
    if path.is_symlink():
        name = Path(os.readlink(path)).name  # noqa: PTH115  (as written: the blob may be anywhere)
        return name if re.fullmatch(DIGEST, name) else None
    return None


_HUB = """
import http.client, json, os, ssl, sys, threading, time, urllib.request
def ends():
    while os.read(0, 1024): pass
    os._exit(1)
threading.Thread(target=ends, daemon=True).start()
kind, name, revision, patterns, get, sample = json.loads(sys.argv[1])
import certifi, huggingface_hub as hub
from huggingface_hub.utils import build_hf_headers, filter_repo_objects
def rate(commit, file):
    request = urllib.request.Request(hub.hf_hub_url(name, file, repo_type=kind, revision=commit))
    request.add_header("Range", f"bytes=0-{sample - 1}")
    for header in build_hf_headers().items():
        # Where it redirects to gets no token.
        request.add_unredirected_header(*header)
    trusted, came, began = ssl.create_default_context(), 0, time.monotonic()
    trusted.load_verify_locations(certifi.where())
    try:
        with urllib.request.urlopen(request, timeout=5, context=trusted) as answer:
            while came < sample and time.monotonic() - began < 5 and (data := answer.read(65536)):
                came += len(data)
    except (OSError, http.client.HTTPException):
        pass
    return came / (time.monotonic() - began)
if get:
    print(json.dumps({"path": hub.snapshot_download(name, repo_type=kind, revision=revision, allow_patterns=patterns)}))
else:
    info = hub.HfApi().repo_info(name, repo_type=kind, revision=revision, files_metadata=True, timeout=10)
    files = filter_repo_objects(info.siblings, allow_patterns=patterns, key=lambda file: file.rfilename)
    sizes = {file.rfilename: file.size or 0 for file in files}
    about = {"commit": info.sha, "bytes": sum(sizes.values())}
    if sizes and sample:
        about["rate"] = rate(info.sha, max(sizes, key=sizes.get))
    print(json.dumps(about))
"""
"""Ends with its stdin, which is the probe's: when the head has gone, nothing is downloaded on."""
_MODEL_FILES = ["*.json", "model*.safetensors", "*.py", "*.model", "*.tiktoken", "*.txt", "*.jsonl", "*.jinja"]
"""As mlx-lm downloads them."""


def ask_hub(hub: HubName, *, get: bool, sample: int = 0) -> Iterator[dict[str, Any]]:
    """With `get` download a repository, by this python's huggingface_hub as the user's login shell sets it up, with
    now and then its `here`, the bytes that are in the cache: its `path`. Else its `commit` and `bytes`, and with a
    `sample` the `rate`, in bytes a second, at which the first so many of its largest file have come. Or the
    `problem`."""
    environment = login_environment()
    request = json.dumps([*hub, _MODEL_FILES if hub.kind == "model" else None, get, sample])
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", _HUB, request],
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **environment, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        )
        blobs = hub_cache(environment) / hub.folder / "blobs"
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_REPORT_S)
            # It may rename them meanwhile.
            with contextlib.suppress(OSError):
                yield {"here": sum(path.lstat().st_size for path in blobs.iterdir())}
        answer = process.stdout.read() if process.stdout is not None else b""
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - 2000))
        complaint = errors.read().decode(errors="replace").strip()
    with contextlib.suppress(ValueError):
        yield json.loads(answer.strip().rpartition(b"\n")[2])
        return
    yield {"problem": complaint.rpartition("\n")[2] or f"it ended with {process.returncode}"}
