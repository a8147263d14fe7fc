"""Tasks on what a run has trained: evaluate, fuse, generate, serve. Each is a run of its own, on nodes of the run whose
result it takes."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from engine.api.launches import LaunchesApi
from engine.api.runs import RunsApi
from engine.config.models import CheckpointConfig, Config, ConsistencyConfig, select_nodes
from engine.errors import InputError
from engine.job.traits import FrameworkTraits
from engine.models import RunRecord
from engine.protocol.task import ANSWER_TOKENS, API_TOKEN_ENV, BASE, SERVE_PORT, Task, TaskKind, is_loopback
from engine.run.journal import read_history
from engine.run.result import StateParts
from engine.run.run_plan import RunPlan, read_plan
from engine.run.watch import RunWatch
from engine.snapshots import TrainedFile
from engine.store.layout import RunDir

_ALL_SUM_S = 0.1
"""How long preflight sums over the ranks of a task."""


@dataclass(frozen=True)
class TaskRequest:
    kind: TaskKind
    options: Mapping[str, Any] = field(default_factory=dict)
    """Those of the kind's program."""
    divided: bool | None = False
    """Over all nodes of the run; else on the one that has what was trained, or those that have parts of it. None: where
    it was trained so."""
    saved: bool = False
    """The weights that were saved last, although a checkpoint is newer: a node that has some of it may be lost."""


class TasksApi:
    def __init__(self, runs: RunsApi, launches: LaunchesApi) -> None:
        self._runs = runs
        self._launches = launches

    async def start(self, run: str, request: TaskRequest) -> RunRecord:
        """Start a task on the result of a run that has ended, and return once a supervisor is in charge of it. Raises
        RunNotFound, InputError where the run has no such result, and as LaunchesApi.launch."""
        config = await asyncio.to_thread(self._config, run, request)
        if request.options.get("bits") is not None:
            model = await self._launches.model(config)
            if model is not None and "quantization" not in json.dumps(model):
                bits, why = f"--bits {request.options['bits']}", f"its base {config.job.model} is not quantized"
                raise InputError(bits, why=why, todo="leave it out, or train on a quantized base")
        if request.kind == "serve":
            host, port = request.options["host"], request.options.get("port", SERVE_PORT)
            await self._launches.check_address(config, host, port)
        return await self._launches.launch(config)

    async def weights(self, run: str) -> TrainedFile:
        """Those that a task on the run's result uses, by one node of each host. Raises RunNotFound, InputError where
        there are none."""
        directory = await asyncio.to_thread(self._runs.find_trained, run)
        return (await asyncio.to_thread(lambda: _weights(directory, read_plan(directory.plan))))[1]

    def _config(self, run: str, request: TaskRequest) -> Config:
        directory = self._runs.find_trained(run)
        plan = read_plan(directory.plan)
        _refuse_divided(plan.config.job.kind.framework, request)
        record, weights = _weights(directory, plan, saved=request.saved)
        name = f"{BASE}-trained" if record.name == BASE else record.name
        options = {**request.options, **({"name": name} if request.kind == "serve" else {})}
        parts, nodes = weights.parts, weights.nodes
        # Ranks of PyTorch wait until rank 0 has done them; mlx-lm would divide the questions over those of MLX.
        if request.kind == "lm_eval" and len(nodes) > 1 and plan.config.job.kind.framework.unserved is None:
            why = f"the newest checkpoint is in parts on {', '.join(nodes)}"
            todo = f"`flightdeck resume {record.id}` goes on, and saves weights; `flightdeck fuse {record.id}` makes a "
            todo += "model for `mlx_lm.evaluate`"
            raise InputError("lm-eval's tasks are done on one node", why=why, todo=todo)
        model = self._runs.fused(record.id) if request.kind == "evaluate" else ()
        fused = next((str(PurePath(file.path).parent) for file in model if file.node == weights.node), None)
        task = Task(request.kind, record.id, None if parts else weights.path, fused, options, [*map(list, parts)])
        divided = weights.divided if request.divided is None else request.divided
        return _with_task(_as_launched(directory, plan, nodes), task, nodes, divided=divided)


def _weights(directory: RunDir, plan: RunPlan, *, saved: bool = False) -> tuple[RunRecord, TrainedFile]:
    watch = RunWatch(directory)
    snapshot, yet = watch.poll(), ""
    record, weights = snapshot.record, watch.trained(saved=saved)
    why, todo = plan.config.job.kind.own_model, "see `flightdeck runs` for one that has"
    if snapshot.result is None:
        why, todo, yet = f"it is {record.state}", f"wait for its end, or stop it: flightdeck abort {record.id}", " yet"
    elif weights is None and why is None:
        why = "it has saved no weights, and no whole checkpoint"
    if weights is None or why is not None:
        raise InputError(f"{record.id} has no result{yet}", why=why or "", todo=todo)
    return record, replace(weights, parts=_on_hosts(plan.config, weights.parts))


def _on_hosts(config: Config, parts: StateParts) -> StateParts:
    """`parts` with one node for all those of a host, which can read what any of them has saved."""
    hosts = {node.name: node.ssh for node in config.nodes}
    first = {hosts.get(node, node): node for node, _, _ in reversed(parts)}
    return tuple((first[hosts.get(node, node)], folder, manifest) for node, folder, manifest in parts)


def serve_request(host: str, port: int, max_tokens: int = ANSWER_TOKENS, *, divided: bool | None = None) -> TaskRequest:
    """`host`, `port` (0: a free one): where rank 0 listens, on its node."""
    return TaskRequest("serve", {"host": host, "port": port, "max_tokens": max_tokens}, divided=divided)


def _refuse_divided(framework: FrameworkTraits, request: TaskRequest) -> None:
    """Raises InputError for what takes a model that is divided, or served, where the framework has none."""
    if framework.unserved is None:
        return
    if request.kind == "serve":
        raise InputError(framework.unserved)
    if request.kind == "generate" and request.divided:
        why = f"{framework.title} has the whole model on each rank"
        raise InputError("it answers on one node", why=why, todo="leave out --divided")


def _as_launched(directory: RunDir, plan: RunPlan, needed: Sequence[str]) -> Config:
    """The configuration of a run's last attempt, with what was decided for it, and with the nodes that are `needed`
    for the weights, where the attempt was without them."""
    history = read_history(directory)
    nodes = history.last_attempt.plan.nodes if history.last_attempt is not None else ()
    return history.plan_on(plan, (*needed, *nodes)).config


def _with_task(config: Config, task: Task, needed: Sequence[str], *, divided: bool) -> Config:
    """`config` for a task in place of its training, on all its nodes or on those alone that have the weights."""
    # Rank 0 has them, or the first part.
    config = select_nodes(config, [node.name for node in config.nodes] if divided else needed, first=needed[0])
    job = config.job
    framework, alone = job.kind.framework, len(config.nodes) == 1 and job.kind.strategy.least_ranks > 1
    if alone or framework.unserved is not None:
        job = job.model_copy(update={"strategy": framework.undivided})
    left_out = ("report_to", "resume_adapter_file", "adapter_path")
    kept = {key: value for key, value in job.mlx_lm.items() if key not in left_out}
    env = dict(job.env)
    if task.kind == "serve" and not is_loopback(str(task.options["host"])):
        env[API_TOKEN_ENV] = secrets.token_urlsafe(24)
    changes = {"task": task, "mlx_lm": kept, "name": f"{job.name}-{task.kind}", "env": env}
    return config.model_copy(
        update={
            "job": job.model_copy(update=changes),
            # That it is exact counts, and not how fast.
            "preflight": config.preflight.model_copy(update={"all_sum_s": min(config.preflight.all_sum_s, _ALL_SUM_S)}),
            "checkpoint": CheckpointConfig(enabled=False),
            "consistency": ConsistencyConfig(enabled=False),
        }
    )
