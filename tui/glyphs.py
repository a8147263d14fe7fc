"""State as shape plus word plus colour, in Unicode or plain ASCII, and the bars drawn in cells.

The engine's states (run states, check results, rank phases) are looked up by their string value, so that this module
needs nothing of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from rich.color import ColorSystem
from textual.color import Color
from textual.content import Content

from tui.encoding import locale_encoding

Value = TypeVar("Value")


@dataclass(frozen=True)
class Glyph:
    """One state's shape and its colour, a theme variable."""

    shape: str
    ascii: str
    style: str


MUTED: Final = "$foreground 60%"
"""For labels and what is beside the point; `$text-muted` is an automatic colour, which Content draws undimmed."""
DISABLED: Final = "$foreground 35%"
FEW_COLOURS: Final = "-few-colours"
"""The class of the app on a terminal with 16 colours or none, where DISABLED cannot be read."""

OK: Final = Glyph("✓", "+", "$success")
WARN: Final = Glyph("▲", "!", "$warning")
FAIL: Final = Glyph("✗", "x", "$error")
RUNNING: Final = Glyph("▶", ">", "$success")
PENDING: Final = Glyph("·", ".", MUTED)
UNKNOWN: Final = Glyph("?", "?", MUTED)
STALE: Final = Glyph("◌", "~", "$warning")
STOPPED: Final = Glyph("■", "#", "$warning")

STATES: Final[dict[str, Glyph]] = {
    "planned": PENDING,
    "preflight": RUNNING,
    "launching": RUNNING,
    "running": RUNNING,
    "recovering": WARN,
    "finishing": RUNNING,
    "completed": UNKNOWN,
    "succeeded": OK,
    "failed": FAIL,
    "aborted": STOPPED,
    "lost": UNKNOWN,
}
CHECKS: Final[dict[str, Glyph]] = {
    "pending": PENDING,
    "running": RUNNING,
    "pass": OK,
    "warn": WARN,
    "fail": FAIL,
    "skip": PENDING,
}
PHASES: Final[dict[str, Glyph]] = {
    "waiting": PENDING,
    "starting": PENDING,
    "loading": RUNNING,
    "running": RUNNING,
    "suspended": WARN,
    "training": RUNNING,
    "validating": RUNNING,
    "saving": RUNNING,
    "generating": RUNNING,
    "serving": RUNNING,
    "stopping": STOPPED,
    "ended": OK,
}

RANK_STYLES: Final = ("$text-primary", "$text-accent", "$text-success", "$text-secondary", "$text-warning", "$text")
"""Colours by rank number, always next to the number itself."""


def rank_style(rank: int) -> str:
    return RANK_STYLES[rank % len(RANK_STYLES)]


def warning_of_16(theme: Mapping[str, str]) -> str:
    """The first colour for warnings that on a terminal with 16 is neither that of success nor that of a failure."""

    def nearest(colour: str) -> int | None:
        return Color.parse(colour).rich_color.downgrade(ColorSystem.STANDARD).number

    taken = {nearest(theme["success"]), nearest(theme["error"])}
    candidates = (theme["warning"], theme["text-warning"], "#ffff00", "#808000")
    return next(colour for colour in candidates if nearest(colour) not in taken)


def utf8_terminal() -> bool:
    """The locale has more than ASCII."""
    return "utf" in locale_encoding().lower()


@dataclass(frozen=True)
class Glyphs:
    """The shapes in the alphabet that the terminal has."""

    ascii: bool = False

    def shape(self, glyph: Glyph) -> str:
        return glyph.ascii if self.ascii else glyph.shape

    def mark(self, glyph: Glyph) -> Content:
        return Content.styled(self.shape(glyph), glyph.style)

    def state(self, glyph: Glyph, word: str) -> Content:
        """Shape and word, coloured: never colour alone."""
        return Content.styled(f"{self.shape(glyph)} {word}", glyph.style)

    def bar(self, fraction: float, width: int) -> str:
        """`fraction` (clamped to 0..1) of `width` cells; the last cell is as high as it is full."""
        eighths = round(max(0.0, min(1.0, fraction)) * width * 8)
        full, rest = divmod(eighths, 8)
        if self.ascii:
            return ("#" * full + ("-" if rest >= 4 else "")).ljust(width, ".")
        return ("▇" * full + ("▁▁▂▃▄▅▆"[rest - 1] if rest else "")).ljust(width, "░")

    @property
    def separator(self) -> str:
        return " - " if self.ascii else " · "

    @property
    def down(self) -> str:
        return "v" if self.ascii else "↓"

    @property
    def up(self) -> str:
        return "^" if self.ascii else "↑"

    @property
    def degrees(self) -> str:
        return " C" if self.ascii else " °C"

    @property
    def none(self) -> str:
        """Stands for a fact that nobody measured."""
        return "-" if self.ascii else "–"

    def known(self, value: Value | None, form: Callable[[Value], str] | str) -> str:
        """The value as `form` writes it, a function or a format such as ".3f"; `none` for None."""
        if value is None:
            return self.none
        return format(value, form) if isinstance(form, str) else form(value)
