"""Puts into words what a verdict names: the cause as the logs prove it, and what mends it, for the run's record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from engine.models import RunState
from engine.runs.diagnosis import first_cause
from engine.runs.layout import RunDir
from engine.supervision.judging.evidence import Evidence
from engine.supervision.judging.quoting import lines, said_in_failure
from engine.supervision.judging.verdict import Verdict


def explained(
    verdict: Verdict,
    evidence: Evidence,
    run_dir: RunDir,
    log_bases: Mapping[int, int],
    environment: Mapping[str, str],
) -> Verdict:
    """A failure's verdict with its first cause in words and its fix, where they are known, without the secrets of
    `environment`. The mirrors are read from `log_bases` on, and the evidence where they lack something."""
    if verdict.state is not RunState.FAILED:
        return verdict
    words = _last_words(verdict, evidence)
    found = first_cause(
        run_dir, verdict, log_bases, last_words=words, own_end=_own_end(verdict, evidence), environment=environment
    )
    return verdict if found is None else replace(verdict, cause=found.cause, fix=found.fix, signature=found.signature)


def _last_words(verdict: Verdict, evidence: Evidence) -> list[str]:
    blamed = [rank for rank in evidence.ranks if rank.rank == verdict.rank]
    texts = [word for rank in blamed for word in (rank.keeper_tail, rank.launcher_words, rank.tail)]
    texts += [str(rank.failure.get("message", "")) for rank in blamed if rank.failure is not None]
    texts += [evidence.launcher_tail] if not blamed else []
    return [line for text in texts for line in lines(text)]


def _own_end(verdict: Verdict, evidence: Evidence) -> list[str]:
    """The exception by which the trainer of the rank that the verdict names has said that it ends; that another rank
    has gone is no cause."""
    return [
        line
        for rank in evidence.ranks
        if rank.rank == verdict.rank and rank.failure is not None and rank.failure.get("error_type") != "PeerLost"
        for text in (str(rank.failure.get("traceback") or ""), said_in_failure(rank))
        for line in lines(text)
    ]
