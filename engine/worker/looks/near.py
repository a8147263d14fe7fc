"""What may have been meant by a path that is not there."""

from __future__ import annotations

import difflib
from pathlib import Path


def near(path: Path, holding: str = "") -> str:
    """ ", did you mean …?" for a path whose parent has something of a similar name; `holding` is a file that must be
    in it."""
    try:
        names = [entry.name for entry in path.parent.iterdir() if (entry / holding).exists()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.7)
    return f", did you mean {path.parent / close[0]}?" if close else ""
