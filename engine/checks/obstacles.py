"""Obstacles to a job that only a node or this machine can see: rows that the model's chat template refuses, adapters of
an architecture that the plan does not know, and services that cannot be reported to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.checks.context import CheckContext
from engine.cluster.probe_results import AdapterReport, RefusedRows, Reporters, Tally, TemplateReport
from engine.cluster.transport.base import quoted
from engine.config.models import Config, JobConfig, NodeConfig
from engine.errors import FlightDeckError, InputError, plural
from engine.failures.explanation import explained
from engine.launch.rank_environment import SECRETS
from engine.node.probes.job import needs_key, probe_reporters
from engine.plan.context import PlanInputs
from engine.plan.document import PlanIssue, Rationale
from engine.plan.obstacles import knows_matrices, nothing_trained, unmatched

TRIAL_LIMIT_S = 60.0
"""To import mlx-lm from a cold disk, and to try the adapters, or rows of each kind."""
_REPORTERS_LIMIT_S = 20.0
_FEATURES = {"prompt": "prompt", "completion": "completion", "chat": "messages", "text": "text"}


async def with_obstacles(context: CheckContext, inputs: PlanInputs) -> PlanInputs:
    """`inputs` with what takes a node seconds to find, refused rows and adapters and the rows' lengths, as the first
    node that answers has them. Why something could not be tried, data_matches and model_present report."""
    job = inputs.config.job
    node = next((node for node in inputs.config.nodes if node.name not in inputs.problems), None)
    if job.kind.own_model is not None or node is None:
        return inputs
    files = data_files(job.mlx_lm, context.path(node, node.data or job.data or ""))
    lengths: dict[int, int] = {}

    async def rows() -> tuple[PlanIssue, ...]:
        report = await try_rows(context, node, files)
        lengths.update(report.lengths.get(files[0], {}))
        return tuple(PlanIssue(name="data", text=text) for text in rows_refused(report, job.mlx_lm))

    async def adapters() -> tuple[PlanIssue, ...]:
        return tuple((await adapter_obstacles(context, node, inputs.model)).refusals)

    async def tried(search: Awaitable[tuple[PlanIssue, ...]]) -> tuple[PlanIssue, ...]:
        with contextlib.suppress(FlightDeckError):
            return await search
        return ()

    groups = await asyncio.gather(tried(rows()), tried(adapters()))
    return replace(inputs, obstacles=sum(groups, inputs.obstacles), lengths=lengths)


def depends_on_matrices(job: JobConfig) -> bool:
    """Some models cannot be adapted as the job says."""
    by_name = "keys" in (job.mlx_lm.get("lora_parameters") or {})
    return job.fine_tune_type == "dora" or (job.fine_tune_type == "lora" and by_name)


async def adapter_obstacles(context: CheckContext, node: NodeConfig, config: Mapping[str, Any] | None) -> Rationale:
    """Adapters that mlx-lm cannot add to a model whose config.json is `config`, and keys that name nothing, where the
    plan does not know the matrices. Raises InputError where it could not be tried, LaunchError, NodeUnreachable."""
    job, rationale = context.config.job, Rationale()
    # peft names what it cannot adapt, and there is no mlx-lm on the nodes of a PyTorch job.
    if job.framework == "torch" or config is None or not depends_on_matrices(job) or knows_matrices(config):
        return rationale
    report = await try_adapters(context, node)
    if report.untried is not None:
        model = context.path(node, node.model or job.model or "")
        raise InputError("adapters were not tried", where=f"{model} on {node.name}", why=explained(report.untried))
    if report.problem is not None:
        todo = f"choose others in lora_parameters.keys: its last layer has {', '.join(report.names)}"
        rationale.refuse("lora_parameters", f"mlx-lm cannot adapt the model: {report.problem}", todo=todo)
    elif not report.trained:
        keys = job.mlx_lm["lora_parameters"].get("keys") or ()
        rationale.refuse("lora_parameters", *nothing_trained(keys, report.names))
    elif report.unmatched:
        rationale.warn("lora_parameters", unmatched(report.unmatched, report.names))
    return rationale


async def try_adapters(context: CheckContext, node: NodeConfig, resume: str | None = None) -> AdapterReport:
    """The job's adapters, or trained layers, in its model, and the weights in a file of the node's. Raises LaunchError,
    NodeUnreachable."""
    job = context.config.job
    asked = {key: job.mlx_lm[key] for key in ("num_layers", "lora_parameters")}
    settings = json.dumps({**asked, "kind": job.fine_tune_type, "resume": resume})
    model = context.path(node, node.model or job.model or "")
    return await context.probe(node, "adapters", model, settings, result_type=AdapterReport, timeout_s=TRIAL_LIMIT_S)


def data_files(settings: Mapping[str, Any], folder: str) -> list[str]:
    """The files that a rank reads: valid.jsonl also where val_batches is 0, if it is there."""
    names = ("train", "valid", *(["test"] if settings.get("test") else []))
    return [f"{folder.rstrip('/')}/{name}.jsonl" for name in names]


def data_options(config: Config) -> dict[str, Any]:
    """How the nodes read the data: the key of each form of a line, and [data]."""
    settings = config.job.mlx_lm
    features = {name: str(settings.get(f"{name}_feature", default)) for name, default in _FEATURES.items()}
    return {**features, "max_seq_length": settings["max_seq_length"], "data": config.data.options}


def row_settings(context: CheckContext) -> str:
    """The probes' settings for tokenising rows, as JSON."""
    job = context.config.job
    flags = {key: bool(job.mlx_lm.get(key)) for key in ("mask_prompt", "trust_remote_code")}
    return json.dumps({**data_options(context.config), **flags, "framework": job.framework})


async def try_rows(context: CheckContext, node: NodeConfig, files: Sequence[str]) -> TemplateReport:
    """The rows of `files` on `node` as a rank would tokenise them. Raises InputError where they could not be tried,
    LaunchError, NodeUnreachable."""
    model = context.path(node, node.model or context.config.job.model or "")
    report = await context.probe(
        node, "template", model, row_settings(context), *files, result_type=TemplateReport, timeout_s=TRIAL_LIMIT_S
    )
    if report.problem is not None:
        raise InputError(
            "the chat template was not tried", where=f"{model} on {node.name}", why=explained(report.problem)
        )
    return report


def rows_refused(report: TemplateReport, settings: Mapping[str, Any]) -> list[str]:
    """Why a training on these rows would end, or would learn nothing."""
    refusals = [_describe_refused(rows) for rows in report.refused]
    for file, tally in report.tallies.items():
        if file.endswith("/train.jsonl") and tally.get("no_target", (0, 0))[0] == tally.get("rows", (-1, 0))[0]:
            of_targets: Tally = {what: tally[what] for what in ("no_target", "rows", "more") if what in tally}
            refusals += row_warnings({file: of_targets}, settings)
    return refusals


def _describe_refused(rows: RefusedRows) -> str:
    more = f", and {plural(rows.count - 1, 'more line')}" if rows.count > 1 else ""
    advice = ": change them, or use a model whose chat template takes them" if "chat template" in rows.why else ""
    return f"{rows.file}: line {rows.line} {rows.why}{more}{advice}" if rows.line else rows.why


_COUNTED = {
    "no_target": "without a target, so that nothing is learned from them: mask_prompt hides as many tokens as the "
    "prompt has by the chat template, max_seq_length = {max_seq_length} cuts the rest",
    "truncated": "longer than max_seq_length = {max_seq_length} tokens, and truncated",
    "no_prefix": "not beginning as the prompt that the chat template makes for generating (a template for reasoning?): "
    "the prompt is not what was trained, nor what mask_prompt hides",
    "bos": "beginning with the BOS that the tokenizer adds, too: remove it from the text",
    "weight": "with a `weight` on messages, which is not read: all are trained on, with mask_prompt the last one",
    "last_turn": "not ending with an assistant's message: with mask_prompt = true their last message is trained on",
    "repeated": "repeated in the file",
    "in_train": "also in train.jsonl: they do not measure what is new to the model",
}
"""A property of rows that a probe counts → its description."""


def row_warnings(tallies: Mapping[str, Tally], settings: Mapping[str, Any]) -> list[str]:
    """`tallies`: by file."""
    warnings = list[str]()
    for file, tally in tallies.items():
        rows = f"{'the first ' * ('more' in tally)}{plural(tally.get('rows', (0, 0))[0], 'row')}"
        for what, text in _COUNTED.items():
            count, line = tally.get(what, (0, 0))
            if count and (what != "last_turn" or settings.get("mask_prompt")):
                warnings.append(f"{file}: {count:,} of {rows} (first: line {line}) {text.format(**settings)}")
    return warnings


async def reporting_obstacles(
    context: CheckContext, first: NodeConfig, problems: Mapping[str, str]
) -> tuple[PlanIssue, ...]:
    """Services of report_to that could not be reported to, by the head's trackers or by rank 0 (no other rank does)."""
    job, unreported = context.config.job, list[PlanIssue]()
    # TensorBoard's files need no package here.
    if "wandb" in job.trackers:
        here = Reporters.model_validate(await asyncio.to_thread(probe_reporters, "wandb"))
        unreported += _unreported(here, "this machine", sys.executable, dict(os.environ) | job.env, "here")
    if job.node_reporters and first.name not in problems:
        with contextlib.suppress(FlightDeckError):
            there = await context.probe(
                first, "reporters", *job.node_reporters, result_type=Reporters, timeout_s=_REPORTERS_LIMIT_S
            )
            passed_on = {name: os.environ[name] for name in SECRETS if name in os.environ} | job.env
            unreported += _unreported(there, first.name, first.python, passed_on, "there")
    return tuple(unreported)


def _unreported(
    report: Reporters, machine: str, python: str, environment: Mapping[str, str], adverb: str
) -> Iterator[PlanIssue]:
    """`environment`: beside the machine's own, which was probed."""
    for name, state in report.services.items():
        if not state.installed:
            why = f"which {python} on {machine} cannot import"
            todo = f"`uv pip install --python {quoted(python)} {name}` {adverb}, or remove it from report_to"
        elif not state.key and needs_key(name, environment):
            prefix = name.upper()
            why = f"for which {machine} has no API key"
            login = f"`{quoted(python)} -m {name} login`" if adverb == "here" else f"`{name} login`"
            todo = f'{login} {adverb}, or set {prefix}_API_KEY here, or {prefix}_MODE = "offline" in [job] env'
        else:
            continue
        yield PlanIssue(name="report_to", text=f"report_to names {name}, {why}; {todo}", todo=todo)
