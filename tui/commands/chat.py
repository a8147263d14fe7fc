"""chat: a conversation with what a run has trained, or with its base model, line by line."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

from engine.api import ChatAnswer, Engine, ExitCode, sanitise, sanitise_text, serve_request
from engine.errors import FlightDeckError
from tui.commands.follow import Follower, print_end
from tui.commands.launch import begin, start_task, stop_run
from tui.commands.tasks import until_served
from tui.commands.terminal import Lines, is_person, print_json

COMMANDS = ("/base", "/trained", "/new")


def chat(options: argparse.Namespace, engine: Engine) -> int:
    """Every line of stdin is a message. Without --server a server is started for it, and stopped at the end."""
    progress = Lines(sys.stderr)
    if options.server is not None:
        return _converse(options, engine, engine.runs.find(options.server).id)
    request = serve_request("127.0.0.1", 0, options.max_tokens, divided=options.divided)
    record, interrupts = begin(lambda: asyncio.run(start_task(engine, options.run, request)), progress)
    try:
        interrupts.deliver()
        snapshot = Follower(engine, record.id, progress, quiet=True).follow(until_served)
        if snapshot.record.state.ended:
            print_end(progress, snapshot)
            return ExitCode.FAILED
        return _converse(options, engine, record.id)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    finally:
        asyncio.run(stop_run(engine, record.id, progress))


def _converse(options: argparse.Namespace, engine: Engine, server: str) -> int:
    """Lines are read between runs of the loop: a thread that reads them would keep ctrl+c waiting for one more."""
    with asyncio.Runner() as loop:
        try:
            loop.run(engine.chats.served(server))
            return _exchange(options, engine, server, loop)
        finally:
            loop.run(engine.close())


def _exchange(options: argparse.Namespace, engine: Engine, server: str, loop: asyncio.Runner) -> int:
    person, progress = is_person(sys.stdin), Lines(sys.stderr)
    model, messages, exchanges = "base" if options.base else "trained", list[dict[str, str]](), list[dict[str, Any]]()
    code = ExitCode.OK
    if person:
        progress.say("/base and /trained choose who answers, /new begins anew, ctrl+d ends")
    while True:
        if person:
            print(f"{model}> ", end="", file=sys.stderr, flush=True)
        if not (line := sys.stdin.readline()):
            break
        text = line.strip()
        if text == "/new":
            messages.clear()
        elif text in COMMANDS:
            model = text[1:]
        elif text.startswith("/"):
            progress.say(f"{sanitise(text.encode())} is no command: there are {', '.join(COMMANDS)}")
        elif text:
            messages.append({"role": "user", "content": text})
            if (answer := loop.run(_answer(options, engine, server, messages, model))) is not None:
                about = {"answer": answer.text, "thought": answer.thought, "cut": answer.cut}
                exchanges.append({"model": model, "prompt": text, **about})
            elif not person:
                code = ExitCode.FAILED
                break
    if options.json:
        print_json(exchanges)
    return code


async def _answer(
    options: argparse.Namespace, engine: Engine, server: str, messages: list[dict[str, str]], model: str
) -> ChatAnswer | None:
    """The answer, printed as it comes, and behind `messages`; None where there is none, which is said."""
    progress, answer, whole = Lines(sys.stderr), ChatAnswer(), False
    try:
        async for piece in engine.chats.reply(server, messages, model=model, max_tokens=options.max_tokens):
            if piece.thought and not answer.thought:
                progress.say("thinking")
            answer += piece
            if not options.json:
                print(sanitise_text(piece.text), end="", flush=True)
        whole, note = True, answer.note(options.max_tokens)
    except FlightDeckError as error:
        note = f"flightdeck: {error}"
    if not options.json:
        print(flush=True)
    if note:
        progress.say(note)
    if whole and answer.text:
        messages.append({"role": "assistant", "content": answer.text})
    else:
        messages.pop()
    return answer if whole else None
