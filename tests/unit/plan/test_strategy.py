"""A configuration with another strategy than its file's: what changes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.plan.strategy import with_strategy
from engine.protocol.job import Strategy
from tests.unit.plan.calibrations import config


def test_without_options_the_configuration_is_unchanged() -> None:
    deck = config(["a", "b"])
    assert with_strategy(deck, None, None) is deck


def test_layers_make_it_a_pipeline_and_another_strategy_drops_them() -> None:
    deck = with_strategy(config(["a", "b"]), None, "0-8,8-36")
    assert (deck.job.strategy, deck.job.layer_split) == ("pipeline", "0-8,8-36")
    assert with_strategy(deck, "pipeline", None).job == deck.job
    sharded = with_strategy(deck, "sharded", None)
    assert (sharded.job.strategy, sharded.job.layer_split) == ("sharded", None)


def test_impossible_strategies_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least two nodes"):
        with_strategy(config(["a"]), "pipeline", None)
    with pytest.raises(ConfigError, match="the weights of at least two nodes"):
        with_strategy(config(["a"]), "local", None)
    with pytest.raises(ConfigError, match='no value here, unless strategy = "pipeline"'):
        with_strategy(config(["a", "b"]), "local", "0-8,8-36")
    with pytest.raises(ConfigError, match=r"^--layer-split: job.layer_split.*3 ranges, one per node, not 2"):
        with_strategy(config(["a", "b", "c"]), None, "0-8,8-36")
    deck = config(["a", "b"])
    command = deck.model_copy(update={"job": deck.job.model_copy(update={"command": ("x",)})})
    with pytest.raises(ConfigError, match=r"^--strategy: job.strategy.*the command has its own settings"):
        with_strategy(command, "sharded", None)
    kept_out = deck.model_copy(update={"nodes": (deck.nodes[0], deck.nodes[1].model_copy(update={"validates": False}))})
    with pytest.raises(ConfigError, match="every node computes a part of each validation"):
        with_strategy(kept_out, "sharded", None)


@pytest.mark.parametrize(
    ("keys", "strategy", "why"),
    [
        ({"wire": "int8"}, "sharded", "sends no int8"),
        ({"wire": "int8"}, "pipeline", "sends no int8"),
        ({"local_steps": 4, "outer_momentum": 0.0}, "data", r"local_steps.*no value here.*\n.*outer_momentum"),
        ({"outer_learning_rate": 1.0}, "sharded", "outer_learning_rate"),
    ],
)
def test_keys_that_the_strategy_has_no_use_for_are_refused_as_in_the_file(
    keys: dict[str, Any], strategy: Strategy, why: str
) -> None:
    deck = config(["a", "b"])
    job = deck.job.model_copy(update={"mlx_lm": {**deck.job.mlx_lm, **keys}, "given": tuple(keys)})
    deck = deck.model_copy(update={"job": job})
    with pytest.raises(ConfigError, match=why):
        with_strategy(deck, strategy, None)
    assert keys.items() <= with_strategy(deck, "local", None).job.mlx_lm.items()
