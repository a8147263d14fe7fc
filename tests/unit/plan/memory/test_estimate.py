"""The estimate's arithmetic: what grows, what is divided, what adds up."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InputError
from engine.measurements import MemoryProbe
from engine.plan.memory.estimate import (
    MOST_SEQUENCES,
    MemoryEstimate,
    RankWorkload,
    estimate,
    estimates,
    largest_batch,
    peak_from_probes,
)
from engine.plan.memory.shape import ModelShape
from engine.protocol.job import MOMENTS, MOST_PRECISE_FIRST, OPTIMIZER_PRECISIONS
from tests.bench.known_sizes import QWEN3_4B
from tests.unit.plan.memory.tiny import TINY

SIXTEEN_BITS = ModelShape.from_config({**TINY["llama"], "torch_dtype": "bfloat16"})
SHAPES = {name: ModelShape.from_config(config) for name, config in TINY.items()}


@st.composite
def shapes(draw: st.DrawFn, most_words: int = 50_000) -> ModelShape:
    config: dict[str, Any] = {
        **TINY["llama"],
        "num_hidden_layers": draw(st.integers(2, 12)),
        "hidden_size": 8 * draw(st.integers(1, 64)),
        "intermediate_size": draw(st.integers(1, 4_096)),
        "vocab_size": draw(st.integers(1, most_words)),
        "tie_word_embeddings": draw(st.booleans()),
        "torch_dtype": draw(st.sampled_from(["float32", "bfloat16", "float16"])),
    }
    return ModelShape.from_config(config)


asks = st.builds(
    RankWorkload,
    fine_tune_type=st.sampled_from(["lora", "dora", "full"]),
    num_layers=st.sampled_from([-1, 1, 2, 16]),
    lora_rank=st.integers(1, 64),
    batch=st.integers(1, 64),
    sequence=st.integers(1, 4_096),
    grad_checkpoint=st.one_of(st.booleans(), st.integers(1, 8)),
    optimizer=st.sampled_from(["adam", "adamw", "muon", "sgd", "adafactor"]),
    optimizer_precision=st.sampled_from(OPTIMIZER_PRECISIONS),
    moments=st.sampled_from(MOMENTS),
    clipping=st.booleans(),
    world_size=st.integers(1, 8),
    accumulation=st.integers(1, 4),
)


def state(need: MemoryEstimate) -> int:
    """What does not depend on the batch."""
    return need.weights_bytes + need.gradients_bytes + need.optimizer_bytes


@given(shapes(most_words=16), asks, st.integers(1, 64), st.integers(1, 4_096))
def test_more_work_never_needs_less(shape: ModelShape, ask: RankWorkload, sequences: int, tokens: int) -> None:
    # With so few words the loss is never computed in chunks, which are smaller just after there is one more of them.
    here = estimate(shape, ask)
    more = estimate(shape, replace(ask, batch=ask.batch + sequences, sequence=ask.sequence + tokens))
    assert more.peak_bytes >= here.peak_bytes
    assert state(more) == state(here)
    assert here.peak_bytes >= state(here)


@given(asks, st.sampled_from(sorted(SHAPES)), st.integers(1, 3), st.integers(1, 3))
def test_more_trained_layers_never_need_less(ask: RankWorkload, kind: str, few: int, more: int) -> None:
    if ask.fine_tune_type == "dora" and kind != "llama":
        ask = replace(ask, fine_tune_type="lora")
    # A number of recomputed layers would be a larger share of fewer.
    ask = replace(ask, grad_checkpoint=ask.grad_checkpoint is True)
    less = estimate(SHAPES[kind], replace(ask, num_layers=few))
    greater = estimate(SHAPES[kind], replace(ask, num_layers=few + more))
    assert greater.peak_bytes >= less.peak_bytes
    assert greater.trainable_parameters >= less.trainable_parameters


@given(shapes(), asks)
def test_a_deeper_model_needs_more(shape: ModelShape, ask: RankWorkload) -> None:
    skeleton = shape.architecture
    deeper = replace(shape, architecture=replace(skeleton, layers=(*skeleton.layers, skeleton.layers[-1])))
    assert estimate(deeper, ask).peak_bytes > estimate(shape, ask).peak_bytes


@given(shapes(), asks, st.integers(2, 8))
def test_sharding_divides_the_state(shape: ModelShape, ask: RankWorkload, ranks: int) -> None:
    copies = estimate(shape, replace(ask, world_size=ranks, grad_checkpoint=True))
    sharded = estimate(shape, replace(ask, world_size=ranks, strategy="sharded"))
    for name in ("weights_bytes", "optimizer_bytes"):
        assert getattr(sharded, name) * ranks == pytest.approx(getattr(copies, name), abs=2 * ranks)
    assert state(sharded) <= state(copies)
    # What sharding costs are the sections that are gathered, and the gradients of one.
    assert sharded.peak_bytes <= copies.peak_bytes + sharded.communication_bytes


@given(shapes(), asks)
def test_recomputing_layers_never_needs_more_than_one_input_each(shape: ModelShape, ask: RankWorkload) -> None:
    kept, *others = (
        estimate(shape, replace(ask, grad_checkpoint=count)) for count in (False, *range(1, shape.layers), True)
    )
    inputs = ask.batch * ask.sequence * shape.hidden * shape.dtype_bytes
    for before, after in pairwise([kept, *others]):
        assert after.peak_bytes <= max(before.peak_bytes + inputs, others[0].peak_bytes)
    assert all(state(each) == state(kept) for each in others)


@given(shapes(), asks)
def test_less_precise_never_keeps_more(shape: ModelShape, ask: RankWorkload) -> None:
    kept = [
        state(estimate(shape, replace(ask, optimizer_precision=precision, moments=moments)))
        for precision, moments in MOST_PRECISE_FIRST
    ]
    assert kept == sorted(kept, reverse=True)


@given(shapes(), asks, st.data())
def test_the_stages_of_a_pipeline_are_the_whole(shape: ModelShape, ask: RankWorkload, data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, shape.layers - 1))
    ask = replace(ask, strategy="pipeline")
    whole = estimate(shape, ask)
    stages = [estimate(shape, replace(ask, layers=part)) for part in ((0, cut), (cut, shape.layers))]
    twice = shape.matrix_bytes(shape.architecture.embedding) if shape.tied else 0
    assert sum(stage.weights_bytes for stage in stages) == whole.weights_bytes + twice
    for name in ("gradients_bytes", "optimizer_bytes", "trainable_parameters"):
        assert sum(getattr(stage, name) for stage in stages) == pytest.approx(getattr(whole, name), abs=2)
    assert all(stage.peak_bytes <= whole.peak_bytes for stage in stages)
    assert stages[0].logits_bytes == 0


@given(shapes(), asks, st.integers(0, 2**40))
def test_the_largest_batch_fits_and_the_next_does_not(shape: ModelShape, ask: RankWorkload, limit: int) -> None:
    found = largest_batch(estimates(shape, ask), limit)
    if found == MOST_SEQUENCES:
        assert estimate(shape, replace(ask, batch=found)).needed_bytes <= limit
    elif found == 0:
        assert estimate(shape, replace(ask, batch=1)).needed_bytes > limit
    else:
        assert estimate(shape, replace(ask, batch=found)).needed_bytes <= limit
        assert estimate(shape, replace(ask, batch=found + 1)).needed_bytes > limit


@pytest.mark.parametrize("kind", sorted(SHAPES))
def test_checkpointing_keeps_less_of_many_layers(kind: str) -> None:
    skeleton = SHAPES[kind].architecture
    deep = replace(SHAPES[kind], architecture=replace(skeleton, layers=skeleton.layers * 8))
    ask = RankWorkload(fine_tune_type="lora", batch=8, sequence=512)
    assert (
        estimate(deep, replace(ask, grad_checkpoint=True)).activations_bytes < estimate(deep, ask).activations_bytes / 2
    )


@pytest.mark.parametrize(
    ("precision", "moments", "each"),
    [
        ("float32", "float32", 12),
        ("kahan", "float32", 10),
        ("kahan", "bfloat16", 6),
        ("kahan", "8bit", 4.125),
        ("stochastic", "8bit", 2.125),
        ("parameter", "float32", 4),
    ],
)
def test_the_optimizer_state_of_16_bit_weights(precision: str, moments: str, each: float) -> None:
    ask = RankWorkload(fine_tune_type="full", optimizer_precision=precision, moments=moments)
    found = estimate(SIXTEEN_BITS, ask)
    assert found.trainable_parameters == sum(layer.parameters for layer in SIXTEEN_BITS.architecture.layers)
    assert found.optimizer_bytes == round(each * found.trainable_parameters)
    assert state(found) == found.weights_bytes + found.optimizer_bytes


@pytest.mark.parametrize(
    ("changes", "each"),
    [
        ({}, 0),
        ({"clipping": True}, 2),
        ({"accumulation": 2}, 4),
        ({"world_size": 2}, 4),
        ({"strategy": "pipeline", "world_size": 2}, 2),
        ({"strategy": "pipeline", "world_size": 2, "accumulation": 2}, 4),
        ({"strategy": "local", "world_size": 2}, 0),
        ({"strategy": "local", "world_size": 2, "clipping": True}, 2),
        ({"strategy": "local", "world_size": 2, "accumulation": 2}, 4),
        ({"strategy": "sharded", "world_size": 2}, 2),
        ({"strategy": "sharded", "world_size": 2, "accumulation": 2}, 2),
    ],
)
def test_the_gradients_alive_at_once(changes: dict[str, Any], each: int) -> None:
    found = estimate(SIXTEEN_BITS, RankWorkload(fine_tune_type="full", **changes))
    assert found.gradients_bytes == each * found.trainable_parameters


def test_int8_keeps_what_it_rounds_away() -> None:
    ask = RankWorkload(fine_tune_type="full", world_size=2)
    whole, rounded = (estimate(SIXTEEN_BITS, replace(ask, wire=wire)) for wire in ("auto", "int8"))
    assert state(rounded) - state(whole) == 2 * whole.trainable_parameters


@given(shapes(), asks, st.integers(2, 8), st.booleans())
def test_local_keeps_what_one_rank_does_and_the_averaged_weights(
    shape: ModelShape, ask: RankWorkload, ranks: int, momentum: bool
) -> None:
    alone = estimate(shape, replace(ask, world_size=1))
    found = estimate(shape, replace(ask, strategy="local", world_size=ranks, outer_momentum=momentum))
    precise = ask.fine_tune_type != "full" or ask.optimizer_precision in ("float32", "kahan")
    kept = found.trainable_parameters * (2 if momentum else 1) * (4 if precise else shape.dtype_bytes)
    assert found.optimizer_bytes == alone.optimizer_bytes + kept
    assert (found.weights_bytes, found.gradients_bytes) == (alone.weights_bytes, alone.gradients_bytes)
    # Each model is smaller than a piece: the means, all ranks' changes and four more.
    copies = 4.5 / 8 * found.trainable_parameters * (1 + ranks + 4)
    arrays, rest = divmod(found.communication_bytes - math.ceil(copies), 4 * (ranks + 5))
    assert rest == 0 and arrays <= found.trainable_parameters
    # An averaging is no more than what it needs itself, since no gradient is alive.
    averaging = found.weights_bytes + found.optimizer_bytes + found.communication_bytes
    assert found.peak_bytes == max(alone.peak_bytes + kept, averaging)


@pytest.mark.parametrize(("wire", "each"), [("auto", 4.5 / 8), ("int8", 1 + 4 / 256), ("float32", 4)])
def test_rank_0_of_many_averages_a_large_model_in_pieces(wire: str, each: float) -> None:
    large = ModelShape.from_config(QWEN3_4B)
    ask = RankWorkload(fine_tune_type="full", strategy="local", wire=wire)
    few, many = (estimate(large, replace(ask, world_size=ranks)) for ranks in (2, 8))
    # The largest parameter of Qwen3-4B has 2560 × 9728 elements.
    largest = 2560 * 9728
    expected = few.trainable_parameters * each + 2**26 * each * (2 + 4) + largest * 4 * (2 + 5)
    assert few.communication_bytes == math.ceil(expected)
    added = many.communication_bytes - few.communication_bytes
    assert added == pytest.approx(6 * (2**26 * each + largest * 4), abs=1)


@pytest.mark.parametrize("part", [(0, 0), (2, 1), (-1, 2), (0, 99)])
def test_layers_that_are_not_there_are_refused(part: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="the model has 3 layers"):
        estimate(SHAPES["llama"], RankWorkload(strategy="pipeline", layers=part))


def probe(batch: int, peak: int) -> MemoryProbe:
    return MemoryProbe(batch=batch, peak_bytes=peak)


@given(st.integers(0, 10**12), st.integers(1, 10**10), st.integers(0, 10**11), st.integers(2, 1_024))
def test_an_optimizer_peak_does_not_change_the_slope(before: int, each: int, step: int, batch: int) -> None:
    # The optimizer's step is the peak at batch 1, the activations from batch 2 on.
    update = before + min(step, 2 * each)
    probes = [probe(1, max(update, before + each)), probe(2, before + 2 * each)]
    found = peak_from_probes(probes, batch, before)
    assert found == pytest.approx(before + batch * each, rel=1e-12)
    assert peak_from_probes(probes, 1, before) == probes[0].peak_bytes


def test_peaks_below_what_there_is_before_batch_1_are_no_line() -> None:
    assert peak_from_probes([probe(1, 100), probe(2, 150)], 8, 200) is None
    assert peak_from_probes([probe(1, 200), probe(2, 200)], 8, 200) == 200


@pytest.mark.parametrize("probes", [[], [probe(1, 100)], [probe(2, 100), probe(2, 120)]])
def test_one_batch_is_no_line(probes: list[MemoryProbe]) -> None:
    assert peak_from_probes(probes, 8, 50) is None
