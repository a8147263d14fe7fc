"""View 7: the models and data sets that each node has; copied, verified and removed by keys, as `flightdeck models`
does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.worker import Worker

from tui.formatting import copy_text, shortened, size
from tui.glyphs import MUTED
from tui.screens.client import Client
from tui.screens.dialog import Confirm
from tui.state import ENGINE_ERRORS, NUMBERED
from tui.widgets.text import Column, lay_out, pair

if TYPE_CHECKING:
    from engine.api import Config, NodeConfig, NodeCopies, NodeCopy
    from engine.snapshots import CopyProgress

_FRAME: Final = 8
"""Cells of a line beside its text."""
_LABEL: Final = 20
"""Cells of a name that no state takes."""
_LISTING: Final = "the listing"
_REMOVAL: Final = "a removal"
_KEYS = "p push · g pull · v verify · n name · ctrl+k remove · r again · esc back"


_Work = Callable[[], Coroutine[Any, Any, None]]


class _Rows(OptionList):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("j", "cursor_down"), Binding("k", "cursor_up")]


class ModelCopies(ModalScreen[str]):
    """Answers the view whose number key was pressed. It lives on behind the others: what it has begun goes on."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(number), f"dismiss('{view}')", show=False) for number, view in enumerate(NUMBERED, start=1)),
        Binding("escape,7", "leave", show=False),
        Binding("q", "dismiss(None)", show=False),
        Binding("r", "ask", show=False),
        Binding("c", "stop", show=False),
        Binding("p", "change('push')", show=False),
        Binding("g", "change('pull')", show=False),
        Binding("v", "change('verify')", show=False),
        Binding("n", "name", show=False),
        Binding("ctrl+k", "remove", show=False),
    ]

    def __init__(self, client: Client, config: Config, *, read_only: bool) -> None:
        super().__init__()
        self._client, self._config, self._read_only = client, config, read_only
        self._pushed: str | None = None
        self._copies: list[tuple[NodeCopies, NodeCopy]] = []
        self._asked: tuple[NodeConfig, ...] = ()
        """The nodes of the last listing; none where it has to be made again."""
        self._notes: dict[str, str] = {}
        """By node, or "" for all."""
        self._ends: dict[str, str] = {}
        """Those of the request that ended before the listing."""
        self._busy = ""
        """The request that is under way."""
        self._worker: Worker[None] | None = None

    @property
    def begun(self) -> str:
        """The request that goes on also where the view is left, and ends with the console; else empty."""
        return "" if self._busy == _LISTING else self._busy

    def compose(self) -> ComposeResult:
        with Vertical(id="copies") as box:
            box.border_title = "7 models and data sets"
            yield _Rows(id="copies-rows", markup=False)
            yield Input(placeholder="org/name of the Hub, hf:org/name or a folder of this machine", id="copies-name")
            yield Static(id="copies-notes", markup=False)

    def on_mount(self) -> None:
        self.query_one(Input).display = False
        self.query_one(_Rows).focus()
        self._begin()

    def open(self, config: Config, push: str | None) -> None:
        """Show the copies of its nodes; `push`: what is brought onto them at once."""
        others, self._config, self._pushed = config.nodes != self._config.nodes, config, push
        if others:
            # A key on one of these rows would reach a node of the same name.
            self._show_rows([])
        if self.is_mounted:
            self._begin()

    def _begin(self) -> None:
        if self._pushed is not None:
            self._start("a copy", partial(self._push, self._pushed))
        elif not self._busy:
            self.action_ask()

    def action_leave(self) -> None:
        field = self.query_one(Input)
        if field.display:
            field.display = False
            self.query_one(_Rows).focus()
        else:
            self.dismiss(None)

    def action_ask(self) -> None:
        self._start(_LISTING, self._list)

    def action_change(self, what: str) -> None:
        """Push, pull or verify the copy under the cursor."""
        if (chosen := self._chosen()) is not None:
            node, label, models = chosen[0].node, chosen[1].label, self._client.engine.models
            if what == "push":
                self._start("a copy", partial(self._push, label))
            elif what == "pull":
                self._start("a copy", partial(self._copy, lambda: models.pull(self._config, label, node)))
            else:
                self._start("a verification", partial(self._verify, label))

    def action_name(self) -> None:
        if not self._read_only:
            field = self.query_one(Input)
            field.display = True
            field.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.action_leave()
        if name := event.value.strip():
            self._start("a copy", partial(self._push, name))

    def action_remove(self) -> None:
        if (chosen := self._chosen()) is None:
            return
        node, label, config = chosen[0].node, chosen[1].label, self._config

        def answered(go: str | None) -> None:
            if go:
                self._start(_REMOVAL, partial(self._remove, config, label, node))

        back = "a launch that pushes it" if label.startswith("hf:pushed/") else f"push {label}"
        lines = [pair("on", node, 60), pair("frees", size(chosen[1].bytes), 60), pair("back by", back, 60)]
        self.app.push_screen(Confirm(f"remove {label}?", lines, "Remove it", dangerous=True), answered)

    def _chosen(self) -> tuple[NodeCopies, NodeCopy] | None:
        """The copy under the cursor; None, with the reason shown, where nothing can be done with it."""
        place = self.query_one(_Rows).highlighted
        if self._read_only or place is None or place >= len(self._copies):
            self._note("this console only reads" if self._read_only else "nothing is selected")
            return None
        return self._copies[place]

    def _start(self, what: str, work: _Work, ends: Mapping[str, str] | None = None) -> None:
        """Takes the place of a listing, which is made again behind it."""
        if self._busy == _LISTING != what and self._worker is not None:
            self._asked = ()
            self._worker.cancel()
        elif self._busy:
            self._note(f"{self._busy} is under way{': c stops it' * (self._busy != _REMOVAL)}")
            return
        self._busy, self._notes, self._ends = what, {}, dict(ends or {})
        self._worker = self.run_worker(partial(self._finish, what, work))

    async def action_stop(self) -> None:
        """A removal goes on: its node has begun it."""
        # A task that is cancelled before its first step never ends what it was to do.
        await asyncio.sleep(0)
        if self._worker is not None and self._busy != _REMOVAL:
            self._worker.cancel()

    async def _finish(self, what: str, work: _Work) -> None:
        how, severity = "has ended", "information"
        try:
            await work()
        except ENGINE_ERRORS as error:
            how, severity = "has failed", "error"
            self._note(str(error))
        except asyncio.CancelledError:
            how = "was stopped"
            raise
        finally:
            if self._busy == what:
                self._end(how, severity)

    def _end(self, how: str, severity: str) -> None:
        begun, ended, self._busy = self.begun, f"{self._busy} {how}", ""
        if how == "was stopped":
            self._note(ended)
        elif begun:
            ended += f": {self._notes.get('', '')}"
        self._draw_notes()
        if begun and not self.is_current:
            self.notify(f"7: {ended}", severity=severity, markup=False)  # type: ignore[arg-type]
        if self._asked != self._config.nodes:
            ends = self._notes if begun else self._ends
            self.call_later(lambda: self._start(_LISTING, self._list, ends))

    async def _list(self) -> None:
        """Show what each node has as soon as it answers."""
        config = self._config
        rows: dict[str, list[tuple[NodeCopies, NodeCopy]]] = {}
        for node, copy in self._copies:
            rows.setdefault(node.node, []).append((node, copy))
        self._asked, names = config.nodes, [node.name for node in config.nodes]
        self._notes = {"": "asking the nodes", **dict.fromkeys(names, "")}
        self._draw_notes()
        async with aclosing(self._client.each(lambda: self._client.engine.models.each(config))) as answers:
            async for node in answers:
                if config.nodes != self._config.nodes:
                    return
                rows[node.node] = [(node, copy) for copy in node.copies]
                self._show_rows([row for name in names for row in rows.get(name, ())])
                free = f"{size(node.free_bytes)} free in {node.cache}{', HF_HUB_OFFLINE is set' * node.offline}"
                self._note(f"{node.node}: {node.problem or free}", node.node)
        self._note("" if self._copies else "no node has a model or data set in its cache or a folder of models")

    def _show_rows(self, copies: list[tuple[NodeCopies, NodeCopy]]) -> None:
        before, self._copies = self._copies, copies
        for rows in self.query(_Rows):
            place = rows.highlighted or 0
            same = [(node.node, copy.path) for node, copy in before[place : place + 1]]
            rows.clear_options()
            rows.add_options(_rows(copies, self.app.size.width - _FRAME))
            again = (index for index, (node, copy) in enumerate(copies) if (node.node, copy.path) in same)
            rows.highlighted = next(again, min(place, len(copies) - 1)) if copies else None

    async def _push(self, name: str) -> None:
        await self._copy(lambda: self._client.engine.models.push(self._config, name))

    async def _copy(self, make: Callable[[], AsyncIterator[CopyProgress]]) -> None:
        self._note("")
        async with aclosing(self._client.each(make)) as steps:
            async for step in steps:
                self._note(copy_text(step), step.node)
        self._asked = ()
        self._note("copied and verified" if self._notes.keys() - {""} else "nothing to copy")

    async def _verify(self, name: str) -> None:
        self._note(f"each file of {name} is hashed")
        models, dataset = self._client.engine.models, name.startswith("hf:")
        seen = await self._client.call(lambda: models.verify(self._config, name, dataset=dataset))
        for node, files in seen.items():
            text = files if isinstance(files, str) else f"damaged: {', '.join(files)} (p repairs)" if files else "sound"
            self._note(f"{node}: {text}", node)
        self._note(f"verified: {name}")

    async def _remove(self, config: Config, name: str, node: str) -> None:
        freed = await self._client.call(lambda: self._client.engine.models.remove(config, name, node))
        self._asked = ()
        self._show_rows([row for row in self._copies if (row[0].node, row[1].label) != (node, name)])
        self._note(f"{node}: {name} is removed, {size(freed)} are free again")

    def _note(self, text: str, node: str = "") -> None:
        self._notes[node] = text
        self._draw_notes()

    def on_option_list_option_highlighted(self) -> None:
        self._draw_notes()

    def _draw_notes(self) -> None:
        """Below what is wrong with the copy under the cursor, which a row may have no room for."""
        # A note may come after the view was left.
        place = next((rows.highlighted for rows in self.query(_Rows)), None)
        under = self._copies[place : place + 1] if place is not None else ()
        faults = [f"{node.node}: {copy.label}: {copy.state}" for node, copy in under if not copy.complete]
        texts = [*faults, self._notes.get("", ""), *{**self._notes, **self._ends}.values()]
        lines = [Content.styled(line, MUTED) for line in dict.fromkeys(texts) if line]
        for notes in self.query("#copies-notes").results(Static):
            notes.update(Content("\n").join(lines))
        keys = "r again · esc back" if self._read_only else _KEYS
        for box in self.query("#copies"):
            box.border_subtitle = keys if self.begun in ("", _REMOVAL) else "c stop · esc back"


def _rows(copies: Sequence[tuple[NodeCopies, NodeCopy]], width: int) -> list[Content]:
    nodes, listed = [node.node for node, _ in copies], [copy for _, copy in copies]
    # Revision and size take 15, and four gaps 8.
    room = max(14, width - max(map(len, nodes), default=0) - _LABEL - 23)
    states = [(shortened(copy.state, room), "" if copy.complete else "$error") for copy in listed]
    columns = [
        Column("", nodes, 9),
        Column("", [Content.styled(copy.label, "bold") for copy in listed], 9, grows=True, minimum=_LABEL),
        Column("", [(copy.revision or "-")[:8] for copy in listed], 3),
        Column("", [size(copy.bytes) for copy in listed], 5, right=True),
        Column("", [Content.styled(*state) for state in states], 9),
    ]
    return lay_out(columns, width)[1]
