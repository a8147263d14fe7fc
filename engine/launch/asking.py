"""Asks hosts by a script of ours that is sent along and answers with one JSON object, all hosts at the same time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from engine.config.models import NodeConfig
from engine.errors import LaunchError
from engine.security.sanitise import sanitise
from engine.transport.base import Completed, Transport

_TIME_LIMIT_S = 30.0
"""Far above the 0.1 s that a script takes: a Mac that wakes, or one whose disk is cold, takes its time."""
_NOT_STARTED = (126, 127)

Answer = TypeVar("Answer")


async def at_once(asked: Iterable[Awaitable[Answer]]) -> list[Answer]:
    """All the answers, in order. Raises the first error in that order, when all have come to their end: what one host
    lacks cuts nothing off in the middle on another."""
    answers = await asyncio.gather(*asked, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if not isinstance(answer, BaseException)]


async def ask(transport: Transport, node: NodeConfig, script: Path, argument: str, key: str) -> dict[str, Any]:
    """What `script` answers on the host of `node`: the object that has `key`, or `problem`.

    Raises LaunchError naming the node when its python cannot be run or does not answer, and what transports raise.
    """
    # -I and -S: what the user's site-packages and variables do to python is no part of the question, and takes time.
    argv = [node.python, "-I", "-S", "-", argument]
    try:
        completed = await transport.run(argv, timeout_s=_TIME_LIMIT_S, stdin=script.read_bytes())
    except OSError as error:
        raise _no_python(node, error.strerror or str(error)) from error
    if completed.code in _NOT_STARTED:
        raise _no_python(node, _words(completed))
    if completed.code is None:
        raise LaunchError(f"{node.name} does not answer", where=node.ssh, why=f"{_TIME_LIMIT_S:g} s are over")
    # A shell's start-up files may have said something before.
    for line in reversed(completed.stdout.splitlines()):
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(answer, dict) and (key in answer or "problem" in answer):
            return answer
    why = f"it ended with {completed.code}: {_words(completed)}"
    raise LaunchError(f"{node.python} on {node.name} gave no answer", where=node.ssh, why=why, todo="look at it there")


def _no_python(node: NodeConfig, why: str) -> LaunchError:
    return LaunchError(
        f"{node.python} cannot be run on {node.name}",
        where=node.ssh,
        why=why,
        todo="set python in its [[node]] to the interpreter that has mlx",
    )


def _words(completed: Completed) -> str:
    return sanitise(completed.last_words.encode(errors="replace"), 200)
