"""Hands over a model's config.json: `python -m worker.looks.configuration DIRECTORY`.

Prints `configuration`, or `problem`. More than 256 KiB is no configuration.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from .model import CONFIGURATION
from .near import near
from .parent import end_with_parent

LIMIT_BYTES = 256 << 10


def look(directory: Path) -> dict[str, Any]:
    """The document for one model directory."""
    path = directory / CONFIGURATION
    try:
        with path.open("rb") as file:
            content = file.read(LIMIT_BYTES + 1)
    except OSError as error:
        return {"problem": f"{path}: {error.strerror}{near(directory, CONFIGURATION)}"}
    if len(content) > LIMIT_BYTES:
        return {"problem": f"{path} is no model configuration: more than {LIMIT_BYTES >> 10} KiB"}
    try:
        configuration = json.loads(content)
    except (ValueError, RecursionError):
        configuration = None
    if not isinstance(configuration, dict):
        return {"problem": f"{path} is no model configuration: no JSON object"}
    return {"configuration": configuration}


if __name__ == "__main__":
    end_with_parent()
    print(json.dumps(look(Path(sys.argv[1]))))
