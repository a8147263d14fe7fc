"""On a Mac the trainer asks for the class that keeps it on the performance cores; recorded, since this is no Mac."""

from __future__ import annotations

import ctypes
import sys

import pytest

from engine.worker import trainer


class Recorded:
    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def pthread_set_qos_class_self_np(self, qos_class: int, relative: int) -> int:
        self.calls.append((qos_class, relative))
        return 0


@pytest.mark.parametrize(("platform", "calls"), [("darwin", [(0x21, 0)]), ("linux", [])])
def test_the_trainer_is_user_interactive_on_a_mac_alone(
    platform: str, calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Recorded()
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    trainer._raise_priority()
    assert library.calls == calls
