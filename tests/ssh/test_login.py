"""Who logs in where, by which way: as ~/.ssh/config says. What goes wrong is reported with its cause and its fix."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import re
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace

import asyncssh
import pytest

from engine.cluster.transport.fleet import Fleet
from engine.cluster.transport.ssh import ConnectionLimiter, connection
from engine.cluster.transport.ssh.transport import SshTransport
from engine.errors import HostKeyUnknown, InputError, LoginRefused, NodeUnreachable
from engine.security.identifiers import SshTarget
from tests.machine import LOOPBACK
from tests.ssh.bench import SshBench, Sshd, public
from tests.waiting import until

FREE = "1"
"""A port of loopback on which nobody listens."""


async def login_error(transport: SshTransport) -> NodeUnreachable:
    with pytest.raises(NodeUnreachable) as error:
        await transport.run(["true"], timeout_s=5)
    return error.value


async def reached(transport: SshTransport) -> Path:
    """The home of the sshd that answers."""
    return Path((await transport.run(["pwd"], timeout_s=20)).stdout.decode().strip())


async def test_host_port_user_and_key_come_from_the_configuration(bench: SshBench) -> None:
    sshd = bench.sshd()
    bench.alias("ana", sshd, f"User {getpass.getuser()}")
    assert await reached(bench.to("ana")) == sshd.home


async def test_the_configuration_of_the_environment_is_used_in_place_of_the_users(
    bench: SshBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    sshd, other = bench.sshd(), bench.sshd()
    bench.alias("ana", other)
    mine = bench.folder / "my ssh config"
    mine.write_text(f"Host ana\n HostName {LOOPBACK}\n Port {sshd.port}\n IdentityFile {bench.key_file}\n")
    monkeypatch.setenv("FLIGHTDECK_SSH_CONFIG", str(mine))
    assert await reached(bench.to("ana")) == sshd.home


async def test_what_people_set_for_their_own_shells_changes_nothing(bench: SshBench) -> None:
    sshd = bench.sshd()
    options = "RequestTTY force|RemoteCommand tmux attach|UseKeychain yes|AddKeysToAgent yes|SendEnv LANG"
    bench.alias("ana", sshd, *options.split("|"))
    done = await bench.to("ana").run(["printf", r"a\nb"], timeout_s=5)
    assert done.stdout == b"a\nb"


async def test_values_that_only_openssh_reads_change_nothing(bench: SshBench) -> None:
    sshd = bench.sshd()
    options = "ConnectTimeout 1m|ServerAliveInterval none|RekeyLimit none|PubkeyAuthentication host-bound"
    bench.alias("ana", sshd, *options.split("|"), "CertificateFile ~/.ssh/missing-cert.pub")
    assert await reached(bench.to("ana")) == sshd.home


async def test_a_broken_configuration_is_named(bench: SshBench) -> None:
    bench.configure("Host *\n    Port many")
    error = await login_error(bench.to("ana"))
    assert "configuration" in str(error)
    assert f"{bench.config} line 2" in str(error)


async def test_jump_hosts_are_gone_over_with_host_keys_checked_on_the_way(bench: SshBench) -> None:
    first, second, last = bench.sshd(), bench.sshd(known=False), bench.sshd()
    bench.alias("first", first)
    bench.alias("second", second)
    bench.alias("last", last, "ProxyJump first,second")
    unknown = await login_error(bench.to("last"))
    assert isinstance(unknown, HostKeyUnknown)
    assert unknown.target == "second"
    assert "second (on the way to last)" in str(unknown)
    bench.know(second.known)
    transport = bench.to("last")
    channel = await transport.open(["cat"])
    assert [sshd.connections() for sshd in (first, second, last)] == [1, 1, 1]
    last.drop_connections()
    assert await channel.close() is None
    assert await reached(transport) == last.home
    await until(lambda: [sshd.connections() for sshd in (first, second, last)] == [1, 1, 1])
    await transport.close()
    await until(lambda: not any(sshd.connections() for sshd in (first, second, last)))


async def test_a_jump_host_for_all_hosts_is_not_its_own(bench: SshBench) -> None:
    bastion, sshd = bench.sshd(), bench.sshd()
    bench.configure("Host *\n    ProxyJump bastion")
    bench.alias("bastion", bastion)
    bench.alias("ana", sshd)
    assert await reached(bench.to("ana")) == sshd.home


async def test_a_node_that_its_jump_host_cannot_reach(bench: SshBench) -> None:
    bastion = bench.sshd()
    bench.alias("bastion", bastion)
    bench.configure(f"Host ana\n    HostName {LOOPBACK}\n    Port {FREE}\n    ProxyJump bastion")
    error = await login_error(bench.to("ana"))
    assert str(error).startswith("ana: cannot be reached from its jump host: Connection refused")


async def test_a_hostile_jump_host_is_no_host(bench: SshBench) -> None:
    bench.configure("Host ana\n    ProxyJump -oProxyCommand=id")
    assert "ProxyJump names no host" in str(await login_error(bench.to("ana")))


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[str]:
    """The socket of a real ssh-agent."""
    output = subprocess.run(["ssh-agent", "-s", "-a", tmp_path / "agent"], capture_output=True, text=True, check=True)
    pid = re.search(r"SSH_AGENT_PID=(\d+)", output.stdout)
    assert pid is not None
    yield str(tmp_path / "agent")
    os.kill(int(pid[1]), 15)


def into_agent(agent: str, key: Path) -> None:
    subprocess.run(["ssh-add", "-q", key], env=os.environ | {"SSH_AUTH_SOCK": agent}, check=True, capture_output=True)


def lock(key: Path) -> None:
    argv = ["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-a", "1", "-f", str(key)]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)


async def test_a_key_that_only_the_agent_holds_opens(
    bench: SshBench, agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sshd = bench.sshd()
    for number in range(6):
        bench.new_key(bench.folder / f"other{number}")
        into_agent(agent, bench.folder / f"other{number}")
    into_agent(agent, bench.key_file)
    # As on a Mac: the file is locked by a passphrase, and the agent has it open.
    lock(bench.key_file)
    monkeypatch.setenv("SSH_AUTH_SOCK", agent)
    assert await reached(bench.to(sshd)) == sshd.home


async def test_keys_that_are_refused_are_named(bench: SshBench, agent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sshd = bench.sshd()
    bench.authorized.write_text("")
    bench.new_key(bench.folder / "spare")
    into_agent(agent, bench.folder / "spare")
    monkeypatch.setenv("SSH_AUTH_SOCK", agent)
    bench.config.write_text(f"IdentityFile {bench.key_file}\nIdentityFile ~/.ssh/missing\n")
    error = await login_error(bench.to(sshd))
    assert isinstance(error, LoginRefused)
    for words in ("spare of the agent", str(bench.key_file), "missing (No such file", "ssh-copy-id"):
        assert words in str(error)


async def test_more_keys_than_an_sshd_lets_anyone_try(
    bench: SshBench, agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sshd = bench.sshd(MaxAuthTries=2)
    for number in range(4):
        bench.new_key(bench.folder / f"other{number}")
        into_agent(agent, bench.folder / f"other{number}")
    monkeypatch.setenv("SSH_AUTH_SOCK", agent)
    bench.config.write_text(f"IdentityFile {bench.folder / 'none'}\n")
    error = await login_error(bench.to(sshd))
    assert isinstance(error, LoginRefused)
    assert "too many keys" in str(error)
    assert "IdentitiesOnly" in str(error)


async def test_a_login_without_any_key(bench: SshBench) -> None:
    sshd = bench.sshd()
    bench.config.write_text("")
    error = await login_error(bench.to(sshd))
    assert isinstance(error, LoginRefused)
    assert "ssh-keygen" in str(error)


async def test_a_private_key_that_others_can_read_is_refused_before_anything_is_connected(bench: SshBench) -> None:
    bench.key_file.chmod(0o644)
    with socket.create_server((LOOPBACK, 0)) as nobody:
        error = await login_error(bench.to(f"{LOOPBACK}:{nobody.getsockname()[1]}"))
        assert str(error) == f"{bench.key_file}: a private key can be read by others (chmod 600 {bench.key_file})"
        nobody.setblocking(False)
        with pytest.raises(BlockingIOError):
            nobody.accept()


async def test_a_public_key_as_identity_names_the_agents_key(
    bench: SshBench, agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sshd = bench.sshd()
    into_agent(agent, bench.key_file)
    bench.key_file.unlink()
    bench.config.write_text(f"IdentityFile {bench.key_file}.pub\nIdentitiesOnly yes\nIdentityAgent {agent}\n")
    assert await reached(bench.to(sshd)) == sshd.home


async def test_a_user_certificate_beside_the_key_opens(bench: SshBench) -> None:
    authority = asyncssh.generate_private_key("ssh-ed25519")
    bench.authorized.write_text("")
    (bench.folder / "ca.pub").write_text(public(authority) + "\n")
    certificate = authority.generate_user_certificate(bench.key, "me", principals=[getpass.getuser()])
    certificate.write_certificate(f"{bench.key_file}-cert.pub")
    sshd = bench.sshd(TrustedUserCAKeys=str(bench.folder / "ca.pub"))
    assert await reached(bench.to(sshd)) == sshd.home


async def test_a_user_certificate_that_the_configuration_names_opens(bench: SshBench) -> None:
    authority = asyncssh.generate_private_key("ssh-ed25519")
    bench.authorized.write_text("")
    (bench.folder / "ca.pub").write_text(public(authority) + "\n")
    certificate = authority.generate_user_certificate(bench.key, "me", principals=[getpass.getuser()])
    certificate.write_certificate(str(bench.folder / "mine-cert.pub"))
    sshd = bench.sshd(TrustedUserCAKeys=str(bench.folder / "ca.pub"))
    bench.alias("ana", sshd, f"CertificateFile {bench.folder / 'mine-cert.pub'}", "CertificateFile ~/.ssh/missing")
    assert await reached(bench.to("ana")) == sshd.home


@pytest.mark.parametrize(
    ("platform", "command"), [("darwin", "(unlock the key: ssh-add --apple-load-keychain)"), ("linux", "ssh-add)")]
)
async def test_a_locked_key_is_to_be_unlocked_for_the_agent(
    bench: SshBench, monkeypatch: pytest.MonkeyPatch, platform: str, command: str
) -> None:
    sshd = bench.sshd()
    lock(bench.key_file)
    monkeypatch.setattr(sys, "platform", platform)
    error = await login_error(bench.to(sshd))
    assert isinstance(error, LoginRefused)
    assert str(error).endswith(command)


async def test_nobody_listens(bench: SshBench) -> None:
    error = await login_error(bench.to(f"{LOOPBACK}:{FREE}"))
    assert str(error).endswith("cannot be reached: connection refused (is Remote Login (sshd) on there?)")


async def test_a_name_that_nobody_knows(bench: SshBench) -> None:
    error = await login_error(bench.to("no-such-host.invalid"))
    assert "its name is not known here" in str(error)


async def test_a_node_that_takes_the_connection_and_says_nothing(
    bench: SshBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.cluster.transport.ssh_config.CONNECT_TIMEOUT_S", 0.3)
    with socket.create_server((LOOPBACK, 0)) as silent:
        error = await login_error(bench.to(f"{LOOPBACK}:{silent.getsockname()[1]}"))
    assert "no answer within" in str(error)


async def test_whoever_answers_there_cannot_steer_the_terminal(bench: SshBench) -> None:
    """Anybody at that address can say why it hangs up, long before a host key is shown."""
    reason = "\033]0;owned\a\033[31mbye\rnot now\nnor later\u009b2J\u202e".encode()

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-hostile\r\n")
        await reader.readline()
        disconnect = b"\x01" + struct.pack(">II", 2, len(reason)) + reason + struct.pack(">I", 0)
        padding = bytes(16 - (len(disconnect) + 5) % 8)
        writer.write(struct.pack(">IB", len(disconnect) + len(padding) + 1, len(padding)) + disconnect + padding)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(hang_up, LOOPBACK, 0) as server:
        error = await login_error(bench.to(f"{LOOPBACK}:{server.sockets[0].getsockname()[1]}"))
    assert error.why == "not now nor later"
    assert str(error).isprintable()


async def test_all_who_wait_for_one_node_are_told_together_why_it_is_not_there(
    bench: SshBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One after the other they would need 18 s.
    monkeypatch.setattr("engine.cluster.transport.ssh_config.CONNECT_TIMEOUT_S", 1.5)
    with socket.create_server((LOOPBACK, 0)) as silent:
        transport = bench.to(f"{LOOPBACK}:{silent.getsockname()[1]}")
        async with asyncio.timeout(15):
            errors = await asyncio.gather(*(login_error(transport) for _ in range(12)))
    assert len(errors) == 12


async def test_fifty_connect_at_once_to_an_sshd_that_drops_strangers(bench: SshBench) -> None:
    sshd = bench.sshd(MaxStartups="8:30:10")
    names = [f"node{number}" for number in range(50)]
    for name in names:
        bench.alias(name, sshd)
    async with Fleet(bench.home) as fleet:
        done = await asyncio.gather(*(fleet.reach(name).run(["true"], timeout_s=20) for name in names))
        assert [one.code for one in done] == [0] * 50
        assert sshd.connections() == 50


async def test_waiting_for_the_limiter_takes_nothing_from_the_time_to_connect(
    bench: SshBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, dropped = 0.0, 0

    class SlowLimiter(ConnectionLimiter):
        @contextlib.asynccontextmanager
        async def at(self, host: str, port: int) -> AsyncIterator[None]:
            nonlocal now
            now += 100.0
            async with super().at(host, port):
                yield

    async def drop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal dropped
        dropped += 1
        writer.close()

    monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(connection, "random", SimpleNamespace(uniform=lambda least, most: 0.0))
    async with await asyncio.start_server(drop, LOOPBACK, 0) as server:
        target = SshTarget.parse(f"{LOOPBACK}:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(NodeUnreachable):
            await connection.dial(target, bench.home, SlowLimiter())
    assert dropped == connection._TRIES


async def test_an_sshd_that_drops_all_but_one_is_asked_again(bench: SshBench, monkeypatch: pytest.MonkeyPatch) -> None:
    # A slow login of one keeps the others out for longer.
    monkeypatch.setattr("engine.cluster.transport.ssh.connection._TRIES", 10)
    monkeypatch.setattr("engine.cluster.transport.ssh_config.CONNECT_TIMEOUT_S", 120)
    sshd: Sshd = bench.sshd(MaxStartups="1")
    ways = [bench.to(sshd) for _ in range(4)]
    assert len({id(way) for way in ways}) == 4
    assert await asyncio.gather(*map(reached, ways)) == [sshd.home] * 4


@pytest.mark.parametrize(
    "host", ["-oProxyCommand=id", "a;id", "a\nb", "$(id)", "../..", "a b", "-l@b", "a:0", "a:99999"]
)
def test_hostile_hosts_are_refused_before_there_is_a_way(host: str) -> None:
    with pytest.raises(InputError):
        SshTarget.parse(host)
    with pytest.raises(InputError):
        Fleet(Path("/nonexistent")).reach(host)


async def test_what_a_hostile_server_says_of_why_is_plain_and_short(bench: SshBench) -> None:
    class Hostile(asyncssh.SSHServer):
        def begin_auth(self, username: str) -> bool:
            raise asyncssh.DisconnectError(2, "\x1b]0;owned\x07\x1b[2J\nana: all is well\u202e " + "x" * 30_000)

    key = asyncssh.generate_private_key("ssh-ed25519")
    server = await asyncssh.create_server(Hostile, LOOPBACK, 0, server_host_keys=[key])
    async with server:
        port = server.get_port()
        bench.know(f"[{LOOPBACK}]:{port} {public(key)}\n")
        output = str(await login_error(bench.to(f"{LOOPBACK}:{port}")))
    assert output.startswith(f"{LOOPBACK}:{port}: cannot be reached: ")
    assert output.isprintable()
    assert len(output) < 400
