"""The optimizer over a flat dict of parameters, with float32 master weights and moments.

In bfloat16 Adam's beta2 of 0.999 rounds to 1 and small steps vanish; so parameters of 16 bits keep a float32 master,
and the model is given its rounding after each update.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import build_schedule

from .arrays import number
from .job import Job, JobError

_OPTIMIZERS = {
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "muon": optim.Muon,
    "sgd": optim.SGD,
    "adafactor": optim.Adafactor,
}


class Updater:
    """Applies global gradients to a model's trainable parameters."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        """Raises JobError for settings that the optimizer or its schedule does not know."""
        self._optimizer = _make(job)
        self._model = model
        trainable = dict(tree_flatten(model.trainable_parameters()))
        self.dtypes = {name: value.dtype for name, value in trainable.items()}
        keep = job.optimizer_precision == "parameter"
        self.masters = trainable if keep else {name: value.astype(mx.float32) for name, value in trainable.items()}
        self._optimizer.init(self.masters)
        self._max_norm = job.max_grad_norm
        state = [self._optimizer.state, self.masters]
        self._apply = partial(mx.compile, inputs=state, outputs=state)(self._step)
        mx.eval(state)

    @property
    def learning_rate(self) -> float:
        return number(self._optimizer.learning_rate)

    def update(self, gradients: dict[str, mx.array]) -> mx.array:
        """One step with the global mean `gradients` (float32); their norm before clipping, float32 scalar."""
        norm: mx.array = self._apply(gradients)
        parameters = [(name, master.astype(self.dtypes[name])) for name, master in self.masters.items()]
        self._model.update(tree_unflatten(parameters))
        mx.eval(norm, self._model.trainable_parameters(), self.masters, self._optimizer.state)
        return norm

    def _step(self, gradients: dict[str, mx.array]) -> Any:
        norm = mx.sqrt(sum((mx.square(gradient).sum() for gradient in gradients.values()), start=mx.array(0.0)))
        if self._max_norm is not None:
            factor = mx.minimum(self._max_norm / (norm + 1e-6), 1.0)
            gradients = {name: gradient * factor for name, gradient in gradients.items()}
        gradients = {name: gradient.astype(self.masters[name].dtype) for name, gradient in gradients.items()}
        self.masters.update(self._optimizer.apply_gradients(gradients, self.masters))
        return norm


def _make(job: Job) -> optim.Optimizer:
    try:
        rate = build_schedule(job.lr_schedule) if job.lr_schedule else job.learning_rate
    except (KeyError, AttributeError, TypeError, IndexError, ValueError) as error:
        raise JobError(f"[job] lr_schedule is not one of mlx-lm's: {error!r}") from error
    name = job.optimizer.lower()
    try:
        # mlx-lm's optimizer_config holds one table per optimizer.
        return _OPTIMIZERS[name](learning_rate=rate, **(job.optimizer_config.get(name) or {}))
    except TypeError as error:
        raise JobError(f"[job] optimizer_config.{name}: {error}") from error
