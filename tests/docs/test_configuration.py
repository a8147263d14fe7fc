"""docs/configuration.md documents every key, and its example is accepted."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from jsonschema import Draft7Validator
from pydantic import BaseModel

from engine.config import models
from engine.config.draft import SCHEMA
from engine.config.faults import keys_of
from engine.config.load import load_config
from tests.docs.configuration import field_docstrings
from tests.docs.generate import ROOT
from tests.docs.schema import schema, written

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


def test_the_schema_for_editors_is_up_to_date() -> None:
    assert SCHEMA.read_text(encoding="utf-8") == written(), "run: uv run python -m tests.docs.generate"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", None),
        ("[job]\nlearning_rate = 'auto'\nepochs = 0.5\nlora_parameters = {rank = 4}\noptimizer = 'adamw'", None),
        ("[[node]]\nvalidate = true\nrdma = ['', 'rdma_en5']\n[job]\nclear_cache_threshold = '2GB'", None),
        ("[job]\nlerning_rate = 1", "lerning_rate"),
        ("[job]\nbatch_size = 0", "minimum"),
        ("[recovery]\nwithout_state = 'x'", "'x' is not one of"),
    ],
)
def test_an_editor_finds_faults_by_the_schema(text: str, fault: str | None) -> None:
    errors = [error.message for error in Draft7Validator(schema()).iter_errors(tomllib.loads(text))]
    assert (not errors) if fault is None else len(errors) == 1 and fault in errors[0]
