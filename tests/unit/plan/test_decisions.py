"""The decisions of a launch: the plan's, unless the configuration sets them, and the same when it is made again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.config.models import Config, NodeConfig
from engine.errors import LaunchError
from engine.launch.rank_environment import trainer_job
from engine.measurements import Division
from engine.plan.context import PlanInputs
from engine.plan.decisions import LaunchDecisions, decide_launch, decided
from engine.plan.document import ChosenSettings, Disabled
from engine.plan.planner import make_plan
from engine.run.events import LaunchDecided
from tests.unit.plan.clusters import inputs, mac, ultra_and_max

FULL: dict[str, Any] = {"fine_tune_type": "full"}
PIPELINE: dict[str, Any] = {"strategy": "pipeline", "job": {"strategy": "pipeline"}}


def decisions_of(given: PlanInputs) -> LaunchDecisions:
    return decide_launch(given, make_plan(given))


def with_nodes(given: PlanInputs, **changed: Any) -> PlanInputs:
    nodes = tuple(node.model_copy(update=changed) for node in given.config.nodes)
    return replace(given, config=given.config.model_copy(update={"nodes": nodes}))


def test_they_are_those_of_the_plan_and_survive_the_journal() -> None:
    given = inputs(ultra_and_max(), settings=FULL | {"grad_checkpoint": "auto"})
    plan, made = make_plan(given), decisions_of(given)
    assert made.nodes == ("ultra", "max")
    assert (made.settings, made.validators, made.network) == (plan.settings, ("ultra",), given.network)
    assert made.division.parts == {row.node: row.share for row in plan.nodes}
    line = LaunchDecided(decisions=made).model_dump_json(exclude_none=True)
    assert LaunchDecided.model_validate_json(line).decisions == made


def test_a_pipelines_layers_are_the_jobs_else_the_plans_else_left_to_the_ranks() -> None:
    given = inputs(ultra_and_max(), **PIPELINE)
    split = make_plan(given).strategy.layer_split
    assert split is not None and decisions_of(given).layer_split == split
    own = PIPELINE | {"job": {"strategy": "pipeline", "layer_split": "0-1,1-36"}}
    assert decisions_of(inputs(ultra_and_max(), **own)).layer_split == "0-1,1-36"
    assert decisions_of(inputs(ultra_and_max(), model=None, **own)).layer_split == "0-1,1-36"
    assert decisions_of(inputs(ultra_and_max(), model=None, **PIPELINE)).layer_split is None
    assert decisions_of(inputs(ultra_and_max())).layer_split is None


@pytest.mark.parametrize(("named", "expected"), [(None, ("ultra",)), (True, ("ultra", "max")), (False, ())])
def test_who_validates_is_as_configured_else_as_planned(named: bool | None, expected: tuple[str, ...]) -> None:
    assert decisions_of(with_nodes(inputs(ultra_and_max(), settings=FULL), validates=named)).validators == expected


def test_another_group_is_decided_anew() -> None:
    """Without the others the M4 Max is the only one that can validate."""
    assert decisions_of(inputs([mac("max", 0, "Apple M4 Max", 128)], settings=FULL)).validators == ("max",)


def test_the_division_is_that_of_the_launch() -> None:
    division = Division(parts={"ultra": 0.75, "max": 0.25}, source="calibrated", reason="measured", tokens_per_s=9.0)
    assert decisions_of(inputs(ultra_and_max(), division=division)).division == division


def test_ranks_that_cannot_be_connected_are_not_launched() -> None:
    with pytest.raises(LaunchError, match="jaccl is not possible: max has no cable"):
        decisions_of(inputs(ultra_and_max(), network=None, network_problem="jaccl is not possible: max has no cable"))


def test_the_settings_of_a_command_are_its_own() -> None:
    job = {"command": ("python", "x.py"), "mlx_lm": {}}
    assert decisions_of(inputs(ultra_and_max(), job=job)).settings == Disabled(reason="the job runs a custom command")


def test_chosen_settings_take_the_place_of_auto_alone() -> None:
    keys = {"optimizer_precision": "auto", "moments": "float32", "grad_checkpoint": "auto"}
    given = inputs(ultra_and_max(), settings=keys)
    chosen = ChosenSettings(optimizer_precision="kahan", moments="8bit", grad_checkpoint=3)
    made = decisions_of(given).model_copy(update={"settings": chosen})
    trained = trainer_job(decided(given.config, made))
    assert trained is not None
    assert {key: trained[key] for key in keys} == {
        "optimizer_precision": "kahan",
        "moments": "float32",
        "grad_checkpoint": 3,
    }


@pytest.mark.parametrize("more", [PIPELINE, {"settings": FULL | {"grad_checkpoint": "auto"}}], ids=["split", "full"])
def test_a_plan_of_what_was_decided_decides_the_same_also_where_the_memory_is_another(more: dict[str, Any]) -> None:
    given = inputs(ultra_and_max(), **more)
    made = decisions_of(given)
    facts = {name: fact.model_copy(update={"gpu_limit_bytes": 300 * 2**30}) for name, fact in given.facts.items()}
    again = decisions_of(replace(given, config=decided(given.config, made), facts=facts))
    assert again == made
    if made.layer_split is not None:
        assert decisions_of(replace(given, facts=facts)) != made


def test_on_other_nodes_only_the_settings_stay() -> None:
    given = inputs(ultra_and_max(), settings=FULL | {"grad_checkpoint": "auto"}, **PIPELINE)
    made = decisions_of(given)
    third = NodeConfig(name="third", python="python", workdir="~")
    config: Config = given.config.model_copy(update={"nodes": (*given.config.nodes, third)})
    others = decided(config, made)
    assert others.job.mlx_lm["grad_checkpoint"] == dict(made.settings)["grad_checkpoint"] != "auto"
    assert (others.job.layer_split, others.nodes) == (None, config.nodes)
