"""Takes the hashes of what must be the same on every worker: `python -m worker.looks.consistency QUESTION`.

QUESTION is JSON: `files`, path by name; `model`, a directory or null; `job`, the job as the head would send it, or
null. Prints `hashes`: SHA-256 of each file by its name (null where there is none), of the model's small files, of the
job as this machine's python reads it, and of the worker package that runs this.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from ..job import config_hash  # noqa: TID252  (on a node the package is `worker`)
from .model import HASHED, HASHED_LIMIT
from .parent import end_with_parent

PACKAGE = Path(__file__).resolve().parents[1]


def hashes(question: dict[str, Any]) -> dict[str, str | None]:
    """The answer to one question."""
    found = {name: file_hash(Path(path).expanduser()) for name, path in question["files"].items()}
    if question["model"] is not None:
        model = Path(question["model"]).expanduser()
        found |= {f"model {name}": value for name in HASHED if (value := file_hash(model / name)) is not None}
    if question["job"] is not None:
        found["job"] = config_hash(question["job"])
    found["worker"] = package_hash(PACKAGE)
    return found


def file_hash(path: Path) -> str | None:
    """Of a file over the limit its size; of one that cannot be read, why."""
    try:
        size = path.stat().st_size
        if size > HASHED_LIMIT:
            return f"{size} bytes"
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        return f"{error.strerror}"


def package_hash(package: Path) -> str:
    """As the head takes it when it stages the bundle: over names and contents of the Python files."""
    digest = hashlib.sha256()
    for path in sorted(path for path in package.rglob("*.py") if path.is_file()):
        name, content = path.relative_to(package).as_posix().encode(), path.read_bytes()
        digest.update(b"%d %d\n" % (len(name), len(content)) + name + content)
    return digest.hexdigest()


if __name__ == "__main__":
    end_with_parent()
    print(json.dumps({"hashes": hashes(json.loads(sys.argv[1]))}))
