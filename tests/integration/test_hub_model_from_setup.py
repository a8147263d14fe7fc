"""A model that is named as on the Hub, from an empty folder by set-up to a training of it, on this machine alone."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path

import pytest

from engine.api import Engine, FoundHost, FoundPython, NodeCandidate, SetupChoices
from engine.run.run_plan import read_plan
from engine.store.layout import RunDir
from tests.demo_copies import made_demo
from tests.hub_server import hub
from tests.model_copies import COMMIT
from tests.tui.commands import flightdeck

HERE = NodeCandidate(FoundHost("here", "127.0.0.1", ("given",)), FoundPython(sys.executable))


async def set_up(home: Path, target: Path) -> None:
    choices = SetupChoices(chosen=("127.0.0.1",), model="org/tiny", data="rows", batch_size=2, iters=3)
    async with Engine(home) as engine:
        config = engine.setup.config(target, engine.setup.text(target, choices, [HERE]))
        assert (await engine.setup.capacities(config))["lora"].amount
        data = await engine.setup.inspect(config, shown=2)
        assert data.rows and not data.faults
        assert any("org/tiny is not on here yet" in warning for warning in data.warnings)
        engine.setup.write(target, engine.setup.text(target, choices, [HERE]))


@pytest.mark.slow
def test_it_is_planned_before_it_is_there_and_brought_by_the_launch(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, folder = made_demo(), tmp_path / "studio"
    shutil.copytree(made / "data", folder / "rows")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    with hub({path.name: path.read_bytes() for path in (made / "model").iterdir()}) as (endpoint, sent):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        # Read when the library is imported, which another test may have done.
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
        url = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", url)
        asyncio.run(set_up(home, folder / "flightdeck.toml"))
        assert not any(path.endswith(".safetensors") for path in sent)
        done = flightdeck(home, "launch", "--follow", "--json", cwd=folder)
    assert done.code == 0, done.err + done.out
    launched = read_plan(RunDir(home / "runs" / json.loads(done.out)["id"]).plan).config
    assert launched.nodes[0].model == str(tmp_path / f"hub/hub/models--org--tiny/snapshots/{COMMIT}")
    assert json.loads(done.out)["state"] == "succeeded"
