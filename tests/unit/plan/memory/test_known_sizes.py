"""The sizes that users know come out of the public configurations under the assumption that is named."""

from __future__ import annotations

import pytest

from engine.plan.memory.shape import ModelShape
from tests.bench.fits import MODELS
from tests.bench.known_sizes import CHEAP_BYTES, KNOWN_SIZES, RULE_BYTES, KnownSize, known_bytes

PUBLISHED = {
    "Qwen3-4B": 4.02e9,
    "Qwen2.5-7B": 7.62e9,
    "Qwen3-14B": 14.77e9,
    "Qwen3-30B-A3B": 30.53e9,
    "Qwen3-32B": 32.76e9,
    "Qwen3-8B": 8.19e9,
    "Llama-3.3-70B": 70.55e9,
}
"""Parameters as their model cards and indexes say, to three figures."""


@pytest.mark.parametrize("size", KNOWN_SIZES, ids=lambda size: f"{size.model} {size.reported_gb} GB")
def test_known_sizes_are_reproduced(size: KnownSize) -> None:
    assert known_bytes(size) / 1e9 == pytest.approx(size.reported_gb, rel=0.08)


@pytest.mark.parametrize("model", PUBLISHED)
def test_parameters_are_the_published_ones(model: str) -> None:
    configs = {size.model: size.config for size in KNOWN_SIZES} | dict(MODELS)
    assert ModelShape.from_config(configs[model]).total_parameters == pytest.approx(PUBLISHED[model], rel=0.002)


def test_assumptions_are_named() -> None:
    assert {size.reported_gb: size.bytes_per_parameter for size in KNOWN_SIZES} == {
        **dict.fromkeys((58, 104, 198, 410, 448), RULE_BYTES),
        320: CHEAP_BYTES,
    }
    assert KNOWN_SIZES[0].assumption == "12 bytes per parameter, 2,048 tokens, all activations kept, fused attention"
    assert "gradient checkpointing" in KNOWN_SIZES[-1].assumption
