"""flightdeck.toml files for the tests: one that is right, and a way to hear all that is wrong with another."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.load import load_config
from engine.config.models import Config
from engine.errors import ConfigError, ConfigFault

NODES = '[[node]]\nname = "a"\n[[node]]\nname = "b"\n'
JOB = '[job]\nmodel = "models/tiny-4B"\ndata = "data"\n'


def load(directory: Path, text: str | bytes) -> Config:
    file = directory / "flightdeck.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_config(file)


def faults_of(directory: Path, text: str | bytes) -> list[ConfigFault]:
    with pytest.raises(ConfigError) as raised:
        load(directory, text)
    assert raised.value.faults
    for fault in raised.value.faults:
        assert str(fault).isprintable(), str(fault)
        assert len(fault.value) <= 200
    return raised.value.faults


def only_fault(directory: Path, text: str | bytes) -> tuple[str, str, str]:
    """(key, value, accepted) of the one fault there is."""
    faults = faults_of(directory, text)
    assert len(faults) == 1, [str(fault) for fault in faults]
    return faults[0].key, faults[0].value, faults[0].accepted
