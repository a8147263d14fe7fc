"""Makes the python of a node a Mac's: each start of it imports this module, by a .pth file of its environment.

sys.platform is "darwin"; what the standard library has on Linux alone is not there; F_FULLFSYNC is, but on an SMB
volume; paths below /Users are found whatever the case of their letters; ctypes finds the functions of libSystem that
are called. MLX and asyncio are Linux's beneath.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import json
import os
import sys
import time
import types
from collections.abc import Callable
from typing import Any

PROC = "/usr/local/libexec/linux/proc"
with open("/usr/local/libexec/mac/mac.json") as file:  # noqa: PTH123
    MAC: dict[str, Any] = json.load(file)
SMB = "/Volumes/smb/"
F_FULLFSYNC = 51
"""XNU, bsd/sys/fcntl.h."""
LINUX_ONLY = {
    "os": "copy_file_range eventfd memfd_create pidfd_open pipe2 posix_fadvise posix_fallocate sched_getaffinity "
    "sched_setaffinity splice",
    "resource": "RUSAGE_THREAD prlimit",
    "signal": "pidfd_send_signal",
    "socket": "SO_PEERCRED TCP_KEEPIDLE TCP_QUICKACK TCP_USER_TIMEOUT",
    "time": "CLOCK_BOOTTIME",
}
"""Module → names that it has on Linux and not on macOS (the standard library's documentation)."""


def without_linux(module: Any) -> None:
    for name in LINUX_ONLY[module.__name__].split():
        vars(module).pop(name, None)


def with_keepalive(module: Any) -> None:
    """macOS names the time until the first probe TCP_KEEPALIVE."""
    module.TCP_KEEPALIVE = module.TCP_KEEPIDLE
    without_linux(module)


def with_full_sync(module: Any) -> None:
    """fcntl(2) of macOS: F_FULLFSYNC fails with ENOTSUP on volumes of a network."""
    original = module.fcntl

    def fcntl(descriptor: Any, command: int, argument: Any = 0) -> Any:
        if command != F_FULLFSYNC:
            return original(descriptor, command, argument)
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        if os.readlink(f"{PROC}/self/fd/{number}").startswith(SMB):  # noqa: PTH115
            raise OSError(errno.ENOTSUP, "Operation not supported")
        os.fsync(number)
        return 0

    module.fcntl, module.F_FULLFSYNC = fcntl, F_FULLFSYNC


def pthread_set_qos_class_self_np(qos_class: int, priority: int) -> int:
    """<pthread/qos.h>"""
    del qos_class, priority
    return 0


def mach_host_self() -> int:
    return 1


def host_statistics(host: int, flavor: int, ticks: Any, count: Any) -> int:
    """HOST_CPU_LOAD_INFO of <mach/host_info.h>: user, system, idle, nice."""
    del host, flavor, count
    with open(f"{PROC}/stat") as file:  # noqa: PTH123
        user, nice, system, idle = map(int, file.readline().split()[1:5])
    for at, value in enumerate((user, system, idle, nice)):
        ticks._obj[at] = value & 0xFFFFFFFF
    return 0


SYSTEM: dict[str, Any] = {
    function.__name__: function for function in (pthread_set_qos_class_self_np, mach_host_self, host_statistics)
}


def with_system(module: Any) -> None:
    original: Any = module.CDLL

    class CDLL(original):  # type: ignore[misc]
        def __init__(self, name: Any, *rest: Any, **options: Any) -> None:
            super().__init__(None if name == "/usr/lib/libSystem.dylib" else name, *rest, **options)

        def __getattr__(self, name: str) -> Any:
            return SYSTEM[name] if name in SYSTEM else super().__getattr__(name)

    module.CDLL = CDLL


def with_gpu(module: Any) -> None:
    """MLX as the `facts` probe asks it; what computes does so on the CPU that there is."""
    if "-c" not in sys.orig_argv:
        return
    gpu = types.SimpleNamespace(type=types.SimpleNamespace(name="gpu"))
    module.default_device = lambda: gpu
    module.device_info = lambda: {"max_recommended_working_set_size": MAC["working_set_bytes"]}


class AfterImport:
    """A finder that changes a module as soon as it has been imported."""

    changes: dict[str, Callable[[Any], None]] = {  # noqa: RUF012
        "ctypes": with_system,
        "fcntl": with_full_sync,
        "mlx.core": with_gpu,
        "resource": without_linux,
        "signal": without_linux,
        "socket": with_keepalive,
    }

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        change = cls.changes.pop(name, None)
        if change is None:
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not cls)
        spec = next(filter(None, found), None)
        if spec is not None:
            spec.loader = Changing(spec.loader, change)  # type: ignore[assignment]
        return spec


class Changing:
    def __init__(self, loader: Any, change: Callable[[Any], None]) -> None:
        self.loader, self.change = loader, change

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self.loader.exec_module(module)
        self.change(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


LISTDIR, LSTAT = os.listdir, os.lstat


def there(path: str) -> bool:
    try:
        LSTAT(path)
    except (OSError, ValueError):
        return False
    return True


def actual(path: Any) -> Any:
    """The path, with the case that its names have on disk."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str) or there(text):
        return path
    whole = os.path.abspath(text)  # noqa: PTH100
    if not whole.startswith("/Users/"):
        return path
    found = "/"
    for name in whole.split("/")[1:]:
        alike = []
        if not there(os.path.join(found, name)):  # noqa: PTH118
            with contextlib.suppress(OSError):
                alike = [each for each in LISTDIR(found) if each.lower() == name.lower()]
        found = os.path.join(found, alike[0] if alike else name)  # noqa: PTH118
    return found


def insensitive(function: Callable[..., Any], paths: int = 1) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **options: Any) -> Any:
        if options.get("dir_fd") is not None or options.get("src_dir_fd") is not None:
            return function(*arguments, **options)
        return function(*map(actual, arguments[:paths]), *arguments[paths:], **options)

    for known in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
        if function in known:
            known.add(wrapped)
    return wrapped


def become_a_mac() -> None:
    sys.platform = "darwin"
    # Read by sysconfig, whose file is named after the platform.
    multiarch = getattr(sys.implementation, "_multiarch", "")
    os.environ.setdefault("_PYTHON_SYSCONFIGDATA_NAME", f"_sysconfigdata_{sys.abiflags}_linux_{multiarch}")
    darwin = MAC["macos"][2]
    names = ("Darwin", MAC["name"], darwin, f"Darwin Kernel Version {darwin}", "arm64")
    os.uname = lambda: os.uname_result(names)
    # Parts of CPython and of a package that only a build for macOS has.
    proxies = types.ModuleType("_scproxy")
    vars(proxies).update(_get_proxy_settings=dict, _get_proxies=dict)
    trust = types.ModuleType("truststore._macos")
    vars(trust).update(_configure_context=None, _verify_peercerts_impl=None)
    sys.modules |= {module.__name__: module for module in (proxies, trust)}
    without_linux(os)
    without_linux(time)
    finder: Any = AfterImport
    for name in [*finder.changes]:
        if name in sys.modules:
            finder.changes.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, finder)
    for name in ("access", "chmod", "listdir", "lstat", "mkdir", "open", "readlink", "remove", "rmdir", "scandir"):
        setattr(os, name, insensitive(getattr(os, name)))
    for name in ("stat", "truncate", "unlink", "utime"):
        setattr(os, name, insensitive(getattr(os, name)))
    for name in ("link", "rename", "replace"):
        setattr(os, name, insensitive(getattr(os, name), 2))
    builtins.open = io.open = insensitive(open)


become_a_mac()
