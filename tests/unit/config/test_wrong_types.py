"""Every key of every table with values of wrong types: a configuration, or one error whose lines name file and key."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from engine.config.load import load_config
from engine.config.mlx_lm_keys import FORMER_KEYS, KEYS
from engine.config.models import ClusterConfig, Config, JobConfig, NodeConfig
from engine.errors import ConfigError
from tests.unit.config.documents import JOB, NODES

_SECTIONS = {name: type(field.default) for name, field in Config.model_fields.items()}
TABLES = {
    "cluster": [*ClusterConfig.model_fields],
    "node": [field.alias or name for name, field in NodeConfig.model_fields.items()],
    "node_defaults": ["python", "workdir", "model", "data"],
    "job": [*{*JobConfig.model_fields, *KEYS, *FORMER_KEYS, "config", "script"} - {"model", "data"}],
    **{name: [*kind.model_fields] for name, kind in _SECTIONS.items() if hasattr(kind, "model_fields")},
}
VALUES = (
    *('"text"', '""', '"\\u001b[2J\\u0000\\n\\u202e"', f'"{"x" * 9000}"', '"../../etc"', '"$(id)"'),
    *("0", "-1", "9223372036854775807", f"1{'0' * 400}", "1e308", "nan", "-inf", "true", "1979-05-27T07:32:00Z"),
    *("[]", "[[1], {a = 1}]", "{}", '{"\\u0000" = {a = [1, "b"]}}', f"{'[' * 60}{']' * 60}"),
)
REST = {"cluster": NODES + JOB, "node": JOB, "job": NODES}
NEEDED = {"hostfile": "the file", "config": "the file", "ssh": "python", "script": "command[1]"}
"""Key → the key that is named in its place: what it leads to, or stands for."""


def document(table: str, key: str, value: str) -> str:
    header = "[[node]]" if table == "node" else f"[{table}]"
    model = JOB.partition("\n")[2] if table == "job" and key not in ("command", "script") else ""
    return f"{REST.get(table, NODES + JOB)}\n{header}\n{model}{key} = {value}\n"


@pytest.fixture(autouse=True)
def nothing_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object, **named: object) -> None:
        raise AssertionError("reading a configuration touched the outside")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(subprocess, "Popen", refused)
    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, refused)


@pytest.mark.parametrize("table", TABLES)
def test_a_key_with_any_value_is_read_or_named(tmp_path: Path, table: str) -> None:
    file = tmp_path / "flightdeck.toml"
    for key in TABLES[table]:
        refused = 0
        for value in VALUES:
            file.write_text(document(table, key, value))
            try:
                assert isinstance(load_config(file), Config)
            except ConfigError as error:
                refused += 1
                lines = [str(fault) for fault in error.faults]
                assert all(line.startswith(str(tmp_path)) and line.isprintable() for line in lines), lines
                assert max(map(len, lines)) < 1000, lines
                assert any(key in fault.key or NEEDED.get(key) in fault.key.split(".") for fault in error.faults), lines
        assert refused, f"[{table}] {key} accepts everything"
