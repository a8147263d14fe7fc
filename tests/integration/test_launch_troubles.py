"""What goes wrong while ranks are started is told by rank and node, and what is secret shows nowhere."""

from __future__ import annotations

import asyncio
import contextlib
import stat
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, cast

import pytest

from engine.cluster.agent_client import AgentClient
from engine.cluster.transport.base import Transport
from engine.cluster.transport.fleet import Fleet
from engine.config.models import NodeConfig
from engine.errors import LaunchError
from engine.launch.mlx_launch import rank_ends
from engine.launch.ssh_shim import ssh_log_path
from engine.protocol.events import tail
from engine.store.layout import LAUNCHER_SOURCE
from tests.cluster.cluster import Cluster
from tests.cluster.node import Node
from tests.integration.over_ssh import on, plan_of, start_attempt

LAUNCHERS = ["mlx.launch", "direct"]
SECRETS = {"HF_TOKEN": "hf_aQ7secret", "WANDB_API_KEY": "wandb-Zx4secret", "MINE": "mine-Kp9secret"}


@pytest.mark.parametrize("launcher", LAUNCHERS)
async def test_a_secret_reaches_every_rank_and_no_argv(
    launcher: str, cluster: Cluster, fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, SECRETS[name])
    shown = (
        "import os, time; time.sleep(0.5); print([os.environ[name] for name in ('HF_TOKEN', 'WANDB_API_KEY', 'MINE')])"
    )
    nodes = on(cluster, "ana", "bea", "head")
    plan = plan_of(nodes, ["python", "-c", shown], launcher=launcher, env={"MINE": SECRETS["MINE"]})
    with every_argv() as seen:
        started = await start_attempt(tmp_path / "home", plan, fleet)
        output = [await started.output(rank) for rank in range(3)]
    await started.launcher_left()
    assert output == [f"{list(SECRETS.values())}\n"] * 3
    everything = "\n".join(seen)
    # Seen were the launcher, ssh on the head, and the keepers on the nodes.
    expected = ["engine.node.keeper", "--detach"] + ["mlx.launch", "LogLevel=ERROR"] * (launcher == "mlx.launch")
    assert [word for word in expected if word not in everything] == []
    assert [secret for secret in SECRETS.values() if secret in everything] == []
    for rank, name in ((0, "ana"), (1, "bea")):
        directory = cluster[name].disk.seen_from_head(str(started.attempt.files(plan.run_id, rank).directory))
        secretive = [path for path in directory.iterdir() if path.is_file() and b"hf_aQ7" in path.read_bytes()]
        assert {path.name for path in secretive} == {"spec.json", f"rank{rank}.log"}
        assert stat.S_IMODE((directory / "spec.json").stat().st_mode) == 0o600
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700


@contextlib.contextmanager
def every_argv() -> Iterator[set[str]]:
    """All command lines of this machine, those in its nodes too, that there are while the block runs."""
    seen, over = set[str](), threading.Event()

    def collect() -> None:
        while not over.is_set():
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    seen.add((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            over.wait(0.005)

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


async def test_a_python_that_is_gone_is_told_by_both_launchers(cluster: Cluster, fleet: Fleet, tmp_path: Path) -> None:
    good, bad = on(cluster, "ana", "ana")
    nodes = (good, bad.model_copy(update={"python": "~/gone/python"}))
    directly = await start_attempt(tmp_path / "home", plan_of(nodes, ["python", "-c", ""], launcher="direct"), fleet)
    (failure,) = directly.launched.start_failures
    assert (failure.rank, failure.code) == (1, 127)
    assert f"{cluster['ana'].home}/gone/python" in failure.message
    launched = await start_attempt(
        tmp_path / "home", plan_of(nodes, ["python", "-c", ""], launcher="mlx.launch"), fleet
    )
    await launched.launcher_left()
    assert (1, 127) in rank_ends(launched.run_dir.log(LAUNCHER_SOURCE).read_text())
    assert b"gone/python" in await launched.read(1, "rank1.keeper.log")


async def test_a_node_that_is_lost_while_ranks_are_started_is_told_by_its_rank(
    cluster: Cluster, fleet: Fleet, tmp_path: Path
) -> None:
    """Cut off after its files were put: mlx.launch's ssh has the words, and a direct start its own."""
    nodes = on(cluster, "ana", "bea")
    for launcher in LAUNCHERS:
        plan = plan_of(nodes, ["python", "-c", ""], launcher=launcher)
        started = await start_attempt(tmp_path / "home", plan, cast(Fleet, CutAfterFiles(fleet, cluster, "bea")))
        if started.launched.launcher is None:
            assert [failure.rank for failure in started.launched.start_failures] == [1]
            assert "bea" in started.launched.start_failures[0].message
            assert (await started.record(0)).error is None
        else:
            await started.launcher_left()
            log = started.run_dir.log(LAUNCHER_SOURCE)
            assert (1, 255) in rank_ends(log.read_text())
            here = started.launched.launcher.stdin.parent
            assert "Connection refused" in tail(ssh_log_path(here, 1)) and tail(ssh_log_path(here, 0)) == ""
            assert "Connection refused" in log.read_text()
        cluster["bea"].start_sshd()


class CutAfterFiles:
    """A fleet on which one node's sshd is gone from the moment at which the attempt's files lie there."""

    def __init__(self, fleet: Fleet, cluster: Cluster, name: str) -> None:
        self._fleet, self._node = fleet, cluster[name]

    def to(self, node: NodeConfig) -> Transport:
        return self._fleet.to(node)

    def agent(self, node: NodeConfig) -> AgentClient:
        agent = self._fleet.agent(node)
        return cast(AgentClient, Cutting(agent, self._node)) if node.ssh == self._node.name else agent


class Cutting:
    """The agent of the node that will be lost."""

    def __init__(self, agent: AgentClient, node: Node) -> None:
        self._agent, self._node = agent, node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    async def write(self, folder: PurePath, files: Mapping[str, str | None]) -> None:
        await self._agent.write(folder, files)
        await self._agent.transport.close()
        await asyncio.to_thread(self._node.stop_sshd)


@pytest.mark.parametrize("launcher", LAUNCHERS)
async def test_files_that_cannot_be_written_end_the_launch_before_any_rank(
    launcher: str, cluster: Cluster, fleet: Fleet, tmp_path: Path
) -> None:
    nodes = on(cluster, "ana", "cyd")
    plan = plan_of(nodes, ["python", "-c", ""], launcher=launcher)
    in_the_way = f"mkdir -p ~/.flightdeck/runs && touch ~/.flightdeck/runs/{plan.run_id}"
    await fleet.to(nodes[1]).run(["/bin/sh", "-c", in_the_way], timeout_s=10)
    with pytest.raises(LaunchError, match="the attempt's files could not be written on cyd1"):
        await start_attempt(tmp_path / "home", plan, fleet)
    assert not list((tmp_path / "home").rglob("launcher.in"))


@pytest.mark.parametrize("launcher", LAUNCHERS)
async def test_a_talkative_shell_changes_nothing(launcher: str, cluster: Cluster, fleet: Fleet, tmp_path: Path) -> None:
    cluster["bea"].noisy_bashrc()
    plan = plan_of(on(cluster, "bea", "dov"), ["python", "-c", "print('{rank}')"], launcher=launcher)
    started = await start_attempt(tmp_path / "home", plan, fleet)
    assert [await started.output(rank) for rank in range(2)] == ["0\n", "1\n"]
    await started.launcher_left()


async def test_nothing_of_mlx_launch_is_left_in_the_nodes_temporary_folders(
    cluster: Cluster, fleet: Fleet, tmp_path: Path
) -> None:
    node = cluster["ana"]

    def temporary_files() -> set[Path]:
        """As mlx.launch makes them; other programs of this machine use its folder, too."""
        return {path for path in node.disk.seen_from_head("/tmp").glob("tmp*") if path.is_file()}

    before = temporary_files()
    show = "import os; print(os.environ['MLX_HOSTFILE'], os.environ.get('TMPDIR'))"
    plan = plan_of(on(cluster, "ana", "bea"), ["python", "-c", show], launcher="mlx.launch")
    started = await start_attempt(tmp_path / "home", plan, fleet)
    hostfile, temporary = (await started.output(0)).split()
    assert hostfile.startswith(f"{started.attempt.files(plan.run_id, 0).directory}/tmp/")
    assert temporary == "None"
    assert temporary_files() <= before
    await started.output(1)
    await started.launcher_left()
