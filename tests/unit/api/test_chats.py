"""Conversations with a served model: the answer as it comes, what is kept of it, and servers that fail."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import threading
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from unittest import mock

import pytest

from engine.api.chats import ChatAnswer
from engine.api.engine import Engine
from engine.errors import InputError
from engine.protocol.task import API_TOKEN_ENV, Task
from engine.run.events import ResultReported
from engine.run.watch import RunWatch
from engine.task_result import Served
from tests.unit.run.run_maker import MadeRun, make_run_config
from tui.commands.chat import chat

PIECES = ("He", "llo", " you")


def event(text: str = "", thought: str = "", finish: str | None = None) -> bytes:
    choice = {"delta": {"content": text, "reasoning": thought}, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


class Backend:
    """A server of the tests that speaks as much of the API as an answer needs. It waits for the client to go, but after
    [DONE]; an empty piece is its own death."""

    def __init__(self, *pieces: bytes, status: str = "200 OK") -> None:
        self._pieces, self._status = pieces, status
        self.requests: list[tuple[str, dict[str, object]]] = []
        """The head of each, and its body."""
        self.left = asyncio.Event()
        """A client has gone away."""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(int(line[15:]) for line in head.lower().splitlines() if line.startswith("content-length:"))
        self.requests.append((head, json.loads(await reader.readexactly(length))))
        writer.write(f"HTTP/1.1 {self._status}\r\nContent-Type: text/event-stream\r\n\r\n".encode())
        for piece in self._pieces:
            writer.write(piece)
            await writer.drain()
        if self._pieces[-1] and not self._pieces[-1].endswith(b"[DONE]\n\n") and self._status == "200 OK":
            await reader.read()
            self.left.set()
        writer.close()


@asynccontextmanager
async def backend(*pieces: bytes, status: str = "200 OK") -> AsyncIterator[tuple[Backend, int]]:
    server = Backend(*pieces, status=status)
    async with await asyncio.start_server(server.answer, "127.0.0.1", 0) as listening:
        yield server, listening.sockets[0].getsockname()[1]


def serving(home: Path, port: int, *, token: str | None = None, cause: str | None = None) -> tuple[MadeRun, MadeRun]:
    """A training that has ended, and the run that serves it. `cause`: it has failed."""
    trained = MadeRun(home).attempt().state("succeeded", reason="completed").close()
    config = make_run_config(1)
    env = {API_TOKEN_ENV: token} if token is not None else {}
    job = config.job.model_copy(update={"task": Task("serve", trained.id), "env": env})
    server = MadeRun(home, number=1, config=config.model_copy(update={"job": job}))
    result = Served(address=f"http://127.0.0.1:{port}/v1", model="job", token=token is not None)
    server.state("running").append(ResultReported(result=result))
    if cause is not None:
        server.state("failed", reason="rank_failed", cause=cause)
    return trained, server.close()


async def answer(engine: Engine, server: str, questions: Sequence[str] = ("Hi",)) -> list[ChatAnswer]:
    messages = [{"role": "user", "content": question} for question in questions]
    async with aclosing(engine.chats.reply(server, messages, model="trained")) as pieces:
        return [piece async for piece in pieces]


async def test_an_answer_comes_in_pieces_and_is_kept_with_the_run_that_trained(tmp_path: Path) -> None:
    async with backend(b": keepalive\n\n", *map(event, PIECES), b"data: [DONE]\n\n") as (asked, port):
        trained, server = serving(tmp_path, port)
        async with Engine(tmp_path) as engine:
            trained.directory.chat.write_text('{"model": "base"}\n')
            assert await answer(engine, server.id) == [*map(ChatAnswer, PIECES)]
            (kept,) = engine.chats.exchanges(trained.id)
    assert (kept.model, kept.prompt, kept.answer) == ("trained", "Hi", "Hello you")
    ((head, body),) = asked.requests
    assert head.startswith("POST /v1/chat/completions ") and "authorization" not in head.lower()
    assert (body["model"], body["stream"]) == ("trained", True)


@pytest.mark.parametrize(
    ("events", "whole", "note"),
    [
        ((event(thought="Hm"), event("Hi"), event(finish="stop")), ChatAnswer("Hi", "Hm"), ""),
        ((event("Hi"), event(finish="length")), ChatAnswer("Hi", cut=True), "cut at 512 tokens"),
        (
            (event(thought="Hm"), event(finish="length")),
            ChatAnswer(thought="Hm", cut=True),
            "it has only thought, cut at 512 tokens",
        ),
        ((event(finish="stop"),), ChatAnswer(), "it has answered nothing"),
    ],
)
async def test_what_is_thought_is_no_text_and_an_answer_that_is_cut_says_so(
    tmp_path: Path, events: tuple[bytes, ...], whole: ChatAnswer, note: str
) -> None:
    async with backend(*events, b"data: [DONE]\n\n") as (_, port):
        trained, server = serving(tmp_path, port)
        async with Engine(tmp_path) as engine:
            assert sum(await answer(engine, server.id), ChatAnswer()) == whole
            assert [kept.answer for kept in engine.chats.exchanges(trained.id)] == [whole.text] * bool(whole.text)
    assert whole.note() == note


async def test_the_token_goes_to_the_server_and_nowhere_else(tmp_path: Path) -> None:
    async with backend(event("ok"), b"data: [DONE]\n\n") as (asked, port):
        trained, server = serving(tmp_path, port, token="s3cret")
        async with Engine(tmp_path) as engine:
            await answer(engine, server.id)
    assert "bearer s3cret" in asked.requests[0][0].lower()
    files = [*trained.directory.path.iterdir(), server.directory.journal]
    assert not [file for file in files if file.is_file() and "s3cret" in file.read_text()]


async def test_an_answer_that_is_closed_ends_the_request(tmp_path: Path) -> None:
    async with backend(*map(event, PIECES)) as (asked, port):
        trained, server = serving(tmp_path, port)
        async with Engine(tmp_path) as engine:
            async with aclosing(engine.chats.reply(server.id, [{"content": "Hi"}], model="base")) as pieces:
                assert await anext(aiter(pieces)) == ChatAnswer(PIECES[0])
            await asyncio.wait_for(asked.left.wait(), 10)
            assert engine.chats.exchanges(trained.id) == []


@pytest.mark.parametrize(
    ("pieces", "status", "why"),
    [
        ((b"{}",), "503 Service Unavailable", "refuses to answer: HTTP 503"),
        ((b'{"error": {"message": "no\\nroom"}}',), "400 Bad Request", "refuses to answer: no room"),
        ((b'{"error": "no room"}',), "404 Not Found", "refuses to answer: no room"),
        ((event("Hello"), b""), "200 OK", "does not answer: the connection was lost"),
    ],
)
async def test_a_server_that_refuses_or_breaks_off_is_one_line_and_its_answer_is_not_kept(
    tmp_path: Path, pieces: tuple[bytes, ...], status: str, why: str
) -> None:
    async with backend(*pieces, status=status) as (_, port):
        trained, server = serving(tmp_path, port)
        async with Engine(tmp_path) as engine:
            with pytest.raises(InputError, match=why) as refusal:
                await answer(engine, server.id)
            assert "\n" not in str(refusal.value) and engine.chats.exchanges(trained.id) == []


@pytest.mark.parametrize("cause", [None, "killed"])
async def test_the_address_is_what_a_server_came_to_while_it_runs(tmp_path: Path, cause: str | None) -> None:
    _, server = serving(tmp_path, 8080, cause=cause)
    assert RunWatch(server.directory).poll().record.outcome == (None if cause else "http://127.0.0.1:8080/v1")


async def test_a_server_that_has_ended_is_told(tmp_path: Path) -> None:
    trained, ended = serving(tmp_path, 1, cause="no room")
    async with Engine(tmp_path) as engine:
        with pytest.raises(InputError, match="it has ended: no room"):
            await engine.chats.served(ended.id)
        assert engine.chats.exchanges(trained.id) == []


@pytest.mark.parametrize("prompts", [["Why is it so?", "Who?"], None])
def test_first_questions_are_those_that_were_asked_while_it_trained(tmp_path: Path, prompts: list[str] | None) -> None:
    config = make_run_config(1)
    job = config.job.model_copy(update={"mlx_lm": {**config.job.mlx_lm, "sample_prompts": prompts}})
    run = MadeRun(tmp_path, config=config.model_copy(update={"job": job})).close()
    assert Engine(tmp_path).chats.suggestions(run.id) == (prompts or [])


async def test_a_training_is_no_server(tmp_path: Path) -> None:
    trained, _ = serving(tmp_path, 1)
    async with Engine(tmp_path) as engine:
        with pytest.raises(InputError, match="is no server: it is a training"):
            await engine.chats.served(trained.id)


def test_the_command_reads_in_the_main_thread_so_that_an_interrupt_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return False

        def readline(self) -> str:
            assert threading.current_thread() is threading.main_thread()
            raise KeyboardInterrupt

    engine = mock.MagicMock()
    engine.chats.served, engine.close = mock.AsyncMock(), mock.AsyncMock()
    monkeypatch.setattr(sys, "stdin", Terminal())
    with pytest.raises(KeyboardInterrupt):
        chat(Namespace(server="served", base=False, json=False), engine)
    engine.close.assert_awaited_once()


@pytest.mark.parametrize("person", [False, True])
def test_an_answer_that_fails_ends_the_command_where_nobody_can_ask_again(
    person: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = list[list[str]]()

    async def reply(_: str, messages: list[dict[str, str]], **__: object) -> AsyncIterator[ChatAnswer]:
        asked.append([message["content"] for message in messages])
        if messages[-1]["content"] == "two":
            raise InputError("it does not answer", why="the connection was lost")
        yield ChatAnswer("I am " + messages[-1]["content"])

    engine = mock.MagicMock()
    engine.chats.served, engine.close, engine.chats.reply = mock.AsyncMock(), mock.AsyncMock(), reply
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\nthree\n"))
    monkeypatch.setattr("tui.commands.chat.is_person", lambda _: person)
    code = chat(Namespace(server="served", base=False, json=True, max_tokens=512), engine)
    done = capsys.readouterr()
    prompts = ["one", "three"] if person else ["one"]
    assert (code, [exchange["prompt"] for exchange in json.loads(done.out)]) == (0 if person else 1, prompts)
    assert asked[2:] == [["one", "I am one", "three"]] * person
    assert "flightdeck: it does not answer: the connection was lost" in done.err
