"""Our trainer's steps with some batches of an epoch, which tests.bench.batches starts: `python batches_step.py FILE`,
with an earlier commit's engine perhaps.

FILE holds {"job": …, "tokens": …}. In order of their width every so many batches are taken that the padded inputs are
about so many; they are trained on in random order, but before that, a few others; at the end the one with the largest
scores of attention, for the peak. Prints an object: batches, the real and computed inputs of each of the epoch;
targets, processor seconds and MLX's peak, in bytes, of those that were trained on (none with 0 tokens).
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from engine.protocol.job import Job
from engine.trainer.collective import Collective
from engine.trainer.model import limit_cache, load_model, row_format, set_up_device
from engine.trainer.strategies.data_parallel import DataParallel
from engine.training.data import Batch, load_train_split


def main(file: Path) -> None:
    request: dict[str, Any] = json.loads(file.read_text())
    job = Job.from_spec(request["job"], model=None, data=None, workdir=file.parent, home=file.parent)
    set_up_device(job)
    model, tokenizer = load_model(job)
    split = load_train_split(job, row_format(job, tokenizer), lambda _: None)
    sampler = split.sampler(job.batch_size, job.seed)
    batches = [split.batch(sampler.batch(position)) for position in range(sampler.batches_per_epoch)]
    sizes = [(batch.targets, _inputs(batch)) for batch in batches]
    measured = {"targets": 0, "seconds": 0.0, "peak": 0}
    if request["tokens"]:
        batches.sort(key=lambda batch: batch.tokens.shape[1])
        every = max(1, min(round(sum(map(_inputs, batches)) / request["tokens"]), len(batches) // 3))
        chosen = batches[every // 2 :: every]
        random.Random(7).shuffle(chosen)
        largest = max(batches, key=lambda batch: _inputs(batch) * batch.tokens.shape[1])
        strategy = DataParallel(job, model, cast("Any", None), Collective("any", 1, 0))
        model.train()
        _train(job, strategy, batches[:3])
        started = time.process_time()
        _train(job, strategy, chosen)
        measured["seconds"] = time.process_time() - started
        measured["targets"] = sum(batch.targets for batch in chosen)
        _train(job, strategy, [largest])
        measured["peak"] = mx.get_peak_memory()
    print(json.dumps({"batches": sizes, **measured}))


def _inputs(batch: Batch) -> int:
    return batch.tokens[:, 1:].size


def _train(job: Job, strategy: DataParallel, batches: list[Batch]) -> None:
    for batch in batches:
        strategy.forward_backward(batch, last=True)
        strategy.exchange([])
        strategy.apply(batch.targets)
        limit_cache(job)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
