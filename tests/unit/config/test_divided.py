"""A strategy that the command line asks for."""

from __future__ import annotations

import pytest

from engine.config.divided import divided
from engine.errors import InputError
from tests.unit.planning.calibrations import config


def test_what_is_not_asked_for_stays_as_it_is() -> None:
    deck = config(["a", "b"])
    assert divided(deck, None, None) is deck


def test_layers_make_it_a_pipeline_and_another_strategy_drops_them() -> None:
    deck = divided(config(["a", "b"]), None, "0-8,8-36")
    assert (deck.job.strategy, deck.job.layer_split) == ("pipeline", "0-8,8-36")
    assert divided(deck, "pipeline", None).job == deck.job
    sharded = divided(deck, "sharded", None)
    assert (sharded.job.strategy, sharded.job.layer_split) == ("sharded", None)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="two nodes or more"):
        divided(config(["a"]), "pipeline", None)
    with pytest.raises(InputError, match="2 ranges for 3 nodes"):
        divided(config(["a", "b", "c"]), "pipeline", "0-8,8-36")
    deck = config(["a", "b"])
    command = deck.model_copy(update={"job": deck.job.model_copy(update={"command": ("x",)})})
    with pytest.raises(InputError, match="a command of its own"):
        divided(command, "sharded", None)
