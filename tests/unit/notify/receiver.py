"""An HTTP server of this machine that takes notifications."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest


@dataclass
class Receiver:
    url: str
    answers: list[int] = field(default_factory=list)
    """The next status codes; 200 when none is left."""
    location: str = "http://elsewhere.test/"
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    silent: threading.Event | None = None
    """No answer before this is set."""

    @property
    def bodies(self) -> list[bytes]:
        return [body for _, _, body in self.requests]


@contextlib.contextmanager
def receiver() -> Iterator[Receiver]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            taken.requests.append((self.path, dict(self.headers), body))
            if taken.silent is not None:
                taken.silent.wait()
            self.send_response(taken.answers.pop(0) if taken.answers else 200)
            self.send_header("Location", taken.location)
            self.end_headers()
            # As a service does that quotes what it refuses.
            self.wfile.write(f"refused {self.path} {self.headers.get('Authorization')}".encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    taken = Receiver(f"http://127.0.0.1:{server.server_port}/topic-4711")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("no_proxy", "*")
            yield taken
    finally:
        if taken.silent is not None:
            taken.silent.set()
        server.shutdown()
        server.server_close()
        thread.join()
