"""The audit log: whole lines, UTC, no forged ones, no secrets, bounded, and never in the way."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from engine.security import audit
from engine.security.audit import audit_log


def entries(home: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (home / "audit.jsonl").read_text().splitlines()]


def test_a_line_says_when_in_utc_what_and_how(home: Path) -> None:
    now = datetime(2026, 11, 21, 3, 4, 5, 678000, timezone(timedelta(hours=2)))
    assert audit_log("launch", "planned", {"run": "r1", "path": Path("/x")}, now=now)
    (entry,) = entries(home)
    assert entry["at"] == "2026-11-21T01:04:05.678+00:00"
    assert (entry["event_type"], entry["status"]) == ("launch", "planned")
    assert entry["context"] == {"run": "r1", "path": "PosixPath('/x')"}
    assert (home / "audit.jsonl").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "hostile", ['x"}\n{"event_type": "abort"}', "a\r\nb", "a\u2028b", "a\x85b", "\ud800", "\x1b[2J"]
)
def test_text_from_outside_cannot_forge_a_line(home: Path, hostile: str) -> None:
    audit_log(hostile, hostile, {hostile: hostile})
    assert len((home / "audit.jsonl").read_text().splitlines()) == 1
    (entry,) = entries(home)
    assert entry["event_type"] == hostile


def test_secrets_are_not_kept(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    audit_log("launch", "planned", {"env": {"HF_TOKEN": "hf_secret"}, "note": "with 0123456789abcdef"})
    text = (home / "audit.jsonl").read_text()
    assert "hf_secret" not in text
    assert "0123456789abcdef" not in text


def test_it_keeps_five_files_of_a_bounded_size(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "MAX_BYTES", 1000)
    for number in range(100):
        audit_log("launch", "planned", {"number": number})
    files = sorted(home.glob("audit.jsonl*"))
    assert [file.name for file in files] == ["audit.jsonl", *(f"audit.jsonl.{number}" for number in range(1, 5))]
    assert all(file.stat().st_size <= 1000 for file in files)
    numbers = [
        json.loads(line)["context"]["number"] for file in reversed(files) for line in file.read_text().splitlines()
    ]
    assert numbers == list(range(numbers[0], 100))


def test_an_endless_context_is_cut(home: Path) -> None:
    assert audit_log("launch", "planned", {"text": "x" * 1_000_000})
    assert (home / "audit.jsonl").stat().st_size < 10_000


def test_several_processes_write_whole_lines(home: Path) -> None:
    program = (
        "import sys\n"
        "from engine.security.audit import audit_log\n"
        "for number in range(50): audit_log('launch', 'planned', {'number': number, 'who': sys.argv[1]})"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, str(who)]) for who in range(3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert len(entries(home)) == 150


def test_it_says_that_it_could_not_write_and_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not audit_log("abort", "asked", {}, home=tmp_path / "file" / "home", now=datetime.now(UTC))
