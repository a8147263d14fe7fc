"""Hears the witnesses of an attempt's end: exit records, event files, log tails, the launcher, the machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.launch.hostfile import ports_of
from engine.launch.ports import holder
from engine.runs.json_lines import parse
from engine.runs.plan_file import Plan
from engine.security.redact import redact, redact_document
from engine.supervision.attempt import Attempt
from engine.supervision.culprit import Evidence, RankEvidence, Trigger, lacks_port
from engine.supervision.launcher_watch import LauncherWatch, tail
from engine.supervision.memory_kills import memory_kills
from engine.supervision.ranks import Rank
from engine.worker.wire import NodeFiles

_EVENT_TAIL_BYTES = 262_144
_WHERE_THE_NAME_IS = 64


class Witnesses:
    """What can be asked about one attempt. The node's own files are read: the head's disk may be full."""

    def __init__(
        self,
        plan: Plan,
        attempt: Attempt,
        files: NodeFiles,
        launcher: LauncherWatch | None,
        *,
        adopted: bool = False,
        rebooted: bool = False,
    ) -> None:
        self._plan = plan
        self._attempt = attempt
        self._files = files
        self._launcher = launcher
        self._adopted = adopted
        self._rebooted = rebooted
        # What a rank has printed of its secrets must not be quoted.
        self._environment = {**os.environ, **plan.config.job.env}

    def completed(self, rank: Rank) -> bool:
        """Whether its trainer has said that the training is complete."""
        end = self._last_event(rank.number, "end")
        return end is not None and end.get("completed") is True

    def of(self, rank: Rank) -> RankEvidence:
        """What is known of one rank."""
        return RankEvidence(
            rank=rank.number,
            node=rank.planned.node,
            python=self._plan.config.nodes[rank.number].python,
            started=rank.started,
            record=rank.record,
            vanished=rank.vanished,
            launcher_code=rank.launcher_code,
            tail=self._quotable(tail(self._files.log(rank.number))),
            keeper_tail=self._quotable(tail(self._files.keeper_log(rank.number))),
            failure=self._last_event(rank.number, "failure"),
            end=self._last_event(rank.number, "end"),
        )

    def heard(self, ranks: Sequence[Rank], trigger: Trigger) -> Evidence:
        """Everything, once all is over."""
        return Evidence(
            ranks=[self._with_port(self.of(rank)) for rank in ranks],
            trigger=trigger,
            trainer=self._plan.config.job.command is None,
            launcher_tail=self._quotable(self._launcher.tail()) if self._launcher is not None else "",
            memory_killed=(memory_kills() or 0) > (self._attempt.memory_kills or 0),
            adopted=self._adopted,
            rebooted=self._rebooted,
        )

    def _quotable(self, text: str) -> str:
        return redact(text, self._environment)

    def _with_port(self, rank: RankEvidence) -> RankEvidence:
        """Asked when our own ranks are gone, so that whoever holds the port is somebody else."""
        if not lacks_port(rank):
            return rank
        ports = ports_of(rank.rank, self._attempt.wiring, self._attempt.starting_port)
        for port in ports:
            if (who := holder(port)) is not None:
                return replace(rank, port=f"port {port} is in use by {who}")
        return replace(rank, port=f"port {ports[0]} was in use; nobody holds it any more")

    def _last_event(self, rank: int, name: str) -> dict[str, Any] | None:
        wanted = f'"event": "{name}"'
        # Not splitlines: in JSON only the newline ends a line, and a message may hold a U+2028.
        for line in reversed(tail(self._files.events(rank), size=_EVENT_TAIL_BYTES).split("\n")):
            if wanted in line[:_WHERE_THE_NAME_IS] and (event := parse(line.encode())) is not None:
                return dict(redact_document(event, self._environment))
        return None
