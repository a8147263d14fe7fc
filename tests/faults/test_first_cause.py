"""Three ranks on a real ring, of which one fails first: everywhere that rank's cause is shown, and its fix."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from engine.api import Engine
from engine.checks.runner import CHECKS
from engine.failures.signatures import BY_ID
from engine.models import Reason, RunState
from engine.store.layout import LAUNCHER_SOURCE, RunDir
from tests.faults.local_runs import DEAF, ring
from tests.tui.commands import flightdeck, shell
from tests.tui.conftest import DASHBOARD, Console
from tui.app import FlightDeckApp

NODES = ("left", "right", "third")
BATCH = "The batch size must be divisible by the number of workers"
METAL = "[METAL] Command buffer execution failed: Internal Error (0000000e:Internal Error)"
FAULTS = {
    "lora.batch_div": f"raise ValueError({BATCH!r})",
    "import.other": "import no_such_module",
    # It ends by a signal of its own, as a program does in which Metal fails.
    "metal.internal": f"print({METAL!r}, flush=True); os.abort()",
}

SAMPLE = "metal.internal"
"""The others take their time: with the slow ones."""


def configuration(directory: Path, script: str) -> Path:
    """A flightdeck.toml for three ranks of `script` on this machine."""
    directory.mkdir()
    (directory / "script.py").write_text(script)
    node = f'python = "{sys.executable}"\nworkdir = "{directory}"\n'
    nodes = "".join(f'[[node]]\nname = "{name}"\n{node}' for name in NODES)
    file = directory / "flightdeck.toml"
    file.write_text(f'[job]\nname = "three"\ncommand = ["python", "script.py"]\n{nodes}')
    return file


async def run_pane(engine: Engine, config: Path, run: str) -> str:
    """The console's lines about a run that has ended, joined."""
    app = FlightDeckApp(engine, engine.load_config(config), follow=run)
    async with app.run_test(size=DASHBOARD) as pilot:
        console = Console(app, pilot)
        await console.shows("first cause")
        await console.press("4", "z")
        await console.until(lambda: "first cause" in joined(console) and " fix " in joined(console))
        return joined(console)


def joined(console: Console) -> str:
    return " ".join(word for word in console.screen.split() if word != "│")


@pytest.mark.parametrize(
    "known", [pytest.param(known, marks=[] if known == SAMPLE else pytest.mark.slow) for known in FAULTS]
)
def test_the_first_ranks_cause_is_shown_everywhere(home: Path, tmp_path: Path, known: str) -> None:
    # The survivors are asked to end at once, and must have the time to find out by themselves.
    config = configuration(tmp_path / "job", DEAF + ring(f"if rank == 1 and step == 8: {FAULTS[known]}"))
    skips = [word for check in CHECKS for word in ("--skip", check)]
    launched = shell(home, "launch", "--follow", *skips, cwd=config.parent)
    (directory,) = (home / "runs").iterdir()
    signature = BY_ID[known]
    assert launched.code == 1, launched
    assert f"fix:   {signature.fix}" in launched.out

    engine = Engine(home)
    record = engine.runs.record(directory.name)
    reason = Reason.RANK_KILLED if known == "metal.internal" else Reason.RANK_FAILED
    assert (record.state, record.reason, record.rank, record.host) == (RunState.FAILED, reason, 1, "right")
    assert record.cause == signature.cause.format(module="no_such_module") and record.fix == signature.fix
    assert f"cause: {record.cause}" in launched.out

    survivors = [RunDir(directory).log(rank).read_text() for rank in (0, 2)]
    assert any("connection to a peer was lost" in log for log in survivors), "there is a consequence to be told apart"

    shown = flightdeck(home, "show", directory.name)
    assert f"cause      {record.cause}" in shown.out and f"fix        {record.fix}" in shown.out
    found = json.loads(flightdeck(home, "show", directory.name, "--json").out)["diagnosis"]
    assert (found["signature"], found["rank"], found["source"]) == (known, 1, 1)
    assert found["cause"] == record.cause, "the console and the record say the same"
    assert found["source"] != LAUNCHER_SOURCE

    screen = asyncio.run(run_pane(engine, config, directory.name))
    assert "rank 1 on right" in screen
    assert f"first cause {record.cause} fix {record.fix}" in screen
