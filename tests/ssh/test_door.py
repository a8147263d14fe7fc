"""What the faces ask of nodes through the door: fixes, shells; and OpenSSH's own ssh with the same meaning."""

from __future__ import annotations

import asyncio
import json
import subprocess

import pytest

from engine.config.models import ClusterConfig, FlightConfig, JobConfig, NodeConfig
from engine.errors import InputError
from engine.session import Engine
from engine.transport.openssh import write_openssh_config
from tests.ssh.bench import Bench, Sshd, until


@pytest.fixture
def sshd(bench: Bench) -> Sshd:
    sshd = bench.sshd()
    bench.alias("ana", sshd)
    return sshd


@pytest.fixture
def config() -> FlightConfig:
    node = NodeConfig(name="a", ssh="ana", python="python3", workdir="~")
    return FlightConfig(cluster=ClusterConfig(), nodes=(node,), job=JobConfig(name="t", command=("true",)))


def ssh(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False)


async def test_a_fix_runs_as_its_user_would_type_it_and_is_audited(
    bench: Bench, sshd: Sshd, config: FlightConfig
) -> None:
    engine = Engine(bench.home)
    try:
        done = await engine.run_on(config, "a", 'echo ~ && false || echo "it\'s $((6 * 7))" >&2; exit 3')
        assert (done.code, done.stdout.decode(), done.stderr) == (3, f"{sshd.home}\n", b"it's 42\n")
        with pytest.raises(InputError, match="no node 'b'"):
            await engine.run_on(config, "b", "true")
        assert engine.fleet(config) is engine.fleet(config)
    finally:
        await engine.close()
    await until(lambda: not sshd.connections())
    audited = json.loads((bench.home / "audit.jsonl").read_text().splitlines()[0])
    assert (audited["event_type"], audited["context"]["node"]) == ("command", "a")


async def test_a_fix_that_is_given_up_ends_on_the_node(bench: Bench, sshd: Sshd, config: FlightConfig) -> None:
    engine = Engine(bench.home)
    try:
        assert (await engine.run_on(config, "a", "sleep 600 & sleep 600", timeout_s=0.5)).code is None
        assert [process for process in sshd.processes() if "sleep" in process.command] == []
    finally:
        await engine.close()


async def test_a_shell_goes_where_the_connections_go(bench: Bench, sshd: Sshd, config: FlightConfig) -> None:
    argv = Engine(bench.home).shell_argv(config, "a")
    assert argv[:2] == ["ssh", "-t"]
    said = await asyncio.to_thread(ssh, *argv, "pwd")
    assert said.stdout == f"{sshd.home}\n", said.stderr


async def test_openssh_reads_the_same_configuration_and_checks_the_same_keys(bench: Bench, sshd: Sshd) -> None:
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
