"""The log on the screen: it follows, it stays where it was put, it finds, and nothing of what it shows can do harm."""

from __future__ import annotations

import asyncio
import sys
import time
import unicodedata
from pathlib import Path

import pytest
from rich.color import Color
from textual.app import App, ComposeResult
from textual.events import MouseScrollDown
from textual.geometry import Offset
from textual.selection import Selection
from textual.widgets import Input

from engine.store.layout import LAUNCHER_SOURCE, RunDir
from tests.terminal import Terminal
from tests.unit.run.logs.run_logs import RunLogs
from tests.waiting import until
from tui.widgets.log_view import LogView
from tui.widgets.log_window import LogState
from tui.widgets.logs_pane import FilterBar


class LogApp(App[None]):
    """A log view and its prompt, and nothing else."""

    def __init__(self, run_dir: RunDir | None, *, alike_once: bool = False) -> None:
        super().__init__()
        self._run_dir = run_dir
        self._alike_once = alike_once
        self.states: list[LogState] = []
        self.answers: list[tuple[str, str]] = []

    def compose(self) -> ComposeResult:
        yield LogView(redraw_s=0.02)
        yield FilterBar(lambda kind, text: self.answers.append((kind, text)))

    def on_mount(self) -> None:
        self.view.open(self._run_dir)
        if not self._alike_once:
            self.view.toggle_alike()
        self.view.focus()

    def on_log_view_changed(self, event: LogView.Changed) -> None:
        self.states.append(event.state)

    @property
    def view(self) -> LogView:
        return self.query_one(LogView)

    def shown(self) -> list[str]:
        """Rows of the screen that have something on them, without the scrollbar."""
        view = self.view
        rows = [view.render_line(y).text.rstrip() for y in range(view.size.height)]
        return [row for row in rows if row]


@pytest.fixture
def logs(tmp_path: Path) -> RunLogs:
    return RunLogs(tmp_path, (0, 1, LAUNCHER_SOURCE))


def numbered(start: int, stop: int, name: str = "line") -> str:
    return "".join(f"{name} {number}\n" for number in range(start, stop))


def offsets(view: LogView, y: int) -> list[tuple[str, tuple[int, int]]]:
    """Where in the log the pieces of a row say that they are, for a selection by mouse."""
    return [pair for piece in view.render_line(y) if piece.style for pair in piece.style.meta.items()]


async def test_it_follows_what_arrives_and_says_so(logs: RunLogs) -> None:
    app = LogApp(logs.run_dir)
    async with app.run_test(size=(60, 10)):
        await until(lambda: app.shown() == ["no output yet"])
        logs.write(0, numbered(0, 100))
        await until(lambda: app.shown()[-1:] == ["0 line 99"])
        assert app.shown() == [f"0 line {number}" for number in range(90, 100)]
        logs.write(1, "from another rank\n")
        logs.write(LAUNCHER_SOURCE, "from the launcher\n")
        await until(lambda: app.shown()[-2:] == ["1 from another rank", "L from the launcher"])
        assert app.view.state.following
        assert app.view.state.new_lines == 0


async def test_the_reading_place_stays_while_lines_pour_in_and_they_are_counted(logs: RunLogs) -> None:
    logs.write(0, numbered(0, 500))
    app = LogApp(logs.run_dir)
    async with app.run_test(size=(60, 10)):
        await until(lambda: app.shown()[-1:] == ["0 line 499"])
        assert app.view.move("page_up")
        here = app.shown()
        for batch in range(20):
            logs.write(0, numbered(500 + 60 * batch, 560 + 60 * batch))
            await asyncio.sleep(0.03)
            assert app.shown() == here
        await until(lambda: app.view.state.new_lines == 1_200)
        assert not app.view.state.following
        app.view.follow()
        assert app.shown()[-1] == "0 line 1699"
        assert app.view.state.new_lines == 0


async def test_it_moves_by_rows_pages_and_to_both_ends(logs: RunLogs) -> None:
    logs.write(0, numbered(0, 100))
    app = LogApp(logs.run_dir)
    async with app.run_test(size=(60, 10)) as pilot:
        await until(lambda: len(app.shown()) == 10)
        assert app.view.move("top")
        assert app.shown()[0] == "0 line 0"
        assert not app.view.move("up")
        assert app.view.move("down")
        assert app.shown()[0] == "0 line 1"
        app.view.move("page_down")
        assert app.shown()[0] == "0 line 10"
        app.view.move("page_up")
        assert app.shown()[0] == "0 line 1"
        await pilot._post_mouse_events([MouseScrollDown], app.view)
        await until(lambda: app.shown()[0] == "0 line 4")
        app.view.move("bottom")
        assert app.view.state.following
        assert not app.view.move("down")
        app.view.move("up")
        assert not app.view.state.following
        app.view.move("down")
        assert app.view.state.following


async def test_a_resize_and_back_leaves_the_place(logs: RunLogs) -> None:
    logs.write(0, "".join(f"line {number} {'word ' * 30}\n" for number in range(100)))
    app = LogApp(logs.run_dir)
    async with app.run_test(size=(60, 10)) as pilot:
        await until(lambda: len(app.shown()) == 10)
        for wrap in (False, True):
            app.view.move("top")
            for _ in range(7):
                app.view.move("page_down")
            here = app.shown()
            for size in ((200, 90), (30, 5), (60, 10)):
                await pilot.resize_terminal(*size)
                await pilot.pause()
            assert app.shown() == here
            if not wrap:
                app.view.toggle_wrap()


async def test_wrapped_lines_are_whole_and_can_be_walked_row_by_row(logs: RunLogs) -> None:
    numbers = " ".join(str(number) for number in range(200))
    logs.write(0, f"first\n{numbers}\nlast\n")
    app = LogApp(logs.run_dir)
    async with app.run_test(size=(40, 10)):
        await until(lambda: len(app.shown()) == 3)
        app.view.toggle_wrap()
        assert app.shown()[-1] == "0 last"
        app.view.move("top")
        seen = list(app.shown())
        while app.view.move("down"):
            seen.append(app.shown()[-1])
        width = app.view.size.width - 3
        pieces = [numbers[at : at + width] for at in range(0, len(numbers), width)]
        assert seen == [
            "0 first",
            f"0 {pieces[0]}".rstrip(),
            *(f"  {piece}".rstrip() for piece in pieces[1:]),
            "0 last",
        ]
        back = [app.shown()[0]]
        while app.view.move("up"):
            back.append(app.shown()[0])
        assert back[::-1] == seen[: len(back)]


async def test_a_search_marks_counts_and_goes_round(logs: RunLogs) -> None:
    logs.write(0, numbered(0, 300))
    app = LogApp(logs.run_dir)
    async with app.run_test(size=(60, 10)):
        await until(lambda: len(app.shown()) == 10)
        app.view.move("top")
        app.view.search("line 15")
        await until(lambda: (app.view.state.match, app.view.state.matches, app.view.state.counted) == (1, 11, True))
        assert "0 line 15" in app.shown()
        app.view.next_match()
        await until(lambda: app.view.state.match == 2)
        assert "0 line 150" in app.shown()
        app.view.previous_match()
        await until(lambda: app.view.state.match == 1)
        app.view.previous_match()
        await until(lambda: app.view.state.match == 11)
        assert app.view.copy_text() == "line 159"
        logs.write(0, "another line 15\n")
        await until(lambda: app.view.state.matches == 12)
        app.view.next_match()
        await until(lambda: app.view.state.match == 12)
        app.view.next_match()
        await until(lambda: app.view.state.match == 1)
        app.view.search("nowhere")
        await until(lambda: app.view.state.note == "no match")
        app.view.search("")
        assert app.view.state.search is None


async def test_a_match_is_marked_in_its_row_and_nowhere_else(logs: RunLogs) -> None:
    logs.write(0, "a needle in hay\nhay\n")
    app = LogApp(logs.run_dir)
    async with app.run_test(size=(60, 10)):
        await until(lambda: len(app.shown()) == 2)
        app.view.search("needle")
        await until(lambda: app.view.state.match == 1)
        found = app.view.get_component_rich_style("log-view--match", partial=True).bgcolor
        marked = [
            seg.text for y in (0, 1) for seg in app.view.render_line(y) if seg.style and seg.style.bgcolor == found
        ]
        assert marked == ["needle"]


async def test_a_filter_keeps_the_place_and_keeps_up(logs: RunLogs) -> None:
    logs.write(0, numbered(0, 300))
    app = LogApp(logs.run_dir)
    async with app.run_test(size=(60, 6)):
        await until(lambda: len(app.shown()) == 6)
        app.view.move("top")
        for _ in range(24):
            app.view.move("page_down")
        assert app.shown()[0] == "0 line 120"
        app.view.filter("7")
        await until(lambda: app.view.state.counted and app.shown()[0] == "0 line 127")
        app.view.filter("!1")
        await until(lambda: app.view.state.counted and app.shown()[0] == "0 line 200")
        logs.write(1, "line 1\nline 2\n")
        app.view.follow()
        await until(lambda: app.shown()[-1] == "1 line 2")
        assert "1 line 1" not in app.shown()
        app.view.filter("nothing has this")
        await until(lambda: app.view.state.counted and app.shown() == ["no line passes the filter nothing has this"])
        app.view.filter("")
        assert app.shown()[-1] == "1 line 2"


async def test_a_search_goes_through_filtered_lines_only(logs: RunLogs) -> None:
    logs.write(0, "a 1\nb 1\na 2\nb 2\na 3\n")
    app = LogApp(logs.run_dir)
    async with app.run_test(size=(60, 10)):
        await until(lambda: len(app.shown()) == 5)
        app.view.filter("a")
        app.view.search("2")
        await until(lambda: app.view.copy_text() == "a 2")
        app.view.next_match()
        await asyncio.sleep(0.1)
        assert app.view.copy_text() == "a 2"


async def test_errors_are_gone_to(logs: RunLogs) -> None:
    logs.write(0, numbered(0, 50) + "ValueError: boom\n" + numbered(50, 100))
    logs.write(1, numbered(0, 50) + "Killed\n" + numbered(50, 100))
    app = LogApp(logs.run_dir)
    async with app.run_test(size=(60, 10)):
        await until(lambda: len(app.shown()) == 10)
        app.view.previous_error()
        await until(lambda: app.view.copy_text() == "Killed")
        app.view.previous_error()
        await until(lambda: app.view.copy_text() == "ValueError: boom")
        app.view.previous_error()
        await until(lambda: app.view.state.note == "no error above")
        app.view.next_error()
        await until(lambda: app.view.copy_text() == "Killed")


async def test_a_rank_alone_shows_the_same_moment_and_back(logs: RunLogs) -> None:
    for number in range(100):
        logs.write(0, f"zero {number}\n")
        logs.write(1, f"one {number}\n")
    app = LogApp(logs.run_dir)
    async with app.run_test(size=(60, 10)):
        await until(lambda: len(app.shown()) == 10)
        app.view.move("top")
        for _ in range(6):
            app.view.move("page_down")
        assert app.shown()[0] == "0 zero 27"
        app.view.next_source()
        assert app.shown()[0] == "zero 27"
        app.view.next_source()
        assert app.shown()[0] == "one 27"
        app.view.set_source(None)
        assert app.shown()[0] == "1 one 27"
        app.view.next_source(-1)
        assert app.view.state.source == 1
        app.view.jump_to(0, logs.run_dir.log(0).read_bytes().index(b"zero 80"))
        assert app.view.state.source == 0
        assert app.view.copy_text() == "zero 80"
        assert "zero 80" in app.shown()


async def test_times_of_arrival_are_shown(logs: RunLogs) -> None:
    logs.write(0, "one\n")
    app = LogApp(logs.run_dir)
    async with app.run_test(size=(60, 10)):
        await until(lambda: len(app.shown()) == 1)
        app.view.toggle_timestamps()
        assert app.shown() == [time.strftime("%H:%M:%S", time.localtime(logs.now)) + " 0 one"]


async def test_a_frozen_view_holds_still_and_counts(logs: RunLogs) -> None:
    logs.write(0, numbered(0, 5))
    app = LogApp(logs.run_dir)
    async with app.run_test(size=(60, 10)):
        await until(lambda: len(app.shown()) == 5)
        app.view.freeze(True)
        logs.write(0, numbered(5, 50))
        await until(lambda: app.view.state.new_lines == 45)
        assert app.shown() == [f"0 line {number}" for number in range(5)]
        app.view.freeze(False)
        assert app.shown()[-1] == "0 line 49"


async def test_a_view_stays_frozen_when_another_log_is_shown(logs: RunLogs) -> None:
    logs.write(0, numbered(0, 5))
    app = LogApp(logs.run_dir)
    async with app.run_test(size=(60, 10)):
        await until(lambda: len(app.shown()) == 5)
        app.view.freeze(True)
        app.view.next_source(1)
        logs.write(0, numbered(5, 20))
        await until(lambda: app.view.state.lines == 20)
        assert app.view.state.frozen and app.shown()[-1].endswith("line 4")
        app.view.jump_to(0, logs.run_dir.log(0).read_bytes().index(b"line 7"))
        assert app.view.state.frozen and app.shown()[-1].endswith("line 7")
        app.view.open(logs.run_dir)
        assert app.view.state.frozen and app.shown()[-1].endswith("line 19")
        logs.write(0, numbered(20, 30))
        await until(lambda: app.view.state.lines == 30)
        assert app.shown()[-1].endswith("line 19")


async def test_long_lines_are_seen_by_going_sideways(logs: RunLogs) -> None:
    logs.write(0, "x" * 50 + "needle" + "y" * 100 + "\nshort\n")
    app = LogApp(logs.run_dir)
    async with app.run_test(size=(40, 10)):
        await until(lambda: len(app.shown()) == 2)
        assert not app.view.move("left")
        for _ in range(6):
            assert app.view.move("right")
        assert app.shown()[0].startswith("0 xxneedleyy")
        while app.view.move("left"):
            pass
        assert app.shown()[0].startswith("0 xxx")


async def test_what_is_selected_is_copied(logs: RunLogs) -> None:
    logs.write(0, numbered(0, 3) + "漢字 wide\n")
    app = LogApp(logs.run_dir)
    async with app.run_test(size=(40, 10)) as pilot:
        await until(lambda: len(app.shown()) == 4)
        assert not offsets(app.view, 1), "nobody can have selected anything before the mouse has come"
        await pilot.hover(app.view)
        await until(lambda: ("offset", (0, 1)) in offsets(app.view, 1))
        app.screen.selections = {app.view: Selection(Offset(5, 1), Offset(2, 3))}
        assert app.view.copy_text() == "1\nline 2\n漢字"
        assert app.shown()[3] == "0 漢字 wide"


async def test_the_prompt_answers_with_a_pattern_or_says_what_is_wrong(logs: RunLogs) -> None:
    app = LogApp(logs.run_dir)
    async with app.run_test(size=(60, 10)) as pilot:
        bar = app.query_one(FilterBar)
        bar.open("search")
        await pilot.press("l", "o", "s", "s", "enter")
        assert app.answers == [("search", "loss")]
        assert not bar.is_open
        bar.open("filter", "re:(")
        await pilot.press("enter")
        assert bar.is_open
        assert "not a regular expression" in str(bar.query_one(".fault").render())
        bar.open("filter", "")
        await pilot.press("!", "x", "enter")
        assert app.answers[1:] == [("filter", "!x")]
        bar.open("search")
        await pilot.press("g", "o", "enter")
        bar.open("search", "go")
        entry = bar.query_one(Input)
        shown = []
        for key in ("up", "up", "up", "down", "down"):
            await pilot.press(key)
            shown.append(entry.value)
        assert shown == ["go", "loss", "loss", "go", ""]


def both(logs: RunLogs, text: str) -> None:
    for rank in (0, 1):
        logs.write(rank, text)


@pytest.mark.parametrize("size", [(80, 24), (120, 36), (160, 45)])
async def test_lines_that_all_ranks_print_alike_are_shown_once(logs: RunLogs, size: tuple[int, int]) -> None:
    app = LogApp(logs.run_dir, alike_once=True)
    async with app.run_test(size=size):
        logs.write(0, "loading\nstep 1 of rank 0\n")
        await until(lambda: app.shown() == ["  0 loading", "  0 step 1 of rank 0"])
        logs.write(LAUNCHER_SOURCE, "loading\n")
        logs.write(1, "loading\nstep 1 of rank 1\n")
        together = ["all loading", "  0 step 1 of rank 0", "  L loading", "  1 step 1 of rank 1"]
        await until(lambda: app.shown() == together)
        assert app.view.text() == "\n".join(together)
        bar = app.view.vertical_scrollbar
        both(logs, "\n" * (size[1] - 5))
        await until(lambda: app.view.state.lines == 5 + 2 * (size[1] - 5))
        assert bar.window_size >= bar.window_virtual_size, "all lines are on the screen"
        together += ["all"] * (size[1] - 5)
        app.view.move("top")
        app.view.toggle_alike()
        each = ["0 loading", "0 step 1 of rank 0", "L loading", "1 loading", "1 step 1 of rank 1"]
        assert app.shown()[:5] == each
        app.view.set_source(1)
        app.view.toggle_alike()
        app.view.move("top")
        assert app.shown()[:2] == ["loading", "step 1 of rank 1"]


async def test_alike_lines_are_walked_past_followed_and_copied_once(logs: RunLogs) -> None:
    app = LogApp(logs.run_dir, alike_once=True)
    async with app.run_test(size=(60, 10)):
        for number in range(40):
            both(logs, f"line {number}\n")
        everything = [f"all line {number}" for number in range(40)]
        await until(lambda: app.shown() == everything[-10:])
        for wrap in (False, True):
            app.view.move("top")
            seen = app.shown()
            while app.view.move("down"):
                assert app.shown()[:-1] == seen[-9:]
                seen.append(app.shown()[-1])
            assert seen == everything
            assert app.view.state.following
            while app.view.move("up"):
                seen.pop()
                assert app.shown()[0] == seen[-10]
            if not wrap:
                app.view.toggle_wrap()
        app.view.move("top")
        here = app.shown()
        both(logs, "arrives\n")
        await until(lambda: app.view.state.new_lines == 2)
        assert app.shown() == here
        await until(lambda: ("offset", (0, 2)) in offsets(app.view, 1))
        app.screen.selections = {app.view: Selection(Offset(0, 2), Offset(6, 6))}
        assert app.view.copy_text() == "line 1\nline 2\nline 3"


async def test_a_search_and_a_jump_go_to_the_line_that_stands_for_all(logs: RunLogs) -> None:
    app = LogApp(logs.run_dir, alike_once=True)
    async with app.run_test(size=(60, 10)):
        for number in range(30):
            both(logs, f"line {number}\n")
        both(logs, "ValueError: boom\n")
        both(logs, "".join(f"line {number}\n" for number in range(30, 60)))
        await until(lambda: app.shown()[-1:] == ["all line 59"])
        app.view.search("line 5")
        await until(lambda: (app.view.state.match, app.view.state.matches, app.view.state.counted) == (11, 11, True))
        app.view.next_match()
        await until(lambda: app.view.state.match == 1)
        app.view.next_match()
        await until(lambda: app.view.state.match == 2)
        assert app.view.copy_text() == "line 50"
        app.view.toggle_alike()
        await until(lambda: (app.view.state.matches, app.view.state.counted) == (22, True))
        app.view.toggle_alike()
        await until(lambda: (app.view.state.matches, app.view.state.counted) == (11, True))
        app.view.previous_error()
        await until(lambda: app.view.copy_text() == "ValueError: boom")
        app.view.previous_error()
        await until(lambda: app.view.state.note == "no error above")
        app.view.jump_to(1, logs.run_dir.log(1).read_bytes().index(b"line 40"))
        assert "all line 40" in app.shown() and app.view.copy_text() == "line 40"
        app.view.filter("line 4")
        await until(lambda: app.view.state.counted and app.shown()[0] == "all line 40")
        app.view.move("top")
        assert app.shown()[0] == "all line 4"
        assert app.shown()[1:] == [f"all line {number}" for number in range(40, 49)]


async def test_the_place_is_that_of_the_line_that_stands_for_all(logs: RunLogs) -> None:
    app = LogApp(logs.run_dir, alike_once=True)
    async with app.run_test(size=(60, 10)):
        for number in range(40):
            both(logs, f"line {number}\n")
        await until(lambda: app.shown()[-1:] == ["all line 39"])
        app.view.search("line 2")
        app.view.set_source(1)
        app.view.jump_to(1, logs.run_dir.log(1).read_bytes().index(b"line 20"))
        app.view.set_source(None)
        await until(lambda: (app.view.state.match, app.view.state.matches, app.view.state.counted) == (2, 11, True))
        app.view.toggle_alike()
        app.view.jump_to(1, logs.run_dir.log(1).read_bytes().index(b"line 21"))
        await until(lambda: (app.view.state.match, app.view.state.matches, app.view.state.counted) == (6, 22, True))
        app.view.toggle_alike()
        await until(lambda: (app.view.state.match, app.view.state.matches, app.view.state.counted) == (3, 11, True))
        app.view.next_match()
        await until(lambda: app.view.copy_text() == "line 22")
        logs.run_dir.log(2).touch()
        await until(lambda: (app.view.state.matches, app.view.state.counted) == (22, True))
        app.view.jump_to(1, logs.run_dir.log(1).read_bytes().index(b"line 23"))
        logs.run_dir.log(2).unlink()
        index = logs.run_dir.merged_index
        index.with_name("copy").write_bytes(index.read_bytes())
        index.with_name("copy").replace(index)
        await until(lambda: (app.view.state.match, app.view.state.matches, app.view.state.counted) == (5, 11, True))


async def test_a_view_without_height_shows_nothing_and_is_no_error(logs: RunLogs) -> None:
    logs.write(0, numbered(0, 3))
    app = LogApp(logs.run_dir)
    async with app.run_test(size=(60, 10)) as pilot:
        app.view.styles.height = 0
        await pilot.pause()
        app.view.open(logs.run_dir)
        app.view.follow(False)
        assert app.view.text() == ""


async def test_a_frozen_view_does_not_take_a_line_for_one_of_all(logs: RunLogs) -> None:
    app = LogApp(logs.run_dir, alike_once=True)
    async with app.run_test(size=(60, 10)):
        logs.write(0, "same\n")
        await until(lambda: app.shown() == ["  0 same"])
        app.view.freeze(True)
        logs.write(1, "same\n")
        await until(lambda: app.view.state.new_lines == 1)
        assert app.shown() == ["  0 same"]
        app.view.freeze(False)
        assert app.shown() == ["all same"]


def styled(view: LogView, y: int) -> list[tuple[str, str | None]]:
    """The pieces of a row with their colours."""
    return [
        (piece.text.strip(), piece.style.color.name if piece.style and piece.style.color else None)
        for piece in view.render_line(y)
        if piece.text.strip()
    ]


async def test_the_programs_colours_are_shown_and_not_copied(logs: RunLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    logs.write(0, "\x1b[1;32mgood\x1b[0m \x1b[38;5;208morange\x1b[0m \x1b[38;2;1;200;3mtrue\x1b[0m plain\n")
    logs.write(0, "\x1b[40;30mnot hidden\x1b[0m and \x1b[31;4munder\n")
    app = LogApp(logs.run_dir)
    async with app.run_test(size=(40, 5)):
        await until(lambda: len(app.shown()) == 2)
        base = app.view.rich_style.color
        assert base is not None
        own = [("good", "color(2)"), ("orange", "color(208)"), ("true", "#01c803"), ("plain", base.name)]
        assert styled(app.view, 0)[1:] == own
        assert styled(app.view, 1)[1:] == [("not hidden and", base.name), ("under", "color(1)")]
        app.view.search("goo")
        await until(lambda: app.view.state.match == 1)
        assert [text for text, _ in styled(app.view, 0)[1:3]] == ["goo", "d"]
        assert app.view.copy_text() == "good orange true plain"
        assert "\x1b" not in app.view.text()
        app.view.search("31")
        await until(lambda: app.view.state.note == "no match")
        app.view.search("")
        monkeypatch.setattr(app, "no_color", True)
        assert styled(app.view, 0)[1:] == [("good orange true plain", base.name)]


async def test_a_programs_colours_are_judged_by_the_lines_own_colour(logs: RunLogs) -> None:
    logs.write(0, "\x1b[41mERROR: boom\x1b[0m\n\x1b[41mother\x1b[0m\n\x1b[34;41mblue on red\n")
    app = LogApp(logs.run_dir)
    async with app.run_test(size=(40, 5)):
        await until(lambda: len(app.shown()) == 3)
        plain = app.view.rich_style.bgcolor
        backgrounds = [[piece.style.bgcolor for piece in app.view.render_line(y) if piece.style][1] for y in range(3)]
        assert backgrounds == [plain, Color.from_ansi(1), plain]


async def test_a_line_full_of_colours_is_drawn_in_no_time(logs: RunLogs) -> None:
    line = "".join(f"\x1b[38;5;{number % 256}m{number % 10}" for number in range(330))
    logs.write(0, f"{line}\n" * 100)
    app = LogApp(logs.run_dir)
    async with app.run_test(size=(160, 45)):
        await until(lambda: len(app.shown()) == 45)
        began = time.thread_time()
        app.view.move("page_up")
        app.shown()
        assert time.thread_time() - began < 1.0
        assert len(styled(app.view, 0)) > 100


HOSTILE = (
    b"\x1b[2J\x1b[1;31mred\x1b]0;owned\x07\x1b]52;c;aGk=\x07\n"
    b"\x1b]8;;http://x\x1b\\[bold]markup[/bold] [@click=app.quit]click[/]\n"
    b" 5%\r 50%\r100%\n"
    b"\x9b31m \xc2\x9b31m \xc2\x90q \xff\xfe\x00\x01\x02\n"
    b"\xe2\x80\xae\xe2\x81\xa6evil\xe2\x80\xac\n" + ("a" + "\u0301" * 2_000 + "\n").encode() + "漢字😀\n".encode() * 3
    + b"\x1bP+q544e\x1b\\\x1b_G\x1b\\\x1b^x\x1b\\\x1bXy\n"
    + b"tab\there\x0b\x0c\x85\x1b\n"
    + b"\x1b[31m" * 200_000 + b"\n"
    + b"\x1b]" + b"z" * 1_000_000
)  # fmt: skip


@pytest.mark.parametrize("wrap", [False, True])
async def test_hostile_output_is_shown_harmlessly_and_stays_as_it_was(logs: RunLogs, wrap: bool) -> None:
    logs.write(0, HOSTILE)
    app = LogApp(logs.run_dir)
    async with app.run_test(size=(80, 24)):
        await until(lambda: len(app.shown()) > 5)
        app.view.search("evil")
        await until(lambda: app.view.state.match == 1)
        if wrap:
            app.view.toggle_wrap()
        seen = []
        app.view.move("top")
        for page in range(12):
            await asyncio.sleep(0)
            for y in range(app.view.size.height):
                strip = app.view.render_line(y)
                seen.append(strip.text)
                assert strip.cell_length == app.view.scrollable_content_region.width
            app.view.move("page_down" if page < 10 else "bottom")
        categories = {unicodedata.category(character) for text in seen for character in text}
        assert categories.isdisjoint({"Cc", "Cf", "Cs", "Zl", "Zp"})
        everything = "\n".join(seen)
        assert "[@click=app.quit]click[/]" in everything
        assert "100%" in everything
        assert ("1,000,002 bytes in all" in everything.replace("\n  ", "")) == wrap
    assert logs.run_dir.log(0).read_bytes() == HOSTILE


def test_no_escape_sequence_of_a_log_reaches_the_terminal(logs: RunLogs) -> None:
    logs.write(0, HOSTILE[: HOSTILE.index(b"tab\there")])
    with Terminal([sys.executable, "-m", "tests.bench.log_console", str(logs.run_dir.path)]) as terminal:
        terminal.read_until(b"100%")
        terminal.press(b"x")
        terminal.read_until(b"answer 1.")
        terminal.press(b"q")
        terminal.wait()
        written = bytes(terminal.output)
    assert "漢字".encode() in written
    for sequence in (
        b"]0;owned",
        b"]52;",
        b"]8;;http",
        b"+q544e",
        b"\x9b31m",
        b"\xc2\x9b",
        b"\x1b_G",
        "\u202e".encode(),
    ):
        assert sequence not in written
    assert written.count("\u0301".encode()) <= 4 * written.count("a\u0301".encode())
