"""Conversations with what a run has trained, and with its base model: these are served, and asked by the OpenAI API.
They are kept with the run."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import httpx
from pydantic import ValidationError

from engine.api.runs import RunsApi
from engine.api.session import Session
from engine.api.tasks import TasksApi, serve_request
from engine.errors import InputError, reason_text
from engine.models import FrozenModel, RunRecord
from engine.protocol.task import ANSWER_TOKENS, API_TOKEN_ENV
from engine.run.json_lines import LineFile, LineTail
from engine.run.run_plan import read_plan
from engine.run.watch import RunWatch
from engine.security.sanitise import json_object, json_or_none
from engine.task_result import Served, Text

_POLL_S = 0.1
_ANSWER_LIMIT_S = 120.0
"""For the next piece of an answer."""


class ChatExchange(FrozenModel):
    """A question and its answer."""

    at: datetime
    model: Text
    """"base", or "trained"."""
    prompt: Text
    answer: Text


@dataclass(frozen=True)
class ChatAnswer:
    """An answer as far as it has come, or a piece of it."""

    text: str = ""
    thought: str = ""
    """A thinking model's, before it answers."""
    cut: bool = False
    """At its limit of tokens."""

    def __add__(self, piece: ChatAnswer) -> ChatAnswer:
        return ChatAnswer(self.text + piece.text, self.thought + piece.thought, self.cut or piece.cut)

    def note(self, max_tokens: int = ANSWER_TOKENS) -> str:
        """How a whole answer is less than one; "" where it is not."""
        empty = "" if self.text else "it has only thought" if self.thought else "it has answered nothing"
        return ", ".join(filter(None, (empty, f"cut at {max_tokens} tokens" if self.cut else "")))


@dataclass(frozen=True)
class ChatServer:
    id: str
    """That of its run."""
    started: bool
    """For this conversation, which stops it; it was there otherwise."""


class ChatsApi:
    def __init__(self, session: Session, runs: RunsApi, tasks: TasksApi) -> None:
        self._session = session
        self._runs = runs
        self._tasks = tasks

    async def serve(self, run: str, *, divided: bool | None = None) -> ChatServer:
        """The server of a run's result that is there, or a new one, whose supervisor is in charge. Raises as
        TasksApi.start."""
        source = await asyncio.to_thread(self._runs.find_trained, run)
        for task in await asyncio.to_thread(self._runs.tasks_of, source.id):
            if task.task == "serve" and not task.state.ended:
                return ChatServer(task.id, started=False)
        request = serve_request("127.0.0.1", 0, divided=divided)
        return ChatServer((await self._tasks.start(source.id, request)).id, started=True)

    def token(self, server: str) -> str | None:
        """The token that a server's clients need; None where they need none. Raises RunNotFound, StateError."""
        return read_plan(self._runs.find(server).plan).config.job.env.get(API_TOKEN_ENV)

    async def served(self, server: str) -> Served:
        """The address of a server, once it answers. Raises RunNotFound, InputError when it has ended before that."""
        watch = RunWatch(await asyncio.to_thread(self._runs.find, server))
        while True:
            snapshot = await asyncio.to_thread(watch.poll)
            if (record := snapshot.record).task != "serve":
                why = "it is a training" if record.task is None else f"it is a task ({record.task})"
                raise InputError(f"{record.id} is no server", why=why, todo="name one of `flightdeck serve`")
            if snapshot.record.state.ended:
                raise _ended(snapshot.record)
            # A restart may have given it another port.
            if addresses := [result for result in snapshot.task_results if isinstance(result, Served)]:
                return addresses[-1]
            await asyncio.sleep(_POLL_S)

    async def reply(
        self, server: str, messages: Sequence[Mapping[str, str]], *, model: str, max_tokens: int = ANSWER_TOKENS
    ) -> AsyncGenerator[ChatAnswer, None]:
        """The pieces of an answer to a conversation, as they come; its whole text is kept. `model`: "base", or another
        name for what was trained. Closing this ends the answer. Raises RunNotFound, InputError when there is none,
        NodeUnreachable."""
        directory = await asyncio.to_thread(self._runs.find, server)
        config, served = read_plan(directory.plan).config, await self.served(server)
        address, token = urlsplit(served.address), config.job.env.get(API_TOKEN_ENV)
        body = {"model": model, "messages": [*messages], "max_tokens": max_tokens, "stream": True}
        headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
        forwarded = self._session.fleet.to(config.nodes[0]).forwarded(address.hostname or "", address.port or 80)
        answer = ChatAnswer()
        async with forwarded as (host, port), httpx.AsyncClient(timeout=_ANSWER_LIMIT_S, trust_env=False) as client:
            url = f"http://{host}:{port}{address.path}/chat/completions"
            try:
                async with client.stream("POST", url, json=body, headers=headers) as response:
                    if response.is_error:
                        why = str(_error(await response.aread()) or f"HTTP {response.status_code}")
                        raise InputError(f"{directory.id} refuses to answer", why=why, todo="see its log")
                    whole = False
                    async for line in response.aiter_lines():
                        whole = whole or line == "data: [DONE]"
                        if (piece := _piece(line)) != ChatAnswer():
                            answer += piece
                            yield piece
                    if not whole:
                        raise httpx.ReadError("it ends in the middle")
            except httpx.HTTPError as error:
                late = isinstance(error, httpx.TimeoutException)
                why = f"nothing came for {_ANSWER_LIMIT_S:.0f} s" if late else "the connection was lost"
                raise InputError(
                    f"{directory.id} does not answer", why=why, todo="ask again, or see its log"
                ) from error
        if config.job.task is not None and answer.text:
            values = {"prompt": messages[-1]["content"], "answer": answer.text, "model": model}
            exchange = ChatExchange(at=datetime.now(UTC), **values)
            await asyncio.to_thread(self._keep, config.job.task.source, exchange)

    def _keep(self, run: str, exchange: ChatExchange) -> None:
        with contextlib.closing(LineFile(self._runs.directory(run).chat)) as file:
            file.append(exchange.model_dump_json().encode())

    def exchanges(self, run: str, limit: int = 100) -> list[ChatExchange]:
        """The newest that were kept, oldest first; damaged ones are left out."""
        exchanges = deque[ChatExchange](maxlen=limit)
        for line in LineTail(self._runs.find(run).chat).objects():
            with contextlib.suppress(ValidationError):
                exchanges.append(ChatExchange.model_validate(line))
        return list(exchanges)

    def suggestions(self, run: str) -> list[str]:
        """The run's sample_prompts."""
        return [*map(str, read_plan(self._runs.find(run).plan).config.job.mlx_lm.get("sample_prompts") or ())]


def _ended(record: RunRecord) -> InputError:
    why = f"it has ended: {record.cause or reason_text(record.reason) or record.state}"
    return InputError(f"{record.id} serves nothing", why=why, todo="serve the run again")


def _error(body: bytes) -> Any:
    """The message of mlx-lm's error, or of OpenAI's."""
    error = json_object(json_or_none(body)).get("error")
    return error.get("message") if isinstance(error, dict) else error


def _piece(line: str) -> ChatAnswer:
    """One event of a streamed answer."""
    if not line.startswith("data: {"):
        return ChatAnswer()
    try:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        text, thought = (str(choice["delta"].get(key) or "") for key in ("content", "reasoning"))
        return ChatAnswer(text, thought, choice.get("finish_reason") == "length")
    except (ValueError, TypeError, KeyError, AttributeError):
        return ChatAnswer()
