"""A node's disks: its root (an overlay over the head's, changes on a tmpfs) and its home (a small tmpfs).

They are mounted on the head for as long as the cluster lives, so that they outlast a power off and can be read
meanwhile. What is bound from the head into a node is bound in the node's own namespace only: nothing of the head's own
can be removed by removing a cluster.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.command import CommandFailed, attempt, command

ROOT_SIZE = "1g"
HOME_MIB = 192
FILL = ".fills-the-disk"


@dataclass(frozen=True)
class Disk:
    """The disks of one node, below `folder` on the head."""

    folder: Path
    home_on_node: str
    home_mib: int = HOME_MIB

    @property
    def root(self) -> Path:
        """The node's / as the head sees it, without what is mounted inside the node only."""
        return self.folder / "root"

    @property
    def home(self) -> Path:
        """The node's home as the head sees it."""
        return self.folder / "home"

    def mount(self, uid: int) -> None:
        """Make both disks, empty but for the head's system below."""
        changes = self.folder / "changes"
        for path in (changes, self.root, self.home):
            path.mkdir(parents=True)
        command("mount", "-t", "tmpfs", "-o", f"size={ROOT_SIZE},mode=0755", "flightdeck-root", str(changes))
        upper, work = changes / "upper", changes / "work"
        upper.mkdir()
        work.mkdir()
        layers = f"lowerdir=/,upperdir={upper},workdir={work}"
        command("mount", "-t", "overlay", "-o", layers, "flightdeck-overlay", str(self.root))
        options = f"size={self.home_mib}m,mode=0750,uid={uid},gid={uid},nosuid,nodev"
        command("mount", "-t", "tmpfs", "-o", options, "flightdeck-home", str(self.home))

    def seen_from_head(self, path: str) -> Path:
        """Where the head finds the node's `path` (absolute, or below `~`), also while the node is off."""
        if path == "~" or path.startswith("~/"):
            return self.home / path[2:]
        if path == self.home_on_node or path.startswith(self.home_on_node + "/"):
            return self.home / path[len(self.home_on_node) + 1 :]
        return self.root / path.lstrip("/")

    def fill(self, leave: int = 0) -> None:
        """Leave `leave` bytes free in the home."""
        self.free()
        state = os.statvfs(self.home)
        with (self.home / FILL).open("wb") as file:
            if (size := state.f_bavail * state.f_frsize - leave) > 0:
                os.posix_fallocate(file.fileno(), 0, size)

    def free(self) -> None:
        """Take back what `fill` took."""
        (self.home / FILL).unlink(missing_ok=True)


def mounts_below(folder: Path) -> list[str]:
    """The mount points at or below `folder`, as the kernel lists them, the latest first."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = line.split()[4].encode().decode("unicode_escape")
        if point == str(folder) or point.startswith(f"{folder}/"):
            found.append(point)
    return found[::-1]


def unmount_below(folder: Path) -> None:
    """Unmount everything at or below `folder`. Raises CommandFailed when something is left."""
    for point in mounts_below(folder):
        attempt("umount", "-l", point)
    if left := mounts_below(folder):
        raise CommandFailed(f"still mounted: {', '.join(left)}")


def remove(folder: Path) -> None:
    """Unmount everything below `folder`, and remove it; a folder with mounts in it is never removed."""
    if folder.exists():
        unmount_below(folder)
        shutil.rmtree(folder)
