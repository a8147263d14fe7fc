"""The removal of a copy that a run or a queued item reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.api import model_copies
from engine.api.engine import Engine
from engine.config.load import load_config
from engine.config.models import Config
from engine.errors import InputError
from engine.protocol.manifest import HubName
from tests.model_copies import cache_files
from tests.model_files import llama_files

TOML = '[[node]]\nname = "here"\n[job]\nmodel = "{model}"\ndata = "data"\n'


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", "/bin/sh")
    monkeypatch.setenv("FLIGHTDECK_HOME", str(tmp_path / "home"))
    return cache_files(tmp_path / "hub", HubName("model", "org/tiny"), llama_files())


def config(folder: Path, model: str) -> Config:
    (file := folder / "flightdeck.toml").write_text(TOML.format(model=model))
    return load_config(file)


async def test_what_a_queued_item_names_or_reads_is_kept_and_anything_else_removed(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Engine(tmp_path / "home") as engine:
        for model in ("org/tiny", str(snapshot)):
            queued = config(tmp_path, model)
            monkeypatch.setattr(model_copies, "queued_configs", lambda _, queued=queued: [queued])
            with pytest.raises(InputError, match="is in use on here"):
                await engine.models.remove(queued, "org/tiny", "here")
        monkeypatch.setattr(model_copies, "queued_configs", lambda _: [config(tmp_path, "org/other")])
        freed = await engine.models.remove(config(tmp_path, "org/tiny"), "org/tiny", "here")
    assert freed >= sum(map(len, llama_files().values()))
    assert not snapshot.exists()


@pytest.mark.parametrize(("path", "kept"), [("/home/ana/models/x", True), ("/home/ana/models/y", False)])
def test_a_folder_that_a_run_names_below_the_nodes_home_is_in_use(tmp_path: Path, path: str, kept: bool) -> None:
    toml = '[[node]]\nname = "ana"\nssh = "ana"\npython = "/p"\n[job]\nmodel = "~/models/x/"\ndata = "~/data"\n'
    (file := tmp_path / "flightdeck.toml").write_text(toml)
    assert model_copies._reads(load_config(file), "ana", path, [path]) == kept
    assert not model_copies._reads(load_config(file), "bea", path, [path])
