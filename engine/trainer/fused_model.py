"""A run's weights fused into its base model: parameter by parameter, so that it needs little memory, and kept only when
it is measured to have kept what was learned. A quantized base rounds each sum of weight and update to its bits again:
an update smaller than that is lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import dequantize_model

from engine.protocol.job import Job, JobError
from engine.trainer.collective import Collective, TensorSpec
from engine.trainer.saver import write_model
from engine.trainer.variants import Variants, build, load_tensors, put
from engine.trainer.weights import WeightStream
from engine.training.process import TrainingProcess
from engine.training.reporting import SavedWeights
from engine.training.result_tasks import FusionTask, TaskStopped

_WIDER_BITS = (5, 6, 8)
_LEAST_GROUP = 32
"""Fewest weights with one scale in MLX's affine quantization."""


@dataclass(frozen=True)
class FusedForm:
    """How the fused layers of a quantized base are stored: by default as the base's."""

    dequantize: bool = False
    """All layers, not the fused ones alone."""
    bits: int | None = None


@dataclass(frozen=True)
class FusedModel:
    """Not computed yet: nothing of it is in memory."""

    weights: WeightStream
    config: dict[str, Any]
    """Content of config.json."""
    bits: frozenset[int]
    """Bits to which fused weights are rounded; none where they are not quantized."""

    @classmethod
    def of(cls, job: Job, path: Path, form: FusedForm) -> FusedModel:
        """The job's model with the weights in `path`: a safetensors file, or a model's directory, which has nothing to
        fuse. Raises JobError."""
        whole = path.is_dir()
        model, config = build(job, path if whole else job.model, path, adapter=not whole)
        put(model, load_tensors(path))
        layers = {name: _fused(layer, form) for name, layer in model.named_modules() if hasattr(layer, "fuse")}
        if layers:
            model.update_modules(tree_unflatten([(name, layer) for name, (layer, _) in layers.items()]))
        settings = {name: quantized for name, (_, quantized) in layers.items() if quantized is not None}
        if form.bits is not None and settings:
            config["quantization"] |= settings
        if form.dequantize:
            model = dequantize_model(model)
            for key in ("quantization", "quantization_config"):
                config.pop(key, None)
        arrays = dict(tree_flatten(model.parameters()))
        entries = {name: TensorSpec(value.shape, value.dtype) for name, value in arrays.items()}
        # Each is dropped here when it is asked for.
        stream = WeightStream(entries, (arrays.pop(name) for name in entries))
        return cls(stream, config, frozenset(quantized["bits"] for quantized in settings.values()))

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.weights.entries.values())

    @property
    def rounding(self) -> str:
        widths = " or ".join(map(str, sorted(self.bits)))
        kinds = " or ".join(sorted({str(entry.dtype).rpartition(".")[2] for entry in self.weights.entries.values()}))
        return f"rounding to {widths} bits" if widths else f"rounding to {kinds}"


def _fused(layer: Any, form: FusedForm) -> tuple[nn.Module, dict[str, Any] | None]:
    """The fused layer in the type of its base, which mlx-lm's `fuse` of DoRA makes float32; how it is quantized."""
    base = layer.linear if "linear" in layer else layer.embedding
    fused = layer.fuse(dequantize=True)
    dtype = (base.scales if "scales" in base else base.weight).dtype
    fused.weight = fused.weight.astype(dtype if mx.issubdtype(dtype, mx.floating) else mx.bfloat16)
    if "scales" not in base or form.dequantize:
        return fused, None
    settings = {"group_size": base.group_size, "bits": base.bits, "mode": base.mode}
    if form.bits is not None:
        settings = {"group_size": max(base.group_size, _LEAST_GROUP), "bits": form.bits, "mode": "affine"}
    # A model's own layers know no mode.
    return fused.to_quantized(**{key: value for key, value in settings.items() if value != "affine"}), settings


def fuse(process: TrainingProcess, collective: Collective) -> None:
    """One rank's part of the task. Raises JobError, GroupError, PeerLost, OSError."""
    variants = Variants.of(process, collective)
    options = variants.task.options
    Fusion(variants, FusedForm(bool(options.get("dequantize")), options.get("bits"))).run_to_end()


@dataclass(frozen=True)
class Fusion(FusionTask):
    form: FusedForm

    @property
    def _model_bytes(self) -> int:
        model = FusedModel.of(self.variants.job, self.source, self.form)
        if self.form.bits is not None and not model.bits:
            raise JobError(f"bits = {self.form.bits}: the layers to fuse are not quantized")
        return model.nbytes

    def _write(self) -> tuple[SavedWeights, str] | tuple[None, None]:
        process, job = self.variants.process, self.variants.job
        model = FusedModel.of(job, self.source, self.form)

        def arrays() -> Iterator[mx.array]:
            for array in model.weights.arrays:
                if process.control.stop.is_set():
                    raise TaskStopped
                yield array
                process.reporter.going_on()
                mx.clear_cache()

        base = self.source if self.source.is_dir() else job.model
        try:
            saved = write_model(self.scratch, base, WeightStream(model.weights.entries, arrays()), model.config)
        except TaskStopped:
            return None, None
        return saved, model.rounding

    def _choices(self) -> list[dict[str, Any]]:
        job = self.variants.job
        if not (bits := FusedModel.of(job, self.source, self.form).bits):
            return []
        forms = [*(FusedForm(bits=width) for width in _WIDER_BITS if width > max(bits)), FusedForm(dequantize=True)]
        return [{**asdict(form), "bytes": FusedModel.of(job, self.source, form).nbytes} for form in forms]
