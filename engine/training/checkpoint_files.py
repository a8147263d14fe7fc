"""The files of a checkpoint: the manifest, and files that are compressed and hashed while they are written, verified
and unpacked while they are read. Where a training resumes, and the conditions on which it does from a state.

A checkpoint is a folder `step-<update>` with `manifest.json`, written last, and the files that it names; only the
manifest proves that it is complete. A manifest is untrusted input: names that lead out of the folder, impossible
sizes and unknown types are rejected before anything is opened. Hashes are of the bytes on disk: a file is verified
without unpacking it."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib
import json
import math
import os
import re
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, fields, replace
from io import BufferedReader, UnsupportedOperation
from pathlib import Path
from typing import Any, TypeVar

from engine.protocol.attempt import regular_descriptor, sync_file
from engine.protocol.checksums import BASE_MODEL
from engine.protocol.job import JobError
from engine.protocol.safetensors import CheckpointError
from engine.training.reporting import BestValidation, Files, Reporter, ReportWindow

Document = TypeVar("Document", bound="Manifest | FileEntry")
Kind = TypeVar("Kind", bound="Manifest")
Recorded = Sequence[Sequence[str]]
"""AttemptSpec.manifests"""

MANIFEST_FORMAT = 4
MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 22
_MAX_FILES = 1000
_MAX_PARTS = 1000
_MAX_TEXT = 1000
_FOLDER = re.compile(r"step-(\d{9})")
_SUFFIX = {"none": "", "gzip": ".gz", "zstd": ".zst"}


ORDER = "the order of train.jsonl"
"""By its rows' tokens; not in states of releases that sorted by characters."""


@dataclass(frozen=True)
class FileEntry:
    name: str
    sha256: str
    stored_bytes: int
    """On disk."""
    bytes: int
    """Before compression."""
    compression: str

    def check_size(self, stored: int) -> None:
        """Raises CheckpointError."""
        if stored != self.stored_bytes:
            raise CheckpointError(f"{self.name} has {stored:,} bytes, and its manifest says {self.stored_bytes:,}")


@dataclass(frozen=True)
class Origin:
    """The job and the rank that a state is of."""

    config_hash: str
    """engine.protocol.job.config_hash"""
    world_size: int
    part: int
    """Index of the part of the state, from 0."""
    parts: int
    """1 where every rank has the whole state."""
    inputs: Mapping[str, str]
    """Checksum of each input that the job names by its path: "train.jsonl", "valid.jsonl" and "the base model"; and of
    ORDER."""


@dataclass(frozen=True)
class TrainingPoint:
    """The end of an update; all zero at the start of a training."""

    iteration: int = 0
    """The last one that the state has seen, which is also the position in the data."""
    update: int = 0
    window: Mapping[str, Any] = field(default_factory=dict)
    """The sums since the last report (reporting.ReportWindow)."""
    best: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """The best validation so far (reporting.BestValidation)."""

    def facts(self) -> dict[str, Any]:
        """By name, without what a subclass adds."""
        return {field.name: getattr(self, field.name) for field in fields(TrainingPoint)}


@dataclass(frozen=True)
class Manifest(TrainingPoint, Origin):
    _: KW_ONLY
    versions: dict[str, str]
    """Package → version that wrote the checkpoint."""
    files: tuple[FileEntry, ...]

    @property
    def stored_bytes(self) -> int:
        return sum(entry.stored_bytes for entry in self.files)

    def to_json(self) -> bytes:
        document = {"format": MANIFEST_FORMAT, **asdict(self)}
        return json.dumps(document, indent=1, sort_keys=True, allow_nan=False).encode()

    def journal_entry(self, author: tuple[int, int] | None = None) -> dict[str, str]:
        """The state's name in the run's journal, `<update>.<part>[@<attempt>.<rank>]`, and the SHA-256 of its manifest.
        `author`: attempt and rank of an emergency checkpoint."""
        saved_by = "" if author is None else f"@{author[0]}.{author[1]}"
        return {"state": f"{self.update}.{self.part}{saved_by}", "manifest": hashlib.sha256(self.to_json()).hexdigest()}

    def fetchable(self, folder: Path, name: str = MANIFEST_NAME) -> dict[str, Any]:
        """The files of this part in `folder`, the manifest of this `name` among them, for the run's journal."""
        raw = self.to_json()
        files: Files = [(entry.name, entry.stored_bytes, entry.sha256) for entry in self.files]
        files.append((name, len(raw), hashlib.sha256(raw).hexdigest()))
        return {"parts": self.parts, "folder": str(folder), "files": files}

    def check_recorded(self, recorded: Recorded, author: tuple[int, int] | None = None) -> bool:
        """The journal has this manifest; False for a state that it does not know. Raises CheckpointError where it has
        another one."""
        name, digest = self.journal_entry(author).values()
        digests = [written for state, written in recorded if state == name]
        if digests and digest not in digests:
            raise CheckpointError(
                f"its manifest is not the one that it was saved with: SHA-256 {digest[:12]}…, and the run's journal "
                f"recorded {digests[-1][:12]}…"
            )
        return bool(digests)

    @classmethod
    def from_json(cls: type[Kind], raw: bytes) -> Kind:
        """Raises CheckpointError."""
        try:
            document = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"its manifest is not JSON: {error}") from error
        if isinstance(document, dict) and document.get("format") != MANIFEST_FORMAT:
            written = ascii(document.get("format"))[:80]
            raise CheckpointError(f"its format is {written}, and this release reads {MANIFEST_FORMAT}")
        manifest = _parsed(cls, document)
        files = tuple(_parsed(FileEntry, file) for file in manifest.files)
        if len({entry.name for entry in files}) < len(files):
            raise CheckpointError("its manifest lists a file twice")
        if manifest.part >= manifest.parts:
            raise CheckpointError(f"its manifest is of part {manifest.part} of {manifest.parts}")
        return replace(manifest, files=files)


def _parsed(kind: type[Document], document: object) -> Document:
    """The fields of a manifest or of a file in it. Raises CheckpointError for what no training of ours has written."""
    if not isinstance(document, dict):
        raise CheckpointError("its manifest is not an object, or has a file that is none")
    values: dict[str, Any] = {field.name: document.get(field.name) for field in fields(kind)}
    for name, value in values.items():
        if not _VALID[name](value):
            raise CheckpointError(f"its manifest has {name} = {ascii(value)[:80]}")
    return kind(**values)


def _number(least: int = 0, below: int = 1 << 62) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value < below


def _text(pattern: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < math.inf


def _table(valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(valid, value.values()))


_VALID: Mapping[str, Callable[[Any], bool]] = {
    "config_hash": _text(rf".{{0,{_MAX_TEXT}}}"),
    "world_size": _number(least=1),
    "part": _number(),
    "parts": _number(1, _MAX_PARTS + 1),
    "attempt": _number(),
    "layout": _text(r"[A-Za-z0-9-]{1,40}( [A-Za-z0-9-]{1,40}){0,3}"),
    "inputs": _table(_text("(?s).*")),
    "update": _number(),
    "iteration": _number(),
    "window": _table(_is_finite),
    "best": _table(_is_finite),
    "versions": _table(_text("(?s).*")),
    "files": lambda value: isinstance(value, list) and 0 < len(value) <= _MAX_FILES,
    "name": _text(r"([a-z]{1,60}/)?\.?[A-Za-z0-9_][A-Za-z0-9_-]{0,100}(\.[A-Za-z0-9_-]{1,20}){0,3}"),
    "sha256": _text(r"[0-9a-f]{64}"),
    "stored_bytes": _number(),
    "bytes": _number(),
    "compression": lambda value: isinstance(value, str) and value in _SUFFIX,
}


def folder_name(update: int) -> str:
    return f"step-{update:09d}"


def update_of(folder: str) -> int | None:
    """The update in a folder's name; None for a name that is not ours."""
    match = _FOLDER.fullmatch(folder)
    return int(match[1]) if match else None


CHUNK_BYTES = 8 << 20
GZIP_LEVEL = 6
ZSTD_LEVEL = 1
_GZIP_WINDOW = 31
"""zlib's wbits for a gzip header and trailer."""


class HashedFile:
    """A new file that `mx.save_safetensors` can write to, append-only."""

    mode = "wb"

    def __init__(self, folder: Path, name: str, compression: str) -> None:
        """Raises OSError, and JobError for a compression that this node lacks."""
        self.name = name + _SUFFIX[compression]
        self._compression = compression
        self._packer = packer(compression)
        self._hash = hashlib.sha256()
        self._bytes = self._stored = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(folder / self.name, flags, 0o600)
        self.closed = False
        self.durable = False
        """Committed, and sure to survive a power cut (attempt.sync_file)."""

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            piece = view[start : start + CHUNK_BYTES]
            self._store(piece if self._packer is None else self._packer.compress(piece))
        self._bytes += len(view)
        return len(view)

    def tell(self) -> int:
        return self._bytes

    def seek(self, offset: int, whence: int = 0) -> int:
        """Not possible; MLX accepts no file without the method."""
        raise UnsupportedOperation("written from its beginning to its end")

    def commit(self) -> FileEntry:
        """Flush to disk and close. Raises OSError."""
        if self._packer is not None:
            self._store(self._packer.flush())
        self.durable = sync_file(self._descriptor)
        self.close()
        return FileEntry(self.name, self._hash.hexdigest(), self._stored, self._bytes, self._compression)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            os.close(self._descriptor)

    def _store(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        self._hash.update(view)
        self._stored += len(view)
        while len(view):
            view = view[os.write(self._descriptor, view) :]


def replace_folder(folder: Path, target: Path) -> None:
    """Rename `folder` to `target`; one that is already there is moved out of the way first, by one rename too."""
    replaced = move_aside(target) if target.exists() or target.is_symlink() else None
    folder.rename(target)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def move_aside(path: Path) -> Path:
    """One rename, so that a killed deletion leaves nothing like a checkpoint; returns the folder to delete."""
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    path.rename(aside / "removed")
    return aside


def verify_file(folder: Path, entry: FileEntry, *, check_hash: bool) -> None:
    """Check the kind and size of the file, and with `check_hash` its hash. Raises CheckpointError, OSError."""
    with _opened(folder, entry) as file:
        if check_hash and hashed(file, entry.stored_bytes) != entry.sha256:
            raise CheckpointError(f"{entry.name} is damaged: its hash is not the manifest's")


def list_files(folder: Path, names: Iterable[str], hashes: Mapping[str, str] = {}) -> Files:
    """Those files that are there. `hashes`: SHA-256 by name, of those of which it is known. Raises OSError."""
    files = Files()
    for name in sorted(names):
        if (path := folder / name).is_file():
            size = path.stat().st_size
            with path.open("rb") as file:
                files.append((name, size, hashes.get(name) or hashed(file, size)))
    return files


def hashed(file: BufferedReader, size: int) -> str:
    """The SHA-256 of the next `size` bytes, or of what is there of them. Raises OSError."""
    digest = hashlib.sha256()
    while size and (data := file.read(min(CHUNK_BYTES, size))):
        size -= len(data)
        digest.update(data)
    return digest.hexdigest()


def unpacked(folder: Path, entry: FileEntry) -> Iterator[bytes]:
    """A compressed file's content, in pieces of at most CHUNK_BYTES, so that a zip bomb is noticed while it unpacks.
    Raises CheckpointError when it is more or less than the manifest says, OSError."""
    size = 0
    with (
        _opened(folder, entry) as stored,
        gzip.GzipFile(fileobj=stored) if entry.compression == "gzip" else _zstd().ZstdFile(stored) as file,
    ):
        while data := _read_packed(file):
            size += len(data)
            if size > entry.bytes:
                raise CheckpointError(f"{entry.name} holds more than its manifest says")
            yield data
    if size != entry.bytes:
        raise CheckpointError(f"{entry.name} holds {size:,} bytes, and its manifest says {entry.bytes:,}")


def _read_packed(file: Any) -> bytes:
    try:
        data: bytes = file.read(CHUNK_BYTES)
        return data
    except Exception as error:  # the error types of the modules have no common base
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise CheckpointError(f"it cannot be unpacked: {error}") from error


@contextlib.contextmanager
def _opened(folder: Path, entry: FileEntry) -> Iterator[BufferedReader]:
    try:
        file = open_stored(folder / entry.name)
    except FileNotFoundError as error:
        raise CheckpointError(f"{entry.name} is missing") from error
    with file:
        entry.check_size(os.fstat(file.fileno()).st_size)
        yield file


def open_stored(path: Path) -> BufferedReader:
    """A file, to be read, but no link to one. Raises OSError as `regular_descriptor`."""
    return os.fdopen(regular_descriptor(path, os.O_RDONLY | os.O_NOFOLLOW), "rb")


def packer(compression: str) -> Any:
    """An object with zlib's `compress` and `flush`; None for "none". Raises JobError for a compression that this node
    lacks."""
    if compression == "gzip":
        return zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, _GZIP_WINDOW)
    return _zstd().ZstdCompressor(level=ZSTD_LEVEL) if compression == "zstd" else None


def _zstd() -> Any:
    """The standard library's (Python 3.14) or its backport. Raises JobError."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise JobError(
        "[checkpoint] compression: zstd needs Python 3.14, or the package backports.zstd: install it, or use "
        'compression = "gzip"'
    )


@dataclass(frozen=True)
class ResumePoint(TrainingPoint):
    source: str = "none"
    """"emergency", "checkpoint", "adapter" or "none"."""
    rank: int | None = None
    """Whose state it is; None where each rank has its own part."""
    recorded: bool = False
    """The run's journal has its manifests."""
    saved_by: str = field(default="", compare=False)
    """For the report."""


def first_restored(
    restored: Iterable[ResumePoint | None],
    refused: Callable[[], int],
    needs_state: str,
    reporter: Reporter,
    start: ResumePoint | None = None,
) -> ResumePoint:
    """The first state that could be `restored`, or else `start`, reported. `refused`: how many states were, on all
    ranks. `needs_state`: AttemptSpec.needs_state. Raises JobError with it where there is none."""
    started = time.perf_counter()
    point = next((state for state in restored if state is not None), None)
    count, resumed = refused(), point is not None
    why = f"no state to resume from ({f'{count} were refused' if count else 'no rank has any'})"
    if not resumed and needs_state:
        todo = "bring the state back and `flightdeck resume last`, or begin at iteration 1 with"
        raise JobError(f"{why}, and {needs_state}: {todo} `flightdeck resume last --without-state`")
    point, seconds = point or start or ResumePoint(), time.perf_counter() - started
    facts = {"iteration": point.iteration, "update": point.update, "from_rank": point.rank, "refused": count}
    reporter.event("resumed", source=point.source, seconds=seconds, **facts)
    if not resumed:
        adapter = ", with the weights of resume_adapter_file" if point.source == "adapter" else ""
        reporter.warn(f"{why}: the training starts at iteration 1{adapter}")
        return point
    kind = "an emergency checkpoint" if point.source == "emergency" else "a checkpoint"
    unknown = "" if point.recorded else "; its manifest is not recorded in the run's journal"
    update = f"iteration {point.iteration} (update {point.update})"
    reporter.print(f"resumes after {update} from {kind}{point.saved_by}, in {seconds:.2f} s{unknown}")
    return point


def check_manifest(
    manifest: Manifest, config_hash: str, recorded: Recorded, author: tuple[int, int] | None = None
) -> None:
    """It is of this job, and as it was when the state was saved. Raises CheckpointError."""
    if manifest.config_hash != config_hash:
        raise CheckpointError("it is of another job")
    for name, kind in (("window", ReportWindow), ("best", BestValidation)):
        if unknown := getattr(manifest, name).keys() - kind.__dataclass_fields__.keys():
            raise CheckpointError(f"its manifest has {name} with {ascii(min(unknown))[:80]}")
    manifest.check_recorded(recorded, author)


def check_inputs(manifest: Manifest, present: Sequence[Mapping[str, str]], reporter: Reporter, *, accept: bool) -> None:
    """Its data and its base model are those that any rank has now (`present`: Origin.inputs). Raises JobError."""
    changed = _changed({ORDER: None, **manifest.inputs}, present)
    if "train.jsonl" in changed:
        changed = [name for name in changed if name != ORDER]
    if not changed:
        return
    message = f"{' and '.join(changed)} changed since the state of iteration {manifest.iteration} was saved"
    if not accept:
        raise JobError(
            f"{message}: put back what the run was started with, go on all the same with `flightdeck resume last "
            "--accept-changed-data`, or start a new run with `flightdeck launch`"
        )
    reporter.warn(f"{message}, and --accept-changed-data goes on all the same")


def best_so_far(manifest: Manifest, present: Sequence[Mapping[str, str]]) -> Mapping[str, Any]:
    """Its best validation; none where that was of other data or of another base model than now (see check_inputs)."""
    return {} if {"valid.jsonl", BASE_MODEL}.intersection(_changed(manifest.inputs, present)) else manifest.best


def _changed(saved: Mapping[str, str | None], present: Sequence[Mapping[str, str]]) -> list[str]:
    return [name for name, value in saved.items() if all(held.get(name) != value for held in present)]
