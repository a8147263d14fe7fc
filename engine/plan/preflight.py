"""The rules for what preflight syncs and compares, which the checks use too, and the plan's
sections pre_rdma_sync and worker_consistency. Planning runs no check."""

from __future__ import annotations

from collections.abc import Callable

from engine.config.models import Config
from engine.job.traits import STRATEGY_TRAITS
from engine.models import PreRdmaSync
from engine.plan.context import PlanContext
from engine.plan.document import ConsistencySection, Disabled, ReplicaWatch, Source
from engine.validators.workers import byzantine_rule

_CONFIGURATIONS = (".py", ".sh", ".yaml", ".yml", ".json", ".toml", ".cfg", ".ini")
"""Suffixes of programs and settings in a command; other arguments may be outputs, which differ between nodes."""
_OF_MLX_LM = ("node bundle (the training script)", "job", "model configuration", "model index", "tokenizer")


def sync_not_applicable(config: Config) -> str | None:
    return "every node is this machine: nothing to sync" if all(node.local for node in config.nodes) else None


def sync_switched_off(config: Config) -> str | None:
    return None if config.preflight.sync else "switched off: [preflight] sync = false"


def compared_trees(config: Config) -> tuple[str, ...]:
    """Descriptions of the workdirs that are compared. A workdir that is a home directory is not a project and is not
    read; only the node can recognise a home written as an absolute path."""
    homes = [node.name for node in config.nodes if node.workdir.rstrip("/") in ("~", "")]
    where = {(node.ssh, node.workdir) for node in config.nodes if node.name not in homes}
    compared = [f"not compared on {', '.join(homes)}: the workdir is the home directory"] if homes else []
    if len(where) > 1:
        compared.insert(0, "same workdir tree (paths, SHA-256) on all nodes" + " that have one" * bool(homes))
    elif where:
        compared.insert(0, "one workdir: nothing to compare")
    return tuple(compared)


def comparison_not_applicable(config: Config) -> str | None:
    return "one node: nothing to compare" if len(config.nodes) == 1 else None


def comparison_switched_off(config: Config) -> str | None:
    return None if config.preflight.consistency else "switched off: [preflight] consistency = false"


def command_files(config: Config) -> list[str]:
    """Arguments of a custom command that name its script and settings, as written."""
    return [
        word
        for number, word in enumerate(config.job.words)
        if word.endswith(_CONFIGURATIONS)
        and not word.startswith("-")
        and "{rank}" not in word
        and (number or not word.startswith("/"))
        and "\0" not in word
    ]


def compared_files(config: Config) -> tuple[str, ...]:
    """Descriptions of what worker_consistency compares. A custom command has its own job, model and data."""
    return (*command_files(config), "node bundle") if config.job.words else _OF_MLX_LM


Applies = Callable[[Config], str | None]
_STALENESS_RULE = (
    "updates reported by each rank: ranks in lockstep wait for each other, so a hung rank stops all and is shown as "
    "silent; a rank is stale when its events stop while those of the others continue"
)


def sync_section(context: PlanContext) -> PreRdmaSync:
    config = context.config
    settings = config.preflight
    left_out = _why_skipped(context, "pre_rdma_sync", sync_not_applicable, sync_switched_off)
    reason = left_out or "flightdeck preflight runs it"
    if left_out is None:
        context.explain("pre_rdma_sync", Source.RULE, reason)
    return PreRdmaSync(
        enabled=left_out is None,
        reason=reason,
        sync_script=settings.sync_script,
        validation_checks=compared_trees(config) if left_out is None else (),
        block_on_failure=settings.block_on_failure,
        sync_status="not_run",
    )


def consistency_section(context: PlanContext) -> ConsistencySection:
    """Compares hashes before the launch, and the ranks' own reports during training."""
    config = context.config
    settings = config.preflight
    left_out = _why_skipped(context, "worker_consistency", comparison_not_applicable, comparison_switched_off)
    if left_out is None:
        text = f"at least {settings.consistency_threshold:g} of the nodes must agree"
        context.explain("worker_consistency", Source.RULE, text)
    watched = _while_training(context)
    return ConsistencySection(
        enabled=left_out is None,
        reason=left_out,
        consistency_threshold=settings.consistency_threshold,
        workers=context.ranks,
        validation_checks=compared_files(config) if left_out is None else (),
        byzantine_detection=isinstance(watched, ReplicaWatch),
        while_training=watched,
    )


def _why_skipped(context: PlanContext, check: str, not_applicable: Applies, switched_off: Applies) -> str | None:
    """Why preflight will skip a check; a check that the user switched off is also a warning."""
    config = context.config
    by_name = {*config.preflight.skip, *(planned.name for planned in context.checks if planned.overridden)}
    if check not in by_name and (reason := not_applicable(config)) is not None:
        context.explain(check, Source.RULE, reason)
        return reason
    chosen = "skipped by name" if check in by_name else switched_off(config)
    if chosen is not None:
        context.explain(check, Source.USER, chosen)
        context.warn(check, chosen)
    return chosen


def _while_training(context: PlanContext) -> ReplicaWatch | Disabled:
    settings = context.config.consistency
    if context.ranks == 1:
        return Disabled(reason="one rank: nothing to compare")
    if not context.settings:
        return Disabled(reason="the job runs a custom command, which does not report its parameters")
    if (why := STRATEGY_TRAITS[context.strategy].uncompared) is not None:
        return Disabled(reason=f"{context.strategy}: {why}")
    if not settings.enabled:
        context.warn("consistency", "[consistency] enabled = false: corrupted replicas are not detected")
        return Disabled(reason="[consistency] enabled = false")
    return ReplicaWatch(
        every_updates=settings.every,
        staleness_threshold=settings.staleness,
        staleness_rule=_STALENESS_RULE,
        loss_spread_threshold=settings.loss_spread,
        wasserstein_threshold=settings.wasserstein,
        byzantine_rule=byzantine_rule(context.ranks)[0],
        on_corruption=settings.on_corruption,
    )
