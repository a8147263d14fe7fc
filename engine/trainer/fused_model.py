"""A run's weights fused into its base model: parameter by parameter, so that it needs little memory, and kept only when
it is measured to have kept what was learned. A quantized base rounds each sum of weight and update to its bits again:
an update smaller than that is lost."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import dequantize_model

from engine.protocol.job import Job, JobError
from engine.trainer.collective import Collective, TensorSpec, broadcast_object
from engine.trainer.saver import write_model
from engine.trainer.variants import Variants, build, load_tensors, put
from engine.trainer.weights import WeightStream
from engine.training.checkpoint_files import replace_folder
from engine.training.process import TrainingProcess
from engine.training.reporting import SavedWeights

KEEP = 0.95
"""Least share of the gain, by default."""
_EQUAL = 1e-3
"""Largest relative difference of two losses that are the same, where there is no gain to compare with."""
_NO_GAIN = 1e-6
"""Relative to the loss: what float32 does not show."""
_WIDER_BITS = (5, 6, 8)
_LEAST_GROUP = 32
"""Fewest weights with one scale in MLX's affine quantization."""


class _Stopped(Exception):
    pass


@dataclass(frozen=True)
class FusedForm:
    """How the fused layers of a quantized base are stored: by default as the base's."""

    dequantize: bool = False
    """All layers, not the fused ones alone."""
    bits: int | None = None


@dataclass(frozen=True)
class FusionResult:
    kept: float | None
    """Share of the gain; None without a gain."""
    accepted: bool
    why: str | None
    """Why it is not accepted, or that there was no gain."""

    @classmethod
    def of(cls, base: float, adapter: float, fused: float, *, keep: float, rounding: str) -> FusionResult:
        """From the three losses. `rounding`: what fusing did to the weights."""
        gain = base - adapter
        if not gain > _NO_GAIN * abs(base):
            equal = abs(fused - adapter) <= _EQUAL * abs(adapter)
            why = f"there is no gain to keep: the loss is {adapter:.4f} with the adapter and {base:.4f} without"
            return cls(None, equal, why if equal else f"{why}, but {fused:.4f} fused ({rounding})")
        kept = (base - fused) / gain
        losses = f"the loss is {base:.4f} without the adapter, {adapter:.4f} with it, {fused:.4f} fused"
        why = f"{rounding} kept {kept:.1%} of the gain, less than {100 * keep:g}%: {losses}"
        return cls(kept, kept >= keep, None if kept >= keep else why)


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
    """One rank's part of the task: rank 0 writes the model, all measure it. Raises JobError, GroupError, PeerLost,
    OSError."""
    variants = Variants.of(process, collective)
    task, options = variants.task, variants.task.options
    if task.weights is None:
        raise JobError("there are no weights to fuse")
    form = FusedForm(bool(options.get("dequantize")), options.get("bits"))
    target = Path(options.get("path") or process.home / "fused").expanduser()
    fusion = Fusion(variants, Path(task.weights), target, form)
    try:
        variants.end(stopped=not fusion.run())
    finally:
        if collective.rank == 0:
            shutil.rmtree(fusion.scratch, ignore_errors=True)


@dataclass(frozen=True)
class Fusion:
    variants: Variants
    source: Path
    target: Path
    form: FusedForm

    @property
    def scratch(self) -> Path:
        """Where the model is until it has been measured; always the same, so that a killed fusion's is found."""
        return self.target.with_name(f".{self.target.name}.fusing")

    def run(self) -> bool:
        """Fuse and measure, on every rank; False when stopped. Raises JobError, PeerLost, OSError."""
        if self.target.exists() and self.variants.collective.rank == 0:
            raise JobError(f"{self.target} exists already: remove it, or name another path")
        measure = self.variants.measure
        if (base := measure("base", None)) is None or (adapter := measure("adapter", self.source)) is None:
            return False
        saved, rounding = self._write() if self.variants.collective.rank == 0 else (None, None)
        rounding = broadcast_object(self.variants.collective, rounding, 0)
        if rounding is None or (fused := measure("fused", self.scratch)) is None:
            return False
        keep = self.variants.task.options.get("keep")
        result = FusionResult.of(base, adapter, fused, keep=KEEP if keep is None else keep, rounding=rounding)
        if saved is not None:
            self._report(saved, result)
        return True

    def _report(self, saved: SavedWeights, result: FusionResult) -> None:
        reporter = self.variants.process.reporter

        def take() -> SavedWeights:
            replace_folder(self.scratch, self.target)
            return replace(saved, path=self.target, folder=self.target)

        if result.accepted:
            reporter.save(0, self.target, take, last=True)
        choices = [] if result.accepted else self._choices()
        facts = {"path": str(self.target), "bytes": saved.bytes, **asdict(result), "choices": choices}
        reporter.event("result", kind="fused", **facts)
        reporter.print(f"{'fused' if result.accepted else 'not fused'}{f': {result.why}' if result.why else ''}")

    def _write(self) -> tuple[SavedWeights, str] | tuple[None, None]:
        """Write the model into `scratch`; with its `rounding`. None when stopped."""
        process, job, folder = self.variants.process, self.variants.job, self.target.parent
        process.reporter.phase("saving")
        shutil.rmtree(self.scratch, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        model = FusedModel.of(job, self.source, self.form)
        if self.form.bits is not None and not model.bits:
            raise JobError(f"bits = {self.form.bits}: the layers to fuse are not quantized")
        if (free := shutil.disk_usage(folder).free) < model.nbytes:
            raise JobError(f"{folder} has {free:,} bytes free, and the fused model needs {model.nbytes:,}")

        def arrays() -> Iterator[mx.array]:
            for array in model.weights.arrays:
                if process.control.stop.is_set():
                    raise _Stopped
                yield array
                process.reporter.going_on()
                mx.clear_cache()

        base = self.source if self.source.is_dir() else job.model
        try:
            saved = write_model(self.scratch, base, WeightStream(model.weights.entries, arrays()), model.config)
        except _Stopped:
            return None, None
        return saved, model.rounding

    def _choices(self) -> list[dict[str, Any]]:
        """Other forms, each with its bytes of weights: none where the base is not quantized."""
        job = self.variants.job
        if not (bits := FusedModel.of(job, self.source, self.form).bits):
            return []
        forms = [*(FusedForm(bits=width) for width in _WIDER_BITS if width > max(bits)), FusedForm(dequantize=True)]
        return [{**asdict(form), "bytes": FusedModel.of(job, self.source, form).nbytes} for form in forms]
