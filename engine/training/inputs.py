"""A rank's inputs: its job with its own paths, its data, and the checksums by which ranks and attempts compare them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from engine.protocol.attempt import RankSpec, open_regular
from engine.protocol.job import Job, JobError
from engine.training.data import RowFormat, Split, load_split, load_train_split
from engine.training.reporting import Reporter

_PIECE, _PIECES = 2**12, 2**9
"""Bytes of one read, and about how many reads per file."""


def rank_job(raw: dict[str, Any], rank: RankSpec, home: Path) -> Job:
    """The job with this rank's own paths. Raises JobError."""
    own = {"adapter_path": rank.adapter_path, "resume_adapter_file": rank.resume_adapter_file}
    chosen = {**raw, **{key: path for key, path in own.items() if path is not None}}
    return Job.from_spec(chosen, model=rank.model, data=rank.data, workdir=Path(rank.workdir), home=home)


def load_splits(job: Job, row_format: RowFormat, reporter: Reporter) -> tuple[Split, Split, Split | None]:
    """The examples for training, for validation (perhaps empty), and for the job's `test`. Raises JobError."""

    def truncated(longest: int) -> None:
        reporter.warn(
            f"some examples are longer than max_seq_length = {job.max_seq_length} "
            f"(one has {longest} tokens) and are truncated",
            about="truncated",
        )

    train = load_train_split(job, row_format, truncated)
    valid = load_split(job, "valid", row_format, truncated)
    wants_validation = "patience" if job.patience is not None else "save_best" if job.save_best else None
    if not len(valid) and wants_validation is not None:
        raise JobError(f"{job.data / 'valid.jsonl'} is missing or empty, and {wants_validation} needs it")
    if not len(valid):
        reporter.warn(f"{job.data / 'valid.jsonl'} is missing or empty: training continues without validation")
    test = load_split(job, "test", row_format, truncated) if job.test else None
    if test is not None and not len(test):
        raise JobError(f"{job.data / 'test.jsonl'} is missing or empty, and test = true needs it")
    return train, valid, test


def partly_resumed(job: Job, found: int, trained: int) -> str:
    """The warning about weights that lack some of those that are trained."""
    named = f"resume_adapter_file = {job.resume_adapter_file!r}"
    return f"{named} has {found:,} of the {trained:,} tensors that are trained: the others begin anew"


def crc_text(split: Split) -> str:
    return f"crc32 {split.checksum:08x}"


def files_checksum(job: Job, *, adapter: bool) -> str:
    """16 hexadecimal digits of samples of the model's files, and with `adapter` of its file. Raises OSError."""
    digest = hashlib.blake2b(digest_size=8)
    paths = [job.model / "config.json", *sorted(job.model.glob("model*.safetensors"))]
    if adapter and job.resume_adapter_file is not None:
        paths.append(Path(job.resume_adapter_file))
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with open_regular(path) as file:
            for start in range(0, size, max(_PIECE, size // _PIECES)):
                file.seek(start)
                digest.update(file.read(_PIECE))
    return digest.hexdigest()
