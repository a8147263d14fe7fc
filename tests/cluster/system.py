"""Booting a node: the shell script that turns new namespaces into a machine, ending as its pid 1."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path, PurePosixPath
from shlex import quote

from engine.security.paths import state_home

PROJECT = Path(__file__).parents[2]
INIT = "/usr/local/libexec/flightdeck-init.py"
"""Where pid 1's program lies on a node."""
MASKED = ("/root", "/home", "/tmp", "/var/tmp", "/run", "/mnt", "/media", "/srv")
"""What a node never sees of the head: its homes, temporary files and sockets."""
VOLUME = "/Volumes/shared"
"""Where nodes have the disk that they share."""
DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}


def interpreter() -> Path:
    """The interpreter below the project's venv: it starts without site-packages."""
    return Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"


def packages() -> Path:
    """The site-packages of the interpreter that runs the tests: mlx and mlx_lm are in it."""
    return Path(sysconfig.get_path("purelib"))


def shared() -> list[Path]:
    """Directories of the head that every node sees, read-only and at the same path: interpreter, packages, project."""
    wanted = {Path(sys.base_prefix), packages(), PROJECT}
    return sorted(
        path
        for path in wanted
        if not path.is_relative_to("/usr") and not any(other in path.parents for other in wanted)
    )


def masked() -> list[str]:
    """The directories that are empty on a node, its user's home apart. Its /dev is its own; a test's home is there."""
    wanted, hidden = {*map(Path, MASKED), Path.home(), state_home()} - {Path("/")}, {Path("/dev")}
    return [str(path) for path in sorted(wanted) if path.is_dir() and not (wanted | hidden).intersection(path.parents)]


def script(
    *, name: str, root: Path, home: Path, home_on_node: str, boot_id: Path, owner: int, volume: Path, kernel: str = ""
) -> str:
    """The boot script of node `name`. `root` is its merged root, `home` the directory of its home's disk, `boot_id` a
    file with this boot's id, `owner` the descriptor of a pidfd, `volume` the directory of the disk that it shares with
    others, if that exists. Run it with /bin/sh in new namespaces. A node with `kernel` is a Mac: that is where its
    /proc and /sys lie, and it has macOS's limit of open files."""
    lines = [
        "set -e",
        f"cd {quote(str(root))}",
        f"hostname {quote(name)}",
        "mount -t proc -o nosuid,nodev,noexec proc proc",
        # A cut node must be cut, and the packet filter that does it is IPv4's.
        "[ ! -e proc/sys/net/ipv6 ] || echo 1 > proc/sys/net/ipv6/conf/all/disable_ipv6",
        "mount -t sysfs -o ro,nosuid,nodev,noexec sysfs sys",
        "mount -t tmpfs -o mode=0755,size=1m dev dev",
        "mkdir dev/pts dev/shm",
        *(f"mknod -m 666 dev/{device} c {major} {minor}" for device, (major, minor) in DEVICES.items()),
        "mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts dev/pts",
        "mount -t tmpfs -o mode=1777,size=256m shm dev/shm",
        "ln -s pts/ptmx dev/ptmx",
        f"ln -s {kernel}/proc/self/fd dev/fd",
        "ln -s fd/0 dev/stdin",
        "ln -s fd/1 dev/stdout",
        "ln -s fd/2 dev/stderr",
    ]
    for path in masked():
        mode = "1777" if PurePosixPath(path).name == "tmp" else "0755"
        lines.append(f"mount -t tmpfs -o mode={mode},size=256m,nosuid,nodev masked .{quote(path)}")
    for path in map(str, shared()):
        inside = f".{quote(path)}"
        lines.append(f"mkdir -p {inside}")
        lines.append(f"mount --bind -o ro {quote(path)} {inside}")
    lines += [
        f"mkdir -p .{quote(home_on_node)} run/sshd",
        f"mount --bind {quote(str(home))} .{quote(home_on_node)}",
        f"mount --bind {quote(str(boot_id))} proc/sys/kernel/random/boot_id",
        *([f"mkdir -p .{VOLUME}", f"mount --bind {quote(str(volume))} .{VOLUME}"] if volume.is_dir() else []),
        "pivot_root . .",
        "umount -l .",
    ]
    if kernel:
        lines += [f"mkdir -p {kernel}/sys {kernel}/proc", f"mount --move /sys {kernel}/sys"]
        lines += [f"mount --move /proc {kernel}/proc", "ulimit -S -n 256"]
    lines += [
        f"exec {quote(str(interpreter()))} -I -S {INIT} {owner}",
    ]
    return "\n".join(lines) + "\n"
