"""The Hugging Face Hub on this machine, as far as huggingface_hub asks it for one model."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator, Mapping

from tests.model_copies import COMMIT, git_digest


class Hub(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    files: Mapping[str, bytes] = {}
    repository = "org/tiny"
    sent: list[str]
    """Files whose content was asked for."""

    def do_GET(self) -> None:
        self._answer(content=True)

    def do_HEAD(self) -> None:
        self._answer(content=False)

    def _answer(self, *, content: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/{self.repository}"):
            files = [{"rfilename": name, "size": len(data)} for name, data in self.files.items()]
            about: object = {"id": self.repository, "sha": COMMIT, "siblings": files}
            if "/tree/" in path:
                about = [_entry(name, data) for name, data in self.files.items()]
            self._send(200, json.dumps(about).encode(), {}, content=content)
            return
        named = re.search(f"/resolve/(?:main|{COMMIT})/(.+)", path)
        data = self.files.get(named[1]) if named is not None else None
        if data is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, content=content)
            return
        if (ranged := self.headers.get("Range")) is not None:
            data = data[: int(ranged.rpartition("-")[2]) + 1]
        self.sent += [path] * content
        digest = hashlib.sha256(data).hexdigest() if path.endswith(".safetensors") else git_digest(data)
        self._send(200, data, {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT}, content=content)

    def _send(self, code: int, body: bytes, headers: Mapping[str, str], *, content: bool) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body if content else b"")

    def log_message(self, format: str, *arguments: object) -> None:
        """Nobody reads it."""


def _entry(path: str, data: bytes) -> dict[str, object]:
    entry = {"type": "file", "path": path, "size": len(data), "oid": git_digest(data)}
    lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return {**entry, **({"lfs": lfs} if path.endswith(".safetensors") else {})}


@contextlib.contextmanager
def hub(files: Mapping[str, bytes], address: str = "127.0.0.1") -> Iterator[tuple[str, list[str]]]:
    """Its HF_ENDPOINT, and the paths whose content was sent."""
    handler = type("OneModel", (Hub,), {"files": files, "sent": []})
    with http.server.ThreadingHTTPServer((address, 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{address}:{server.server_port}", handler.sent  # type: ignore[attr-defined]
        server.shutdown()
