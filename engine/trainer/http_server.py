"""The OpenAI-compatible server of a run's weights, mlx-lm's own. Rank 0 listens.

It serves what was trained, and the base model to a request that names "base": mlx-lm's own would load any path that a
request has. Where the model is divided, it answers one request at a time: two at once kill mlx-lm's (mlx-lm#1737)."""

from __future__ import annotations

import argparse
import contextlib
import hmac
import http.client
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache
from mlx_lm.server import APIHandler, ModelProvider, ResponseGenerator, get_system_fingerprint

from engine.protocol.job import JobError
from engine.protocol.task import API_TOKEN_ENV, Task, is_loopback
from engine.trainer.answers import Generator, load
from engine.trainer.collective import Collective
from engine.trainer.variants import broadcast_tensors
from engine.training.process import TrainingProcess
from engine.training.reporting import Outcome, Reporter

TRAINED, BASE = "trained", "base"
_PROBE_EVERY_S = 10.0
_PROBE_LIMIT_S = 30.0
_POLL_S = 0.2


@dataclass(frozen=True)
class ServeOptions:
    """Task.options."""

    name: str
    """The model's, as clients see it."""
    host: str = "127.0.0.1"
    port: int = 8080
    """0: a free one."""
    max_tokens: int = 512
    """The limit of a request that names none."""


class LoadedModel(ModelProvider):  # type: ignore[misc]
    """The one model that is served, as it was trained or as the base."""

    def __init__(self, generator: Generator, options: ServeOptions) -> None:
        super().__init__(_server_arguments(options))
        self._generator = generator
        self.model, self.tokenizer = generator.model, generator.tokenizer
        self.model_key = TRAINED
        caches = make_prompt_cache(self.model)
        self.is_batchable = generator.divided is None and all(hasattr(cache, "merge") for cache in caches)

    def load_default(self) -> None:
        """It is loaded."""

    def load(self, name: str, *_: object) -> tuple[Any, Any]:
        """In the thread that generates, between two requests or batches."""
        key = BASE if name == BASE else TRAINED
        if key != self.model_key:
            self.model_key = key
            select(self._generator, key == TRAINED)
            if self._generator.divided is not None:
                self._generator.divided.select(trained=key == TRAINED)
        return self.model, self.tokenizer


def select(generator: Generator, trained: bool) -> None:
    """Attach this rank's adapter, or detach it."""
    (generator.adapter.attach if trained else generator.adapter.detach)()


def _server_arguments(options: ServeOptions) -> argparse.Namespace:
    """Those of mlx_lm.server, with its defaults, but that no web page may ask."""
    return argparse.Namespace(
        model=options.name, adapter_path=None, draft_model=None, num_draft_tokens=3, trust_remote_code=False,
        allowed_origins=[], chat_template="", use_default_chat_template=False, chat_template_args={}, pipeline=True,
        temp=0.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=options.max_tokens, decode_concurrency=32,
        prompt_concurrency=8, prefill_step_size=2048, prompt_cache_size=10, prompt_cache_bytes=None, kv_bits=None,
        kv_group_size=64, quantized_kv_start=DEFAULT_QUANTIZED_KV_START,
    )  # fmt: skip


class Service(ResponseGenerator):  # type: ignore[misc]
    """Counts what it generates, and reports it. The model itself communicates with the other ranks: to mlx-lm there is
    one."""

    _is_distributed = property(lambda self: False, lambda self, _: None)

    def __init__(self, provider: LoadedModel, reporter: Reporter) -> None:
        self._reporter = reporter
        self._reporting = threading.Lock()
        self.requests_served = 0
        self.token_at = time.monotonic()
        """The time of the last one."""
        self._ended = threading.Event()
        super().__init__(provider, LRUPromptCache(provider.cli_args.prompt_cache_size))

    def _run_generate(self) -> None:
        """In the thread that mlx-lm starts, which lives as long as `run`."""
        self._ended.wait()

    def run(self) -> None:
        """Generate until `stop`, in the thread whose streams the model and the group of the ranks are of."""
        try:
            self._generate()
        finally:
            self._ended.set()

    def stop(self) -> None:
        self._stop = True

    def generate(self, *request: Any, **more: Any) -> tuple[Any, Iterator[Any]]:
        context, responses = super().generate(*request, **more)
        return context, self._counted(responses)

    def _counted(self, responses: Iterator[Any]) -> Iterator[Any]:
        tokens, started = 0, time.perf_counter()
        try:
            for response in responses:
                tokens += 1
                self.token_at = time.monotonic()
                with self._reporting:
                    self._reporter.going_on()
                yield response
        finally:
            self.requests_served += 1
            rate = tokens / max(time.perf_counter() - started, 1e-9)
            with self._reporting:
                served = self.requests_served
                self._reporter.event("served", requests=served, tokens=tokens, tokens_per_second=rate)


class Handler(APIHandler):  # type: ignore[misc]
    """mlx-lm's, for those who have the token, with a health check that generates a token."""

    def __init__(self, service: Service, token: str | None, probe: Callable[[], bool], *args: Any, **more: Any) -> None:
        self._token, self._probe = token, probe
        super().__init__(service, *args, system_fingerprint=get_system_fingerprint(), **more)

    def do_POST(self) -> None:  # noqa: N802
        if self._authorized():
            super().do_POST()

    def do_GET(self) -> None:  # noqa: N802
        if self.path == "/health" or self._authorized():
            super().do_GET()

    def handle_health_check(self) -> None:
        healthy = self._probe()
        self._reply(200 if healthy else 503, {"status": "ok" if healthy else "unavailable"})

    def handle_models_request(self) -> None:
        name = self.response_generator.cli_args.model
        served = {"id": name, "object": "model", "created": self.created, "owned_by": "flightdeck"}
        self._reply(200, {"object": "list", "data": [served]})

    def _authorized(self) -> bool:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if self._token is None or hmac.compare_digest(given.encode(), self._token.encode()):
            return True
        error = {"message": "the token of this server is missing or wrong", "type": "invalid_request_error"}
        self._reply(401, {"error": {**error, "code": "invalid_api_key"}})
        return False

    def _reply(self, status: int, document: dict[str, Any]) -> None:
        self._set_completion_headers(status)
        self.end_headers()
        self.wfile.write(json.dumps(document).encode())


class Server(ThreadingHTTPServer):
    daemon_threads = True
    # Of eight clients at once none is to wait for the kernel to take its connection.
    request_queue_size = 128


def _one_token(port: int, host: str, token: str | None) -> bool:
    """A request of one token is answered as clients' are."""
    connection = http.client.HTTPConnection("127.0.0.1" if host in ("", "0.0.0.0") else host, port, _PROBE_LIMIT_S)
    try:
        body = json.dumps({"prompt": "a", "max_tokens": 1})
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token or ''}"}
        connection.request("POST", "/v1/completions", body, headers)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def serve(process: TrainingProcess, collective: Collective) -> None:
    """Serve until the run is stopped. Raises JobError, GroupError, PeerLost."""
    reporter, stop = process.reporter, process.control.stop
    task = Task(**process.spec.task or {})
    options = ServeOptions(**task.options)
    if task.weights is None:
        raise JobError("the run has saved no weights to serve")
    generator = load(process, collective, task)
    generator.adapter.load(broadcast_tensors(collective, Path(task.weights)), fuse=False, keep_base=True)
    generator.adapter.evaluate()
    reporter.phase("serving")
    if process.rank == 0:
        service = Service(LoadedModel(generator, options), reporter)
        with _listening(service, options, reporter, stop):
            service.run()
        if generator.divided is not None:
            generator.divided.end()
    elif generator.divided is not None:
        generator.divided.follow(reporter.going_on, partial(select, generator))
    # The first rank to exit would take the others down.
    collective.barrier()
    reporter.end(Outcome(not stop.is_set(), stop.is_set(), 0))


@contextlib.contextmanager
def _listening(service: Service, options: ServeOptions, reporter: Reporter, stop: threading.Event) -> Iterator[None]:
    """Other threads take requests, and end the service when the run is stopped. Raises JobError."""
    token = os.environ.get(API_TOKEN_ENV) or None
    if token is None and not is_loopback(options.host):
        raise JobError(f"{options.host} is no loopback address: a server there needs a token")
    probe: Callable[[], bool] = lambda: _one_token(server.server_port, options.host, token)  # noqa: E731
    try:
        server = Server((options.host, options.port), partial(Handler, service, token, probe))
    except OSError as error:
        raise JobError(f"{options.host}:{options.port} cannot be listened on: {error.strerror or error}") from error

    def watch() -> None:
        address = f"http://{options.host}:{server.server_port}/v1"
        if probe():
            reporter.event("result", kind="serving", address=address, model=options.name, token=token is not None)
            reporter.print(f"serving {options.name} at {address}")
        while not stop.wait(_POLL_S):
            if time.monotonic() - service.token_at > _PROBE_EVERY_S:
                probe()
        service.stop()

    for target in (server.serve_forever, watch):
        threading.Thread(target=target, name=target.__name__, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
