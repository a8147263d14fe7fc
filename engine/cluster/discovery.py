"""Discovery for `init`, before there is a configuration: hosts from ~/.ssh/config, Bonjour, a hostfile or the
command line, and on each host a python that has mlx and mlx-lm."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import re
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from engine.cluster.transport.base import Completed, Transport
from engine.cluster.transport.ssh_config import SshHost, ssh_hosts
from engine.config.draft import DraftNode, checked_host, unique_names
from engine.config.formats import host_form
from engine.config.imported_hosts import read_hostfile
from engine.errors import (
    ConfigError,
    ConfigFault,
    HostKeyUnknown,
    InputError,
    LoginRefused,
    NodeUnreachable,
    memory_text,
)
from engine.models import HostKeyOffer
from engine.security.identifiers import LOCAL, SshTarget
from engine.security.paths import path_fault
from engine.security.sanitise import plain

if TYPE_CHECKING:
    from zeroconf import ServiceStateChange, Zeroconf
    from zeroconf.asyncio import AsyncServiceInfo

    from engine.config.models import RdmaRow


BONJOUR_SERVICE = "_ssh._tcp.local."
BONJOUR_VARIABLE = "FLIGHTDECK_BONJOUR"
"""Addresses of the interfaces on which Bonjour asks, with commas; not set: all; "off": none."""
BONJOUR_S = 3.0
_HOST_LIMIT = 256
_SHOWN = 80


@dataclass(frozen=True)
class FoundHost:
    """A host that could be a node."""

    name: str
    """Name for people: an alias, or the first part of its name."""
    ssh: str
    """`[user@]host[:port]`, as a configuration has it; 127.0.0.1 for this machine."""
    sources: tuple[str, ...]
    """ "given", "ssh config", "Bonjour", "this machine"."""
    about: str = ""
    """Other known details, one line, safe to show."""
    ips: tuple[str, ...] = ()
    """Where a hostfile gives them; else they are chosen at launch."""
    rdma: RdmaRow | None = None

    @property
    def here(self) -> bool:
        return self.ssh == LOCAL


def hosts_from_names(hosts: Iterable[str]) -> list[FoundHost]:
    """Hosts as a person names them, each once. Raises InputError for what is none."""
    return [FoundHost(_name(checked_host(host)), host, ("given",)) for host in dict.fromkeys(hosts)]


@dataclass(frozen=True)
class Hostfile:
    """A hostfile of MLX's or of another launcher."""

    hosts: list[FoundHost]
    backend: str | None
    env: dict[str, str]


def hosts_from_hostfile(path: Path) -> Hostfile:
    """MLX's JSON, or lines of `host:slots`, one host for each rank. Raises ConfigError with all its faults."""
    faults: list[ConfigFault] = []
    read = read_hostfile(path, faults)
    for table in [] if faults else read.tables:
        if accepted := host_form(table.get("ssh")):
            table.refuse("ssh", accepted, table.get("ssh"))
    if faults:
        raise ConfigError(faults)
    hosts = [
        FoundHost(
            name=table["name"],
            ssh=table["ssh"],
            sources=("hostfile",),
            ips=tuple(table.get("ips") or ()),
            rdma=tuple(table.get("rdma") or ()) or None,
        )
        for table in read.tables
    ]
    return Hostfile(hosts, read.backend, read.env)


async def discover(timeout_s: float = BONJOUR_S, *, ssh_config: bool = True, bonjour: bool = True) -> list[FoundHost]:
    """This machine, then what ssh's configuration names, then what answers by Bonjour within `timeout_s`; each host
    once. Names that no ssh may be given are left out."""
    # The head as a node, without ssh.
    hosts = {LOCAL: FoundHost(socket.gethostname().partition(".")[0] or "head", LOCAL, ("this machine",))}
    aliases: dict[str, str] = {}
    if ssh_config:
        for entry in _distinct(await asyncio.to_thread(ssh_hosts)):
            # One for this machine, but with another port, is a machine inside of it.
            if (entry.hostname or entry.alias).lower() not in _own_names() or entry.port not in (None, "22"):
                details = (("user", entry.user), ("at", entry.hostname))
                about = plain(", ".join(f"{name} {value}" for name, value in details if value is not None), _SHOWN)
                name = _name(SshTarget.parse(entry.alias))
                hosts[entry.alias.lower()] = FoundHost(name, entry.alias, ("ssh config",), about)
                aliases.setdefault((entry.hostname or entry.alias).lower(), entry.alias)
    for host in await _bonjour(timeout_s) if bonjour else []:
        ssh = aliases.get(SshTarget.parse(host.ssh).host.lower(), host.ssh)
        listed = hosts.setdefault(ssh.lower(), replace(host, ssh=ssh))
        sources = tuple(dict.fromkeys(listed.sources + host.sources))
        hosts[ssh.lower()] = replace(listed, sources=sources, about=listed.about or host.about)
    return list(hosts.values())


def _distinct(entries: Iterable[SshHost]) -> list[SshHost]:
    """`Host ultra 10.0.0.7` names one host twice: the first name counts."""
    seen: dict[tuple[str, str | None, str | None], SshHost] = {}
    for entry in entries:
        seen.setdefault(((entry.hostname or entry.alias).lower(), entry.user, entry.port), entry)
    return [entry for entry in seen.values() if not host_form(entry.alias)]


def _own_names() -> set[str]:
    name = socket.gethostname().lower()
    short = name.partition(".")[0]
    return {name, short, f"{short}.local"}


def _own_address(address: str) -> bool:
    """True if the address is one of this machine's: the system would send from it to itself. Nothing is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.connect((address, 9))
        return bool(sender.getsockname()[0] == address)
    return False


def _name(target: SshTarget) -> str:
    return target.host if is_address(target.host) else target.host.partition(".")[0]


def is_address(host: str) -> bool:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return False


async def _bonjour(timeout_s: float) -> list[FoundHost]:
    """Who answers within `timeout_s`; nobody where there is no network to ask on."""
    interfaces = os.environ.get(BONJOUR_VARIABLE, "")
    if interfaces == "off":
        return []
    # 40 ms, and only `init` needs it.
    from zeroconf import Error, InterfaceChoice, IPVersion
    from zeroconf.asyncio import AsyncZeroconf

    chosen: InterfaceChoice | list[str] = InterfaceChoice.All
    if interfaces:
        chosen = [address for address in map(str.strip, interfaces.split(",")) if _own_address(address)]
        if not chosen:
            return []
    try:
        network = AsyncZeroconf(interfaces=chosen, ip_version=IPVersion.V4Only)
    except (OSError, RuntimeError, ValueError, Error):
        return []
    try:
        services = await _listen(network.zeroconf, timeout_s)
    finally:
        await network.async_close()
    return [host for service in services if (host := _of_service(service)) is not None]


async def _listen(network: Zeroconf, timeout_s: float) -> Sequence[AsyncServiceInfo]:
    from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo

    asking: dict[str, tuple[AsyncServiceInfo, asyncio.Task[bool]]] = {}

    def on_change(zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        if name not in asking and len(asking) < _HOST_LIMIT:
            info = AsyncServiceInfo(service_type, name)
            asking[name] = (info, asyncio.ensure_future(info.async_request(zeroconf, timeout_s * 1000)))

    browser = AsyncServiceBrowser(network, BONJOUR_SERVICE, handlers=[on_change])
    try:
        await asyncio.sleep(timeout_s)
    finally:
        await browser.async_cancel()
        tasks = [task for _, task in asking.values()]
        for task in tasks:
            task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    return [info for (info, _), answer in zip(asking.values(), answers, strict=True) if answer is True]


def _of_service(service: AsyncServiceInfo) -> FoundHost | None:
    """None for a name that ssh must not be given."""
    server = (service.server or "").rstrip(".")
    port = f":{service.port}" if service.port not in (None, 22) else ""
    try:
        target = SshTarget.parse(server + port)
    except InputError:
        return None
    this_machine = server.lower() in _own_names() or any(map(_own_address, service.parsed_addresses()))
    about = plain(service.name.removesuffix(f".{BONJOUR_SERVICE}"), _SHOWN)
    return FoundHost(_name(target), LOCAL if this_machine and not port else str(target), ("Bonjour",), about)


FIND_PYTHON_LIMIT_S = 30.0
_LINE = 160
_MARK = "flightdeck-init"
_ASK = """
import importlib.metadata, importlib.util, platform
import mlx.core
assert importlib.util.find_spec("mlx_lm")
print(platform.python_version(), *map(importlib.metadata.version, ("mlx", "mlx-lm")))
"""
_PLACES = (
    "mlx/.venv", "mlx/venv", ".venv", "venv", ".flightdeck/environments/*", "venvs/*", ".venvs/*", "envs/*",
    ".virtualenvs/*", "*/.venv", "*/venv",
    ".local/share/uv/tools/mlx-lm", ".local/pipx/venvs/mlx-lm", "miniforge3", "miniforge3/envs/*", "miniconda3",
    "miniconda3/envs/*", "anaconda3/envs/*", ".pyenv/versions/*", "mambaforge/envs/*",
)  # fmt: skip
"""Below the home, each with bin/python; the first that will do is taken."""
_SYSTEM = ("/opt/homebrew/bin/python3", "/usr/local/bin/python3", "/opt/mlx/bin/python", "/opt/*/bin/python")
_SCRIPT = f"""
say() {{ printf '{_MARK}\\t%s\\t%s\\n' "$1" "$2"; }}
ask=$1; shift
say home "$HOME"; say system "$(uname -s)"; say hostname "$(hostname 2>/dev/null || uname -n)"
case "$(uname -s)" in
  Darwin) say chip "$(sysctl -n machdep.cpu.brand_string 2>/dev/null)"
    say memory "$(sysctl -n hw.memsize 2>/dev/null)"; say release "macOS $(sw_vers -productVersion 2>/dev/null)" ;;
  *) say chip "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo 2>/dev/null | head -n 1)"
    say kilobytes "$(sed -n 's/^MemTotal: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo 2>/dev/null)"
    say release "$(. /etc/os-release 2>/dev/null; echo "$PRETTY_NAME")" ;;
esac
try() {{
  [ -x "$1" ] && [ ! -d "$1" ] || return 0
  case "$1" in
    # Apple's stub opens a window that offers the developer tools where they are missing.
    /usr/bin/*) [ "$(uname -s)" != Darwin ] || xcode-select -p >/dev/null 2>&1 || return 0 ;;
  esac
  if versions=$("$1" -c "$ask" </dev/null 2>/dev/null); then say python "$1"; say versions "$versions"; exit 0; fi
  say without "$1"
}}
for python in "$@" {" ".join(f'"$HOME"/{place}/bin/python' for place in _PLACES)} {" ".join(_SYSTEM)}; do
  try "$python"
done
for name in python3 python; do
  if python=$(command -v "$name"); then try "$python"; fi
done
say none
exit 0
"""


@dataclass(frozen=True)
class FoundPython:
    """The python of a host, or why there is none."""

    python: str | None = None
    """`~/…` where it lies in the home."""
    about: str = ""
    """Versions and system, one line."""
    hostname: str | None = None
    problem: str = ""
    """Why there is none, one line."""
    todo: str = ""
    host_key: HostKeyOffer | None = None
    """The key to accept, when that is the problem."""
    login: bool = False
    """The problem is that none of our keys is accepted there."""
    machine: str = ""
    """Chip, memory and system, one line."""
    mac: bool = False

    @property
    def lacks_mlx(self) -> bool:
        """A shell has run there, and found no python that has it."""
        return self.python is None and self.hostname is not None

    def made(self, python: str | None) -> FoundPython:
        """With that of an environment that was made there."""
        return self if python is None else replace(self, python=python, about="environment of Flight Deck", problem="")

    @property
    def answers(self) -> bool:
        """A shell has run there, or the way to one can be opened from here."""
        return self.hostname is not None or self.host_key is not None or self.login


async def find_python(transport: Transport) -> FoundPython:
    """Never raises for a host that cannot answer: `problem` then says why."""
    # On this machine the python that runs us has mlx, as a dependency.
    first = [sys.executable] if transport.target.local else []
    try:
        done = await transport.run(["/bin/sh", "-c", _SCRIPT, "sh", _ASK, *first], timeout_s=FIND_PYTHON_LIMIT_S)
    except NodeUnreachable as error:
        problem = f"{error.what}: {error.why}" if error.why else error.what
        offer = None
        if isinstance(error, HostKeyUnknown):
            offer = HostKeyOffer(target=error.target, key=error.key, fingerprint=error.fingerprint)
        login = isinstance(error, LoginRefused)
        return FoundPython(problem=plain(problem, _LINE), todo=plain(error.todo, _LINE), host_key=offer, login=login)
    except OSError as error:
        return FoundPython(problem=plain(error.strerror or str(error), _LINE))
    if done.code is None:
        return FoundPython(problem=f"no answer within {FIND_PYTHON_LIMIT_S:g} s")
    return parse_find_python(done)


def parse_find_python(done: Completed) -> FoundPython:
    """From the script's output, with whatever a shell's start files printed around it."""
    report: dict[str, str] = {}
    # A line that does not end has been cut off.
    for line in done.stdout.decode(errors="replace").split("\n")[:-1]:
        mark, _, rest = line.partition("\t")
        key, _, value = rest.partition("\t")
        if mark == _MARK:
            report.setdefault(key, value)
    seen = FoundPython(hostname=report.get("hostname"), machine=_machine(report), mac=report.get("system") == "Darwin")
    python = _usable(report.get("python"), report.get("home"))
    if python is not None:
        versions = report.get("versions", "").split()
        names = ("python", "mlx", "mlx-lm")
        installed = [f"{name} {version}" for name, version in zip(names, versions, strict=False)]
        return replace(seen, python=python, about=plain(", ".join(installed), _LINE))
    if "none" not in report:
        what = "no configuration takes its python" if "python" in report else f"its shell ended with {done.code}"
        output = plain(report.get("python", done.exit_output), _LINE)
        return replace(seen, problem=what + (f": {output}" if output else ""))
    problem = "no python with mlx and mlx-lm was found there"
    if "without" in report:
        problem += f" ({plain(report['without'], _LINE)} has none, or cannot import it)"
    page = "docs/cuda.md" if report.get("system") == "Linux" else "docs/quickstart.md, step 2"
    return replace(seen, problem=problem, todo=f"{page}, or set `python` yourself")


def _machine(report: Mapping[str, str]) -> str:
    memory = report.get("memory") or report.get("kilobytes", "")
    count = int(memory) if re.fullmatch(r"[1-9][0-9]{0,15}", memory) else 0
    size = count and memory_text(count if "memory" in report else count * 1024)
    return plain(", ".join(str(part) for part in (report.get("chip"), size, report.get("release")) if part), _LINE)


def draft_nodes(hosts: Sequence[FoundHost], pythons: Sequence[FoundPython]) -> list[DraftNode]:
    """With the host's own name where only an address is known."""
    both = list(zip(hosts, pythons, strict=True))
    names = [
        (probe.hostname or f"node{rank}").partition(".")[0] if is_address(host.name) else host.name
        for rank, (host, probe) in enumerate(both)
    ]
    return [
        DraftNode(
            name=name,
            ssh=host.ssh,
            python=probe.python,
            about=" · ".join(filter(None, (host.about, probe.machine, probe.about))),
            doubt=probe.problem,
            ips=host.ips,
            rdma=host.rdma,
        )
        for name, (host, probe) in zip(unique_names(names), both, strict=True)
    ]


def _usable(python: str | None, home: str | None) -> str | None:
    """The path as a configuration takes it."""
    if python is None or "\ufffd" in python or path_fault(python) is not None or not python.startswith("/"):
        return None
    if home and home != "/" and PurePosixPath(python).is_relative_to(home):
        return f"~/{PurePosixPath(python).relative_to(home)}"
    return python
