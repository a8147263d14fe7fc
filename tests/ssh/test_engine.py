"""What frontends ask of nodes through the Engine: fixes, shells; and OpenSSH's own ssh with the same settings."""

from __future__ import annotations

import asyncio
import json
import subprocess

import pytest

from engine.api import Engine
from engine.cluster.transport.ssh_config import write_openssh_config
from engine.config.models import ClusterConfig, Config, JobConfig, NodeConfig
from engine.errors import InputError
from tests.ssh.bench import SshBench, Sshd
from tests.waiting import until


@pytest.fixture
def sshd(bench: SshBench) -> Sshd:
    sshd = bench.sshd()
    bench.alias("ana", sshd)
    return sshd


@pytest.fixture
def config() -> Config:
    node = NodeConfig(name="a", ssh="ana", python="python3", workdir="~")
    return Config(cluster=ClusterConfig(), nodes=(node,), job=JobConfig(name="t", command=("true",)))


def ssh(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False)


async def test_a_fix_runs_as_its_user_would_type_it_and_is_audited(bench: SshBench, sshd: Sshd, config: Config) -> None:
    async with Engine(bench.home) as engine:
        done = await engine.nodes.run_on(config, "a", 'echo ~ && false || echo "it\'s $((6 * 7))" >&2; exit 3')
        assert (done.code, done.stdout.decode(), done.stderr) == (3, f"{sshd.home}\n", b"it's 42\n")
        with pytest.raises(InputError, match="no node 'b'"):
            await engine.nodes.run_on(config, "b", "true")
    await until(lambda: not sshd.connections())
    audited = json.loads((bench.home / "audit.jsonl").read_text().splitlines()[0])
    assert (audited["event_type"], audited["context"]["node"]) == ("command", "a")


async def test_a_fix_runs_where_the_python_of_the_agent_is_missing(bench: SshBench, sshd: Sshd, config: Config) -> None:
    (node,) = config.nodes
    without = config.model_copy(update={"nodes": (node.model_copy(update={"python": "/nowhere/python"}),)})
    async with Engine(bench.home) as engine:
        assert (await engine.nodes.run_on(without, "a", "echo installed")).stdout == b"installed\n"


async def test_a_fix_that_is_given_up_ends_on_the_node(bench: SshBench, sshd: Sshd, config: Config) -> None:
    async with Engine(bench.home) as engine:
        assert (await engine.nodes.run_on(config, "a", "sleep 600 & sleep 600", timeout_s=0.5)).code is None
        assert [process for process in sshd.processes() if "sleep" in process.command] == []


async def test_a_shell_goes_where_the_connections_go(bench: SshBench, sshd: Sshd, config: Config) -> None:
    argv = Engine(bench.home).nodes.shell_argv(config, "a")
    assert argv[:2] == ["ssh", "-t"]
    output = await asyncio.to_thread(ssh, *argv, "pwd")
    assert output.stdout == f"{sshd.home}\n", output.stderr


async def test_openssh_reads_the_same_configuration_and_checks_the_same_keys(bench: SshBench, sshd: Sshd) -> None:
    bench.configure("Host ana\n    RemoteCommand tmux attach\n    RequestTTY force\n    UserKnownHostsFile /dev/null")
    file = bench.folder / "ssh_config"
    write_openssh_config(file, bench.home)
    argv = ("ssh", "-n", "-T", "-F", str(file), "--", "ana", "pwd")
    assert (await asyncio.to_thread(ssh, *argv)).stdout == f"{sshd.home}\n"
    assert (await bench.to("ana").run(["pwd"], timeout_s=10)).stdout.decode() == f"{sshd.home}\n"
    sshd.new_host_key()
    sshd.restart()
    refused = await asyncio.to_thread(ssh, *argv)
    assert refused.returncode == 255
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in refused.stderr
    (bench.home / "known_hosts").unlink()
    unknown = await asyncio.to_thread(ssh, *argv)
    assert "Host key verification failed" in unknown.stderr
    assert not (bench.home / "known_hosts").exists()
