"""The processes of this machine: identity (boot id, start time), groups, what carries a run's nonce, OOM kills, QoS
class and sleep prevention; standard library alone, on Linux and macOS. As a single file over ssh, `python processes.py
NONCE` kills the processes of an attempt on this machine, and exits 1 when some are left."""

from __future__ import annotations

import calendar
import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def oom_kill_count() -> int | None:
    """Processes that the kernel has killed for memory since boot; None where it is not known (macOS)."""
    with contextlib.suppress(OSError):
        if match := _OOM_KILLS.search(Path("/proc/vmstat").read_text()):
            return int(match[1])
    return None


_QOS_CLASS_USER_INTERACTIVE = 0x21


def raise_priority() -> str:
    """macOS: keep this thread, and those it creates, off the efficiency cores. Returns a message for the log."""
    if sys.platform != "darwin":
        return "not on macOS"
    import ctypes

    code = ctypes.CDLL(None).pthread_set_qos_class_self_np(_QOS_CLASS_USER_INTERACTIVE, 0)
    return "QOS_CLASS_USER_INTERACTIVE" if code == 0 else f"QOS_CLASS_USER_INTERACTIVE was refused with {code}"


def find_program(name: str, python: str) -> str | None:
    """A program that is named without a path: first beside `python`, where console scripts are, as if activated."""
    return shutil.which(name, path=str(Path(python).parent)) or shutil.which(name)


def abandoned_locks(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Locks of torch's builds of C++ extensions (torch.utils.file_baton) that no process has open, as far as /proc
    tells: whoever loads the extension waits for its lock for ever."""
    cache = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(environment.get("TORCH_EXTENSIONS_DIR") or Path(cache, "torch_extensions"))
    locks = {os.path.realpath(path) for depth in ("*/lock", "*/*/lock") for path in root.glob(depth)}
    for link in Path("/proc").glob("[0-9]*/fd/*") if locks else ():
        with contextlib.suppress(OSError):
            locks.discard(str(link.readlink()))
    return sorted(locks) if Path("/proc").is_dir() else []


OPEN_FILES = 10_240
"""macOS's OPEN_MAX: its setrlimit(2) refuses more. A login over ssh begins there with 256, which a model in many files
and the connections to many nodes exceed."""


def allow_open_files() -> None:
    """Raise this process's limit of open files, which its children inherit, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def start_session(argv: Sequence[str], folder: Path, output: int | IO[bytes], **more: Any) -> subprocess.Popen[bytes]:
    """Start a program that leads a session of its own; stdout and stderr go to `output`, `more` are Popen's arguments.
    Raises OSError."""
    return subprocess.Popen(argv, cwd=folder, stdout=output, stderr=output, start_new_session=True, **more)


def stay_awake(pid: int, what: str) -> str:
    """macOS: keep the machine from sleeping while `pid` lives; `what` are options of caffeinate(8), "-i" against idle
    sleep. A lid that is closed, or the menu, sends it to sleep all the same. Returns a message for the log."""
    return start_on_mac("/usr/bin/caffeinate", what, "-w", str(pid))


def start_on_mac(*argv: str) -> str:
    """Start a command of macOS, without awaiting it. Returns a message for the log."""
    if sys.platform != "darwin":
        return "not on macOS"
    quiet = subprocess.DEVNULL
    try:
        subprocess.Popen(list(argv), stdin=quiet, stdout=quiet, stderr=quiet)
    except OSError as error:
        return f"{os.path.basename(argv[0])}: {error}"  # noqa: PTH119
    return f"{os.path.basename(argv[0])} {argv[1]}"  # noqa: PTH119


_PARENT_POLL_S = 1.0


def end_with_parent() -> None:
    """This process ends within a second of its parent (sshd's session, or the head) from now on."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


NONCE_VARIABLE = "FLIGHTDECK_NONCE"
"""As protocol.attempt.NONCE_ENV, repeated because this file also runs on its own."""

_PROC = Path("/proc")
_LINUX = sys.platform.startswith("linux")
_TOOL_TIMEOUT_S = 10.0
_ENDED = (b"Z", b"X", b"x")
"""States of proc(5)."""
_MAX_SCANS = 10
"""For processes that are forked while their parent is found and killed."""
_DYING_S = 0.02
"""A process that has been killed goes once it gets a processor: the more scans, the longer it is given."""
_STATE_AND_START = re.compile(r" *([\w?]\S*) +(\w{3} \w{3} [ \d]?\d \d\d:\d\d:\d\d \d{4}) *\n")
"""`ps -o stat=,lstart=`: lstart is weekday, month, day, time, year; of a process that is ending, macOS's stat is "?E".
"""
_PID = re.compile(r"[1-9]\d{0,9}|0", re.ASCII)
_UUID = re.compile(r"[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
_ENVIRONMENT_IN_PS = re.compile(r" [A-Za-z_][A-Za-z0-9_]*=")
_VALUES_IN_PS = {"FLIGHTDECK_SPEC": r".*?/spec\.json(?= |$)"}
"""A variable whose value may have blanks, and how that ends."""
_NO_BLANK = r"\S*"


@dataclass(frozen=True)
class Process:
    """A running process, for messages."""

    pid: int
    command: str


def boot_id() -> str:
    """Different after every boot of this machine; "" when unknown."""
    if not _LINUX:
        return uuid if _UUID.fullmatch(uuid := tool_output("sysctl", "-n", "kern.bootsessionuuid").strip()) else ""
    with contextlib.suppress(OSError):
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return ""


def same_boot(one: str, other: str) -> bool:
    """They are not known to be the ids of different boots."""
    return "" in (one, other) or one == other


def start_time(pid: int) -> str | None:
    """When process `pid` started, comparable only for equality within one boot; None when gone or a zombie. Raises
    OSError or subprocess.SubprocessError where that is not known, which `known_start` gives as ""."""
    if pid <= 0:
        return None
    if _LINUX:
        return _linux_start(pid)
    _, output = run_tool("ps", "-o", "stat=,lstart=", "-p", str(pid))
    if match := _STATE_AND_START.fullmatch(output):
        return None if match[1].startswith("Z") else " ".join(match[2].split())
    # Also a ps that fails prints nothing.
    if exists(pid):
        raise OSError(f"ps shows no start of process {pid}: {output[:80]!r}")
    return None


def known_start(pid: int) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return start_time(pid) or ""
    return ""


def alive(pid: int, start: str) -> bool:
    """`pid` is still the process that started at `start`, not a later one or a zombie. Where the system does not tell,
    or it was not known when that started (""), an existing one counts as alive: a run is ended only on certainty."""
    try:
        started = start_time(pid)
    except (OSError, subprocess.SubprocessError):
        return exists(pid)
    return started is not None and start in ("", started)


def exists(pid: int) -> bool:
    """There is a process `pid`, whichever it is."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def with_nonce(nonce: str) -> list[Process]:
    """The processes with `nonce` as FLIGHTDECK_NONCE, and for a run's nonce those of its attempts, `<nonce>.<attempt>`;
    without zombies and the caller. Sees only processes that the caller may inspect: its own user's, or all as root."""
    if not nonce:
        raise ValueError("an empty nonce would match nothing and prove nothing")
    groups = [group for name, group in with_any_nonce().items() if name == nonce or name.startswith(f"{nonce}.")]
    return [process for group in groups for process in group]


def with_family(marked: Iterable[Process], leaders: Mapping[int, str | float]) -> list[Process]:
    """`marked`, the sessions that `leaders` lead or led, and all descendants of both; without zombies and the caller.
    `leaders`: pid → its start time, or a time when it was there, s since the epoch. Raises OSError or
    subprocess.SubprocessError when the processes could not be listed: that proves nothing.

    Not every process shows its environment: macOS hides those of Apple's own programs (XNU, sysctl KERN_PROCARGS2), and
    any program may clear its own. Such a one that has a session of its own and has outlived its parent is not found."""
    by_pid = {process.pid: process for process in marked}
    sessions = {pid for pid, start in leaders.items() if pid > 1 and _leads(pid, start)}
    tree = process_table()
    if any(start_time(pid) is not None for pid in sessions - tree.keys()):
        raise OSError("the list of processes has not all of them")
    members = _family(set(by_pid) | sessions, sessions, tree)
    network = _network("self") if _LINUX else None
    for pid in members & tree.keys() - by_pid.keys() - {os.getpid()}:
        process = _linux_process(pid, network) if _LINUX else Process(pid, command_of(pid) or "?")
        if process is not None:
            by_pid[pid] = process
    return list(by_pid.values())


def _family(pids: set[int], sessions: set[int], table: Mapping[int, ProcessRow]) -> set[int]:
    """`pids`, the members of `sessions` and all descendants of both."""
    members, before = set(pids), -1
    while before != len(members):
        before = len(members)
        members |= {pid for pid, row in table.items() if row.parent in members or row.session in sessions} - {1}
    return members


def family_activity(leader: int) -> tuple[dict[int, float], bool]:
    """The CPU time, s, of each process of the session that `leader` leads and below it, on Linux with that of children
    that have ended, and whether one is stopped, by a signal or a debugger. Raises OSError, ValueError,
    subprocess.SubprocessError."""
    table = process_table()
    family = _family({leader}, {leader}, table) & table.keys()
    return {pid: table[pid].cpu_s for pid in family}, any(table[pid].state[:1] in "Tt" for pid in family)


def ps_time_s(text: str) -> float:
    """`[[dd-]hh:]mm:ss[.ff]` of ps as seconds; 0 for anything else."""
    days, _, clock = text.rpartition("-")
    try:
        parts = reversed(clock.split(":"))
        return 86_400 * int(days or 0) + sum(float(part) * 60.0**place for place, part in enumerate(parts))
    except ValueError:
        return 0.0


def variables_of(pids: Iterable[int], *names: str) -> dict[int, dict[str, str]]:
    """The values of these variables in those of the processes that have them all, seen as by `with_nonce`, by pid."""
    if _LINUX:
        return {pid: values for pid in pids if (values := linux_values(pid, names)) is not None}
    wanted = set(pids)
    return {process.pid: values for process, values in _ps_carrying(names, wanted) if process.pid in wanted}


def _leads(pid: int, start: str | float) -> bool:
    """A pid that another process has by now leads nothing of ours; a session whose leader is gone keeps its number."""
    started = start_time(pid)
    if started is None or isinstance(start, str):
        return started in (None, start)
    # On Linux a start time is not known only of a process that has ended.
    return not _LINUX and calendar.timegm(time.strptime(started, "%a %b %d %H:%M:%S %Y")) <= start


def with_variables(variables: dict[str, str]) -> list[Process]:
    """The processes whose environment holds all of `variables`, seen as by `with_nonce`."""
    return [process for process, values in _carrying(*variables) if values == variables]


def with_any_nonce() -> dict[str, list[Process]]:
    """The processes of every attempt on this machine, by its nonce, seen as by `with_nonce`."""
    by_nonce: dict[str, list[Process]] = {}
    for process, values in _carrying(NONCE_VARIABLE):
        by_nonce.setdefault(values[NONCE_VARIABLE], []).append(process)
    return by_nonce


def pids_of_runs() -> set[int]:
    return {process.pid for group in with_any_nonce().values() for process in group}


def command_of(pid: int) -> str | None:
    """A process's command line; None when it is gone."""
    if not _LINUX:
        return tool_output("ps", "-ww", "-o", "command=", "-p", str(pid)).strip() or None
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return None


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


def kill_all(targets: Iterable[Process]) -> None:
    """KILL to each that is still there and may be killed: a descendant may be another user's (sudo)."""
    for process in targets:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)


def kill_with_nonce(nonce: str) -> bool:
    """KILL every process with this nonce; False when some are left all the same."""
    for scan in range(_MAX_SCANS):
        if not (left := with_family(with_nonce(nonce), {})):
            return True
        kill_all(left)
        time.sleep(_DYING_S * scan)
    return False


def linux_pids() -> list[int]:
    return [int(name) for name in os.listdir(_PROC) if name.isdigit()]  # noqa: PTH208


def linux_stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the state on, the third in proc(5); none when the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123  (hundreds, at every telemetry sample)
            # The command's name may hold spaces and brackets: fields are counted from the last bracket.
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def linux_stats(passed_over: Collection[int] = ()) -> dict[int, list[bytes]]:
    return {pid: fields for pid in linux_pids() if pid not in passed_over and (fields := linux_stat(pid))}


def linux_tcp() -> list[list[str]]:
    """The columns of the tables of proc_pid_net(5) with TCP's sockets, also those over IPv6. Raises OSError."""
    tables = (_PROC / "net/tcp", _PROC / "net/tcp6")
    rows = [row.split() for table in tables if table.exists() for row in table.read_text().splitlines()[1:]]
    return [row for row in rows if len(row) > 9]


def _linux_start(pid: int) -> str | None:
    fields = linux_stat(pid)
    return fields[19].decode() if fields and fields[0] not in _ENDED else None


def _carrying(*names: str) -> Iterator[tuple[Process, dict[str, str]]]:
    """Each process that has all of these variables, with their values; without zombies and the caller."""
    if not _LINUX:
        yield from (carrier for carrier in _ps_carrying(names) if carrier[0].pid != os.getpid())
        return
    network = _network("self")
    for pid in linux_pids():
        values = linux_values(pid, names) if pid != os.getpid() else None
        if values is not None and (process := _linux_process(pid, network)) is not None:
            yield process, values


def linux_values(pid: int, names: tuple[str, ...]) -> dict[str, str] | None:
    """None where one is missing, or the environment cannot be read."""
    try:
        environment = b"\0" + (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return None
    values = {}
    for name in names:
        _, separator, rest = environment.partition(f"\0{name}=".encode())
        if not separator:
            return None
        values[name] = rest.partition(b"\0")[0].decode(errors="replace")
    return values


def _linux_process(pid: int, network: str | None) -> Process | None:
    command = command_of(pid)
    # A process in a container with its own network counts as another machine's.
    if command is None or _linux_start(pid) is None or _network(str(pid)) != network:
        return None
    return Process(pid, command)


def _network(pid: str) -> str | None:
    """A process's network namespace; None when it cannot be read."""
    try:
        return os.readlink(_PROC / pid / "ns" / "net")  # noqa: PTH115  (a name, not a path)
    except OSError:
        return None


class ProcessRow(NamedTuple):
    parent: int
    session: int
    state: str
    cpu_s: float
    rss_bytes: int
    start: str
    """As `start_time` gives it."""


def process_table(passed_over: Collection[int] = ()) -> dict[int, ProcessRow]:
    """All processes by pid, zombies apart, and on Linux without those pids. Raises as `own_list` does."""
    if _LINUX:
        return {pid: _linux_row(stat) for pid, stat in linux_stats(passed_over).items() if stat[0] not in _ENDED}
    table = {}
    for line in own_list("ps", "-ax", "-o", "pid=,ppid=,stat=,rss=,time=,lstart="):
        try:
            pid, parent, state, rss, used, start = line.split(None, 5)
            start = " ".join(start.split())
            row = ProcessRow(int(parent), _session(int(pid)), state, ps_time_s(used), int(rss) * 1024, start)
        except ValueError as error:
            raise OSError("ps -ax has not listed all processes: columns are missing") from error
        if not state.startswith("Z"):
            table[int(pid)] = row
    return table


def _linux_row(stat: list[bytes]) -> ProcessRow:
    cpu_s = sum(map(int, stat[11:15])) / os.sysconf("SC_CLK_TCK")
    rss_bytes = int(stat[21]) * os.sysconf("SC_PAGE_SIZE")
    return ProcessRow(int(stat[1]), int(stat[3]), stat[0].decode(), cpu_s, rss_bytes, stat[19].decode())


def _session(pid: int) -> int:
    """From the kernel: the `sess` of macOS's ps is an address, and 0 without privileges."""
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def _ps_carrying(names: tuple[str, ...], pids: Iterable[int] | None = None) -> Iterator[tuple[Process, dict[str, str]]]:
    """As `_carrying`, of all processes or of `pids` alone. Raises as `own_list` does."""
    which = ["-axEww"] if pids is None else ["-Eww", "-p", ",".join(map(str, {*pids, os.getpid()}))]
    for row in (line.split(None, 2) for line in own_list("ps", *which, "-o", "pid=,stat=,command=")):
        if len(row) < 3 or row[1].startswith("Z"):
            continue
        # The command comes first, and may name such a variable itself.
        values = {name: re.findall(f" {name}=({_VALUES_IN_PS.get(name, _NO_BLANK)})", f" {row[2]}") for name in names}
        if all(values.values()):
            command = _ENVIRONMENT_IN_PS.split(row[2], maxsplit=1)[0]
            yield Process(int(row[0]), command), {name: matches[-1] for name, matches in values.items()}


def own_list(*command: str) -> list[str]:
    """The rows of a `ps` whose first column is `pid=`. Raises OSError, subprocess.SubprocessError for a list that
    failed, was cut, or lacks the caller itself: what else it lacks may be alive."""
    code, output = run_tool(*command)
    *rows, torn = output.split("\n")
    pids = [row.split(None, 1)[:1] for row in rows]
    if code or torn or [str(os.getpid())] not in pids or not all(pid and _PID.fullmatch(pid[0]) for pid in pids):
        raise OSError(f"{' '.join(command[:2])} has not listed all processes")
    return rows


def tool_output(*command: str) -> str:
    """A system tool's output, "" for one that is missing or takes longer than 5 s."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return run_tool(*command, limit_s=5.0)[1]
    return ""


def run_tool(*command: str, limit_s: float | None = None) -> tuple[int, str]:
    """A system tool's exit code and output, in the C locale and in UTC: `ps` prints start times in the current time
    zone, and a Mac that travels would take a running process for another one. Raises OSError, SubprocessError."""
    finished = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=limit_s or _TOOL_TIMEOUT_S,
        env={**os.environ, "LC_ALL": "C", "TZ": "UTC"},
        check=False,
    )
    return finished.returncode, finished.stdout.decode(errors="replace")


if __name__ == "__main__":
    sys.exit(0 if kill_with_nonce(sys.argv[1]) else 1)
