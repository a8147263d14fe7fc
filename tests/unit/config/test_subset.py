"""A configuration with some of its nodes."""

from __future__ import annotations

import pytest

from engine.config.subset import only
from engine.errors import InputError
from tests.unit.planning.calibrations import config


def test_ranks_are_counted_anew_and_devices_towards_the_others_go() -> None:
    deck = config(["a", "b", "c"])
    rows = ((None, "x1", "x2"), ("y0", None, "y2"), ("z0", "z1", None))
    wired = tuple(node.model_copy(update={"rdma": row}) for node, row in zip(deck.nodes, rows, strict=True))
    part = only(deck.model_copy(update={"nodes": wired}), {"c", "a"})
    assert [(node.name, node.rdma) for node in part.nodes] == [("a", (None, "x2")), ("c", ("z0", None))]
    assert part.job == deck.job


def test_a_pipelines_layers_for_more_ranks_go() -> None:
    deck = config(["a", "b", "c"])
    job = deck.job.model_copy(update={"strategy": "pipeline", "layer_split": "0-1,1-2,2-4"})
    deck = deck.model_copy(update={"job": job})
    assert only(deck, {"a", "b"}).job.layer_split is None
    assert only(deck, {"a", "b", "c"}).job == job


def test_none_at_all_is_refused() -> None:
    with pytest.raises(InputError, match="no node is left"):
        only(config(["a"]), {"b"})
