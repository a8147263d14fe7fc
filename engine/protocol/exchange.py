"""The form in which strategy "data" exchanges gradients, and "local" changes of weights, and its bytes: the same for
plan and trainer."""

from __future__ import annotations

from dataclasses import dataclass, replace

BUCKETS = 64
"""An update's gradients travel in about so many, each of whole parameters: one is small beside the model, and large
enough to use the ring both ways."""
LEAST_BUCKET = 2**18
"""Elements of a bucket, where 1 / BUCKETS of them are fewer."""
_FLOAT32_BYTES = 4
_SUM_BYTES = 2 * _FLOAT32_BYTES
"""Per element, a ring's all_sum of float32 sends this much with many ranks, and a gather each other rank's own size."""
INT8_BLOCK = 256
"""Values that share one float32 scale in int8: the scales are 1.6 % of the bytes."""
_INT8_BYTES = 1 + _FLOAT32_BYTES / INT8_BLOCK
"""An int8, and its part of a block's scale."""
INT4_BLOCK = 64
"""Values that share one float32 scale in int4."""
AVERAGING_PIECE = 2**26
"""Elements of whole parameters that are averaged at once, about."""
_INT4_BYTES = 0.5 + _FLOAT32_BYTES / INT4_BLOCK


@dataclass(frozen=True)
class Exchange:
    ranks: int
    gathered: bool
    """Every rank's own is gathered; else they are summed on the way."""
    element_bytes: float
    """Size of one element on the wire."""

    @property
    def sent(self) -> float:
        """Bytes per element that each rank sends to its neighbour in the ring."""
        return (self.ranks - 1) * self.element_bytes * (1 if self.gathered else 2 / self.ranks)

    @property
    def received(self) -> float:
        """Bytes per element of the result, before it is a sum."""
        return self.element_bytes * (self.ranks if self.gathered else 1)


def bucket_elements(elements: int) -> int:
    """Elements of each bucket of so many gradients, about: a larger parameter has its own."""
    return max(LEAST_BUCKET, elements // BUCKETS)


def buckets(elements: int) -> int:
    """In how many buckets so many gradients travel, about."""
    return min(BUCKETS, max(1, elements // LEAST_BUCKET))


def exchange(wire: str, ranks: int, element_bytes: int, accumulation: int = 1) -> Exchange:
    """`wire`: of [job]. `element_bytes`: of a gradient in the model's type, which has one micro-batch alone; several
    are added in float32."""
    gradient_bytes = element_bytes if accumulation == 1 else _FLOAT32_BYTES
    if wire == "int8":
        return Exchange(ranks, True, _INT8_BYTES)
    if wire == "auto" and gradient_bytes * ranks < _SUM_BYTES:
        return Exchange(ranks, True, gradient_bytes)
    return Exchange(ranks, False, _FLOAT32_BYTES)


@dataclass(frozen=True)
class Averaging:
    """How the change of one trained weight travels in strategy "local": a star with rank 0 in the middle."""

    ranks: int
    element_bytes: float
    """Sent by a rank other than 0; it gets as many back."""

    @property
    def sent(self) -> float:
        """Bytes per element over rank 0's link: all that the others send, and then all that they get."""
        return 2 * (self.ranks - 1) * self.element_bytes


def averaging(wire: str, ranks: int) -> Averaging:
    """`wire`: of [job]."""
    return Averaging(ranks, {"auto": _INT4_BYTES, "int8": _INT8_BYTES}.get(wire, _FLOAT32_BYTES))


_COUNTED = 100_000
"""Iterations over which averagings are counted, at most."""


@dataclass(frozen=True)
class AveragingSchedule:
    """When the ranks average. It depends on the job's numbers alone, so that a resumed training averages where an
    undisturbed one does."""

    iters: int
    grad_accumulation_steps: int
    local_steps: int
    save_every: int
    steps_per_eval: int | None
    """None without validation."""

    def averaging_due(self, iteration: int) -> bool:
        """The ranks average after the update that ends with `iteration`."""
        accumulation = self.grad_accumulation_steps
        if iteration == self.iters or -(-iteration // accumulation) % self.local_steps == 0:
            return True
        # A save follows an iteration and a validation comes before one, until the next update ends.
        end, every = min(iteration + accumulation, self.iters), self.steps_per_eval
        validates = every is not None and (end == self.iters or end // every > iteration // every)
        return validates or (end - 1) // self.save_every > (iteration - 1) // self.save_every

    @property
    def updates(self) -> float:
        """The mean number of updates from one averaging to the next."""
        job = replace(self, iters=min(self.iters, _COUNTED))
        ends = [*range(job.grad_accumulation_steps, job.iters, job.grad_accumulation_steps), job.iters]
        return len(ends) / sum(map(job.averaging_due, ends))
