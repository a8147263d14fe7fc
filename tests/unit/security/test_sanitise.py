"""Whatever a rank prints, what is shown of it is harmless."""

from __future__ import annotations

import time
import unicodedata
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.security.sanitise import MARKS_PER_CHARACTER, sanitise, sgr_spans

NASTY = [
    b"\x1b[", b"\x1b]", b"\x1bP", b"\x1b_", b"\x1b^", b"\x1bX", b"\x1b\\", b"\x1b", b"\x07", b"\r", b"\n", b"\t",
    b"\x9b", b"\xc2\x9b", b"\xc2\x9d", b"\xc2\x9c", b"\xc2\x90", b"31m", b"0;title", b"\x00", b"\x7f", b"\xff",
    b"\xe2\x80", "\u202e".encode(), "\u200b".encode(), "\ufeff".encode(), "\u0301".encode(), "\u2028".encode(),
    "漢".encode(), b" ",
    "\U000e0041".encode(), "\ufe0f".encode(), b"a", b"[", b"]", b";", "👩\u200d🚀".encode(),
]  # fmt: skip
lines = st.one_of(st.binary(), st.lists(st.sampled_from(NASTY)).map(b"".join), st.text().map(str.encode))
limits = st.one_of(st.none(), st.integers(-1, 60))


@given(lines, limits)
def test_nothing_that_comes_out_is_a_control_or_invisible(data: bytes, limit: int | None) -> None:
    shown = sanitise(data, limit)
    assert {unicodedata.category(character) for character in shown}.isdisjoint({"Cc", "Cf", "Cs", "Zl", "Zp"})


@given(lines, limits)
def test_what_came_out_passes_unchanged(data: bytes, limit: int | None) -> None:
    shown = sanitise(data, limit)
    assert sanitise(shown.encode(), limit) == shown


@given(lines, st.integers(0, 60))
def test_a_limit_holds(data: bytes, limit: int) -> None:
    assert len(sanitise(data, limit)) <= limit


@given(st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E)))
def test_plain_text_is_left_alone(text: str) -> None:
    assert sanitise(text.encode()) == text


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"\x1b[1;32mgreen\x1b[0m plain\n", "green plain"),
        (b"\x1b]0;owned\x07title", "title"),
        (b"\x1b]8;;http://e.example\x1b\\link\x1b]8;;\x1b\\", "link"),
        (b"\x1bPq#0;2;0\x1b\\sixel", "sixel"),
        (b"\x1b_app\x1b\\a\x1b^pm\x1b\\b\x1bXsos\x1b\\c", "abc"),
        (b"seen \x1b]52;c;aGVsbG8", "seen 52;c;aGVsbG8"),
        (b"cut \x1b[31", "cut "),
        ("\u009b31mred\u009dtitle\u009c!".encode(), "red!"),
        (b"\x9b31m", "\ufffd31m"),
        (b"\x1bc\x1b(0\x1b7reset", "reset"),
        (b"a\x00b\x07c\x08d\x7fe", "abcde"),
        ("user\u202ecod.exe\u2066!\u200b\ufeff".encode(), "usercod.exe!"),
        (b"  5%\r 50%\r100%\r\n", "100%"),
        (b" 50%\r\x1b[K100%\x1b[0m\r\x1b[0m\n", "100%"),
        (b"a\tb\n", "a       b"),
        (b"bad \xff\xfe utf\xe2\x82", "bad \ufffd\ufffd utf\ufffd"),
        ("one\u2028two\x0bthree\x85four".encode(), "one two three four"),
        ("漢字 naïve ✓".encode(), "漢字 naïve ✓"),
        (b"[bold]not markup[/] [link=x]", "[bold]not markup[/] [link=x]"),
        (b"", ""),
    ],
)
def test_a_terminals_tricks_are_undone(data: bytes, shown: str) -> None:
    assert sanitise(data) == shown


def test_what_is_cut_is_counted() -> None:
    assert sanitise(b"x" * 1_000, 40) == "x" * 23 + "… +977 characters"
    assert sanitise(b"x" * 40, 40) == "x" * 40


def test_marks_do_not_pile_up() -> None:
    piled = "a" + "\u0301" * 500 + "b"
    assert sanitise(piled.encode()) == "a" + "\u0301" * MARKS_PER_CHARACTER + "b"


@pytest.mark.parametrize(
    "piece", [b"\x1b]", b"\x1bP", "\u009d".encode(), b"\x1b[1;", b"\x1b", b"\r", b"\t", "a\u0301".encode(), b"\xff"]
)
def test_a_hostile_line_takes_linear_time(piece: bytes) -> None:
    def seconds(count: int) -> float:
        # Of this thread alone: what else the machine does is no matter.
        line = piece * count
        best = float("inf")
        for _ in range(3):
            start = time.thread_time()
            sanitise(line, 1_000)
            best = min(best, time.thread_time() - start)
        return best

    # Quadratic time would be 64 times as long for 8 times the line.
    assert seconds(160_000) < 32 * seconds(20_000) + 0.05


@given(lines)
def test_colours_lie_within_what_is_shown_in_order(data: bytes) -> None:
    text = sanitise(data)
    spans = sgr_spans(data, text)
    assert all(0 <= start < end <= len(text) and parameters for start, end, parameters in spans)
    assert all(one.end <= two.start for one, two in pairwise(spans))
    assert sgr_spans(data, f"{text}?") == []


parts = st.tuples(
    st.sampled_from(["1;31", "38;5;208", "38;2;9;8;7", "4;44"]),
    st.sampled_from(["a", "漢", "a\tb", "🚀\u200d!", "[x]"]),
)


@given(st.lists(parts))
def test_each_part_of_a_line_has_the_colours_that_it_was_printed_in(printed: list[tuple[str, str]]) -> None:
    line = "".join(f"\x1b[{colour}m{text}\x1b[0m " for colour, text in printed).encode()
    text = sanitise(line)
    spans = sgr_spans(line, text)
    assert [span.parameters for span in spans] == [colour for colour, _ in printed]
    assert [text[span.start : span.end].split() for span in spans] == [sanitise(t.encode()).split() for _, t in printed]


@pytest.mark.parametrize(
    ("data", "spans"),
    [
        (b"plain\n", []),
        (b"\x1b[31mred\x1b[0m plain\n", [("red", "31")]),
        (b"\x1b[1;31mred\x1b[22m thin\x1b[39m default", [("red", "1;31"), (" thin", "31"), (" default", "39")]),
        (b"\x1b[31ma\x1b[32mb\x1b[mc", [("a", "31"), ("b", "32")]),
        (b"\x1b[34mone\x1b[0m\x1b[34m two\x1b[0m", [("one two", "34")]),
        (b"\x1b[8mhidden\x1b[0m \x1b[5;31mblinking\x1b[0m", [("blinking", "31")]),
        (b"\x1b[01;31mbold\x1b[00m plain\x1b[08mhidden\x1b[038;05;008mgrey", [("bold", "1;31"), ("grey", "38;5;8")]),
        (b"\x1b[38;5;5mindexed\x1b[38;5mcut\x1b[38:2::1:2:3mcolons", [("indexedcutcolons", "38;5;5")]),
        (b" 50%\r\x1b[32m100%\x1b[0m\r\n", [("100%", "32")]),
        (b"\x1b[32m50%\r100%", []),
        (b"\x1b[32m100%\x1b[0m\r\x1b[0m\n", []),
        (b"\x1b]0;\x1b[31mtitle\x07\x1b[2J\x1b[33myellow", [("title", "31"), ("yellow", "33")]),
        (b"\x1b[31m" + b"x" * 5_000, []),
    ],
)
def test_colours_are_kept_and_nothing_else_of_a_terminal(data: bytes, spans: list[tuple[str, str]]) -> None:
    text = sanitise(data)
    assert [(text[start:end], parameters) for start, end, parameters in sgr_spans(data, text)] == spans
