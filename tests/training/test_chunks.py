"""A dataset of several chunks, streamed: real ranks train on it as one does, and a killed run resumes exactly."""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.protocol.events import EventWriter
from engine.protocol.job import Job, JobError
from engine.protocol.partition import progress_text
from engine.trainer.model import load_model, row_format
from engine.training.data import Batch, DataLoader, Split
from engine.training.reporting import Reporter
from tests.training.launching import launch
from tests.training.tiny import Tiny, make_job, sentence, write_rows
from tests.waiting import wait_until

SIZE, CHUNK, BATCH = 643, 120, 8
CHUNKS, PER_EPOCH = 6, SIZE // BATCH


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with 643 training examples, no two alike, and 200 for validation."""
    data = tmp_path_factory.mktemp("large")
    dice = random.Random(5)
    for name, size in (("train", SIZE), ("valid", 200)):
        write_rows(data / f"{name}.jsonl", ({"text": f"{sentence(dice, 1, 12)} {number}"} for number in range(size)))
    return data


def chunked_job(tiny: Tiny, data: Path, home: Path, **keys: Any) -> Job:
    return make_job(tiny, home, **{"data": str(data), "chunk_size": CHUNK, **keys})


def load(job: Job, name: str = "train") -> Split:
    return Split(job, name, row_format(job, load_model(job)[1]), lambda _: None)


def feed(job: Job, counts: tuple[int, ...] = (BATCH,), rank: int = 0) -> DataLoader:
    reporter = Reporter(EventWriter(job.home / f"rank{rank}.events.jsonl", rank, 1))
    return DataLoader(load(job), job, counts, rank, reporter)


def same(one: Batch, other: Batch) -> bool:
    return np.array_equal(one.tokens, other.tokens) and np.array_equal(one.bounds, other.bounds)


@pytest.mark.busy
@pytest.mark.slow
def test_two_ranks_train_on_chunks_as_one_does(tiny: Tiny, large: Path, tmp_path: Path) -> None:
    """A whole epoch and the first chunk of the next."""
    iters = PER_EPOCH + 16
    job = tiny.job(data=str(large), chunk_size=CHUNK, iters=iters, learning_rate=1e-4, val_batches=5)
    alone = launch(tmp_path / "alone", job).succeeded()
    both = launch(tmp_path / "both", job, shares=(3.0, 1.0)).succeeded()
    assert len(both.losses()) == iters and both.losses(0) == both.losses(1)
    assert np.abs(np.array(both.losses()) - alone.losses()).max() < 1e-4
    validations = [[event["val_loss"] for event in run.events(0, "validation")] for run in (alone, both)]
    assert validations[0] == pytest.approx(validations[1], abs=1e-4) and len(validations[0]) == 2

    reported = [(event["epoch"], event["chunk"]) for event in both.events(0, "chunk")]
    assert reported == [*((0, chunk) for chunk in range(1, CHUNKS + 1)), (1, 1)]
    for rank in (0, 1):
        chunks = both.events(rank, "chunk")
        assert [(event["epoch"], event["chunk"]) for event in chunks] == reported
        assert chunks[5]["iteration"] == PER_EPOCH
        assert all(event["progress"] == progress_text(event["chunk"], CHUNKS) for event in chunks)
        assert "Processing chunk 3/6 (50% complete)" in both.log(rank)
    assert f"{SIZE} examples in {CHUNKS} chunks of {CHUNK}" in both.log()


def test_only_a_large_split_is_streamed(tiny: Tiny, tmp_path: Path) -> None:
    """The split has 61 examples."""
    for keys, streams in (
        ({"chunk_size": 61}, True),
        ({"chunk_size": 62}, False),
        ({"chunk_size": 61, "chunking": False}, False),
    ):
        shutil.rmtree(tmp_path / "index", ignore_errors=True)
        split = load(chunked_job(tiny, tiny.text, tmp_path, **keys))
        assert split.plan.enabled is streams
        assert (tmp_path / "index").exists() is streams, "a large file is indexed on disk"
    assert len(load(chunked_job(tiny, tmp_path, tmp_path))) == 0


@pytest.mark.parametrize(("form", "masked"), [("text", False), ("chat", True), ("completions", True)])
def test_streamed_examples_are_those_in_memory(tiny: Tiny, tmp_path: Path, *, form: str, masked: bool) -> None:
    keys = {"mask_prompt": masked, "max_seq_length": 40}
    streamed = load(chunked_job(tiny, getattr(tiny, form), tmp_path, chunk_size=10, **keys))
    held = load(chunked_job(tiny, getattr(tiny, form), tmp_path, chunking=False, **keys))
    assert (len(streamed), streamed.checksum) == (len(held), held.checksum)
    assert (streamed.plan.num_chunks, held.plan.enabled) == (7, False)
    for indices in ([0], [60, 3, 17], list(range(61))):
        assert same(streamed.batch(indices), held.batch(indices))


def test_an_example_of_another_form_is_named(tiny: Tiny, tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", [{"text": "tower"}, {"prompt": "hold"}])
    streamed = load(chunked_job(tiny, tmp_path, tmp_path, chunk_size=2))
    with pytest.raises(JobError, match=r"train\.jsonl: line 2 does not have the format of the first one"):
        streamed.batch([1])
    write_rows(tmp_path / "train.jsonl", [{"words": "tower"}])
    with pytest.raises(JobError, match=r"train\.jsonl: line 1 has none of text"):
        load(chunked_job(tiny, tmp_path, tmp_path, chunk_size=1))


def test_shares_of_a_streamed_batch_are_the_whole_batch(tiny: Tiny, large: Path, tmp_path: Path) -> None:
    job = chunked_job(tiny, large, tmp_path)
    whole, shares = feed(job), [feed(job, (5, 2, 1), rank) for rank in range(3)]
    for position in (0, 22, 23, PER_EPOCH - 1, PER_EPOCH, 3 * PER_EPOCH + 7):
        rows = [row[:end].tolist() for row, (_, end) in _rows(whole.batch(position))]
        parts = [share.batch(position) for share in shares]
        assert [row[:end].tolist() for part in parts for row, (_, end) in _rows(part)] == rows


def _rows(batch: Batch) -> Iterator[tuple[Any, Any]]:
    return zip(batch.tokens, batch.bounds, strict=True)


def digest(batch: Batch) -> str:
    return hashlib.sha256(batch.tokens.tobytes() + batch.bounds.tobytes()).hexdigest()


def reached(output: Path, lines: int) -> bool:
    return output.read_text().count("\n") >= lines


STREAM = """
import json, sys
from pathlib import Path
from tests.training.test_chunks import digest, feed
from engine.protocol.job import Job

raw, home, position, output = json.loads(sys.argv[1])
job = Job.from_spec(raw, model=None, data=None, workdir=Path(home), home=Path(home))
stream = feed(job)
with open(output, "a", buffering=1) as file:
    while True:
        file.write(digest(stream.batch(position)) + "\\n")
        stream.end_batch(position)
        position += 1
"""


@pytest.mark.slow
@pytest.mark.parametrize("goals", [(13, 50), (13, 50, PER_EPOCH + 12)])
def test_a_killed_stream_resumes_at_the_exact_example(
    tiny: Tiny, large: Path, tmp_path: Path, goals: tuple[int, ...]
) -> None:
    """`kill -9` in the middle of a chunk, of a chunk's first batches, and of the second epoch."""
    job = chunked_job(tiny, large, tmp_path)
    undisturbed = feed(job)
    raw = tiny.job(data=str(large), chunk_size=CHUNK)
    output = tmp_path / "digests"
    output.touch()
    for goal in goals:
        position = len(output.read_text().splitlines())
        arguments = json.dumps([raw, str(tmp_path), position, str(output)])
        with subprocess.Popen([sys.executable, "-c", STREAM, arguments], stdout=subprocess.DEVNULL) as process:
            wait_until(partial(reached, output, goal), 60)
            process.kill()
        # A torn last line is a batch that was never trained on.
        output.write_text("".join(line for line in output.read_text().splitlines(keepends=True) if line[-1] == "\n"))
    digests = output.read_text().splitlines()
    assert len(digests) >= goals[-1]
    assert digests == [digest(undisturbed.batch(position)) for position in range(len(digests))]


def test_memory_is_freed_after_a_chunk(tiny: Tiny, large: Path, tmp_path: Path) -> None:
    job = chunked_job(tiny, large, tmp_path)
    stream, sampler = feed(job), load(job).sampler(BATCH, job.seed)
    last = next(position for position in itertools.count() if sampler.chunk_end(position))

    class Knot:
        def __init__(self) -> None:
            self.itself = self

    def knots() -> int:
        return sum(isinstance(found, Knot) for found in gc.get_objects())

    gc.disable()
    try:
        Knot()
        assert not stream.end_batch(last - 1) and knots() == 1
        assert stream.end_batch(last) and knots() == 0
    finally:
        gc.enable()
    (event,) = [json.loads(line) for line in (tmp_path / "rank0.events.jsonl").read_text().splitlines()]
    assert (event["event"], event["chunk"], event["num_chunks"], event["iteration"]) == ("chunk", 1, CHUNKS, last + 1)


def test_a_streamed_validation_is_the_same_every_time(tiny: Tiny, large: Path, tmp_path: Path) -> None:
    valid = load(chunked_job(tiny, large, tmp_path), "valid")
    assert valid.plan.enabled
    for limit, examples in ((-1, 200), (3, 24), (100, 200)):
        batches = [list(valid.fixed_batches(BATCH, 1, limit)) for _ in range(2)]
        assert all(np.array_equal(*pair) for pair in zip(*batches, strict=True))
        taken = [int(index) for index in itertools.chain(*batches[0])]
        assert len(set(taken)) == len(taken) == examples
