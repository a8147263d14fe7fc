"""The `facts` probe: what a node is and has. Everything is read at once, and each with its own time limit: what hangs
(a driver, a dead network disk, a build of mlx that crashes on import) costs its own facts, and `unknown` says how it
ended. The system's output is parsed on the head."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.node.probes import content, nearest

LIMIT_S = 4.0
MLX_LIMIT_S = 8.0
"""A Mac that wakes, or one whose disk is cold, takes seconds to import mlx."""
TEXT_LIMIT = 262144
TOOLS = os.pathsep.join([os.environ.get("PATH", ""), "/usr/bin", "/bin", "/usr/sbin", "/sbin"])
MLX = """
import sys
if sys.path and sys.path[0] == "":
    del sys.path[0]
import json
import mlx.core as mx
device = mx.default_device().type.name
info, gpus = {}, []
if device == "gpu":
    info = mx.device_info() if hasattr(mx, "device_info") else mx.metal.device_info()
limit = info.get("max_recommended_working_set_size")
if device == "gpu" and hasattr(mx, "cuda") and mx.cuda.is_available():
    gpus = [mx.device_info(mx.Device(mx.gpu, number)) for number in range(mx.device_count(mx.gpu))]
    limit = mx.get_memory_limit()
backends = [name for name in ("ring", "jaccl", "jaccl-ring", "nccl", "mpi") if mx.distributed.is_available(name)]
print(json.dumps({"gpu": device, "backends": backends, "working_set": limit, "gpus": gpus}))
"""
MLX_CUDA = ("mlx-cuda-13", "mlx-cuda-12")
"""Packages with MLX's CUDA build."""
MAC_COMMANDS = {
    "sysctl": ["sysctl", "hw.memsize", "hw.model", "hw.ncpu", "machdep.cpu.brand_string", "vm.swapusage", "hw"],
    # By itself: some versions of sysctl stop at the first name that they do not know.
    "sysctl_gpu": ["sysctl", "iogpu.wired_limit_mb"],
    "vm_stat": ["vm_stat"],
    "sw_vers": ["sw_vers"],
    "profile": ["system_profiler", "SPDisplaysDataType", "-json"],
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
    "nvidia_smi": ["nvidia-smi", "--query-gpu=name,memory.total,uuid,driver_version", "--format=csv,noheader,nounits"],
    # By themselves: a driver that does not know one of these columns prints none.
    "nvidia_smi_more": ["nvidia-smi", "--query-gpu=uuid,compute_cap,mig.mode.current", "--format=csv,noheader,nounits"],
    "nvidia_smi_table": ["nvidia-smi"],
}
LINUX_FILES = {
    "cpuinfo": "/proc/cpuinfo",
    "meminfo": "/proc/meminfo",
    "os_release": "/etc/os-release",
    "product": "/sys/class/dmi/id/product_name",
    "board": "/proc/device-tree/model",
    "platform_profile": "/sys/firmware/acpi/platform_profile",
}


class Query(threading.Thread):
    """The value of a function, or the output of a program, None when there is no such program: in a thread of its own,
    so that one without an answer holds up nothing else."""

    def __init__(self, name: str, asked: Callable[[], Any] | list[str], limit_s: float = LIMIT_S) -> None:
        super().__init__(name=name, daemon=True)
        self.asked = asked
        self.limit_s = limit_s
        self.command = " ".join(asked) if isinstance(asked, list) else name
        self.answer: Any = None
        self.failure: dict[str, Any] | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        try:
            self.answer = self.output(self.asked) if isinstance(self.asked, list) else self.asked()
        except Exception as error:
            self.failure = {"exit_code": 1, "stderr": f"{type(error).__name__}: {error}"}

    def output(self, argv: list[str]) -> str | None:
        program = shutil.which(argv[0], path=TOOLS)
        if program is None:
            return None
        self.process = subprocess.Popen(
            [program, *argv[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "LC_ALL": "C"},
        )
        out, err = self.process.communicate()
        if self.process.returncode:
            self.failure = {"exit_code": self.process.returncode, "stderr": err[-2048:].decode(errors="replace")}
        return out[:TEXT_LIMIT].decode(errors="replace")

    def give_up(self) -> None:
        """End its program. Nothing can end a thread that waits for a disk; the process ends without it."""
        if self.process is not None:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def unknown(self) -> dict[str, Any] | None:
        """How it ended without an answer; None when it answered, or there is no such thing on this node."""
        if self.is_alive():
            return {"command": self.command, "late_s": self.limit_s}
        return {"command": self.command, **self.failure} if self.failure is not None else None


def listed(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))[:256]  # noqa: PTH208
    except OSError:
        return []


def files_below(directory: str, names: list[str]) -> list[dict[str, str]]:
    """The files of these names in each folder of `directory`."""
    folders = []
    for entry in listed(directory):
        texts = {name: content(f"{directory}/{entry}/{name}") for name in names}
        folders.append({"name": entry, **{name: text.strip() for name, text in texts.items() if text}})
    return folders


def version(distribution: str) -> str | None:
    # It takes as long to import as all the rest of an agent.
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def disk(directory: str) -> list[int]:
    """(free, total) bytes on the disk of the directory, or of the nearest parent that there is."""
    usage = shutil.disk_usage(nearest(Path(directory).expanduser()))
    return [usage.free, usage.total]


def user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name


def zones() -> list[dict[str, str]]:
    names = [f"{of}{what}" for of in ("", *(f"trip_point_{point}_" for point in range(6))) for what in ("type", "temp")]
    return [zone for zone in files_below("/sys/class/thermal", names) if zone["name"].startswith("thermal_zone")]


def infiniband() -> list[dict[str, Any]]:
    root = "/sys/class/infiniband"
    devices = []
    for device in listed(root):
        port = f"{root}/{device}/ports/1"
        gids = [content(f"{port}/gids/{number}") for number in listed(f"{port}/gids")]
        devices.append({"name": device, "state": content(f"{port}/state"), "gids": [gid.strip() for gid in gids]})
    return devices


def addresses() -> list[dict[str, Any]]:
    """Where there is no `ip`: each interface's first address, in the form that `ip -j addr` prints."""
    import fcntl

    interfaces = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            entry: dict[str, Any] = {"ifname": name, "operstate": content(f"/sys/class/net/{name}/operstate").strip().upper()}  # noqa: E501  # fmt: skip
            master = f"/sys/class/net/{name}/master"
            if os.path.islink(master):  # noqa: PTH114
                entry["master"] = os.path.basename(os.readlink(master))  # noqa: PTH115, PTH119
            with contextlib.suppress(OSError):
                # SIOCGIFADDR, SIOCGIFNETMASK
                address, mask = (fcntl.ioctl(asking.fileno(), number, request)[20:24] for number in (0x8915, 0x891B))
                prefix = bin(int.from_bytes(mask, "big")).count("1")
                entry["addr_info"] = [{"family": "inet", "local": socket.inet_ntoa(address), "prefixlen": prefix}]
            interfaces.append(entry)
    return interfaces


def queries(system: str, directory: str, framework: str) -> list[Query]:
    # MLX in a process of its own: one that crashes on import, or hangs, must not take the rest with it.
    importing = Query("mlx_import", [sys.executable, "-c", MLX], MLX_LIMIT_S)
    importing.command = "import mlx"
    of_mlx = {"mlx": "mlx", "mlx_lm": "mlx-lm", **{name: name for name in MLX_CUDA}}
    versions = of_mlx if framework == "mlx" else {"torch": "torch"}
    common: list[Query] = [
        *([importing] if framework == "mlx" else []),
        Query("disk", lambda: disk(directory)),
        Query("user", user),
        Query("home", lambda: os.path.expanduser("~")),  # noqa: PTH111
        Query("versions", lambda: {name: version(package) for name, package in versions.items()}),
    ]
    if system == "Darwin":
        return [*common, *(Query(name, argv) for name, argv in MAC_COMMANDS.items())]
    if system != "Linux":
        return common
    power_files = ["type", "online", "capacity", "status", "scope"]
    return [
        *common,
        *(Query(name, argv) for name, argv in LINUX_COMMANDS.items()),
        *(Query(name, functools.partial(content, path)) for name, path in LINUX_FILES.items()),
        Query("addresses", addresses),
        Query("zones", zones),
        Query("infiniband", infiniband),
        Query("power_supply", lambda: files_below("/sys/class/power_supply", power_files)),
    ]


def probe_facts(directory: str, framework: str = "mlx") -> dict[str, Any]:
    """`answers` by name, and `unknown` by name: the `command` with its `late_s`, or its `exit_code` and `stderr`. The
    free space is that of the disk of `directory`. MLX is asked about for a job of its own alone."""
    started = time.monotonic()
    usable = getattr(os, "sched_getaffinity", None)
    system = os.uname()
    asked = queries(system.sysname, directory, framework)
    for query in asked:
        query.start()
    answers, unknown = {}, {}
    for query in sorted(asked, key=lambda query: query.limit_s):
        query.join(max(0.0, started + query.limit_s - time.monotonic()))
        if (problem := query.unknown()) is not None:
            unknown[query.name] = problem
        if query.is_alive():
            query.give_up()
        elif query.answer is not None:
            answers[query.name] = query.answer
    return {
        "system": system.sysname,
        "release": system.release,
        "machine": system.machine,
        "hostname": socket.gethostname(),
        "python": sys.version.split()[0],
        "cores": len(usable(0)) if usable else os.cpu_count(),
        "answers": answers,
        "unknown": unknown,
        "clock": time.time(),
    }
