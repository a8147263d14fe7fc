"""Pane 2: the preflight checks, live while they run; one opens to its cause, the evidence per node, and the fix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content

from engine import api
from engine.errors import plural
from tui.fixes import pasted
from tui.glyphs import CHECKS, MUTED
from tui.state import DeckState
from tui.widgets.pane import Pane, RowList
from tui.widgets.text import Column, Text, folded, lay_out, pair

if TYPE_CHECKING:
    from engine.models import CheckResult

STATUS_LABELS: Final = {name: "ok" if name == "pass" else name for name in CHECKS}


class ChecksPane(Pane):
    """The newest preflight: one started from here, else the shown run's."""

    NAME = "preflight"
    NUMBER = "2"
    HINTS = ("enter", "fix", "recheck")
    UNSEEN = frozenset({"telemetry", "unanswered", "node", "listening", "facts", "topology", "detail", "runs"})

    def __init__(self) -> None:
        super().__init__()
        self._failed: str | None = None
        self._drawn: tuple[object, ...] = ()
        """That of which the rows were made."""

    def compose(self) -> ComposeResult:
        yield Text(id="checks-note", wraps=True)
        yield RowList(id="checks-rows")
        with VerticalScroll(classes="detail", can_focus=False):
            yield Text(id="checks-detail", wraps=True)

    def on_row_list_moved(self, event: RowList.Moved) -> None:
        self.post_message(self.Selected(self.NAME, event.rows.selected))

    def title(self, state: DeckState) -> str:
        text, begin = verdict(state), f"preflight{state.glyphs.separator}"
        # The narrowest dashboard has no room for "of the run: passed with 2 warnings".
        fits = len(f"{self.NUMBER} {begin}{text}") <= self.room - 2
        return begin + (text if fits else text.replace("passed with ", ""))

    def draw(self, state: DeckState) -> None:
        note, text = self.query_one("#checks-note", Text), _note(state)
        note.display = bool(text)
        note.put(Content.styled(text, MUTED))
        rows = self.query_one(RowList)
        room = self.room - self._scrollbar(len(state.shown_checks))
        drawn = (state.shown_checks, dict(state.skips), room, self.full, state.glyphs)
        if drawn != self._drawn:
            self._drawn = drawn
            rows.set_rows(_rows(state, room, full=self.full))
        failed = next((check.name for check in state.shown_checks if check.status == "fail"), None)
        if failed != self._failed:
            self._failed = failed
            # Once for each new failure: after that the cursor is the reader's.
            if failed is not None:
                rows.select(failed)
        self._detail()

    def _scrollbar(self, rows: int) -> int:
        """Cells that the list's scrollbar takes; beside the details the list has half of the pane."""
        height = self.content_size.height
        return int(rows > (height // 2 if self.full else height))

    def _selected(self) -> CheckResult | None:
        name = self.query_one(RowList).selected
        return next((check for check in self.state.shown_checks if check.name == name), None)

    def _detail(self) -> None:
        check = self._selected()
        self.query_one(".detail").display = self.full and check is not None
        if self.full:
            # Less a scrollbar.
            detail = _detail(check, self.state, self.room - 1) if check is not None else Content("")
            self.query_one("#checks-detail", Text).put(detail)

    def copy_text(self) -> str:
        """The selected check's fix command, where it has one."""
        check = self._selected()
        if check is None:
            return self.text()
        return check.fix_command or self._copied(check)

    def copy_parts(self) -> dict[str, str]:
        check = self._selected()
        if check is None or check.fix_command is None or len(check.fixes) < 2:
            return super().copy_parts()
        by_node = {f"on {node}": pasted(self.state, node, command) for node, command in check.fixes.items()}
        return {"the whole fix": check.fix_command, **by_node}

    def text(self) -> str:
        return "\n\n".join(map(self._copied, self.state.shown_checks)) or self.state.unconfigured

    def _copied(self, check: CheckResult) -> str:
        """With the name by which commands know it."""
        return f"{check.name}: {_detail(check, self.state, self.room).plain}"


def _note(state: DeckState) -> str:
    """Above the checks, or in their place."""
    if not state.shown_checks:
        return state.unconfigured
    if not state.checks_of_run or not state.differs:
        return ""
    return "the configuration is not the run's" + (state.key(": r here checks it") if state.running is None else "")


def verdict(state: DeckState) -> str:
    """The whole preflight, for the title: also whose it is, where the next launch has not been checked."""
    of_run = state.checks_of_run and (not state.active or state.differs)
    return ("of the run: " if of_run else "") + _verdict(state)


def _verdict(state: DeckState) -> str:
    checks = state.shown_checks
    statuses = [check.status for check in checks]
    if all(status == "pending" for status in statuses):
        return f"not run yet{state.key(': r here runs it')}" if checks else "not run"
    if failures := sum(status == "fail" for status in statuses):
        return plural(failures, "failure")
    if any(status in ("pending", "running") for status in statuses):
        done = sum(status not in ("pending", "running") for status in statuses)
        return f"running {done}/{len(statuses)}"
    warnings = sum(status == "warn" for status in statuses)
    text = "passed" if not warnings else f"passed with {plural(warnings, 'warning')}"
    return f"{text} {state.ago(state.checks_at)}" if state.checks and state.checks_at else text


def _rows(state: DeckState, width: int, *, full: bool) -> list[tuple[str, Content]]:
    """On the dashboard without what is still to be checked and without times: what was found needs the room."""
    checks = state.shown_checks
    if not checks:
        return []
    glyphs = [CHECKS[check.status] for check in checks]
    took = [f"{check.duration_s:.1f} s" if check.duration_s is not None else "" for check in checks]
    labels = [
        Content.styled(STATUS_LABELS[check.status], glyph.style) for check, glyph in zip(checks, glyphs, strict=True)
    ]
    columns = [
        Column("", [state.glyphs.mark(glyph) for glyph in glyphs], 9),
        Column("", labels, 8, reserved=len("running")),
        Column("", [api.check_label(check.name) for check in checks], 9),
        Column("", [_summary(state, check, full=full) for check in checks], 5, grows=True, minimum=18),
        Column("", [Content.styled(text, MUTED) for text in took], 4, right=True, reserved=6),
    ]
    _, lines = lay_out(columns[: None if full else -1], width)
    return [(check.name, line) for check, line in zip(checks, lines, strict=True)]


def _summary(state: DeckState, check: CheckResult, *, full: bool) -> Content:
    why = state.skips.get(check.name)
    if check.status == "pending" and not full:
        return Content("")
    text = (f"skipped at the next launch: {why}; " if why is not None else "") + check.summary.replace("\n", " ")
    return Content.styled(text, MUTED if check.status in ("pending", "skip") else "")


def _detail(check: CheckResult, state: DeckState, width: int) -> Content:
    """Cause, evidence per node, the fix, and what is checked."""
    glyph, title = CHECKS[check.status], api.CHECKS[check.name].title if check.name in api.CHECKS else ""
    label = api.check_label(check.name)
    lines = [Content.assemble((label, "bold"), "  ", state.glyphs.state(glyph, STATUS_LABELS[check.status]))]
    if check.summary not in ("", title):
        lines.append(Content(check.summary))
    if check.blames is not None:
        rank, node = check.blames
        lines.append(pair("first failing", f"rank {rank} on {node}", width))
    lines += [pair(node, seen, width) for node, seen in check.evidence.items()]
    if check.fix_command:
        lines += [
            Content(""),
            pair("fix", folded(check.fix_command, width), width, style="bold"),
            *([pair("effect", check.fix_effect, width)] if check.fix_effect else []),
            pair("", "y copies it", width, style=MUTED),
        ]
    if len(check.fixes) > 1:
        lines += [pair(f"on {node}", folded(command, width), width) for node, command in check.fixes.items()]
    commands = [check.fix_command, *check.fixes.values()]
    if state.key("x") and any(command is not None and not command.startswith("flightdeck ") for command in commands):
        lines.append(pair("", "x runs it, after you confirm", width, style=MUTED))
    if state.key("s") and check.status == "fail":
        lines.append(pair("", "s skips this check at the next launch", width, style=MUTED))
    if check.status == "fail" and not check.fix_command:
        lines += [Content(""), Content("no command fixes this: a person must act")]
    if title:
        lines += [Content(""), pair("checked", title, width, style=MUTED)]
    return Content("\n").join(lines)
