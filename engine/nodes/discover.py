"""Hosts that could be nodes: those in ~/.ssh/config, and those that say by Bonjour that they let ssh in."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config.draft import checked_host
from engine.config.faults import Faults
from engine.config.hostfile_import import read_hostfile
from engine.config.places import host_form
from engine.errors import ConfigError, InputError
from engine.nodes.ssh_hosts import SshHost, ssh_hosts
from engine.security.hosts import LOCAL, SshTarget
from engine.security.sanitise import sanitise

if TYPE_CHECKING:
    from zeroconf import ServiceStateChange, Zeroconf
    from zeroconf.asyncio import AsyncServiceInfo

SERVICE = "_ssh._tcp.local."
INTERFACES_VARIABLE = "FLIGHTDECK_BONJOUR"
"""Addresses of the interfaces on which Bonjour asks, with commas; not set: all; "off": none."""
BONJOUR_S = 3.0
_HOST_LIMIT = 256


@dataclass(frozen=True)
class FoundHost:
    """A host that could be a node."""

    name: str
    """What a person calls it: an alias, or the first part of its name."""
    ssh: str
    """`[user@]host[:port]`, as a configuration has it; 127.0.0.1 for this machine."""
    sources: tuple[str, ...]
    """ "given", "ssh config", "Bonjour", "this machine"."""
    about: str = ""
    """What else is known, one line, safe to show."""
    ips: tuple[str, ...] = ()
    """Where a hostfile gives them; else they are chosen at launch."""
    rdma: tuple[str | None, ...] | None = None

    @property
    def here(self) -> bool:
        return self.ssh == LOCAL


def given(hosts: Iterable[str]) -> list[FoundHost]:
    """Hosts as a person names them, each once. Raises InputError for what is none."""
    return [FoundHost(_name(checked_host(host)), host, ("given",)) for host in dict.fromkeys(hosts)]


@dataclass(frozen=True)
class Hostfile:
    """What somebody's hostfile says."""

    hosts: list[FoundHost]
    backend: str | None
    env: dict[str, str]


def from_hostfile(path: Path) -> Hostfile:
    """MLX's JSON, or lines of `host:slots`, one host for each rank. Raises ConfigError with all its faults."""
    faults = Faults()
    read = read_hostfile(faults, path)
    hosts = []
    for table in read.tables:
        values = table.known
        if not faults.found and (accepted := host_form(values.get("ssh"))):
            faults.add(table.place, "ssh", values.get("ssh"), accepted)
        if faults.found:
            raise ConfigError(faults.found)
        rdma = values.get("rdma")
        hosts.append(
            FoundHost(
                name=values["name"],
                ssh=values["ssh"],
                sources=("hostfile",),
                ips=tuple(values.get("ips") or ()),
                rdma=tuple(rdma) if rdma else None,
            )
        )
    if faults.found:
        raise ConfigError(faults.found)
    return Hostfile(hosts, read.backend, read.env)


async def discover(
    timeout_s: float = BONJOUR_S, *, ssh_config: bool = True, bonjour: bool = True, here: bool = True
) -> list[FoundHost]:
    """This machine, then what ssh's configuration names, then what answers by Bonjour within `timeout_s`; each host
    once. Names that no ssh may be given are left out."""
    found = [this_machine()] if here else []
    known: dict[str, str] = {}
    if ssh_config:
        for entry in _distinct(await asyncio.to_thread(ssh_hosts)):
            if not _own_alias(entry):
                found.append(_of_alias(entry))
                known.setdefault((entry.hostname or entry.alias).lower(), entry.alias)
    if bonjour:
        for host in await _bonjour(timeout_s):
            alias = known.get(SshTarget.parse(host.ssh).host.lower())
            _merge(found, replace(host, ssh=alias) if alias is not None else host)
    return found


def this_machine() -> FoundHost:
    """The head as a node, without ssh."""
    return FoundHost(socket.gethostname().partition(".")[0] or "head", LOCAL, ("this machine",))


def _distinct(entries: Iterable[SshHost]) -> list[SshHost]:
    """`Host ultra 10.0.0.7` names one host twice: the first name counts."""
    seen: dict[tuple[str, str | None, str | None], SshHost] = {}
    for entry in entries:
        seen.setdefault(((entry.hostname or entry.alias).lower(), entry.user, entry.port), entry)
    return [entry for entry in seen.values() if not host_form(entry.alias)]


def _merge(found: list[FoundHost], host: FoundHost) -> None:
    for number, known in enumerate(found):
        if known.ssh.lower() == host.ssh.lower():
            sources = tuple(dict.fromkeys(known.sources + host.sources))
            found[number] = replace(known, sources=sources, about=known.about or host.about)
            return
    found.append(host)


def _of_alias(host: SshHost) -> FoundHost:
    told = [f"{name} {value}" for name, value in (("user", host.user), ("at", host.hostname)) if value is not None]
    return FoundHost(_name(SshTarget.parse(host.alias)), host.alias, ("ssh config",), _shown(", ".join(told)))


def _own_alias(host: SshHost) -> bool:
    """An entry for this machine itself; one with another port is a machine inside of it."""
    return (host.hostname or host.alias).lower() in _own_names() and host.port in (None, "22")


def _own_names() -> set[str]:
    name = socket.gethostname().lower()
    short = name.partition(".")[0]
    return {name, short, f"{short}.local"}


def _own_address(address: str) -> bool:
    """Whether the address is one of this machine's: the system would send from it to itself. Nothing is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        own.connect((address, 9))
        return bool(own.getsockname()[0] == address)
    return False


def _name(target: SshTarget) -> str:
    return target.host if is_address(target.host) else target.host.partition(".")[0]


def is_address(host: str) -> bool:
    """Whether it is an address and no name."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return False


def _shown(text: str) -> str:
    return sanitise(text.encode(errors="replace"), 80)


async def _bonjour(timeout_s: float) -> list[FoundHost]:
    """Who answers within `timeout_s`; nobody where there is no network to ask on."""
    interfaces = os.environ.get(INTERFACES_VARIABLE, "")
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

    def heard(zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        if name not in asking and len(asking) < _HOST_LIMIT:
            info = AsyncServiceInfo(service_type, name)
            asking[name] = (info, asyncio.ensure_future(info.async_request(zeroconf, timeout_s * 1000)))

    browser = AsyncServiceBrowser(network, SERVICE, handlers=[heard])
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
    own = server.lower() in _own_names() or any(map(_own_address, service.parsed_addresses()))
    about = _shown(service.name.removesuffix(f".{SERVICE}"))
    if own and not port:
        return FoundHost(_name(target), LOCAL, ("Bonjour",), about)
    return FoundHost(_name(target), str(target), ("Bonjour",), about)
