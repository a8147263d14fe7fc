"""Hears the witnesses of an attempt's end: exit records, last words, the launcher and its ssh, the nodes themselves."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.launch.hostfile import ports_of
from engine.launch.ssh_shim import words_of
from engine.runs.plan_file import Plan
from engine.security.redact import redact, redact_document
from engine.supervision.attempt import Attempt
from engine.supervision.conditions import Conditions
from engine.supervision.judging.cause import lacks_port
from engine.supervision.judging.evidence import Evidence, RankEvidence, Trigger
from engine.supervision.links.base import NodeLink
from engine.supervision.links.links import Links
from engine.supervision.outset import Outset
from engine.supervision.ranks import Rank
from engine.supervision.watchdog import Hang
from engine.worker.last_words import tail
from engine.worker.memory_kills import memory_kills

_ANSWER_LIMIT_S = 2.0
EXIT_PEER_LOST = 5
"""Of our trainer."""
_LOOK_EVERY_S = 0.02


class Witnesses:
    """What can be asked about one attempt. The nodes' own files are read: the head's disk may be full."""

    def __init__(
        self,
        plan: Plan,
        attempt: Attempt,
        links: Links,
        conditions: Conditions,
        outset: Outset,
        *,
        launching: Path,
    ) -> None:
        """`launching` is the attempt's directory on the head."""
        self._plan = plan
        self._attempt = attempt
        self._links = links
        self._conditions = conditions
        self._outset = outset
        self._launching = launching
        self._trainer = plan.config.job.command is None
        # What a rank has printed of its secrets must not be quoted.
        self._environment = {**os.environ, **plan.config.job.env}

    def completed(self, rank: Rank) -> bool:
        """Whether its trainer has said that the training is complete."""
        end = self._links.to(rank.number).words(rank.number).end
        return end is not None and end.get("completed") is True

    def of(self, rank: Rank) -> RankEvidence:
        """What is known of one rank."""
        link = self._links.to(rank.number)
        words, state = link.words(rank.number), link.state
        return RankEvidence(
            rank=rank.number,
            node=rank.planned.node,
            python=self._plan.config.nodes[rank.number].python,
            started=rank.started,
            record=rank.record,
            vanished=rank.vanished,
            restarted=rank.restarted,
            unreachable_s=None if state.answering or (rank.ended and not rank.lost) else state.silent_s,
            unreachable_why=state.problem,
            cut_off_s=self._conditions.silence_s(link),
            lease_s=self._plan.config.recovery.lease_s,
            clock_ahead_s=link.facts.clock_ahead_s if link.facts is not None else 0.0,
            remote=not link.local,
            launcher_code=rank.launcher_code,
            launcher_words=self._quotable(self._words_of_the_start(rank.number)),
            tail=self._quotable(words.log),
            keeper_tail=self._quotable(words.keeper),
            failure=self._quotable_event(words.failure),
            end=self._quotable_event(words.end),
            left_for_peers=self._trainer and rank.record is not None and rank.record.code == EXIT_PEER_LOST,
            memory_killed=self._memory_killed(rank),
        )

    def heard(
        self, ranks: Sequence[Rank], trigger: Trigger, hang: Hang | None = None, *, over: bool = True
    ) -> Evidence:
        """Everything, once all is `over`; before that, who holds a port is not asked."""
        launcher = self._outset.launcher
        return Evidence(
            ranks=[self._with_port(self.of(rank)) if over else self.of(rank) for rank in ranks],
            trigger=trigger,
            trainer=self._trainer,
            launcher_tail=self._quotable(launcher.tail()) if launcher is not None else "",
            adopted=self._outset.adopted,
            rebooted=self._outset.rebooted,
            hang=hang,
        )

    def _quotable(self, text: str) -> str:
        return redact(text, self._environment)

    def _quotable_event(self, event: dict[str, Any] | None) -> dict[str, Any] | None:
        return dict(redact_document(event, self._environment)) if event is not None else None

    def _words_of_the_start(self, rank: int) -> str:
        """What ssh has said, or whoever else was to start it."""
        _, words = self._outset.refusals.get(rank, (0, ""))
        return words or tail(words_of(self._launching, rank))

    def _memory_killed(self, rank: Rank) -> bool:
        """Whether its node has killed processes for want of memory since the attempt began."""
        link = self._links.to(rank.number)
        if link.local:
            return (memory_kills() or 0) > (self._attempt.memory_kills or 0)
        before = self._conditions.memory_kills(rank.planned.node)
        now = link.facts.memory_kills if link.facts is not None else None
        return before is not None and now is not None and now > before

    def _with_port(self, rank: RankEvidence) -> RankEvidence:
        """Asked when our own ranks are gone, so that whoever holds the port is somebody else."""
        if not lacks_port(rank):
            return rank
        ports = ports_of(rank.rank, self._attempt.wiring, self._attempt.starting_port)
        held = self._holders(self._links.to(rank.rank), ports)
        if held is None:
            return rank
        if not held:
            return replace(rank, port=f"port {ports[0]} was in use; nobody holds it any more")
        port, who = next(iter(held.items()))
        return replace(rank, port=f"port {port} is in use by {who}")

    def _holders(self, link: NodeLink, ports: Sequence[int]) -> dict[int, str] | None:
        """Who holds the ports; None when the host does not tell in time."""
        link.ask_holders(ports)
        deadline = time.monotonic() + _ANSWER_LIMIT_S
        while (held := link.holders()) is None and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)
        return held
