"""The OpenAI-compatible server of a run's weights, mlx-lm's own. Rank 0 listens.

It serves what was trained, and the base model to a request that names "base": mlx-lm's own would load any path that a
request has. Where the model is divided, it answers one request at a time: two at once kill mlx-lm's (mlx-lm#1737)."""

from __future__ import annotations

import argparse
import contextlib
import hmac
import http.client
import io
import json
import os
import re
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from select import POLLIN, poll
from typing import Any
from urllib.parse import unquote

import mlx.core as mx
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START
from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
from mlx_lm.server import (
    APIHandler,
    ModelProvider,
    ResponseGenerator,
    _image_parts,
    _make_logits_processors,
    _make_sampler,
    get_system_fingerprint,
)

from engine.protocol.exit_codes import TrainerError
from engine.protocol.job import JobError
from engine.protocol.task import ANSWER_TOKENS, API_TOKEN_ENV, BASE, SERVE_PORT, Task, is_loopback
from engine.trainer.answers import Generator, load
from engine.trainer.collective import Collective
from engine.trainer.variants import broadcast_file
from engine.training.process import TrainingProcess
from engine.training.reporting import Reporter

TRAINED = "trained"
PROBE = ""
"""The model that a health check names, and that is no run's: whichever is selected."""
_PROBE_EVERY_S = 10.0
_PROBE_LIMIT_S = 30.0
_RECENT_S = 5.0
"""So old an answer shows that the server is healthy."""
_POLL_S = 0.2
_CLIENT_LIMIT_S = 60.0
"""For a client to send its request, or to take what is sent to it."""
_LENGTH = re.compile(r"[0-9]{1,8}")
_UNREAD_BYTES = 1 << 20
_PREFILL_TOKENS = 512
"""A prompt is computed by so many. Until they are, nothing shows that the server goes on: mlx-lm's 2,048 took so long
after some thousand others that it was taken for hung."""


@dataclass(frozen=True)
class ServeOptions:
    """Task.options."""

    name: str
    """The model's, as clients see it."""
    host: str = "127.0.0.1"
    port: int = SERVE_PORT
    """0: a free one."""
    max_tokens: int = ANSWER_TOKENS
    """The limit of a request that names none."""


class LoadedModel(ModelProvider):  # type: ignore[misc]
    """The one model that is served, as it was trained or as the base."""

    def __init__(self, generator: Generator, options: ServeOptions) -> None:
        super().__init__(_server_arguments(options))
        self.generator = generator
        self.model, self.tokenizer = generator.model, generator.tokenizer
        self.model_key = TRAINED
        self.tokens = frozenset[int](self.tokenizer.get_vocab().values())
        self.vocabulary = max(self.tokens) + 1
        caches = make_prompt_cache(self.model)
        self.is_batchable = generator.divided is None and all(hasattr(cache, "merge") for cache in caches)

    def load_default(self) -> None:
        """It is loaded."""

    def load(self, name: str, *_: object) -> tuple[Any, Any]:
        """In the thread that generates, between two requests or batches."""
        key = BASE if name == BASE else TRAINED
        if name != PROBE and key != self.model_key:
            self.model_key = key
            select(self.generator, key == TRAINED)
            if self.generator.divided is not None:
                self.generator.divided.select(trained=key == TRAINED)
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
        prompt_concurrency=8, prefill_step_size=_PREFILL_TOKENS, prompt_cache_size=10, prompt_cache_bytes=None,
        kv_bits=None, kv_group_size=64, quantized_kv_start=DEFAULT_QUANTIZED_KV_START,
    )  # fmt: skip


class RequestRefused(BaseException):
    """Why nothing is generated for a request. mlx-lm answers all Exceptions itself, in a form that OpenAI's clients do
    not show."""


class PromptCache(LRUPromptCache):  # type: ignore[misc]
    """Leaves a token of each prompt to compute: mlx-lm begins an answer with the last one's logits."""

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        caches, rest = super().fetch_nearest_cache(model, tokens)
        if rest:
            return caches, rest
        if not can_trim_prompt_cache(caches):
            return None, tokens
        trim_prompt_cache(caches, 1)
        return caches, tokens[-1:]


class Service(ResponseGenerator):  # type: ignore[misc]
    """Counts what it generates for clients, and reports it. The model itself communicates with the other ranks: to
    mlx-lm there is one."""

    _is_distributed = property(lambda self: False, lambda self, _: None)
    _stop = property(lambda self: self._stopping.is_set(), lambda self, _: None)

    def __init__(self, provider: LoadedModel, reporter: Reporter, stopping: threading.Event) -> None:
        self._reporter, self._stopping = reporter, stopping
        self._reporting = threading.Lock()
        self._requests = self._tokens = 0
        self.active_at = float("-inf")
        """The time of the last token, or of the last part of a prompt."""
        self._ended = threading.Event()
        self._asked = weakref.WeakSet[Any]()
        """The queue that each client waits at."""
        super().__init__(provider, PromptCache(provider.cli_args.prompt_cache_size))

    def _run_generate(self) -> None:
        """Nothing, in the thread that mlx-lm starts: `run` generates."""

    def generation_available(self) -> bool:
        return not self._ended.is_set()

    def run(self) -> None:
        """Generate until the run is stopped, in the thread whose streams the model and the group of the ranks are
        of. Raises PeerLost, GroupError."""
        try:
            while not self._stop:
                try:
                    self._generate()
                except Exception as error:
                    if isinstance(error, TrainerError) or not self._asked:
                        raise
                    # Of one request, where mlx-lm generates for several at once: it must not end the server.
                    for answers in list(self._asked):
                        answers.put(error)
        finally:
            self._ended.set()

    def _next_request(self, timeout: float | None = None) -> Any:
        divided = self.model_provider.generator.divided
        if divided is not None and self.requests.empty():
            timeout = divided.rest()
        if (asked := super()._next_request(timeout)) is not None:
            self._asked.add(asked[0])
        return asked

    def _tokenize(self, tokenizer: Any, request: Any, arguments: Any) -> tuple[Any, ...]:
        """Raises ValueError and others for what cannot be generated: where several are generated for at once, mlx-lm
        gives an error to the one request that it is of here alone."""
        prompt, *more = super()._tokenize(tokenizer, request, arguments)
        if not prompt:
            raise ValueError("the prompt has no tokens")
        logits = mx.zeros((1, self.model_provider.vocabulary))
        for process in _make_logits_processors(arguments):
            logits = process(mx.array(prompt), logits)
        mx.eval(_make_sampler(arguments, tokenizer)(logits))
        return prompt, *more

    def _make_state_machine(self, model: Any, tokenizer: Any, stop_words: list[str]) -> tuple[Any, Any]:
        """The words end an answer by their tokens, or in `_until`: mlx-lm would cut them out of its text."""
        sequences, _ = super()._make_state_machine(model, tokenizer, stop_words)
        return sequences, super()._make_state_machine(model, tokenizer, [])[1]

    def generate(
        self, request: Any, arguments: Any, progress_callback: Callable[[int, int], None]
    ) -> tuple[Any, Iterator[Any]]:
        def progress(processed: int, total: int) -> None:
            self._go_on(request)
            progress_callback(processed, total)

        try:
            context, responses = super().generate(request, arguments, progress)
        except Exception as error:
            raise RequestRefused(str(error)) from error
        ended = self._until(arguments.stop_words, context, responses)
        return context, self._counted(request, context, ended, probe=arguments.model.model == PROBE)

    def _go_on(self, request: Any) -> None:
        """Raises ConnectionAbortedError once the client has gone away. No more tokens are generated for it, and where
        several are answered at once no more of its prompt is computed."""
        self.active_at = time.monotonic()
        with self._reporting:
            self._reporter.going_on()
        if _is_closed(request.connection):
            raise ConnectionAbortedError("the client has gone away")

    def _until(self, words: list[str], context: Any, responses: Iterator[Any]) -> Iterator[Any]:
        """`responses` up to the first of the stop words, wherever it begins and ends in the tokens. Text that may begin
        one is held back."""
        tokenizer, text = self.model_provider.tokenizer, ""
        for response in responses:
            text += response.text
            places = [place for word in words if (place := text.find(word)) >= 0]
            if places or response.finish_reason == "stop":
                context.stop()
                # Where a word's tokens are found first, the last of them may have no text yet.
                ended = [
                    word for word in words if tokenizer.encode(word, add_special_tokens=False)[-1:] == [response.token]
                ]
                # mlx-lm shows no text with the reason "stop", which it gives by itself where there is no more.
                end = min(places, default=len(text) - _begun(text, ended))
                yield replace(response, text=text[:end], finish_reason=None)
                return
            shown = len(text) - (_begun(text, words) if response.finish_reason is None else 0)
            yield replace(response, text=text[:shown])
            text = text[shown:]

    def _counted(self, request: Any, context: Any, responses: Iterator[Any], *, probe: bool) -> Iterator[Any]:
        tokens, started = 0, time.perf_counter()
        try:
            for response in responses:
                tokens += 1
                self._go_on(request)
                if self._stop:
                    context.stop()
                yield response
        finally:
            rate = tokens / max(time.perf_counter() - started, 1e-9)
            with self._reporting:
                self._requests, self._tokens = self._requests + (not probe), self._tokens + tokens * (not probe)
                counts = {"requests": self._requests, "tokens": self._tokens, "tokens_per_second": rate}
                if not probe:
                    self._reporter.event("served", **counts)


def _without_nulls(body: dict[str, Any]) -> dict[str, Any]:
    """A parameter that is null has its default value, as with OpenAI; what is asked has none."""
    return {key: value for key, value in body.items() if value is not None or key in ("prompt", "messages")}


def _begun(text: str, words: Iterable[str]) -> int:
    """How many characters at the end of `text` may begin one of the `words`."""
    return max((size for word in words for size in range(1, len(word)) if text.endswith(word[:size])), default=0)


def _is_closed(connection: socket.socket) -> bool:
    """By its other end. Raises OSError."""
    readable = poll()
    readable.register(connection, POLLIN)
    return bool(readable.poll(0)) and not connection.recv(1, socket.MSG_PEEK)


class Health:
    """Shows that requests are answered: by one of a single token, unless recent ones have shown it. Never two at
    once."""

    def __init__(self, service: Service, address: tuple[Any, ...], token: str | None) -> None:
        """`address`: the server's host and port, as its socket has them."""
        self._service, self._address, self._token = service, address, token
        self._probing = threading.Lock()
        self._failed_at = float("-inf")

    def check(self, recent_s: float = _RECENT_S) -> bool:
        """`recent_s`: how old what is known may be, in seconds."""
        with self._probing:
            oldest = time.monotonic() - recent_s
            if self._service.active_at > oldest:
                return True
            if self._failed_at > oldest:
                return False
            answered = self._ask()
            self._failed_at = float("-inf") if answered else time.monotonic()
            return answered

    def _ask(self) -> bool:
        host, port = self._address[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        connection = http.client.HTTPConnection(host, port, _PROBE_LIMIT_S)
        try:
            body = json.dumps({"model": PROBE, "prompt": "a", "max_tokens": 1})
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._token or ''}"}
            connection.request("POST", "/v1/completions", body, headers)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


class Handler(APIHandler):  # type: ignore[misc]
    """mlx-lm's, for those who have the token, with a health check that generates a token."""

    timeout = _CLIENT_LIMIT_S
    body = property(lambda self: self._body, lambda self, body: setattr(self, "_body", _without_nulls(body)))

    def __init__(self, service: Service, token: str | None, health: Health, *args: Any, **more: Any) -> None:
        self._token, self._health = token, health
        super().__init__(service, *args, system_fingerprint=get_system_fingerprint(), **more)

    def do_POST(self) -> None:  # noqa: N802
        if self._authorized():
            try:
                self.rfile = io.BytesIO(self._read_body())
                super().do_POST()
            except RequestRefused as refused:
                self._refuse(400 if self.response_generator.generation_available() else 503, str(refused))

    def _read_body(self) -> bytes:
        """That of a request that mlx-lm takes: it answers others as OpenAI's clients do not understand. Raises
        RequestRefused."""
        length = self._body_bytes()
        if length is None:
            raise RequestRefused("Content-Length must be the number of bytes that follow, below 100 million")
        body = self.rfile.read(length)
        try:
            document = json.loads(body.decode())
        except (ValueError, RecursionError) as error:
            raise RequestRefused(f"the request is not JSON: {error}") from error
        if not isinstance(document, dict):
            raise RequestRefused("the request must be an object of JSON")
        return body

    def _body_bytes(self) -> int | None:
        """None where that is not told, or is more than a request may have."""
        length = self.headers.get("Content-Length", "")
        return int(length) if _LENGTH.fullmatch(length) else None

    def do_GET(self) -> None:  # noqa: N802
        if self.path == "/health" or self._authorized():
            super().do_GET()

    def validate_model_parameters(self) -> None:
        """Raises RequestRefused."""
        try:
            super().validate_model_parameters()
        except (ValueError, TypeError, OverflowError) as error:
            raise RequestRefused(str(error)) from error
        usage = self.body.get("stream_options", {})
        if not isinstance(usage, dict):
            raise RequestRefused("stream_options must be an object")
        # mlx-lm takes for granted that it is there.
        usage.setdefault("include_usage", False)
        if self.body.get("n", 1) != 1:
            raise RequestRefused("n must be 1: a request has one answer")
        if self.seed is not None:
            # MLX takes 64 bits without a sign.
            self.seed %= 1 << 64

    def handle_chat_completions(self) -> Any:
        """Raises RequestRefused."""
        messages = self.body.get("messages")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise RequestRefused("messages must be a list of messages")
        if any(_image_parts(messages)):
            # mlx-lm would open their addresses before it refuses them.
            raise RequestRefused("the model reads text, and no images")
        return super().handle_chat_completions()

    def handle_text_completions(self) -> Any:
        """Raises RequestRefused."""
        if not isinstance(self.body.get("prompt"), str):
            raise RequestRefused("prompt must be a text")
        return super().handle_text_completions()

    def handle_completion(self, request: Any, stop_words: Any) -> None:
        """Raises RequestRefused."""
        request.connection = self.connection
        if not set(self.logit_bias or ()) <= self.response_generator.model_provider.tokens:
            # MLX does not check indices.
            raise RequestRefused("logit_bias names what is no token")
        if not isinstance(stop_words, list) or not all(isinstance(word, str) and word for word in stop_words):
            raise RequestRefused("stop must be a text, or a list of texts that are not empty")
        super().handle_completion(request, stop_words)

    def handle_health_check(self) -> None:
        healthy = self._health.check()
        self._reply(200 if healthy else 503, {"status": "ok" if healthy else "unavailable"})

    def handle_models_request(self) -> None:
        about = {"object": "model", "created": self.created, "owned_by": "flightdeck"}
        models = {name: {"id": name, **about} for name in (self.response_generator.cli_args.model, BASE)}
        name = unquote(self.path.removeprefix("/v1/models").strip("/"))
        if not name:
            self._reply(200, {"object": "list", "data": [*models.values()]})
        elif name in models:
            self._reply(200, models[name])
        else:
            self._refuse(404, f"there is no model {name}", "model_not_found")

    def log_request(self, *status: Any) -> None:
        if getattr(self, "requested_model", None) != PROBE:
            super().log_request(*status)

    def _authorized(self) -> bool:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if self._token is None or hmac.compare_digest(given.encode(), self._token.encode()):
            return True
        # A connection that is closed with something unread is reset, and the client never sees why.
        self.rfile.read(min(self._body_bytes() or 0, _UNREAD_BYTES))
        self._refuse(401, "the token of this server is missing or wrong", "invalid_api_key")
        return False

    def _refuse(self, status: int, why: str, code: str | None = None) -> None:
        self._reply(status, {"error": {"message": why, "type": "invalid_request_error", "code": code}})

    def _reply(self, status: int, document: dict[str, Any]) -> None:
        self._set_completion_headers(status)
        self.end_headers()
        self.wfile.write(json.dumps(document).encode())


class Server(ThreadingHTTPServer):
    daemon_threads = True
    # Of eight clients at once none is to wait for the kernel to take its connection.
    request_queue_size = 128

    def __init__(self, options: ServeOptions) -> None:
        """Takes its port; `listen` lets clients in. Raises JobError."""
        self.RequestHandlerClass: Callable[..., Handler]
        self.token = os.environ.get(API_TOKEN_ENV) or None
        if self.token is None and not is_loopback(options.host):
            raise JobError(f"{options.host} is no loopback address: a server there needs a token")
        self.address_family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        super().__init__((options.host, options.port), partial(Handler), bind_and_activate=False)
        try:
            self.server_bind()
        except (OSError, OverflowError) as error:
            self.server_close()
            why = getattr(error, "strerror", None) or error
            raise JobError(f"{options.host}:{options.port} cannot be listened on: {why}") from error
        shown = f"[{options.host}]" if ":" in options.host else options.host
        self.address = f"http://{shown}:{self.server_port}/v1"

    @contextlib.contextmanager
    def listen(self, service: Service, reporter: Reporter, stop: threading.Event) -> Iterator[None]:
        """Other threads take requests, and see to it that a token is generated now and then."""
        health = Health(service, self.server_address, self.token)
        self.RequestHandlerClass = partial(Handler, service, self.token, health)
        self.server_activate()

        def watch() -> None:
            announced, model = False, service.cli_args.model
            while not stop.wait(_POLL_S):
                if health.check(_PROBE_EVERY_S) and not announced:
                    announced, token = True, self.token is not None
                    reporter.event("result", kind="serving", address=self.address, model=model, token=token)
                    reporter.print(f"serving {model} at {self.address}")

        for target in (self.serve_forever, watch):
            threading.Thread(target=target, name=target.__name__, daemon=True).start()
        try:
            yield
        finally:
            self.shutdown()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Mostly of a client that has gone away: no traceback, which would look like this rank's end."""
        print(f"{client_address[0]}: {sys.exc_info()[1]}", flush=True)


def serve(process: TrainingProcess, collective: Collective) -> None:
    """Serve until the run is stopped. Raises JobError, GroupError, PeerLost."""
    reporter, stop = process.reporter, process.control.stop
    task = Task(**process.spec.task or {})
    options = ServeOptions(**task.options)
    if task.weights is None:
        raise JobError("the run has saved no weights to serve")
    with Server(options) if process.rank == 0 else contextlib.nullcontext() as server:
        generator = load(process, collective, task)
        generator.adapter.load(broadcast_file(collective, Path(task.weights)), fuse=False, keep_base=True)
        generator.adapter.evaluate()
        reporter.phase("serving")
        if server is not None:
            service = Service(LoadedModel(generator, options), reporter, stop)
            with server.listen(service, reporter, stop):
                service.run()
            if generator.divided is not None:
                generator.divided.end()
        elif generator.divided is not None:
            generator.divided.follow(reporter.going_on, partial(select, generator))
    generator.end(collective)
