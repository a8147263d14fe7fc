"""The rows of a job, in the overview and in the dialog before a launch."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config.mlx_lm_keys import with_defaults
from tests.tui import fake_engine
from tui.state import DeckState
from tui.widgets.plan_summary import job_rows


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"iters": 60}, "60 iterations"),
        ({"epochs": 1.0}, "1 epoch"),
        ({"epochs": 2.5}, "2.5 epochs"),
    ],
)
def test_a_job_shows_its_iterations_or_its_epochs(given: dict[str, Any], shown: str) -> None:
    config = fake_engine.configuration()
    config = config.model_copy(update={"job": config.job.model_copy(update={"mlx_lm": with_defaults(given)})})
    state = DeckState(config=config)
    sizes = dict(job_rows(config, state))["training"].split(state.glyphs.separator)
    assert sizes[:3] == ["full fine-tuning", shown, "global batch 4"]
