"""Measures that the memory of the chunked data pipeline is flat: `python -m tests.bench.chunks [SIZE …]`.

Streams one epoch of 50 thousand, 500 thousand and 5 million examples, each in a process of its own, through the
trainer's own reading, ordering, tokenising and batching, with the demo's tokenizer; beside it the same held in memory,
up to 500 thousand. Exit code 1 when the peak of the largest is more than 5 % above that of the smallest.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from mlx_lm.utils import load_tokenizer

from engine.protocol.events import EventWriter
from engine.protocol.job import Job
from engine.trainer.model import row_format
from engine.training.data import DataLoader, Split
from engine.training.reporting import Reporter

SIZES: Final = (50_000, 500_000, 5_000_000)
HELD: Final = 500_000
"""The largest dataset that is also held in memory."""
LIMIT: Final = 1.05
BATCH: Final = 32
BYTES_PER_EXAMPLE: Final = 120
"""On disk, at most, with its 8 bytes of the index."""


@dataclass(frozen=True)
class Epoch:
    """One epoch in one process."""

    examples: int
    chunked: bool
    taken: int
    """Examples that came."""
    begin_s: float
    """Until the first batch can be asked for: reading or indexing the file."""
    stream_s: float
    start_bytes: int
    """Resident set before the data, with MLX, mlx-lm and the tokenizer."""
    peak_bytes: int
    """The kernel's own greatest resident set, from the beginning of the data to the end of the epoch."""
    heap_blocks: int
    """Most blocks that Python's heap held, looked at where chunks end and at the end of the epoch."""


def write_examples(path: Path, count: int) -> None:
    """Radio calls, each with a number of its own."""
    dice = random.Random(3)
    flights = ("falcon", "heron", "kestrel", "osprey", "petrel", "plover", "raven", "tern")
    orders = ("climb to level one two zero", "turn left", "hold over the beacon", "land on runway three four")
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            text = f"tower to {dice.choice(flights)} {number}: {dice.choice(orders)}"
            file.write(json.dumps({"text": text}) + "\n")


def memory(field: str) -> int:
    """VmRSS or VmHWM (the peak) of this process, bytes."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[field].split()[0]) * 1024


def stream(home: Path, examples: int, *, chunked: bool) -> Epoch:
    """One epoch of the only rank, in this process."""
    raw = {"model": "demo/model", "data": f"data-{examples}", "batch_size": BATCH, "chunking": chunked}
    job = Job.from_spec(raw, model=None, data=None, workdir=home, home=home / f"run-{examples}-{chunked}")
    tokenizer = load_tokenizer(job.model)
    tokenizer.encode("tower")
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    start = memory("VmRSS")

    started = time.perf_counter()
    train = Split(job, "train", row_format(job, tokenizer), lambda _: None)
    if train.plan.enabled != chunked:
        raise SystemExit(f"{examples} examples: chunked is {not chunked}, not {chunked}")
    loader, order = (
        DataLoader(train, job, [1.0], 0, Reporter(EventWriter(None, 0, 1))),
        train.sampler(BATCH, job.seed),
    )
    ready = time.perf_counter()
    taken, blocks = 0, 0
    for position in range(order.batches_per_epoch):
        taken += len(loader.batch(position).tokens)
        loader.end_batch(position)
        if order.chunk_end(position) is not None:
            blocks = max(blocks, sys.getallocatedblocks())
    ended = time.perf_counter()
    gc.collect()
    blocks = max(blocks, sys.getallocatedblocks())
    return Epoch(examples, chunked, taken, ready - started, ended - ready, start, memory("VmHWM"), blocks)


def in_a_process(home: Path, examples: int, *, chunked: bool) -> Epoch:
    """The same in a new process, whose progress goes nowhere."""
    result = home / f"result-{examples}-{chunked}.json"
    arguments = [str(home), str(examples), str(int(chunked)), str(result)]
    subprocess.run([sys.executable, "-m", __spec__.name, "--one", *arguments], check=True, stdout=subprocess.DEVNULL)
    return Epoch(**json.loads(result.read_text()))


def tell(epoch: Epoch) -> None:
    data = epoch.peak_bytes - epoch.start_bytes
    print(
        f"{epoch.examples:>9,} {'chunked  ' if epoch.chunked else 'in memory'}"
        f"  peak RSS {epoch.peak_bytes / 1e6:7.1f} MB ({data / 1e6:+7.1f} for the data)"
        f"  heap {epoch.heap_blocks:>9,} blocks"
        f"  begins in {epoch.begin_s:6.2f} s  {epoch.taken / epoch.stream_s:8,.0f} examples/s, {epoch.taken:,} of them",
        flush=True,
    )


def measure(home: Path, sizes: list[int]) -> bool:
    """True if memory is flat from the smallest to the largest; prints the figures as they come."""
    needed = max(sizes) * BYTES_PER_EXAMPLE
    if shutil.disk_usage(home).free < 2 * needed:
        raise SystemExit(f"{home}: {2 * needed / 1e9:.1f} GB of free disk are needed")
    subprocess.run([sys.executable, "-m", "engine.demo_model", str(home / "demo")], check=True)
    chunked = []
    for size in sizes:
        data = home / f"data-{size}"
        data.mkdir()
        write_examples(data / "train.jsonl", size)
        chunked.append(in_a_process(home, size, chunked=True))
        tell(chunked[-1])
        if size <= HELD:
            held = in_a_process(home, size, chunked=False)
            tell(held)
            print(f"{'':>9} in memory × {held.peak_bytes / chunked[-1].peak_bytes:.1f} of chunked", flush=True)
        shutil.rmtree(data)
    first, last = chunked[0], chunked[-1]
    peaks, heaps = last.peak_bytes / first.peak_bytes, last.heap_blocks / first.heap_blocks
    met = max(peaks, heaps) <= LIMIT and all(epoch.examples - epoch.taken < BATCH for epoch in chunked)
    print(
        f"from {first.examples:,} to {last.examples:,} examples: peak RSS × {peaks:.3f}, Python heap × {heaps:.3f}"
        f"  (limit {LIMIT}): {'met' if met else 'missed'}"
    )
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("sizes", type=int, nargs="*", default=list(SIZES), help="examples, ascending")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        home, examples, chunked, result = options.one
        epoch = stream(Path(home), int(examples), chunked=bool(int(chunked)))
        Path(result).write_text(json.dumps(asdict(epoch)))
        return 0
    with tempfile.TemporaryDirectory() as name:
        return 0 if measure(Path(name), options.sizes) else 1


if __name__ == "__main__":
    sys.exit(main())
