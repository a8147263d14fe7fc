"""A state that another thread reads."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from engine.trainer import weights
from engine.trainer.collective import as_words
from engine.trainer.weights import State, for_other_threads


def state() -> State:
    """Of every size of a number, with zeros and NaNs whose bits a sum would change, a scalar and nothing at all."""
    odd = mx.array([-0.0, 0.0, float("nan"), -float("inf"), 1e-40, 1.0])
    kinds = (mx.float32, mx.bfloat16, mx.float16, mx.uint32, mx.uint64, mx.int8, mx.bool_)
    by_kind = {str(kind): odd.astype(kind) for kind in kinds}
    made: State = {"weights": by_kind, "optimizer": {"step": mx.array(7, mx.uint64), "none": mx.zeros((0, 3))}}
    mx.eval(made)
    return made


def raw(array: mx.array) -> np.ndarray:
    return np.asarray(mx.reshape(array, (-1,)).view(mx.uint8))


def places(kept: State) -> list[int]:
    return [raw(value).ctypes.data for group in kept.values() for value in group.values() if value.size]


@pytest.mark.parametrize("size", [16, 17], ids=["whole", "padded"])
def test_what_ranks_exchange_shares_no_memory_with_a_parameter(size: int) -> None:
    """With the ring on CUDA the host reads it, which moves an array's memory there."""
    parameter = mx.arange(size).astype(mx.float32)
    words = as_words(parameter)
    mx.eval(parameter, words)
    assert raw(words).ctypes.data != raw(parameter).ctypes.data


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """MLX says that it computes on a CUDA GPU, of which so much memory is free."""
    memory = {"free_memory": 2**30, "total_memory": 2**31}
    monkeypatch.setattr(weights, "on_cuda", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: memory)
    return memory


@pytest.mark.usefixtures("cuda")
def test_on_cuda_it_is_a_copy_bit_for_bit() -> None:
    own = state()
    other = for_other_threads(own)
    assert not set(places(own)) & set(places(other))
    for group, arrays in own.items():
        for name, value in arrays.items():
            copy = other[group][name]
            assert (copy.dtype, copy.shape) == (value.dtype, value.shape)
            assert np.array_equal(raw(copy), raw(value)), name


def test_on_cuda_without_room_beside_a_step_and_elsewhere_it_is_the_state_itself(
    cuda: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = state()
    monkeypatch.setattr(mx, "get_peak_memory", lambda: mx.get_active_memory() + mx.get_cache_memory() + 2**30)
    assert places(for_other_threads(own)) == places(own)
    cuda["free_memory"] = 2**31
    assert places(for_other_threads(own)) != places(own)
    monkeypatch.setattr(weights, "on_cuda", lambda: False)
    assert for_other_threads(own) is own
