"""Tiny wheels, for tests that install packages without a package index."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path


def write_wheel(
    folder: Path, name: str, version: str, requires: Iterable[str] = (), content: Mapping[str, str] | None = None
) -> Path:
    """A package of one module, `name`, or with that content."""
    file_name = name.replace("-", "_")
    base = f"{file_name}-{version}.dist-info"
    metadata = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    files = {
        **({f"{name}.py": f"version = {version!r}\n"} if content is None else content),
        f"{base}/METADATA": "\n".join(metadata) + "\n",
        f"{base}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{base}/RECORD"] = "".join(f"{file},,\n" for file in (*files, f"{base}/RECORD"))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{file_name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path
