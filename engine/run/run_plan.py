"""plan.json: the plan of a run, written before anything of it starts."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from pathlib import Path

from pydantic import ValidationError

from engine.config.models import Config, select_nodes
from engine.errors import StateError
from engine.measurements import Calibration, Division
from engine.models import FrozenModel, RunRecord, RunState
from engine.protocol.attempt import write_atomic

PLAN_VERSION = "2.0.0"


class PlannedRank(FrozenModel):
    rank: int
    node: str
    host: str
    """Address of the node, for messages."""
    share: float = 1.0
    """Relative share of the global batch."""


class RunPlan(FrozenModel):
    """plan.json."""

    version: str = PLAN_VERSION
    run_id: str
    created_at: datetime
    config: Config
    skip: tuple[str, ...] = ()
    """Checks to leave out, from the configuration and from --skip."""
    ranks: tuple[PlannedRank, ...]
    division: Division | None = None
    """None where no calibration was looked up."""
    calibration: Calibration | None = None
    """The calibration behind `division`: of all nodes of the configuration, also of those that are left out."""

    @classmethod
    def of(
        cls,
        config: Config,
        *,
        run_id: str,
        created_at: datetime,
        skip: tuple[str, ...] = (),
        division: Division | None = None,
        calibration: Calibration | None = None,
    ) -> RunPlan:
        """The plan of one run of `config`: one rank per node, in the configuration's order. The nodes' shares are those
        of `division`, without it those of the configuration."""
        return cls(
            run_id=run_id,
            created_at=created_at,
            config=config,
            skip=tuple(dict.fromkeys((*config.preflight.skip, *skip))),
            ranks=_planned_ranks(config, division),
            division=division,
            calibration=calibration,
        )

    def without(self, nodes: Collection[str]) -> RunPlan:
        """The plan of the same run without these nodes, its ranks renumbered. Raises InputError when none is left."""
        kept = [node.name for node in self.config.nodes if node.name not in nodes]
        division = self.division.without(nodes) if self.division is not None else None
        config = select_nodes(self.config, kept)
        changes = {"config": config, "ranks": _planned_ranks(config, division), "division": division}
        return self.model_copy(update=changes)

    def among(self, nodes: Collection[str]) -> RunPlan:
        """The plan of the same run with these nodes alone, for an attempt that goes on without the others; the plan
        itself when they are all of them, or none is named. Raises InputError when none is left."""
        left_out = [node.name for node in self.config.nodes if node.name not in nodes]
        return self.without(left_out) if nodes and left_out else self

    @property
    def backend(self) -> str:
        """As far as it is known before the nodes are probed: "auto" is decided then, and the attempt's network plan has
        the result, unless all nodes are this machine."""
        backend = self.config.cluster.backend
        return "ring" if backend == "auto" and all(node.local for node in self.config.nodes) else backend

    @property
    def iterations(self) -> int | None:
        """None for a command of the user's own."""
        iterations = self.config.job.mlx_lm.get("iters")
        return int(iterations) if self.config.job.command is None and iterations is not None else None

    def record(self) -> RunRecord:
        """The run as it is before anything has happened."""
        return RunRecord(
            id=self.run_id,
            name=self.config.job.name,
            state=RunState.PLANNED,
            created_at=self.created_at,
            world_size=len(self.ranks),
            backend=self.backend,
            iterations=self.iterations,
        )


def _planned_ranks(config: Config, division: Division | None) -> tuple[PlannedRank, ...]:
    parts = division.parts if division is not None else {}
    return tuple(
        PlannedRank(rank=number, node=node.name, host=node.ssh, share=parts.get(node.name) or node.share or 1.0)
        for number, node in enumerate(config.nodes)
    )


def write_plan(path: Path, plan: RunPlan) -> None:
    """Write `plan` atomically, readable by its owner alone: it holds the job's environment."""
    write_atomic(path, plan.model_dump_json(indent=1) + "\n")


def read_plan(path: Path) -> RunPlan:
    """Raises StateError when there is none, or none that this version reads."""
    try:
        return RunPlan.model_validate_json(path.read_bytes())
    except OSError as error:
        raise StateError("the plan cannot be read", where=str(path), why=error) from error
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
        raise StateError("the plan is not valid", where=str(path), why=why) from error
