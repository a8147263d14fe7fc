"""The decisions of a launch on one group of nodes: made by one plan, recorded in the run's journal, and read from there
by every attempt on these nodes."""

from __future__ import annotations

from engine.config.models import Config
from engine.errors import LaunchError
from engine.measurements import Division
from engine.models import FrozenModel
from engine.plan.context import PlanInputs
from engine.plan.document import Disabled, Settings, TrainingPlan
from engine.plan.memory.choice import resolved
from engine.plan.network import NetworkPlan
from engine.plan.prediction import division_of, predict


class LaunchDecisions(FrozenModel):
    nodes: tuple[str, ...]
    """In the order of their ranks."""
    division: Division
    settings: Settings | Disabled
    """For what the job leaves open; Disabled for a command that brings its own."""
    layer_split: str | None = None
    """A pipeline's, "0-8,8-36". None for another strategy, and where the plan does not know the memory of every rank:
    the ranks then divide the layers by the memory that they report to each other."""
    validators: tuple[str, ...]
    """The nodes that take part in validation and test."""
    network: NetworkPlan
    """Backend and addresses."""


def decide_launch(inputs: PlanInputs, plan: TrainingPlan) -> LaunchDecisions:
    """The decisions of `plan`, which was made from `inputs`. Raises LaunchError where the ranks cannot be connected."""
    if inputs.network is None:
        raise LaunchError(inputs.network_problem or "the ranks cannot be connected")
    config = inputs.config
    validate = [
        row.validates if node.validates is None else node.validates
        for node, row in zip(config.nodes, plan.nodes, strict=True)
    ]
    return LaunchDecisions(
        nodes=tuple(node.name for node in config.nodes),
        division=inputs.division or division_of(predict(config, inputs.calibration, inputs.now)),
        settings=plan.settings,
        layer_split=config.job.layer_split or plan.strategy.layer_split,
        validators=tuple(node.name for node, validates in zip(config.nodes, validate, strict=True) if validates),
        network=inputs.network,
    )


def decided(config: Config, decisions: LaunchDecisions) -> Config:
    """`config` with the settings that were chosen in place of "auto"; where the decisions are for its nodes, also with
    their layers and validators, so that a plan made of it has the same."""
    config = resolved(config, decisions.settings)
    if tuple(node.name for node in config.nodes) != decisions.nodes:
        return config
    validators = decisions.validators
    nodes = tuple(node.model_copy(update={"validates": node.name in validators}) for node in config.nodes)
    job = config.job.model_copy(update={"layer_split": decisions.layer_split})
    return config.model_copy(update={"nodes": nodes, "job": job})
