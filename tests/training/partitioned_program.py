"""One rank of a test: trains the cases of `cases.json` one after the other, without the trainer around the strategy,
and writes its results: `rank<N>.json`, and its gradients of the first update and the last weights as safetensors.

    python -m tests.training.partitioned_program DIRECTORY      (under mlx.launch, or alone)
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from engine.protocol import exchange
from engine.protocol.events import EventWriter
from engine.protocol.job import Job
from engine.protocol.partition import parse_split
from engine.trainer.collective import Collective
from engine.trainer.model import load_model, row_format
from engine.trainer.strategies.data_parallel import DataParallel
from engine.trainer.strategies.pipeline import Pipeline
from engine.trainer.strategies.sharded import Sharded
from engine.trainer.weights import floats, write_safetensors
from engine.training.data import DataLoader, Split
from engine.training.reporting import Reporter


def strategy(job: Job, model: Any, train: Any, collective: Collective, case: dict[str, Any]) -> Any:
    reporter = Reporter(EventWriter(None, collective.rank, 1))
    if job.strategy == "pipeline":
        loader = DataLoader(train, job, [1.0], 0, reporter)
        return Pipeline(job, model, loader, collective, parse_split(case.get("split") or str(job.layer_split)))
    loader = DataLoader(train, job, case.get("shares") or [1.0] * collective.size, collective.rank, reporter)
    return {"data": DataParallel, "sharded": Sharded}[job.strategy](job, model, loader, collective)


def gradients(training: Any, job: Job, tokens: float) -> dict[str, mx.array]:
    """This rank's mean gradients, between exchange and apply."""
    if job.strategy != "data":
        return {name: value / tokens for name, value in training.sums.items()}
    held, sums = training.gradients, list(training.gradients._sums)
    found = {name: value for piece in held.pieces() for name, value in piece.items()}
    # Back to where they were taken from.
    held._sums, held._unevaluated = sums, {} if sums else dict(found)
    return {name: value.astype(mx.float32) / (tokens / held.divided_by) for name, value in found.items()}


def run(case: dict[str, Any], collective: Collective, directory: Path) -> dict[str, Any]:
    rank = collective.rank
    job = Job.from_spec(case["job"], model=None, data=None, workdir=directory, home=directory)
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model, tokenizer = load_model(job)
    if case.get("embeddings"):
        model.model.embed_tokens.unfreeze()
    train, valid = (Split(job, name, row_format(job, tokenizer), lambda _: None) for name in ("train", "valid"))
    if "bucket" in case:
        exchange.LEAST_BUCKET = case["bucket"]
    training = strategy(job, model, train, collective, case)
    del model
    loaded = mx.get_peak_memory() - before
    losses, norms, seconds, targets, state = [], [], [], [], 0
    training.model.train()
    for iteration in range(1, job.iters + 1):
        started = time.perf_counter()
        last = iteration % job.grad_accumulation_steps == 0 or iteration == job.iters
        share = training.accumulate(iteration - 1, last=last)
        targets.append(share.tokens)
        if not last:
            continue
        # Gradients' sums, weights and moments: what a rank holds between two steps.
        state = max(state, mx.get_active_memory() - before)
        loss, tokens = training.exchange([share.loss_sum, float(share.tokens)])
        if iteration <= job.grad_accumulation_steps:
            found = gradients(training, job, tokens)
            mx.save_safetensors(str(directory / f"{case['name']}.gradients.{rank}.safetensors"), found)
            del found
        losses.append(loss / tokens)
        norms.append(training.apply(tokens))
        seconds.append(time.perf_counter() - started)
    peak = mx.get_peak_memory() - before
    training.model.eval()
    parts = [training.loss(valid, indices) for indices in valid.fixed_batches(job.batch_size, job.seed, -1)]
    totals = floats(collective.all_sum(mx.array([[loss, float(count)] for loss, count in parts]).sum(axis=0)))
    trained = training.trained_weights()
    if rank == 0:
        write_safetensors(directory / f"{case['name']}.trained.safetensors", trained.entries, trained.arrays)
    trained.drain()
    held = sum(value.nbytes for _, value in tree_flatten(training.model.parameters()))
    return {
        "losses": losses,
        "norms": norms,
        "seconds": seconds,
        "targets": targets,
        "valid": totals[0] / totals[1],
        "state": state,
        "held": held,
        "loaded": loaded,
        "peak": peak,
    }


def main(directory: Path) -> None:
    mx.set_default_device(mx.cpu)
    mx.disable_compile()
    cases = json.loads((directory / "cases.json").read_text())
    rank = int(os.environ.get("MLX_RANK", "0"))
    collective = Collective("ring", int(os.environ.get("RANKS", "1")), rank)
    results = {}
    for case in cases:
        results[case["name"]] = run(case, collective, directory)
    (directory / f"rank{rank}.json").write_text(json.dumps(results))
    collective.barrier()
    # Past MLX's own end, which may wait for peers that are gone.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
