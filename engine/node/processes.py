"""The processes of this machine: identity (boot id, start time), groups, what carries a run's nonce, OOM kills, QoS
class and sleep prevention.

Standard library alone, on Linux and macOS, and runnable as a single file over ssh: `python processes.py NONCE` prints
`[{"pid": ..., "command": ...}, ...]`, the processes of this machine that still belong to the attempt; with `--kill`
before the nonce they are killed as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

_VMSTAT = Path("/proc/vmstat")
_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def oom_kill_count(vmstat: Path = _VMSTAT) -> int | None:
    """Processes that the kernel has killed for memory since boot; None where it is not known (macOS)."""
    try:
        match = _OOM_KILLS.search(vmstat.read_text())
    except OSError:
        return None
    return int(match[1]) if match else None


_QOS_CLASS_USER_INTERACTIVE = 0x21


def raise_priority() -> str:
    """macOS: keep this thread, and those it creates, off the efficiency cores. Returns a message for the log."""
    if sys.platform != "darwin":
        return "not on macOS"
    import ctypes

    code = ctypes.CDLL(None).pthread_set_qos_class_self_np(_QOS_CLASS_USER_INTERACTIVE, 0)
    return "QOS_CLASS_USER_INTERACTIVE" if code == 0 else f"QOS_CLASS_USER_INTERACTIVE was refused with {code}"


def stay_awake(pid: int) -> str:
    """macOS: keep the machine from sleeping while `pid` lives. Returns a message for the log."""
    if sys.platform != "darwin":
        return "not on macOS"
    try:
        subprocess.Popen(
            ["/usr/bin/caffeinate", "-ims", "-w", str(pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError as error:
        return f"caffeinate: {error}"
    return "caffeinate -ims"


_PARENT_POLL_S = 1.0


def end_with_parent() -> None:
    """This process ends within a second of its parent (sshd's session, or the head) from now on."""
    threading.Thread(target=_watch_parent, args=(os.getppid(),), name="parent", daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os._exit(1)


NONCE_VARIABLE = "FLIGHTDECK_NONCE"
"""As protocol.attempt.NONCE_ENV, repeated because this file also runs on its own."""

_PROC = Path("/proc")
_LINUX = sys.platform.startswith("linux")
_TOOL_TIMEOUT_S = 10.0
_MAX_SCANS = 10
"""For processes that are forked while their parent is found and killed."""
_ENVIRONMENT_IN_PS = re.compile(r" [A-Za-z_][A-Za-z0-9_]*=")


@dataclass(frozen=True)
class Process:
    """A running process, for messages."""

    pid: int
    command: str


def boot_id() -> str:
    """Different after every boot of this machine; "" when unknown."""
    try:
        if _LINUX:
            return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return _tool("sysctl", "-n", "kern.bootsessionuuid").strip()
    except OSError:
        return ""


def start_time(pid: int) -> str | None:
    """When process `pid` started, comparable only for equality within one boot; None when gone or a zombie."""
    if pid <= 0:
        return None
    if _LINUX:
        return _linux_start(pid)
    # lstart has five fields: weekday, month, day, time, year.
    fields = _tool("ps", "-o", "stat=,lstart=", "-p", str(pid)).split()
    if len(fields) < 6 or fields[0].startswith("Z"):
        return None
    return " ".join(fields[1:])


def alive(pid: int, start: str) -> bool:
    """`pid` is still the process that started at `start`, not a later one or a zombie. On a system that is too busy to
    answer, an existing one counts as alive: a run is ended only on certainty."""
    try:
        return start_time(pid) == start
    except (OSError, subprocess.SubprocessError):
        return exists(pid)


def exists(pid: int) -> bool:
    """There is a process `pid`, whichever it is."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def with_nonce(nonce: str) -> list[Process]:
    """The processes with `nonce` as FLIGHTDECK_NONCE, and for a run's nonce those of its attempts, `<nonce>.<attempt>`;
    without zombies and the caller. Sees only processes that the caller may inspect: its own user's, or all as root.
    """
    if not nonce:
        raise ValueError("an empty nonce would match nothing and prove nothing")
    carried = with_any_nonce()
    return [each for name, found in carried.items() if name == nonce or name.startswith(f"{nonce}.") for each in found]


def with_variables(variables: dict[str, str]) -> list[Process]:
    """The processes whose environment holds all of `variables`, seen as by `with_nonce`."""
    found = _linux_with(variables) if _LINUX else _ps_with(variables)
    return [process for process in found if process.pid != os.getpid()]


def with_any_nonce() -> dict[str, list[Process]]:
    """The processes of every attempt on this machine, by its nonce, seen as by `with_nonce`."""
    found: dict[str, list[Process]] = {}
    for process, nonce in _linux_nonces() if _LINUX else _ps_nonces():
        if process.pid != os.getpid():
            found.setdefault(nonce, []).append(process)
    return found


def kill_group(pgid: int, sig: int) -> bool:
    """Send `sig` to process group `pgid`; False when the group is empty."""
    if pgid <= 1:
        raise ValueError(f"process group {pgid} is not a rank's")
    try:
        os.killpg(pgid, sig)
    except (ProcessLookupError, PermissionError):
        # macOS reports EPERM for a group of zombies.
        return False
    return True


def kill_with_nonce(nonce: str) -> None:
    """KILL every process with this nonce."""
    for _ in range(_MAX_SCANS):
        found = with_nonce(nonce)
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        if not found:
            return


def _linux_start(pid: int) -> str | None:
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # The command's name may hold spaces and brackets: fields are counted from the last bracket.
    fields = stat[stat.rindex(b")") + 2 :].split()
    if fields[0] in (b"Z", b"X", b"x"):
        return None
    return fields[19].decode()


def _linux_with(variables: dict[str, str]) -> Iterator[Process]:
    wanted = {f"{name}={value}".encode() for name, value in variables.items()}
    network = _network("self")
    for entry, environment in _linux_environments():
        if wanted.issubset(environment) and (process := _linux_process(entry, network)) is not None:
            yield process


def _linux_nonces() -> Iterator[tuple[Process, str]]:
    assignment = f"{NONCE_VARIABLE}=".encode()
    network = _network("self")
    for entry, environment in _linux_environments():
        nonce = next((each for each in environment if each.startswith(assignment)), None)
        if nonce is not None and (process := _linux_process(entry, network)) is not None:
            yield process, nonce.removeprefix(assignment).decode(errors="replace")


def _linux_environments() -> Iterator[tuple[Path, list[bytes]]]:
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                yield entry, (entry / "environ").read_bytes().split(b"\0")


def _linux_process(entry: Path, network: str | None) -> Process | None:
    try:
        command = (entry / "cmdline").read_bytes()
    except OSError:
        return None
    # A process in a container with its own network counts as another machine's.
    if _linux_start(int(entry.name)) is None or _network(entry.name) != network:
        return None
    return Process(int(entry.name), command.replace(b"\0", b" ").decode(errors="replace").strip())


def _network(pid: str) -> str | None:
    """A process's network namespace; None when it cannot be read."""
    try:
        return os.readlink(_PROC / pid / "ns" / "net")  # noqa: PTH115  (a name, not a path)
    except OSError:
        return None


def _ps_with(variables: dict[str, str]) -> Iterator[Process]:
    wanted = [re.compile(rf" {re.escape(f'{name}={value}')}(?= |$)") for name, value in variables.items()]
    for process, words in _ps():
        if all(pattern.search(words) for pattern in wanted):
            yield process


def _ps_nonces() -> Iterator[tuple[Process, str]]:
    for process, words in _ps():
        if nonce := re.search(rf" {NONCE_VARIABLE}=(\S+)", words):
            yield process, nonce[1]


def _ps() -> Iterator[tuple[Process, str]]:
    """Each process, and its command with its environment, a space before each word."""
    for line in _tool("ps", "-axEww", "-o", "pid=,stat=,command=").splitlines():
        words = line.split(None, 2)
        if len(words) == 3 and not words[1].startswith("Z"):
            yield Process(int(words[0]), _ENVIRONMENT_IN_PS.split(words[2], maxsplit=1)[0]), " " + words[2]


def _tool(*command: str) -> str:
    """A system tool's output, in the C locale; "" when it fails, as `ps` does for a pid that is gone.

    In UTC: `ps` prints start times in the current time zone, and a Mac that travels would take a running process for
    another one.
    """
    finished = subprocess.run(
        command,
        capture_output=True,
        timeout=_TOOL_TIMEOUT_S,
        env={**os.environ, "LC_ALL": "C", "TZ": "UTC"},
        check=False,
    )
    return finished.stdout.decode(errors="replace")


if __name__ == "__main__":
    print(json.dumps([asdict(process) for process in with_nonce(sys.argv[-1])]))
    if sys.argv[1] == "--kill":
        kill_with_nonce(sys.argv[-1])
