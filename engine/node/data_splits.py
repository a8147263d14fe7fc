"""Which rows of which files are train, valid and test: as a data set's card declares them, which Hugging Face's
load_dataset reads, or by the names of files and folders."""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from engine.node.source_files import SUFFIXES, TEXTS, DataError, SourceRow, read_source, suffix_of
from engine.protocol.attempt import read_regular
from engine.protocol.manifest import path_is_below, split_slices

_CARD = "README.md"
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files that lie beside a data set, of the Hugging Face Hub for one, and are none of its own."""
_MOST_FILES = 500_000
"""With more files, of whatever kind, a folder is a disk or a home: to look at them takes half a minute."""
_SPLITS = {"train": "train|training", "valid": "valid|validation|val|dev|eval", "test": "test"}
_FRONT_MATTER = re.compile(r"\ufeff?---\s*\n(.*?\n)---\s*(\n|\Z)", re.DOTALL)


class SplitPart(NamedTuple):
    """Rows of files."""

    files: list[Path]
    begin: str = ""
    """The first row: a number from 0 or of percent, below 0 from the end on, as in Hugging Face's slices of splits."""
    end: str = ""

    def rows(self, piece: int) -> Iterator[tuple[Path, SourceRow]]:
        """`piece` as in `read_source`. Raises DataError, OSError."""
        begin, end = self.begin, self.end
        total = sum(1 for _ in self._all(piece)) if "%" in begin + end or "-" in begin + end else 0
        first, last = _bound(begin or "0", total), _bound(end, total) if end else None
        return itertools.islice(self._all(piece), first, last)

    def _all(self, piece: int) -> Iterator[tuple[Path, SourceRow]]:
        return ((path, row) for path in self.files for row in read_source(path, piece))


def _bound(text: str, total: int) -> int:
    number = round(int(text[:-1]) * total / 100.0) if text.endswith("%") else int(text)
    return max(total + number, 0) if number < 0 else number


def source_parts(source: Path, options: Mapping[str, Any]) -> dict[str, list[SplitPart]]:
    """train, valid and test → their rows, as [data] `subset` and `splits` say. Raises DataError, OSError."""
    source, declared = _subset(source, options.get("subset"))
    splits = options.get("splits")
    files = _by_split(declared) if declared else source_files(source)
    if not splits:
        return {name: [SplitPart(paths)] for name, paths in files.items()}
    slices = {name: split_slices(text) for name, text in splits.items()}
    if unknown := {split for sliced in slices.values() for split, *_ in sliced} - {*declared} if declared else ():
        raise DataError(f"{source} has no split {min(unknown)}: its {_CARD} has {', '.join(declared)}")
    return {
        name: [SplitPart(declared.get(split) or _named(source, files, split), *rows) for split, *rows in sliced]
        for name, sliced in slices.items()
    }


def _by_split(declared: Mapping[str, list[Path]]) -> dict[str, list[Path]]:
    """train, valid and test → the files of the splits that are called so."""
    files = dict[str, list[Path]]()
    for split, paths in declared.items():
        files.setdefault(_split_of(Path(f"{split}.jsonl")), []).extend(paths)
    return files


def _subset(source: Path, subset: str | None) -> tuple[Path, dict[str, list[Path]]]:
    """The folder of a subset, or of a data set without, and splits → their files where its card declares them."""
    declared = _declared(source / _CARD)
    default = (
        [*declared]
        if len(declared) == 1
        else [name for name, values in declared.items() if name == "default" or values.get("default")]
    )
    name = subset or next(iter(default), None)
    if name in declared:
        below = str(declared[name].get("data_dir") or "").rstrip("/")
        if below and not (path_is_below(below) and (source / below).is_dir()):
            raise DataError(f"{source / _CARD} has a data_dir that is no folder of the data set: {below}")
        return source / below, _files(source / below, declared[name].get("data_files") or [])
    names = f": its {_CARD} has {', '.join(declared)}" if declared else ""
    if name is None:
        if declared:
            raise DataError(f"{source} has several subsets, one of which [data] subset names{names}")
        return source, {}
    if not (source / name).is_dir():
        raise DataError(f"{source} has no folder {name}, which is the subset of the data{names}")
    return source / name, {}


def _declared(card: Path) -> dict[str, dict[str, Any]]:
    """Subset → what the card says of it. For the form:
    https://huggingface.co/docs/hub/datasets-manual-configuration."""
    front = _FRONT_MATTER.match(read_regular(card).decode("utf-8", "replace")) if card.is_file() else None
    if front is None or not re.search(r"^configs\s*:", front[1], re.MULTILINE):
        return {}
    try:
        import yaml  # noqa: PLC0415  (which may be missing)
    except ImportError:
        todo = f"`uv pip install --python {sys.executable} pyyaml`"
        raise DataError(f"{card} declares subsets, and to read them PyYAML is missing: {todo}") from None
    try:
        return {str(values["config_name"]): values for values in yaml.safe_load(front[1])["configs"] or []}
    except (yaml.YAMLError, TypeError, KeyError) as error:
        raise DataError(f"{card} has configs that cannot be read: {str(error).splitlines()[0]}") from error


def _files(folder: Path, data_files: Any) -> dict[str, list[Path]]:
    patterns = dict[str, list[Any]]()
    for entry in data_files if isinstance(data_files, list) else [data_files]:
        split, named = (entry.get("split"), entry.get("path")) if isinstance(entry, dict) else ("train", entry)
        patterns.setdefault(str(split), []).extend(named if isinstance(named, list) else [named])
    return {split: [path for name in named for path in _matches(folder, name)] for split, named in patterns.items()}


def _matches(folder: Path, pattern: Any) -> list[Path]:
    # As for fsspec, ** at the end is all files below.
    whole = re.sub(r"(^|/)\*\*$", r"\1**/*", str(pattern).removeprefix("./"))
    try:
        paths = sorted(folder.glob(whole)) if path_is_below(whole) else []
    except ValueError:
        paths = []
    if files := [path for path in paths if path.is_file() and not path.name.startswith((".", "__"))]:
        return files
    raise DataError(f"{folder} has no file {pattern}, which its {_CARD} declares")


def _named(source: Path, files: Mapping[str, list[Path]], split: str) -> list[Path]:
    """The files of a split that is called so, as datasets are stored, or in a folder that is:
    train_sft-00000-of-00003-a3ecf92756993583.parquet."""
    paths = [path for paths in files.values() for path in paths]
    name = re.compile(rf"{re.escape(split)}(-\d+-of-\d+(-[0-9a-f]+)?)?(\..*)?")
    named = [path for path in paths if any(map(name.fullmatch, path.relative_to(source).parts))]
    usual = next((key for key, words in _SPLITS.items() if re.fullmatch(words, split)), "")
    if chosen := named or files.get(usual, []):
        return chosen
    raise DataError(f"{source} has no split {split}: no file or folder is called that")


def source_files(source: Path) -> dict[str, list[Path]]:
    """train, valid and test → their files, sorted, of a folder and those below, or one file. Raises DataError,
    OSError."""
    if not source.is_dir():
        return {"train": [source]}
    standard = {name: [source / f"{name}.jsonl"] for name in _SPLITS if (source / f"{name}.jsonl").is_file()}
    if "train" in standard:
        return standard
    files, others, seen = list[Path](), list[str](), 0
    for folder, folders, names in os.walk(source):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "_")))
        paths = [Path(folder, name) for name in sorted(names) if not name.startswith((".", "_"))]
        files += [path for path in paths if suffix_of(path) in SUFFIXES]
        others += [path.name for path in paths if suffix_of(path) not in SUFFIXES]
        seen += len(names)
        if seen > _MOST_FILES:
            many = f"it has more than {_MOST_FILES:,} files, {folder} among them"
            raise DataError(f"{source} is no folder of data: {many}; name the folder or the file that has the rows")
    data = [path for path in files if suffix_of(path) not in TEXTS and path.name.lower() not in _DESCRIPTIONS]
    splits = dict[str, list[Path]]()
    for path in sorted(data or files):
        splits.setdefault(_split_of(path.relative_to(source)), []).append(path)
    if "train" not in splits and others:
        raise DataError(f"{source} has {', '.join(others[:3])}, and no file to train on ({', '.join(SUFFIXES)})")
    return splits


def _split_of(path: Path) -> str:
    """By the names of folders and of the file, which in a file's begin or end a name: train-00000-of-00002.parquet,
    gsm8k_test.jsonl. A text's file name is its own title."""
    stem = path.name.lower().partition(".")[0]
    for name, words in _SPLITS.items():
        part = words if suffix_of(path) in TEXTS else rf"({words})([-_].*)?|.*[-_]({words})"
        if re.fullmatch(part, stem) or any(re.fullmatch(words, folder.lower()) for folder in path.parts[:-1]):
            return name
    return "train"
