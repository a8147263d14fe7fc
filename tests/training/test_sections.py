"""A model's sections, one after the other, are the model."""

from __future__ import annotations

import itertools
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import gemma2

from engine.protocol.job import JobError
from engine.protocol.partition import SPLITTABLE_MODULES
from engine.trainer.model import recompute_layers
from engine.trainer.strategies.loss import Rows, loss_sum
from engine.trainer.strategies.sections import Section, check_splittable
from tests.training import kinds

TOKENS = mx.arange(2 * 19).reshape(2, 19) % 70


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", SPLITTABLE_MODULES)
def test_sections_one_after_the_other_are_the_model(kind: str, tied: bool) -> None:
    """Windows, positions and experts are each layer's own, wherever the cuts are."""
    model = kinds.model(kind, tied=tied)
    check_splittable(model, "pipeline")
    whole = {name: value.shape for name, value in tree_flatten(model.parameters())}
    expected = model(TOKENS)
    for edges in ([0, 4], [0, 1, 4], [0, 0, 2, 3, 4, 4]):
        ends = list(itertools.pairwise(edges))
        hidden: mx.array | None = None
        names: set[str] = set()
        for number, (start, end) in enumerate(ends):
            section = Section(model, start, end, first=number == 0, last=number == len(ends) - 1)
            hidden = section(TOKENS, hidden)
            own = {name: value.shape for name, value in tree_flatten(section.model.parameters())}
            assert own.items() <= whole.items()
            assert len(ends) == 1 or own != whole
            names |= own.keys()
        assert hidden is not None and mx.array_equal(hidden, expected).item()
        assert names == whole.keys()
    assert {name for name, _ in tree_flatten(model.parameters())} == whole.keys(), "the model itself stays whole"


@pytest.mark.parametrize("cuts", [None, [0, 2, 4]], ids=["whole", "in sections"])
@pytest.mark.parametrize("recomputed", [False, True])
def test_masks_stay_causal_by_name(monkeypatch: pytest.MonkeyPatch, cuts: list[int] | None, recomputed: bool) -> None:
    """MLX's gradient of attention in tiles takes no array as mask."""
    model, masks = kinds.model("qwen3", tied=False), list[object]()
    attend = mx.fast.scaled_dot_product_attention

    def attended(*arrays: mx.array, **more: Any) -> mx.array:
        masks.append(more["mask"])
        return attend(*arrays, **more)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", attended)
    recompute_layers(model.layers, recomputed)
    rows = Rows(TOKENS, mx.array([[1, 19]] * 2), 1.0)
    if cuts is None:
        nn.value_and_grad(model, loss_sum)(model, *rows.inputs)
    else:
        hidden: mx.array | None = None
        for number, (start, end) in enumerate(itertools.pairwise(cuts)):
            section = Section(model, start, end, first=number == 0, last=end == cuts[-1])
            hidden = section.forward(rows, hidden)
    assert masks and set(map(str, masks)) == {"causal"}


def test_an_unsupported_architecture_is_refused_by_name() -> None:
    model = gemma2.Model(gemma2.ModelArgs.from_dict(kinds.config("llama", tied=True) | {"model_type": "gemma2"}))
    with pytest.raises(JobError, match="does not support models of type gemma2"):
        check_splittable(model, "sharded")
