"""plan.json: what is written is what is read, and nothing else is taken for it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from engine.config.models import ClusterConfig, Config, JobConfig, NodeConfig
from engine.errors import InputError, StateError
from engine.launch.rank_environment import trainer_job
from engine.models import RunState
from engine.run.run_plan import RunPlan, read_plan, write_plan

CONFIG = Config(
    cluster=ClusterConfig(),
    nodes=(
        NodeConfig(name="left", python="/p", workdir="/w", share=3.0),
        NodeConfig(name="right", python="/p", workdir="/w"),
    ),
    job=JobConfig(name="demo", model="/m", data="/d", mlx_lm={"iters": 60, "learning_rate": 1e-5}),
)


def plan(config: Config = CONFIG, skip: tuple[str, ...] = ()) -> RunPlan:
    return RunPlan(nonce="n", config=config, run_id="r1", created_at=datetime(2026, 1, 2, tzinfo=UTC), skip=skip)


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.json", plan())
    assert read_plan(tmp_path / "plan.json") == plan()
    assert (tmp_path / "plan.json").stat().st_mode & 0o777 == 0o600


def test_its_record_is_planned_and_knows_its_size() -> None:
    record = plan().record()
    assert (record.id, record.name, record.state, record.world_size) == ("r1", "demo", RunState.PLANNED, 2)
    assert (record.backend, record.iterations) == ("ring", 60)


def test_a_command_has_no_known_iterations() -> None:
    job = JobConfig(name="mine", command=("python", "x.py"), mlx_lm={"report_to": "tensorboard"})
    assert plan(CONFIG.model_copy(update={"job": job})).record().iterations is None


def test_a_missing_plan_and_a_foreign_one_are_one_line_each(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="cannot be read"):
        read_plan(tmp_path / "plan.json")
    (tmp_path / "plan.json").write_text(json.dumps({"version": 1}))
    with pytest.raises(StateError, match="the plan is not valid"):
        read_plan(tmp_path / "plan.json")


def test_without_a_node_the_ranks_are_counted_anew_and_the_rest_stays() -> None:
    made = plan(skip=("x",)).without(["left"])
    assert made.nodes == ("right",)
    assert (made.run_id, made.created_at, made.skip) == ("r1", plan().created_at, ("x",))
    with pytest.raises(InputError, match="no node of the configuration is left"):
        plan().without(["left", "right"])


@pytest.mark.parametrize(
    ("report_to", "by_rank_0"),
    [(None, None), ("wandb", None), ("tensorboard, swanlab", "swanlab"), ("swanlab", "swanlab")],
)
def test_rank_0_reports_only_to_what_the_head_does_not_write(report_to: str | None, by_rank_0: str | None) -> None:
    job = CONFIG.job.model_copy(update={"mlx_lm": {**CONFIG.job.mlx_lm, "report_to": report_to}})
    trained = trainer_job(CONFIG.model_copy(update={"job": job}))
    assert trained is not None and trained["report_to"] == by_rank_0
