"""Runs on the node, with the node's own python (any from 3.9) and the standard library: prints facts as one JSON line.

    python - DIRECTORY < facts_script.py

Everything is asked at once, and each with its own time limit: what hangs (a driver, a dead network disk, a build of mlx
that crashes on import) costs its own facts and is named in "late". The system's own words are sent as they are and
read on the head.
"""

from __future__ import annotations

import sys

# Read from stdin, the script would find its modules in the node user's home first, whatever lies there.
if sys.path and sys.path[0] == "":
    del sys.path[0]

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 4.0
MLX_LIMIT_S = 8.0
"""A Mac that wakes, or one whose disk is cold, takes seconds to import mlx."""
TEXT_LIMIT = 262144
FILE_LIMIT = 16384
TOOLS = os.pathsep.join([os.environ.get("PATH", ""), "/usr/bin", "/bin", "/usr/sbin", "/sbin"])
MLX = """
import sys
if sys.path and sys.path[0] == "":
    del sys.path[0]
import json
import mlx.core as mx
device = mx.default_device().type.name
info = {}
if device == "gpu":
    info = mx.device_info() if hasattr(mx, "device_info") else mx.metal.device_info()
backends = [name for name in ("ring", "jaccl", "jaccl-ring", "nccl", "mpi") if mx.distributed.is_available(name)]
print(json.dumps({"gpu": device, "backends": backends, "working_set": info.get("max_recommended_working_set_size")}))
"""
MAC_COMMANDS = {
    "sysctl": ["sysctl", "hw.memsize", "hw.model", "hw.ncpu", "machdep.cpu.brand_string", "vm.swapusage", "hw"],
    # By itself: some versions of sysctl stop at the first name that they do not know.
    "sysctl_gpu": ["sysctl", "iogpu.wired_limit_mb"],
    "vm_stat": ["vm_stat"],
    "sw_vers": ["sw_vers"],
    "profile": ["system_profiler", "SPHardwareDataType", "SPDisplaysDataType", "-json"],
    "thunderbolt": ["system_profiler", "SPThunderboltDataType", "-json"],
    "networksetup": ["networksetup", "-listallhardwareports"],
    "ifconfig": ["ifconfig", "-a"],
    "ibv_devices": ["ibv_devices"],
    "ibv_devinfo": ["ibv_devinfo", "-v"],
    "rdma_ctl": ["rdma_ctl", "status"],
    "pmset_batt": ["pmset", "-g", "batt"],
    "pmset_therm": ["pmset", "-g", "therm"],
    "pmset": ["pmset", "-g"],
    "thermal_pressure": ["notifyutil", "-g", "com.apple.system.thermalpressurelevel"],
}
LINUX_COMMANDS = {
    "ip": ["ip", "-j", "addr"],
    "nvidia_smi": ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"],
}
LINUX_FILES = {
    "cpuinfo": "/proc/cpuinfo",
    "meminfo": "/proc/meminfo",
    "os_release": "/etc/os-release",
    "product": "/sys/class/dmi/id/product_name",
    "board": "/proc/device-tree/model",
    "platform_profile": "/sys/firmware/acpi/platform_profile",
}


class Asked(threading.Thread):
    """One question in a thread of its own, so that one without an answer holds up nothing else."""

    def __init__(self, question: Callable[[], Any], limit_s: float = LIMIT_S) -> None:
        super().__init__(daemon=True)
        self.question = question
        self.limit_s = limit_s
        self.answer: Any = None

    def run(self) -> None:
        try:
            self.answer = self.question()
        except Exception:
            self.answer = None

    def give_up(self) -> None:
        """Nothing can end a thread that waits for a disk; the process leaves without it."""


class Command(Asked):
    """What a program prints; None when there is no such program."""

    def __init__(self, argv: list[str], limit_s: float = LIMIT_S) -> None:
        super().__init__(self.printed, limit_s)
        self.argv = argv
        self.process: subprocess.Popen[bytes] | None = None
        self.code: int | None = None
        self.complaint = ""

    def printed(self) -> str | None:
        program = shutil.which(self.argv[0], path=TOOLS)
        if program is None:
            return None
        self.process = subprocess.Popen(
            [program, *self.argv[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "LC_ALL": "C"},
        )
        out, err = self.process.communicate()
        self.code = self.process.returncode
        self.complaint = err[-2048:].decode(errors="replace")
        return out[:TEXT_LIMIT].decode(errors="replace")

    def give_up(self) -> None:
        if self.process is not None:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)


def content(path: str) -> str | None:
    try:
        with open(path, "rb") as file:  # noqa: PTH123  (as short as can be: this runs on the node)
            return file.read(FILE_LIMIT).decode(errors="replace").strip("\0")
    except OSError:
        return None


def listed(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))[:256]  # noqa: PTH208
    except OSError:
        return []


def files_below(directory: str, names: list[str]) -> list[dict[str, str]]:
    """The files of these names in each folder of `directory`."""
    found = []
    for entry in listed(directory):
        texts = {name: content(f"{directory}/{entry}/{name}") for name in names}
        found.append({"name": entry, **{name: text.strip() for name, text in texts.items() if text}})
    return found


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def disk(directory: str) -> list[int]:
    """(free, total) bytes on the disk of the directory, or of the nearest parent that there is."""
    directory = os.path.expanduser(directory)  # noqa: PTH111
    while not os.path.isdir(directory) and directory != os.path.dirname(directory):  # noqa: PTH112, PTH120
        directory = os.path.dirname(directory)  # noqa: PTH120
    usage = shutil.disk_usage(directory)
    return [usage.free, usage.total]


def user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name


def zones() -> list[dict[str, str]]:
    """Thermal zones with their temperature and trip points."""
    names = ["type", "temp"]
    for point in range(6):
        names += [f"trip_point_{point}_type", f"trip_point_{point}_temp"]
    root = "/sys/class/thermal"
    return [zone for zone in files_below(root, names) if zone["name"].startswith("thermal_zone")]


def infiniband() -> list[dict[str, Any]]:
    root = "/sys/class/infiniband"
    devices = []
    for device in listed(root):
        port = f"{root}/{device}/ports/1"
        gids = [content(f"{port}/gids/{number}") or "" for number in listed(f"{port}/gids")]
        devices.append({"name": device, "state": content(f"{port}/state"), "gids": [gid.strip() for gid in gids]})
    return devices


def addresses() -> list[dict[str, Any]]:
    """Where there is no `ip`: each interface's first address, in the form that `ip -j addr` prints."""
    import fcntl

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            entry: dict[str, Any] = {"ifname": name, "operstate": (content(f"/sys/class/net/{name}/operstate") or "").strip().upper()}  # noqa: E501  # fmt: skip
            master = f"/sys/class/net/{name}/master"
            if os.path.islink(master):  # noqa: PTH114
                entry["master"] = os.path.basename(os.readlink(master))  # noqa: PTH115, PTH119
            try:
                # SIOCGIFADDR, SIOCGIFNETMASK
                address, mask = (fcntl.ioctl(asking.fileno(), number, request)[20:24] for number in (0x8915, 0x891B))
            except OSError:
                pass
            else:
                prefix = bin(int.from_bytes(mask, "big")).count("1")
                entry["addr_info"] = [{"family": "inet", "local": socket.inet_ntoa(address), "prefixlen": prefix}]
            found.append(entry)
    return found


def questions(system: str, directory: str) -> dict[str, Asked]:
    asked: dict[str, Asked] = {
        # In a process of its own: an mlx that crashes on import, or hangs, must not take the rest with it.
        "mlx_import": Command([sys.executable, "-c", MLX], MLX_LIMIT_S),
        "disk": Asked(lambda: disk(directory)),
        "user": Asked(user),
        "home": Asked(lambda: os.path.expanduser("~")),  # noqa: PTH111
        "versions": Asked(lambda: {"mlx": version("mlx"), "mlx_lm": version("mlx-lm")}),
    }
    if system == "Darwin":
        asked.update({name: Command(argv) for name, argv in MAC_COMMANDS.items()})
    elif system == "Linux":
        asked.update({name: Command(argv) for name, argv in LINUX_COMMANDS.items()})
        for name, path in LINUX_FILES.items():
            asked[name] = Asked(lambda path=path: content(path))  # type: ignore[misc]
        asked["addresses"] = Asked(addresses)
        asked["zones"] = Asked(zones)
        asked["infiniband"] = Asked(infiniband)
        names = ["type", "online", "capacity", "status", "scope"]
        asked["power_supply"] = Asked(lambda: files_below("/sys/class/power_supply", names))
    return asked


def main() -> None:
    began = time.monotonic()
    usable = getattr(os, "sched_getaffinity", None)
    said: dict[str, Any] = {
        "flightdeck": "facts",
        "system": platform.system(),
        "release": platform.release(),
        "machine": platform.machine(),
        "hostname": socket.gethostname(),
        "python": platform.python_version(),
        "cores": len(usable(0)) if usable else os.cpu_count(),
        "late": [],
        "answers": {},
    }
    asked = questions(said["system"], sys.argv[1])
    for question in asked.values():
        question.start()
    for name, question in sorted(asked.items(), key=lambda item: item[1].limit_s):
        question.join(max(0.0, began + question.limit_s - time.monotonic()))
        if question.is_alive():
            question.give_up()
            said["late"].append(name)
        elif question.answer is not None:
            said["answers"][name] = question.answer
    importing = asked["mlx_import"]
    if isinstance(importing, Command) and importing.code:
        last = importing.complaint.strip().splitlines()[-1:]
        said["mlx_problem"] = last[0] if last else f"importing it ended with {importing.code}"
    said["clock"] = time.time()
    sys.stdout.write("\n" + json.dumps(said) + "\n")
    sys.stdout.flush()
    # A thread that waits for a dead disk would keep the interpreter.
    os._exit(0)


if __name__ == "__main__":
    main()
