"""A cluster whose nodes are Macs, as far as Linux can show them: their commands, python, shell, limits and cables."""

from __future__ import annotations

import dataclasses
import json
import py_compile
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from engine.node.processes import alive
from tests.cluster import system
from tests.cluster.cluster import Cluster
from tests.cluster.command import attempt, command
from tests.cluster.mac import commands
from tests.cluster.mac.personality import USUAL, USUAL_CABLES, Document, documents, lacks
from tests.cluster.node import NOISE, Node
from tests.cluster.registry import Record
from tests.cluster.specs import NodeSpec

NOT_ON_A_MAC = ("flock", "free", "nproc", "pidof", "setsid", "timeout")
PLIST = """<?xml version="1.0" encoding="UTF-8"?>
<plist version="1.0"><dict>
<key>ProductName</key><string>macOS</string>
<key>ProductVersion</key><string>{}</string>
<key>ProductBuildVersion</key><string>{}</string>
</dict></plist>
"""
PROGRAM = """#!{} -IS
import sys
sys.path.insert(0, "{}")
import mac_commands
sys.exit(mac_commands.main(sys.argv))
"""
"""Of a program Python keeps no compiled code, and compiling the commands takes longer than most of them."""
PAM = "".join(f"{kind} sufficient pam_permit.so\n" for kind in ("auth", "account", "session"))
PLACES_FILE = "macs.json"
"""In a cluster's folder: the documents of its nodes."""
_LAYING = threading.Lock()


class MacNode(Node):
    """A node that answers as a Mac."""

    shell = "/bin/zsh" if Path("/bin/zsh").exists() else "/bin/bash"
    kernel = str(commands.LINUX)
    home_mib = 4096
    """Preflight warns where less than 1 GB is free."""

    def __init__(self, spec: NodeSpec, record: Record, index: int, document: Document) -> None:
        super().__init__(spec, record, index)
        self.document = document | {"ip": f"{self.ip}/24"}
        self._mac = self.disk.seen_from_head(str(commands.ROOT))

    def install(self, client_key: str, hosts: str) -> None:
        super().install(client_key, hosts)
        self._mac.mkdir(parents=True)
        (self._mac / commands.DOCUMENT.name).write_text(json.dumps(self.document))
        (self._mac / commands.ASSERTIONS.name).mkdir()
        (self._mac / commands.ASSERTIONS.name).chmod(0o1777)
        program, module = self._mac / "program", self._mac / "mac_commands.py"
        program.write_text(PROGRAM.format(system.interpreter(), commands.ROOT))
        program.chmod(0o755)
        shutil.copy(commands.__file__, module)
        py_compile.compile(str(module), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
        for name in (*NOT_ON_A_MAC, *commands.PLACES):
            for folder in ("bin", "sbin", "usr/bin", "usr/sbin", "usr/local/bin"):
                (self.disk.root / folder / name).unlink(missing_ok=True)
        for name in commands.PLACES.keys() - lacks(self.document):
            file = self.disk.root / commands.PLACES[name].lstrip("/") / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.symlink_to(commands.ROOT / program.name)
        for folder in (commands.TEMPORARY, "/Volumes/smb"):
            place = self.disk.root / folder.lstrip("/")
            place.mkdir(parents=True)
            self._give_to_user(place)
        release, build, _ = self.document["macos"]
        plist = self.disk.root / "System/Library/CoreServices/SystemVersion.plist"
        plist.parent.mkdir(parents=True)
        plist.write_text(PLIST.format(release, build))
        (self.disk.root / "etc/pam.d/su").write_text(PAM)
        packages = next(self.disk.seen_from_head(self.python).parents[1].glob("lib/python*/site-packages"))
        shutil.copy(Path(__file__).with_name("darwin.py"), packages / "flightdeck_darwin.py")
        (packages / "darwin.pth").write_text("import flightdeck_darwin\n")

    def boot(self) -> None:
        super().boot()
        bridge = self.document["bridge"]
        lines = ["link add bridge0 type bridge stp_state 0 forward_delay 0"]
        lines += [f"addr add {bridge['ip']} dev bridge0"] if bridge["ip"] else []
        lines += ["link set bridge0 up"] if bridge["up"] else []
        pid = self.pid
        assert pid is not None
        _in_network(pid, lines)
        with _LAYING:
            self._lay_cables(pid)

    def _lay_cables(self, pid: int) -> None:
        """To the Macs that are on, if they have not laid them already; another one lays its own when it boots."""
        for port in self.document["ports"]:
            peer = port["peer"]
            other = _pid_in(self.folder.parent / peer["name"]) if peer else None
            laid = attempt("nsenter", "-t", str(pid), "-n", "ip", "link", "show", port["device"]).returncode == 0
            if other is None or laid:
                continue
            # The kernel takes down a cable to a Mac that was switched off some time after its network.
            attempt("nsenter", "-t", str(other), "-n", "ip", "link", "del", peer["device"])
            there = f"peer name {peer['device']} netns {other}"
            command("ip", *f"link add {port['device']} netns {pid} type veth {there}".split())
            for end, device, ip in ((pid, port["device"], port["ip"]), (other, peer["device"], peer["ip"])):
                bridged = self.document["bridge"]["up"]
                lines = [f"link set {device} {'master bridge0 ' if bridged else ''}up"]
                _in_network(end, [*lines, *([f"addr add {ip} dev {device}"] if ip else [])])

    def set_fault(self, name: str, **fault: Any) -> None:
        """Let a command be `late_s` seconds late, print `output` instead of its own, be `cut` after so many characters,
        say `errors` and end with `exit_code`; without any of them it answers as before."""
        self._harm("commands")
        file = self._mac / commands.FAULTS.name
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(known | {name: fault}))

    def mend_commands(self) -> None:
        """Undo set_fault."""
        (self._mac / commands.FAULTS.name).unlink(missing_ok=True)
        self._healed("commands")

    def noisy_bashrc(self, text: str = NOISE) -> None:
        self._harm("noise")
        self.write("~/.zshenv", text)

    def quiet_bashrc(self) -> None:
        self.disk.seen_from_head("~/.zshenv").unlink(missing_ok=True)
        self._healed("noise")

    @property
    def _undoings(self) -> dict[str, Callable[[], None]]:
        return {**super()._undoings, "commands": self.mend_commands}

    def _sshd_config(self, changes: dict[str, str]) -> str:
        # As a login over ssh has it on macOS.
        path = "/usr/bin:/bin:/usr/sbin:/sbin"
        return super()._sshd_config({"SetEnv": f"PATH={path} TMPDIR={commands.TEMPORARY}/", **changes})


class MacCluster(Cluster):
    """Nodes that are Macs: a personality for each, in turn, and cables between them. Raises LookupError, ValueError."""

    names_addresses: ClassVar[bool] = False

    def __init__(self, size: int = 4, personalities: Sequence[str] = (USUAL,), cabling: str = USUAL_CABLES) -> None:
        super().__init__(size)
        self._specs = tuple(dataclasses.replace(spec, home=f"/Users/{spec.name}") for spec in self._specs)
        self._documents = documents([spec.name for spec in self._specs], personalities or (USUAL,), cabling)

    def _make_nodes(self, record: Record) -> list[Node]:
        file = record.folder / PLACES_FILE
        if file.exists():
            self._documents = json.loads(file.read_text())
        else:
            file.write_text(json.dumps(self._documents))
        specs = zip(self._specs, self._documents, strict=True)
        return [MacNode(spec, record, index, document) for index, (spec, document) in enumerate(specs)]


def _pid_in(folder: Path) -> int | None:
    """The pid 1 of another node, by its folder; None when it is off."""
    try:
        pid, start = (folder / "pid").read_text().split()
    except (FileNotFoundError, ValueError):
        return None
    return int(pid) if alive(int(pid), start) else None


def _in_network(pid: int, lines: Sequence[str]) -> None:
    command("nsenter", "-t", str(pid), "-n", "ip", "-batch", "-", stdin="\n".join(lines) + "\n")
