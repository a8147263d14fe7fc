"""notifications.jsonl: what people were told of a run. A notification is on the disk before it is sent, and what became
of it after that, so that no supervisor and no notifier that follows a killed one tells it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.run.json_lines import LineTail
from engine.security.sanitise import moment_or_none, plain
from engine.snapshots import Notification

NOTIFIER = "notifier"


class NotificationTail:
    """Follows the file as it grows."""

    def __init__(self, path: Path) -> None:
        self._tail = LineTail(path)
        self.by_key: dict[str, Notification] = {}
        self.unanswered: set[str] = set()
        """Keys of those that are being sent, or were when the notifier was killed."""
        self.keys: set[str] = set()
        """Also those of what was held back: `held` has the events that the next notification sums up."""
        self.held: list[str] = []

    def poll(self) -> None:
        for entry in self._tail.objects():
            self.take(entry)

    def take(self, entry: Mapping[str, Any]) -> None:
        """One line of the file."""
        key, at, event = plain(entry.get("key")), moment_or_none(entry.get("at")), plain(entry.get("event"), 20)
        if isinstance(entry.get("problems"), list) and key in self.by_key:
            problems = tuple(plain(text) for text in entry["problems"][:20])
            self.by_key[key] = replace(self.by_key[key], problems=problems)
            self.unanswered.discard(key)
        elif "held" in entry:
            self.keys.add(key)
            self.held.append(event)
        elif at is not None:
            title, text = (plain(entry.get(name)) for name in ("title", "text"))
            self.by_key[key] = Notification(event, title, text, at, plain(entry.get("run"), 100))
            self.keys.add(key)
            self.unanswered.add(key)
            self.held.clear()
