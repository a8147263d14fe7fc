"""Run records for these tests."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from engine.models import RunRecord, RunState


def record(number: int, **fields: Any) -> RunRecord:
    """Run `number`, created that many minutes after the first."""
    created = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=number)
    plain = {"name": "demo", "state": RunState.SUCCEEDED, "created_at": created, "world_size": 2, "backend": "ring"}
    return RunRecord.model_validate({"id": f"run-{number:05d}", **plain, **fields})
