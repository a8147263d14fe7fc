"""How the ranks divide a training: DDP and DeepSpeed by Accelerate, FSDP by PyTorch's own `fully_shard`, since
Accelerate replaces FSDP by DDP on the CPU without a word. What was asked for is compared with what has been made."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator, PartialState
from accelerate.utils import DeepSpeedPlugin
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from engine.protocol.attempt import AttemptSpec
from engine.protocol.job import DEEPSPEED_CONFIG_ENV, Job, JobError, TorchSettings, deepspeed_config
from engine.protocol.safetensors import CheckpointError
from engine.torch_trainer.optimizer import MlxOptimizer, make_optimizer
from engine.torch_trainer.unpickling import load_restricted, restrict_unpickling
from engine.training.reporting import GroupError, first_line

_STATE = "state"
"""DeepSpeed's tag: its files are in a folder of this name."""
_MODEL = "model."
"""Begins the names of the trained weights among torch.distributed.checkpoint's."""
_NVME = "offload = 'nvme': DeepSpeed's files in nvme_path are not part of a checkpoint of the state"


def join_group(spec: AttemptSpec, job: Job, settings: TorchSettings) -> Accelerator:
    """Raises GroupError when the group is not the planned one; JobError for what the device lacks."""
    on_cpu = spec.backend != "nccl"
    if on_cpu and settings.precision == "fp16":
        raise JobError("[job] precision = 'fp16': on the CPU Accelerate computes in float32, and says nothing")
    if on_cpu and job.strategy == "fsdp" and settings.offload != "none":
        raise JobError(f"[job] offload = {settings.offload!r}: fully_shard offloads from a GPU only")
    if settings.offload == "nvme" and spec.checkpoint_every > 0:
        raise JobError(f"[job] {_NVME}: set enabled = false in [checkpoint], or offload = 'cpu'")
    if not on_cpu and not torch.cuda.is_available():
        raise GroupError("the backend is nccl, and PyTorch sees no GPU: see nvidia-smi and torch.version.cuda")
    if not on_cpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    config = deepspeed_config(
        settings,
        micro_batch=-(-job.batch_size // spec.world_size),
        accumulation=job.grad_accumulation_steps,
        world_size=spec.world_size,
        max_grad_norm=job.max_grad_norm,
    )
    if (written := os.environ.get(DEEPSPEED_CONFIG_ENV)) is not None:
        config = json.loads(Path(written).read_text())
    try:
        accelerator = make_accelerator(spec.backend, job.strategy, settings, config)
    except ValueError as error:
        raise JobError(f"[job] precision = {settings.precision!r}: {first_line(error)}") from error
    check_group(spec, job, accelerator)
    return accelerator


def make_accelerator(
    backend: str, strategy: str, settings: TorchSettings, config: dict[str, Any], timeout: timedelta | None = None
) -> Accelerator:
    """Form the group. `config`: ds_config.json; `timeout`: of connecting. Raises what PyTorch and Accelerate raise."""
    on_cpu = backend != "nccl"
    restrict_unpickling()
    # Checkpoints and messages between the ranks are on the CPU.
    dist.init_process_group("gloo" if on_cpu else "cpu:gloo,cuda:nccl", timeout=timeout)
    # With cpu=True for Accelerator, it would ignore DeepSpeed; without it, on the CPU, all other ranks.
    PartialState(cpu=on_cpu)
    if strategy != "deepspeed":
        return Accelerator(
            cpu=on_cpu,
            mixed_precision={"fp32": "no"}.get(settings.precision, settings.precision),
            gradient_accumulation_steps=config["gradient_accumulation_steps"],
        )
    # Only here: the other strategies need no DeepSpeed.
    import deepspeed

    _read_deepspeed()
    compile_nothing()
    # With ZeRO-3 transformers loads the model in partitions, for which DeepSpeed must know the group.
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    plugin = DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=settings.zero_stage == 3)
    return Accelerator(gradient_accumulation_steps=config["gradient_accumulation_steps"], deepspeed_plugin=plugin)


def _read_deepspeed() -> None:
    """Let torch.load read what DeepSpeed puts into its files."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    torch.serialization.add_safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address])


def compile_nothing() -> None:
    """DeepSpeed compiles an operator, for one machine alone, as it makes a group on the CPU. That takes minutes, and a
    process that ends meanwhile leaves a lock for which every later one waits for ever (torch.utils.file_baton)."""
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False


def check_group(spec: AttemptSpec, job: Job, accelerator: Any) -> None:
    """Raises GroupError."""
    size, kind = accelerator.num_processes, distributed_type(accelerator)
    if size != spec.world_size or dist.get_world_size() != spec.world_size:
        raise GroupError(
            f"Accelerate sees {size} ranks and PyTorch {dist.get_world_size()}, and {spec.world_size} were asked for: "
            "WORLD_SIZE, RANK and LOCAL_RANK are not those of the plan"
        )
    expected = "DEEPSPEED" if job.strategy == "deepspeed" else "MULTI_GPU" if spec.backend == "nccl" else "MULTI_CPU"
    if kind != expected:
        raise GroupError(f"Accelerate has chosen {kind} for strategy {job.strategy}, which needs {expected}")


def distributed_type(accelerator: Any) -> str:
    return str(accelerator.distributed_type).rsplit(".", 1)[-1]


@contextlib.contextmanager
def _named_causes() -> Iterator[None]:
    """Raises OSError where PyTorch hides one: "unexpected pos 704 vs 598" is its message for a full disk."""
    try:
        yield
    except RuntimeError as error:
        raise error.__context__ if isinstance(error.__context__, OSError) else OSError(first_line(error)) from error


@contextlib.contextmanager
def _first_cause() -> Iterator[None]:
    """Raises CheckpointError for the errors of all ranks that torch.distributed.checkpoint gathers."""
    try:
        yield
    except dist.checkpoint.CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise CheckpointError(first_line(cause)) from error
    except OSError as error:
        raise CheckpointError(str(error)) from error


@contextlib.contextmanager
def _read_by_deepspeed(why: str) -> Iterator[None]:
    """Without the steps that it prints. Raises CheckpointError, beginning with `why`."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    except Exception as error:  # whatever a damaged or a refused file makes it raise
        raise CheckpointError(f"{why}: {type(error).__name__}: {first_line(error)}") from error


class _Writer(dcp.FileSystemWriter):  # type: ignore[misc]
    """Equal states make equal files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, single_file_per_rank=True)

    def write_data(self, *arguments: Any) -> Any:
        with _named_causes():
            return super().write_data(*arguments)

    def storage_meta(self) -> None:
        """No path, and no identity of this one save."""


class _Reader(dcp.FileSystemReader):  # type: ignore[misc]
    # Without `rank`, by which a refused file would be looked for under another name, and read by PyTorch itself.
    def read_metadata(self) -> Metadata:
        """Raises CheckpointError."""
        metadata = load_restricted(Path(self.path, ".metadata"))
        if not isinstance(metadata, Metadata):
            raise CheckpointError(".metadata is none")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


def read_weights(folder: Path, layout: str) -> dict[str, Tensor]:
    """The trained weights in the state in `folder`, with all ranks' files, saved as a strategy's `layout`. Raises
    CheckpointError."""
    if layout.startswith("deepspeed"):
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        _read_deepspeed()
        with _read_by_deepspeed("DeepSpeed cannot read it"):
            whole = get_fp32_state_dict_from_zero_checkpoint(folder, _STATE, exclude_frozen_parameters=True)
        return {str(name): value for name, value in whole.items()}
    reader, weights = _Reader(folder), dict[str, Tensor]()
    with _first_cause():
        for name, stored in reader.read_metadata().state_dict_metadata.items():
            if name.startswith(_MODEL) and isinstance(stored, TensorStorageMetadata):
                weights[name.removeprefix(_MODEL)] = torch.empty(stored.size, dtype=stored.properties.dtype)
        dcp.load({_MODEL[:-1]: weights}, storage_reader=reader, no_dist=True)
    return weights


class TorchStrategy(ABC):
    """One rank's model and optimizer. Every call is made by every rank, at the same point of the training."""

    partitioned: tuple[str, ...] = ()
    """Each rank has only a part of these: "optimizer", "gradients", "parameters"."""
    converts = False
    """Another number of ranks can load its state only after `convert`."""

    def __init__(self, accelerator: Accelerator, job: Job, settings: TorchSettings, module: Any) -> None:
        """Raises GroupError when the model has been divided otherwise than asked; JobError."""
        self.accelerator = accelerator
        self.module = module
        """The model as it was loaded, which saves itself."""
        self._job, self.settings = job, settings
        self.model, self.optimizer = self._prepare(module)
        check_partitioned(self.model, self.partitioned)

    @property
    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def accumulate(self, *, last: bool) -> contextlib.AbstractContextManager[object]:
        """Around the forward and the backward pass of an iteration: `last` is that of an update."""
        self.accelerator.sync_gradients = last
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`, the mean over all ranks and iterations of an update, to those of the update."""
        self.accelerator.backward(loss)

    def begin(self, learning_rate: float, update: int) -> None:
        """Called before an update's first backward pass. `update`: from 1."""
        self._own.begin(learning_rate, update)

    def step(self) -> float:
        """One step of the optimizer; the norm of all gradients before clipping."""
        limit = self._job.max_grad_norm
        norm: Any = self.accelerator.clip_grad_norm_(self.trained, float("inf") if limit is None else limit)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    @property
    def layout(self) -> str:
        """The format of its state, and what else must be the same to load it without `convert`; in words."""
        return "dcp"

    def weights(self) -> dict[str, Tensor]:
        """The weights that model.TrainedFolder writes, on rank 0; empty on the others."""
        options = states.StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=self._adapter)
        state: dict[str, Tensor] = states.get_model_state_dict(self.module, options=options)
        return state

    @property
    def _adapter(self) -> bool:
        return self._job.fine_tune_type != "full"

    def save(self, folder: Path) -> None:
        """Write this rank's part of the state of the trained parameters and of the optimizer; where nothing is
        partitioned, the whole, without the other ranks, who need not call it. Raises CheckpointError, OSError."""
        with _first_cause():
            dcp.save(self._state(), storage_writer=_Writer(folder), no_dist=not self.partitioned)

    def convert(self, folder: Path, target: Path) -> None:
        """On one rank of a node, with `converts`: make of the files of another number of ranks or of another layout in
        `folder` what `load` accepts. Raises CheckpointError, OSError."""
        raise NotImplementedError

    def load(self, folder: Path, *, converted: bool) -> None:
        """Restore what was saved, with all ranks' files in `folder`, or what has been `converted`. Raises
        CheckpointError."""
        state, reader = self._state(), _Reader(folder)
        with _first_cause():
            if not any(name.startswith("scaler.") for name in reader.read_metadata().state_dict_metadata):
                # It was saved in another precision.
                state.pop("scaler", None)
            dcp.load(state, storage_reader=reader)
        if "scaler" in state:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        options = states.StateDictOptions(ignore_frozen_params=True, strict=False)
        loaded = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        states.set_state_dict(self.module, self._own, **loaded, options=options)

    def _state(self) -> dict[str, Any]:
        # The optimizer's state is made by its first step.
        options = states.StateDictOptions(ignore_frozen_params=True)
        model, optimizer = states.get_state_dict(self.module, self._own, options=options)
        state = {"model": model, "optimizer": optimizer}
        if (scaler := self.accelerator.scaler) is not None:
            state["scaler"] = scaler.state_dict()
        return state

    @abstractmethod
    def _prepare(self, module: Any) -> tuple[Any, Any]:
        """The model and the optimizer to train with; sets `_own`."""

    _own: MlxOptimizer


class DdpStrategy(TorchStrategy):
    """Every rank has the whole model: DistributedDataParallel. One rank alone trains without it, which would keep a
    copy of all gradients in its buckets, and fill it in each backward pass."""

    def _prepare(self, module: Any) -> tuple[Any, Any]:
        module.to(self.accelerator.device)
        self._own = make_optimizer(self._job, self.trained)
        # evaluation_mode: Accelerate applies the precision, and nothing else.
        model = self.accelerator.prepare_model(module, evaluation_mode=self.accelerator.num_processes == 1)
        return model, self.accelerator.prepare(self._own)

    def accumulate(self, *, last: bool) -> contextlib.AbstractContextManager[object]:
        super().accumulate(last=last)
        # Whether a backward pass exchanges gradients, DDP decides in the forward pass.
        exchanges = isinstance(self.model, DistributedDataParallel)
        return self.model.no_sync() if exchanges and not last else contextlib.nullcontext()


class FsdpStrategy(TorchStrategy):
    """Every rank has a part of each parameter: `fully_shard` of each block, and of the rest. Gradients are exchanged
    in each iteration: until the last one of an update, each rank would have to keep all of them."""

    partitioned = ("optimizer", "gradients", "parameters")

    def _prepare(self, module: Any) -> tuple[Any, Any]:
        # Late: it imports transformers, which the check of a group does not need.
        from engine.torch_trainer.model import DTYPES, decoder_layers

        settings = self.settings
        mixed = settings.precision != "fp32"
        options: dict[str, Any] = {
            "reshard_after_forward": settings.sharding == "full",
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=DTYPES[settings.precision] if mixed else None, reduce_dtype=torch.float32 if mixed else None
            ),
            "offload_policy": CPUOffloadPolicy() if settings.offload == "cpu" else OffloadPolicy(),
        }
        # Each block is moved to the device when it is divided: the whole model need not fit there.
        _, layers = decoder_layers(module)
        for layer in layers:
            fully_shard(layer, **options)
        fully_shard(module, **options)
        self._own = make_optimizer(self._job, self.trained)
        return module, self.accelerator.prepare(self._own)


class DeepSpeedStrategy(TorchStrategy):
    """Every rank has a part of the optimizer's state, of the gradients and of the parameters, as zero_stage says."""

    converts = True

    @property
    def layout(self) -> str:
        return f"deepspeed ZeRO-{self.settings.zero_stage} {self.settings.precision}"

    def _prepare(self, module: Any) -> tuple[Any, Any]:
        stage = self.settings.zero_stage
        self.partitioned = FsdpStrategy.partitioned[:stage]
        self._own = make_optimizer(self._job, self.trained)
        model, optimizer = self.accelerator.prepare(module, self._own)
        if model.zero_optimization_stage() != stage:
            raise GroupError(f"DeepSpeed trains with ZeRO-{model.zero_optimization_stage()}, and {stage} was asked for")
        return model, optimizer

    def step(self) -> float:
        return float(self.accelerator.clip_grad_norm_(self.trained, 0.0) or 0.0)

    def weights(self) -> dict[str, Tensor]:
        from deepspeed.checkpoint.utils import clone_tensors_for_torch_save

        names = {name for name, parameter in self.module.named_parameters() if parameter.requires_grad}
        if self.settings.zero_stage == 3:
            # On rank 0; every rank takes part.
            whole = self.model._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=self._adapter) or {}
        else:
            whole = self.module.state_dict() if self.accelerator.process_index == 0 else {}
        trained: dict[str, Tensor] = {name: whole[name] for name in whole if not self._adapter or name in names}
        if self.settings.zero_stage < 3:
            # They are views of one buffer.
            trained = clone_tensors_for_torch_save(trained)
        return trained

    def save(self, folder: Path) -> None:
        from deepspeed.checkpoint import UNIVERSAL_CHECKPOINT_INFO

        if self.settings.offload == "nvme":
            raise CheckpointError(_NVME)
        failures: list[OSError] = []

        def write(state_dict: Any, path: str) -> None:
            # A rank whose disk is full takes part in what follows all the same: the others wait for it there.
            try:
                with _named_causes(), Path(path).open("wb") as file:
                    torch.save(state_dict, file)
            except OSError as error:
                failures.append(error)

        self.model.checkpoint_engine.save = write
        # It would copy scripts, and does not expect a full disk there.
        self.model._copy_recovery_script = lambda path: None
        # ds_to_universal wants to be told that no parameter is partitioned in another way.
        about: dict[str, Any] = {UNIVERSAL_CHECKPOINT_INFO: {}}
        self.model.save_checkpoint(str(folder), _STATE, about, save_latest=False, exclude_frozen_parameters=True)
        if failures:
            raise failures[0]

    def convert(self, folder: Path, target: Path) -> None:
        """Make DeepSpeed's universal checkpoint, which any number of ranks can load, in any precision."""
        from deepspeed.checkpoint import ds_to_universal

        divided = any((folder / _STATE).glob("zero_pp_rank_*_model_states.pt"))
        if divided != (self.settings.zero_stage == 3):
            raise CheckpointError("DeepSpeed converts no state between ZeRO-3 and the others: set zero_stage back")

        folders = {"input_folder": str(folder / _STATE), "output_folder": str(target / _STATE)}
        workers = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
        request = argparse.Namespace(**folders, **workers, strict=True, inject_missing_state=False)
        with _read_by_deepspeed("DeepSpeed cannot convert it"):
            ds_to_universal.main(request)

    def load(self, folder: Path, *, converted: bool) -> None:
        self.model._config.load_universal_checkpoint = converted
        if self.settings.zero_stage < 3:
            self.model.optimizer.load_universal = converted
        try:
            path, _ = self.model.load_checkpoint(str(folder), _STATE, load_module_strict=False)
        except (KeyError, AssertionError, OSError) as error:
            raise CheckpointError(f"DeepSpeed cannot load it: {error!r}") from error
        if path is None:
            raise CheckpointError("DeepSpeed does not load it")


STRATEGIES: dict[str, type[TorchStrategy]] = {"ddp": DdpStrategy, "fsdp": FsdpStrategy, "deepspeed": DeepSpeedStrategy}


def check_partitioned(model: Any, partitioned: tuple[str, ...]) -> None:
    """Raises GroupError unless the parameters of `model` are divided over the ranks if and only if they should be."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    divided = all(isinstance(parameter, DTensor) or hasattr(parameter, "ds_tensor") for parameter in trained)
    if divided == ("parameters" in partitioned):
        return
    asked, got = ("a part", "all") if not divided else ("all", "a part")
    why = ""
    if isinstance(model, DistributedDataParallel):
        why = ": Accelerate replaces FSDP by DDP on the CPU, and says nothing"
    raise GroupError(
        f"each rank should have {asked} of the parameters, and has {got} of them in a {type(model).__name__}{why}"
    )
