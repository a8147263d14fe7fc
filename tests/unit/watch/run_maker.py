"""Makes run directories by the engine's own writers, as a supervisor would leave them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from engine.config.models import ClusterConfig, FlightConfig, JobConfig, NodeConfig
from engine.runs.journal import Journal
from engine.runs.layout import RunDir
from engine.runs.plan_file import Plan, write_plan
from engine.supervision.attempt import intend
from engine.worker.processes import boot_id, start_time
from tests.unit.launch.places import as_configured, local_place

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


class Clock:
    """Every entry one second after the one before."""

    def __init__(self, now: datetime = START) -> None:
        self.now = now

    def __call__(self) -> datetime:
        self.now += timedelta(seconds=1)
        return self.now


def flight_config(ranks: int = 2, iters: int = 60, name: str = "job") -> FlightConfig:
    nodes = tuple(NodeConfig(name=f"node{rank}", python=sys.executable, workdir="/") for rank in range(ranks))
    job = JobConfig(name=name, model="/model", data="/data", mlx_lm={"iters": iters, "batch_size": 4})
    return FlightConfig(cluster=ClusterConfig(), nodes=nodes, job=job)


class MadeRun:
    """A run's directory and the writers of its files."""

    def __init__(
        self,
        home: Path,
        *,
        ranks: int = 2,
        iters: int = 60,
        name: str = "job",
        number: int = 0,
        created: datetime = START,
    ) -> None:
        self.home = home
        self.directory = RunDir(home / "runs" / f"{created:%Y%m%d-%H%M%S}-{name}-{number:04x}")
        self.directory.path.mkdir(parents=True)
        config = flight_config(ranks, iters, name)
        self.plan = Plan.of(config, run_id=self.directory.id, created_at=created)
        write_plan(self.directory.plan, self.plan)
        self.journal = Journal(self.directory.journal, Clock(created))
        self.journal.append("planned", run=self.plan.record().model_dump(mode="json"), nonce="n")

    @property
    def id(self) -> str:
        return self.directory.id

    def state(self, *states: str, **fields: Any) -> MadeRun:
        """The states one after the other; `fields` go with the last one."""
        for state in states[:-1]:
            self.journal.append("state", state=state)
        self.journal.append("state", state=states[-1], **fields)
        return self

    def supervised_by(self, pid: int = os.getpid()) -> MadeRun:
        """As if process `pid` were its supervisor."""
        who = {"pid": pid, "start": start_time(pid) or "never", "boot_id": boot_id()}
        self.directory.supervisor.write_text(json.dumps(who))
        return self

    def attempt(self, number: int = 1) -> MadeRun:
        made = intend(
            self.directory,
            self.plan,
            number,
            "n",
            [local_place(self.home / "node", len(self.plan.ranks))],
            as_configured(self.plan.config.nodes),
            20_000,
        )
        self.journal.append("attempt", **made.entry())
        return self

    def metrics(self, rows: Iterable[dict[str, Any]]) -> MadeRun:
        with self.directory.metrics.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        return self

    def events(self, rank: int, *events: dict[str, Any]) -> MadeRun:
        with self.directory.events(rank).open("a") as file:
            file.writelines(json.dumps({"rank": rank, "attempt": 1, "at": 1.7e9, **event}) + "\n" for event in events)
        return self

    def close(self) -> MadeRun:
        self.journal.close()
        return self


def report(iteration: int, loss: float, **more: Any) -> dict[str, Any]:
    """A training row of metrics.jsonl."""
    return {
        "kind": "train",
        "attempt": 1,
        "at": 1.7e9,
        "iteration": iteration,
        "train_loss": loss,
        "learning_rate": 1e-3,
        "iterations_per_second": 4.0,
        "tokens_per_second": 800.0,
        "trained_tokens": iteration * 200,
        "peak_memory": 0.5,
        **more,
    }


def validation(iteration: int, loss: float) -> dict[str, Any]:
    return {"kind": "val", "attempt": 1, "at": 1.7e9, "iteration": iteration, "val_loss": loss, "val_time": 0.5}
