"""A conversation with what a run has trained, beside its base model; answers are drawn as they come."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, ClassVar, Final

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Static
from textual.worker import Worker

from engine import api
from tui.glyphs import MUTED
from tui.screens.client import Client
from tui.state import ENGINE_ERRORS

if TYPE_CHECKING:
    from engine.api import ChatServer

MODELS: Final = ("trained", "base")
REPLY_S: Final = 0.05
"""Between two batches of an answer's pieces."""
_KEYS: Final = "enter ask · up prompts · tab base/trained · ctrl+n new · pgup scroll · esc"


class Chat(ModalScreen[None]):
    """Starts a server, unless the run is served already, and stops it when it is left."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", show=False),
        Binding("tab", "switch", show=False, priority=True),
        Binding("ctrl+n", "renew", show=False, priority=True),
        Binding("up", "suggest(-1)", show=False),
        Binding("down", "suggest(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
    ]

    def __init__(self, client: Client, run: str) -> None:
        super().__init__()
        self._client, self._chats = client, client.engine.chats
        self._run = run
        self._server: ChatServer | None = None
        self._model = MODELS[0]
        self._status = ""
        self._shown: list[Content] = []
        """Each message as it is drawn."""
        self._suggestions: list[str] = []
        """And what was typed when one of them took its place."""
        self._messages: dict[str, list[dict[str, str]]] = {model: [] for model in MODELS}
        self._answering: Worker[None] | None = None
        self._starting: asyncio.Task[None] | None = None
        """Until the server answers. It outlives this screen: a server that comes too late is stopped."""
        self._left = False

    def compose(self) -> ComposeResult:
        with Vertical(id="chat") as box:
            box.border_title = f"chat · {self._run}"
            box.border_subtitle = _KEYS
            with VerticalScroll(id="chat-log", can_focus=False):
                yield Static(id="chat-text", markup=False)
            yield Static(id="chat-status", markup=False)
            yield Input(id="chat-input", placeholder="a question", compact=True)

    def on_mount(self) -> None:
        field = self.query_one(Input)
        field.cursor_blink = False
        field.focus()
        self.query_one("#chat-log").anchor()
        self._draw()
        self.run_worker(self._open(), group="server")

    async def _open(self) -> None:
        try:
            self._suggestions = await asyncio.to_thread(self._chats.suggestions, self._run)
            for exchange in await asyncio.to_thread(self._chats.exchanges, self._run):
                self._shown += [_drawn("you", exchange.prompt), _drawn(exchange.model, exchange.answer)]
            if not self.query_one(Input).value:
                self.query_one(Input).value = next(iter(self._suggestions), "")
            self._draw()
            await self._server_ready()
        except ENGINE_ERRORS as error:
            if self._answering is None:
                self._shown.append(_drawn("error", str(error)))
                self._say_status("enter asks again")

    async def _server_ready(self) -> None:
        """Start a server where there is none, and wait for it; again after a failure. Raises ENGINE_ERRORS."""
        if self._starting is None or (self._starting.done() and self._starting.exception() is not None):
            self._say_status("starting the model, which takes a few seconds")
            self._starting = asyncio.create_task(self._start())
            # Nobody may be there any more to whom it matters.
            self._starting.add_done_callback(lambda starting: starting.cancelled() or starting.exception())
        await asyncio.shield(self._starting)
        self._say_status("")

    async def _start(self) -> None:
        server = await self._client.call(lambda: self._chats.serve(self._run))
        if self._server is None or self._server.id != server.id:
            self._server = server
        if self._left:
            self._stop()
        else:
            await self._client.call(lambda: self._chats.served(server.id))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """A question that comes before the model is ready waits for it."""
        if event.value.strip() and (self._answering is None or self._answering.is_finished):
            self._answering = self.run_worker(self._ask(event.value.strip()), group="answers")
            event.input.clear()

    async def _ask(self, question: str) -> None:
        model, messages = self._model, self._messages[self._model]
        messages.append({"role": "user", "content": question})
        self._shown += [_drawn("you", question), _drawn(model, "")]
        self._draw()
        self.query_one("#chat-log").anchor()
        # More may be said behind it while it comes.
        place, answer = len(self._shown) - 1, api.ChatAnswer()
        try:
            await self._server_ready()
            assert self._server is not None
            server = self._server.id
            reply = self._client.each(lambda: self._chats.reply(server, messages, model=model), every_s=REPLY_S)
            async with aclosing(reply) as pieces:
                async for piece in pieces:
                    answer += piece
                    self._shown[place] = _drawn(model, answer.text, answer.thought)
                    self._draw()
            self._shown[place] = _drawn(model, answer.text, answer.thought, answer.note())
            self._draw()
        except ENGINE_ERRORS as error:
            self._starting = None
            self._shown[place + (answer != api.ChatAnswer()) : place + 1] = [_drawn("error", str(error))]
            self._say_status("enter asks again")
        if answer.text and messages:
            messages.append({"role": "assistant", "content": answer.text})
        else:
            del messages[-1:]

    def action_switch(self) -> None:
        self._model = MODELS[1 - MODELS.index(self._model)]
        self._say_status(self._status)

    def action_suggest(self, step: int) -> None:
        field, suggestions = self.query_one(Input), self._suggestions
        if field.value not in suggestions:
            suggestions.append(field.value)
        field.value = suggestions[(suggestions.index(field.value) + step) % len(suggestions)]
        field.action_end()

    def action_renew(self) -> None:
        for messages in self._messages.values():
            messages.clear()
        self._shown.append(Content.styled("a new conversation: what was said before is not part of it", MUTED))
        self._draw()

    def action_page(self, direction: int) -> None:
        log = self.query_one("#chat-log")
        log.scroll_relative(y=direction * max(1, log.size.height - 1), animate=False)

    def action_leave(self) -> None:
        self._left = True
        self._stop()
        self.dismiss(None)

    def _stop(self) -> None:
        if self._server is not None and self._server.started:
            self.app.run_worker(self._client.abort(self._server.id, now=False), group="requests")

    def _say_status(self, text: str) -> None:
        self._status = text
        self._draw()

    def _draw(self) -> None:
        empty = Content.styled("nothing was asked yet: enter asks the question below, up and down show others", MUTED)
        self.query_one("#chat-text", Static).update(Content("\n").join(self._shown or [empty]))
        status = f"{self._model} answers" + (f" · {self._status}" if self._status else "")
        self.query_one("#chat-status", Static).update(Content.styled(status, MUTED))


def _drawn(who: str, text: str, thought: str = "", note: str = "") -> Content:
    """A message of "you", "trained", "base" or "error"; what was thought is shown until there is a text."""
    styles = {"you": "bold", "trained": "bold $success", "base": "bold $warning", "error": "bold $error"}
    style = styles.get(who, MUTED)
    muted = ("" if text else thought.strip()) + (f"  ({note})" if note else "")
    return Content.assemble((f"{who}  ", style), api.sanitise_text(text), (api.sanitise_text(muted), MUTED))
