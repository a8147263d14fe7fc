"""The attempts of a run as its journal tells them, one after the other, for those who look."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

from engine.events import AttemptStatus
from engine.models import Reason


class AttemptLog:
    """Takes the journal's entries in order; what is none of an attempt's is left out."""

    def __init__(self) -> None:
        self._told: dict[int, AttemptStatus] = {}
        self._why: dict[int, str] = {}
        self.pending: str | None = None
        """What is going on between two attempts."""
        self.given_up: str | None = None
        """Why no other attempt follows the last."""

    @property
    def attempts(self) -> tuple[AttemptStatus, ...]:
        return tuple(self._told[number] for number in sorted(self._told))

    @property
    def members(self) -> tuple[str, ...]:
        """The nodes of the last attempt in the order of its ranks; () when it has all of the plan's."""
        last = max(self._told, default=None)
        return tuple(node for _, node in self._told[last].members) if last is not None else ()

    def take(self, entry: dict[str, Any]) -> None:
        match entry["event"]:
            case "attempt":
                self._begin(entry)
            case "attempt_ended" if entry["attempt"] in self._told:
                self._end(entry)
            case "recovery":
                self._why[int(entry["attempt"])] = self.pending = str(entry["why"])
                if (delay_s := float(entry.get("delay_s") or 0.0)) >= 1.0:
                    self.pending += f", after a wait of {delay_s:.0f} s"
            case "recovery_waits":
                self.pending = str(entry["why"])
            case "recovered" if entry["attempt"] in self._told:
                self._recover(entry)
            case "given_up":
                self.given_up, self.pending = str(entry["why"]), None
            case "reopened":
                self.given_up = None
                self._why[max(self._told, default=0) + 1] = "taken up as asked"

    def _begin(self, entry: dict[str, Any]) -> None:
        number = int(entry["attempt"])
        members = tuple((int(rank), str(node)) for rank, node in entry.get("members") or ())
        began_at = datetime.fromisoformat(entry["at"])
        self._told[number] = AttemptStatus(number, members, began_at, why=self._why.get(number))
        self.given_up = self.pending = None

    def _end(self, entry: dict[str, Any]) -> None:
        number = int(entry["attempt"])
        if self._told[number].reason is not None:
            return
        self._told[number] = replace(
            self._told[number],
            ended_at=datetime.fromisoformat(entry["at"]),
            reason=Reason(entry["reason"]),
            rank=entry.get("rank"),
            host=entry.get("host"),
            cause=entry.get("cause"),
            reached=entry.get("reached"),
        )

    def _recover(self, entry: dict[str, Any]) -> None:
        number = int(entry["attempt"])
        self._told[number] = replace(
            self._told[number],
            resumed_at=entry.get("iteration"),
            source=entry.get("source"),
            repeated=entry.get("repeated"),
            recovery_s=entry.get("seconds"),
        )
