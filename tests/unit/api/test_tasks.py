"""Tasks on what a run has trained: which runs have a result, and the run that a task becomes."""

from __future__ import annotations

from argparse import Namespace
from contextlib import nullcontext
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from engine.api.engine import Engine
from engine.api.tasks import TaskRequest, TasksApi, serve_request
from engine.config.models import Config
from engine.errors import InputError
from engine.models import RunRecord
from engine.protocol.attempt import AttemptSpec
from engine.protocol.job import Framework, Strategy
from engine.protocol.task import Task, TaskKind
from engine.run.attempt import attempt_spec
from engine.run.events import AttemptPlanned, ResultReported, SavedFiles, StateSaved, WeightsSaved
from engine.run.run_plan import RunPlan
from engine.run.watch import RunWatch
from engine.store.layout import RunDir
from engine.task_result import Evaluated, Fused, Served
from tests.unit.launch.host_layouts import local_layout
from tests.unit.run.run_maker import START, MadeRun, made_decisions, make_run_config, planned_attempt
from tui.commands import runs as commands

ADAPTER = "/node/runs/r/adapters/adapters.safetensors"
MANIFEST = "2" * 64
_FOLDER, _NAME = ADAPTER.rsplit("/", 1)
SAVED = WeightsSaved(
    rank=0,
    node="node0",
    attempt=1,
    holds="adapter",
    saved=SavedFiles(folder=_FOLDER, iteration=60, files=((_NAME, 7, "1" * 64),)),
)


def trained(home: Path, strategy: Strategy = "data") -> MadeRun:
    run = MadeRun(home, strategy=strategy).attempt()
    return run.append(SAVED).state("running", "succeeded", reason="completed").close()


class Launched:
    """Takes the place of the launches: the configurations that were to be launched."""

    def __init__(self, model: dict[str, Any] | None) -> None:
        self.configs: list[Config] = []
        self.addresses: list[tuple[str, int]] = []
        self._model = model

    async def model(self, _: Config) -> dict[str, Any] | None:
        return self._model

    async def check_address(self, _: Config, host: str, port: int) -> None:
        self.addresses.append((host, port))

    async def launch(self, config: Config) -> RunRecord | None:
        self.configs.append(config)
        return None


async def start(
    home: Path, run: str, kind: TaskKind = "evaluate", model: dict[str, Any] | None = None, **request: Any
) -> Config:
    launched: Any = Launched(model)
    engine = Engine(home)
    await TasksApi(engine.runs, launched).start(run, TaskRequest(kind, **request))
    (config,) = launched.configs
    assert isinstance(config, Config)
    return config


async def test_a_task_takes_the_weights_and_the_job_of_the_run(tmp_path: Path) -> None:
    run = trained(tmp_path)
    config = await start(tmp_path, run.id, options={"split": "valid"}, divided=True)
    assert config.job.task == Task("evaluate", run.id, ADAPTER, None, {"split": "valid"})
    assert (config.job.model, config.job.data, len(config.nodes)) == ("/model", "/data", 2)
    assert not config.checkpoint.enabled and not config.consistency.enabled
    assert config.preflight.all_sum_s == 0.1 < run.plan.config.preflight.all_sum_s


async def test_it_is_a_run_of_its_own_name_without_iterations(tmp_path: Path) -> None:
    run = trained(tmp_path)
    config = await start(tmp_path, run.id, "fuse")
    record = RunPlan(run_id="x", nonce="n", created_at=run.plan.created_at, config=config).record()
    assert (record.name, record.task, record.source, record.iterations) == ("job-fuse", "fuse", run.id, None)


@pytest.mark.parametrize(("strategy", "alone"), [("sharded", "sharded"), ("pipeline", "data")])
async def test_undivided_it_runs_where_the_weights_are(tmp_path: Path, strategy: Strategy, alone: str) -> None:
    run = trained(tmp_path, strategy)
    config = await start(tmp_path, run.id, "generate")
    assert [node.name for node in config.nodes] == ["node0"]
    assert config.job.strategy == alone


@pytest.mark.parametrize(("strategy", "nodes"), [("sharded", 2), ("pipeline", 2), ("data", 1), ("local", 1)])
async def test_what_was_trained_in_parts_answers_in_parts(tmp_path: Path, strategy: Strategy, nodes: int) -> None:
    run = trained(tmp_path, strategy)
    for kind in ("serve", "generate", "fuse"):
        config = await start(tmp_path, run.id, kind, options={"host": "127.0.0.1"}, divided=None)
        assert len(config.nodes) == nodes, kind
    assert len((await start(tmp_path, run.id, "generate", divided=False)).nodes) == 1


@pytest.mark.parametrize(("name", "served"), [("job", "job"), ("base", "base-trained")])
async def test_no_run_is_served_by_the_name_of_the_base_model(tmp_path: Path, name: str, served: str) -> None:
    run = MadeRun(tmp_path, name=name).attempt().append(SAVED).state("running", "succeeded", reason="completed").close()
    config = await start(tmp_path, run.id, "serve", options={"host": "127.0.0.1"})
    assert config.job.task is not None and config.job.task.options["name"] == served


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed"])
async def test_pytorch_has_the_whole_model_on_every_rank_and_serves_none(tmp_path: Path, strategy: Strategy) -> None:
    config = make_run_config(strategy=strategy)
    config = config.model_copy(update={"job": config.job.model_copy(update={"framework": "torch"})})
    run = MadeRun(tmp_path, config=config).attempt().append(SAVED).state("running", "succeeded", reason="completed")
    measured = await start(tmp_path, run.close().id, divided=True)
    assert (measured.job.strategy, len(measured.nodes)) == ("ddp", 2)
    with pytest.raises(InputError, match="serving needs an MLX run: `flightdeck generate` answers"):
        await start(tmp_path, run.id, "serve", options={"host": "127.0.0.1"})
    with pytest.raises(InputError, match="leave out --divided"):
        await start(tmp_path, run.id, "generate", divided=True)
    trained = RunWatch(run.directory).poll().trained
    assert trained is not None and trained.unserved == "serving needs an MLX run: `flightdeck generate` answers"


async def test_where_a_server_is_to_listen_is_asked_before_it_is_launched(tmp_path: Path) -> None:
    run, launched = trained(tmp_path), Launched(None)
    tasks = TasksApi(Engine(tmp_path).runs, cast(Any, launched))
    await tasks.start(run.id, serve_request("a.local", 8081))
    await tasks.start(run.id, TaskRequest("evaluate"))
    assert launched.addresses == [("a.local", 8081)]


async def test_every_rank_gets_the_task_and_no_state_to_resume(tmp_path: Path) -> None:
    config = await start(tmp_path, trained(tmp_path).id, divided=True)
    plan = RunPlan(run_id="x", nonce="n", created_at=START, config=config)
    second = planned_attempt(RunDir(tmp_path / "runs" / "x"), plan, [local_layout(tmp_path / "node", 2)], number=2)
    spec = attempt_spec(plan, second, made_decisions(plan), {})
    assert spec.trainer == "engine.trainer.main"
    assert config.job.task is not None and spec.task == asdict(config.job.task)
    assert (spec.resume, spec.needs_state, spec.checkpoint_every) == (False, "", 0)
    assert AttemptSpec.from_json(spec.to_json()) == spec


async def test_the_last_run_is_the_last_training(tmp_path: Path) -> None:
    run = trained(tmp_path)
    task = (await start(tmp_path, run.id)).job.task
    later = START + timedelta(hours=1)
    config = run.plan.config.model_copy(update={"job": run.plan.config.job.model_copy(update={"task": task})})
    MadeRun(tmp_path, created=later, number=1, config=config).state("failed", reason="rank_failed").close()
    assert (await start(tmp_path, "last")).job.task == task
    with pytest.raises(InputError, match=f"it is a task .evaluate. on the result of {run.id}"):
        await start(tmp_path, f"{later:%Y%m%d}-{later:%H%M%S}")


async def test_a_run_that_goes_on_has_no_result_yet(tmp_path: Path) -> None:
    run = MadeRun(tmp_path).attempt().append(SAVED).state("running").close()
    with pytest.raises(InputError, match=r"has no result yet.*flightdeck abort"):
        await start(tmp_path, run.id)


async def test_a_run_that_saved_nothing_has_no_result(tmp_path: Path) -> None:
    run = MadeRun(tmp_path).attempt().state("failed", reason="rank_failed").close()
    with pytest.raises(InputError, match="it has saved no weights"):
        await start(tmp_path, run.id)


@pytest.mark.parametrize(
    ("node", "iteration", "parts", "used"),
    [
        ("node0", 80, 1, True),
        ("node1", 80, 1, True),
        ("node0", 80, 2, False),
        ("node0", 40, 1, False),
    ],
    ids=["newer", "on another node", "a part alone", "older"],
)
async def test_a_run_that_failed_is_used_by_its_newest_whole_state(
    tmp_path: Path, node: str, iteration: int, parts: int, used: bool
) -> None:
    files = (("weights.safetensors", 5, "0" * 64), ("optimizer.safetensors", 5, "0" * 64))
    state = SavedFiles(folder="/c/step", iteration=iteration, files=files, parts=parts)
    run = MadeRun(tmp_path).attempt()
    run.append(SAVED, StateSaved(rank=0, node=node, state=f"{iteration}.0", manifest=MANIFEST, saved=state))
    run.state("running", "failed", reason="rank_failed").close()
    config = await start(tmp_path, run.id, divided=True)
    assert config.job.task is not None
    assert config.job.task.weights == (None if used else ADAPTER)
    assert config.job.task.parts == ([[node, "/c/step", MANIFEST]] if used else [])
    assert next(there.name for there in config.nodes) == (node if used else "node0")
    saved = await start(tmp_path, run.id, saved=True)
    assert saved.job.task is not None and (saved.job.task.weights, saved.job.task.parts) == (ADAPTER, [])


async def test_show_and_runs_name_the_tasks_of_a_run_with_their_outcomes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path)
    task = MadeRun(tmp_path, created=START + timedelta(hours=1), number=1, config=await start(tmp_path, run.id))
    results = [Evaluated(variant=name, split="test", loss=1.5, tokens=9, seconds=0.1) for name in ("base", "adapter")]
    task.attempt().append(*(ResultReported(result=result) for result in results))
    task.state("running", "succeeded", reason="completed").close()
    commands.show(Namespace(run=run.id, json=False), Engine(tmp_path))
    assert f"evaluate   succeeded: base 1.500, adapter 1.500 ({task.id})" in capsys.readouterr().out
    commands.show(Namespace(run=task.id, json=False), Engine(tmp_path))
    assert f"task       evaluate of {run.id}" in capsys.readouterr().out
    commands.runs(Namespace(limit=None, filter="", sort=None, json=False), Engine(tmp_path))
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["RUN", "STATE", "TASK"]
    assert [row.split()[:3] for row in (first, second)] == [
        [task.id, "succeeded", "evaluate"],
        [run.id, "succeeded", "-"],
    ]


def test_results_are_part_of_the_runs_state(tmp_path: Path) -> None:
    results = [Evaluated(variant=name, split="test", loss=1.5, tokens=9, seconds=0.1) for name in ("base", "adapter")]
    run = MadeRun(tmp_path).attempt().append(*(ResultReported(result=result) for result in results)).close()
    assert list(RunWatch(run.directory).poll().task_results) == results


def test_a_restart_reports_its_results_anew(tmp_path: Path) -> None:
    first, second = (Served(address=f"http://127.0.0.1:{port}/v1", model="job", token=False) for port in (8080, 8081))
    reports = [ResultReported(attempt=1, result=first), ResultReported(attempt=2, result=second)]
    run = MadeRun(tmp_path).attempt().append(reports[0]).attempt(2).append(reports[1]).close()
    snapshot = RunWatch(run.directory).poll()
    assert (list(snapshot.task_results), snapshot.record.outcome) == ([second], second.address)


async def test_weights_on_a_node_that_a_later_attempt_was_without_are_used_there(tmp_path: Path) -> None:
    run = MadeRun(tmp_path).attempt()
    later = planned_attempt(run.directory, run.plan.among(["node1"]), [local_layout(tmp_path / "node", 1)], number=2)
    run.append(SAVED, AttemptPlanned(attempt=later)).state("running", "failed", reason="node_lost").close()
    for divided, nodes in ((False, ["node0"]), (True, ["node0", "node1"])):
        config = await start(tmp_path, run.id, divided=divided)
        assert config.job.task is not None and config.job.task.weights == ADAPTER
        assert [node.name for node in config.nodes] == nodes


async def made_fusion(run: MadeRun, number: int, path: str, node: str = "node0", *, ends: str = "succeeded") -> None:
    home = run.home
    config, later = await start(home, run.id, "fuse", divided=True), START + timedelta(hours=number)
    task = MadeRun(home, created=later, number=number, config=config).attempt()
    saved = SavedFiles(folder=path, iteration=0, files=(("model.safetensors", 7, "3" * 64),))
    task.append(WeightsSaved(rank=0, node=node, attempt=1, holds="model", saved=saved))
    task.append(ResultReported(result=Fused(path=path, bytes=7, kept=0.99, accepted=ends == "succeeded")))
    task.state("running", ends, reason="completed" if ends == "succeeded" else "rank_failed").close()


async def test_the_newest_fused_model_is_measured_beside_base_and_adapter(tmp_path: Path) -> None:
    """And what is fetched and published as fused is that one; on another node than the weights it is not measured."""
    run, engine = trained(tmp_path), Engine(tmp_path)

    fuse = partial(made_fusion, run)

    async def measured(kind: TaskKind = "evaluate") -> str | None:
        task = (await start(tmp_path, run.id, kind)).job.task
        assert task is not None
        return task.fused

    assert (await measured(), engine.runs.fused(run.id)) == (None, ())
    await fuse(1, "/older")
    await fuse(2, "/fused")
    await fuse(3, "/broken-off", ends="failed")
    assert (await measured(), await measured("generate")) == ("/fused", None)
    assert [file.path for file in engine.runs.fused(run.id)] == ["/fused/model.safetensors"]
    assert engine.results.to_publish(run.id, "lmstudio") == ("fused", None)
    await fuse(4, "/elsewhere", "node1")
    assert await measured() is None
    assert [file.node for file in engine.runs.fused(run.id)] == ["node1"]


async def test_ranks_of_pytorch_wait_while_the_first_one_does_the_tasks_of_lm_eval(tmp_path: Path) -> None:
    config = await start(tmp_path, saved_in_parts(tmp_path, strategy="fsdp", framework="torch").id, "lm_eval")
    assert [node.name for node in config.nodes] == ["node0", "node1"]
    assert config.job.task is not None and len(config.job.task.parts) == 2


def saved_in_parts(
    home: Path, *, shared: bool = False, strategy: Strategy = "sharded", framework: Framework = "mlx"
) -> MadeRun:
    config = make_run_config(strategy=strategy)
    config = config.model_copy(update={"job": config.job.model_copy(update={"framework": framework})})
    nodes = [node.model_copy(update={"ssh": "local" if shared else f"{node.name}.local"}) for node in config.nodes]
    run = MadeRun(home, config=config.model_copy(update={"nodes": tuple(nodes)})).attempt()
    for part in range(2):
        files = (("weights.safetensors", 5, "0" * 64), ("optimizer.safetensors", 9, "0" * 64))
        state = SavedFiles(folder=f"/c/part{part}/step-80", iteration=80, files=files, parts=2)
        run.append(StateSaved(rank=part, node=f"node{part}", state=f"80.{part}", manifest=MANIFEST, saved=state))
    return run.state("running", "failed", reason="rank_failed").close()


async def test_what_was_fused_of_a_checkpoint_is_published_and_fetched_where_no_weights_were_saved(
    tmp_path: Path,
) -> None:
    run, results = saved_in_parts(tmp_path), Engine(tmp_path).results
    with pytest.raises(InputError, match="makes a model of its newest checkpoint"):
        results.to_publish(run.id, "hub")
    await made_fusion(run, 1, "/fused")
    assert results.to_publish(run.id, "hub") == ("fused", None)
    with pytest.raises(InputError, match="--fused` brings the model"):
        results._chosen(run.id, "trained")


@pytest.mark.parametrize("shared", [False, True], ids=["two hosts", "one host"])
async def test_a_state_in_parts_is_used_on_the_hosts_that_have_them(tmp_path: Path, shared: bool) -> None:
    run = saved_in_parts(tmp_path, shared=shared)
    config = await start(tmp_path, run.id, "generate")
    second = "node0" if shared else "node1"
    assert [node.name for node in config.nodes] == [*dict.fromkeys(["node0", second])]
    assert config.job.task is not None and config.job.task.parts == [
        ["node0", "/c/part0/step-80", MANIFEST],
        [second, "/c/part1/step-80", MANIFEST],
    ]
    refused = pytest.raises(InputError, match=r"one node: .*in parts on node0, node1 .*flightdeck fuse")
    with nullcontext() if shared else refused:
        await start(tmp_path, run.id, "lm_eval")
    trained = RunWatch(run.directory).poll().trained
    assert trained is not None and (trained.size, trained.nodes) == (10, ("node0", "node1"))
    assert trained.command == f"flightdeck generate {run.id} -p Hello" and trained.iteration == 80
    engine = Engine(tmp_path)
    assert (await engine.tasks.weights(run.id)).nodes == tuple(dict.fromkeys(["node0", second]))


async def test_one_part_is_used_of_a_state_of_which_each_is_whole(tmp_path: Path) -> None:
    run = MadeRun(tmp_path, config=make_run_config(strategy="local")).attempt()
    for rank, update in ((0, 40), (1, 40), (1, 80)):
        state = SavedFiles(folder=f"/c/part{rank}/step-{update}", iteration=update, files=SAVED.saved.files, parts=2)
        run.append(StateSaved(rank=rank, node=f"node{rank}", state=f"{update}.{rank}", manifest=MANIFEST, saved=state))
    run.state("running", "failed", reason="rank_failed").close()
    config = await start(tmp_path, run.id, "lm_eval")
    assert [node.name for node in config.nodes] == ["node1"]
    assert config.job.task is not None and config.job.task.parts == [["node1", "/c/part1/step-80", MANIFEST]]
    snapshot = RunWatch(run.directory).poll()
    assert snapshot.trained is not None and (snapshot.trained.size, snapshot.trained.nodes) == (7, ("node1",))
    assert snapshot.result is not None and [file.node for file in snapshot.result.files] == ["node1"]


@pytest.mark.parametrize(("model", "refused"), [({}, True), ({"quantization": {"bits": 4}}, False), (None, False)])
async def test_more_bits_for_a_base_that_is_not_quantized_are_refused_before_the_launch(
    tmp_path: Path, model: dict[str, Any] | None, refused: bool
) -> None:
    run = trained(tmp_path)
    with pytest.raises(InputError, match="its base /model is not quantized") if refused else nullcontext():
        await start(tmp_path, run.id, "fuse", model=model, options={"bits": 8})
