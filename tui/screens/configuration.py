"""The effective configuration with where each value was set, or the faults of a file that is refused; enter opens the
editor at the line."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList

from tui.formatting import shortened
from tui.glyphs import MUTED
from tui.widgets.text import pair

if TYPE_CHECKING:
    from engine.api import ConfigValue, PlacedFault

Line = tuple[Path, int | None]
"""A file, and the line from 1."""
Row = tuple[Content, Line | None]
_FRAME, _KEY = 8, 23
"""Cells of a line beside its text, and those of a key; one that is longer takes some of its value's."""
_GOTO: Final = {"code": ("-g", "{}:{}"), "codium": ("-g", "{}:{}"), "cursor": ("-g", "{}:{}"), "subl": ("{}:{}",)}
"""How editors that do not take +LINE open a file at a line."""


class _Rows(OptionList):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("j", "cursor_down"), Binding("k", "cursor_up")]


class Configuration(ModalScreen[Line]):
    """Answers the file and line of what was selected, where it has some."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,E", "dismiss(None)", show=False)]

    def __init__(self, title: str, rows: Sequence[Row], *, editable: bool) -> None:
        super().__init__()
        self._heading, self._rows, self._editable = title, rows, editable

    def compose(self) -> ComposeResult:
        box = _Rows(*(text for text, _ in self._rows), id="configuration", markup=False)
        box.border_title = Content(self._heading)
        box.border_subtitle = "enter opens the editor there · esc back" if self._editable else "esc back"
        yield box

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        line = self._rows[event.option_index][1]
        if self._editable and line is not None:
            self.dismiss(line)


def value_rows(values: Sequence[ConfigValue], width: int) -> list[Row]:
    rows = list[Row]()
    for value in values:
        key = f"{value.key:<{_KEY}}  "
        room = max(8, width - _FRAME - len(key) - len(value.source) - 2)
        text = f"{shortened(value.text, room):<{room}}  "
        rows.append((Content.assemble((key, "bold"), text, (value.source, MUTED)), value.place))
    return rows


def fault_rows(faults: Sequence[PlacedFault], width: int) -> list[Row]:
    room = width - _FRAME
    texts = [(pair(one.where, one.text, room), pair("", one.what, room, style="$error")) for one in faults]
    return [(Content("\n").join(lines), one.place) for lines, one in zip(texts, faults, strict=True)]


def editor_at(editor: str, file: Path, line: int | None) -> list[str]:
    """The command for a file at a line: `+LINE`, but for editors that take it otherwise. Raises ValueError."""
    words = shlex.split(editor)
    form = _GOTO.get(Path(words[0]).name, ("+{1}", "{0}")) if line is not None else ("{0}",)
    return [*words, *(word.format(file, line) for word in form)]
