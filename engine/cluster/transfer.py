"""Spreads the files of a model or data set over nodes: along a chain, each node from the one before it while that still
receives, directly where they reach each other, else over this machine's connections."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.cluster.agent_client import AgentRequest
from engine.cluster.transport.fleet import Fleet
from engine.config.models import NodeConfig
from engine.errors import FlightDeckError, LaunchError, NodeUnreachable, size_text
from engine.protocol.manifest import CopyFile, HubName, copy_files, path_is_below
from engine.protocol.messages import RequestEnded
from engine.security.audit import audit_log
from engine.security.sanitise import count_or_none, json_object, json_or_none, plain
from engine.snapshots import CopyProgress

PATIENCE_S = 120.0
"""For how long a node that brings nothing is tried again."""
_SILENCE_S = 60.0
_AGAIN_S, _GATHER_S = 1.0, 3.0


class TransferRefused(FlightDeckError):
    """A node cannot take the files, or nobody can give them."""


@dataclass(frozen=True)
class CopyManifest:
    """A copy on one node, as that told; checked."""

    node: NodeConfig
    path: str
    files: tuple[CopyFile, ...]
    revision: str | None = None
    refs: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    """With `verify`: files with another content than their name in the cache says, and links that lead nowhere."""

    @property
    def bytes(self) -> int:
        return sum(file.size for file in {file.digest: file for file in self.files}.values())


async def read_manifest(
    fleet: Fleet,
    node: NodeConfig,
    asked: HubName | str,
    *,
    verify: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> CopyManifest:
    """That of a repository in the node's cache, or of a folder there. Raises TransferRefused, LaunchError,
    NodeUnreachable."""
    request = {"repository": asked} if isinstance(asked, HubName) else {"folder": asked}
    with contextlib.closing(
        await fleet.agent(node).start_probe("manifest", json.dumps({**request, "verify": verify}))
    ) as probe:
        while (report := await next_report(probe, node)).keys() == {"hashed"}:
            note(f"{size_text(count_or_none(report['hashed']) or 0)} read")
    try:
        path, revision = report.get("path"), report.get("revision")
        refs, damaged = list(report["refs"]), list(report["damaged"])
        files = copy_files(report.get("files"))
        is_commit = revision is None or (path_is_below(revision) and "/" not in revision and len(revision) <= 100)
        if not (isinstance(path, str) and is_commit and all(map(path_is_below, refs))):
            raise ValueError("the answer has another form")
    except (ValueError, TypeError, KeyError) as error:
        raise LaunchError("its list of files cannot be used", where=node.name, why=str(error)) from error
    return CopyManifest(node, path, tuple(files), revision, tuple(refs), tuple(plain(name, 300) for name in damaged))


async def next_report(probe: AgentRequest, node: NodeConfig, silence_s: float = _SILENCE_S) -> dict[str, Any]:
    """The next line. Raises TransferRefused for a `problem`, LaunchError, NodeUnreachable."""
    line = await probe.next_line(silence_s)
    if isinstance(line, RequestEnded):
        raise LaunchError("what was started has ended there", where=node.name, why=plain(line.stderr, 300))
    if not isinstance(line, bytes):
        raise LaunchError(f"it has reported nothing for {silence_s:.0f} s", where=node.name)
    report = json_object(json_or_none(line))
    if (problem := report.get("problem")) is not None:
        raise TransferRefused(plain(problem, 300), where=node.name)
    return report


@dataclass
class _Member:
    """One node of a transfer."""

    node: NodeConfig
    request: AgentRequest | None = None
    addresses: tuple[str, ...] = ()
    port: int | None = None
    """None until it is ready, and after it was lost."""
    place: int | None = None
    """In the chain: it receives from those before it."""
    have: int = 0
    came: int = 0
    tries: int = 0
    """How often it had nobody to receive from since anything came."""
    moved_at: float = field(default_factory=time.monotonic)


class Spread:
    """One manifest's files on their way to several nodes."""

    def __init__(
        self,
        fleet: Fleet,
        holders: Sequence[CopyManifest],
        place: Mapping[str, Any],
        addresses: Mapping[str, Sequence[str]],
        report: Callable[[CopyProgress], None],
    ) -> None:
        """`holders` have the same files, and serve them; `place`: engine.node.transfer.CopyPlace's request, with
        `verify` and `replace`; `addresses` by NodeConfig.ssh, the fastest first."""
        self._fleet, self._holders, self._addresses, self._report = fleet, holders, addresses, report
        self._request = {**place, "files": holders[0].files, "token": secrets.token_hex(16)}
        self._total = holders[0].bytes
        self._sources: list[_Member] = []
        self._members: list[_Member] = []
        self._places = itertools.count()
        self._all_ready = asyncio.Event()
        self._opening: asyncio.Task[None] | None = None
        self._heads = set[str]()
        """Addresses of this machine, as nodes see it."""
        self._tunnels: dict[tuple[str, int, str], tuple[str, int]] = {}
        self._stack = contextlib.AsyncExitStack()

    async def run(self, targets: Sequence[NodeConfig]) -> dict[str, str]:
        """NodeConfig.ssh → where the files are there, whole and verified. Raises the first target's TransferRefused,
        LaunchError or NodeUnreachable when all have ended: what has come by then is not sent again."""
        self._members = [_Member(node) for node in targets]
        async with self._stack:
            receiving = [asyncio.create_task(self._receive(member)) for member in self._members]
            try:
                ends = await asyncio.gather(*receiving, return_exceptions=True)
            finally:
                for task in (*receiving, *filter(None, (self._opening,))):
                    task.cancel()
                for member in (*self._members, *self._sources):
                    if member.request is not None:
                        member.request.close()
        for end in ends:
            if isinstance(end, BaseException):
                raise end
        return {member.node.ssh: str(end) for member, end in zip(self._members, ends, strict=True)}

    async def _join(self, member: _Member) -> None:
        """Give one that is ready its place in the chain. Raises TransferRefused where nobody serves the files."""
        if all(one.port for one in self._members):
            self._all_ready.set()
        self._opening = self._opening or asyncio.create_task(self._open())
        await asyncio.shield(self._opening)
        if member.place is None:
            member.place = next(self._places)

    async def _open(self) -> None:
        """When all are ready, or one has been for a while: start the sources, and order the chain by what each has."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GATHER_S):
                await self._all_ready.wait()
        self._sources = [_Member(holder.node) for holder in self._holders]
        ends = await asyncio.gather(*map(self._serve, self._sources, self._holders), return_exceptions=True)
        if not any(source.port for source in self._sources):
            raise TransferRefused("nobody can give the files", why=str(ends[0]))
        for member in sorted(self._members, key=lambda member: -member.have):
            if member.port is not None:
                member.place = next(self._places)

    async def _serve(self, source: _Member, holder: CopyManifest) -> None:
        """Start it, unless it goes on. Raises TransferRefused, LaunchError, NodeUnreachable."""
        with contextlib.suppress(NodeUnreachable):
            if source.request is not None and source.request.ended is None:
                source.request.send(b"")
                return
        source.port = None
        await self._start(source, {"folder": holder.path, "source": holder.path, "repository": None})
        while not self._note_ready(source, await next_report(self._probe(source), source.node)):
            pass

    async def _start(self, member: _Member, more: Mapping[str, Any]) -> None:
        configured = self._addresses.get(member.node.ssh, ())
        member.addresses = tuple(dict.fromkeys((*configured, *(self._heads if member.node.local else ()))))
        member.request = await self._fleet.agent(member.node).start_probe("transfer")
        member.request.send_json({**self._request, "addresses": member.addresses, **more})

    @staticmethod
    def _probe(member: _Member) -> AgentRequest:
        assert member.request is not None
        return member.request

    async def _receive(self, member: _Member) -> str:
        """Until it has all; again when its connection was lost. Returns where it lies there."""
        while True:
            try:
                return await self._session(member)
            except (LaunchError, NodeUnreachable) as error:
                left_s = member.moved_at + PATIENCE_S - time.monotonic()
                if left_s <= 0:
                    raise
                if member.request is not None:
                    member.request.close()
                member.port, member.place = None, None
                self._tell(member, f"{error}; tried again for {left_s:.0f} s")
                await asyncio.sleep(_AGAIN_S)

    async def _session(self, member: _Member) -> str:
        await self._start(member, {})
        probe = self._probe(member)
        while True:
            report = await next_report(probe, member.node)
            if (came := count_or_none(report.get("came"))) and came != member.came:
                member.came, member.moved_at, member.tries = came, time.monotonic(), 0
                self._tell(member)
            if isinstance(path := report.get("done"), str):
                if freed := count_or_none(report.get("freed")):
                    context = {"node": member.node.name, "bytes": freed, "newest": plain(path, 300)}
                    audit_log("models", "older pushed data removed", context, home=self._fleet.home)
                    self._tell(member, f"{size_text(freed)} of older pushed data removed: no run there needs it")
                self._report(CopyProgress(member.node.name, self._total, self._total, path))
                return path
            if report.get("waiting"):
                self._tell(member, "another transfer writes there: waiting for its end")
            elif self._note_ready(member, report):
                member.came = 0
                await self._join(member)
            elif "wants" in report:
                await self._give_upstreams(member, plain(report["wants"], 300))

    def _note_ready(self, member: _Member, report: Mapping[str, Any]) -> bool:
        """Take its port and addresses from a `ready` report; False for another one."""
        ready = json_object(report.get("ready"))
        port = count_or_none(ready.get("port"))
        if port is None or not 0 < port < 65_536:
            return False
        member.port, member.have, member.moved_at = port, count_or_none(ready.get("have")) or 0, time.monotonic()
        for name in ("address", "head"):
            with contextlib.suppress(ValueError):
                address = str(ipaddress.IPv4Address(str(ready.get(name))))
                if name == "head":
                    self._heads.add(address)
                elif address not in member.addresses:
                    member.addresses += (address,)
        return True

    async def _give_upstreams(self, member: _Member, failed: str) -> None:
        """Tell it from whom it can receive: the nearest before it in the chain first, at last the sources; over this
        machine once it has reached none of them. Raises TransferRefused where that has not helped for long."""
        member.tries += 1
        if member.tries > 1:
            if time.monotonic() - member.moved_at > PATIENCE_S:
                raise TransferRefused("nobody can give it the files", where=member.node.name, why=failed)
            await asyncio.gather(*map(self._serve, self._sources, self._holders), return_exceptions=True)
        if member.tries > 2:
            self._tell(member, f"nobody to receive from: {failed}")
            await asyncio.sleep(_AGAIN_S)
        place = member.place or 0
        before = [one for one in self._members if one.port and one.place is not None and one.place < place]
        before.sort(key=lambda one: -(one.place or 0))
        upstreams = list[tuple[str, int]]()
        for one in (*before, *self._sources):
            if (port := one.port) is None:
                continue
            addresses = ("127.0.0.1",) if one.node.ssh == member.node.ssh else one.addresses
            upstreams += [(address, port) for address in addresses]
            if member.tries > 1 or not addresses:
                with contextlib.suppress(FlightDeckError, OSError):
                    upstreams.append(await self._tunnel(one.node, port, member.node))
        self._probe(member).send_json({"upstreams": upstreams})

    async def _tunnel(self, source: NodeConfig, port: int, receiver: NodeConfig) -> tuple[str, int]:
        """An address on `receiver` at which the port of `source` answers, over this machine. Raises NodeUnreachable."""
        key = source.ssh, port, receiver.ssh
        if key not in self._tunnels:
            here = await self._stack.enter_async_context(self._fleet.to(source).forwarded("127.0.0.1", port))
            self._tunnels[key] = await self._stack.enter_async_context(self._fleet.to(receiver).exposed(*here))
        return self._tunnels[key]

    def _tell(self, member: _Member, note: str = "") -> None:
        self._report(
            CopyProgress(member.node.name, min(self._total, member.have + member.came), self._total, None, note)
        )
