"""One rank's training from its specification: model, data, the ranks' agreement, strategy, checkpoints and loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from engine.protocol.checksums import crc32_text, package_versions
from engine.protocol.job import Job, JobError, config_hash
from engine.protocol.partition import LayerSplit, format_split, layer_split, parse_split
from engine.trainer.checkpoint.resume import CheckpointLocations, Resume
from engine.trainer.checkpoint.saving import EmergencyCheckpoint, PeriodicCheckpoints
from engine.trainer.checkpoint.store import PACKAGES
from engine.trainer.collective import Collective, all_gather_object
from engine.trainer.elastic_group import ElasticGroup
from engine.trainer.loop import Loop
from engine.trainer.model import count_parameters, load_model, memory_mib, row_format, set_up_device
from engine.trainer.replica_check import ReplicaCheck, parameter_checksum
from engine.trainer.samples import Samples
from engine.trainer.strategies.base import Strategy
from engine.trainer.strategies.data_parallel import DataParallel
from engine.trainer.strategies.local import LocalSteps
from engine.trainer.strategies.pipeline import Pipeline
from engine.trainer.strategies.sharded import Sharded
from engine.training.checkpoint_files import ORDER, Origin, ResumePoint, packer
from engine.training.data import DataLoader, Split, checksums, files_checksum, load_splits, rank_facts, rank_job
from engine.training.loop import report_start
from engine.training.process import TrainingProcess


def load_training(process: TrainingProcess, collective: Collective) -> Loop:
    """Load model and data, and resume where the attempt says so. Raises JobError, GroupError, PeerLost, Corrupted."""
    spec, reporter = process.spec, process.reporter
    job = rank_job(spec.job or {}, spec.rank(collective.rank), process.home)
    validates = job.val_batches != 0
    if not any(rank.validates for rank in spec.ranks):
        reporter.warn("no node of this attempt takes part in validation ([[node]] validate): there is none")
        job = replace(job, val_batches=0, test=False)
    set_up_device(job, collective.rank)
    model, tokenizer = load_model(job, reporter.warn)
    job, examples, valid, test = load_splits(job, row_format(job, tokenizer), reporter)
    # A partitioned model never is complete in the memory of one rank.
    whole = job.strategy in ("data", "local")
    checksum = parameter_checksum(model) if whole else files_checksum(job, adapter=True)
    collective.check_equal(rank_facts(spec, examples, valid, test, checksum))
    inputs = checksums(job, train=examples, **({"valid": valid} if validates else {}))
    about = {"versions": package_versions(*PACKAGES), "device": str(mx.default_device()), "backend": spec.backend}
    report_start(process, job, examples, checksum, count_parameters(model), inputs=inputs, **about)
    trained = tree_flatten(model.trainable_parameters())
    if job.optimizer_precision == "parameter" and any(value.dtype.size < 4 for _, value in trained):
        reporter.warn("optimizer_precision = parameter: in 16 bits, small updates are lost")
    strategy = make_strategy(process, job, model, examples, collective)
    if strategy.updater.relative_step:
        reporter.warn(
            "adafactor takes a relative step, which is what is reported as the learning rate: learning_rate and "
            "lr_schedule are not used without relative_step = false in optimizer_config"
        )
    loop = _make_loop(process, job, strategy, (valid, test), {**inputs, ORDER: crc32_text(examples.order_checksum)})
    if job.sample_prompts:
        loop.samples = Samples(job, strategy, tokenizer, process.control, reporter, raw=examples.form == "text")
    return loop


def make_strategy(
    process: TrainingProcess, job: Job, model: nn.Module, train: Split | None, collective: Collective
) -> Strategy:
    """`train`: None where nothing is trained. Raises JobError, PeerLost."""
    spec, reporter = process.spec, process.reporter
    if job.strategy == "pipeline":
        if spec.backend == "nccl":
            raise JobError('[job] strategy = "pipeline" is not possible with nccl: MLX has no send and recv for it')
        layers = _layer_split(job, len(model.layers), collective)
        reporter.print(f"pipeline: layers {format_split(layers)} on ranks 0 to {collective.size - 1}")
        # Every stage reads the whole batch.
        return Pipeline(job, model, DataLoader(train, job, [1.0], 0, reporter), collective, layers)
    shares = [rank.share for rank in spec.ranks]
    validates = [rank.validates for rank in spec.ranks]
    loader = DataLoader(train, job, shares, collective.rank, reporter, validates if any(validates) else None)
    if isinstance(collective, ElasticGroup):
        return LocalSteps(job, model, loader, collective)
    return (Sharded if job.strategy == "sharded" else DataParallel)(job, model, loader, collective)


def _make_loop(
    process: TrainingProcess,
    job: Job,
    strategy: Strategy,
    splits: tuple[Split, Split | None],
    inputs: Mapping[str, str],
) -> Loop:
    """The loop where it starts or resumes. `splits`: for validation and test; `inputs` as in Origin. Raises JobError,
    PeerLost, Corrupted."""
    spec, reporter, collective = process.spec, process.reporter, strategy.collective
    rank, size = collective.rank, collective.size
    part, parts = (0, 1) if strategy.replicated else (rank, size)
    origin = Origin(config_hash(spec.job or {}), size, part, parts, inputs)
    locations = CheckpointLocations(spec, rank, job.home)
    start = ResumePoint()
    if spec.resume and not collective.left_out:
        locations.fetch(collective, reporter, replicated=strategy.replicated)
        resume = Resume(collective, strategy, origin, reporter, spec)
        start = resume.run(locations.states(), adapter=job.resume_adapter_file is not None)
        if isinstance(strategy, LocalSteps):
            strategy.agree()
    folder = None
    if spec.checkpoint_every > 0 and (part > 0 or rank == 0):
        packer(spec.checkpoint_compression)  # raises JobError
        folder = locations.folder(part, parts)
    emergency = EmergencyCheckpoint(job.home, spec.attempt, rank, origin, reporter)
    emergency.useful |= strategy.any_part
    process.control.save_and_exit = emergency.save_and_exit
    every = spec.replica_check_every if strategy.replicated else 0
    replicas = ReplicaCheck(strategy.model, collective, reporter, every, spec.on_corruption == "stop")
    periodic = PeriodicCheckpoints(folder, spec, origin, reporter)
    common = job, strategy, splits[0], process.control, reporter
    return Loop(*common, collective, replicas, periodic, emergency, start, test=splits[1])


def _layer_split(job: Job, layers: int, collective: Collective) -> LayerSplit:
    """As the job has it, else in proportion to the ranks' memory."""
    try:
        if job.layer_split is not None:
            return parse_split(job.layer_split)
        return layer_split(layers, all_gather_object(collective, memory_mib()))
    except ValueError as error:
        raise JobError(f"[job] layer_split: {error}") from error
