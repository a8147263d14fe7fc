"""A machine of namespaces: installed, switched on and off, looked into; what a node is before anything goes wrong."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.node.processes import Process, alive, start_time
from tests import IMPORTS
from tests.cluster import network, sshd, system
from tests.cluster.command import CommandFailed, command
from tests.cluster.disk import HOME_MIB, Disk
from tests.cluster.registry import Record
from tests.cluster.specs import FIRST_UID, NodeSpec, address

UP_LIMIT_S = 30.0
SHARED = "shared"
"""The folder of the disk that the nodes of a cluster share, where they do."""


class Machine:
    """A machine, on or off. Paths are the node's own; `python` is below `~`, as a user would write it."""

    shell = "/bin/bash"
    home_mib = HOME_MIB
    kernel = ""
    """Where Linux's /proc and /sys are."""

    @property
    def port(self) -> int:
        """The port of its sshd."""
        return sshd.PORT

    def __init__(self, spec: NodeSpec, record: Record, index: int) -> None:
        """Node `index` (from 0) of the cluster of `record`, with whose owner it ends."""
        self.name = spec.name
        self.user = spec.user
        self.home = spec.home
        self.python = spec.python
        self.ip = address(record.number, index)
        self.ssh = f"{spec.user}@{self.ip}"
        self.uid = FIRST_UID + index
        self.folder = record.folder / spec.name
        self.disk = Disk(self.folder, spec.home, self.home_mib)
        self.sshd_folder = self.disk.root / "etc" / "ssh"
        self._cluster, self._index, self._owner = record.number, index, record.owner
        self._unshare: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.ssh}>"

    @property
    def pid(self) -> int | None:
        """The node's pid 1 as the head sees it; None when the node is off."""
        try:
            pid, start = (self.folder / "pid").read_text().split()
        except FileNotFoundError:
            return None
        return int(pid) if alive(int(pid), start) else None

    @property
    def host_key(self) -> str:
        """The public host key, as `type base64`."""
        return sshd.public_key(self.sshd_folder / sshd.KEY_NAME)

    def install(self, client_key: str, hosts: str) -> None:
        """Make the disks and what an installed system has: the user, sshd with its key, the python."""
        self.folder.mkdir()
        self.disk.mount(self.uid)
        etc = self.disk.root / "etc"
        for file, line in (
            ("passwd", f"{self.user}:x:{self.uid}:{self.uid}::{self.home}:{self.shell}"),
            ("group", f"{self.user}:x:{self.uid}:"),
            ("shadow", f"{self.user}:*:20000:0:99999:7:::"),
        ):
            with (etc / file).open("a") as table:
                table.write(line + "\n")
        (etc / "hostname").write_text(f"{self.name}\n")
        (etc / "hosts").write_text(hosts)
        (etc / "resolv.conf").unlink(missing_ok=True)
        (etc / "resolv.conf").touch()
        shutil.rmtree(self.sshd_folder)
        self.sshd_folder.mkdir()
        sshd.make_key(self.sshd_folder / sshd.KEY_NAME, self.name)
        (self.sshd_folder / sshd.CONFIG_NAME).write_text(self._sshd_config({}))
        init = self.disk.seen_from_head(system.INIT)
        init.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(__file__).with_name("init.py"), init)
        self.write("~/.ssh/authorized_keys", f"{client_key}\n", mode=0o600)
        (self.disk.home / ".ssh").chmod(0o700)
        self._install_python()

    def _install_python(self) -> None:
        """A venv at the node's own path: the interpreter is the project's, and so are the packages, but not the
        project itself, which a Mac has not either."""
        python = self.disk.seen_from_head(self.python)
        venv = python.parent.parent
        base = system.interpreter()
        release = f"python3.{sys.version_info.minor}"
        packages = venv / "lib" / release / "site-packages"
        packages.mkdir(parents=True)
        python.parent.mkdir()
        for name in {"python", "python3", release, python.name}:
            (python.parent / name).symlink_to(base)
        version = ".".join(map(str, sys.version_info[:3]))
        (venv / "pyvenv.cfg").write_text(
            f"home = {base.parent}\ninclude-system-site-packages = false\nversion = {version}\n"
        )
        # A .pth file's folder is not searched for further .pth files: the project's own, of an editable install, is
        # not read.
        (packages / "packages.pth").write_text("".join(f"{path}\n" for path in (system.packages(), *IMPORTS)))
        self._give_to_user(self.disk.home)

    def boot(self) -> None:
        """Start the node's pid 1, which starts sshd, and plug the cable in. The boot id is a new one."""
        boot_id = self.folder / "boot_id"
        boot_id.write_text(f"{uuid.uuid4()}\n")
        boot_id.chmod(0o444)
        owner = os.pidfd_open(self._owner)
        try:
            text = system.script(
                name=self.name,
                root=self.disk.root,
                home=self.disk.home,
                home_on_node=self.home,
                boot_id=boot_id,
                owner=owner,
                volume=self.folder.parent / SHARED,
                kernel=self.kernel,
            )
            (self.folder / "boot.sh").write_text(text)
            namespaces = ("--net", "--mount", "--pid", "--uts", "--ipc", "--kill-child", "--propagation", "private")
            with (self.folder / "console.log").open("ab") as console:
                self._unshare = subprocess.Popen(
                    ["unshare", *namespaces, "/bin/sh", str(self.folder / "boot.sh")],
                    stdin=subprocess.DEVNULL,
                    stdout=console,
                    stderr=console,
                    start_new_session=True,
                    pass_fds=(owner,),
                    env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
                )
        finally:
            os.close(owner)
        pid = self._first_child(self._unshare)
        (self.folder / "pid").write_text(f"{pid} {start_time(pid)}")
        network.plug_in(self._cluster, self._index, pid)

    def await_sshd(self) -> None:
        """Await sshd's greeting. Raises CommandFailed when it does not come, or the node could not boot."""

        def greeted() -> bool:
            if self._unshare is not None and self._unshare.poll() is not None:
                raise CommandFailed(f"{self.name} did not boot: {self._console()}")
            return self.greeting().startswith("SSH-")

        until(greeted, f"sshd of {self.name}", self._console)

    def greeting(self, limit_s: float = 1.0) -> str:
        """What the ssh port says first; "" when it says nothing within `limit_s`, or does not let us in."""
        try:
            with socket.create_connection((self.ip, self.port), timeout=limit_s) as connection:
                return connection.recv(64).decode(errors="replace")
        except OSError:
            return ""

    def pull_the_plug(self) -> None:
        """End every process at once, the cable unplugged first so that not even a FIN gets out."""
        pid = self.pid
        if pid is not None:
            network.set_link(self._cluster, self._index, up=False)
            os.kill(pid, signal.SIGKILL)
            until(lambda: start_time(pid) is None, f"{self.name}'s end", str)
        if self._unshare is not None:
            # A node whose boot did not come as far as its pid 1 ends with this; of any other nothing is left.
            self._unshare.kill()
            self._unshare.wait()
            self._unshare = None
        network.unplug(self._cluster, self._index)
        (self.folder / "pid").unlink(missing_ok=True)

    def end_processes(self) -> None:
        """KILL every process of the node's user, connections of sshd apart, and await their end."""
        until(self._nothing_runs, f"the end of {self.name}'s processes", lambda: str(self.processes()))

    def _nothing_runs(self) -> bool:
        running = [process for process in self.processes() if not process.command.startswith("sshd: ")]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        return not running

    def processes(self, nonce: str | None = None) -> list[Process]:
        """The processes of the node's user, as the head sees them (pids are the head's), without zombies; those with
        this FLIGHTDECK_NONCE, or an attempt's of it, when one is given. None when the node is off."""
        pid = self.pid
        if pid is None:
            return []
        namespace = Path(f"/proc/{pid}/ns/pid").readlink()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if not entry.name.isdigit() or (entry / "ns" / "pid").readlink() != namespace:
                    continue
                if entry.stat().st_uid != self.uid or start_time(int(entry.name)) is None:
                    continue
                if nonce and not _carries(nonce, (entry / "environ").read_bytes().split(b"\0")):
                    continue
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(Process(int(entry.name), words.strip()))
        return found

    def switch_off(self) -> None:
        """End the node for good, with its cluster."""
        self.pull_the_plug()

    def run(self, argv: Sequence[str], *, limit_s: float = 30.0) -> subprocess.CompletedProcess[str]:
        """Run `argv` on the node as its user, without ssh: the head looks in. The working directory is the home."""
        as_user = ("setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups", "--reset-env")
        return subprocess.run(
            [*self.inside(), *as_user, "sh", "-c", 'cd && exec "$@"', "sh", *argv],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )

    def read(self, path: str) -> str:
        """The text of a file of the node's (absolute, or below ~); while it is off, one of its disks."""
        pid = self.pid
        if pid is None or path.startswith("~"):
            return self.disk.seen_from_head(path).read_text()
        return Path(f"/proc/{pid}/root{path}").read_text()

    def write(self, path: str, content: str | bytes, *, mode: int = 0o644) -> None:
        """Write a file of the user's on the node's disk, on or off."""
        file = self.disk.seen_from_head(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        file.chmod(mode)
        self._give_to_user(file)
        if file.is_relative_to(self.disk.home):
            for parent in file.relative_to(self.disk.home).parents:
                os.chown(self.disk.home / parent, self.uid, self.uid)

    def copy_in(self, source: Path, path: str) -> None:
        """Copy a file or folder of the head's to `path` on the node, as the user's."""
        target = self.disk.seen_from_head(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copy(source, target)
        self._give_to_user(self.disk.home)

    def inside(self) -> list[str]:
        """The words that, put before a command, run it on the node as root."""
        pid = self.pid
        if pid is None:
            raise CommandFailed(f"{self.name} is off")
        return ["nsenter", "-t", str(pid), "--mount", "--uts", "--ipc", "--net", "--pid", "--root"]

    def _sshd_config(self, changes: dict[str, str]) -> str:
        return sshd.config(changes)

    def _as_root(self, *argv: str, stdin: str = "") -> str:
        return command(*self.inside(), *argv, stdin=stdin)

    def _give_to_user(self, path: Path) -> None:
        command("chown", "-hR", f"{self.uid}:{self.uid}", str(path))

    def _first_child(self, process: subprocess.Popen[bytes]) -> int:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        until(lambda: process.poll() is not None or children.read_text() != "", f"{self.name}'s pid 1", self._console)
        if process.poll() is not None:
            raise CommandFailed(f"{self.name} did not boot: {self._console()}")
        return int(children.read_text().split()[0])

    def _console(self) -> str:
        return (self.folder / "console.log").read_text(errors="replace").strip()


def until(condition: Callable[[], bool], what: str, detail: Callable[[], str], limit_s: float = UP_LIMIT_S) -> None:
    """Await `condition`. Raises CommandFailed with `detail` after `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise CommandFailed(f"{what}: not within {limit_s:.0f} s {detail()}".rstrip())
        time.sleep(0.005)


def _carries(nonce: str, environment: list[bytes]) -> bool:
    """True if a process has this nonce, or that of an attempt of its run."""
    mark = f"FLIGHTDECK_NONCE={nonce}".encode()
    return any(each == mark or each.startswith(mark + b".") for each in environment)
