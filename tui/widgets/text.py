"""A text that changes often: drawn anew only when it is another, laid out anew only when it has more or fewer lines."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Static


class Text(Static):
    """Plain content. Where its lines are broken already, one of the same number of lines takes the same room."""

    def __init__(self, *, id: str, classes: str | None = None, wraps: bool = False) -> None:
        """`wraps`: a line may be too long for the widget, which breaks it."""
        super().__init__("", id=id, classes=classes, markup=False)
        self._put: Content | None = None
        self._wraps = wraps

    def put(self, content: Content) -> None:
        """Show it."""
        before = self._put
        if before is not None and content.is_same(before):
            return
        self._put = content
        self.update(content, layout=self._wraps or before is None or _rows(before) != _rows(content))


def _rows(content: Content) -> int:
    return content.plain.count("\n") + 1 if content.plain else 0
