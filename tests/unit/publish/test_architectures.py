"""What mlx-lm saves of the architectures that are published for llama.cpp is what transformers saves of them, by the
names and shapes that transformers 5.23 gave tiny models of one layer (tests/data/transformers_weights.json)."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from engine.publish.targets import CONVERTED

RECORDED = json.loads((Path(__file__).parents[2] / "data" / "transformers_weights.json").read_text())


def test_each_is_recorded() -> None:
    assert {*RECORDED} == CONVERTED


@pytest.mark.parametrize("architecture", RECORDED)
def test_mlx_lm_saves_it_as_transformers_does(architecture: str) -> None:
    config, shapes = RECORDED[architecture].values()
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    theirs = {name: mx.random.normal(shape) for name, shape in shapes.items()}
    ours = model.sanitize(dict(theirs)) if hasattr(model, "sanitize") else theirs
    saved = dict(tree_flatten(model.parameters()))
    assert {name: list(array.shape) for name, array in saved.items()} == {
        # A tied head is saved by neither.
        name: shape
        for name, shape in shapes.items()
        if name in saved or name != "lm_head.weight"
    }
    assert all(mx.array_equal(ours[name], theirs[name]) for name in saved)
