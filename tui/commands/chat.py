"""chat: a conversation with what a run has trained, or with its base model, line by line."""

from __future__ import annotations

import argparse
import asyncio
import sys

from engine.api import Engine, ExitCode, sanitise, sanitise_text, serve_request
from tui.commands.follow import Follower, print_end
from tui.commands.launch import begin, stop_run
from tui.commands.tasks import until_served
from tui.commands.terminal import Lines, is_person, print_json

COMMANDS = ("/base", "/trained", "/new")


def chat(options: argparse.Namespace, engine: Engine) -> int:
    """Every line of stdin is a message. Without --server a server is started for it, and stopped at the end."""
    progress = Lines(sys.stderr)
    if options.server is not None:
        return _converse(options, engine, engine.runs.find(options.server).id)
    request = serve_request("127.0.0.1", 0, options.max_tokens, divided=options.divided)
    record, interrupts = begin(lambda: asyncio.run(engine.tasks.start(options.run, request)), progress)
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
    model, messages, exchanges = "base" if options.base else "trained", list[dict[str, str]](), list[dict[str, str]]()
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
            answer = loop.run(_answer(options, engine, server, messages, model))
            messages.append({"role": "assistant", "content": answer})
            exchanges.append({"model": model, "prompt": text, "answer": answer})
    if options.json:
        print_json(exchanges)
    return ExitCode.OK


async def _answer(
    options: argparse.Namespace, engine: Engine, server: str, messages: list[dict[str, str]], model: str
) -> str:
    """The answer, printed as it comes."""
    pieces = []
    async for piece in engine.chats.reply(server, messages, model=model, max_tokens=options.max_tokens):
        pieces.append(piece)
        if not options.json:
            print(sanitise_text(piece), end="", flush=True)
    if not options.json:
        print(flush=True)
    return "".join(pieces)
