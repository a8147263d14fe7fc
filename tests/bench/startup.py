"""How long the console takes to its first paint, beside a bare Textual app (header, table, footer) on this machine.

    uv run python -m tests.bench.startup [--pairs N]

Whole processes under a real pty, from spawn to the first full paint, in alternating pairs; exit 1 when the median ratio
is above 1.6, or when the console had imported what it must not before its first paint (or mlx ever).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.terminal import Terminal

LIMIT: Final = 1.6
LATE: Final = {"mlx", "mlx_lm", "asyncssh", "numpy", "tinydb", "pydantic"}
"""Not before the first paint."""
NEVER: Final = {"mlx", "mlx_lm"}

BARE: Final = """
from textual.app import App
from textual.widgets import DataTable, Footer, Header

class Bare(App):
    TITLE = "bare header"
    def compose(self):
        yield Header()
        yield DataTable()
        yield Footer()
    def on_mount(self):
        table = self.query_one(DataTable)
        table.add_columns("node", "memory", "rank")
        for index in range(8):
            table.add_row(f"local-{index}", "5.1/24.8 GB", str(index))

Bare().run()
"""
BARE_LAST: Final = b"palette"

CONSOLE: Final = "import sys; from tui.cli import main; sys.exit(main(['-c', sys.argv[1]]))"
CONSOLE_LAST: Final = b"commands"

WATCHED: Final = """
import json, sys
import tui.app
from tui.poller import RunPoller

start, seen = RunPoller.start, {}

def names():
    return sorted({name.split(".")[0] for name in sys.modules})

def watched(self):
    seen["before"] = names()
    start(self)

RunPoller.start = watched
from tui.cli import main
main(["-c", sys.argv[1]])
seen["ever"] = names()
open(sys.argv[2], "w").write(json.dumps(seen))
"""

CONFIG: Final = """\
[[node]]
name = "local-0"

[[node]]
name = "local-1"

[job]
command = ["python", "train.py"]
"""


def first_paint(code: str, last: bytes, quit_key: bytes, directory: Path) -> float:
    """Seconds from spawn to the first full paint: frames are written top down, `last` is in the last line."""
    spawned = time.perf_counter()
    with _start(code, directory) as terminal:
        terminal.read_until(last)
        painted = time.perf_counter() - spawned
        terminal.press(quit_key)
        terminal.wait()
    return painted


def imported(directory: Path) -> dict[str, set[str]]:
    """Top-level modules that the console held at its first paint ("before") and at its end ("ever")."""
    result = directory / "modules.json"
    with _start(WATCHED, directory, str(result)) as terminal:
        terminal.read_until(b"ready to launch")
        terminal.press(b"q")
        terminal.wait()
    return {when: set(names) for when, names in json.loads(result.read_text()).items()}


def _start(code: str, directory: Path, *arguments: str) -> Terminal:
    argv = [sys.executable, "-c", code, str(directory / "flightdeck.toml"), *arguments]
    return Terminal(argv, env={"FLIGHTDECK_HOME": str(directory / "home")})


def measure(pairs: int, directory: Path) -> tuple[list[float], list[float]]:
    """First paints of the bare app and of the console, seconds, in alternating pairs; a pair to warm up is left out."""
    bare, console = [], []
    for _ in range(pairs + 1):
        bare.append(first_paint(BARE, BARE_LAST, b"\x11", directory))
        console.append(first_paint(CONSOLE, CONSOLE_LAST, b"q", directory))
    return bare[1:], console[1:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "flightdeck.toml").write_text(CONFIG)
        bare, console = measure(options.pairs, directory)
        modules = imported(directory)
    ratio = statistics.median(ours / theirs for ours, theirs in zip(console, bare, strict=True))
    print(f"bare Textual app  {statistics.median(bare):.3f} s")
    print(f"console           {statistics.median(console):.3f} s")
    print(f"median ratio      {ratio:.2f}  (limit {LIMIT}, {options.pairs} pairs)")
    early, ever = LATE & modules["before"], NEVER & modules["ever"]
    print(f"imported before the first paint, but should not be: {', '.join(sorted(early)) or 'none'}")
    print(f"imported ever, but should not be: {', '.join(sorted(ever)) or 'none'}")
    return 1 if ratio > LIMIT or early or ever else 0


if __name__ == "__main__":
    sys.exit(main())
