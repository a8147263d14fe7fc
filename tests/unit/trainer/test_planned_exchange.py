"""The trainer exchanges gradients as the plan counts them."""

from __future__ import annotations

from unittest.mock import Mock

import mlx.core as mx
import pytest

from engine.protocol.exchange import BUCKETS, averaging, buckets, exchange
from engine.trainer.gradient_wire import GradientWire
from engine.trainer.strategies.data_parallel import _bucketed
from engine.trainer.strategies.local import QUANTIZATIONS


@pytest.mark.parametrize("wire", ["auto", "float32", "int8"])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_bucket_travels_in_the_planned_form(wire: str, dtype: mx.Dtype, ranks: int) -> None:
    collective, bucket = Mock(rank=0, size=ranks), mx.ones(1024, dtype)
    GradientWire(collective, wire).start(0, bucket, None, exact=False)
    form = exchange(wire, ranks, dtype.size)
    started, other = collective.start_gather, collective.start_sum
    if not form.gathered:
        started, other = other, started
    other.assert_not_called()
    ((sent,), _) = started.call_args
    assert sent.nbytes == bucket.size * form.element_bytes


@pytest.mark.parametrize("wire", ["auto", "float32", "int8"])
def test_a_change_of_weights_travels_in_the_planned_size(wire: str) -> None:
    size = 2**12
    encoded = size * 4 if (form := QUANTIZATIONS.get(wire)) is None else form.encode(mx.zeros(size)).nbytes
    assert encoded == size * averaging(wire, 2).element_bytes


@pytest.mark.parametrize(("parameters", "planned"), [(8, 1), (160, 10), (1280, BUCKETS)])
def test_there_are_as_many_buckets_as_planned(parameters: int, planned: int) -> None:
    trainable = {f"layers.{number}": mx.zeros(2**14) for number in range(parameters)}
    assert len(_bucketed(trainable)) == buckets(parameters * 2**14) == planned
