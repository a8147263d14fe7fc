"""The `copies` probe: which models and data sets this node has, in its Hugging Face cache and in folders; and what
brings them, and environments."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from engine.node.environment import made_environment
from engine.node.hub_cache import (
    HubSnapshot,
    ask_hub,
    blob_digest,
    describe,
    files_below,
    hub_cache,
    login_environment,
    pushed_root,
    root_of,
    snapshots,
)
from engine.node.probes import nearest, reason_of
from engine.node.probes.model_files import CONFIGURATION
from engine.node.transfer import digest_of, read_blocks, served
from engine.protocol.manifest import CopyFile, HubName

_FOLDERS = ("~/models", "~/Models", "~/.lmstudio/models", "~/.cache/lm-studio/models")
"""Where people and LM Studio keep models, one or two levels deep."""
_MOST = 500
_REPORT_S = 2.0


def probe_copies(request_text: str) -> dict[str, Any]:
    """The answer is a NodeCopies of the head's. The JSON request has `names`, [kind, name, revision] of those that are
    looked for, none for all; `folders` in which models may be, too; and `paths`, of which the `present` are told."""
    request, environment = json.loads(request_text), login_environment()
    cache = hub_cache(environment)
    report: dict[str, Any] = {"cache": str(cache), "copies": [], "free_bytes": shutil.disk_usage(nearest(cache)).free}
    report["present"] = [path for path in request["paths"] if Path(path).expanduser().exists()]
    report["offline"] = environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    try:
        wanted = [HubName(*name) for name in request["names"]]
        names: list[HubName | None] = [*wanted] or [None]
        seen = [snapshot for name in names for snapshot in snapshots(root_of(name, cache) if name else cache, name)]
        seen += snapshots(pushed_root()) if not wanted else ()
        report["copies"] = [_of_snapshot(snapshot) for snapshot in seen[:_MOST]]
        if not wanted:
            report["copies"] += map(_of_folder, itertools.islice(_model_folders(request["folders"]), _MOST))
    except OSError as error:
        report["problem"] = reason_of(error, Path(error.filename or cache))
    return report


def _of_snapshot(snapshot: HubSnapshot) -> dict[str, Any]:
    hub = snapshot.hub
    named = {"kind": hub.kind, "name": hub.name, "revision": hub.revision, "refs": snapshot.refs[:20]}
    return {**named, **describe(snapshot.path, hub.kind)}


def _of_folder(folder: Path) -> dict[str, Any]:
    return {"kind": "model", "name": str(folder), **describe(folder, "model")}


def _model_folders(named: list[str]) -> Iterator[Path]:
    """Folders with a model's configuration and weights, in these and in the usual ones."""
    parents = dict.fromkeys(Path(name).expanduser() for name in (*_FOLDERS, *named))
    seen = set[Path]()
    for parent in parents:
        for configuration in sorted((*parent.glob(f"*/{CONFIGURATION}"), *parent.glob(f"*/*/{CONFIGURATION}"))):
            folder = configuration.parent.resolve()
            if folder not in seen and any(folder.glob("model*.safetensors*")):
                seen.add(folder)
                yield configuration.parent


def probe_manifest(request_text: str) -> Iterator[dict[str, Any]]:
    """The files of a copy (the JSON request has its `repository`, as a HubName, or its `folder`) with their hashes: by
    the names of the cache's blobs, or with `verify` and for other files by their content. Now and then how much was
    `hashed`; at last `path`, `revision`, `refs`, `files`, and the `damaged`; or the `problem`."""
    request = json.loads(request_text)
    try:
        yield from _manifest(request)
    except OSError as error:
        yield {"problem": reason_of(error, Path(error.filename or request.get("folder") or "~"))}


def _manifest(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    revision, refs, folder = None, [], Path(request.get("folder") or "").expanduser()
    if request.get("repository") is not None:
        snapshot = next(snapshots(root_of(hub := HubName(*request["repository"])), hub), None)
        if snapshot is None:
            yield {"problem": "it is not in the cache"}
            return
        revision, refs, folder = snapshot.hub.revision, [*snapshot.refs], snapshot.path
    single = folder.is_file()
    if not single and not folder.is_dir():
        yield {"problem": f"{folder} is not there"}
        return
    files, damaged, hashed = [], [], 0
    for path in [folder] if single else files_below(folder):
        name = path.name if single else path.relative_to(folder).as_posix()
        if not path.is_file():
            damaged.append(name)
            continue
        size, digest = path.stat().st_size, blob_digest(path) if revision is not None else None
        if digest is None or request.get("verify"):
            content = yield from _hash(path, CopyFile(name, size, digest or "0" * 64), hashed)
            if digest not in (None, content):
                damaged.append(name)
            digest, hashed = digest or content, hashed + size
        files.append(CopyFile(name, size, digest))
    path = folder.parent if single else folder
    yield {"path": str(path), "revision": revision, "refs": refs, "files": files, "damaged": damaged}


def _hash(path: Path, file: CopyFile, hashed: int) -> Generator[dict[str, Any], None, str]:
    """Its hash; how much was `hashed`, with what was before it, at its end and before the head takes this for hung."""
    digest, at = digest_of(len(file.digest), file.size), time.monotonic()
    for block in read_blocks(path, file.size + 1):
        digest.update(block)
        hashed += len(block)
        if time.monotonic() - at > _REPORT_S:
            yield {"hashed": hashed}
            at = time.monotonic()
    yield {"hashed": hashed}
    hexadecimal: str = digest.hexdigest()
    return hexadecimal


def probe_remove_copy(request_text: str) -> dict[str, Any]:
    """Remove the JSON request's `repository` from the cache, or its `folder`, which must be a model's."""
    request = json.loads(request_text)
    try:
        if request.get("repository") is not None:
            hub = HubName(*request["repository"])
            folder = root_of(hub) / hub.folder
        else:
            folder = Path(request["folder"]).expanduser()
        files = [path for path in files_below(folder) if not path.is_symlink()]
        if not files or (request.get("repository") is None and not (folder / CONFIGURATION).is_file()):
            return {"problem": f"{folder} holds no such copy"}
        size = sum(path.lstat().st_size for path in files)
        shutil.rmtree(folder)
    except OSError as error:
        return {"problem": reason_of(error, Path(error.filename or "~"))}
    return {"bytes": size}


def probe_hub(request_text: str) -> Iterator[dict[str, Any]]:
    """See engine.node.hub_cache.ask_hub."""
    request = json.loads(request_text)
    return ask_hub(HubName(*request.pop("repository")), **request)


def probe_transfer() -> Iterator[dict[str, Any]]:
    """See engine.node.transfer."""
    return served()


def probe_environment() -> Iterator[dict[str, Any]]:
    """See engine.node.environment."""
    return made_environment()
