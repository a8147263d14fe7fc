"""Pane 2: the preflight checks, live while they run; one opens to its cause, the evidence per node, and the fix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content

from engine.errors import plural
from tui.fixes import pasted
from tui.glyphs import CHECKS, MUTED, Glyphs
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
    UNSEEN = frozenset({"telemetry", "unanswered", "node", "listening", "facts", "topology", "detail"})

    def __init__(self) -> None:
        super().__init__()
        self._failed: str | None = None

    def compose(self) -> ComposeResult:
        yield Text(id="checks-note", wraps=True)
        yield RowList(id="checks-rows")
        with VerticalScroll(classes="detail", can_focus=False):
            yield Text(id="checks-detail", wraps=True)

    def on_row_list_moved(self, event: RowList.Moved) -> None:
        self.post_message(self.Selected(self.NAME, event.rows.selected))

    def title(self, state: DeckState) -> str:
        return f"preflight{state.glyphs.separator}{verdict(state)}"

    def draw(self, state: DeckState) -> None:
        note = self.query_one("#checks-note", Text)
        note.display = not state.shown_checks
        note.put(_note(state))
        rows = self.query_one(RowList)
        rows.set_rows(_rows(state, self.room - self._scrollbar(len(state.shown_checks))))
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
            detail = _detail(check, self.state.glyphs, self.room) if check is not None else Content("")
            self.query_one("#checks-detail", Text).put(detail)

    def copy_text(self) -> str:
        """The selected check's fix command, where it has one."""
        check = self._selected()
        if check is None:
            return self.text()
        return check.fix_command or _detail(check, self.state.glyphs, self.room).plain

    def copy_parts(self) -> dict[str, str]:
        check = self._selected()
        if check is None or check.fix_command is None or len(check.fixes) < 2:
            return super().copy_parts()
        by_node = {f"on {node}": pasted(self.state, node, command) for node, command in check.fixes.items()}
        return {"the whole fix": check.fix_command, **by_node}

    def text(self) -> str:
        checks = self.state.shown_checks
        return (
            "\n\n".join(_detail(check, self.state.glyphs, self.room).plain for check in checks)
            or _note(self.state).plain
        )


def verdict(state: DeckState) -> str:
    """The whole preflight, for the title."""
    checks = state.shown_checks
    if not checks:
        return "not run"
    statuses = [check.status for check in checks]
    if failures := sum(status == "fail" for status in statuses):
        return plural(failures, "failure")
    if any(status in ("pending", "running") for status in statuses):
        done = sum(status not in ("pending", "running") for status in statuses)
        return f"running {done}/{len(statuses)}"
    warnings = sum(status == "warn" for status in statuses)
    text = "passed" if not warnings else f"passed with {plural(warnings, 'warning')}"
    return f"{text} {state.ago(state.checks_at)}" if state.checks and state.checks_at else text


def _note(state: DeckState) -> Content:
    if state.config is None:
        return Content.styled(state.unconfigured, MUTED)
    return Content.styled("not run yet: r runs them; a launch runs them first", MUTED)


def _rows(state: DeckState, width: int) -> list[tuple[str, Content]]:
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
        Column("", labels, 8),
        Column("", [check.name for check in checks], 9),
        Column("", [_summary(state, check) for check in checks], 5, grows=True, minimum=18),
        Column("", [Content.styled(text, MUTED) for text in took], 4, right=True),
    ]
    _, lines = lay_out(columns, width)
    return [(check.name, line) for check, line in zip(checks, lines, strict=True)]


def _summary(state: DeckState, check: CheckResult) -> str:
    why = state.skips.get(check.name)
    return (f"skipped at the next launch: {why}; " if why is not None else "") + check.summary.replace("\n", " ")


def _detail(check: CheckResult, glyphs: Glyphs, width: int) -> Content:
    """Cause, evidence per node, and the fix."""
    glyph = CHECKS[check.status]
    lines = [Content.assemble((check.name, "bold"), "  ", glyphs.state(glyph, STATUS_LABELS[check.status]))]
    if check.summary:
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
    if any(command is not None and not command.startswith("flightdeck ") for command in commands):
        lines.append(pair("", "x runs it, after you confirm", width, style=MUTED))
    if check.status == "fail":
        lines.append(pair("", "s skips this check at the next launch", width, style=MUTED))
    if check.status == "fail" and not check.fix_command:
        lines += [Content(""), Content("no command fixes this: a person must act")]
    return Content("\n").join(lines)
