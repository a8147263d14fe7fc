"""One rank's status is what its last events say, and costs the same however long the file is."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st

from engine.run.rank_events import RankEvents
from engine.snapshots import ChunkProgress, Sample, ServedRequests


def write(path: Path, *events: dict[str, object]) -> None:
    with path.open("a") as file:
        for event in events:
            line = {"event": event["event"], "rank": 0, "attempt": 1, "at": 1_700_000_000.0, **event}
            file.write(json.dumps(line) + "\n")


def step(iteration: int) -> dict[str, object]:
    return {"event": "step", "iteration": iteration, "compute_s": iteration / 100, "peak_memory_bytes": 1000}


EVENTS: list[dict[str, object]] = [
    {"event": "step", "compute_s": 0.5, "peak_memory_bytes": 1000},
    {"event": "report", "train_loss": 2.0},
    {"event": "activity"},
    {"event": "start", "attempt": 2, "iterations": 9},
    {"event": "phase", "phase": "training"},
    {"event": "phase", "phase": "saving"},
    {"event": "processes", "state": "stopped"},
    {"event": "processes", "state": "busy"},
    {"event": "checkpoint", "phase": "committed", "bytes": 9, "seconds": 0.25},
    {"event": "end", "completed": True},
]


def test_a_rank_goes_from_loading_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "rank0.events.jsonl"
    rank = RankEvents(path)
    assert rank.poll().phase is None
    write(path, {"event": "start", "iterations": 9})
    assert (rank.poll().phase, rank.report.iterations) == ("loading", 9)
    write(path, {"event": "phase", "phase": "training"}, step(3))
    news = rank.poll()
    assert (news.phase, news.iteration, news.step_s, news.memory_bytes) == ("training", 3, 0.03, 1000)
    assert news.seen_at is not None
    write(path, {"event": "phase", "phase": "saving"})
    assert (rank.poll().phase, rank.report.iteration) == ("saving", 3)
    write(path, {"event": "end", "completed": True})
    assert rank.poll().phase == "ended"


@given(st.lists(st.sampled_from(EVENTS), max_size=12))
def test_what_a_rank_is_at_does_not_depend_on_how_often_it_is_read(drawn: list[dict[str, object]]) -> None:
    events = [{**event, "at": 1_700_000_000.0 + place, "iteration": place} for place, event in enumerate(drawn)]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "events"
        often = RankEvents(path)
        for event in events:
            write(path, event)
            often.poll()
        at_once = RankEvents(path)
        # All times are alike, whichever steps they are of, but for when they came.
        assert replace(at_once.poll(), moved_at=often.report.moved_at) == often.report
        assert at_once.checkpoints == often.checkpoints


def test_checkpoints_are_found_wherever_they_lie(tmp_path: Path) -> None:
    path = tmp_path / "events"
    for start in (0, 200, 400):
        write(path, *(step(n) for n in range(start, start + 200)))
        write(path, {"event": "checkpoint", "phase": "begin", "iteration": start + 199})
        write(path, {"event": "checkpoint", "phase": "committed", "iteration": start + 199})
    write(path, *(step(n) for n in range(600, 800)))
    rank = RankEvents(path)
    assert (rank.poll().iteration, rank.checkpoints) == (799, [199, 399, 599])


def test_warnings_of_the_attempt_are_kept_wherever_they_lie(tmp_path: Path) -> None:
    path = tmp_path / "events"
    rank = RankEvents(path)
    write(path, {"event": "warning", "message": "some rows are cut\x1b[31m"}, *(step(n) for n in range(500)))
    write(path, {"event": "warning", "message": 7}, {"event": "warning", "message": "some rows are cut\x1b[31m"})
    (text,) = rank.poll().warnings
    assert text.startswith("some rows are cut") and "\x1b" not in text
    for n in range(99):
        write(path, {"event": "warning", "message": f"{n} " + "x" * 9999})
    kept = rank.poll().warnings
    assert len(kept) == 20 and kept[-1].startswith("98 ") and max(map(len, kept)) <= 500
    write(path, {"event": "start", "attempt": 2})
    assert rank.poll().warnings == ()


def test_answers_of_each_prompt_are_kept_first_and_newest_over_attempts(tmp_path: Path) -> None:
    path = tmp_path / "events"
    rank = RankEvents(path)

    def answered(iteration: int, text: str = "fine", **more: object) -> dict[str, object]:
        facts = {"text": text, "tokens": 2, "seconds": 0.5, "share": 0.02 if iteration else None}
        return {"event": "sample", "iteration": iteration, "prompt": "how?", **facts, **more}

    write(path, *(answered(iteration) for iteration in (0, 10, 20, 30)), answered(0, prompt="why?"), step(31))
    assert [(sample.prompt, sample.iteration) for sample in rank.poll().samples] == [
        *(("how?", 0), ("how?", 20), ("how?", 30), ("why?", 0)),
    ]
    assert rank.report.samples[2] == Sample(30, "how?", "fine", 2, 0.5, 0.02)
    write(path, {"event": "start", "attempt": 2}, answered(30, "fi\x1b[31mner\n\nx", attempt=2))
    assert [(sample.iteration, sample.text[:5]) for sample in rank.poll().samples if sample.prompt == "how?"] == [
        *((0, "fine"), (20, "fine"), (30, "finer")),
    ]
    assert not {"\x1b", "\n"} & set(rank.report.samples[-1].text)
    write(path, *(answered(0, prompt=f"{number}") for number in range(99)), answered(40, "x" * 99_999, attempt=2))
    assert len(rank.poll().samples) <= 24 and max(len(sample.text) for sample in rank.report.samples) <= 4000


def test_one_written_in_the_background_may_be_reported_late(tmp_path: Path) -> None:
    path = tmp_path / "events"
    for iteration in (4, 10, 8, 12):
        write(
            path, {"event": "checkpoint", "phase": "committed", "iteration": iteration, "background": iteration != 10}
        )
    rank = RankEvents(path)
    rank.poll()
    assert rank.checkpoints == [4, 10, 12]


def test_the_typical_step_is_a_median_and_the_norms_are_those_of_the_last_update(tmp_path: Path) -> None:
    path = tmp_path / "events"
    for number, seconds in enumerate([0.4, 0.5, 9.0, 0.4, 0.5], 1):
        update = {"grad_norm": 2.0 * number, "own_grad_norm": 1.5 * number} if number % 2 == 0 else {"grad_norm": None}
        write(path, {**step(number), "compute_s": seconds, "communicate_s": 0.1 * number, **update})
    rank = RankEvents(path)
    news = rank.poll()
    assert (news.step_s, news.typical_s, news.exchange_s) == (0.5, 0.5, 0.5)
    assert (news.global_grad_norm, news.grad_norm) == (8.0, 6.0)

    write(path, {**step(6), "compute_s": 30.0})
    assert (rank.poll().step_s, rank.report.typical_s) == (30.0, 0.5)
    write(path, {**step(6), "compute_s": 7.0, "attempt": 2})
    news = rank.poll()
    assert (news.step_s, news.typical_s, news.global_grad_norm) == (7.0, 7.0, None)


def test_the_last_chunk_is_found_wherever_it_lies(tmp_path: Path) -> None:
    path = tmp_path / "events"
    write(path, {"event": "chunk", "chunk": 19, "num_chunks": 20, "epoch": 0, "progress": "..."})
    write(path, *(step(n) for n in range(300)), {"event": "chunk", "chunk": 21, "num_chunks": 20})
    rank = RankEvents(path)
    assert rank.poll().chunk == ChunkProgress(19, 20)
    write(path, {"event": "chunk", "chunk": 3, "num_chunks": 20, "epoch": 1}, step(301))
    assert rank.poll().chunk == ChunkProgress(3, 20, epoch=2)
    write(path, {"event": "start", "attempt": 2})
    assert rank.poll().chunk is None


def test_a_new_attempt_forgets_the_reports_of_the_old_process(tmp_path: Path) -> None:
    path = tmp_path / "events"
    write(path, step(50), {"event": "failure"}, {"event": "start", "attempt": 2, "iterations": 100})
    news = RankEvents(path).poll()
    assert (news.phase, news.iteration, news.attempt) == ("loading", None, 2)


def test_a_long_history_is_passed_over_without_parsing(tmp_path: Path) -> None:
    path = tmp_path / "events"
    line = json.dumps({**step(1), "rank": 0, "attempt": 1, "at": 1.0}) + "\n"
    path.write_text(line * 200_000)
    write(path, step(7))
    rank = RankEvents(path)
    began = time.perf_counter()
    assert rank.poll().iteration == 7
    first = time.perf_counter() - began
    again = []
    for _ in range(5):
        began = time.perf_counter()
        rank.poll()
        again.append(time.perf_counter() - began)
    # Not a speed test: a second look costs next to nothing compared with the first, since nothing is new.
    assert min(again) < first / 10


def test_what_saving_costs_is_counted_within_one_attempt(tmp_path: Path) -> None:
    """What is written in the background holds the training up for a part of its time only."""
    path = tmp_path / "events"
    save: dict[str, object] = {"event": "checkpoint", "phase": "committed", "iteration": 4, "seconds": 8.0}
    write(path, {"event": "start", "t": 100.0}, {**save, "t": 120.0})
    write(path, {**save, "background": True, "blocking_seconds": 0.5, "t": 150.0}, step(9) | {"t": 160.0})
    rank = RankEvents(path)
    assert (rank.poll().saving_s, rank.report.training_s) == (8.5, 60.0)
    write(path, {"event": "phase", "phase": "loading", "attempt": 2, "t": 5.0})
    assert (rank.poll().saving_s, rank.report.training_s) == (0.0, None)


def test_what_a_server_has_answered_is_that_of_its_newest_report(tmp_path: Path) -> None:
    path = tmp_path / "rank0.events.jsonl"
    rank = RankEvents(path)
    figures: dict[str, object] = {"event": "served", "tokens": 16, "tokens_per_second": 2.5}
    write(path, {**figures, "requests": 1}, {**figures, "requests": 2})
    write(path, {"event": "served", "requests": "many", "tokens": 9, "tokens_per_second": 1.0})
    assert rank.poll().served == ServedRequests(2, 16, 2.5)
    write(path, {"event": "start", "attempt": 2})
    assert rank.poll().served is None
