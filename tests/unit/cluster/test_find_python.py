"""A host's shell looks for a python with mlx; here with homes of the test's own and interpreters that are scripts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.cluster import discovery
from engine.cluster.discovery import FoundPython, parse_find_python
from engine.cluster.transport.base import Completed

PutInterpreter = Callable[[str, str], None]


@pytest.fixture
def place(tmp_path: Path) -> PutInterpreter:
    """Puts an interpreter below the home."""

    def put(path: str, body: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)

    return put


HAS_MLX = "echo 3.12.1 0.32.4 0.32.2"
HAS_NONE = "echo \"ModuleNotFoundError: No module named 'mlx'\" >&2; exit 1"


def ask(home: Path, *first: str, before: str = "") -> FoundPython:
    """As over ssh: a shell with a bare PATH, and whatever its start files print."""
    script = before + discovery._SCRIPT
    for system in discovery._SYSTEM:
        # What this machine has must not decide the test.
        script = script.replace(f" {system}", "")
    done = subprocess.run(
        ["/bin/sh", "-c", script, "sh", discovery._ASK, *first],
        env={"HOME": str(home), "PATH": f"{home}/on-path:{os.defpath}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    return parse_find_python(Completed(done.returncode, done.stdout, done.stderr))


def test_the_first_that_has_both_is_taken_and_named_from_the_home(tmp_path: Path, place: PutInterpreter) -> None:
    place("mlx/.venv/bin/python", HAS_NONE)
    place("venvs/my env/bin/python", HAS_MLX)
    place("on-path/python3", HAS_MLX)
    found = ask(tmp_path, before="echo Welcome; echo Last login: today;")
    assert (found.python, found.about) == ("~/venvs/my env/bin/python", "python 3.12.1, mlx 0.32.4, mlx-lm 0.32.2")
    assert found.hostname


def test_one_on_the_path_will_do(tmp_path: Path, place: PutInterpreter) -> None:
    place("on-path/python3", HAS_MLX)
    assert ask(tmp_path).python == "~/on-path/python3"


def test_the_interpreter_that_runs_us_has_mlx(tmp_path: Path) -> None:
    assert ask(tmp_path, sys.executable).python == sys.executable


def test_a_host_without_says_what_was_there(tmp_path: Path, place: PutInterpreter) -> None:
    place("mlx/.venv/bin/python", HAS_NONE)
    place("on-path/python3", HAS_NONE)
    place("on-path/python", HAS_NONE)
    found = ask(tmp_path)
    assert found.python is None
    assert found.problem.startswith(f"no python with mlx and mlx-lm was found there ({tmp_path}/mlx/.venv/bin/python")
    assert ("docs/cuda.md" if sys.platform == "linux" else "docs/quickstart.md") in found.todo


def test_a_path_that_no_configuration_takes_is_none(tmp_path: Path) -> None:
    lines = b"flightdeck-init\thome\t/h\nflightdeck-init\tpython\t/h/$(id)/python\n"
    found = parse_find_python(Completed(0, lines, b""))
    assert (found.python, found.problem) == (None, "no configuration takes its python: /h/$(id)/python")


def test_a_shell_that_fails_reports_its_exit_output() -> None:
    found = parse_find_python(Completed(1, b"", b"This account is \x1b[31mcurrently not available.\n"))
    assert found.problem == "its shell ended with 1: This account is currently not available."
