"""A job that names its model and data as the Hub does: the copies that checks look at, and what they say without."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.checks.context import CheckContext
from engine.checks.model_files import run as check_model
from engine.checks.placement import hub_names, placed
from engine.cluster.transport.fleet import Fleet
from engine.cluster.transport.local import LocalTransport
from engine.config.load import load_config
from engine.config.models import Config, on_node
from engine.models import CheckStatus
from engine.protocol.manifest import HubName
from engine.snapshots import CopyProgress
from tests.model_copies import cache_files
from tests.model_files import llama_files

TINY, ROWS = HubName("model", "org/tiny"), HubName("dataset", "org/rows")
TOML = """
[[node]]
name = "here"
[job]
model = "org/tiny"
data = "hf:org/rows"
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", "/bin/sh")
    monkeypatch.setenv("FLIGHTDECK_HOME", str(tmp_path / "home"))
    (tmp_path / "flightdeck.toml").write_text(TOML)
    return load_config(tmp_path / "flightdeck.toml")


async def test_the_checks_look_at_the_copies_in_the_cache(config: Config, tmp_path: Path) -> None:
    assert hub_names(config) == {"model": TINY, "data": ROWS}
    assert config.nodes[0].data == "hf:org/rows"
    model = cache_files(tmp_path / "hub", TINY, llama_files())
    rows = cache_files(tmp_path / "hub", ROWS, {"data/train.jsonl": b'{"text": "a"}\n'})
    async with Fleet(tmp_path / "home") as fleet, CheckContext(config, fleet) as context:
        assert (context.config.nodes[0].model, context.config.nodes[0].data) == (str(model), str(rows))
        assert context.config.job.model == "org/tiny"


async def test_what_is_not_there_is_offered_to_be_brought(config: Config, tmp_path: Path) -> None:
    cache_files(tmp_path / "hub", TINY, {"config.json": b"{}"})
    async with Fleet(tmp_path / "home") as fleet, CheckContext(config, fleet) as context:
        checked = await check_model(context)
    assert checked.status is CheckStatus.FAIL
    assert checked.summary == "here has no whole copy of org/tiny: a launch brings it there"
    assert (checked.fix_command or "").startswith("flightdeck models push org/tiny")


async def test_a_folder_that_is_called_like_a_repository_is_that_folder(config: Config, tmp_path: Path) -> None:
    cache_files(tmp_path / "hub", TINY, llama_files())
    folder = tmp_path / "org" / "tiny"
    folder.mkdir(parents=True)
    async with Fleet(tmp_path / "home") as fleet, CheckContext(config, fleet) as context:
        assert context.config.nodes[0].model == str(folder)


def test_pushed_data_is_read_as_what_is_not_pushed(config: Config) -> None:
    assert config.data.model_copy(update={"push": True}).options == {}


async def test_old_pushed_data_that_no_run_names_is_removed_and_that_is_said(config: Config, tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (away,) = config.nodes
    away = away.model_copy(update={"ssh": "away", "data": on_node("rows", away, config.folder)})
    job = config.job.model_copy(update={"data": "rows", "model": None})
    data = config.data.model_copy(update={"push": True})
    config = config.model_copy(update={"nodes": (away,), "job": job, "data": data})
    steps, folders = list[CopyProgress](), list[Path]()
    async with Fleet(tmp_path / "home") as fleet:
        fleet._transports["away"] = LocalTransport()
        for number in range(5):
            (tmp_path / "rows" / "train.jsonl").write_text(f"rows {number}")
            placed_config = await placed(config, fleet, [], steps.append)
            folders.append(Path(str(placed_config.nodes[0].data)))
            if number == 0:
                # A run that has not come to its first attempt.
                (plan := tmp_path / "home/runs/first/plan.json").parent.mkdir(parents=True)
                plan.write_text(placed_config.model_dump_json())
    assert [folder.exists() for folder in folders] == [True, False, True, True, True]
    assert (folders[4] / "train.jsonl").read_text() == "rows 4"
    assert [step.note for step in steps if "older" in step.note] == [
        "6 B of older pushed data removed: no run there needs it"
    ]
    assert "older pushed data removed" in (tmp_path / "home" / "audit.jsonl").read_text()
