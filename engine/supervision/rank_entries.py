"""What the journal holds of an attempt's ranks: who has started and who has ended, each once over all supervisors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from engine.supervision.logbook import Logbook
from engine.supervision.ranks import Rank
from engine.worker.wire import Identity


def of_attempt(logbook: Logbook, number: int) -> list[dict[str, Any]]:
    """What an earlier supervisor has entered of attempt `number` and after it; none when it never began that."""
    entries = logbook.entries
    places = [at for at, entry in enumerate(entries) if entry["event"] == "attempt"]
    begun = places[-1] if places and entries[places[-1]].get("attempt") == number else len(entries)
    return entries[begun:]


def known_identities(logbook: Logbook, number: int) -> dict[int, Identity]:
    """The identities of the attempt's ranks, as an earlier supervisor has entered them."""
    started = (entry for entry in of_attempt(logbook, number) if entry["event"] == "rank_started")
    return {entry["rank"]: Identity(**entry["identity"]) for entry in started if "identity" in entry}


class RankEntries:
    """Enters the ranks of one attempt as they change."""

    def __init__(self, logbook: Logbook, number: int) -> None:
        self._logbook = logbook
        before = (each for each in of_attempt(logbook, number) if each["event"] in ("rank_started", "rank_ended"))
        self._entered = {(entry["event"], entry["rank"]) for entry in before}

    def enter(self, changed: Sequence[Rank]) -> None:
        for rank in changed:
            if rank.identity is not None and not self._known("rank_started", rank):
                self._enter_start(rank, rank.identity)
            if rank.ended and not self._known("rank_ended", rank):
                self._enter_end(rank)

    def _enter_start(self, rank: Rank, identity: Identity) -> None:
        self._logbook.append(
            "rank_started",
            rank=rank.number,
            host=rank.planned.node,
            pid=identity.trainer_pid,
            start=identity.trainer_start,
            pgid=identity.trainer_pgid,
            started_at=identity.started_at,
            identity=asdict(identity),
        )

    def _enter_end(self, rank: Rank) -> None:
        record = rank.record
        self._logbook.append(
            "rank_ended",
            rank=rank.number,
            host=rank.planned.node,
            code=record.code if record is not None else rank.launcher_code,
            signal=record.signal if record is not None else None,
            stopped_by=record.stopped_by if record is not None else None,
            error=record.error if record is not None else "its node is lost" if rank.lost else "no exit record",
        )
        if record is not None and record.dropped_bytes:
            lost = f"rank {rank.number}: {record.dropped_bytes} bytes of output were lost to a full disk"
            self._logbook.append("note", message=f"{lost} on {rank.planned.node}")

    def _known(self, event: str, rank: Rank) -> bool:
        """Whether the attempt's journal has it already, by us or by an earlier supervisor."""
        key = (event, rank.number)
        if key in self._entered:
            return True
        self._entered.add(key)
        return False
