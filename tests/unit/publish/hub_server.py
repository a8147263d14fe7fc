"""A server on 127.0.0.1 that speaks as much of the Hugging Face Hub's API as `create_repo` and `upload_folder` use:
repositories, preupload, Git LFS, Xet's storage and commits. It can break off in the middle of an upload."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_" + "TestOnly0123456789abcd"
SIGNATURE = "5166" * 8
"""In the addresses of uploads, as S3's are signed."""


class Hub:
    """What the server has, and what it was asked."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.visibility: dict[str, str] = {}
        self.files: dict[str, dict[str, bytes | tuple[str, int]]] = {}
        """Repository → path → content, or SHA-256 and size of a large file."""
        self.objects: dict[str, bytes] = {}
        """By SHA-256: Git LFS."""
        self.blocks: dict[str, int] = {}
        """Hash → bytes of Xet's blocks of chunks."""
        self.shards: list[bytes] = []
        self.requests: list[tuple[str, str]] = []
        self.tokens: set[str | None] = set()
        self.break_at: str | None = None
        """A pattern of "METHOD path": the connection is cut in the middle of each request that matches."""
        self.refuse: int | None = None
        """The status of every answer, if any."""

    def small_files(self, repository: str) -> dict[str, bytes]:
        """The contents of those of a repository."""
        return {path: content for path, content in self.files[repository].items() if isinstance(content, bytes)}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def _answer(self, method: str) -> None:
        path, hub = self.path.partition("?")[0], self.hub
        hub.requests.append((method, path))
        length = int(self.headers.get("Content-Length") or 0)
        if hub.break_at is not None and re.search(hub.break_at, f"{method} {path}"):
            self.rfile.read(length // 2)
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        body = self.rfile.read(length) if length or not self._chunked() else b"".join(self._chunks())
        if path.startswith("/api/"):
            hub.tokens.add((self.headers.get("Authorization") or "").removeprefix("Bearer ") or None)
        status, answer = (
            (hub.refuse, {"error": f"no, {TOKEN} may not"}) if hub.refuse else self._route(method, path, body)
        )
        raw = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def _chunked(self) -> bool:
        return "chunked" in (self.headers.get("Transfer-Encoding") or "")

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _route(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        for pattern, answer in _ROUTES.items():
            if (match := re.fullmatch(pattern, f"{method} {path}")) is not None:
                return answer(self, match, body)
        return 404, {"error": f"{method} {path} is not spoken here"}

    def _create(self, _: re.Match[str], body: bytes) -> tuple[int, Any]:
        hub, asked = self.hub, json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        if name in hub.files:
            return 409, {"error": "You already created this model repo", "url": f"{hub.url}/{name}"}
        hub.files[name], hub.visibility[name] = {}, asked.get("visibility", "public")
        return 200, {"url": f"{hub.url}/{name}"}

    def _info(self, match: re.Match[str], _: bytes) -> tuple[int, Any]:
        private = self.hub.visibility[match[1]] == "private"
        return 200, {"id": match[1], "sha": "0" * 40, "private": private, "siblings": [], "tags": []}

    def _tree(self, match: re.Match[str], _: bytes) -> tuple[int, Any]:
        files = self.hub.files[match[1]]
        return 200, [{"type": "file", "path": path, "size": 1, "oid": "0" * 40} for path in files]

    def _preupload(self, match: re.Match[str], body: bytes) -> tuple[int, Any]:
        return 200, {"files": [self._mode(match[1], file) for file in json.loads(body)["files"]]}

    def _write_token(self, _: re.Match[str], __: bytes) -> tuple[int, Any]:
        return 200, {"casUrl": f"{self.hub.url}/xet", "exp": 4_000_000_000, "accessToken": "of-the-test"}

    def _batch(self, _: re.Match[str], body: bytes) -> tuple[int, Any]:
        entries, upload = json.loads(body)["objects"], f"{self.hub.url}/lfs/{{}}?X-Amz-Signature={SIGNATURE}"
        return 200, {
            "objects": [
                entry
                if entry["oid"] in self.hub.objects
                else {**entry, "actions": {"upload": {"href": upload.format(entry["oid"])}}}
                for entry in entries
            ]
        }

    def _store(self, _: re.Match[str], body: bytes) -> tuple[int, Any]:
        self.hub.objects[hashlib.sha256(body).hexdigest()] = body
        return 200, {}

    def _store_block(self, match: re.Match[str], body: bytes) -> tuple[int, Any]:
        self.hub.blocks[match[1]] = len(body)
        return 200, {"was_inserted": True}

    def _store_shard(self, _: re.Match[str], body: bytes) -> tuple[int, Any]:
        self.hub.shards.append(body)
        return 200, {"type": "result"}

    def _valid(self, _: re.Match[str], __: bytes) -> tuple[int, Any]:
        return 200, {"errors": [], "warnings": []}

    def _mode(self, repository: str, file: dict[str, Any]) -> dict[str, Any]:
        stored = self.hub.files[repository].get(file["path"])
        oid = stored[0] if isinstance(stored, tuple) else None
        if isinstance(stored, bytes):
            oid = hashlib.sha1(b"blob %d\0" % len(stored) + stored).hexdigest()
        large = file["path"].endswith(".safetensors")
        return {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid}

    def _commit(self, match: re.Match[str], body: bytes) -> tuple[int, Any]:
        repository = match[1]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "deletedFile":
                del self.hub.files[repository][value["path"]]
            elif line["key"] == "file":
                self.hub.files[repository][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.hub.objects and not self.hub.shards:
                    return 400, {"error": f"{value['path']} was not uploaded"}
                self.hub.files[repository][value["path"]] = (value["oid"], value["size"])
        return 200, {"commitUrl": f"{self.hub.url}/{repository}/commit/{'1' * 40}", "commitOid": "1" * 40}


_REPOSITORY = r"/api/models/([^/]+/[^/]+)"
_ROUTES: dict[str, Callable[[_Handler, re.Match[str], bytes], tuple[int, Any]]] = {
    r"POST /api/repos/create": _Handler._create,
    r"POST /api/validate-yaml": _Handler._valid,
    rf"GET {_REPOSITORY}/tree/main": _Handler._tree,
    rf"POST {_REPOSITORY}/preupload/main": _Handler._preupload,
    rf"POST {_REPOSITORY}/commit/main": _Handler._commit,
    rf"GET {_REPOSITORY}/xet-write-token/main": _Handler._write_token,
    rf"GET {_REPOSITORY}(?:/revision/main)?": _Handler._info,
    r"POST /[^/]+/[^/]+\.git/info/lfs/objects/batch": _Handler._batch,
    r"PUT /lfs/[0-9a-f]{64}": _Handler._store,
    r"POST /xet/v1/xorbs/default/([0-9a-f]{64})": _Handler._store_block,
    r"POST /xet/v2/shards": _Handler._store_shard,
}
"""Xet's protocol is hf_xet's (https://github.com/huggingface/xet-core): what it asks beyond it may be 404."""


@contextmanager
def hub() -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    served = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    server.RequestHandlerClass = type("Handler", (_Handler,), {"hub": served})
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
