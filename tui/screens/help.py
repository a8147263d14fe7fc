"""The action table as a help screen and as the command palette, which also opens runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.types import IgnoreReturnCallbackType
from textual.widgets import Static

from tui.actions import ACTIONS, GROUPS, Action, shown_key
from tui.glyphs import DISABLED, MUTED
from tui.screens.dialog import text_width
from tui.state import DeckState
from tui.widgets.text import pair

_SCROLLBAR = 1


class _Keys(VerticalScroll):
    """Scrolled by a log's keys, too."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "scroll_down", show=False),
        Binding("k", "scroll_up", show=False),
        Binding("space", "page_down", show=False),
    ]


class Help(ModalScreen[None]):
    """Any of `?`, `esc`, `q` leaves it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,q", "dismiss(None)", show=False)]

    def __init__(self, state: DeckState) -> None:
        super().__init__()
        self._state = state

    def compose(self) -> ComposeResult:
        with _Keys(id="help") as box:
            box.border_title = "keys"
            box.border_subtitle = "esc back"
            shown = lines(self._state, text_width(self.app.size.width) - _SCROLLBAR)
            yield Static(Content("\n").join(shown), markup=False)


def lines(state: DeckState, width: int) -> list[Content]:
    """A heading a group, a line an action."""
    content = [Content.styled("A dim key cannot be used now, and says why when it is pressed.", MUTED), Content("")]
    for group, title in GROUPS.items():
        actions = [action for action in ACTIONS if action.group == group and action.offered(state)]
        if actions:
            content += [Content.styled(title, "bold"), *(_line(action, state, width) for action in actions)]
            content.append(Content(""))
    return content[:-1]


def _line(action: Action, state: DeckState, width: int) -> Content:
    keys = " ".join(shown_key(key) for key in action.keys)
    style = DISABLED if action.why_not(state) else "bold $text-primary"
    return pair(f"  {keys}", action.help, width, indent=20).stylize(style, 0, 2 + len(keys))


class PaletteEntry(NamedTuple):
    """One line of the palette."""

    title: str
    help: str
    run: IgnoreReturnCallbackType


@runtime_checkable
class PaletteSource(Protocol):
    """The app, which knows the actions and the runs."""

    def palette_entries(self) -> Iterator[PaletteEntry]: ...


class ActionProvider(Provider):
    """Matches titles, and help texts with less weight."""

    def _entries(self) -> Iterator[PaletteEntry]:
        source = self.app
        assert isinstance(source, PaletteSource)
        return source.palette_entries()

    async def discover(self) -> Hits:
        for entry in self._entries():
            yield DiscoveryHit(Content(entry.title), entry.run, text=entry.title, help=entry.help)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for entry in self._entries():
            score = max(matcher.match(entry.title), matcher.match(entry.help) * 0.8)
            if score > 0:
                yield Hit(score, Content(entry.title), entry.run, text=entry.title, help=entry.help)
