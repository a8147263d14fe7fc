"""One write in flight, its end told once, its fault too."""

from __future__ import annotations

import threading

from engine.worker.checkpoint.background import Background


def test_one_in_flight_and_its_end_once() -> None:
    gate = threading.Event()
    writer: Background[str] = Background()

    def work() -> str:
        gate.wait(10)
        return "done"

    assert writer.ended(wait=True) is None and not writer.busy
    writer.begin(work)
    assert writer.busy and writer.ended() is None
    gate.set()
    ended = writer.ended(wait=True)
    assert ended is not None and (ended.result, ended.error) == ("done", None)
    assert writer.ended() is None and not writer.busy


def test_a_fault_is_told_and_the_next_may_begin() -> None:
    writer: Background[str] = Background()

    def fails() -> str:
        raise OSError(28, "No space left on device")

    writer.begin(fails)
    ended = writer.ended(wait=True)
    assert ended is not None and ended.result is None and isinstance(ended.error, OSError)
    writer.begin(lambda: "again")
    again = writer.ended(wait=True)
    assert again is not None and again.result == "again"
