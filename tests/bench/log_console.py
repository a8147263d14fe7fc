"""The smallest console with a real LogView: follows a run's logs and answers every key with a number.

`python -m tests.bench.log_console RUN_DIRECTORY`, started by tests.bench.logs on a pseudo-terminal of its own.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

from textual.app import App, ComposeResult
from textual.events import Key
from textual.widgets import Static

from engine.store.layout import RunDir
from tui.widgets.log_view import LogView


def settle_memory() -> None:
    """Leave what there is now out of every later garbage collection."""
    gc.collect()
    gc.freeze()


class LogConsole(App[None]):
    """`x` is counted; `p` goes a page up and `f` follows again."""

    def __init__(self, run_dir: RunDir) -> None:
        super().__init__()
        self._run_dir = run_dir
        self._answered = 0

    def compose(self) -> ComposeResult:
        yield Static("answer 0.", id="answer", markup=False)
        yield LogView()

    def on_mount(self) -> None:
        self.query_one(LogView).open(self._run_dir)
        # What start-up made stays; going through it at every full collection holds up keys for 50 ms.
        self.call_after_refresh(settle_memory)

    def on_key(self, event: Key) -> None:
        view = self.query_one(LogView)
        match event.key:
            case "x":
                self._answered += 1
                self.query_one("#answer", Static).update(f"answer {self._answered}.")
            case "p":
                view.move("page_up")
            case "f":
                view.follow()
            case "q":
                self.exit()


if __name__ == "__main__":
    LogConsole(RunDir(Path(sys.argv[1]))).run()
