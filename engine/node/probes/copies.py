"""The `copies` probe: which models and data sets this node has, in its Hugging Face cache and in folders."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.node.hub_cache import HubSnapshot, describe, hub_cache, login_environment, snapshots
from engine.node.probes import nearest, reason_of
from engine.node.probes.model_files import CONFIGURATION
from engine.protocol.manifest import HubName

_FOLDERS = ("~/models", "~/Models", "~/.lmstudio/models", "~/.cache/lm-studio/models")
"""Where people and LM Studio keep models, one or two levels deep."""
_MOST = 500


def probe_copies(request_text: str) -> dict[str, Any]:
    """The answer is a NodeCopies of the head's. The JSON request has `names`, [kind, name, revision] of those that are
    looked for, none for all, and `folders` in which models may be, too."""
    request, environment = json.loads(request_text), login_environment()
    cache = hub_cache(environment)
    report: dict[str, Any] = {"cache": str(cache), "copies": [], "free_bytes": shutil.disk_usage(nearest(cache)).free}
    report["offline"] = environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    try:
        wanted = [HubName(*name) for name in request["names"]]
        names: list[HubName | None] = [*wanted] or [None]
        seen = [snapshot for name in names for snapshot in snapshots(cache, name)]
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
