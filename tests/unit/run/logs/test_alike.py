"""Lines that all ranks print alike are found, each once, whatever comes between them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.run.logs.alike import TOGETHER_CS, AlikeLines, alike
from engine.run.logs.pattern import LogPattern
from engine.run.logs.reader import LogFilter, LogReader, StoredLine
from engine.store.layout import LAUNCHER_SOURCE
from tests.unit.run.logs.run_logs import RunLogs

gaps = st.sampled_from([0, 1, 300, TOGETHER_CS, TOGETHER_CS + 1])
printed = st.lists(st.tuples(st.sampled_from([0, 1, 2, LAUNCHER_SOURCE]), gaps, st.sampled_from(["a", "b", None])))


def timed(lines: list[tuple[int, int, str | None]]) -> list[tuple[int, int, str | None]]:
    """Lines with gaps before them as lines with times."""
    at = 0
    return [(source, at := at + gap, text) for source, gap, text in lines]


@given(printed)
def test_each_group_has_one_line_of_each_rank_with_one_text_close_together(
    lines: list[tuple[int, int, str | None]],
) -> None:
    log, ranks = timed(lines), (0, 1, 2)
    groups: dict[int, list[int]] = {}
    for place, first in alike(log, ranks).items():
        groups.setdefault(first, []).append(place)
    for first, places in groups.items():
        assert first == min(places)
        assert sorted(log[place][0] for place in places) == [*ranks]
        assert len({log[place][2] for place in places}) == 1
        assert None not in {log[place][2] for place in places}
        assert max(log[place][1] for place in places) - log[first][1] <= TOGETHER_CS


@given(st.lists(st.sampled_from("abc"), max_size=8), st.data())
def test_what_all_print_within_the_time_is_all_found_however_it_is_mixed(texts: list[str], data: st.DataObject) -> None:
    queues = {rank: list(texts) for rank in range(3)}
    log = []
    while any(queues.values()):
        rank = data.draw(st.sampled_from([rank for rank, left in queues.items() if left]))
        log.append((rank, 0, queues[rank].pop(0)))
    firsts = alike(log, queues)
    assert sorted(firsts) == [*range(len(log))]
    assert Counter(log[first][2] for first in set(firsts.values())) == Counter(texts)


@given(printed)
def test_what_comes_later_takes_nothing_back(lines: list[tuple[int, int, str | None]]) -> None:
    log = timed(lines)
    whole = alike(log, (0, 1))
    for stop in range(len(log)):
        assert alike(log[:stop], (0, 1)).items() <= whole.items()


@pytest.fixture
def logs(tmp_path: Path) -> RunLogs:
    return RunLogs(tmp_path, (0, 1, LAUNCHER_SOURCE))


def firsts(reader: LogReader, lines: AlikeLines) -> list[int | None]:
    lines.refresh(replaced=reader.refresh())
    return [lines.first(number) for number in range(reader.line_count)]


def test_a_line_counts_once_it_has_ended_and_the_launchers_never(logs: RunLogs) -> None:
    reader = LogReader(logs.run_dir)
    lines = AlikeLines(reader)
    logs.write(0, "loading\nstep 1\n")
    logs.write(LAUNCHER_SOURCE, "loading\n")
    logs.write(1, "load")
    assert firsts(reader, lines) == [None, None, None, None]
    logs.write(1, "ing\n")
    assert firsts(reader, lines) == [0, None, None, 0]
    logs.write(1, "step 2\n")
    assert firsts(reader, lines) == [0, None, None, 0, None]
    assert [lines.first(number, stop=3) for number in range(3)] == [None] * 3
    alone = LogReader(logs.run_dir, 0)
    assert firsts(alone, AlikeLines(alone)) == [None, None]


def test_a_rank_that_has_a_log_later_is_one_of_all(tmp_path: Path) -> None:
    logs = RunLogs(tmp_path, (0, 1))
    logs.write(0, "same\n")
    logs.write(1, "same\n")
    reader = LogReader(logs.run_dir)
    lines = AlikeLines(reader)
    assert firsts(reader, lines) == [0, 0]
    logs.run_dir.log(2).touch()
    assert firsts(reader, lines) == [None, None]


def test_a_rank_that_is_lost_is_one_of_all_no_more_and_one_that_is_only_late_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.run.logs.alike.BLOCK_LINES", 8)
    logs = RunLogs(tmp_path, (0, 1, 2))
    reader = LogReader(logs.run_dir)
    lines = AlikeLines(reader)

    def both_print(count: int) -> None:
        for rank in (0, 1):
            logs.write(rank, "same\n" * count)

    both_print(20)
    assert firsts(reader, lines) == [None] * 40
    logs.write(2, "same\n" * 16)
    both_print(8)
    late = firsts(reader, lines)[40:]
    assert late == [None] * 32, "rank 2 has printed within the block before, or 10 s before"
    for _ in range(10):
        both_print(4)
    lost = firsts(reader, lines)[72:]
    assert lost[-8:] == [144, 145, 146, 147] * 2
    assert lost == firsts(reader, AlikeLines(reader))[72:]
    logs.write(2, "back\n")
    assert firsts(reader, lines)[144:] == [144, 145, 146, 147] * 2 + [None]


def test_what_has_been_read_of_a_block_is_not_read_again(logs: RunLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, read = LogReader(logs.run_dir), list[int]()
    lines, stored = AlikeLines(reader), reader.stored

    def counted(start: int, stop: int) -> list[StoredLine]:
        stored_lines = [*stored(start, stop)]
        read.extend(line.number for line in stored_lines)
        return stored_lines

    monkeypatch.setattr(reader, "stored", counted)
    logs.write(LAUNCHER_SOURCE, "not ended")
    for _ in range(4):
        for rank in (0, 1):
            logs.write(rank, "same\n")
            expected = firsts(reader, lines)
    assert expected == [None, 1, 1, 3, 3, 5, 5, 7, 7]
    assert [number for number in read if number] == [*range(1, 9)]
    logs.write(LAUNCHER_SOURCE, ", now\n")
    assert firsts(reader, lines) == expected and firsts(reader, lines) == expected
    assert read.count(0) == 9


def test_a_long_log_is_looked_through_in_blocks_and_the_same_from_anywhere(
    logs: RunLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.run.logs.alike.BLOCK_LINES", 8)
    monkeypatch.setattr("engine.run.logs.alike._KEPT_BLOCKS", 2)
    for step in range(20):
        for rank in (0, 1):
            logs.write(rank, f"same {step // 3}\nrank {rank} step {step}\n")
    reader = LogReader(logs.run_dir)
    lines = AlikeLines(reader)
    forward = firsts(reader, lines)
    assert [lines.first(number) for number in reversed(range(reader.line_count))][::-1] == forward
    assert forward == [first for step in range(20) for first in (4 * step, None, 4 * step, None)]


def test_matches_of_lines_that_all_print_alike_are_counted_once(tmp_path: Path) -> None:
    logs = RunLogs(tmp_path, (0, 1, 2))
    reader = LogReader(logs.run_dir)
    lines = AlikeLines(reader)
    once = LogFilter(reader, LogPattern.parse("same"), left_out=lines.repeats)
    every = LogFilter(reader, LogPattern.parse("same"))
    for rank, numbers in ((0, [0]), (1, [0, 2]), (2, [0])):
        logs.write(rank, f"same\nother {rank}\n")
        lines.refresh(replaced=reader.refresh())
        while once.advance() or every.advance():
            pass
        assert [*once.numbers] == numbers
    assert [*every.numbers] == [0, 2, 4]


def test_a_match_whose_line_ends_late_is_counted_once_too(tmp_path: Path) -> None:
    logs = RunLogs(tmp_path, (0, 1))
    reader = LogReader(logs.run_dir)
    lines = AlikeLines(reader)
    counts = [LogFilter(reader, LogPattern.parse(text), left_out=lines.repeats) for text in ("sa", "same")]
    for rank, text, numbers in ((0, "same\n", [[0], [0]]), (1, "sa", [[0, 1], [0]]), (1, "me\n", [[0], [0]])):
        logs.write(rank, text)
        lines.refresh(replaced=reader.refresh())
        for count in counts:
            while count.advance():
                pass
        assert [[*count.numbers] for count in counts] == numbers
