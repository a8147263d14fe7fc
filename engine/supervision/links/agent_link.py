"""A host at the other end of a connection, seen through the agent that runs there for as long as the link lives.

Its own tasks do all that waits: they connect, beat, hear, and connect again without end. What the supervisor's thread
reads is what they have left in memory, so a host that is not there costs the others nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import PurePosixPath
from typing import Any

from engine.errors import FlightDeckError
from engine.launch.place import Place
from engine.runs.mirror import NodeFile
from engine.supervision.links.agent_file import AgentFile
from engine.supervision.links.base import HostFacts, LinkState, Sighting
from engine.transport.base import Channel, Transport
from engine.worker.frames import VERSION, Decoder, Message, encode
from engine.worker.last_words import LastWords
from engine.worker.processes import Process
from engine.worker.wire import ExitRecord, Identity, NodeFiles

BEAT_EVERY_S = 1.0
SILENT_CONNECTION_S = 20.0
"""A connection on which nothing comes for as long is given up; ssh's own keepalive is usually earlier."""
OPEN_LIMIT_S = 12.0
_CLOSE_LIMIT_S = 2.0
FIRST_RETRY_S, LAST_RETRY_S = 0.2, 3.0
_READ_BYTES = 256 * 1024


class AgentLink:
    """One host. Methods are called from the supervisor's thread, tasks run on the loop that `start` was called on."""

    local = False

    def __init__(
        self,
        place: Place,
        files: NodeFiles,
        nonce: str,
        transport: Transport,
        *,
        names: Sequence[str],
        known: Mapping[int, Identity] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """`files` is the attempt's directory there; `known` are identities that an earlier supervisor has seen."""
        self.names = tuple(names)
        self.ranks = place.ranks
        self.facts: HostFacts | None = None
        self._place = place
        self._files = files
        self._nonce = nonce
        self._transport = transport
        self._rng = rng or random.Random()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._outgoing = bytearray()
        self._to_write = asyncio.Event()
        self._connected = False
        self._began_at = self._heard_at = time.monotonic()
        self._heard = False
        self._problem: str | None = None
        self._beats: dict[int, float] = {}
        """Beats under way: number → when it was sent (wall clock)."""
        self._beat_number = self._heard_number = 0
        """The last beat that was sent, and the last one that had been sent when something was heard."""
        self._sightings = {rank: Sighting(identity=(known or {}).get(rank)) for rank in place.ranks}
        self._words: dict[int, LastWords] = {}
        self._standing: dict[int, bytes] = {}
        """The last STOP, RESCUE or END to each rank, said again after each reconnect."""
        self._agent_files: dict[str, AgentFile] = {}
        self._files_lock = threading.Lock()
        self._asked = 0
        self._question: Message | None = None
        """What is left there: not answered yet."""
        self._left: list[Process] | None = None
        self._holders: dict[int, str] | None = None

    @property
    def state(self) -> LinkState:
        return LinkState(self._connected, time.monotonic() - self._heard_at, self._heard, self._problem)

    def sight(self, rank: int, *, thorough: bool) -> Sighting:
        return self._sightings[rank]

    def words(self, rank: int) -> LastWords:
        return self._words.get(rank, LastWords())

    def hear_words(self) -> None:
        for rank in self.ranks:
            self._say({"kind": "words", "n": 0, "rank": rank})

    def tell(self, rank: int, word: bytes) -> None:
        # An END stays an END: STOP and RESCUE come before it if at all.
        self._standing[rank] = word
        self._say(_word(rank, word))

    def kill_groups(self) -> None:
        self._say({"kind": "kill"})

    def ask_left(self, *, kill: bool) -> None:
        question = self._question
        if question is None or question["kill"] != kill:
            # The same question, asked again before it was answered, keeps its number: an answer that takes longer than
            # we wait before we ask again is an answer all the same.
            self._asked += 1
            question = {"kind": "list", "n": self._asked, "kill": kill}
        self._left, self._question = None, question
        self._say(question)

    def left(self) -> list[Process] | None:
        return self._left

    def ask_holders(self, ports: Sequence[int]) -> None:
        self._holders = None
        self._say({"kind": "ports", "n": 0, "ports": list(ports)})

    def holders(self) -> dict[int, str] | None:
        return self._holders

    def file(self, name: str) -> NodeFile:
        with self._files_lock:
            if name not in self._agent_files:
                self._agent_files[name] = AgentFile(name, self._order)
            return self._agent_files[name]

    def start(self) -> None:
        """On the running loop."""
        self._loop = asyncio.get_running_loop()
        self._began_at = self._heard_at = time.monotonic()
        self._task = asyncio.create_task(self._keep_up(), name=f"link to {self._place.target}")

    async def close(self) -> None:
        while self._task is not None and not self._task.done():
            # Again: a cancellation that meets the end of a wait within it is lost.
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=_CLOSE_LIMIT_S)

    def _order(self, name: str, begin: int | None, until: int) -> None:
        order: Message = {"kind": "send", "file": name, "until": until}
        self._say(order if begin is None else {**order, "from": begin})

    def _say(self, message: Message) -> None:
        """To the agent, from any thread; nothing while there is none: what must be said is said again then."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                # The loop may be closing: then nothing will be said any more.
                self._loop.call_soon_threadsafe(self._put, message)

    def _put(self, message: Message) -> None:
        if self._connected:
            self._outgoing += encode(message)
            self._to_write.set()

    async def _keep_up(self) -> None:
        """Connect, and again whenever the connection ends, until cancelled."""
        retry_s = FIRST_RETRY_S
        while True:
            began = time.monotonic()
            try:
                self._problem = await self._once()
            except Exception as fault:
                # Whatever it is, ours or the node's: without this task the node's ranks have no beats, and end.
                traceback.print_exception(fault, chain=False)
                self._problem = f"{type(fault).__name__}: {fault}"
            retry_s = FIRST_RETRY_S if time.monotonic() - began > LAST_RETRY_S else min(2 * retry_s, LAST_RETRY_S)
            await asyncio.sleep(retry_s * self._rng.uniform(0.5, 1.0))

    async def _once(self) -> str:
        """One connection from its beginning to its end; why it has ended."""
        argv = [self._place.python, "-m", "worker.agent", "--attempt", str(self._files.directory)]
        try:
            opening = self._transport.open(argv, directory=PurePosixPath(self._place.bundle))
            channel = await asyncio.wait_for(opening, OPEN_LIMIT_S)
        except (FlightDeckError, OSError, TimeoutError) as error:
            return str(error) or "no answer"
        try:
            return await self._talk(channel)
        finally:
            self._connected = False
            with contextlib.suppress(FlightDeckError, OSError, TimeoutError):
                await asyncio.wait_for(channel.close(), _CLOSE_LIMIT_S)

    async def _talk(self, channel: Channel) -> str:
        self._outgoing.clear()
        self._beats.clear()
        self._connected = True
        self._greet()
        tasks = {
            asyncio.create_task(self._hear(channel), name="hear"),
            asyncio.create_task(self._write(channel), name="write"),
            asyncio.create_task(self._beat(), name="beat"),
        }
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        except (FlightDeckError, OSError, ValueError, KeyError, TypeError) as error:
            return str(error) or type(error).__name__
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _greet(self) -> None:
        """Tell a new agent all that the last one knew."""
        seen = {rank: sighting.identity for rank, sighting in self._sightings.items()}
        known = {str(rank): asdict(identity) for rank, identity in seen.items() if identity is not None}
        self._put({"kind": "watch", "nonce": self._nonce, "ranks": list(self.ranks), "known": known})
        for rank, word in list(self._standing.items()):
            self._put(_word(rank, word))
        with self._files_lock:
            files = dict(self._agent_files)
        for name, file in files.items():
            order = file.reconnect()
            if order is not None:
                self._put({"kind": "send", "file": name, "from": order[0], "until": order[1]})
        # After the files: with its answer the agent says how long those are that it was told of.
        if self._question is not None:
            self._put(self._question)

    async def _hear(self, channel: Channel) -> str:
        decoder = Decoder()
        while data := await channel.read(_READ_BYTES):
            for message, body in decoder.feed(data):
                self._take(message, body)
                # Whatever it was: on a slow line the pongs come late, behind a megabyte of somebody's log.
                self._hear_something()
        return channel.last_words or "the agent has left"

    async def _write(self, channel: Channel) -> str:
        while True:
            await self._to_write.wait()
            self._to_write.clear()
            data = bytes(self._outgoing)
            self._outgoing.clear()
            await channel.write(data)

    async def _beat(self) -> str:
        begun = time.monotonic()
        # A new connection counts from here: the first beat is not for a head that hears nothing.
        self._heard_number = self._beat_number
        while time.monotonic() - max(self._heard_at, begun) < SILENT_CONNECTION_S:
            self._beat_number += 1
            self._beats[self._beat_number] = time.time()
            self._put({"kind": "beat", "n": self._beat_number, "heard": self._heard_number})
            await asyncio.sleep(BEAT_EVERY_S)
        return f"no answer for {SILENT_CONNECTION_S:.0f} s"

    def _take(self, message: Message, body: bytes) -> None:
        match message["kind"]:
            case "data":
                file = self._agent_files[message["file"]]
                file.take(message["from"], body, end=message["end"])
            case "pong":
                self._take_pong(message)
            case "hello":
                self._take_hello(message)
            case "started":
                identity = Identity(**message["identity"])
                self._see(message["rank"], identity=identity)
            case "ended":
                record = ExitRecord(**message["record"]) if message["record"] is not None else None
                self._words[message["rank"]] = LastWords(**message["words"])
                self._note_memory_kills(message["memory_kills"])
                self._see(message["rank"], record=record, vanished=record is None)
            case "words":
                self._words[message["rank"]] = LastWords(**message["words"])
            case "ports":
                self._holders = {int(port): str(who) for port, who in message["held"].items()}
            case "trouble":
                self._agent_files[message["file"]].fail(message["problem"])
            case "listed" if message["n"] == self._asked:
                self._take_left(message)

    def _take_hello(self, message: Message) -> None:
        if message["version"] != VERSION:
            raise ValueError(f"the agent speaks version {message['version']}")
        ahead = self.facts.clock_ahead_s if self.facts is not None else message["at"] - time.time()
        self.facts = HostFacts(message["boot_id"], message["memory_kills"], ahead)
        for rank, seen in self._sightings.items():
            if seen.identity is not None and seen.identity.boot_id != message["boot_id"]:
                self._see(rank, vanished=seen.record is None, restarted=True)

    def _take_pong(self, message: Message) -> None:
        sent_at = self._beats.pop(message["n"], None)
        if sent_at is not None and self.facts is not None:
            ahead = message["at"] - (sent_at + time.time()) / 2
            self.facts = replace(self.facts, clock_ahead_s=ahead)

    def _take_left(self, message: Message) -> None:
        left = [Process(int(pid), str(command)) for pid, command in message["left"]]
        if not left:
            for name, size in message["sizes"].items():
                self._agent_files[name].settle(size)
        self._question, self._left = None, left

    def _note_memory_kills(self, kills: int | None) -> None:
        if self.facts is not None:
            self.facts = replace(self.facts, memory_kills=kills)

    def _hear_something(self) -> None:
        self._heard_at = time.monotonic()
        self._heard_number = self._beat_number
        self._heard = True
        self._problem = None

    def _see(self, rank: int, **seen: Any) -> None:
        self._sightings[rank] = replace(self._sightings[rank], **seen)


def _word(rank: int, word: bytes) -> Message:
    return {"kind": "word", "rank": rank, "word": word.decode().strip()}
