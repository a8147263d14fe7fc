"""A list of one-line rows with a cursor that stays on its row while the rows change under it."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option


class RowList(OptionList):
    """Rows are (id, content); `enter` on one posts OptionSelected."""

    DEFAULT_CSS = """
    RowList, RowList:focus {
        height: 1fr; border: none; padding: 0; background: transparent; background-tint: transparent;
        text-wrap: nowrap; text-overflow: ellipsis; scrollbar-size-vertical: 1;
    }
    RowList > .option-list--option-highlighted { background: transparent; text-style: none; color: $foreground; }
    RowList:focus > .option-list--option-highlighted { background: $boost; text-style: none; color: $foreground; }
    RowList > .option-list--option-hover { background: transparent; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id, markup=False)
        self._rows: list[tuple[str, Content]] = []

    @property
    def selected(self) -> str | None:
        """Id of the row under the cursor."""
        option = self.highlighted_option
        return option.id if option is not None else None

    @property
    def texts(self) -> list[str]:
        """All rows as plain text."""
        return [content.plain for _, content in self._rows]

    def move(self, name: str) -> bool:
        """Move the cursor: down, up, page_down, page_up, top, bottom; False for any other direction."""
        move = {
            "down": self.action_cursor_down,
            "up": self.action_cursor_up,
            "page_down": self.action_page_down,
            "page_up": self.action_page_up,
            "top": self.action_first,
            "bottom": self.action_last,
        }.get(name)
        if move is not None:
            move()
        return move is not None

    def select(self, row: str) -> None:
        """Put the cursor on the row of this id, where there is one."""
        ids = [known for known, _ in self._rows]
        if row in ids:
            self.highlighted = ids.index(row)

    def set_rows(self, rows: Sequence[tuple[str, Content]]) -> None:
        """Show these rows; the cursor stays on the row of the same id, else goes to the first."""
        if [row for row, _ in rows] == [row for row, _ in self._rows]:
            for index, ((_, before), (_, now)) in enumerate(zip(self._rows, rows, strict=True)):
                if not now.is_same(before):
                    self.replace_option_prompt_at_index(index, now)
        else:
            chosen, place = self.selected, self.scroll_y
            self.set_options([Option(content, id=row) for row, content in rows])
            ids = [row for row, _ in rows]
            if ids:
                self.highlighted = ids.index(chosen) if chosen in ids else 0
            if chosen in ids:
                self.scroll_to(y=place, animate=False)
        self._rows = list(rows)
