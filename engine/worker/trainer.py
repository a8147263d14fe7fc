"""The trainer: one rank's training process, started by the keeper with everything it needs in its environment.

It imports MLX late and mlx-lm after the group has been made: a rank that comes 15 seconds after the others fails the
ring's start, and what loads slowly must not be in between.
Exit codes: 0 completed, or stopped as asked; 1 an exception; 3 the group is not the planned one; 4 diverged; 5 a peer
was lost, the state of the last finished update has been rescued where that could be; 6 the keeper is gone; 7 its
parameters differ from the other ranks'.
"""

from __future__ import annotations

import math
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from .control import EXIT_PEER_LOST, Control
from .events import EventWriter
from .priority import raise_priority
from .wire import EVENTS_ENV, SPEC_ENV, AttemptSpec

if TYPE_CHECKING:
    from .collective import Collective
    from .data import Split
    from .job import Job
    from .loop import Loop
    from .reporting import Reporter
    from .rescue import Rescue
    from .strategies.strategy import Strategy

EXIT_EXCEPTION, EXIT_GROUP, EXIT_DIVERGED, EXIT_CORRUPTED = 1, 3, 4, 7
_EXIT_CODES = {
    "GroupError": EXIT_GROUP,
    "Diverged": EXIT_DIVERGED,
    "PeerLost": EXIT_PEER_LOST,
    "Corrupted": EXIT_CORRUPTED,
}
"""By the exception's name: it is imported late, where it is raised."""


def main() -> int:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    control = Control()
    raise_priority()
    spec_path = Path(os.environ[SPEC_ENV])
    spec = AttemptSpec.from_json(spec_path.read_text())
    rank = int(os.environ["MLX_RANK"])
    events_path = os.environ.get(EVENTS_ENV)
    events = EventWriter(Path(events_path) if events_path else None, rank, spec.attempt)
    try:
        return _run(spec, spec_path, rank, control, events)
    except BaseException as error:
        code = _fail(error, events)
        sys.stdout.flush()
        sys.stderr.flush()
        # Past the interpreter's own end, which would wait for MLX's threads, and they for peers that are gone.
        os._exit(code)


def _run(spec: AttemptSpec, spec_path: Path, rank: int, control: Control, events: EventWriter) -> int:
    import mlx.core as mx

    from .collective import Collective
    from .reporting import Reporter

    here = next(entry for entry in spec.ranks if entry.rank == rank)
    os.chdir(here.workdir)
    reporter = Reporter(rank, events)
    reporter.phase("loading")
    if mx.default_device() == mx.Device(mx.cpu):
        # On the CPU each fused kernel is built by the system's C++ compiler, which costs more than it gains.
        mx.disable_compile()
    collective = Collective(spec.backend, spec.world_size, rank)
    reporter.say(f"rank {rank} of {spec.world_size} on {here.node}, backend {spec.backend}: loading")
    return _train(spec, spec_path, collective, control, reporter)


def _train(spec: AttemptSpec, spec_path: Path, collective: Collective, control: Control, reporter: Reporter) -> int:
    import mlx.core as mx
    from mlx_lm.utils import maybe_set_recommended_wired_limit

    from . import checkpoints
    from .collective import PeerLost
    from .data import load_split
    from .job import Job, JobError, config_hash
    from .model import files_checksum, load_model, parameter_checksum, sizes
    from .snapshot import versions
    from .strategies.chosen import chosen as chosen_strategy

    here = next(entry for entry in spec.ranks if entry.rank == collective.rank)
    raw = spec.job or {}
    own = {"adapter_path": here.adapter_path, "resume_adapter_file": here.resume_adapter_file}
    chosen = {**raw, **{key: path for key, path in own.items() if path is not None}}
    job = Job.of(chosen, model=here.model, data=here.data, workdir=Path(here.workdir), home=spec_path.parents[2])
    maybe_set_recommended_wired_limit()
    model, tokenizer = load_model(job)

    def truncated(longest: int) -> None:
        reporter.warn(f"examples are longer than max_seq_length = {job.max_seq_length} (one has {longest} tokens): cut")

    train, valid = (load_split(job, name, tokenizer, truncated) for name in ("train", "valid"))
    if not len(train):
        raise JobError(f"{job.data / 'train.jsonl'} is missing or empty: there is nothing to train on")
    if not len(valid):
        reporter.warn(f"{job.data / 'valid.jsonl'} is missing or empty: training goes on without validation")
    test = load_split(job, "test", tokenizer, truncated) if job.test else None
    if test is not None and not len(test):
        raise JobError(f"{job.data / 'test.jsonl'} is missing or empty, and test = true asks for it")
    # A model that is divided over the ranks is never whole in the memory of one.
    checksum = parameter_checksum(model) if job.strategy == "data" else files_checksum(job)
    collective.agree(
        {
            "the job's configuration": int(config_hash(raw)[:8], 16),
            "the model or the adapter": int(checksum[:8], 16),
            "train.jsonl": train.checksum,
            "valid.jsonl": valid.checksum,
        }
    )
    if collective.rank == 0:
        checkpoints.save_config(job, job.layers(len(model.layers)))
    reporter.attach_callbacks(job)
    trainable, total = sizes(model)
    reporter.event(
        "start",
        versions=versions(),
        world_size=spec.world_size,
        backend=spec.backend,
        config_hash=config_hash(raw),
        parameter_checksum=checksum,
        iterations=job.iters,
        trainable_parameters=trainable,
        total_parameters=total,
        device=str(mx.default_device()),
    )
    pieces = f" in {train.num_chunks} chunks of {job.chunk_size}" if train.num_chunks is not None else ""
    reporter.say(
        f"training {trainable / 1e6:.3f} of {total / 1e6:.3f} million parameters, {job.fine_tune_type}, "
        f"{len(train)} examples{pieces}, {job.iters} iterations of {job.batch_size}"
    )
    shares = [entry.share for entry in spec.ranks]
    strategy = chosen_strategy(job, model, train, collective=collective, shares=shares, reporter=reporter)
    if job.optimizer_precision == "parameter" and strategy.in_16_bits:
        reporter.warn("optimizer_precision = parameter: in 16 bits, small updates are lost")
    training, rescue = _loop(spec, job, strategy, valid, collective=collective, control=control, reporter=reporter)
    try:
        outcome = training.run()
        if test is not None and not outcome.stopped:
            reporter.phase("validating")
            loss = training.evaluate(test, job.test_batches)
            if loss is not None:
                reporter.event("test", test_loss=loss, test_ppl=math.exp(loss))
                reporter.say(f"test loss {loss:.4f}, perplexity {math.exp(loss):.3f}")
    except PeerLost:
        rescue.leave()
        raise
    reporter.event("end", completed=outcome.completed, stopped=outcome.stopped, iteration=outcome.iteration)
    reporter.say(f"{'completed' if outcome.completed else 'stopped'} at iteration {outcome.iteration}")
    return 0


def _loop(
    spec: AttemptSpec,
    job: Job,
    strategy: Strategy,
    valid: Split,
    *,
    collective: Collective,
    control: Control,
    reporter: Reporter,
) -> tuple[Loop, Rescue]:
    """The training at the place where it begins or goes on, and what keeps its state. Raises JobError, PeerLost."""
    from .loop import Loop
    from .periodic import Cadence, Periodic
    from .places import Places, check_compression
    from .replicas import Replicas
    from .rescue import Rescue
    from .resume import Resume
    from .snapshot import Origin, state_hash

    rank, size = collective.rank, collective.size
    here = next(entry for entry in spec.ranks if entry.rank == rank)
    part, parts = (0, 1) if strategy.replicated else (rank, size)
    hashed = state_hash(spec.job or {})
    origin = Origin(hashed, size, part, parts)
    places = Places.of(job.home, Path(here.workdir), spec.run_id, here.checkpoint_folder)
    cadence = Cadence(spec.checkpoint_every, spec.checkpoint_keep, spec.checkpoint_compression)
    start = None
    if spec.resume:
        places.fetch(rank, size, replicated=strategy.replicated, keep=cadence.kept(parts), reporter=reporter)
        adapter = job.resume_adapter_file is not None
        search = Resume(collective, strategy, hashed, reporter, stops=spec.on_corruption == "stop")
        start = search.run(places.states(), adapter=adapter, reached=spec.reached)
    writes = spec.checkpoint_every > 0 and (part > 0 or rank == 0)
    if writes:
        check_compression(spec.checkpoint_compression)
    periodic = Periodic(
        places.folder(part, parts),
        cadence,
        origin,
        reporter,
        writes=writes,
        remote=places.remote(part, parts) if writes else None,
    )
    rescue = Rescue(job.home, spec.attempt, rank, origin, reporter)
    control.on_rescue = rescue.left_by_control
    every = spec.replica_check_every if strategy.replicated else 0
    loop = Loop(
        job=job,
        strategy=strategy,
        valid=valid,
        collective=collective,
        control=control,
        reporter=reporter,
        replicas=Replicas(strategy.model, collective, reporter, every=every, stops=spec.on_corruption == "stop"),
        periodic=periodic,
        rescue=rescue,
        start=start,
    )
    return loop, rescue


def _fail(error: BaseException, events: EventWriter) -> int:
    """Say what happened, in the events and on standard error; the exit code."""
    name = type(error).__name__
    code = _EXIT_CODES.get(name, EXIT_EXCEPTION)
    text = "".join(traceback.format_exception(error))
    events.write("failure", error_type=name, message=str(error) or name, traceback=text, **getattr(error, "facts", {}))
    # What the user can mend is told in a line; what only we can, with where it happened.
    known = code != EXIT_EXCEPTION or name == "JobError"
    print(f"{name}: {error}" if known else text, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
