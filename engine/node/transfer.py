"""Files on their way from node to node, each verified by its hash: a process that holds a copy serves it, one that
wants it fetches what it lacks from others, and serves each byte as soon as it has come. So copies go along a chain of
nodes at the speed of one. What was received stays in `*.part` files, and is continued the next time.

The head says which files, where to, and from whom; it gets a line of JSON for whatever happens."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import queue
import secrets
import shutil
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from engine.node.bootstrap import make_private, node_root
from engine.node.hub_cache import drop_older, pushed_root, root_of
from engine.node.probes import nearest, reason_of
from engine.protocol.attempt import open_regular, sync_file, write_atomic
from engine.protocol.manifest import DATA_PREFIX, CopyFile, HubName, copy_files, hub_name, path_is_below
from engine.protocol.sizes import room_fault

_BLOCK, _STEP = 1 << 20, 1 << 18
"""_STEP: what is read, written and passed on at once."""
_CONNECT_S, _SILENCE_S, _ALIVE_S = 3.0, 8.0, 1.0
"""A server that waits for bytes itself sends an empty frame each _ALIVE_S; one that is silent is taken for gone."""
_REPORT_S, _LOCK_AGAIN_S = 0.5, 0.5
_TRIES = 3
"""So often a file may come with another hash."""
_FRAME = struct.Struct(">I")
_MOST_REQUEST = 8 << 20
_SEND_S = 60.0
"""For a receiver whose disk stalls."""
_PARTS = ".flightdeck"


class TransferError(Exception):
    """Another try would end in the same way."""


def digest_of(length: int, size: int) -> Any:
    """The hash whose hexadecimal form has that length: SHA-256, or git's SHA-1 of a blob of `size` bytes."""
    return hashlib.sha256() if length == 64 else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)


def hash_file(path: Path, file: CopyFile, limit: int | None = None) -> Any:
    """The hash of its first `limit` bytes, as `file.digest` is one. Raises OSError."""
    digest = digest_of(len(file.digest), file.size)
    for block in read_blocks(path, file.size + 1 if limit is None else limit):
        digest.update(block)
    return digest


def read_blocks(path: Path, limit: int) -> Iterator[bytes]:
    """The first `limit` bytes of a file. Raises OSError."""
    with open_regular(path) as content:
        while limit > 0 and (block := content.read(min(_BLOCK, limit))):
            limit -= len(block)
            yield block


class CopyPlace:
    """Where the files of a copy lie: in the layout of Hugging Face's cache (blobs, and a snapshot of links to them), or
    as they are called in a folder."""

    def __init__(self, asked: dict[str, Any]) -> None:
        """`asked`: `repository` (kind, name, commit) with its `refs`, in the cache or among what was pushed, and its
        `named` revisions, which are kept; or `folder`. Raises TransferError, OSError."""
        self.named = asked.get("named", [])
        self.refs = [ref for ref in asked.get("refs", ()) if path_is_below(ref)]
        if asked.get("repository") is None:
            self.repository, self.folder = None, Path(asked["folder"]).expanduser()
        else:
            hub = HubName(*asked["repository"])
            checked = hub_name(f"{DATA_PREFIX * (hub.kind == 'dataset')}{hub.name}@{hub.revision}", "model")
            if checked != hub:
                raise TransferError("the repository has no usable name")
            self.repository = root_of(hub) / hub.folder
            self.folder = self.repository / "snapshots" / str(hub.revision)

    @property
    def top(self) -> Path:
        return self.repository or self.folder

    def path(self, file: CopyFile) -> Path:
        return self.repository / "blobs" / file.digest if self.repository else self.folder / file.path

    def part(self, file: CopyFile) -> Path:
        if self.repository is not None:
            return self.repository / "blobs" / f"{file.digest}.part"
        # The same content may be there several times.
        return self.folder / _PARTS / f"{file.digest}-{hashlib.sha256(file.path.encode()).hexdigest()[:8]}.part"

    def check_below(self, path: Path) -> None:
        """Raises TransferError where a link leads out of its folder."""
        top = os.path.realpath(self.top)
        if os.path.commonpath([top, os.path.realpath(path.parent)]) != top:
            raise TransferError(f"{path} leads out of {self.top}")

    def install(self, file: CopyFile) -> None:
        """Make the part, which is verified, the file. Raises OSError, TransferError."""
        path, part = self.path(file), self.part(file)
        with part.open("rb") as content:
            sync_file(content.fileno())
        self.check_below(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        os.replace(part, path)

    def complete(self, files: list[CopyFile]) -> int:
        """All files are there: link them, set the refs, and remove older pushed ones; the bytes that were freed. Raises
        OSError, TransferError."""
        if self.repository is None:
            with contextlib.suppress(OSError):
                (self.folder / _PARTS).rmdir()
            return 0
        for file in files:
            link = self.folder / file.path
            self.check_below(link)
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                link.unlink(missing_ok=True)
            if os.path.realpath(link) != os.path.realpath(self.path(file)):
                beside = link.with_name(f".{link.name}.{secrets.token_hex(4)}")
                beside.symlink_to(os.path.relpath(self.path(file), link.parent))
                os.replace(beside, link)
        for ref in self.refs:
            path = self.repository / "refs" / ref
            self.check_below(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, self.folder.name)
        with contextlib.suppress(OSError):
            return drop_older(self.folder, self.named) if self.repository.parent == pushed_root() else 0
        return 0


class Transfer:
    """One copy on one node, to be received or only served. Its threads share `available` under `changed`."""

    def __init__(self, asked: dict[str, Any]) -> None:
        """Raises ValueError, TransferError, OSError."""
        self.files = copy_files(asked["files"])
        self.asked = asked
        self.source = Path(asked["source"]) if asked.get("source") else None
        """The folder that is only served."""
        self.place = CopyPlace(asked)
        self.available = [file.size if self.source else 0 for file in self.files]
        """By file, how much of it may be served."""
        self.whole = [self.source is not None] * len(self.files)
        """By file, all of it has come, and is verified."""
        self.changed = threading.Condition()
        self.upstreams: list[tuple[str, int]] = []
        self.reports: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        """For the head."""
        self.came = 0
        self._installed = set[int]()
        self._hashes: dict[int, Any] = {}
        """File → the hash of the part of it that has come."""
        self._refused = [0] * len(self.files)

    # Serving.

    def listen(self) -> int:
        """Serve on 127.0.0.1, where sshd is reached, and on the addresses of the request that this machine has; returns
        the port. Raises OSError."""
        port = 0
        for address in dict.fromkeys(
            ("127.0.0.1", _ssh_addresses().get("address", "127.0.0.1"), *self.asked["addresses"])
        ):
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((address, port))
            except OSError:
                # Another machine's address, or its port is taken: the others do.
                listener.close()
                if not port:
                    raise
                continue
            listener.listen(32)
            port = listener.getsockname()[1]
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return port

    def _accept(self, listener: socket.socket) -> None:
        while True:
            with contextlib.suppress(OSError):
                connection = listener.accept()[0]
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError, TypeError, IndexError), connection:
            connection.settimeout(_SILENCE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            nonce = secrets.token_hex(16).encode()
            connection.sendall(nonce + b"\n")
            with connection.makefile("rb") as requests:
                proof = requests.readline(100).strip()
                if not hmac.compare_digest(proof, self._proof(nonce)):
                    return
                for number, offset in json.loads(requests.readline(_MOST_REQUEST)):
                    connection.settimeout(_SEND_S)
                    self._send_file(connection, range(len(self.files))[number], offset)

    def _proof(self, nonce: bytes) -> bytes:
        """Whoever knows the head's token can make it of a nonce, and nobody else."""
        return hmac.new(self.asked["token"].encode(), nonce, "sha256").hexdigest().encode()

    def _send_file(self, connection: socket.socket, number: int, offset: int) -> None:
        """All of it from `offset` on, as it becomes available, in frames of their length and as many bytes."""
        file, content = self.files[number], None
        try:
            while offset < file.size:
                count = self._ready_from(number, offset)
                connection.sendall(_FRAME.pack(count))
                if count:
                    content = content or self._opened(number)
                    if connection.sendfile(content, offset, count) != count:
                        return
                    offset += count
        finally:
            if content is not None:
                content.close()

    def _ready_from(self, number: int, offset: int) -> int:
        """Bytes of it that can be sent from there, once they are worth it, or _ALIVE_S are over."""
        enough = min(_STEP, self.files[number].size - offset)
        with self.changed:
            self.changed.wait_for(lambda: self.available[number] - offset >= enough, _ALIVE_S)
            return min(max(0, self.available[number] - offset), 4 * _BLOCK)

    def _opened(self, number: int) -> BinaryIO:
        file = self.files[number]
        if self.source is not None:
            return open_regular(self.source / file.path)
        if number not in self._installed:
            # It may be installed in this moment.
            with contextlib.suppress(FileNotFoundError):
                return open_regular(self.place.part(file))
        return open_regular(self.place.path(file))

    # Receiving.

    def take_stock(self) -> tuple[int, int]:
        """Bytes that are here, and that are to come, once what is here was hashed. Raises OSError, and TransferError
        where there is no room, or another file."""
        first, have, total = dict[Path, int](), 0, 0
        for number, file in enumerate(self.files):
            path, part = self.place.path(file), self.place.part(file)
            self.place.check_below(path)
            self.reports.put({"checked": number})
            if first.setdefault(path, number) != number:
                # The same content once more.
                self.whole[number] = True
                continue
            if path.is_file() and path.stat().st_size == file.size and self._is_same(path, file):
                self.whole[number], self.available[number] = True, file.size
                self._installed.add(number)
            elif path.exists() and self.place.repository is None and not self.asked.get("replace"):
                raise TransferError(f"{path} is there, and another file: --replace replaces it")
            elif part.is_file():
                self._continue(number, part)
            have, total = have + self.available[number], total + file.size
        if fault := room_fault(total - have, shutil.disk_usage(nearest(self.place.top)).free):
            raise TransferError(f"no room in {self.place.top}: {fault}")
        return have, total - have

    def _continue(self, number: int, part: Path) -> None:
        file, size = self.files[number], part.stat().st_size
        if size > file.size:
            part.unlink()
        else:
            self._hashes[number], self.available[number] = hash_file(part, file, size), size

    def _is_same(self, path: Path, file: CopyFile) -> bool:
        trusted = self.place.repository is not None and not self.asked.get("verify")
        return trusted or bool(hash_file(path, file).hexdigest() == file.digest)

    def receive(self) -> int:
        """Until all is here, from whoever has it; the bytes of older copies that were removed. Raises TransferError,
        OSError."""
        installed: list[Future[None]] = []
        with ThreadPoolExecutor(1) as pool:
            while not all(self.whole):
                with self.changed:
                    upstreams, self.upstreams = self.upstreams, []
                problems = []
                for upstream in upstreams:
                    try:
                        self._fetch(upstream, pool, installed)
                        break
                    except (OSError, ValueError) as error:
                        if isinstance(error, OSError) and error.filename is not None:
                            # A disk's error, not the network's.
                            raise
                        problems.append(f"{upstream[0]}:{upstream[1]}: {error}")
                else:
                    self.reports.put({"wants": "; ".join(problems)[:500]})
                    with self.changed:
                        self.changed.wait_for(lambda: bool(self.upstreams))
            for future in installed:
                future.result()
        return self.place.complete(self.files)

    def _fetch(self, upstream: tuple[str, int], pool: ThreadPoolExecutor, installed: list[Future[None]]) -> None:
        """All that is missing, from one that serves it. Raises OSError, ValueError."""
        missing = [number for number, whole in enumerate(self.whole) if not whole]
        with socket.create_connection(upstream, _CONNECT_S) as connection:
            connection.settimeout(_SILENCE_S)
            with connection.makefile("rb", _BLOCK) as answers:
                nonce = answers.readline(100).strip()
                wanted = json.dumps([(number, self.available[number]) for number in missing])
                connection.sendall(self._proof(nonce) + b"\n" + wanted.encode() + b"\n")
                for number in missing:
                    self._receive_file(answers, number)
                    installed.append(pool.submit(self._install, number))

    def _install(self, number: int) -> None:
        self.place.install(self.files[number])
        self._installed.add(number)

    def _receive_file(self, answers: Any, number: int) -> None:
        file, part = self.files[number], self.place.part(self.files[number])
        self.place.check_below(part)
        part.parent.mkdir(parents=True, exist_ok=True)
        digest = self._hashes.setdefault(number, digest_of(len(file.digest), file.size))
        buffer = memoryview(bytearray(_STEP))
        with part.open("ab", buffering=0) as content:
            while self.available[number] < file.size:
                (left,) = _FRAME.unpack(_exactly(answers, _FRAME.size))
                if left > file.size - self.available[number]:
                    raise ValueError("more came than the file has")
                while left:
                    count = answers.readinto(buffer[: min(left, _STEP)])
                    if not count:
                        raise ConnectionError("it has closed the connection")
                    _append(content, buffer[:count], part)
                    digest.update(buffer[:count])
                    left -= count
                    with self.changed:
                        self.available[number] += count
                        self.came += count
                        self.changed.notify_all()
            del self._hashes[number]
            if digest.hexdigest() != file.digest:
                self._drop(content, number)
        self.whole[number] = True

    def _drop(self, content: Any, number: int) -> None:
        """Begin the file anew: it came damaged, or an earlier part of it was. Raises ValueError, TransferError."""
        content.truncate(0)
        with self.changed:
            self.available[number], self.came = 0, self.came - self.files[number].size
        self._refused[number] += 1
        why = f"{self.files[number].path} came with another hash"
        if self._refused[number] == _TRIES:
            raise TransferError(f"{why} {_TRIES} times: it is damaged where it comes from")
        raise ValueError(why)


def _append(content: Any, data: memoryview, part: Path) -> None:
    """All of it: a disk that is nearly full takes a piece. Raises OSError with the file's name, as a disk's error."""
    try:
        while data:
            data = data[content.write(data) :]
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(part)) from error


def _exactly(answers: Any, count: int) -> bytes:
    data: bytes = answers.read(count)
    if len(data) < count:
        raise ConnectionError("it has closed the connection")
    return data


def served() -> Iterator[dict[str, Any]]:
    """Take the request, a line of JSON, from stdin, and then lines with `upstreams` until its end; what happens:
    `waiting` for another transfer into the same place, files `checked`, `ready` with its `port`, bytes that `came`, an
    upstream that it `wants`, `done`, or a `problem`."""
    lines = os.fdopen(0, "rb", closefd=False)
    try:
        transfer = Transfer(json.loads(lines.readline()))
    except (OSError, ValueError, KeyError, TypeError, TransferError) as error:
        yield {"problem": str(error)}
        return

    def follow() -> None:
        for line in lines:
            with transfer.changed:
                transfer.upstreams = [(host, port) for host, port in json.loads(line)["upstreams"]]
                transfer.changed.notify_all()
        transfer.reports.put({"end": True})

    threading.Thread(target=follow, daemon=True).start()
    threading.Thread(target=_work, args=(transfer,), daemon=True).start()
    came, at = 0, time.monotonic()
    while True:
        try:
            report = transfer.reports.get(timeout=_REPORT_S)
        except queue.Empty:
            report = {}
        if report.get("end"):
            return
        if report or transfer.came != came or time.monotonic() - at > _SILENCE_S:
            came, at = transfer.came, time.monotonic()
            yield {**report, "came": came}


def _work(transfer: Transfer) -> None:
    try:
        with _locked(transfer):
            have, wanted = transfer.take_stock() if transfer.source is None else (0, 0)
            ready = {"port": transfer.listen(), "have": have, "wanted": wanted}
            transfer.reports.put({"ready": {**ready, **_ssh_addresses()}})
            freed = transfer.receive() if transfer.source is None else 0
        transfer.reports.put({"done": str(transfer.source or transfer.place.folder), "freed": freed})
    except OSError as error:
        transfer.reports.put({"problem": reason_of(error, Path(error.filename or transfer.place.top))})
    except (TransferError, ValueError) as error:
        transfer.reports.put({"problem": str(error)})


def _ssh_addresses() -> dict[str, str]:
    """The `head`'s address, and the `address` at which it reaches this machine, as sshd saw them; none for the head."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return {"head": connection[0], "address": connection[2]} if len(connection) == 4 else {}


@contextlib.contextmanager
def _locked(transfer: Transfer) -> Iterator[None]:
    """One transfer at a time writes into a place: another one is waited for."""
    locks = node_root() / "locks"
    make_private(locks)
    with (locks / f"{hashlib.sha256(os.fsencode(transfer.place.top)).hexdigest()[:16]}.lock").open("ab") as lock:
        while transfer.source is None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                transfer.reports.put({"waiting": True})
                time.sleep(_LOCK_AGAIN_S)
        yield
