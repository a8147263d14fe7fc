"""The console on a real terminal: it leaves it as it was, with an exit code that tells how it ended."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.terminal import Terminal
from tests.waiting import wait_until

CONSOLE: Final = "import sys; from tui.cli import main; sys.exit(main(sys.argv[1:]))"
BROKEN: Final = (
    """
from tui.app import FlightDeckApp

def broken(app):
    raise RuntimeError("broken on purpose")

FlightDeckApp._tick = broken
"""
    + CONSOLE
)
CONFIG: Final = '[[node]]\nname = "local-0"\n\n[job]\ncommand = ["true"]\n'
SHOW_CURSOR: Final = b"\x1b[?25h"
ENTER_ALTERNATE_SCREEN: Final = b"\x1b[?1049h"
LEAVE_ALTERNATE_SCREEN: Final = b"\x1b[?1049l"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "flightdeck.toml"
    file.write_text(CONFIG)
    return file


def console(code: str, home: Path, *arguments: str, term: str = "xterm-256color") -> Terminal:
    env = {"FLIGHTDECK_HOME": str(home), "TERM": term}
    return Terminal([sys.executable, "-c", code, *arguments], env=env)


def assert_restored(terminal: Terminal) -> None:
    assert terminal.cooked
    for sequence in (SHOW_CURSOR, LEAVE_ALTERNATE_SCREEN):
        assert sequence in terminal.output


SIGNALS: Final = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)


@SIGNALS
def test_a_signal_restores_the_terminal_and_is_the_exit_code(config: Path, home: Path, number: signal.Signals) -> None:
    with console(CONSOLE, home, "-c", str(config)) as terminal:
        terminal.read_until(b"commands")
        assert not terminal.cooked
        terminal.signal(number)
        assert terminal.wait() == 128 + number
        assert_restored(terminal)


@SIGNALS
def test_a_signal_in_the_first_moment_does_the_same(config: Path, home: Path, number: signal.Signals) -> None:
    with console(CONSOLE, home, "-c", str(config)) as terminal:
        terminal.read_until(ENTER_ALTERNATE_SCREEN)
        terminal.signal(number)
        assert terminal.wait() == 128 + number
        assert_restored(terminal)


def test_a_strangers_python_is_not_run_before_a_question_that_is_asked_once(tmp_path: Path, home: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ntouch "{tmp_path}/ran"\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    file = tmp_path / "flightdeck.toml"
    file.write_text(f'[[node]]\nname = "local-0"\npython = "{python}"\n\n[job]\ncommand = ["true"]\n')
    with console(CONSOLE, home, "-c", str(file)) as terminal:
        terminal.read_until(b"run what this file names?")
        # Enter is on Cancel: nothing is probed, and the console goes on without the file.
        terminal.press(b"\r")
        terminal.read_until(b"was not accepted")
        assert b"there is no flightdeck.toml here" not in terminal.output
        terminal.press(b"q")
        assert terminal.wait() == 0
    assert not (tmp_path / "ran").exists()
    with console(CONSOLE, home, "-c", str(file)) as terminal:
        terminal.read_until(b"run what this file names?")
        terminal.press(b"l\r")
        wait_until((tmp_path / "ran").exists)
        terminal.press(b"q")
        assert terminal.wait() == 0
    (tmp_path / "ran").unlink()
    with console(CONSOLE, home, "-c", str(file)) as terminal:
        wait_until((tmp_path / "ran").exists)
        terminal.press(b"q")
        assert terminal.wait() == 0
        assert b"run what this file names?" not in terminal.output


def test_a_crash_restores_the_terminal_and_is_a_failure(config: Path, home: Path) -> None:
    with console(BROKEN, home, "-c", str(config)) as terminal:
        assert terminal.wait() == 1
        assert_restored(terminal)
        assert b"broken on purpose" in terminal.output


@pytest.mark.needs("linux")
def test_the_question_names_a_sync_script_and_a_models_own_code(tmp_path: Path, home: Path) -> None:
    file, script = tmp_path / "flightdeck.toml", tmp_path / "sync.sh"
    script.touch()
    job = '[job]\nmodel = "model"\ndata = "data"\ntrust_remote_code = true\n'
    file.write_text(f'[[node]]\nname = "local-0"\n{job}[preflight]\nsync_script = "{script}"\n')
    with console(CONSOLE, home, "-c", str(file)) as terminal:
        for named in (b"run what this file names?", b"sync_script", b"own code", b"trust_remote_code"):
            terminal.read_until(named)
        terminal.press(b"\r")
        terminal.read_until(b"was not accepted")
        terminal.press(b"q")
        assert terminal.wait() == 0


def test_ctrl_z_gives_the_terminal_back_until_the_console_is_continued(config: Path, home: Path) -> None:
    with console(CONSOLE, home, "-c", str(config)) as terminal:
        terminal.read_until(b"idle")
        terminal.press(b"\x1a")
        terminal.read_until(LEAVE_ALTERNATE_SCREEN)
        wait_until(lambda: "T" in Path(f"/proc/{terminal.pid}/stat").read_text().rpartition(")")[2].split()[0])
        assert terminal.cooked
        terminal.signal(signal.SIGCONT)
        # The other screen was cleared: all of it is drawn anew.
        terminal.read_until(b"3 calibration")
        assert not terminal.cooked
        terminal.press(b"q")
        assert terminal.wait() == 0
        assert_restored(terminal)


def test_a_console_under_a_flood_of_keys_leaves_when_its_terminal_is_gone(config: Path, home: Path) -> None:
    with console(CONSOLE, home, "-c", str(config)) as terminal:
        terminal.read_until(b"idle")
        terminal.flood(b"jk12345" * 40, 40_000)
        assert terminal.hang_up() == 128 + signal.SIGHUP


def test_a_signal_comes_through_a_flood_of_keys(config: Path, home: Path) -> None:
    with console(CONSOLE, home, "-c", str(config)) as terminal:
        terminal.read_until(b"idle")
        terminal.flood(b"jk12345" * 40, 40_000)
        terminal.signal(signal.SIGTERM)
        assert terminal.wait() == 128 + signal.SIGTERM
        assert terminal.cooked


COLOUR: Final = re.compile(rb"\x1b\[((?:\d+;)*\d+)m")


def test_every_key_can_be_read_with_16_colours(config: Path, home: Path) -> None:
    env = {"FLIGHTDECK_HOME": str(home), "TERM": "xterm-16color", "COLORTERM": ""}
    with Terminal([sys.executable, "-c", CONSOLE, "-c", str(config)], env=env) as terminal:
        terminal.read_until(b"idle")
        terminal.press(b"q")
        terminal.wait()
    styles = [set(map(int, style.split(b";"))) for style in COLOUR.findall(bytes(terminal.output))]
    written = [(ink, ink + 10) for ink in (*range(30, 38), *range(90, 98))]
    assert not [pair for style in styles for pair in written if style.issuperset(pair)], "ink on ink of its own colour"
    assert any({37, 40} <= style for style in styles)


@pytest.mark.parametrize("command", [(), ("demo",)], ids=["console", "demo"])
def test_a_terminal_that_cannot_be_drawn_on_is_refused_in_one_line(home: Path, command: tuple[str, ...]) -> None:
    with console(CONSOLE, home, *command, term="dumb") as terminal:
        assert terminal.wait() == 2
        lines = terminal.output.decode().splitlines()
        assert len(lines) == 1 and "TERM=dumb" in lines[0] and "--headless" in lines[0], lines
