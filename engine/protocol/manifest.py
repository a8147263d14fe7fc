"""Models and data sets as head and nodes name them: `org/name` of the Hugging Face Hub, or a folder; and the files of a
copy with their content hashes. Both sides check here what another machine has sent, before a path is made of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

REPOSITORY = r"(?:[A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}"
REVISION = r"[A-Za-z0-9][\w.-]{0,99}"
DIGEST = r"[0-9a-f]{64}|[0-9a-f]{40}"
"""SHA-256; or git's SHA-1 of a blob, by which the Hub names its small files."""
DATA_PREFIX = "hf:"
"""Before a data set's name in [job] data."""
KINDS = ("model", "dataset")
PUSHED = "pushed/"
"""Before the name of a data set that `[data] push` has brought: such a one lies below the node root, and not in the
cache."""
_NAME = re.compile(rf"({REPOSITORY})(?:@({REVISION}))?")
_DIGEST = re.compile(DIGEST)
_SLICE = re.compile(r"(?P<split>\w[\w.-]{0,99})(?:\[(?P<begin>-?\d{1,12}%?)?:(?P<end>-?\d{1,12}%?)?\])?", re.ASCII)
_LONGEST_PATH, _MOST_FILES = 1024, 100_000


class HubName(NamedTuple):
    kind: str
    """One of KINDS."""
    name: str
    """`org/name`, of an old data set also without an organisation."""
    revision: str | None = None
    """A branch, tag or commit; None: main, or what there is."""

    def __str__(self) -> str:
        return self.name + (f"@{self.revision}" if self.revision else "")

    @property
    def folder(self) -> str:
        """Its folder in the cache."""
        return f"{self.kind}s--{self.name.replace('/', '--')}"


class SplitSlice(NamedTuple):
    split: str
    begin: str
    """The first row, a number from 0 or with "%"; below 0 from the end on; "" without a bound."""
    end: str


def split_slices(text: str) -> list[SplitSlice]:
    """The parts of "train[:80%]+test", as `datasets.load_dataset` of Hugging Face names them. Raises ValueError."""
    slices = []
    for part in text.split("+"):
        match = _SLICE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part.strip()[:80]!r} is no split, or rows of one as in train[:80%] or train[-500:]")
        bounds = [match["begin"] or "", match["end"] or ""]
        if any("%" in bound for bound in bounds):
            # One of them in percent makes the other one so.
            bounds = [f"{bound.rstrip('%')}%" if bound else "" for bound in bounds]
        slices.append(SplitSlice(match["split"], *bounds))
    return slices


class CopyFile(NamedTuple):
    path: str
    """Relative, with `/`."""
    size: int
    digest: str


def hub_name(text: str, kind: str = "model") -> HubName | None:
    """`org/name`, `org/name@revision`, or with "hf:" a data set; None for what can only be a path."""
    if text.startswith(DATA_PREFIX):
        text, kind = text[len(DATA_PREFIX) :], "dataset"
    elif text.partition("@")[0].count("/") != 1:
        return None
    match = _NAME.fullmatch(text)
    if match is None or ".." in match[1] or "--" in match[1] or ".." in (match[2] or ""):
        return None
    return HubName(kind, match[1], match[2])


def path_is_below(path: object) -> bool:
    """A relative path whose every part is a visible name, so that it leads nowhere but below its folder."""
    if not isinstance(path, str) or not 0 < len(path) <= _LONGEST_PATH or not path.isprintable():
        return False
    return "\\" not in path and not any(part in ("", ".", "..") or len(part) > 255 for part in path.split("/"))


def copy_files(listed: Any) -> list[CopyFile]:
    """The files of a manifest that another machine has sent. Raises ValueError for one that cannot be used."""
    if not isinstance(listed, list) or len(listed) > _MOST_FILES:
        raise ValueError(f"no list of at most {_MOST_FILES:,} files")
    files = []
    for entry in listed:
        path, size, digest = entry if isinstance(entry, (list, tuple)) and len(entry) == 3 else ("", None, None)
        if not path_is_below(path) or type(size) is not int or not 0 <= size < 1 << 50:
            raise ValueError(f"{ascii(entry)[:100]} is no file of a copy")
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise ValueError(f"{ascii(digest)[:80]} is no hash")
        files.append(CopyFile(path, size, digest))
    _check_paths([file.path for file in files])
    return files


def _check_paths(paths: Sequence[str]) -> None:
    """Raises ValueError where one is there twice, also on a disk that ignores case, or is another one's folder."""
    folded = {path.casefold() for path in paths}
    if len(folded) != len(paths):
        raise ValueError("two of its files have the same path")
    for path in folded:
        parts = path.split("/")
        if any("/".join(parts[:count]) in folded for count in range(1, len(parts))):
            raise ValueError(f"{ascii(path)[:100]} lies below a file")
