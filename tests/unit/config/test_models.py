"""Copies of a configuration with some of its nodes, and what follows from its strategy."""

from __future__ import annotations

from typing import Literal, get_args

import pytest
from textual.theme import BUILTIN_THEMES

from engine.checks.runner import CHECKS
from engine.config.models import CheckName, ClusterConfig, Theme, needs_all_nodes, select_nodes
from engine.errors import InputError
from engine.plan.strategy import with_strategy
from engine.protocol.job import Strategy
from tests.unit.plan.calibrations import config


def test_ranks_are_counted_anew_and_devices_towards_the_others_go() -> None:
    deck = config(["a", "b", "c"])
    rows = ((None, "x1", "x2"), ("y0", None, "y2"), ("z0", "z1", None))
    wired = tuple(node.model_copy(update={"rdma": row}) for node, row in zip(deck.nodes, rows, strict=True))
    part = select_nodes(deck.model_copy(update={"nodes": wired}), {"c", "a"})
    assert [(node.name, node.rdma) for node in part.nodes] == [("a", (None, "x2")), ("c", ("z0", None))]
    assert part.job == deck.job


def test_a_pipelines_layers_for_more_ranks_go() -> None:
    deck = config(["a", "b", "c"])
    job = deck.job.model_copy(update={"strategy": "pipeline", "layer_split": "0-1,1-2,2-4"})
    deck = deck.model_copy(update={"job": job})
    assert select_nodes(deck, {"a", "b"}).job.layer_split is None
    assert select_nodes(deck, {"a", "b", "c"}).job == job


def test_an_empty_selection_is_refused() -> None:
    with pytest.raises(InputError, match="no node of the configuration is left"):
        select_nodes(config(["a"]), {"b"})


@pytest.mark.parametrize(
    ("strategy", "launcher", "directly", "all_nodes"),
    [
        ("data", "mlx.launch", False, False),
        ("data", "direct", True, False),
        ("sharded", "mlx.launch", False, True),
        ("pipeline", "mlx.launch", False, True),
        ("local", "mlx.launch", True, False),
    ],
)
def test_how_ranks_are_started_and_which_nodes_a_restart_needs(
    strategy: Strategy, launcher: Literal["mlx.launch", "direct"], directly: bool, all_nodes: bool
) -> None:
    deck = with_strategy(config(["a", "b"]), strategy, None)
    deck = deck.model_copy(update={"cluster": ClusterConfig(launcher=launcher)})
    assert (deck.starts_directly, needs_all_nodes(deck)) == (directly, all_nodes)


@pytest.mark.parametrize(
    ("strategy", "needed"), [("data", False), ("local", False), ("sharded", True), ("pipeline", True)]
)
def test_only_a_partitioned_state_needs_all_nodes(strategy: Strategy, *, needed: bool) -> None:
    assert needs_all_nodes(with_strategy(config(["a", "b"]), strategy, None)) is needed


def test_the_names_of_checks_and_themes_are_those_that_there_are() -> None:
    assert get_args(CheckName) == tuple(CHECKS)
    assert set(get_args(Theme)) == set(BUILTIN_THEMES)
