"""Any line of a log is there at once, whatever is in it, and whatever is still arriving."""

from __future__ import annotations

import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config.models import Config
from engine.run.logs.pattern import ERRORS, SHOWN_BYTES, LogPattern
from engine.run.logs.reader import LogFilter, LogReader
from engine.run.run_plan import write_plan
from engine.security.sanitise import sanitise
from engine.store.layout import LAUNCHER_SOURCE, RunDir
from tests.unit.run.logs.run_logs import RunLogs
from tests.unit.run.run_maker import MadeRun, make_run_config

parse = LogPattern.parse
stored = ["foo", "Foo", "bar", "b\tar", "é", "fo\x1b[1mo", "foo\x1b[0m", "x\rfoo", "o\r", "b\x08ar", "f\0oo", ""]
stored += ["\x1b[1m\x1b[", "\x1b[\x1b[1mfoo", "f\x1b[3\x1b[1moo", "\x1b]0;\x1b[2mfoo\x07"]
stored += ["größe", "Größe", "GRÖẞE", "İ", "文é", "Жар", "e\u0301", "\ufeffé", "a\u00a0é", "İ文"]
stored += ["\t", "o\tf", "1234567\tf", "o  f\r", "foo\rx", "\r\tfoo"]
searched = ["foo", "Foo", "bar", "é", "re:^fo+$", "re:ba?r|Foo", "re:^.$", "o f", "größe", "Gr", "i", "жа", "a é"]
searched += ["o  f", " f", "7 f", "o "]
words = st.lists(st.sampled_from(stored), max_size=3)
chatter = st.lists(
    st.tuples(st.sampled_from([0, 1, LAUNCHER_SOURCE]), st.lists(words.map(" ".join), min_size=1, max_size=4)),
    min_size=1,
    max_size=8,
)


@pytest.fixture
def logs(tmp_path: Path) -> RunLogs:
    return RunLogs(tmp_path)


def texts(reader: LogReader) -> list[str]:
    return [line.text for line in reader.lines(0, reader.line_count)]


def test_a_run_without_logs_is_empty(tmp_path: Path) -> None:
    reader = LogReader(RunDir(tmp_path / "nothing"))
    assert reader.line_count == 0
    assert reader.lines(0, 10) == []
    assert reader.find(parse("x"), 0) is None
    assert reader.run_dir.sources() == []
    assert not reader.refresh()


def test_lines_come_merged_in_order_of_arrival_and_by_source(tmp_path: Path) -> None:
    logs = RunLogs(tmp_path, (0, 1, LAUNCHER_SOURCE))
    logs.write(0, "zero a\nzero b\n")
    logs.write(LAUNCHER_SOURCE, "launcher\n")
    logs.write(1, "one a\n")
    logs.write(0, "zero c\n")
    merged = LogReader(logs.run_dir)
    assert texts(merged) == ["zero a", "zero b", "launcher", "one a", "zero c"]
    assert [line.source for line in merged.lines(0, 9)] == [0, 0, LAUNCHER_SOURCE, 1, 0]
    assert merged.line(3).at - merged.line(0).at == 2.0
    assert merged.run_dir.sources() == [0, 1, LAUNCHER_SOURCE]
    zero = LogReader(logs.run_dir, 0)
    assert texts(zero) == ["zero a", "zero b", "zero c"]
    assert [merged.number_of(0, line.offset) for line in zero.lines(0, 3)] == [0, 1, 4]
    assert merged.first_since(merged.line(3).at) == 3
    with pytest.raises(IndexError):
        zero.line(3)


def test_lines_that_arrive_are_seen_after_refresh_and_a_partial_one_grows(logs: RunLogs) -> None:
    reader = LogReader(logs.run_dir)
    logs.write(0, "first\nloss 1.2")
    reader.refresh()
    assert [(line.text, line.partial) for line in reader.lines(0, 5)] == [("first", False), ("loss 1.2", True)]
    logs.write(1, "other\n")
    logs.write(0, "391\n")
    assert reader.line_count == 2
    reader.refresh()
    assert [(line.text, line.partial) for line in reader.lines(0, 5)] == [
        ("first", False),
        ("loss 1.2391", False),
        ("other", False),
    ]


def test_a_line_ends_where_it_ends_though_the_log_is_ahead_of_its_index(logs: RunLogs) -> None:
    logs.write(0, "tick 1\ntick 2\n")
    reader = LogReader(logs.run_dir, 0)
    with logs.run_dir.log(0).open("ab") as mirrored:
        mirrored.write(b"tick 3\ntick 4")
    assert texts(reader) == ["tick 1", "tick 2"]
    assert not any(line.partial for line in reader.lines(0, 9))


def test_a_line_of_ten_megabytes_is_shown_cut_with_its_length_and_its_neighbours_are_whole(logs: RunLogs) -> None:
    logs.write(0, b"before\n" + b"x" * 10_000_000 + b"needle\nafter\n")
    for source in (None, 0):
        reader = LogReader(logs.run_dir, source)
        assert [reader.line(0).text, reader.line(2).text] == ["before", "after"]
        shown = reader.line(1)
        assert len(shown.text) < SHOWN_BYTES + 100
        assert shown.text.endswith("x… 10,000,007 bytes in all")
        assert reader.find(parse("needle"), 0) == 1
        assert reader.find(parse("after"), 0) == 2
        assert reader.find(parse("before"), 2, forward=False) == 0


def test_a_progress_bar_shows_its_last_state_however_long_it_ran(logs: RunLogs) -> None:
    logs.write(0, b"".join(b"\rstep %6d" % step for step in range(20_000)) + b"\n")
    assert LogReader(logs.run_dir).line(0).text.startswith("step  19999")


def test_a_log_cut_short_by_somebody_is_no_error(logs: RunLogs) -> None:
    logs.write(0, "one\ntwo\nthree\n")
    logs.run_dir.log(0).write_bytes(b"on")
    reader = LogReader(logs.run_dir)
    assert texts(reader) == ["on", "", ""]
    assert reader.find(parse("three"), 0) is None


def test_an_index_that_is_another_file_starts_the_numbers_anew(logs: RunLogs) -> None:
    logs.write(0, "one\ntwo\n")
    reader = LogReader(logs.run_dir)
    index = logs.run_dir.merged_index
    copy = index.with_name("copy")
    copy.write_bytes(index.read_bytes())
    copy.replace(index)
    assert reader.refresh()
    assert texts(reader) == ["one", "two"]


def test_a_capital_counts_only_where_one_is_typed(logs: RunLogs) -> None:
    logs.write(0, "Loss 1\nloss 2\nÉtat 3\nétat 4\n")
    reader = LogReader(logs.run_dir)
    numbers = {}
    for wanted in ("loss", "Loss", "état", "État", "re:lo\\S+ 1", "re:L\\w+"):
        kept = LogFilter.parse(reader, wanted)
        while kept.advance(100):
            pass
        numbers[wanted] = list(kept.numbers)
    assert numbers == {
        "loss": [0, 1], "Loss": [0], "état": [2, 3], "État": [2], "re:lo\\S+ 1": [0], "re:L\\w+": [0]
    }  # fmt: skip


@given(chatter, st.sampled_from(searched), st.booleans())
def test_a_search_finds_what_reading_every_line_finds(
    parts: list[tuple[int, list[str]]], wanted: str, merged: bool
) -> None:
    with TemporaryDirectory() as root:
        logs = RunLogs(Path(root), (0, 1, LAUNCHER_SOURCE))
        for source, lines in parts:
            logs.write(source, "".join(f"{line}\n" for line in lines))
        reader = LogReader(logs.run_dir, None if merged else 0)
        pattern, shown = parse(wanted), reader.lines(0, reader.line_count)
        matching = [line.number for line in shown if pattern.expression.search(line.text)]
        for start in range(len(shown)):
            after = [number for number in matching if number >= start]
            until = [number for number in matching if number <= start]
            assert reader.find(pattern, start) == (after[0] if after else None)
            assert reader.find(pattern, start, forward=False) == (until[-1] if until else None)
        kept, left = LogFilter.parse(reader, wanted), LogFilter.parse(reader, "!" + wanted)
        for found in (kept, left):
            while found.advance(2):
                pass
        assert list(kept.numbers) == matching
        assert list(left.numbers) == [number for number in range(len(shown)) if number not in matching]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (b"loss \x1b[36m1.23\x1b[0m", "loss 1.23"),
        (b"\x1b[31mError: x", "re:^Error"),
        (b"all done\x1b[0m", "re:done$"),
        (b"all done\r", "re:done$"),
        (b"\rEpoch 3: 10%", "re:^Epoch"),
        ("日本語".encode(), r"re:^\w{3}$"),
        ("äöü".encode(), "re:^.{3}$"),
        (b"a\tb", "a       b"),
        (b"1%\rfoo" * 20_000, "foo"),
    ],
)
def test_what_is_found_in_the_shown_text_is_found(logs: RunLogs, line: bytes, wanted: str) -> None:
    logs.write(0, b"plain\n" + line + b"\n\x1b[1mother\x1b[0m" + b"\r" * SHOWN_BYTES + b"\nlast\n")
    reader = LogReader(logs.run_dir, 0)
    assert reader.matching(parse(wanted), 0, reader.line_count) == [1]


def test_only_the_coloured_lines_that_may_match_are_looked_at_one_by_one(
    logs: RunLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[bytes] = []

    def shown(line: bytes) -> str:
        looked_at.append(line)
        return sanitise(line)

    monkeypatch.setattr("engine.run.logs.pattern.sanitise", shown)
    logs.write(0, "".join(f"\x1b[2m{second}\x1b[0m \x1b[32mloss {second}\x1b[1m.5\x1b[0m\n" for second in range(1000)))
    reader = LogReader(logs.run_dir, 0)
    for wanted in ("loss 777.5", "Loss", "re:^777 .*5$"):
        assert reader.matching(parse(wanted), 0, reader.line_count) == ([] if wanted == "Loss" else [777])
    assert len(looked_at) == 2


def test_a_filter_keeps_up_and_matches_a_growing_line_again(logs: RunLogs) -> None:
    reader = LogReader(logs.run_dir)
    kept, left = LogFilter.parse(reader, "loss"), LogFilter.parse(reader, "!loss")

    def numbers() -> tuple[list[int], list[int]]:
        reader.refresh()
        for found in (kept, left):
            while found.advance():
                pass
        return list(kept.numbers), list(left.numbers)

    logs.write(0, "loss 1\nstep 2 lo")
    logs.write(1, "other\n")
    assert numbers() == ([0], [1, 2])
    logs.write(0, "ss 2\n")
    assert numbers() == ([0, 1], [2])
    logs.write(1, "loss 3\n")
    assert numbers() == ([0, 1, 3], [2])


def test_of_lines_that_are_not_shown_as_they_are_stored_only_those_that_may_match_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at = list[bytes]()

    def watched(line: bytes) -> str:
        looked_at.append(line)
        return sanitise(line)

    monkeypatch.setattr("engine.run.logs.pattern.sanitise", watched)
    data = "Größe 1\nчасть 2\n第一部分 3\nVERLUST ÜBER 4\n".encode()
    matching = [list(parse(text).positions(data, str)) for text in ("loss", "verlust", "über", "größe")]
    assert matching == [[], [38], [38], [0]]
    assert len(looked_at) == 3
    data = b"step\t1\tloss\t2.5\n 10%\r 20%\rdone\r\nno space\tleft\n"
    assert [list(parse(text).positions(data, str)) for text in ("nothing", "loss", "20%", "e l")] == [[], [0], [], []]
    assert [line[:4] for line in looked_at[3:]] == [b"step", b" 10%", b"no s"]


def test_a_search_can_be_stopped(logs: RunLogs) -> None:
    logs.write(0, "line\n" * 1_000 + "needle\n")
    assert LogReader(logs.run_dir).find(parse("needle"), 0, stop=lambda: True) is None


@pytest.mark.parametrize("text", ["", "re:", "re:(", "!"])
def test_a_pattern_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"nothing to search for|not a regular expression"):
        LogPattern.parse(text.removeprefix("!"))


@pytest.mark.parametrize(
    ("line", "reports_a_failure"),
    [
        ("RuntimeError: [ring] connection to a peer was lost", True),
        ("Traceback (most recent call last):", True),
        ("\x1b[33m[WARN] Node with rank 1 exited with code -9 \x1b[0m", True),
        ("ERROR something", True),
        ("Err\x1b[31mor: x", True),
        ("Killed", True),
        ("zsh: segmentation fault  python", True),
        ("[ring] Attempt 0 waiting 1000 ms (error: 111 )", False),
        ("error: 0", False),
        ("Iter 5: Train loss 5.815, Learning Rate 1.000e-05", False),
        ("[INFO] Node with rank 0 exited with code 0", False),
        ("mirrored the terrors", False),
    ],
)
def test_errors_are_distinguished_from_noise(line: str, reports_a_failure: bool) -> None:
    assert (ERRORS.expression.search(sanitise(line.encode())) is not None) == reports_a_failure
    assert (next(ERRORS.positions(line.encode(), str), None) is not None) == reports_a_failure


def test_errors_are_found_both_ways_across_ranks(logs: RunLogs) -> None:
    logs.write(0, "fine\nValueError: boom\n" + "fine\n" * 100)
    logs.write(1, "fine\n" * 100 + "Killed\nfine\n")
    reader = LogReader(logs.run_dir)
    assert reader.find(ERRORS, 0) == 1
    assert reader.find(ERRORS, 2) == 202
    assert reader.find(ERRORS, 203) is None
    assert reader.find(ERRORS, 201, forward=False) == 1


def test_a_big_log_is_searched_over_many_blocks(logs: RunLogs) -> None:
    numbers = random.Random(7)
    for _ in range(6):
        for rank in (0, 1):
            logs.write(rank, "".join(f"rank {rank} {numbers.random()} {'pad ' * 20}\n" for _ in range(12_000)))
    logs.write(1, "the Needle\n")
    logs.write(0, "more\n" * 40_000)
    reader = LogReader(logs.run_dir)
    at = 2 * 6 * 12_000
    assert reader.line(at).text == "the Needle"
    assert reader.find(parse("needle"), 0) == reader.find(parse("re:Ne+dle"), 0) == at
    assert reader.find(parse("Needle"), reader.line_count, forward=False) == at
    assert reader.find(parse("NEEDLE"), 0) is None
    first = reader.find(parse("rank 1"), 0)
    assert first == 12_000
    assert reader.find(parse("rank 0"), at, forward=False) == 11 * 12_000 - 1


KEY = ["-----BEGIN RSA PRIVATE KEY-----", *["MIIEowIBAAKCAQEA" * 4] * 20, "Ag==", "-----END RSA PRIVATE KEY-----"]
TOKEN = "hf_" + "aB3" * 11


def test_no_line_is_shown_with_its_secrets_and_a_key_is_known_from_any_line_on(logs: RunLogs) -> None:
    """Also where the view begins in the middle of it, and other ranks print between its lines."""
    write_plan(logs.run_dir.plan, MadeRun(logs.run_dir.path / "home").plan.model_copy(update={"config": with_env()}))
    logs.write(0, f"401 for {TOKEN}, PGPASSWORD=abcdefg, hunter2 it was\n")
    for number, line in enumerate(KEY):
        logs.write(0, line + "\n")
        logs.write(1, f"iteration {number}: loss 2.5\n")
    logs.write(0, "iteration 1: loss 2.5\n")
    alone, merged = LogReader(logs.run_dir, 0), LogReader(logs.run_dir)
    assert alone.line(0).text == "401 for [redacted], PGPASSWORD=[redacted], [redacted] it was"
    assert alone.line(alone.line_count - 1).text == "iteration 1: loss 2.5"
    for start in range(1, len(KEY) + 1):
        assert {line.text for line in alone.lines(start, len(KEY) + 1)} == {"[redacted]"}
    for start in range(2, merged.line_count, 7):
        shown = merged.lines(start, start + 9)
        assert all(("loss 2.5" in line.text) if line.source else ("MII" not in line.text) for line in shown)


def test_a_secret_cannot_be_found_by_its_parts(logs: RunLogs) -> None:
    logs.write(0, f"401 for {TOKEN}\nloss 2.5\n401 for ana\n")
    reader = LogReader(logs.run_dir, 0)
    assert reader.matching(LogPattern.parse("401"), 0, 3) == [0, 2]
    assert reader.find(LogPattern.parse("hf_aB3"), 0) is None
    assert reader.matching(LogPattern.parse("re:hf_[a-c]"), 0, 3) == []
    assert reader.matching(LogPattern.parse("aB3"), 0, 3) == []


def test_a_secret_at_the_end_of_what_is_shown_of_a_long_line_is_not_cut_in_two(logs: RunLogs) -> None:
    for place in range(SHOWN_BYTES - len(TOKEN), SHOWN_BYTES + 1, 5):
        logs.write(0, f"{'x ' * (place // 2)} {TOKEN} {'y' * 10_000}\n")
    for line in LogReader(logs.run_dir, 0).lines(0, 100):
        assert "hf_" not in line.text and "aB3" not in line.text
        assert len(line.text) < SHOWN_BYTES + 40


def with_env() -> Config:
    config = make_run_config()
    return config.model_copy(update={"job": config.job.model_copy(update={"env": {"SETTING": "hunter2", "ONE": "1"}})})
