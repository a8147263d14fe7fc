"""The optimizer over a flat dict of parameters, with float32 master weights and moments.

In bfloat16 Adam's beta2 of 0.999 rounds to 1 and small steps vanish; so parameters of 16 bits keep a float32 master,
and the model is given its rounding after each update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import build_schedule

from engine.protocol.job import Job, JobError
from engine.trainer.weights import scalar

_OPTIMIZERS = {
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "muon": optim.Muon,
    "sgd": optim.SGD,
    "adafactor": optim.Adafactor,
}

_MOMENT_SEPARATOR = ":"
"""Between the name of a parameter and of its moment; occurs in neither."""


class Updater:
    """Applies global gradients to a model's trainable parameters."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        """Raises JobError for settings that the optimizer or its schedule rejects."""
        self._optimizer = _make_optimizer(job)
        self._model = model
        trainable = dict(tree_flatten(model.trainable_parameters()))
        self._dtypes = {name: value.dtype for name, value in trainable.items()}
        keep = job.optimizer_precision == "parameter"
        self.masters = trainable if keep else {name: value.astype(mx.float32) for name, value in trainable.items()}
        self._optimizer.init(self.masters)
        self._max_norm = job.max_grad_norm
        state = [self._optimizer.state, self.masters]
        self._apply = partial(mx.compile, inputs=state, outputs=state)(self._step)

    def evaluate(self) -> None:
        """Allocate masters and moments, as the first update would: until then they are lazy."""
        mx.eval(self.masters, self._optimizer.state)

    @property
    def learning_rate(self) -> float:
        return scalar(self._optimizer.learning_rate)

    def update(self, pieces: Iterable[Mapping[str, mx.array]], divisor: float, norm: float | None = None) -> float:
        """One step with the gradients in `pieces` over `divisor`, together one of each trained parameter; their norm
        before clipping. A piece is dropped before the next is taken. `norm`: the global norm of all ranks' quotients,
        where it is known; it must be for clipping, and where the gradients are only this rank's part."""
        gradients = {name: value / divisor for piece in pieces for name, value in piece.items()}
        found = self._apply(gradients) if norm is None else self._apply(gradients, mx.array(norm))
        self._update_model()
        mx.eval(found, self._model.trainable_parameters(), self.masters, self._optimizer.state)
        return scalar(found)

    def state(self) -> dict[str, dict[str, mx.array]]:
        """References to everything that an update changes. The model's own parameters are the rounded masters."""
        moments = {}
        for name, value in self._optimizer.state.items():
            if isinstance(value, mx.array):
                moments[name] = value
            else:
                moments |= {f"{name}{_MOMENT_SEPARATOR}{kind}": moment for kind, moment in value.items()}
        return {"weights": dict(self.masters), "optimizer": moments}

    def fits(self, state: Mapping[str, Mapping[str, mx.array]]) -> bool:
        """`restore` accepts `state`."""
        return self._difference(state) is None

    def restore(self, state: Mapping[str, Mapping[str, mx.array]]) -> None:
        """Restore a result of `state()`. Raises ValueError when it is of another job, and changes nothing then."""
        if (difference := self._difference(state)) is not None:
            raise ValueError(difference)
        self.masters.update(state["weights"])
        for name, value in state["optimizer"].items():
            parameter, _, kind = name.rpartition(_MOMENT_SEPARATOR)
            if parameter:
                self._optimizer.state[parameter][kind] = value
            else:
                self._optimizer.state[name] = value
        self._update_model()
        mx.eval(self._model.trainable_parameters())

    def _difference(self, state: Mapping[str, Mapping[str, mx.array]]) -> str | None:
        """The first name, shape or type that is not this job's."""
        for group, ours in self.state().items():
            theirs = state.get(group, {})
            for name in ours.keys() | theirs.keys():
                if name not in ours or name not in theirs:
                    where = "this job's" if name in ours else "the saved"
                    return f"{name} is only in {where} {group}"
                here, there = ((value.shape, value.dtype) for value in (ours[name], theirs[name]))
                if here != there:
                    return f"{name} of the saved {group} is {there[0]} {there[1]}, this job's is {here[0]} {here[1]}"
        return None

    def _update_model(self) -> None:
        parameters = [(name, master.astype(self._dtypes[name])) for name, master in self.masters.items()]
        self._model.update(tree_unflatten(parameters))

    def _step(self, gradients: dict[str, mx.array], norm: mx.array | None = None) -> Any:
        if norm is None:
            norm = mx.sqrt(sum((mx.square(gradient).sum() for gradient in gradients.values()), start=mx.array(0.0)))
        if self._max_norm is not None:
            factor = mx.minimum(self._max_norm / (norm + 1e-6), 1.0)
            gradients = {name: gradient * factor for name, gradient in gradients.items()}
        gradients = {name: gradient.astype(self.masters[name].dtype) for name, gradient in gradients.items()}
        self.masters.update(self._optimizer.apply_gradients(gradients, self.masters))
        return norm


def _make_optimizer(job: Job) -> optim.Optimizer:
    try:
        rate = build_schedule(job.lr_schedule) if job.lr_schedule else job.learning_rate
    except (KeyError, AttributeError, TypeError, IndexError, ValueError) as error:
        raise JobError(f"[job] lr_schedule is not one that mlx-lm accepts: {error!r}") from error
    try:
        # mlx-lm's optimizer_config holds one table per optimizer.
        return _OPTIMIZERS[job.optimizer](learning_rate=rate, **(job.optimizer_config.get(job.optimizer) or {}))
    except TypeError as error:
        raise JobError(f"[job] optimizer_config.{job.optimizer}: {error}") from error
