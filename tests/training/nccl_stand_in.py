"""`mx.distributed` as MLX's NCCL backend has it (mlx/distributed/nccl/nccl.cpp), for ranks that are threads of this
process: its types, its operations and its streams, and no others. The values are exchanged by `together`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import mlx.core as mx
import pytest

from engine.trainer.collective import Collective
from tests.training.together import together

Result = TypeVar("Result")
TYPES = {
    mx.int8, mx.uint8, mx.int32, mx.uint32, mx.int64, mx.uint64,
    mx.float16, mx.bfloat16, mx.float32, mx.float64,
}  # fmt: skip
"""Of MLX_NCCL_TYPE_LIST."""


class _Group:
    def __init__(self, member: Collective) -> None:
        self.member = member

    def size(self) -> int:
        return self.member.size

    def rank(self) -> int:
        return self.member.rank


@contextmanager
def nccl() -> Iterator[Callable[[int, Callable[[Collective], Result]], list[Result]]]:
    """A function that calls another one on each of so many ranks, with its Collective of backend "nccl", and returns
    the results."""
    here = threading.local()

    def init(*, strict: bool, backend: str) -> _Group:
        assert strict and backend == "nccl"
        return _Group(here.member)

    def checked(array: mx.array, stream: Any) -> mx.array:
        assert stream == mx.gpu, "[nccl] a stream of the CPU"
        if array.dtype not in TYPES:
            raise ValueError("[nccl] Unknown or unsupported dtype")
        return array

    def all_sum(array: mx.array, *, group: _Group, stream: Any) -> mx.array:
        return group.member.all_sum(checked(array, stream))

    def all_gather(array: mx.array, *, group: _Group, stream: Any) -> mx.array:
        return mx.flatten(group.member.gather_arrays(checked(array, stream)), 0, 1)

    def refused(*_: Any, **__: Any) -> mx.array:
        raise RuntimeError("[nccl] Send not supported in NCCL backend.")

    def run(size: int, work: Callable[[Collective], Result]) -> list[Result]:
        def one(member: Collective) -> Result:
            here.member = member
            return work(Collective("nccl", size, member.rank))

        return together(size, one)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "new_stream", lambda device: device)
        operations = {"init": init, "all_sum": all_sum, "all_gather": all_gather}
        for name in ("all_max", "all_min", "send", "recv", "recv_like", "sum_scatter"):
            operations[name] = refused
        for name, operation in operations.items():
            patch.setattr(mx.distributed, name, operation)
        yield run
