"""The optimizer over a flat dict of parameters, whose state is kept in one of the forms of optimizer_state.

In bfloat16 Adam's beta2 of 0.999 rounds to 1 and small steps vanish; so the steps of 16-bit parameters are computed in
float32 (but with optimizer_precision "parameter"), and the model is given what that rounds to."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import build_schedule

from engine.protocol.job import ELEMENTWISE, Job, JobError, is_plain, update_elements
from engine.trainer.collective import packed
from engine.trainer.optimizer_state import COMPENSATION, SCALE, StateForm, sliced
from engine.trainer.weights import scalar

_OPTIMIZERS = {name.lower(): getattr(optim, name) for name in ("Adam", "AdamW", "Muon", "SGD", "Adafactor")}
_SEPARATOR = ":"
"""Between the name of a parameter and of its moment; occurs in neither."""
_WEIGHT = "weight"
_Step = Callable[..., tuple[mx.array, mx.array, dict[str, mx.array], mx.array]]


class Updater:
    """Applies global gradients to a model's trainable parameters."""

    def __init__(self, job: Job, model: nn.Module, elements: int | None = None) -> None:
        """`elements`: trained ones of a rank, about, equal on ranks that share a parameter, whose random rounding
        depends on it; None: the model's. Raises JobError for settings that the optimizer or its schedule rejects."""
        self._optimizer = _make_optimizer(job)
        self._form = StateForm.of(job)
        self._model = model
        self._max_norm = job.max_grad_norm
        trainable = dict(tree_flatten(model.trainable_parameters()))
        self._dtypes = {name: value.dtype for name, value in trainable.items()}
        self._seed = job.seed
        self._keys = {name: _random_key(job.seed, name) for name in trainable}
        self._room = update_elements(elements or sum(value.size for value in trainable.values()))
        self._sliced = {
            name for name, value in trainable.items() if job.optimizer in ELEMENTWISE and value.size > self._room
        }
        """Parameters that are updated slice by slice."""
        self.masters = {name: self._form.keep(value) for name, value in trainable.items()}
        """The trained weights as they are kept between updates: float32 masters, or the model's own."""
        self._scalars: dict[str, mx.array] = dict(self._optimizer.state)
        """The optimizer's step, and what is on a schedule."""
        self._stored = {name: self._initial(value) for name, value in trainable.items()}
        self._functions: dict[mx.Dtype, _Step] = {
            dtype: partial(self._step, dtype) for dtype in set(self._dtypes.values())
        }
        # One function for all parameters of a type: those of equal shape share what it is compiled to.
        self._compiled = {dtype: mx.compile(step) for dtype, step in self._functions.items()}

    @property
    def arrays(self) -> list[Any]:
        """The containers of everything that an update changes beside the model, for mx.compile's inputs and outputs.
        Lazy, and so not allocated, until the first update."""
        return [self._scalars, self.masters, self._stored]

    @property
    def needs_slices(self) -> bool:
        """The step of a whole parameter would take much more memory than that of its slices."""
        return bool(self._sliced) and not is_plain(self._form.precision, self._form.moments)

    @property
    def relative_step(self) -> bool:
        """The optimizer is Adafactor that ignores its learning rate, as by default."""
        return bool(getattr(self._optimizer, "relative_step", False))

    @property
    def learning_rate(self) -> float:
        """The last update's; of a relative step, before it is scaled by a parameter's own size."""
        if self.relative_step:
            step = max(scalar(self._scalars["step"]), 1)
            return float(min(1e-6 * step if self._optimizer.warmup_init else 1e-2, step**-0.5))
        return scalar(self._scalars["learning_rate"])

    def update(self, pieces: Iterable[Mapping[str, mx.array]], divisor: float, norm: float | None = None) -> float:
        """One step with the gradients in `pieces` over `divisor`, one of each trained parameter; their norm before
        clipping. `norm`: the global one of all ranks' quotients, where it is known; it must be for clipping, and where
        the gradients are only this rank's part. If it is not finite, nothing changes.

        Gradients may be lazy, pieces from the last layer backwards, each in the model's order. A piece is evaluated
        with its new weights and moments, and dropped before the next; a large one in parts. After an error the state is
        between two updates."""
        assert norm is not None or self._max_norm is None
        if norm is not None and not math.isfinite(norm):
            return norm
        clip = None if norm is None else self._clip(mx.array(norm))
        scale = None if divisor == 1 else mx.array(divisor, mx.float32)
        total = mx.array(0.0)
        self._begin_step()
        for piece in pieces:
            gradients = dict(piece)
            del piece
            # From the last layer backwards, as the backward pass has them, and each part in the model's order.
            for names in packed(list(gradients)[::-1], lambda name: self.masters[name].size, self._room):
                part = {name: gradients.pop(name) for name in names[::-1]}
                if names[0] in self._sliced:
                    weights, square = self._advance_in_slices(names[0], part.pop(names[0]), scale, clip)
                else:
                    weights, square = self._advance(self._compiled, part, scale, clip)
                # The last references: each array is freed as soon as it has been used.
                del part
                if norm is None:
                    total = total + square
                mx.eval(total, weights, [(self.masters[name], self._stored[name]) for name in names])
                del weights, square
        mx.eval(self._scalars)
        return math.sqrt(scalar(total)) if norm is None else norm

    def apply(self, gradients: Mapping[str, mx.array]) -> mx.array:
        """One lazy step with all mean gradients; the sum of their squares before clipping. For a compiled function with
        forward and backward pass, whose inputs and outputs `arrays` and the model's state are."""
        self._begin_step()
        clip = None
        if self._max_norm is not None:
            squares = [_square(gradient) for gradient in gradients.values()]
            clip = self._clip(mx.sqrt(mx.stack(squares).sum()))
        return self._advance(self._functions, gradients, None, clip)[1]

    def weight(self, name: str) -> mx.array:
        """A trained weight with all bits that are kept of it. Lazy."""
        return self._form.decode(self.masters[name], self._stored[name])[0]

    def replace(self, name: str, weight: mx.array, number: int) -> None:
        """Keep `weight` (float32) in place of a trained one. `number`: of its random rounding, always another. Lazy."""
        key = mx.concatenate([_random_key(self._seed, f"{name} {number}"), mx.array([0], mx.uint32)])
        self.masters[name], rest = self._form.encode(weight, {}, self._dtypes[name], key)
        self._stored[name].update(rest)
        self._update_model({name: self.masters[name].astype(self._dtypes[name])})

    def state(self) -> dict[str, dict[str, mx.array]]:
        """References to everything that an update changes. The model's own parameters are the rounded masters."""
        stored = {
            f"{name}{_SEPARATOR}{kind}": value for name, kinds in self._stored.items() for kind, value in kinds.items()
        }
        return {"weights": dict(self.masters), "optimizer": {**self._scalars, **stored}}

    def own_part(self, state: Mapping[str, Mapping[str, mx.array]]) -> dict[str, dict[str, mx.array]]:
        """The arrays of a `state` of more parameters that are of these, in whatever form, or of all of them."""
        return {
            group: {
                name: value
                for name, value in state.get(group, {}).items()
                if name in ours or name.rpartition(_SEPARATOR)[0] in self.masters
            }
            for group, ours in self.state().items()
        }

    def fits(self, state: Mapping[str, Mapping[str, mx.array]]) -> bool:
        """`restore` accepts `state`."""
        return self._difference(state) is None

    def restore(self, state: Mapping[str, Mapping[str, mx.array]]) -> None:
        """Restore a result of `state()`. Raises ValueError when it is of another job, and changes nothing then."""
        if (difference := self._difference(state)) is not None:
            raise ValueError(difference)
        for group in ("weights", "optimizer"):
            for name, value in state[group].items():
                self.restore_one(group, name, value)

    def restore_one(self, group: str, name: str, value: mx.array) -> None:
        """Restore an array of a `state` that fits."""
        parameter, _, kind = name.rpartition(_SEPARATOR)
        if group == "weights":
            self.masters[name] = value
            weight = value.astype(self._dtypes[name])
            self._update_model({name: weight})
            mx.eval(weight)
        elif parameter:
            self._stored[parameter][kind] = value
        else:
            self._scalars[name] = value

    def _difference(self, state: Mapping[str, Mapping[str, mx.array]]) -> str | None:
        """The first name, shape or type that is not this job's."""
        for group, ours in self.state().items():
            theirs = state.get(group, {})
            for name in sorted(ours.keys() | theirs.keys(), key=lambda name: (not name.endswith(COMPENSATION), name)):
                here, there = ours.get(name), theirs.get(name)
                if here is None or there is None:
                    where = "this job's" if there is None else "the saved"
                    message, of_form = f"{name} is only in {where} {group}", name.endswith((COMPENSATION, SCALE))
                elif (here.shape, here.dtype) != (there.shape, there.dtype):
                    message = (
                        f"{name} of the saved {group} is {there.shape} {there.dtype}, "
                        f"this job's is {here.shape} {here.dtype}"
                    )
                    of_form = here.shape == there.shape
                else:
                    continue
                key = "optimizer_precision" if group == "weights" or name.endswith(COMPENSATION) else "moments"
                return f"it was saved with another {key}: {message}" if of_form else message
        return None

    def _initial(self, weight: mx.array) -> dict[str, mx.array]:
        moments: dict[str, mx.array] = {}
        self._optimizer.init_single(mx.zeros(weight.shape, self._form.computed(weight.dtype)), moments)
        return self._form.initial(weight, moments)

    def _begin_step(self) -> None:
        """As Optimizer.apply_gradients, once per update."""
        step = self._scalars["step"]
        self._scalars |= {name: schedule(step) for name, schedule in self._optimizer._schedulers.items()}
        self._scalars["step"] = step + 1

    def _clip(self, norm: mx.array) -> mx.array | None:
        return None if self._max_norm is None else mx.minimum(self._max_norm / (norm + 1e-6), 1.0)

    def _advance(
        self,
        functions: Mapping[mx.Dtype, _Step],
        gradients: Mapping[str, mx.array],
        divisor: mx.array | None,
        clip: mx.array | None,
    ) -> tuple[dict[str, mx.array], mx.array]:
        """Replace the parameters of `gradients` and their state by lazy ones; these weights, and the sum of squares of
        the gradients before clipping."""
        weights, squares = {}, []
        for name, gradient in gradients.items():
            step, stored = functions[self._dtypes[name]], self._stored[name]
            before = self.masters[name], stored, self._keys[name]
            weights[name], self.masters[name], stepped, square = step(gradient, before, self._scalars, (divisor, clip))
            stored.update(stepped)
            squares.append(square)
        self._update_model(weights)
        return weights, mx.stack(squares).sum()

    def _advance_in_slices(
        self, name: str, gradient: mx.array, divisor: mx.array | None, clip: mx.array | None
    ) -> tuple[dict[str, mx.array], mx.array]:
        """The same for one parameter that is larger than what is computed at once; its state is evaluated."""
        step, stored = self._compiled[self._dtypes[name]], self._stored[name]
        old, flat, square = self.masters[name].reshape(-1), gradient.reshape(-1), mx.array(0.0)
        del gradient
        slices: dict[str, list[mx.array]] = {_WEIGHT: [], **{kind: [] for kind in stored}}
        for start in range(0, old.size, self._room):
            part = slice(start, start + self._room)
            before = old[part], sliced(stored, part), self._keys[name] + mx.array([0, start], mx.uint32)
            _, kept, stepped, part_square = step(flat[part], before, self._scalars, (divisor, clip))
            square = square + part_square
            mx.eval(square, kept, stepped)
            for kind, value in {_WEIGHT: kept, **stepped}.items():
                slices[kind].append(value)
            del before, kept, stepped, value, _
        del flat, old
        for kind, values in slices.items():
            arrays, key = (self.masters, name) if kind == _WEIGHT else (stored, kind)
            arrays[key] = mx.concatenate(values).reshape(arrays[key].shape)
            mx.eval(arrays[key])
            values.clear()
        weights = {name: self.masters[name].astype(self._dtypes[name])}
        self._update_model(weights)
        return weights, square

    def _step(
        self,
        dtype: mx.Dtype,
        gradient: mx.array,
        before: tuple[mx.array, Mapping[str, mx.array], mx.array],
        scalars: Mapping[str, mx.array],
        scaling: tuple[mx.array | None, mx.array | None],
    ) -> tuple[mx.array, mx.array, dict[str, mx.array], mx.array]:
        """One parameter's step, a pure function of what is kept and stored of it and its key (`before`), and of the
        gradient's divisor and factor (`scaling`). The model's weight of `dtype`, what is kept and stored, and the sum
        of squares of the gradient before clipping."""
        (kept, stored, key), (divisor, clip) = before, scaling
        mean = gradient if divisor is None else gradient.astype(mx.float32) / divisor
        square = _square(mean)
        parameter, moments = self._form.decode(kept, stored)
        # Its state holds only what is passed: a compiled function would make constants of anything else.
        optimizer = copy.copy(self._optimizer)
        optimizer.state = dict(scalars)
        clipped = mean if clip is None else mean.astype(mx.float32) * clip
        parameter = optimizer.apply_single(clipped.astype(parameter.dtype), parameter, moments)
        update = scalars["step"].astype(mx.uint32).reshape(1)
        kept, stepped = self._form.encode(parameter, moments, dtype, mx.concatenate([key, update]))
        # The gradient must not wait in memory for the squares of all others.
        weight = kept.astype(dtype)
        square = mx.depends(square, [weight, kept, *stepped.values()])
        return weight, kept, stepped, square

    def _update_model(self, weights: Mapping[str, mx.array]) -> None:
        # Not strict: in a list of layers, those without any of `weights` are left as they are.
        self._model.update(tree_unflatten(list(weights.items())), strict=False)


def _square(gradient: mx.array) -> mx.array:
    return mx.square(gradient.astype(mx.float32)).sum()


def _random_key(seed: int, name: str) -> mx.array:
    """64 bits, uint32 [2], for a parameter's random rounding."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return mx.array([int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")], mx.uint32)


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
