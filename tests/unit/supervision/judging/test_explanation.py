"""What a verdict is told with: the end of which the rank itself has told, not what it had survived."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.models import Reason, RunState
from engine.runs.layout import LAUNCHER_SOURCE
from engine.supervision.judging.evidence import Evidence, RankEvidence, Trigger
from engine.supervision.judging.explanation import explained
from engine.supervision.judging.verdict import Verdict
from tests.unit.runs.logs import RunLogs

HANDLED = "the checkpoint was not written: No space left on device\nstep 7\n"
TRACEBACK = "Traceback (most recent call last):\n  File x\n"
VERDICT = Verdict(RunState.FAILED, Reason.RANK_FAILED, "exited with code 1", 0, "left", 1)


def cause(tmp_path: Path, failure: dict[str, Any] | None, log: str = HANDLED) -> str | None:
    logs = RunLogs(tmp_path, (0, LAUNCHER_SOURCE))
    logs.write(0, log)
    rank = RankEvidence(rank=0, node="left", python="python", started=True, tail=log, failure=failure)
    heard = Evidence(ranks=[rank], trigger=Trigger.ENDED, trainer=True)
    return explained(VERDICT, heard, logs.run_dir, {}, {}).cause


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (
            {"error_type": "Refused", "message": "torn", "traceback": f"{TRACEBACK}checkpoint.errors.Refused: torn\n"},
            "checkpoint.errors.Refused: torn",
        ),
        ({"error_type": "JobError", "message": "no such optimizer"}, "JobError: no such optimizer"),
        ({"error_type": "PeerLost", "message": "[ring] connection to a peer was lost"}, "the disk was full"),
        (None, "the disk was full"),
    ],
    ids=["its own failure, with where", "its own failure", "a consequence", "nothing told"],
)
def test_the_failure_that_a_rank_has_told_goes_before_what_its_log_says(
    tmp_path: Path, failure: dict[str, Any] | None, told: str
) -> None:
    assert cause(tmp_path, failure) == told
