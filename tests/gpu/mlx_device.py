"""What a part asks of MLX itself, in a process of its own: `python -m tests.gpu.mlx_device TASK REQUEST`.

REQUEST is JSON. The answers are JSON lines on standard output, each as soon as it is there; what anything else prints
goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from itertools import product
from typing import Any

import mlx.core as mx

Answer = dict[str, Any]
Task = Callable[[Answer], Iterator[Answer]]


def answer_request(tasks: Mapping[str, Task]) -> int:
    """Do what this process was started for."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    task, request = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for answer in tasks[task](json.loads(request)):
        print(json.dumps(answer), file=answers, flush=True)
    return 0


def facts(_: Answer) -> Iterator[Answer]:
    """What MLX says of itself and of its device."""
    answer: Answer = {"mlx": version("mlx"), "default_device": str(mx.default_device())}
    for name, module in {"cuda": mx.cuda, "metal": mx.metal}.items():
        answer[name] = bool(module.is_available())
    answer["backends"] = {name: bool(mx.distributed.is_available(name)) for name in ("ring", "nccl", "mpi", "jaccl")}
    answer["device_info"] = {key: str(value) for key, value in mx.device_info().items()}
    answer["sum"] = mx.sum(mx.arange(100)).item()
    yield answer


def all_sum(request: Answer) -> Iterator[Answer]:
    """One rank's sum over the group that its environment describes."""
    group = mx.distributed.init(strict=True, backend=request["backend"])
    stream = mx.gpu if request["backend"] == "nccl" else mx.cpu
    own = mx.full((1 << 16,), 10.0 ** group.rank())
    total = mx.distributed.all_sum(own, group=group, stream=stream)
    yield {"rank": group.rank(), "size": group.size(), "sum": mx.max(total).item()}


def attention(request: Answer) -> Iterator[Answer]:
    """The peak memory of attention's gradient, without what goes in, for each head and length."""
    for head, length in product(request["head_dims"], request["lengths"]):
        shape = (1, request["heads"], length, head)
        inputs = [mx.random.normal(shape).astype(mx.bfloat16) for _ in range(3)]
        mx.eval(inputs)
        gradient = attention_gradient(head)
        mx.eval(gradient(*inputs))
        mx.synchronize()
        mx.clear_cache()
        mx.reset_peak_memory()
        before, started = mx.get_active_memory(), time.perf_counter()
        mx.eval(gradient(*inputs))
        mx.synchronize()
        answer = {"head": head, "length": length, "seconds": time.perf_counter() - started}
        yield answer | {"peak_bytes": mx.get_peak_memory() - before, "input_bytes": sum(map(_bytes, inputs))}


def attention_gradient(head: int) -> Callable[..., Any]:
    """Of queries, keys and values, [1, heads, tokens, head]; causal."""

    def loss(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        output = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=head**-0.5, mask="causal")
        return mx.sum(output.astype(mx.float32))

    return mx.value_and_grad(loss, argnums=(0, 1, 2))


def _bytes(value: mx.array) -> int:
    return value.nbytes


if __name__ == "__main__":
    sys.exit(answer_request({"facts": facts, "all_sum": all_sum, "attention": attention}))
