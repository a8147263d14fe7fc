"""Adam, AdamW and SGD, and the schedules of the learning rate, as mlx.optimizers defines them, so that a job trains
alike in both frameworks: MLX's Adam corrects no bias unless it is asked to, where PyTorch's always does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.sgd import sgd

from engine.protocol.job import Job, JobError

Schedule = Callable[[int], float]
"""From the number of updates before this one to its learning rate."""

_ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "bias_correction": False}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "adam": _ADAM,
    "adamw": {**_ADAM, "weight_decay": 0.01},
    "sgd": {"momentum": 0.0, "weight_decay": 0.0, "dampening": 0.0, "nesterov": False},
}


class MlxOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """Elementwise, so that ZeRO and fully_shard can give it any part of the parameters. State is named as DeepSpeed's
    universal checkpoints want it: `exp_avg` (MLX's m, or the v of SGD) and `exp_avg_sq` (MLX's v). `begin` precedes
    each step. A step that nothing precedes makes the state, no more: DeepSpeed does one, which would decay weights."""

    def __init__(self, parameters: Iterable[Tensor], kind: str, settings: dict[str, Any]) -> None:
        """`settings`: mlx-lm's optimizer_config of that kind. Raises JobError."""
        if kind not in _DEFAULTS:
            raise JobError(
                f'[job] optimizer = {kind!r} does not exist with framework = "torch": use adamw, adam or sgd'
            )
        if unknown := settings.keys() - _DEFAULTS[kind].keys():
            raise JobError(f"[job] optimizer_config.{kind}: unknown key {min(unknown)!r}")
        super().__init__(parameters, {"lr": 0.0, "update": 0, "weight_decay": 0.0, **_DEFAULTS[kind], **settings})
        self._kind = kind
        # To Adam's kernel a parameter, its gradient and its state are flat arrays of one order: on the CPU unchecked.
        for parameter in (p for group in self.param_groups for p in group["params"] if not p.is_contiguous()):
            parameter.data = parameter.data.contiguous()

    def begin(self, learning_rate: float, update: int) -> None:
        """`update`: of the step that follows, from 1."""
        for group in self.param_groups:
            group["lr"], group["update"] = learning_rate, update

    def step(self, closure: None = None) -> None:
        advance = self._advance_sgd if self._kind == "sgd" else self._advance_adam
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            self._make_state(group, parameters)
            if parameters and group["update"] > 0:
                with torch.no_grad():
                    advance(group, parameters, [parameter.grad for parameter in parameters])

    def _make_state(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        names = ["exp_avg", "exp_avg_sq"] if self._kind != "sgd" else ["exp_avg"] if group["momentum"] > 0 else []
        # Only read by DeepSpeed's universal checkpoints.
        step = torch.tensor(float(group["update"]))
        for parameter in parameters:
            self.state[parameter]["step"] = step
            for name in names:
                if name not in self.state[parameter]:
                    self.state[parameter][name] = torch.zeros_like(parameter)

    def _kept(self, name: str, parameters: list[Tensor]) -> list[Tensor]:
        return [self.state[parameter][name] for parameter in parameters]

    def _advance_adam(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Any]) -> None:
        """By the kernel of torch.optim.AdamW(fused=True), which reads and writes everything once and allocates nothing.
        Its bias correction is 1 - beta^step: none after infinitely many."""
        state = (self._kept(name, parameters) for name in ("exp_avg", "exp_avg_sq"))
        # This rank's parts of what `fully_shard` divides.
        rows = (parameters, gradients, *state)
        weights, *others = ([part.to_local() if isinstance(part, DTensor) else part for part in row] for row in rows)
        step = group["update"] if group["bias_correction"] else math.inf
        steps = [torch.full((), step, dtype=torch.float32, device=weights[0].device)] * len(weights)
        settings = {name: group[name] for name in ("lr", "weight_decay", "eps")} | {"amsgrad": False, "maximize": False}
        beta1, beta2 = group["betas"]
        torch._fused_adamw_(weights, *others, [], steps, beta1=beta1, beta2=beta2, **settings)

    def _advance_sgd(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Any]) -> None:
        """By the functions of torch.optim.SGD(foreach=True)."""
        names = ("lr", "momentum", "dampening", "nesterov", "weight_decay")
        velocities = self._kept("exp_avg", parameters) if group["momentum"] > 0 else [None] * len(parameters)
        settings = {name: group[name] for name in names} | {"maximize": False, "foreach": True}
        sgd(parameters, gradients, velocities, **settings)


def make_optimizer(job: Job, parameters: Iterable[Tensor]) -> MlxOptimizer:
    """Raises JobError for what mlx.optimizers has and this module has not, or neither of them."""
    return MlxOptimizer(parameters, job.optimizer, job.optimizer_config.get(job.optimizer) or {})


_SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "exponential_decay": lambda init, rate: lambda step: init * rate**step,
    "step_decay": lambda init, rate, size: lambda step: init * rate ** (step // size),
    "cosine_decay": lambda init, steps, end=0.0: (
        lambda step: end + 0.5 * (1 + math.cos(math.pi / steps * min(step, steps))) * (init - end)
    ),
    "linear_schedule": lambda init, end, steps: lambda step: min(step, steps) * ((end - init) / steps) + init,
}


def make_schedule(job: Job) -> Schedule:
    """mlx-lm's build_schedule. Raises JobError."""
    if not job.lr_schedule:
        return lambda step: job.learning_rate
    try:
        arguments, warmup = job.lr_schedule["arguments"], job.lr_schedule.get("warmup", 0)
        after = _SCHEDULES[job.lr_schedule["name"]](*arguments)
        before = _SCHEDULES["linear_schedule"](job.lr_schedule.get("warmup_init", 0.0), arguments[0], warmup)
    except (KeyError, TypeError, IndexError) as error:
        raise JobError(f"[job] lr_schedule is not one that mlx-lm accepts: {error!r}") from error
    if not warmup:
        return after
    return lambda step: before(step) if step <= warmup else after(step - warmup - 1)
