"""Counts the examples of a JSONL file, its lines that are not blank: `python -m worker.looks.examples FILE`.

Prints `examples` and `bytes`, or `problem`. Nothing is parsed and nothing is held, so that millions take a moment.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from .parent import end_with_parent


def look(path: Path) -> dict[str, Any]:
    """The document for one file."""
    try:
        with path.open("rb") as file:
            examples = sum(1 for line in file if not line.isspace())
            return {"examples": examples, "bytes": file.tell()}
    except OSError as error:
        return {"problem": f"{path}: {error.strerror}"}


if __name__ == "__main__":
    end_with_parent()
    print(json.dumps(look(Path(sys.argv[1]))))
