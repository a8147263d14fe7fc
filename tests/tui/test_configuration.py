"""The effective configuration and its faults on the screen, another file of the folder, and `flightdeck config`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config.edit import write_settings
from engine.config.load import load_config
from tests.tui.commands import flightdeck
from tests.tui.conftest import SMALL, opened
from tests.tui.fake_engine import FakeEngine
from tui.screens.configuration import editor_at


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (file := tmp_path / "flightdeck.toml").write_text('[[node]]\n[job]\nmodel = "m"\ndata = "d"\niters = 50\n')
    return file


async def test_every_value_is_shown_with_its_source_and_faults_with_their_lines(
    fake: FakeEngine, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "load_config", load_config)
    monkeypatch.setenv("VISUAL", "nano")
    asked: list[list[str]] = []
    async with opened(fake, config=file, size=SMALL) as console:
        monkeypatch.setattr(console.app, "_in_terminal", lambda *arguments: asked.append(arguments[3]()))
        await console.press("E")
        await console.shows("enter opens the editor there")
        await console.press(*["end", "home", "j", "k"], "escape")
        good = file.read_text()
        await console.press("e")
        file.write_text(good.replace("iters = 50", "iters = 0"))
        await console.shows("flightdeck.toml is refused")
        assert "line 5" in console.screen and "job.iters = 0: expected a whole number" in console.screen
        await console.press("enter")
        await console.until(lambda: len(asked) == 2, "the editor")
        assert asked == [["nano", str(file)], ["nano", "+5", str(file)]]
        file.write_text(good)
        await console.until(lambda: console.app.state.fault is None, "the good file")


async def test_another_file_of_the_folder_counts_once_it_is_chosen(
    fake: FakeEngine, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.with_name("bad.toml").write_text('[[node]]\n[job]\nmodel = "m"\n')
    file.with_name("long.toml").write_text(file.read_text().replace("50", "500"))
    monkeypatch.setattr(fake, "load_config", load_config)
    async with opened(fake, config=file, overrides={"seed": 7}, size=SMALL) as console:
        config = console.app.state.config
        assert config is not None and config.job.mlx_lm["seed"] == 7
        await console.press("F")
        await console.shows("long.toml")
        assert "not now: job.data = (not set)" in console.screen and "not now: it is shown" in console.screen
        await console.press("1")
        assert not console.on_deck, "a refused file cannot be chosen"
        await console.press("3")
        await console.shows("long.toml")
        await console.until(lambda: console.on_deck, "the plan")
        await console.until(lambda: "counts now" in " ".join(console.notifications), "the notice")
        config = console.app.state.config
        assert config is not None and (config.job.mlx_lm["iters"], config.job.mlx_lm["seed"]) == (500, 0)
        assert console.app.state.edits == ()


async def test_what_the_form_writes_counts_over_what_was_set_beside_the_file(
    fake: FakeEngine, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "load_config", load_config)
    monkeypatch.setattr(fake, "write_settings", write_settings)
    async with opened(fake, config=file, overrides={"learning_rate": 1e-3, "seed": 7}, size=SMALL) as console:
        await console.press("n", "c", *"2e-3", "enter", "enter")
        await console.until(lambda: len(fake.launched) == 1, "the launch")
        job = fake.launched[0].job.mlx_lm
        assert (job["learning_rate"], job["seed"]) == (2e-3, 7)
        assert console.app.poller.overrides == {"seed": 7}
    assert "learning_rate = 0.002" in file.read_text() and "seed" not in file.read_text()


@pytest.mark.parametrize(
    ("editor", "line", "command"),
    [
        ("vi", 5, ["vi", "+5", "/f"]),
        ("/usr/bin/code -w", 5, ["/usr/bin/code", "-w", "-g", "/f:5"]),
        ("subl", 5, ["subl", "/f:5"]),
        ("code", None, ["code", "/f"]),
    ],
)
def test_an_editor_opens_at_the_line(editor: str, line: int | None, command: list[str]) -> None:
    assert editor_at(editor, Path("/f"), line) == command


def test_the_command_prints_each_value_with_its_source(home: Path, file: Path) -> None:
    done = flightdeck(home, "config", "--set", "seed=3", cwd=file.parent)
    assert done.code == 0, done.err
    rows = {line.split()[0]: line.split()[1:] for line in done.out.splitlines()}
    assert (rows["iters"], rows["seed"]) == (["50", "flightdeck.toml:5"], ["3", "--set"])
    document: dict[str, Any] = json.loads(flightdeck(home, "config", "--json", "--all", cwd=file.parent).out)
    assert {"key": "recovery.max_restarts", "value": 3, "source": "default"} in document["values"]
    planned = flightdeck(home, "config", "--plan", "--accept", cwd=file.parent)
    assert ["moments", '"float32"', "the", "plan"] in [line.split() for line in planned.out.splitlines()], planned
    assert flightdeck(home, "config", "--set", "seed=1,2", cwd=file.parent).code == 2
    assert flightdeck(home, "resume", "last", "--set", "seed=1", cwd=file.parent).code == 2
    assert json.loads(flightdeck(home, "config", "--schema").out)["title"] == "flightdeck.toml"
