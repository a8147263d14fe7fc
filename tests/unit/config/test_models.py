"""Copies of a configuration: with some of its nodes, with another strategy."""

from __future__ import annotations

from typing import Any, Literal, get_args

import pytest
from textual.theme import BUILTIN_THEMES

from engine.checks.runner import CHECKS
from engine.config.models import CheckName, ClusterConfig, Theme, needs_all_nodes, select_nodes, with_strategy
from engine.errors import InputError
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


def test_without_options_the_configuration_is_unchanged() -> None:
    deck = config(["a", "b"])
    assert with_strategy(deck, None, None) is deck


def test_layers_make_it_a_pipeline_and_another_strategy_drops_them() -> None:
    deck = with_strategy(config(["a", "b"]), None, "0-8,8-36")
    assert (deck.job.strategy, deck.job.layer_split) == ("pipeline", "0-8,8-36")
    assert with_strategy(deck, "pipeline", None).job == deck.job
    sharded = with_strategy(deck, "sharded", None)
    assert (sharded.job.strategy, sharded.job.layer_split) == ("sharded", None)


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


def test_impossible_strategies_are_refused() -> None:
    with pytest.raises(InputError, match="at least two nodes"):
        with_strategy(config(["a"]), "pipeline", None)
    with pytest.raises(InputError, match="the weights of at least two nodes"):
        with_strategy(config(["a"]), "local", None)
    with pytest.raises(InputError, match="strategy local does not split layers"):
        with_strategy(config(["a", "b"]), "local", "0-8,8-36")
    with pytest.raises(InputError, match="3 ranges, one per node, not 2"):
        with_strategy(config(["a", "b", "c"]), "pipeline", "0-8,8-36")
    deck = config(["a", "b"])
    command = deck.model_copy(update={"job": deck.job.model_copy(update={"command": ("x",)})})
    with pytest.raises(InputError, match="a custom command"):
        with_strategy(command, "sharded", None)


@pytest.mark.parametrize(
    ("keys", "strategy", "why"),
    [
        ({"wire": "int8"}, "sharded", "sends no int8"),
        ({"wire": "int8"}, "pipeline", "sends no int8"),
        ({"local_steps": 4, "outer_momentum": 0.0}, "data", "local_steps, outer_momentum are of strategy local alone"),
        ({"outer_learning_rate": 1.0}, "sharded", "outer_learning_rate"),
    ],
)
def test_keys_that_the_strategy_has_no_use_for_are_refused_as_in_the_file(
    keys: dict[str, Any], strategy: Strategy, why: str
) -> None:
    deck = config(["a", "b"])
    job = deck.job.model_copy(update={"mlx_lm": {**deck.job.mlx_lm, **keys}, "given": tuple(keys)})
    deck = deck.model_copy(update={"job": job})
    with pytest.raises(InputError, match=why) as refusal:
        with_strategy(deck, strategy, None)
    assert refusal.value.todo is not None and "[job]" in refusal.value.todo
    assert with_strategy(deck, "local", None).job.mlx_lm == job.mlx_lm


@pytest.mark.parametrize(
    ("strategy", "needed"), [("data", False), ("local", False), ("sharded", True), ("pipeline", True)]
)
def test_only_a_partitioned_state_needs_all_nodes(strategy: Strategy, *, needed: bool) -> None:
    assert needs_all_nodes(with_strategy(config(["a", "b"]), strategy, None)) is needed


def test_the_names_of_checks_and_themes_are_those_that_there_are() -> None:
    assert get_args(CheckName) == tuple(CHECKS)
    assert set(get_args(Theme)) == set(BUILTIN_THEMES)
