"""A label and its text, the text hanging beside the label when it needs more than one line."""

from __future__ import annotations

import textwrap

from textual.content import Content

from tui.glyphs import MUTED


def pair(label: str, text: str, width: int, *, style: str = "", indent: int = 14) -> Content:
    """`text` broken into lines of at most `width` cells with the label's `indent` taken off; never mid-word
    unless a word alone is longer."""
    room = max(16, width - indent)
    lines = [part for line in text.splitlines() or [""] for part in textwrap.wrap(line, room) or [""]]
    first = Content.assemble((f"{label:<{indent}}", MUTED), (lines[0], style))
    return Content("\n").join([first, *(Content.assemble(" " * indent, (line, style)) for line in lines[1:])])
