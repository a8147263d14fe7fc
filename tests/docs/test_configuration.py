"""docs/configuration.md documents every key, and its example is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from engine.config import models
from engine.config.faults import keys_of
from engine.config.load import load_config
from tests.docs.configuration import field_docstrings
from tests.docs.generate import ROOT

TEXT = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
TABLES = [
    value for name, value in vars(models).items() if name.endswith("Config") and name != "Config" and name[0] != "_"
]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_every_key_is_documented(table: type[BaseModel]) -> None:
    internal = {"fine_tune_type", "mlx_lm", "given", "unused", "rate_by_rule", "task"}
    assert field_docstrings(table).keys() >= table.model_fields.keys() - internal
    for name in set(keys_of(table)) - internal:
        assert f"| `{name}` |" in TEXT


def test_the_example_is_accepted(tmp_path: Path) -> None:
    (example,) = (part.split("```")[0] for part in TEXT.split("```toml\n")[1:])
    file = tmp_path / "flightdeck.toml"
    file.write_text(example, encoding="utf-8")
    config = load_config(file)
    assert [node.name for node in config.nodes] == ["ultra", "max"] and config.job.fine_tune_type == "lora"
