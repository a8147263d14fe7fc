"""Completion in a shell: a script of the parser's commands, options and choices, which needs no Python when it runs."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import shtab


def script(parser: argparse.ArgumentParser, shell: str, home: Path) -> str:
    """For bash, zsh or fish. Runs are the folders of the state directory, newest first: FLIGHTDECK_HOME of the shell,
    else `home`."""
    list_runs = shlex.join(["sh", "-c", f'echo last; ls -t "${{FLIGHTDECK_HOME:-{home}}}/runs" 2>/dev/null'])
    bodies = {
        "bash": f'_flightdeck_runs() {{ compgen -W "$({list_runs})" -- "$1"; }}',
        "zsh": f"_flightdeck_runs() {{ compadd -V runs -- $({list_runs}) }}",
        "fish": f"function _flightdeck_runs; {list_runs}; end",
    }
    runs = {"bash": "_flightdeck_runs", "zsh": "_flightdeck_runs", "fish": "(_flightdeck_runs)", "preamble": bodies}
    completions: dict[Any, Any] = {"RUN": runs, "FILE": shtab.FILE, "DIR": shtab.DIRECTORY}
    for action in _actions(parser):
        if action.metavar in completions:
            action.complete = completions[action.metavar]  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
