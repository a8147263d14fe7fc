"""A divided run's checkpoint is fetched from all of its nodes at once, over links that are cut meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.api import Engine
from engine.demo import ensure_made
from engine.models import RunState
from engine.snapshots import Fetched, FetchProgress, RunResult
from tests.cluster.cluster import Cluster
from tests.cluster.faults import Traffic
from tests.demo_copies import demo_below
from tests.faults.cluster_runs import ClusterRun, demo_on, start_on
from tests.faults.test_divided_recovery import divided
from tests.training.tiny import write_weights
from tests.waiting import until

pytestmark = pytest.mark.busy

NAMES = ("ana", "bea", "cyd", "dov")
CUT = {"bea": "a black hole", "dov": "a reset"}
MODEL = "~/models/four"


@pytest.fixture
def run(nodes: Cluster, home: Path, tmp_path: Path) -> ClusterRun:
    """A sharded run over four nodes that has ended; each has a quarter of its state, of some megabytes."""
    model = tmp_path / "four"
    shutil.copytree(ensure_made(demo_below(home)) / "model", model)
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": 4, "intermediate_size": 2048}
    (model / "config.json").write_text(json.dumps(config))
    write_weights(model, config)
    for node in nodes.nodes:
        node.copy_in(model, MODEL)
    launched = demo_on(nodes, home, iters=3)
    job = launched.job.model_copy(update={"model": MODEL})
    run = start_on(nodes, home, divided(launched.model_copy(update={"job": job}), "sharded", batch_size=8))
    assert run.ended(within_s=300.0).state is RunState.SUCCEEDED, run.troubles()
    return run


class Fetch:
    """A fetch under way, and what is there of it."""

    def __init__(self, engine: Engine, run: ClusterRun, target: Path, patience_s: float = 120.0) -> None:
        self.target = target
        self.notes: list[str] = []
        self.first: int | None = None
        """Bytes that it began with."""
        self.result: RunResult = engine.results.result(run.dir.id)
        self._task = asyncio.create_task(self._follow(engine, run.dir.id, patience_s))

    async def _follow(self, engine: Engine, run: str, patience_s: float) -> Fetched:
        steps = engine.results.fetch(run, self.target, "checkpoint", patience_s=patience_s)
        async for step in steps:
            if isinstance(step, Fetched):
                return step
            assert isinstance(step, FetchProgress)
            self.first = step.bytes if self.first is None and step.bytes else self.first
            self.notes += [step.note] if step.note else []
        raise AssertionError("it has no end")

    def parts(self, *names: str) -> dict[str, int]:
        """Node → bytes that have come of it and are not verified yet."""
        ranks = {name: NAMES.index(name) for name in names or NAMES}
        files = {name: self.target.glob(f"part{rank}/*/*.part") for name, rank in ranks.items()}
        return {name: sum(path.stat().st_size for path in paths) for name, paths in files.items()}

    async def until(self, condition: Callable[[], bool]) -> None:
        await until(lambda: condition() or self._task.done(), 90.0)
        assert not self._task.done(), self._task

    async def ended(self) -> Fetched:
        return await self._task

    async def give_up(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


async def begun(nodes: Cluster, fetch: Fetch) -> Fetch:
    """Over slow links, once something of every node has come."""
    for name in NAMES:
        nodes[name].slow_link("8mbit")
    await fetch.until(lambda: all(fetch.parts().values()))
    return fetch


@pytest.mark.slow
async def test_a_checkpoint_of_four_nodes_comes_whole_though_two_links_are_cut_in_the_middle(
    nodes: Cluster, home: Path, run: ClusterRun, tmp_path: Path
) -> None:
    async with Engine(home=home) as engine:
        fetch = await begun(nodes, Fetch(engine, run, tmp_path / "here"))
        nodes["bea"].cut(Traffic.SSH)
        nodes["dov"].reset_ssh()
        await fetch.until(lambda: {note.split()[0] for note in fetch.notes} == CUT.keys())
        kept = fetch.parts("bea")["bea"]
        nodes["bea"].heal(all_faults=True)
        await fetch.until(lambda: fetch.parts("bea")["bea"] > kept)
        await fetch.give_up()
        # As after a kill: another fetch goes on where this one was.
        kept = sum(fetch.parts().values())
        second = Fetch(engine, run, tmp_path / "here")
        done = await second.ended()
    assert second.first == kept > 0
    assert {file.node for file in done.files} == {*NAMES} and len(done.files) == 12
    for file in done.files:
        content = (done.folder / file.name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (file.bytes, file.sha256)
        assert nodes[file.node].run(["sha256sum", file.path]).stdout.split()[0] == file.sha256
    assert not list(done.folder.rglob("*.part"))


@pytest.mark.slow
async def test_a_node_that_stays_away_ends_the_fetch_with_one_line_and_keeps_what_has_come(
    nodes: Cluster, home: Path, run: ClusterRun, tmp_path: Path
) -> None:
    async with Engine(home=home) as engine:
        fetch = await begun(nodes, Fetch(engine, run, tmp_path / "here", patience_s=5.0))
        nodes["bea"].power_off()
        with pytest.raises(Exception, match="bea") as failed:
            await fetch.ended()
    assert "\n" not in str(failed.value)
    assert 0 < fetch.parts()["bea"] < sum(file.bytes for file in fetch.result.files if file.node == "bea")
    assert fetch.parts()["ana"] == sum(file.bytes for file in fetch.result.newest("checkpoint") if file.node == "ana")
