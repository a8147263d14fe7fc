"""A head and sshds of a test's own. Nothing of the user's is read: HOME, keys, agent and known_hosts are the test's."""

from __future__ import annotations

import contextlib
import getpass
import os
import signal
import subprocess
import time
from pathlib import Path

import asyncssh

from engine.cluster.transport.ssh import ConnectionLimiter
from engine.cluster.transport.ssh.transport import SshTransport
from engine.node.probes.leases import WATCHED
from engine.node.processes import Process, with_variables
from engine.security.identifiers import SshTarget
from tests.machine import LOOPBACK, free_port

SSHD = "/usr/sbin/sshd"
TAG = "FLIGHTDECK_TEST_SSHD"


def marked(nonce: str, script: str) -> list[str]:
    """A shell script whose processes are found by the nonce. With a keeper's name among them, the preflight of another
    test on this machine does not take them for what an earlier run has left."""
    return ["/usr/bin/env", f"FLIGHTDECK_NONCE={nonce}", "/bin/sh", "-c", f"{script}\n# {WATCHED[0]}"]


class Sshd:
    """One sshd, and the home that its sessions have."""

    def __init__(self, folder: Path, authorized: Path, **options: str | int) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        # As in a home that never had any other: bash reads it for commands over ssh, too.
        (self.home / ".bashrc").write_text('cd "$HOME"\n')
        self.port = free_port()
        self.host_key = self.new_host_key()
        self._authorized = authorized
        self._options = {key: str(value) for key, value in options.items()}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def fingerprint(self) -> str:
        return self.host_key.get_fingerprint()

    @property
    def known(self) -> str:
        """Its line of known_hosts."""
        return f"[{LOOPBACK}]:{self.port} {public(self.host_key)}\n"

    def new_host_key(self, algorithm: str = "ssh-ed25519") -> asyncssh.SSHKey:
        """Give it another host key, for its next start."""
        self.host_key = asyncssh.generate_private_key(algorithm)
        write_key(self.folder / "host_key", self.host_key)
        return self.host_key

    def start(self) -> bool:
        """True if it listens: its port may be another's by now."""
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        options = {
            "Port": str(self.port),
            "ListenAddress": LOOPBACK,
            "HostKey": str(self.folder / "host_key"),
            "PidFile": "none",
            "AuthorizedKeysFile": str(self._authorized),
            # The test's folder lies below one that all may write to.
            "StrictModes": "no",
            "UsePAM": "no",
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
            "SetEnv": f"HOME={self.home} {TAG}={self.folder}",
            "Subsystem": f"sftp internal-sftp -d {self.home}",
        } | self._options
        config = self.folder / "sshd_config"
        config.write_text("".join(f"{key} {value}\n" for key, value in options.items()))
        with (self.folder / "sshd.log").open("wb") as log:
            self._process = subprocess.Popen(
                [SSHD, "-D", "-e", "-f", str(config)], stdin=subprocess.DEVNULL, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + 60
        while "Server listening" not in (output := (self.folder / "sshd.log").read_text()):
            if self._process.poll() is not None and "Address already in use" in output:
                return False
            assert time.monotonic() < deadline and self._process.poll() is None, output
            time.sleep(0.005)
        return True

    def stop(self) -> None:
        """End it with its connections, and with what its sessions have left running."""
        if self._process is not None:
            self.drop_connections(listener=True)
            self._process.wait()
            self._process = None
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    def restart(self) -> None:
        self.stop()
        assert self.start(), "its port is taken"

    def drop_connections(self, *, listener: bool = False) -> None:
        """KILL the processes that serve connections: the other side sees them closed."""
        for pid in self._own(listener=listener):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def freeze(self) -> None:
        """Let every packet be taken by the kernel and by nobody else."""
        for pid in self._own(listener=True):
            os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        for pid in self._own(listener=True):
            os.kill(pid, signal.SIGCONT)

    def connections(self) -> int:
        assert self._process is not None
        return len(_children(self._process.pid))

    def processes(self, **variables: str) -> list[Process]:
        """What its sessions run, by their environment."""
        return with_variables({TAG: str(self.folder)} | variables)

    def _own(self, *, listener: bool) -> list[int]:
        """sshd's own processes: of a user's connection there are two."""
        assert self._process is not None
        below = _children(self._process.pid)
        below += [grandchild for child in below for grandchild in _children(child, "sshd")]
        return [*([self._process.pid] if listener else []), *below]


class SshBench:
    """What a test needs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "flightdeck"
        self.user_home = folder / "user"
        self.config = self.user_home / ".ssh" / "config"
        self.config.parent.mkdir(mode=0o700, parents=True)
        self.key_file = self.config.parent / "key"
        self.authorized = folder / "authorized_keys"
        self.key = self.new_key(self.key_file)
        self.authorized.write_text(f"{public(self.key)}\n")
        self.config.write_text(f"Host *\n    IdentityFile {self.key_file}\n    IdentitiesOnly yes\n")
        self._sshds: list[Sshd] = []
        self._transports: list[SshTransport] = []

    def sshd(self, *, known: bool = True, **options: str | int) -> Sshd:
        """A running sshd, whose key our own known_hosts has."""
        sshd = Sshd(self.folder / f"sshd{len(self._sshds)}", self.authorized, **options)
        self._sshds.append(sshd)
        while not sshd.start():
            # Somebody else has taken the port in between.
            sshd.port = free_port()
        if known:
            self.know(sshd.known)
        return sshd

    def know(self, line: str) -> None:
        self.home.mkdir(mode=0o700, exist_ok=True)
        with (self.home / "known_hosts").open("a") as file:
            file.write(line)

    def new_key(self, file: Path) -> asyncssh.SSHKey:
        """A key pair at `file`, that nobody lets in yet."""
        key = asyncssh.generate_private_key("ssh-ed25519", comment=file.name)
        write_key(file, key)
        file.with_name(f"{file.name}.pub").write_text(f"{public(key)} {file.name}\n")
        return key

    def configure(self, text: str) -> None:
        """Put this before what the user's ssh configuration says of all hosts."""
        self.config.write_text(f"{text}\n{self.config.read_text()}")

    def alias(self, name: str, sshd: Sshd, *more: str) -> None:
        lines = [f"Host {name}", f"HostName {LOOPBACK}", f"Port {sshd.port}", *more]
        self.configure("\n    ".join(lines))

    def to(self, sshd: Sshd | str) -> SshTransport:
        """A transport, closed at the end of the test."""
        host = sshd if isinstance(sshd, str) else f"{getpass.getuser()}@{LOOPBACK}:{sshd.port}"
        transport = SshTransport(SshTarget.parse(host), self.home, ConnectionLimiter())
        self._transports.append(transport)
        return transport

    async def close(self) -> None:
        for transport in self._transports:
            await transport.close()
        for sshd in self._sshds:
            sshd.stop()


def public(key: asyncssh.SSHKey) -> str:
    """As a line of known_hosts has it."""
    return " ".join(key.export_public_key().decode().split()[:2])


def write_key(file: Path, key: asyncssh.SSHKey) -> None:
    file.unlink(missing_ok=True)
    file.touch(mode=0o600)
    key.write_private_key(file)


def _children(pid: int, name: str = "") -> list[int]:
    listed = subprocess.run(["ps", "-axo", "pid=,ppid=,comm="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    return [int(child) for child, parent, command in rows if int(parent) == pid and name in command]
