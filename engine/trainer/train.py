"""One rank's training from its specification: model, data, the ranks' agreement, strategy, checkpoints and loop."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.callbacks import get_reporting_callbacks

from engine.protocol.attempt import AttemptSpec
from engine.protocol.job import Job, JobError, config_hash
from engine.protocol.partition import LayerSplit, format_split, layer_split, parse_split
from engine.trainer.checkpoint.emergency import EmergencyCheckpoint
from engine.trainer.checkpoint.locations import CheckpointLocations
from engine.trainer.checkpoint.periodic import CheckpointPolicy, PeriodicCheckpoints
from engine.trainer.checkpoint.resume import Resume
from engine.trainer.checkpoint.store import PACKAGES
from engine.trainer.collective import Collective, all_gather_object
from engine.trainer.elastic_group import ElasticGroup
from engine.trainer.loop import Loop
from engine.trainer.model import count_parameters, load_model, row_format, set_up_device
from engine.trainer.replica_check import ReplicaCheck, parameter_checksum
from engine.trainer.saver import save_adapter_config
from engine.trainer.strategies.base import Strategy
from engine.trainer.strategies.data_parallel import DataParallel
from engine.trainer.strategies.local import LocalSteps
from engine.trainer.strategies.pipeline import Pipeline
from engine.trainer.strategies.sharded import Sharded
from engine.training.checkpoint_files import Origin, package_versions, packer
from engine.training.data import DataLoader, Split, checksums, files_checksum, load_splits, load_train_split, rank_job
from engine.training.process import Control
from engine.training.reporting import PeerLost, Reporter
from engine.training.resumption import ResumePoint

_MIB = 2**20


def train(spec: AttemptSpec, home: Path, collective: Collective, control: Control, reporter: Reporter) -> None:
    """Run the job to its end or to an agreed stop. `home`: the run's folder on this node. Raises JobError, GroupError,
    PeerLost, Diverged, Corrupted, OSError."""
    raw = spec.job or {}
    job = rank_job(raw, spec.rank(collective.rank), home)
    validates = job.val_batches != 0
    if not any(rank.validates for rank in spec.ranks):
        reporter.warn("no node of this attempt takes part in validation ([[node]] validate): there is none")
        job = replace(job, val_batches=0, test=False)
    set_up_device(job, collective.rank)
    model, tokenizer = load_model(job, reporter.warn)
    job, examples, valid, test = load_splits(job, row_format(job, tokenizer), reporter)
    setup = _Setup(spec, config_hash(raw), job, collective, control, reporter)
    checksum = setup.check_ranks_agree(model, examples, valid)
    inputs = checksums(job, train=examples, **({"valid": valid} if validates else {}))
    if collective.rank == 0:
        save_adapter_config(job, job.layers(len(model.layers)))
        # SwanLab by mlx-lm's own callback, or None: the head writes for the other services.
        config = {key: str(value) for key, value in asdict(job).items()}
        reporter.callback = get_reporting_callbacks(
            job.report_to, project_name=job.project_name, log_dir=str(job.adapter_path), config=config
        )
    setup.report_start(model, examples, checksum)
    loop = setup.build_loop(setup.build_strategy(model, examples), valid, inputs)
    try:
        outcome = loop.run_and_test(test)
    except PeerLost:
        loop.emergency.save_on_peer_loss()
        raise
    reporter.end(outcome)


def load_strategy(spec: AttemptSpec, home: Path, collective: Collective, reporter: Reporter) -> tuple[Job, Strategy]:
    """One rank's job and strategy as `train` makes them, and nothing around them. Raises JobError, PeerLost."""
    raw = spec.job or {}
    job = rank_job(raw, spec.rank(collective.rank), home)
    set_up_device(job, collective.rank)
    model, tokenizer = load_model(job)
    setup = _Setup(spec, config_hash(raw), job, collective, Control(), reporter)
    return job, setup.build_strategy(model, load_train_split(job, row_format(job, tokenizer), lambda longest: None))


@dataclass(frozen=True)
class _Setup:
    """The steps from a rank's specification to its loop. All ranks take the same steps in the same order."""

    spec: AttemptSpec
    config_hash: str
    job: Job
    collective: Collective
    control: Control
    reporter: Reporter

    def check_ranks_agree(self, model: nn.Module, train: Split, valid: Split) -> str:
        """The checksum of the model. Raises GroupError when the ranks have different jobs, models or data; PeerLost."""
        # A partitioned model never is complete in the memory of one rank.
        whole = self.job.strategy in ("data", "local")
        checksum = parameter_checksum(model) if whole else files_checksum(self.job, adapter=True)
        data: dict[str, object] = {"train.jsonl": train.checksum, "valid.jsonl": valid.checksum}
        about = {"the job's configuration": self.config_hash, "the model or the adapter": checksum}
        self.collective.check_equal({**about, **data})
        return checksum

    def report_start(self, model: nn.Module, train: Split, checksum: str) -> None:
        job = self.job
        counts = trainable, total = count_parameters(model)
        about: dict[str, Any] = {"versions": package_versions(*PACKAGES), "device": str(mx.default_device())}
        about |= {"world_size": self.spec.world_size, "backend": self.spec.backend}
        self.reporter.start(job, self.config_hash, checksum, counts, **about)
        chunks = f" in {train.plan.num_chunks} chunks of {job.chunk_size}" if train.plan.enabled else ""
        self.reporter.print(
            f"training {trainable / 1e6:.3f} of {total / 1e6:.3f} million parameters, {job.fine_tune_type}, "
            f"{len(train)} examples{chunks}, {job.iters} iterations of {job.batch_size}"
        )
        trained = tree_flatten(model.trainable_parameters())
        if job.optimizer_precision == "parameter" and any(value.dtype.size < 4 for _, value in trained):
            self.reporter.warn("optimizer_precision = parameter: in 16 bits, small updates are lost")

    def build_strategy(self, model: nn.Module, train: Split) -> Strategy:
        """Raises JobError, PeerLost."""
        job, collective = self.job, self.collective
        if job.strategy == "pipeline":
            if self.spec.backend == "nccl":
                raise JobError('[job] strategy = "pipeline" is not possible with nccl: MLX has no send and recv for it')
            layers = self._layer_split(len(model.layers))
            self.reporter.print(f"pipeline: layers {format_split(layers)} on ranks 0 to {collective.size - 1}")
            # Every stage reads the whole batch.
            return Pipeline(job, model, DataLoader(train, job, [1.0], 0, self.reporter), collective, layers)
        shares = [rank.share for rank in self.spec.ranks]
        validates = [rank.validates for rank in self.spec.ranks]
        loader = DataLoader(train, job, shares, collective.rank, self.reporter, validates if any(validates) else None)
        if isinstance(collective, ElasticGroup):
            return LocalSteps(job, model, loader, collective)
        return (Sharded if job.strategy == "sharded" else DataParallel)(job, model, loader, collective)

    def build_loop(self, strategy: Strategy, valid: Split, inputs: Mapping[str, str]) -> Loop:
        """The loop where it starts or resumes; `inputs` as in Origin. Raises JobError, PeerLost, Corrupted."""
        spec, collective, reporter = self.spec, self.collective, self.reporter
        rank, size = collective.rank, collective.size
        node = spec.rank(rank)
        stop_on_corruption = spec.on_corruption == "stop"
        part, parts = (0, 1) if strategy.replicated else (rank, size)
        origin = Origin(self.config_hash, size, part, parts, inputs)
        locations = CheckpointLocations.of(self.job.home, Path(node.workdir), spec.run_id, node.checkpoint_folder)
        locations = replace(locations, recorded=spec.manifests)
        policy = CheckpointPolicy(spec.checkpoint_every, spec.checkpoint_keep, spec.checkpoint_compression)
        start = ResumePoint()
        if spec.resume and not strategy.left_out:
            locations.fetch(collective, policy.kept(origin.parts), reporter, replicated=strategy.replicated)
            resume = Resume(collective, strategy, origin, reporter, stop_on_corruption=stop_on_corruption)
            resume.accept_changed_data, resume.recorded = spec.accept_changed_data, spec.manifests
            adapter = self.job.resume_adapter_file is not None
            start = resume.run(locations.states(), adapter=adapter, reached=spec.reached)
            if isinstance(strategy, LocalSteps):
                strategy.agree()
        destination = None
        if policy.every > 0 and (origin.part > 0 or rank == 0):
            packer(policy.compression)  # raises JobError
            destination = locations.destination(origin.part, origin.parts)
        emergency = EmergencyCheckpoint(self.job.home, spec.attempt, rank, origin, reporter)
        emergency.useful |= strategy.any_part
        self.control.save_and_exit = emergency.save_and_exit
        every = spec.replica_check_every if strategy.replicated else 0
        replicas = ReplicaCheck(strategy.model, collective, reporter, every, stop_on_corruption)
        periodic = PeriodicCheckpoints(destination, policy, origin, reporter)
        return Loop(self.job, strategy, valid, self.control, reporter, collective, replicas, periodic, emergency, start)

    def _layer_split(self, layers: int) -> LayerSplit:
        """As the job has it, else in proportion to the ranks' memory."""
        try:
            if self.job.layer_split is not None:
                return parse_split(self.job.layer_split)
            return layer_split(layers, all_gather_object(self.collective, _memory_mib()))
        except ValueError as error:
            raise JobError(f"[job] layer_split: {error}") from error


def _memory_mib() -> int:
    """Metal's recommended working set, the GPU's memory on CUDA, or else the main memory."""
    if mx.metal.is_available() or mx.cuda.is_available():
        facts = cast("dict[str, Any]", mx.device_info())
        return int(facts["max_recommended_working_set_size" if mx.metal.is_available() else "total_memory"]) // _MIB
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _MIB
