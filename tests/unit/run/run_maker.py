"""Makes run directories by the engine's own writers, as a supervisor would leave them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from engine.cluster.staging import HostLayout
from engine.config.models import ClusterConfig, Config, JobConfig, NodeConfig
from engine.measurements import Division
from engine.models import Reason, RunState
from engine.node.processes import boot_id, start_time
from engine.plan.decisions import LaunchDecisions
from engine.plan.document import ChosenSettings
from engine.protocol.job import Strategy
from engine.run.attempt import new_attempt
from engine.run.events import Attempt, AttemptPlanned, Event, Figures, LaunchDecided, RunPlanned, StateChanged, Verdict
from engine.run.history import RunHistory
from engine.run.journal import Journal
from engine.run.run_plan import RunPlan, write_plan
from engine.store.layout import RunDir
from tests.unit.launch.host_layouts import configured_network, local_layout

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


class Clock:
    """Every event one second after the one before."""

    def __init__(self, now: datetime = START) -> None:
        self.now = now

    def __call__(self) -> datetime:
        self.now += timedelta(seconds=1)
        return self.now


def make_run_config(ranks: int = 2, iters: int = 60, name: str = "job", strategy: Strategy = "data") -> Config:
    nodes = tuple(NodeConfig(name=f"node{rank}", python=sys.executable, workdir="/") for rank in range(ranks))
    keys = {"iters": iters, "batch_size": 4}
    job = JobConfig(name=name, model="/model", data="/data", strategy=strategy, mlx_lm=keys)
    return Config(cluster=ClusterConfig(), nodes=nodes, job=job)


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
        strategy: Strategy = "data",
        command: tuple[str, ...] | None = None,
        config: Config | None = None,
    ) -> None:
        self.home = home
        self.directory = RunDir(home / "runs" / f"{created:%Y%m%d-%H%M%S}-{name}-{number:04x}")
        self.directory.path.mkdir(parents=True)
        config = config or make_run_config(ranks, iters, name, strategy)
        own = {"command": command, "mlx_lm": {}} if command is not None else {}
        config = config.model_copy(update={"job": config.job.model_copy(update=own)})
        self.plan = RunPlan(nonce="n", config=config, run_id=self.directory.id, created_at=created)
        write_plan(self.directory.plan, self.plan)
        self.journal = Journal(self.directory.journal, Clock(created))
        self.journal.append(RunPlanned(run=self.plan.record(), nonce="n"))

    @property
    def id(self) -> str:
        return self.directory.id

    def state(self, *states: str, **fields: Any) -> MadeRun:
        """The states one after the other; `fields`, of the verdict and the figures, go with the last one."""
        for state in states[:-1]:
            self.journal.append(StateChanged(state=RunState(state)))
        self.journal.append(end(states[-1], **fields))
        return self

    def append(self, *events: Event) -> MadeRun:
        for event in events:
            self.journal.append(event)
        return self

    def supervised_by(self, pid: int = os.getpid()) -> MadeRun:
        """As if process `pid` were its supervisor."""
        who = {"pid": pid, "start": start_time(pid) or "never", "boot_id": boot_id()}
        self.directory.supervisor.write_text(json.dumps(who))
        return self

    def attempt(self, number: int = 1, *, decided: bool = True) -> MadeRun:
        layouts = [local_layout(self.home / "node", len(self.plan.nodes))]
        if decided:
            self.journal.append(LaunchDecided(decisions=made_decisions(self.plan)))
        self.journal.append(AttemptPlanned(attempt=planned_attempt(self.directory, self.plan, layouts, number)))
        return self

    def metrics(self, rows: Iterable[dict[str, Any]]) -> MadeRun:
        with self.directory.metrics.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        return self

    def events(self, rank: int, *events: dict[str, Any]) -> MadeRun:
        with self.directory.events(rank).open("a") as file:
            for event in events:
                line = {"event": event.get("event"), "rank": rank, "attempt": 1, "at": 1.7e9, **event}
                file.write(json.dumps(line) + "\n")
        return self

    def close(self) -> MadeRun:
        self.journal.close()
        return self


def history_before(plan: RunPlan, number: int, nonce: str = "n") -> RunHistory:
    """The history of a run whose next attempt is `number`."""
    record = plan.record().model_copy(update={"attempts": number - 1})
    return RunHistory(record, nonce, plan.created_at)


def planned_attempt(
    directory: RunDir, plan: RunPlan, layouts: Sequence[HostLayout], number: int = 1, nonce: str = "n"
) -> Attempt:
    history = history_before(plan, number, nonce)
    return new_attempt(directory, plan, history, layouts=layouts, starting_port=20_000)


def made_decisions(plan: RunPlan, **decided: Any) -> LaunchDecisions:
    """Those of a launch of `plan` in which every node validates, but for what is `decided`."""
    parts = dict.fromkeys(plan.nodes, 1 / len(plan.nodes))
    chosen: dict[str, Any] = {
        "nodes": plan.nodes,
        "division": Division(parts=parts, source="equal", reason="not measured"),
        "settings": ChosenSettings(),
        "validators": plan.nodes,
        "network": configured_network(plan.config.nodes),
    }
    return LaunchDecisions(**(chosen | decided))


def end(state: str, unconfirmed: tuple[str, ...] = (), **fields: Any) -> StateChanged:
    """`fields`: of the verdict and the figures."""
    figures = {name: fields.pop(name) for name in ("iteration", "train_loss", "val_loss") if name in fields}
    reason = Reason(fields.pop("reason")) if "reason" in fields else None
    verdict = Verdict(RunState(state), reason, **fields) if reason is not None else None
    return StateChanged(state=RunState(state), verdict=verdict, figures=Figures(**figures), unconfirmed=unconfirmed)


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
