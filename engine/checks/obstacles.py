"""Obstacles to a job that only a node can see: rows that the model's chat template refuses, adapters of an architecture
that the plan does not know, and services that rank 0 cannot report to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.checks.context import CheckContext
from engine.cluster.probe_results import AdapterReport, RefusedRows, Reporters, TemplateReport
from engine.cluster.transport.base import quoted
from engine.config.models import JobConfig, NodeConfig
from engine.errors import FlightDeckError, InputError
from engine.launch.rank_environment import SECRETS
from engine.node.probes.job import needs_key
from engine.plan.context import PlanInputs
from engine.plan.document import PlanIssue, Rationale
from engine.plan.obstacles import knows_matrices, nothing_trained

TRIAL_LIMIT_S = 60.0
"""To import mlx-lm from a cold disk, and to try the adapters, or rows of each kind."""
_REPORTERS_LIMIT_S = 20.0
_FEATURES = {"prompt": "prompt", "completion": "completion", "chat": "messages", "text": "text"}


async def with_obstacles(context: CheckContext, inputs: PlanInputs) -> PlanInputs:
    """`inputs` with what takes a node seconds to find, refused rows and adapters, as the first node that answers has
    them. Why something could not be tried, data_matches and model_present report."""
    job = inputs.config.job
    node = next((node for node in inputs.config.nodes if node.name not in inputs.problems), None)
    if job.command is not None or node is None:
        return inputs
    files = data_files(job.mlx_lm, context.path(node, node.data or job.data or ""))

    async def rows() -> tuple[PlanIssue, ...]:
        refused = await refused_rows(context, node, files)
        return tuple(PlanIssue(name="data", text=describe_refused(each)) for each in refused)

    async def tried(found: Awaitable[tuple[PlanIssue, ...]]) -> tuple[PlanIssue, ...]:
        with contextlib.suppress(FlightDeckError):
            return await found
        return ()

    found = await asyncio.gather(tried(rows()), tried(adapter_obstacles(context, node, inputs.model)))
    return replace(inputs, obstacles=sum(found, inputs.obstacles))


def depends_on_matrices(job: JobConfig) -> bool:
    """Some models cannot be adapted as the job says."""
    by_name = "keys" in (job.mlx_lm.get("lora_parameters") or {})
    return job.fine_tune_type == "dora" or (job.fine_tune_type == "lora" and by_name)


async def adapter_obstacles(
    context: CheckContext, node: NodeConfig, config: Mapping[str, Any] | None
) -> tuple[PlanIssue, ...]:
    """Adapters that mlx-lm cannot add to a model whose config.json is `config`, where the plan does not know the
    model's matrices. Raises InputError where it could not be tried, LaunchError, NodeUnreachable."""
    job = context.config.job
    if config is None or not depends_on_matrices(job) or knows_matrices(config):
        return ()
    model, lora = context.path(node, node.model or job.model or ""), job.mlx_lm["lora_parameters"]
    dora = job.fine_tune_type == "dora"
    settings = json.dumps({"num_layers": job.mlx_lm["num_layers"], "lora_parameters": lora, "dora": dora})
    report = await context.probe(node, "adapters", model, settings, result_type=AdapterReport, timeout_s=TRIAL_LIMIT_S)
    if report.untried is not None:
        raise InputError("adapters were not tried", where=f"{model} on {node.name}", why=report.untried)
    rationale = Rationale()
    if report.problem is not None:
        todo = f"choose others in lora_parameters.keys: its last layer has {', '.join(report.names)}"
        rationale.refuse("lora_parameters", f"mlx-lm cannot adapt the model: {report.problem}", todo=todo)
    elif not report.trained:
        rationale.refuse("lora_parameters", *nothing_trained(lora.get("keys") or (), report.names))
    return tuple(rationale.refusals)


def data_files(settings: Mapping[str, Any], folder: str) -> list[str]:
    """The files that the job reads: train, valid and test, as far as they are used."""
    used = {"train": True, "valid": int(settings.get("val_batches", 25)) != 0, "test": settings.get("test")}
    return [f"{folder}/{name}.jsonl" for name in used if used[name]]


def data_features(settings: Mapping[str, Any]) -> dict[str, str]:
    """Form of a line → the key that mlx-lm recognises it by."""
    return {name: str(settings.get(f"{name}_feature", default)) for name, default in _FEATURES.items()}


async def refused_rows(context: CheckContext, node: NodeConfig, files: Sequence[str]) -> list[RefusedRows]:
    """The rows of `files` on `node` that a rank would end for. Raises InputError where they could not be tried,
    LaunchError, NodeUnreachable."""
    job = context.config.job
    flags = {key: bool(job.mlx_lm.get(key)) for key in ("mask_prompt", "trust_remote_code")}
    settings = json.dumps({**data_features(job.mlx_lm), **flags})
    model = context.path(node, node.model or job.model or "")
    report = await context.probe(
        node, "template", model, settings, *files, result_type=TemplateReport, timeout_s=TRIAL_LIMIT_S
    )
    if report.problem is not None:
        raise InputError("the chat template was not tried", where=f"{model} on {node.name}", why=report.problem)
    return report.refused


def describe_refused(rows: RefusedRows) -> str:
    more = f", and {rows.count - 1:,} more lines" if rows.count > 1 else ""
    return (
        f"{rows.file}: line {rows.line} is refused by the model's chat template ({rows.why}){more}: change them, or "
        "use a model whose chat template takes them"
    )


async def reporting_obstacles(
    context: CheckContext, first: NodeConfig, problems: Mapping[str, str]
) -> tuple[PlanIssue, ...]:
    """Services of report_to that rank 0 could not report to. It alone reports."""
    job = context.config.job
    asked = job.mlx_lm.get("report_to") if job.command is None else None
    if not asked or first.name in problems:
        return ()
    services = [name.strip() for name in str(asked).split(",")]
    try:
        report = await context.probe(first, "reporters", *services, result_type=Reporters, timeout_s=_REPORTERS_LIMIT_S)
    except FlightDeckError:
        return ()
    passed_on = {name: os.environ[name] for name in SECRETS if name in os.environ} | job.env
    found = []
    for name, state in report.services.items():
        given = f"report_to names {name}, "
        if not state.installed:
            why = f"which {first.python} on {first.name} cannot import"
            todo = f"`uv pip install --python {quoted(first.python)} {name}` there, or remove it from report_to"
        elif not state.key and needs_key(name, passed_on):
            key = f"{name.upper()}_API_KEY"
            why = f"for which {first.name} has no API key"
            todo = f'`{name} login` there, or set {key} here, or {name.upper()}_MODE = "offline" in [job] env'
        else:
            continue
        found.append(PlanIssue(name="report_to", text=f"{given}{why}; {todo}", todo=todo))
    return tuple(found)
