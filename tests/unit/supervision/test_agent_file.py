"""A window of a file at the other end of a connection, filled in whatever pieces come."""

from __future__ import annotations

from engine.supervision.links.agent_file import WINDOW_BYTES, AgentFile


def test_what_comes_twice_is_taken_once_and_what_is_behind_it_is_not_lost() -> None:
    orders: list[tuple[int | None, int]] = []
    file = AgentFile("rank0.log", lambda _name, begin, until: orders.append((begin, until)))
    assert file.read_from(0, 100) == b""
    assert orders == [(0, WINDOW_BYTES)]
    file.take(0, b"one two", end=True)
    # The order was given twice, at a reconnect: the agent began again, and the file had grown by then.
    file.take(0, b"one two three", end=True)
    assert file.read_from(0, 100) == b"one two three"
    file.take(20, b"not next", end=True)
    file.take(2, b"e two", end=True)
    assert file.read_from(0, 100) == b"one two three"
