"""A Hugging Face cache with a tiny model, as huggingface_hub lays it out, made without it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from engine.protocol.manifest import HubName

COMMIT = "c0ffee" + "0" * 34


def git_digest(content: bytes) -> str:
    """The hash by which git and the Hub name a small file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def cache_files(cache: Path, hub: HubName, files: Mapping[str, bytes], commit: str = COMMIT) -> Path:
    """The snapshot's folder: weights named by SHA-256, as those in LFS, the others by git's hash."""
    repository = cache / hub.folder
    snapshot = repository / "snapshots" / commit
    for name, content in files.items():
        digest = hashlib.sha256(content).hexdigest() if name.endswith(".safetensors") else git_digest(content)
        for folder in (repository / "blobs", repository / "refs", (snapshot / name).parent):
            folder.mkdir(parents=True, exist_ok=True)
        (repository / "blobs" / digest).write_bytes(content)
        up = "../" * (2 + name.count("/"))
        (snapshot / name).symlink_to(f"{up}blobs/{digest}")
    (repository / "refs" / "main").write_text(commit)
    return snapshot
