"""plan.json: the plan of a run, written before anything of it starts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import Field, ValidationError

from engine.config.models import Config, select_nodes
from engine.errors import StateError
from engine.measurements import Calibration, Division
from engine.models import FrozenModel, RunRecord, RunState
from engine.plan.decisions import LaunchDecisions, decided
from engine.protocol.attempt import read_regular, write_atomic
from engine.security.redact import Redactor
from engine.security.sanitise import json_object, json_or_none
from engine.store.layout import RunDir


class RunPlan(FrozenModel):
    """plan.json: a run of `config` as launched, with one rank per node, in its order. Nodes that preflight has excluded
    since are in the journal."""

    run_id: str
    nonce: str
    """In the environment of every process of the run, followed by the number of its attempt."""
    created_at: datetime
    config: Config
    skip: tuple[str, ...] = ()
    """Checks to leave out, from the configuration and from --skip."""
    division: Division | None = None
    """None where no calibration was looked up."""
    repeats: str | None = None
    """The run that it does again."""
    budget_s: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """How long after the start of its first attempt it is stopped as if that were requested; None: never."""
    unattended: bool = False
    """The queue's: the loss of its supervisor, as by a restart of the head, is recovered from as a node's is."""
    calibration: Calibration | None = None
    """The calibration behind `division`: of all nodes of the configuration, also of those that are left out."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes' names in the order of their ranks."""
        return tuple(node.name for node in self.config.nodes)

    def without(self, nodes: Collection[str]) -> RunPlan:
        """The plan of the same run without these nodes, its ranks renumbered; the plan itself when it has none of them.
        Raises InputError when none is left."""
        kept = [name for name in self.nodes if name not in nodes]
        if len(kept) == len(self.nodes):
            return self
        config = select_nodes(self.config, kept)
        division = self.division.without(nodes) if self.division is not None else None
        return self.model_copy(update={"config": config, "division": division})

    def among(self, nodes: Collection[str]) -> RunPlan:
        """The plan of the same run with these nodes alone, for an attempt that goes on without the others; the plan
        itself when none is named. Raises InputError when none is left."""
        return self.without([name for name in self.nodes if name not in nodes]) if nodes else self

    def decided(self, decisions: LaunchDecisions | None) -> RunPlan:
        """The plan with what was decided for its launch; the plan itself before that."""
        return self if decisions is None else self.model_copy(update={"config": decided(self.config, decisions)})

    def uses(self, run: str) -> bool:
        """It is a task on the result of the run of this id, or begins with files in its folders, which each of its
        attempts reads."""
        job = self.config.job
        paths = [
            job.mlx_lm.get("resume_adapter_file"),
            *(path for node in self.config.nodes for path in (node.model, node.data)),
        ]
        return (job.task is not None and job.task.source == run) or any(
            run in PurePosixPath(path).parts for path in paths if path
        )

    def record(self) -> RunRecord:
        """The run as it is before anything has happened."""
        job, backend, task = self.config.job, self.config.cluster.backend, self.config.job.task
        if backend == "auto" and all(node.local for node in self.config.nodes):
            # Otherwise it is decided when the nodes are probed, and the attempt's network plan has the result.
            backend = job.kind.framework.tcp_backend
        iterations = job.mlx_lm.get("iters") if task is None else None
        return RunRecord(
            id=self.run_id,
            name=job.name,
            state=RunState.PLANNED,
            created_at=self.created_at,
            world_size=len(self.nodes),
            cluster=self.config.cluster.name,
            backend=backend,
            task=task.kind if task is not None else None,
            source=task.source if task is not None else None,
            repeats=self.repeats,
            iterations=int(iterations) if iterations is not None else None,
            settings=_settings(self.config),
        )


_SETTINGS = (
    *("learning_rate", "batch_size", "batch_tokens", "num_layers"),
    *("max_seq_length", "seed", "optimizer", "fine_tune_type"),
)


def _settings(config: Config) -> dict[str, str | int | float]:
    """RunRecord.settings. Of a command nothing but itself is known."""
    job = config.job
    settings: dict[str, Any] = {"framework": job.framework, "command": " ".join(job.shown_command)}
    if job.kind.own_model is None:
        settings |= {"model": job.model, "data": job.data, "strategy": job.strategy}
        settings |= {name: job.mlx_lm.get(name) for name in _SETTINGS}
    return {name: value for name, value in settings.items() if value not in (None, "")}


def redactor_of(run_dir: RunDir) -> Redactor:
    """Takes the secrets of the run's job, those of its launch while they are kept, and this process's out of texts."""
    variables, kept = dict[str, str](), dict[str, Any]()
    with contextlib.suppress(StateError):
        variables = read_plan(run_dir.plan).config.job.env
    with contextlib.suppress(OSError):
        kept = json_object(json_or_none(read_regular(run_dir.secrets)))
    return Redactor(variables, {**os.environ, **{name: text for name, text in kept.items() if isinstance(text, str)}})


def copy_of(path: Path) -> Path:
    """The copy of a plan, which is read when the plan cannot be."""
    return path.with_name(f"{path.name}.copy")


def write_plan(path: Path, plan: RunPlan) -> None:
    """Write `plan` and its copy atomically, readable by their owner alone: they hold the job's environment."""
    for file in (copy_of(path), path):
        write_atomic(file, plan.model_dump_json(indent=1) + "\n")


def read_plan(path: Path) -> RunPlan:
    """The plan, or else its copy. Raises StateError when there is neither, or none that this version reads."""
    return read_plan_and_damage(path)[0]


def read_plan_and_damage(path: Path) -> tuple[RunPlan, str | None]:
    """As `read_plan`; with why the plan itself cannot be read, in one line, where it is the copy."""
    try:
        return _read(path), None
    except StateError as error:
        with contextlib.suppress(StateError):
            return _read(copy_of(path)), f"{path.name}: {error.what}: {error.why}; its copy is used"
        raise


def _read(path: Path) -> RunPlan:
    try:
        return RunPlan.model_validate_json(read_regular(path))
    except OSError as error:
        raise StateError("the plan cannot be read", where=str(path), why=error) from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        why = f"{place}: {first['msg']}" if place else first["msg"]
        raise StateError("the plan is not valid", where=str(path), why=why) from error
