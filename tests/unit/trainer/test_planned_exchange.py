"""The trainer exchanges gradients as the plan counts them."""

from __future__ import annotations

from unittest.mock import Mock

import mlx.core as mx
import pytest

from engine.plan.exchange import BUCKETS, LEAST_BUCKET, exchange
from engine.trainer.gradient_wire import GradientWire
from engine.trainer.strategies import data_parallel


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


def test_there_are_as_many_buckets_as_planned() -> None:
    assert (data_parallel._BUCKETS, data_parallel._LEAST_ELEMENTS) == (BUCKETS, LEAST_BUCKET)
