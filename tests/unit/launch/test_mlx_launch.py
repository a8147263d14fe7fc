"""mlx.launch: its arguments, its process and its output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine.config.models import NodeConfig
from engine.errors import LaunchError
from engine.launch import mlx_launch
from engine.launch.hostfile import write_hostfile
from engine.launch.mlx_launch import Launcher
from engine.launch.rank_environment import gpu_environment, rank_environment
from engine.launch.ssh_shim import temporary_files
from engine.launch.start_script import RankProgram, ranks_script
from engine.node import processes
from engine.plan.network import LaunchHost, NetworkPlan
from engine.protocol.events import tail
from tests.unit.launch.host_layouts import configured_network, ring_ports
from tests.waiting import wait_until


def test_the_program_comes_after_two_dashes_and_last() -> None:
    argv = mlx_launch.arguments(
        hostfile=Path("/h"), starting_port=21_000, program=["/bin/sh", "--verbose"], environment={"A": "b c"}
    )
    assert argv[argv.index("--") + 1 :] == ["/bin/sh", "--verbose"]
    assert argv[1:9] == ["--backend", "ring", "--hostfile", "/h", "--starting-port", "21000", "--env", "A=b c"]


def test_the_port_is_given_under_nccl_alone() -> None:
    given: dict[str, Any] = {"hostfile": Path("/h"), "starting_port": 21_000, "program": ["x"], "environment": {}}
    assert "--nccl-port" not in mlx_launch.arguments(**given)
    assert mlx_launch.arguments(**given, backend="nccl")[7:9] == ["--nccl-port", "21000"]


OF_A_GROUP = ("MLX_RANK=", "MLX_WORLD_SIZE=", "MLX_HOSTFILE=", "NCCL_", "CUDA_")


def test_ranks_of_one_machine_have_a_gpu_each_and_else_the_same_variables_without_mlx_launch(tmp_path: Path) -> None:
    """A real mlx.launch of nccl, which needs no GPU itself."""
    gpus = ("GPU-4d0f7e26", "GPU-9b1c55aa")
    hosts = tuple(LaunchHost(ssh="127.0.0.1", ips=("127.0.0.1",), gpu=gpu) for gpu in gpus)
    network = NetworkPlan(backend="nccl", hosts=hosts)
    programs = {
        rank: RankProgram(["/usr/bin/env"], f">{tmp_path}/env{rank}", gpu_environment(network, rank)) for rank in (0, 1)
    }
    (tmp_path / "start.sh").write_text(ranks_script(programs, tmp_path, backend="nccl", world_size=2))
    write_hostfile(tmp_path / "hostfile.json", network)
    argv = mlx_launch.arguments(
        hostfile=tmp_path / "hostfile.json",
        starting_port=21_000,
        program=["/bin/sh", str(tmp_path / "start.sh")],
        environment={},
        backend="nccl",
    )
    files = {"stdin": tmp_path / "in", "output": tmp_path / "out", "directory": tmp_path}
    launcher = mlx_launch.start(argv, environment=temporary_files(tmp_path), **files)
    assert launcher.process is not None and launcher.process.wait(30) == 0
    for rank, gpu in enumerate(gpus):
        lines = (tmp_path / f"env{rank}").read_text().splitlines()
        found = dict(line.split("=", 1) for line in lines if line.startswith(OF_A_GROUP))
        direct = rank_environment(network, 21_000, {}).of_rank(rank, tmp_path)
        assert found == direct | {"CUDA_VISIBLE_DEVICES": gpu}, "NCCL_DEBUG and a ring's hostfile among them, say"


def test_the_launcher_is_the_one_beside_the_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert mlx_launch.executable() == Path(sys.executable).parent / "mlx.launch"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(LaunchError, match=r"mlx\.launch is missing"):
        mlx_launch.executable()


def test_rank_ends_are_read_through_the_launchers_colours() -> None:
    output = "\x1b[33m[WARN] Node with rank 1 exited with code 127 \x1b[0m\nx\n"
    output += "[WARN] Node with rank 0 exited with code -15\n"
    assert mlx_launch.rank_ends(output) == [(1, 127), (0, -15)]


def launch(directory: Path, script: str, ranks: int = 2) -> Launcher:
    nodes = [NodeConfig(name=f"n{k}", python=sys.executable, workdir="/") for k in range(ranks)]
    write_hostfile(directory / "hostfile.json", configured_network(nodes))
    argv = mlx_launch.arguments(
        hostfile=directory / "hostfile.json",
        starting_port=ring_ports(ranks),
        program=["/bin/sh", "-c", script],
        environment={"GREETING": "it's $HOME"},
    )
    return mlx_launch.start(
        argv,
        stdin=directory / "launcher.in",
        output=directory / "launcher.log",
        environment=temporary_files(directory),
        directory=directory,
    )


def runs(pid: int) -> bool:
    """One of its threads has a core, or waits for one."""
    statuses = (file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/stat"))
    return any(status.rpartition(")")[2].split()[0] == "R" for status in statuses)


def test_ranks_get_the_environment_and_the_output_is_appended(tmp_path: Path) -> None:
    (tmp_path / "launcher.log").write_text("before\n")
    # A failure ends the others: rank 1 awaits that the launcher has rank 0's line and its end.
    printed = "until grep -q 'rank 0 says' launcher.log; do sleep 0.05; done"
    ended = "until [ -s pid0 ] && ! kill -0 $(cat pid0) 2>/dev/null; do sleep 0.05; done"
    patient = f"{printed}; echo $$ >pid$MLX_RANK; [ $MLX_RANK = 0 ] || {ended}"
    launcher = launch(tmp_path, f'echo "rank $MLX_RANK says $GREETING"; {patient}; exit $MLX_RANK')
    assert os.getpgid(launcher.pid) == launcher.pid
    assert launcher.process is not None and launcher.process.wait(30) == 0
    output = (tmp_path / "launcher.log").read_text()
    assert output.startswith("before\n")
    assert "rank 0 says it's $HOME" in output
    assert mlx_launch.rank_ends(output) == [(1, 1)]


def test_a_blank_in_the_folders_path_breaks_no_rank(tmp_path: Path) -> None:
    """A Mac's state lies in ~/Library/Application Support."""
    here = tmp_path / "Application Support"
    here.mkdir()
    launcher = launch(here, 'cp "$MLX_HOSTFILE" "hostfile$MLX_RANK"')
    assert launcher.process is not None and launcher.process.wait(30) == 0
    output = (here / "launcher.log").read_text()
    assert "ambiguous" not in output and mlx_launch.rank_ends(output) == []
    assert all(len(json.loads((here / f"hostfile{rank}").read_text())) == 2 for rank in (0, 1))
    assert list(tmp_path.iterdir()) == [here] and list((here / "tmp").iterdir()), "mlx.launch's files are below"


@pytest.mark.needs("linux")
def test_a_newline_frees_the_core_once_the_ranks_have_left_the_pipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With tests/imports on its path, mlx.launch keeps no core busy in any case.
    monkeypatch.delenv("PYTHONPATH")
    launcher = launch(tmp_path, 'exec </dev/null >/dev/null 2>/dev/null; : > "up$MLX_RANK"; exec sleep 60')
    try:
        wait_until(lambda: all((tmp_path / f"up{rank}").exists() for rank in (0, 1)))
        launcher.drop_pipes()

        def idle() -> bool:
            # A share, so real time has to pass; where the machine is busy, it waits for a core instead of using one.
            samples = 0
            for _ in range(25):
                samples += runs(launcher.pid)
                time.sleep(0.02)
            return samples < 12

        wait_until(idle)
        assert launcher.alive()
    finally:
        launcher.kill()


def test_a_launcher_that_cannot_be_started_is_a_launch_error(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="could not be started"):
        mlx_launch.start(
            ["/nowhere/mlx.launch"],
            stdin=tmp_path / "in",
            output=tmp_path / "out",
            environment={},
            directory=tmp_path,
        )


@pytest.mark.parametrize("why", [OSError("no ps"), subprocess.TimeoutExpired("ps", 10.0)])
def test_a_launcher_whose_start_time_is_not_to_be_had_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: Exception
) -> None:
    begun = []

    def start_time(pid: int) -> str:
        begun.append(pid)
        raise why

    monkeypatch.setattr(processes, "start_time", start_time)
    files = {"stdin": tmp_path / "in", "output": tmp_path / "out", "directory": tmp_path}
    with pytest.raises(LaunchError, match=r"mlx\.launch could not be started: .*ps"):
        mlx_launch.start(["/bin/sleep", "600"], environment={}, **files)
    assert [processes.exists(pid) for pid in begun] == [False]


def test_dropping_pipes_of_a_launcher_that_is_gone_is_nothing(tmp_path: Path) -> None:
    watch(tmp_path / "log").drop_pipes()
    os.mkfifo(tmp_path / "in")
    watch(tmp_path / "log").drop_pipes()


def watch(log: Path, pid: int = 2**22 + 5, start: str = "1", offset: int = 0) -> Launcher:
    return Launcher(pid, start, log.with_name("in"), log, offset)


def test_each_end_is_reported_once_also_when_its_line_comes_in_pieces(tmp_path: Path) -> None:
    log = tmp_path / "launcher.log"
    log.write_text("[WARN] Node with rank 7 exited with code 1\n")
    launcher = watch(log, offset=log.stat().st_size)
    reported = []
    for piece in ("noise\n[WARN] Node with ra", "nk 1 exited with code 127 \x1b[0m", "\nmore"):
        with log.open("a") as file:
            file.write(piece)
        reported.append(launcher.rank_ends())
    assert reported == [[], [], [(1, 127)]]
    assert launcher.tail() == "noise\n[WARN] Node with rank 1 exited with code 127 \x1b[0m\nmore"


def test_no_log_yet_is_no_word(tmp_path: Path) -> None:
    assert watch(tmp_path / "launcher.log").rank_ends() == []
    assert watch(tmp_path / "launcher.log").tail() == ""


def test_a_tail_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"x" * 10_000 + b"\xff end")
    assert tail(tmp_path / "log", size=5) == "\ufffd end"


def test_a_later_process_with_its_pid_is_not_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        other = watch(tmp_path / "log", sleeper.pid, "another start")
        assert not other.alive()
        sent: list[int] = []
        monkeypatch.setattr(processes, "kill_group", lambda pgid, _number: sent.append(pgid))
        other.signal_group(signal.SIGKILL)
        assert sent == []
        own = watch(tmp_path / "log", sleeper.pid, processes.start_time(sleeper.pid) or "")
        assert own.alive() and own.alive(check_pids=False)
        own.signal_group(signal.SIGKILL)
        assert sent == [sleeper.pid]
    finally:
        os.killpg(sleeper.pid, signal.SIGKILL)
        sleeper.wait()
