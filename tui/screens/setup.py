"""The set-up of a flightdeck.toml in the console: one screen, whose steps are in `tui.screens.setup_steps`. What was
chosen is kept at each step, so that it can be left and taken up again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.events import Key, Resize
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from engine import api
from tui.glyphs import MUTED, Glyphs
from tui.state import ENGINE_ERRORS

if TYPE_CHECKING:
    from engine.api import Config, Engine, NodeCandidate, SetupChoices

Answer = TypeVar("Answer")


class SetupClient(Protocol):
    """The engine, and its work in its own thread."""

    @property
    def engine(self) -> Engine: ...

    async def call(self, make: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer: ...

    def each(self, make: Callable[[], AsyncIterator[Answer]]) -> AsyncGenerator[Answer, None]: ...


InTerminal = Callable[[str, str, str, Callable[[], list[str]]], int | None]
"""Runs a program in the terminal: what it is, where, a notice, its arguments; its exit code."""


class SetupStep:
    """One question of a set-up."""

    name: ClassVar[str]
    title: ClassVar[str]
    keys: ClassVar[str]

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.cursor = 0

    def open(self) -> None:
        """Called when it is shown."""

    def draw(self, width: int) -> list[Content]:
        raise NotImplementedError

    @property
    def rows(self) -> Sequence[str]:
        """Those that the cursor goes through."""
        return ()

    def press(self, key: str) -> bool:
        """Do what the key means here; False where it means nothing."""
        if key not in ("up", "down") or not self.rows:
            return False
        self.cursor = max(0, min(len(self.rows) - 1, self.cursor + (1 if key == "down" else -1)))
        self.moved()
        return True

    def moved(self) -> None:
        """The cursor is on another row."""

    def changed(self, text: str) -> None:
        """Something else is in the field."""

    def take(self, text: str) -> bool:
        """Take what was typed; False goes on to the next step."""
        return False

    def close(self) -> bool:
        """One step back within; False where there is none."""
        return False

    async def leave(self) -> str | None:
        """Why it cannot go on; None when it can. Raises ENGINE_ERRORS."""
        return None

    def mark(self, at: int) -> str:
        return ("> " if self.setup.glyphs.ascii else "▸ ") if at == self.cursor else "  "


class Setup(ModalScreen[Path]):
    """Answers the file once it is written."""

    AUTO_FOCUS = ""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "next", show=False),
        Binding("escape", "back", show=False),
    ]

    def __init__(
        self,
        client: SetupClient,
        target: Path,
        glyphs: Glyphs,
        in_terminal: InTerminal,
        steps: Sequence[Callable[[Setup], SetupStep]],
    ) -> None:
        super().__init__()
        self.client = client
        self.target = target
        self.glyphs = glyphs
        self.in_terminal = in_terminal
        self.choices: SetupChoices = client.engine.setup.read(target)
        self.candidates: dict[str, NodeCandidate] = {}
        """By `[user@]host[:port]`, in the order in which they were found."""
        self.status = ""
        self._steps = [make(self) for make in steps]
        self._at = 0
        self._moving = False

    def compose(self) -> ComposeResult:
        with Vertical(id="setup") as box:
            box.border_title = f"set up {self.target.name}"
            yield Static(id="setup-path", markup=False)
            with VerticalScroll(id="setup-body", can_focus=False):
                yield Static(id="setup-text", markup=False)
            yield Static(id="setup-status", markup=False)
            yield Input(id="setup-input", compact=True)

    def on_mount(self) -> None:
        self.query_one(Input).cursor_blink = False
        self._open(0)
        if self.choices.step:
            self.status = "taken up where it was left: enter goes on to what is missing"

    @property
    def step(self) -> SetupStep:
        return self._steps[self._at]

    @property
    def nodes(self) -> list[NodeCandidate]:
        """In rank order."""
        return [self.candidates[host] for host in self.choices.chosen or () if host in self.candidates]

    @property
    def has_yaml(self) -> bool:
        """An mlx-lm YAML beside the file may name model and data."""
        return api.find_job(self.target.absolute().parent, remote=False).config is not None

    def text(self) -> str:
        """That of the file. Raises ENGINE_ERRORS."""
        return self.client.engine.setup.text(self.target, self.choices, self.nodes)

    async def config(self) -> Config:
        """Read from the file's text. Raises ENGINE_ERRORS."""
        return await asyncio.to_thread(self.client.engine.setup.config, self.target, self.text())

    def choose(self, **changes: Any) -> None:
        self.choices = self.choices.model_copy(update=changes)
        self.draw()

    def ask(self, placeholder: str, value: str = "") -> None:
        """Have a person type something; the step gets it."""
        field = self.query_one(Input)
        field.placeholder, field.value, field.display = placeholder, value, True
        field.focus()

    def ask_no_more(self) -> None:
        field = self.query_one(Input)
        field.display = False
        field.clear()
        self.set_focus(None)

    @property
    def typed(self) -> str:
        return self.query_one(Input).value.strip()

    def say(self, text: str) -> None:
        self.status = text
        self.draw()

    def draw(self) -> None:
        if not self.is_mounted:
            return
        names = [(f"{step.name}  ", "bold $primary" if step is self.step else MUTED) for step in self._steps]
        self.query_one("#setup-path", Static).update(Content.assemble(*names))
        # A column is the scroll bar's.
        lines = [Content(self.step.title), Content(""), *self.step.draw(max(40, self.app.size.width - 5))]
        self.query_one("#setup-text", Static).update(Content("\n").join(lines))
        self.query_one("#setup-status", Static).update(Content.styled(self.status, "$warning"))
        self.query_one("#setup").border_subtitle = f"{self.step.keys}, enter goes on, esc back"

    def on_resize(self, event: Resize) -> None:
        self.draw()

    def on_key(self, event: Key) -> None:
        # What a field takes as a letter does not come here.
        key = event.character if event.is_printable and event.character else event.key
        if self.step.press(key):
            event.stop()
            self.draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        if not self.step.take(self.typed):
            self.action_next()

    def on_input_changed(self, event: Input.Changed) -> None:
        self.step.changed(event.value.strip())

    def action_next(self) -> None:
        """A second key waits for the first one's end."""
        if not self._moving:
            self._moving = True
            self.run_worker(self._next(), group="step")

    async def _next(self) -> None:
        try:
            self.say("")
            why = await self.step.leave()
            if why is not None:
                self.say(why)
            elif self._at == len(self._steps) - 1:
                self.dismiss(self.target)
            else:
                self._open(self._at + 1)
                await self._keep()
        except ENGINE_ERRORS as error:
            self.say(api.sanitise_text(str(error)))
        finally:
            self._moving = False

    def action_back(self) -> None:
        """From a field, then from the step, then out."""
        if self.step.close():
            self.draw()
            return
        if self._at:
            self.workers.cancel_group(self, "step")
            self.status = ""
            self._open(self._at - 1)
        else:
            self.app.run_worker(self._keep(), group="requests")
            self.dismiss(None)

    def _open(self, at: int) -> None:
        self.ask_no_more()
        self._at = at
        self.query_one("#setup-body").scroll_home(animate=False)
        self.step.open()
        self.draw()

    async def _keep(self) -> None:
        self.choices = self.choices.model_copy(update={"step": self._at})
        try:
            await asyncio.to_thread(self.client.engine.setup.keep, self.target, self.choices)
        except ENGINE_ERRORS as error:
            self.status = f"what was chosen cannot be kept: {error}"
