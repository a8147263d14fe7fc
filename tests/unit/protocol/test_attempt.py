"""What is written survives a power cut where the volume can promise it, and is written all the same where it cannot."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from engine.protocol import attempt


def answering(monkeypatch: pytest.MonkeyPatch, number: int | None) -> list[int]:
    """As on macOS, with a volume that answers F_FULLFSYNC so (None: it has it); the descriptors that fsync got."""

    def fcntl(descriptor: int, command: int) -> int:
        assert command == 51
        if number is not None:
            raise OSError(number, os.strerror(number))
        return 0

    synced: list[int] = []
    monkeypatch.setattr(attempt, "_FULL_SYNC", 51)
    monkeypatch.setattr("fcntl.fcntl", fcntl)
    monkeypatch.setattr("os.fsync", synced.append)
    return synced


def test_a_volume_with_full_sync_needs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    synced = answering(monkeypatch, None)
    assert attempt.sync_file(7) and synced == []


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOTTY])
def test_a_volume_without_full_sync_is_synced_as_far_as_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    synced = answering(monkeypatch, number)
    assert not attempt.sync_file(7) and synced == [7]
    attempt.write_atomic(tmp_path / "exit.json", "{}")
    assert (tmp_path / "exit.json").read_text() == "{}" and len(synced) == 2


def test_a_disk_that_fails_is_no_volume_without_full_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    synced = answering(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        attempt.sync_file(7)
    assert synced == [], "fsync after a failed one may report success"
