"""The console may die at any moment: the run does not notice, and nothing of its output is lost or doubled."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

import pytest

from engine.api import Engine
from engine.checks.runner import CHECKS
from engine.models import RunState
from engine.node.bootstrap import node_root
from engine.protocol.attempt import NodeFiles
from engine.run.logs.reader import LogReader
from engine.store.layout import RunDir
from tests.conftest import FLIGHTDECK
from tests.terminal import Terminal

SAMPLE, KILLS = 1, 20
CONFIG = """
[cluster]
name = "local"

[[node]]
name = "left"

[[node]]
name = "right"

[job]
command = ["{python}", "chatter.py", "{flag}"]
"""

CHATTER = """
import os, sys, time
rank, line = os.environ["MLX_RANK"], 0
while not os.path.exists(sys.argv[1]):
    for _ in range(20):
        line += 1
        print(f"rank {rank} line {line} " + "·" * (line % 60))
    sys.stdout.flush()
    time.sleep(0.02)
"""


@pytest.mark.parametrize("kills", [SAMPLE, pytest.param(KILLS, marks=pytest.mark.slow)])
async def test_consoles_killed_while_lines_stream(home: Path, tmp_path: Path, kills: int) -> None:
    flag = tmp_path / "enough"
    config = tmp_path / "flightdeck.toml"
    config.write_text(CONFIG.format(python=sys.executable, flag=flag))
    (tmp_path / "chatter.py").write_text(CHATTER)
    engine = Engine(home)
    run = await engine.launches.launch(engine.load_config(config), skip=list(CHECKS))
    watch = engine.runs.watch(run.id)
    while (state := watch.poll().record.state) is not RunState.RUNNING:
        assert not state.ended, watch.poll().record
        await asyncio.sleep(0.05)

    moments = random.Random(20)
    for _ in range(kills):
        with Terminal([str(FLIGHTDECK), "-c", str(config)]) as console:
            console.read_until(b"line")
            await asyncio.sleep(moments.uniform(0.0, 0.4))
            console.kill()

    flag.touch()
    while not (record := watch.poll().record).state.ended:
        await asyncio.sleep(0.05)
    assert record.state is RunState.SUCCEEDED, record

    head, node = RunDir(home / "runs" / run.id), NodeFiles.for_attempt(node_root(), run.id, 1)
    merged = 0
    for rank in (0, 1):
        assert head.log(rank).read_bytes() == node.log(rank).read_bytes()
        reader = LogReader(head, rank)
        numbers = [int(line.text.split()[3]) for line in reader.lines(0, reader.line_count)]
        assert numbers == list(range(1, len(numbers) + 1))
        merged += len(numbers)
    assert merged > 1000
