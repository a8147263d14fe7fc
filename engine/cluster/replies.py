"""Reads what programs and probes print: the one place where a reply becomes a value, or the reason why it is none."""

from __future__ import annotations

import json
import sys
from typing import TypeVar

from pydantic import BaseModel

from engine.cluster.transport.base import Completed
from engine.cluster.transport.local import LocalTransport
from engine.models import Failed, Late, NoValue, Unparsable
from engine.security.sanitise import plain

_SHOWN = 200
Value = TypeVar("Value", bound=BaseModel)


def parse_output(command: str, done: Completed, value_type: type[Value], *, after_s: float) -> Value | NoValue:
    """The last line of stdout that is a `value_type` as JSON: a login shell may print around it. `command` is named in
    the reason why there is none; its time limit was `after_s` seconds."""
    value = last_json(done.stdout, value_type)
    if value is not None:
        return value
    if done.code is None:
        return Late(command=command, after_s=after_s)
    if done.code:
        return Failed(command=command, exit_code=done.code, stderr=plain(done.exit_output, _SHOWN))
    return Unparsable(command=command, output=plain(done.exit_output, _SHOWN))


def last_json(output: bytes, value_type: type[Value]) -> Value | None:
    """The last line that is a `value_type`."""
    values = (parse_line(line, value_type) for line in reversed(output.splitlines()))
    return next((value for value in values if value is not None), None)


def parse_line(line: bytes, value_type: type[Value]) -> Value | None:
    """None for a line of anything else."""
    try:
        # pydantic's own parser refuses the whole line for one lone surrogate, as of a file name that is not UTF-8.
        return value_type.model_validate(json.loads(line))
    except (ValueError, RecursionError):
        return None


async def probe_here(name: str, *arguments: str, result_type: type[Value], timeout_s: float) -> Value | NoValue:
    """A probe of this machine, with the python that runs us, in a process of its own."""
    argv = [sys.executable, "-m", "engine.node.probes", name, *arguments]
    done = await LocalTransport().run(argv, timeout_s=timeout_s)
    return parse_output(f"the {name} probe", done, result_type, after_s=timeout_s)
