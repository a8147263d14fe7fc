"""Data as people have it, as the standard folder of train, valid and test.jsonl that all else reads: the folder itself
where it is one, or one that is written below the node root, once for the same content and options."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine.node.bootstrap import make_private, node_root
from engine.node.data_splits import SplitPart, source_parts
from engine.node.probes import reason_of
from engine.node.row_shapes import Skipped, convert
from engine.node.source_files import HEAD_BYTES, DataError, foreign_kind
from engine.protocol.attempt import open_regular, read_regular, write_atomic
from engine.protocol.jsonl import fault_of, form_of, half_pair, is_blank, lines, parse

_VERSION = 4
"""Version of the conversion: another one makes other folders."""
VALID_SHARE = 0.05
"""Split off where [data] valid says nothing and there is no such file."""
_CHARACTERS_PER_TOKEN = 3
"""So that a piece of a text has less than max_seq_length tokens: English has some four."""
_KEPT_S = 30 * 86_400
"""After so long without use a folder is removed: it can be made again."""
_ABANDONED_S = 3600
"""After so long without a write a conversion that was not completed is removed."""
_SETTLED_S = 2.0
"""Since when a file is untouched whose times tell of the next write."""
_SOURCES = ".sources"
"""Folder of the hashes of sources; removed as a conversion that was not completed is."""
_SHOWN_FAULTS = 3
_MOST_UNREAD = 100
_REPORT = "conversion.json"
"""File of a folder that was written here: StandardData.about."""
_SPLITS = ("train", "valid", "test")


_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


class StandardData(NamedTuple):
    folder: Path
    about: dict[str, Any] | None
    """A ConversionReport of the head's; None for a folder that is the standard one itself."""


def standard_data(source: Path, options: Mapping[str, Any]) -> StandardData:
    """`options`: the keys of rows (prompt, completion, chat, text), max_seq_length, and [data] as `data`. Raises
    DataError."""
    if source.name == "train.jsonl":
        source = source.parent
    options = {key: options.get(key) for key in ("prompt", "completion", "chat", "text", "max_seq_length", "data")}
    try:
        written = (source / _REPORT).is_file()
        standard = source.is_dir() and _is_standard(source, options)
        if written or (standard and not options["data"]) or not source.exists():
            return StandardData(source, None)
        parts = source_parts(source, options["data"] or {})
        if "train" not in parts:
            return StandardData(source, None)
        if standard:
            options["data"] = {"valid": 0.0, **options["data"]}
        target = _root() / _digest(parts, options)
        if not (target / _REPORT).is_file():
            _write(parts, target, options)
        os.utime(target)
        return StandardData(target, json.loads(read_regular(target / _REPORT)))
    except OSError as error:
        why, root, place = reason_of(error, source), str(_root()), str(error.filename or source)
        if error.errno in _NOT_WRITTEN or place.startswith(root) or root.startswith(place):
            raise DataError(f"{source} cannot be converted in {root}: {why}") from error
        raise DataError(f"{place} cannot be read: {why}") from error


def standard_files(files: Sequence[str], options: Mapping[str, Any]) -> tuple[list[Path], dict[str, Any] | None]:
    """The files of these names in what is to be called as their folder, and StandardData.about. Raises DataError."""
    folder, about = standard_data(Path(files[0]).parent, options)
    return [folder / Path(file).name for file in files], about


def _root() -> Path:
    return node_root() / "data"


def _is_standard(folder: Path, options: Mapping[str, Any]) -> bool:
    """Its train and valid.jsonl are mlx-lm's, as far as their first rows show, also where they are bad."""
    if not (folder / "train.jsonl").exists():
        return False
    for path in (folder / "train.jsonl", folder / "valid.jsonl"):
        try:
            with open_regular(path) as file:
                foreign = foreign_kind(file.read(HEAD_BYTES))
                file.seek(0)
                first = next(itertools.filterfalse(is_blank, lines(file)), b"")
        except OSError:
            continue
        with contextlib.suppress(ValueError):
            row = parse(first)
            form = form_of(row, options)
            # A template would take tools that are a text for something else.
            if isinstance(row.get("tools"), str) or fault_of(row, form, options) is not None:
                with contextlib.suppress(Skipped):
                    convert(row, "auto", columns_of(options))
                return False
        if foreign is not None:
            return False
    return True


def columns_of(options: Mapping[str, Any]) -> dict[str, str]:
    """Part → key, of [data] columns and [job]'s features."""
    features = {"prompt": "prompt", "completion": "completion", "chat": "messages", "text": "text"}
    named = {part: options[part] for part, default in features.items() if options[part] != default}
    columns = (options["data"] or {}).get("columns", {})
    return {**named, **{"chat" if part == "messages" else part: key for part, key in columns.items()}}


def _digest(parts: Mapping[str, list[SplitPart]], options: Mapping[str, Any]) -> str:
    files = {name: [path for part in listed for path in part.files] for name, listed in parts.items()}
    return hashlib.sha256(json.dumps([_VERSION, options, _content(files)], sort_keys=True).encode()).hexdigest()[:24]


def _content(files: Mapping[str, list[Path]]) -> str:
    """SHA-256 of the files. All ranks and checks of a host ask for it: of files that are untouched since then, as far
    as the file system tells, it is kept."""
    named = [(split, path, path.stat()) for split, paths in files.items() for path in paths]
    places = [
        [split, str(path), at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns]
        for split, path, at in named
    ]
    kept = _root() / _SOURCES / hashlib.sha256(json.dumps(places).encode()).hexdigest()[:24]
    with contextlib.suppress(OSError, ValueError):
        if len(text := read_regular(kept).decode("ascii")) == 2 * hashlib.sha256().digest_size:
            return text
    digest = hashlib.sha256()
    for split, path, status in named:
        digest.update(f"{split} {path.suffix} {status.st_size}\n".encode())
        with open_regular(path) as file:
            while block := file.read(1 << 20):
                digest.update(block)
    # Within one tick of its clock a file can be written twice.
    if time.time() - max(status.st_ctime for *_, status in named) > _SETTLED_S:
        with contextlib.suppress(OSError):
            make_private(kept.parent)
            write_atomic(kept, digest.hexdigest())
    return digest.hexdigest()


class _Conversion:
    """Rows of the source on their way into the standard files."""

    def __init__(self, folder: Path, parts: Mapping[str, list[SplitPart]], options: Mapping[str, Any]) -> None:
        self._parts = parts
        self._options = options
        self._format = (options["data"] or {}).get("format", "auto")
        self._columns = columns_of(options)
        data = options["data"] or {}
        shares = {"valid": 0.0 if data.get("splits") else VALID_SHARE, "test": 0.0, **data}
        self._shares = {name: shares[name] for name in ("valid", "test") if shares[name] and name not in parts}
        self._out = {name: (folder / f"{name}.jsonl").open("wb") for name in _SPLITS if name in {*parts, *self._shares}}
        self._faults = dict[Any, list[Any]]()
        """File and reason of the first ones, None for all others → how many rows, and the first one's place."""
        self.about: dict[str, Any] = {
            "shapes": Counter(), "counts": dict.fromkeys(self._out, 0), "split_off": self._shares, "skipped": {},
            "unread": [], "files": len(self._files()),
        }  # fmt: skip

    def _files(self) -> set[Path]:
        return {path for parts in self._parts.values() for part in parts for path in part.files}

    def run(self) -> None:
        """Raises DataError, OSError."""
        piece = self._options["max_seq_length"] * _CHARACTERS_PER_TOKEN
        with contextlib.ExitStack() as stack:
            for file in self._out.values():
                stack.enter_context(file)
            for split, part in ((split, part) for split, parts in self._parts.items() for part in parts):
                for path, (place, values, fault) in part.rows(piece):
                    why = fault or self._take(split, f"{path}: {place}", values)
                    if why is not None:
                        shown = len(self._faults) < _SHOWN_FAULTS or (path, why) in self._faults
                        self._faults.setdefault((path, why) if shown else None, [0, place])[0] += 1
        if self._faults:
            more, _ = self._faults.pop(None, (0, ""))
            faults = [
                f"{path}: {place} {why}{f' (and {count - 1:,} more like it)' * (count > 1)}"
                for (path, why), (count, place) in self._faults.items()
            ]
            raise DataError("; ".join(faults) + f", and {more:,} more rows" * (more > 0))
        counts = self.about["counts"]
        if not counts["train"]:
            others = [f"{count:,} {why}" for why, (count, _) in self.about["skipped"].items()]
            others += [f"{count:,} in {name} ([data] {name} = 0: none)" for name, count in counts.items() if count]
            source = os.path.commonpath(list(self._files()))
            raise DataError(f"{source} has no row to train on{': ' * bool(others)}{', '.join(others)}")
        for name, file in self._out.items():
            # Stock mlx-lm ends at an empty one.
            if not counts[name]:
                Path(file.name).unlink()

    def _take(self, split: str, place: str, values: dict[str, Any]) -> str | None:
        """Write a row, or count it as skipped; returns why it cannot be read."""
        about = self.about
        try:
            name, row, unread = convert(values, self._format, self._columns, about["shapes"])
            if about["shapes"] and ("text" in about["shapes"]) != (name == "text"):
                return f"is {name}, and the rows before are {next(iter(about['shapes']))}"
            keys = {"messages": self._options["chat"], "text": self._options["text"]}
            line = json.dumps({keys.get(key, key): value for key, value in row.items()}, ensure_ascii=False).encode()
        except Skipped as why:
            about["skipped"].setdefault(str(why), [0, place])[0] += 1
        except UnicodeEncodeError:
            return half_pair(values)
        except (TypeError, ValueError) as error:
            return str(error) if isinstance(error, ValueError) else f"holds what JSON cannot: {error}"
        else:
            split = self._destination(split, line)
            self._out[split].write(line + b"\n")
            about["counts"][split] += 1
            about["shapes"][name] += 1
            if not unread.issubset(about["unread"]):
                about["unread"] = sorted({*about["unread"], *unread})[:_MOST_UNREAD]
        return None

    def _destination(self, split: str, line: bytes) -> str:
        """By the hash of the row alone, so that more rows move none."""
        if split == "train" and self._shares:
            point = int.from_bytes(hashlib.blake2b(line, digest_size=8).digest(), "big") / 2**64
            if point < self._shares.get("valid", 0):
                return "valid"
            if point >= 1 - self._shares.get("test", 0):
                return "test"
        return split


def _write(parts: Mapping[str, list[SplitPart]], target: Path, options: Mapping[str, Any]) -> None:
    """Raises DataError, OSError."""
    make_private(target.parent)
    for folder in target.parent.iterdir():
        # Another process may remove or rename it. What is being converted is written to all the time.
        with contextlib.suppress(OSError):
            limit = _ABANDONED_S if folder.name.startswith(".") else _KEPT_S
            if time.time() - max(path.stat().st_mtime for path in (folder, *folder.iterdir())) > limit:
                shutil.rmtree(folder)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        conversion = _Conversion(temporary, parts, options)
        conversion.run()
        (temporary / _REPORT).write_text(json.dumps(conversion.about), encoding="utf-8")
        try:
            temporary.rename(target)
        except OSError:
            # Another process was faster, or the folder is not whole.
            if not (target / _REPORT).is_file():
                shutil.rmtree(target)
                temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
