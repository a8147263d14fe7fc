"""The OpenAI-compatible server of a run's weights, asked by OpenAI's own client: one rank, and a model divided over
two."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlx_lm.utils import load_tokenizer

from engine.protocol.attempt import AttemptSpec, RankSpec
from engine.protocol.events import EventWriter
from engine.protocol.job import JobError
from engine.protocol.task import API_TOKEN_ENV
from engine.trainer import http_server
from engine.trainer.http_server import Health, ServeOptions, Server, Service, serve
from engine.training.process import Control, TrainingProcess
from engine.training.reporting import Reporter
from tests.openai_client import openai
from tests.training.generation_cases import PROMPTS, Made, Trained, make_trained, stock
from tests.training.tiny import Tiny
from tests.training.together import together
from tests.waiting import wait_until

TOKENS = 16
ENDLESS = 100_000
QUESTIONS = [*PROMPTS, *(f"say {number}" for number in range(6))]


@pytest.fixture(scope="module")
def trained(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return make_trained(tiny, tmp_path_factory.mktemp("trained"), Made("llama"))


class Served:
    """A server in threads of this process."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.stop = threading.Event()

    def events(self, name: str, rank: int = 0) -> list[dict[str, Any]]:
        file = self.home / f"rank{rank}.events.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == name]

    @property
    def address(self) -> str:
        return str(self.events("result")[0]["address"])

    @property
    def port(self) -> int:
        return int(self.address.split(":")[2].split("/")[0])

    def client(self, key: str = "none") -> Any:
        return openai().OpenAI(base_url=self.address, api_key=key, timeout=60, max_retries=0)

    def ask(self, question: str, *, stream: bool = False, model: str = "trained") -> str:
        with self.client() as client:
            if not stream:
                answer = client.completions.create(model=model, prompt=question, max_tokens=TOKENS)
                assert answer.usage is not None and answer.usage.completion_tokens == TOKENS
                return str(answer.choices[0].text)
            pieces = client.completions.create(model=model, prompt=question, max_tokens=TOKENS, stream=True)
            return "".join(piece.choices[0].text for piece in pieces)

    def health(self) -> int:
        return httpx.get(self.address.removesuffix("v1") + "health", timeout=60, trust_env=False).status_code


@contextmanager
def served(home: Path, trained: Trained, ranks: int = 1, **options: Any) -> Iterator[Served]:
    """Until the end of the block, when it is stopped, and has to end."""
    server = Served(home)
    weights = str(trained.adapter / "adapters.safetensors")
    task = {"kind": "serve", "source": "trained", "weights": weights}
    task["options"] = {"name": "mine", "port": 0, **options}  # type: ignore[assignment]
    specs = [RankSpec(number, f"n{number}", "python", str(home)) for number in range(ranks)]
    spec = AttemptSpec("run", 1, "nonce", "ring", ranks, specs, job=trained.job, task=task)

    def one(group: Any) -> None:
        control = Control()
        control.stop = server.stop
        events = EventWriter(home / f"rank{group.rank}.events.jsonl", group.rank, 1)
        serve(TrainingProcess(spec, home, group.rank, control, Reporter(events)), group)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(together, ranks, one)
        try:
            wait_until(lambda: running.done() or bool(server.events("result")))
            if running.done():
                running.result()
            yield server
        finally:
            server.stop.set()
            running.result(30)
    assert [server.events("end", rank)[0]["stopped"] for rank in range(ranks)] == [True] * ranks


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_eight_clients_at_once_get_what_each_gets_alone(ranks: int, trained: Trained, tmp_path: Path) -> None:
    with served(tmp_path, trained, ranks) as server:
        alone = [server.ask(question) for question in QUESTIONS]
        with ThreadPoolExecutor(8) as clients:
            streams = [number % 2 == 0 for number in range(8)]
            together = list(
                clients.map(lambda one: server.ask(one[0], stream=one[1]), zip(QUESTIONS, streams, strict=True))
            )
        assert together == alone and len(set(alone)) == 8
        # Its base model, and what was trained again.
        asked = [server.ask(question, model=model) for model in ("base", "mine") for question in PROMPTS]
        assert asked == stock(trained, TOKENS).texts
        counted = server.events("served")[-1]
        assert (counted["requests"], counted["tokens"]) == (20, 20 * TOKENS)
        assert [model.id for model in server.client().models.list()] == ["mine", "base"]


def test_a_chat_streams_what_it_answers_at_once(trained: Trained, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"model": "mine", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": TOKENS}
    with served(tmp_path, trained) as server:
        client = server.client()
        whole = client.chat.completions.create(**asked).choices[0].message.content
        pieces = [
            piece.choices[0].delta.content or "" for piece in client.chat.completions.create(**asked, stream=True)
        ]
        assert whole == "".join(pieces) and len(pieces) > 2


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_for_a_client_that_goes_away_nothing_more_is_generated(ranks: int, trained: Trained, tmp_path: Path) -> None:
    with served(tmp_path, trained, ranks, max_tokens=ENDLESS) as server:
        before = server.ask(PROMPTS[0])
        with server.client() as client:
            pieces = client.completions.create(model="trained", prompt="a", max_tokens=ENDLESS, stream=True)
            assert next(pieces).choices[0].text
        leave(server, "b")
        assert server.ask(PROMPTS[0]) == before
        wait_until(lambda: len(server.events("served")) == 4)
        assert sum(event["tokens"] for event in server.events("served")[-1:]) < ENDLESS / 10


def leave(server: Served, prompt: str) -> None:
    """Ask for an answer, and go away at once."""
    body = json.dumps({"prompt": prompt})
    with socket.create_connection(("127.0.0.1", server.port)) as waiting:
        waiting.sendall(f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())


def test_the_prompt_of_a_client_that_goes_away_is_not_computed_to_its_end(trained: Trained, tmp_path: Path) -> None:
    with served(tmp_path, trained) as server:
        leave(server, "a " * 4_000)
        wait_until(lambda: bool(server.events("served")))
        assert server.events("served")[-1]["tokens"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stop_ends_what_is_under_way(ranks: int, trained: Trained, tmp_path: Path) -> None:
    with served(tmp_path, trained, ranks) as server, ThreadPoolExecutor(2) as clients, server.client() as client:
        asked: dict[str, Any] = {"model": "trained", "max_tokens": ENDLESS}
        pieces = client.completions.create(prompt="a", **asked, stream=True)
        assert next(pieces).choices[0].text
        waiting = [clients.submit(lambda text: client.completions.create(prompt=text, **asked), text) for text in "bc"]
        began = time.monotonic()
        server.stop.set()
        for one in waiting:
            one.exception(20)
        assert time.monotonic() - began < 15


MALFORMED: tuple[dict[str, Any], ...] = (
    {"prompt": 5}, {"prompt": ["a", "b"]}, {"prompt": ""}, {"prompt": "a", "stop": [1]}, {"prompt": "a", "stop": [""]},
    {"prompt": "a", "logit_bias": {"999999": 1}}, {"prompt": "a", "logit_bias": {"-1": 1}},
    {"prompt": "a", "top_k": 10**6, "temperature": 1.0}, {"prompt": "a", "xtc_probability": 1.0, "temperature": 1.0},
    {"prompt": "a", "temperature": float("nan")}, {"prompt": "a", "temperature": 10**400},
    {"prompt": "a", "seed": -1}, {"prompt": "a", "seed": 2**70}, {"prompt": "a", "stream_options": 5, "stream": True},
    {"prompt": "a", "model": "\ud800"}, {"prompt": "\ud800"}, {"messages": 5}, {"messages": []}, {"messages": [5]},
    {"messages": [{}]}, {"messages": [{"role": "tool", "content": 5}], "chat_template_kwargs": 5},
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_whatever_a_client_sends_the_next_one_is_answered(ranks: int, trained: Trained, tmp_path: Path) -> None:
    with served(tmp_path, trained, ranks) as server:
        before = server.ask(PROMPTS[0])
        for asked in MALFORMED:
            path = "chat/completions" if "messages" in asked else "completions"
            body = json.dumps({"max_tokens": 3, **asked})
            # Some are answered, some refused, and of some the connection is closed.
            with contextlib.suppress(httpx.RemoteProtocolError):
                httpx.post(f"{server.address}/{path}", content=body, timeout=60, trust_env=False)
            assert server.ask(PROMPTS[0]) == before, asked


REFUSED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("stop must be a text", {"stop": [1]}),
    ("stop must be a text", {"stop": ["a", ""]}),
    ("`top_k` has to be an integer in the .0, 384. interval", {"top_k": 10**6, "temperature": 1.0}),
    ("prompt must be a text", {"prompt": ["a", "b"]}),
    ("prompt must be a text", {"prompt": None}),
    ("stream_options must be an object", {"stream_options": 5}),
    ("the prompt has no tokens", {"prompt": ""}),
    ("logit_bias names what is no token", {"logit_bias": {"385": 1}}),
    ("temperature must be at least 0", {"temperature": -1}),
    ("max_tokens must be of type int", {"max_tokens": "many"}),
    ("logit_bias must be a dict of int to float", {"logit_bias": {"a": 1}}),
    ("n must be 1: a request has one answer", {"n": 2}),
    ("", {"temperature": 10**400}),
    ("", {"repetition_penalty": 10**400}),
)


def test_what_one_client_sends_ends_no_answer_of_another(trained: Trained, tmp_path: Path) -> None:
    with served(tmp_path, trained, max_tokens=ENDLESS) as server, server.client() as client:
        asked: dict[str, Any] = {"model": "mine", "prompt": "a", "max_tokens": 2}
        other = client.completions.create(**asked | {"max_tokens": ENDLESS}, stream=True)
        for why, wrong in REFUSED:
            with pytest.raises(openai().BadRequestError, match=why or None):
                client.completions.create(**asked, extra_body=wrong)
        for messages in ("hi", None, [5]):
            with pytest.raises(openai().BadRequestError, match="messages must be a list of messages"):
                client.chat.completions.create(model="mine", messages=[], extra_body={"messages": messages})
        assert [*client.completions.create(**asked, stream=True, stream_options={})][-1].choices[0].finish_reason
        assert next(other).choices[0].text and client.completions.create(**asked).choices[0].text


def test_what_is_no_object_of_json_is_refused_as_openai_does(trained: Trained, tmp_path: Path) -> None:
    bodies = (b"{", b"", b"[1]", b"5", b'"a"', b"\xff", "{}".encode("utf-16"), b"[" * 100_000)
    with served(tmp_path, trained) as server:

        def refusal(body: bytes, path: str = "completions", length: str | None = None) -> str:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            connection.request("POST", f"/v1/{path}", body, {"Content-Length": length or str(len(body))})
            reply = connection.getresponse()
            assert reply.status == 400
            error = json.loads(reply.read())["error"]
            assert error["type"] == "invalid_request_error"
            return str(error["message"])

        for body in bodies:
            assert all("JSON" in refusal(body, path) for path in ("completions", "chat/completions")), body
        for length in ("9" * 5_000, "100000000", "-1", "²"):
            assert "Content-Length must be" in refusal(b"", length=length)


@pytest.mark.parametrize(("ranks", "more"), [(1, {}), (1, {"seed": 1}), pytest.param(2, {}, marks=pytest.mark.slow)])
def test_an_answer_is_continued_although_all_of_its_tokens_are_cached(
    ranks: int, more: dict[str, Any], trained: Trained, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(trained.model)
    with served(tmp_path, trained, ranks) as server, server.client() as client:

        def ask(prompt: str, tokens: int) -> tuple[str, list[int]]:
            asked: dict[str, Any] = {"model": "mine", "prompt": prompt, "max_tokens": tokens}
            answer = client.completions.create(**asked, extra_body={"logprobs": True}, **more).choices[0]
            return answer.text, [token["id"] for token in answer.logprobs.content]

        continued = 0
        for question in QUESTIONS:
            (_, whole), (text, first) = ask(question, 3), ask(question, 1)
            if tokenizer.encode(question + text) == [*tokenizer.encode(question), *first]:
                continued += 1
                assert [first + ask(question + text, 2)[1] for _ in range(2)] == [whole, whole]
        assert continued


def test_a_stop_word_ends_an_answer_wherever_it_falls_among_the_tokens(trained: Trained, tmp_path: Path) -> None:
    with served(tmp_path, trained) as server, server.client() as client:
        whole = server.ask(PROMPTS[0])
        asked: dict[str, Any] = {"model": "mine", "prompt": PROMPTS[0], "max_tokens": TOKENS}
        for place in range(1, len(whole) - 3, 2):
            stop = [whole[place : place + 3], "never said"]
            answer = client.completions.create(**asked, stop=stop).choices[0]
            pieces = [piece.choices[0] for piece in client.completions.create(**asked, stop=stop, stream=True)]
            expected = whole[: whole.index(stop[0])], "stop"
            assert (answer.text, answer.finish_reason) == expected
            assert ("".join(piece.text for piece in pieces), pieces[-1].finish_reason) == expected
        begun = client.completions.create(**asked, stop=whole[-2:] + " never said").choices[0]
        assert (begun.text, begun.finish_reason) == (whole, "length")


def test_a_null_is_no_value_and_a_seed_may_be_any_integer(trained: Trained, tmp_path: Path) -> None:
    nulls = dict.fromkeys(("temperature", "top_p", "stop", "n", "seed", "max_tokens", "presence_penalty", "logprobs"))
    with served(tmp_path, trained, max_tokens=TOKENS) as server, server.client() as client:
        answer = client.completions.create(model="mine", prompt=PROMPTS[0], extra_body=nulls)
        assert answer.choices[0].text == server.ask(PROMPTS[0])
        for seed in (-1, 2**70):
            assert client.completions.create(model="mine", prompt="a", max_tokens=2, seed=seed).choices[0].text


def test_a_model_is_described_by_its_name_and_reads_no_images(trained: Trained, tmp_path: Path) -> None:
    with served(tmp_path, trained) as server, server.client() as client, socket.create_server(("", 0)) as images:
        assert [client.models.retrieve(name).id for name in ("mine", "base")] == ["mine", "base"]
        with pytest.raises(openai().NotFoundError, match="there is no model other") as refused:
            client.models.retrieve("other")
        assert refused.value.code == "model_not_found"
        image = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{images.getsockname()[1]}/a.png"}}
        with pytest.raises(openai().BadRequestError, match="reads text, and no images"):
            client.chat.completions.create(model="mine", messages=[{"role": "user", "content": [image]}])
        images.setblocking(False)
        with pytest.raises(BlockingIOError):
            images.accept()


@pytest.mark.slow
def test_a_health_check_generates_a_token_unless_a_recent_one_did(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, open_again = list[float](), threading.Event()
    ask, next_request = Health._ask, Service._next_request

    def counted(health: Health) -> bool:
        asked.append(time.monotonic())
        return ask(health)

    def stuck(service: Service, timeout: float | None = None) -> Any:
        assert open_again.wait(60)
        return next_request(service, timeout)

    monkeypatch.setattr(Health, "_ask", counted)
    monkeypatch.setattr(http_server, "_PROBE_EVERY_S", 3600.0)
    monkeypatch.setattr(http_server, "_PROBE_LIMIT_S", 1.0)
    with served(tmp_path, trained) as server, ThreadPoolExecutor(20) as clients:
        assert set(clients.map(lambda _: server.health(), range(20))) == {200} and len(asked) == 1
        monkeypatch.setattr(Health.check, "__defaults__", (0.5,))
        time.sleep(0.6)
        monkeypatch.setattr(Service, "_next_request", stuck)
        began = time.monotonic()
        assert set(clients.map(lambda _: server.health(), range(20))) == {503}
        assert len(asked) <= 1 + (time.monotonic() - began) / 0.5
        open_again.set()
        wait_until(lambda: server.health() == 200)
        assert server.events("served") == [], "a health check is no client"


def test_who_has_no_token_is_refused_in_words(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_TOKEN_ENV, "the token")
    refusal = openai().AuthenticationError
    with served(tmp_path, trained) as server:
        for question in ("a", "a" * 500_000):
            with pytest.raises(refusal, match="token of this server is missing or wrong") as refused:
                server.client("another").completions.create(model="mine", prompt=question)
            assert (refused.value.code, refused.value.status_code) == ("invalid_api_key", 401)
        with pytest.raises(refusal):
            server.client("another").models.list()
        assert server.health() == 200
        assert server.client("the token").completions.create(model="mine", prompt="a", max_tokens=2).choices[0].text


@pytest.mark.parametrize(
    ("host", "port", "why"),
    [
        ("0.0.0.0", 0, "no loopback address: a server there needs a token"),
        ("192.0.2.1", 0, "cannot be listened on"),
        ("no.such.host.invalid", 0, "cannot be listened on"),
        ("127.0.0.1", 99_999, "cannot be listened on"),
        ("127.0.0.1", None, "127.0.0.1:.* cannot be listened on: Address already in use"),
    ],
)
def test_where_it_cannot_listen_is_said_before_anything_is_loaded(
    host: str, port: int | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if host not in ("0.0.0.0", "127.0.0.1"):
        monkeypatch.setenv(API_TOKEN_ENV, "the token")
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(JobError, match=why):
        Server(ServeOptions("mine", host, taken.getsockname()[1] if port is None else port))


def test_it_listens_on_ipv6() -> None:
    with Server(ServeOptions("mine", "::1", 0)) as server:
        assert server.address == f"http://[::1]:{server.server_port}/v1"
