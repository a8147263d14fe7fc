"""A cluster without root: one sshd per node on a loopback port, as the user who runs the tests.

Each node has a home of its own (sshd sets HOME), a host key and a python path, but they share the machine, its user and
its network: what needs more skips the test that asks for it.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from engine.node.processes import Process, start_time, with_nonce, with_variables
from tests.cluster import sshd
from tests.cluster.cluster import Cluster
from tests.cluster.command import CommandFailed, attempt, command
from tests.cluster.disk import Disk
from tests.cluster.machine import until
from tests.cluster.node import NOISE, Node
from tests.cluster.registry import Record, Registry
from tests.cluster.specs import NodeSpec
from tests.machine import LOOPBACK, free_port
from tests.needs import require

TAG = "FLIGHTDECK_TEST_NODE"
"""Environment variable of every process of a node: the node's folder."""
POSSIBLE = ("power", "noise", "frozen", "sshd")
"""The faults that a node without namespaces can have, and its end."""
GO_HOME = 'cd "$HOME"\n'
"""sshd enters the home that the user table names; the shell goes on to the node's own."""


def needs_namespaces() -> NoReturn:
    """Skip the test that asks a node without namespaces for more; in CI, fail it."""
    require("namespaces")
    # Not reached by a test's own cluster, which is of sshds on loopback only where namespaces cannot be had.
    raise CommandFailed("a cluster of sshds on loopback has no namespaces")


def clear_loopback(record: Record) -> None:
    """End the processes of a cluster's nodes."""
    for pid_file in record.folder.glob("*/sshd.pid"):
        end_sshd(pid_file)
    for folder in record.folder.glob("*/home"):
        end_tagged(folder.parent)


def end_sshd(pid_file: Path) -> None:
    """End the sshd of `pid_file` with its connections, if it still is that one."""
    try:
        listener = int(pid_file.read_text())
    except (FileNotFoundError, ValueError):
        return
    message = attempt("ps", "-o", "command=", "-p", str(listener)).stdout
    if str(pid_file.parent) not in message:
        return
    lines = [line.split() for line in attempt("ps", "-axo", "pid=,ppid=").stdout.splitlines()]
    for pid in [listener, *(int(pid) for pid, parent in lines if int(parent) == listener)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: start_time(listener) is None, "sshd's end", str)
    pid_file.unlink(missing_ok=True)


def end_tagged(folder: Path) -> None:
    """KILL all processes of the node in `folder`, and await their end."""

    def nothing_runs() -> bool:
        running = list(with_variables({TAG: str(folder)}))
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        return not running

    until(nothing_runs, f"the end of what runs in {folder}", str)


class HomeOnly(Disk):
    """A disk that is but a folder: the home is the node's, all else is the head's."""

    @property
    def root(self) -> Path:
        return Path("/")


class LoopbackNode(Node):
    """A node that is an sshd of the user's own. What it cannot do skips the test."""

    def __init__(self, spec: NodeSpec, record: Record, index: int) -> None:
        super().__init__(spec, record, index)
        self.user = getpass.getuser()
        self.uid = os.getuid()
        self.ip = LOOPBACK
        self.ssh = f"{self.user}@flightdeck-{spec.name}"
        self.home = str(self.folder / "home")
        self.disk = HomeOnly(self.folder, self.home)
        self.sshd_folder = self.folder / "sshd"
        self._port = self._known_port() or free_port()

    @property
    def port(self) -> int:
        """A port that was free when the cluster came up."""
        return self._port

    @property
    def pid(self) -> int | None:
        """The sshd that listens."""
        try:
            pid = int((self.folder / "sshd.pid").read_text())
        except (FileNotFoundError, ValueError):
            return None
        return pid if start_time(pid) is not None else None

    def install(self, client_key: str, hosts: str) -> None:
        """Make the home, the host key and the python; `hosts` is not needed on one machine."""
        self.sshd_folder.mkdir(parents=True)
        self.disk.home.mkdir(mode=0o750)
        sshd.make_key(self.sshd_folder / sshd.KEY_NAME, self.name)
        (self.sshd_folder / sshd.CONFIG_NAME).write_text(self._sshd_config({}))
        self.write("~/.ssh/authorized_keys", f"{client_key}\n", mode=0o600)
        (self.disk.home / ".ssh").chmod(0o700)
        self.quiet_bashrc()
        self._install_python()

    def boot(self) -> None:
        """Start sshd."""
        config, log = self.sshd_folder / sshd.CONFIG_NAME, self.folder / "console.log"
        if os.geteuid() == 0:
            # Where no sshd was ever started as a service, its folder for separated privileges is missing.
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        command(sshd.BINARY, "-f", str(config), "-E", str(log))

    def switch_off(self) -> None:
        end_sshd(self.folder / "sshd.pid")
        end_tagged(self.folder)

    def processes(self, nonce: str | None = None) -> list[Process]:
        """The node's processes, by a variable in their environment; those with this FLIGHTDECK_NONCE if given."""
        mine = with_variables({TAG: str(self.folder)})
        marked = {process.pid for process in with_nonce(nonce)} if nonce else set()
        return [process for process in mine if not nonce or process.pid in marked]

    def read(self, path: str) -> str:
        """The text of a file, absolute or below the node's ~."""
        return self.disk.seen_from_head(path).read_text()

    def run(self, argv: Sequence[str], *, limit_s: float = 30.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv,
            cwd=self.home,
            env=os.environ | {"HOME": self.home, TAG: str(self.folder)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )

    def noisy_bashrc(self, text: str = NOISE) -> None:
        super().noisy_bashrc(GO_HOME + text)

    def quiet_bashrc(self) -> None:
        for file in ("~/.bashrc", "~/.zshenv"):
            self.write(file, GO_HOME)
        self._healed("noise")

    def start_sshd(self) -> None:
        if self._refused():
            self.boot()
        self.await_sshd()

    @property
    def _undoings(self) -> dict[str, Callable[[], None]]:
        return {harm: undo for harm, undo in super()._undoings.items() if harm in POSSIBLE}

    def pull_the_plug(self) -> NoReturn:
        needs_namespaces()

    def link_down(self) -> NoReturn:
        needs_namespaces()

    def slow_link(self, rate: str = "10mbit") -> NoReturn:
        needs_namespaces()

    def fill_disk(self, leave: int = 0) -> NoReturn:
        needs_namespaces()

    def reset_ssh(self) -> NoReturn:
        needs_namespaces()

    def _filter(self, rules: Sequence[str]) -> NoReturn:
        needs_namespaces()

    def _as_root(self, *argv: str, stdin: str = "") -> NoReturn:
        needs_namespaces()

    def inside(self) -> NoReturn:
        needs_namespaces()

    def _signal_sshd(self, name: str) -> None:
        if pid := self.pid:
            os.kill(pid, signal.Signals[f"SIG{name}"])

    def _refused(self) -> bool:
        with socket.socket() as knock:
            return knock.connect_ex((self.ip, self.port)) != 0

    def _sshd_config(self, changes: dict[str, str]) -> str:
        own = {
            "Port": str(self.port),
            "ListenAddress": LOOPBACK,
            "HostKey": str(self.sshd_folder / sshd.KEY_NAME),
            "PidFile": str(self.folder / "sshd.pid"),
            "AuthorizedKeysFile": str(self.disk.home / ".ssh" / "authorized_keys"),
            # The folder lies below a temporary one that all may write to.
            "StrictModes": "no",
            "SetEnv": f"HOME={self.home} {TAG}={self.folder}",
            "Subsystem": f"sftp internal-sftp -d {self.home}",
        }
        return sshd.config(own | changes)

    def _known_port(self) -> int | None:
        try:
            first = (self.sshd_folder / sshd.CONFIG_NAME).read_text().splitlines()[0]
        except FileNotFoundError:
            return None
        return int(first.removeprefix("Port "))

    def _give_to_user(self, path: Path) -> None:
        """It is the user's already."""


class LoopbackCluster(Cluster):
    """The same nodes, as far as an ordinary user can have them."""

    registry = Registry(Path(tempfile.gettempdir()) / f"flightdeck-loopback-{os.getuid()}", clear_loopback)
    isolated = False

    @property
    def head(self) -> str:
        return LOOPBACK

    def _make_nodes(self, record: Record) -> list[Node]:
        return [LoopbackNode(spec, record, index) for index, spec in enumerate(self._specs)]

    def _lay_network(self) -> None:
        """Loopback is there."""
