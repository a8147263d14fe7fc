"""On a Mac the trainer asks for the class that keeps it on the performance cores, and the machine stays awake;
recorded, since this is no Mac."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import pytest

from engine.worker import priority


class Recorded:
    def __init__(self, code: int = 0) -> None:
        self.calls: list[tuple[int, int]] = []
        self._code = code

    def pthread_set_qos_class_self_np(self, qos_class: int, relative: int) -> int:
        self.calls.append((qos_class, relative))
        return self._code


@pytest.mark.parametrize(
    ("platform", "code", "calls", "said"),
    [
        ("darwin", 0, [(0x21, 0)], "QOS_CLASS_USER_INTERACTIVE"),
        ("darwin", 22, [(0x21, 0)], "QOS_CLASS_USER_INTERACTIVE was refused with 22"),
        ("linux", 0, [], "not on macOS"),
    ],
)
def test_the_trainer_is_user_interactive_on_a_mac_alone(
    platform: str, code: int, calls: list[tuple[int, int]], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Recorded(code)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    assert priority.raise_priority() == said
    assert library.calls == calls


@pytest.mark.parametrize(
    ("platform", "argv", "said"),
    [
        ("darwin", ["/usr/bin/caffeinate", "-ims", "-w", "77"], "caffeinate -ims"),
        ("linux", None, "not on macOS"),
    ],
)
def test_a_mac_stays_awake_while_the_rank_lives(
    platform: str, argv: list[str] | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def start(argv: list[str], **_: Any) -> None:
        started.append(argv)

    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(subprocess, "Popen", start)
    assert priority.stay_awake(77) == said
    assert started == ([argv] if argv else [])


def test_a_mac_without_caffeinate_is_told_of_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(argv: list[str], **_: Any) -> None:
        raise FileNotFoundError(2, "No such file or directory", argv[0])

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(subprocess, "Popen", start)
    assert "caffeinate" in priority.stay_awake(77)
