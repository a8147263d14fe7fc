"""What a rank has said, as far as a verdict reads or quotes it."""

from __future__ import annotations

from engine.runs.diagnosis import Finding, findings
from engine.security.sanitise import sanitise
from engine.supervision.judging.evidence import RankEvidence

_CAUSE_LIMIT = 300
_FINAL_LINES = 15


def final(text: str) -> str:
    """The lines that may tell of the end: what was logged long before is no part of it."""
    return "\n".join(text.splitlines()[-_FINAL_LINES:])


def lines(text: str) -> list[str]:
    """All of them, fit to be read and shown."""
    return [sanitise(line.encode(errors="replace")) for line in text.splitlines()]


def known(text: str) -> list[Finding]:
    """The known failure texts in it."""
    return findings(lines(text))


def said_in_failure(rank: RankEvidence) -> str:
    """The exception that its trainer has told of; "" without one."""
    return f"{rank.failure.get('error_type')}: {rank.failure.get('message')}" if rank.failure is not None else ""


def last_line(text: str) -> str:
    """The last that is not blank, fit to be shown; "" without one."""
    said = [line for line in text.splitlines() if line.strip()]
    return sanitise(said[-1].strip().encode(errors="replace"), _CAUSE_LIMIT) if said else ""


def cut(text: str) -> str:
    """`text` as one line, no longer than a cause may be."""
    line = " ".join(text.split())
    return line if len(line) <= _CAUSE_LIMIT else line[: _CAUSE_LIMIT - 1] + "…"
