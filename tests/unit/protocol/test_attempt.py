"""What is written survives a power cut where the volume can promise it, and is written all the same where it cannot."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from engine.protocol import attempt
from tests.damage import IRREGULAR, make_irregular


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


@pytest.mark.parametrize("kind", IRREGULAR)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_APPEND | os.O_CREAT, os.O_RDWR])
def test_what_is_no_regular_file_is_neither_waited_for_nor_opened(tmp_path: Path, kind: str, flags: int) -> None:
    make_irregular(tmp_path / "file", kind)
    before = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(OSError, match=r"it is (a directory|not a regular file)") as refused:
        attempt.regular_descriptor(tmp_path / "file", flags)
    assert refused.value.filename == str(tmp_path / "file")
    assert len([*Path("/proc/self/fd").iterdir()]) == before


@pytest.mark.parametrize("kind", [*IRREGULAR, "bytes"])
def test_an_irregular_identity_or_exit_record_is_none_or_an_error_at_once(tmp_path: Path, kind: str) -> None:
    make_irregular(tmp_path / "file", kind)
    for read in (attempt.read_identity, attempt.read_exit):
        if kind == "bytes":
            assert read(tmp_path / "file") is None
            continue
        with pytest.raises(OSError, match=r"it is (a directory|not a regular file)"):
            read(tmp_path / "file")
