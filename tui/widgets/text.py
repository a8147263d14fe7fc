"""A text that changes often: drawn anew only when it is another, laid out anew only when it has more or fewer lines."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Static


class Text(Static):
    """Plain content whose lines are broken already: one of the same number of lines takes the same room."""

    def __init__(self, *, id: str, classes: str | None = None) -> None:
        super().__init__("", id=id, classes=classes, markup=False)
        self._put: Content | None = None

    def put(self, content: Content) -> None:
        """Show it."""
        before = self._put
        if before is not None and content.is_same(before):
            return
        self._put = content
        same_room = before is not None and before.plain.count("\n") == content.plain.count("\n")
        self.update(content, layout=not same_room or not content.plain or not (before and before.plain))
