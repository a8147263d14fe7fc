"""Tasks on what divided runs have trained, over ssh: on nodes of which each has a part of the model, they give what
stock mlx-lm gives with the whole one, and leave no process behind."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import mlx.core as mx
import pytest
from mlx_lm import load, stream_generate
from pydantic import TypeAdapter

from engine.api import Engine, TaskRequest
from engine.config.models import Config, RecoveryConfig
from engine.demo import ensure_made
from engine.errors import InputError
from engine.models import Reason, RunState
from engine.run.events import ResultReported
from engine.run.run_plan import read_plan
from engine.store.layout import RunDir
from engine.task_result import Evaluated, Text
from tests.cluster.cluster import Cluster
from tests.conftest import FLIGHTDECK
from tests.demo_copies import demo_below
from tests.faults.cluster_runs import ClusterRun, demo_on, nodes_of, start_on
from tests.faults.local_runs import PLANNED
from tests.faults.test_divided_recovery import divided, has_checkpoint
from tests.faults.test_training import with_keys
from tests.openai_client import openai
from tests.training.generation_cases import PROMPTS, Trained, stock
from tests.training.task_runs import stock_loss
from tests.training.tiny import write_weights

pytestmark = [pytest.mark.busy, pytest.mark.slow]

MODEL = "~/models/tasks"
TOKENS = 24
ENDLESS = 1_000_000
CLOSE = 1e-5
LIMIT_S = 240.0
HARMLESS = TypeAdapter[str](Text)
"""As the journal and a run's conversations keep what a model says."""
FIRST = {"role": "user", "content": "tower to heron"}
Messages = list[dict[str, str]]


@dataclass
class Divided:
    """A run over nodes that has ended."""

    run: ClusterRun
    cluster: Cluster
    model: Path
    """As every node has it."""
    data: Path

    def command(self, *arguments: str, folder: Path | None = None) -> Any:
        """The document of a command on the run, run in a folder; afterwards nothing that it has started is left
        anywhere."""
        argv = [str(FLIGHTDECK), arguments[0], self.run.dir.id, *arguments[1:], "--json"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        self.nothing_left()
        return json.loads(done.stdout)

    def nothing_left(self) -> None:
        for directory in map(RunDir, self.run.dir.path.parent.iterdir()):
            nonce = read_plan(directory.plan).nonce
            assert [process for node in self.cluster.nodes for process in node.processes(nonce)] == []

    @functools.cached_property
    def adapter(self) -> Path:
        """Fetched."""
        folder = self.run.dir.path.parent.parent / f"{self.run.dir.id}-adapter"
        return Path(self.command("fetch", str(folder))["folder"])


Runs = Callable[[int], Divided]


@pytest.fixture(scope="module")
def runs(session_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """By the number of nodes: a sharded training over two, and a pipeline over four."""
    home = tmp_path_factory.mktemp("tasks") / "home"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLIGHTDECK_SSH_CONFIG", str(session_cluster.ssh_config))
        patch.setenv("FLIGHTDECK_HOME", str(home))
        made, model = ensure_made(demo_below(home)), home / "model"
        shutil.copytree(made / "model", model)
        config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": 4}
        (model / "config.json").write_text(json.dumps(config))
        write_weights(model, config)
        for node in session_cluster.nodes:
            node.copy_in(model, MODEL)
        yield functools.cache(
            lambda ranks: Divided(trained(session_cluster, home, ranks), session_cluster, model, made / "data")
        )


def trained(cluster: Cluster, home: Path, ranks: int) -> ClusterRun:
    run = start_on(cluster, home, training(cluster, home, ranks, iters=6))
    assert run.ended(within_s=LIMIT_S).state is RunState.SUCCEEDED, run.troubles()
    return run


def training(cluster: Cluster, home: Path, ranks: int, *, iters: int) -> Config:
    demo = demo_on(cluster, home, iters=iters)
    keys = {"model": MODEL, "fine_tune_type": "lora", "num_layers": 4, "learning_rate": 1e-2}
    keys["adapter_path"] = f"~/adapters-of-{ranks}-{iters}"
    job = demo.job.model_copy(update={"model": MODEL, "fine_tune_type": "lora", "mlx_lm": {**demo.job.mlx_lm, **keys}})
    names = [node.name for node in cluster.nodes[:ranks]]
    config = demo.model_copy(update={"job": job, "nodes": nodes_of(cluster, names=names)})
    config = divided(config, "sharded" if ranks == 2 else "pipeline", batch_size=8)
    return with_keys(config, max_seq_length=256)


@pytest.mark.parametrize("ranks", [2, 4])
async def test_several_nodes_measure_what_one_does(nodes: Cluster, runs: Runs, ranks: int) -> None:
    trained = runs(ranks)
    together = {result["variant"]: result["loss"] for result in trained.command("eval")["task_results"]}
    async with Engine(home=trained.run.dir.path.parent.parent) as engine:
        task = await engine.tasks.start(trained.run.dir.id, TaskRequest("evaluate"))
        run = started(nodes, trained, task.id)
        await asyncio.to_thread(run.ended, LIMIT_S)
    assert (run.record.state, run.record.world_size) == (RunState.SUCCEEDED, 1), run.troubles()
    results = [event.result for event in run.events_of(ResultReported)]
    alone = {result.variant: result.loss for result in results if isinstance(result, Evaluated)}
    rows = trained.data / "test.jsonl"
    expected = {"base": stock_loss(trained.model, rows), "adapter": stock_loss(trained.model, rows, trained.adapter)}
    assert together == pytest.approx(alone, abs=CLOSE) and alone == pytest.approx(expected, abs=CLOSE)
    assert expected["adapter"] < expected["base"] - 0.1


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_model_divided_over_nodes_answers_as_stock_mlx_lm(nodes: Cluster, runs: Runs, ranks: int) -> None:
    trained = runs(ranks)
    prompts = [option for prompt in PROMPTS for option in ("--prompt", prompt)]
    keys = ("--divided", "--compare", "--raw", "--max-tokens", str(TOKENS))
    document = trained.command("generate", *prompts, *keys)
    assert document["world_size"] == ranks
    expected = stock(Trained(trained.model, trained.adapter, {}), TOKENS).texts
    assert [result["text"] for result in document["task_results"]] == [*map(HARMLESS.validate_python, expected)]
    assert expected[:2] != expected[2:]


def test_a_fused_model_keeps_the_gain_and_is_published_as_stock_mlx_lm_loads_it(
    nodes: Cluster, runs: Runs, tmp_path: Path
) -> None:
    """From its node, which is another one than the head."""
    trained, rows = runs(2), runs(2).data / "test.jsonl"
    fused = trained.command("fuse")["task_results"][-1]
    there = nodes["ana"].disk.seen_from_head(fused["path"])
    assert fused["accepted"] and fused["kept"] > 0.99
    published = Path(trained.command("publish", "--lmstudio", str(tmp_path / "models"), folder=tmp_path)["folder"])
    assert {file.name for file in there.iterdir()} <= {file.name for file in published.iterdir()}
    weights = {file.name: file.read_bytes() for file in there.glob("*.safetensors")}
    assert weights and {name: (published / name).read_bytes() for name in weights} == weights
    assert trained.run.dir.id in (published / "README.md").read_text()
    assert stock_loss(published, rows) == pytest.approx(stock_loss(trained.model, rows, trained.adapter), abs=1e-3)


def test_a_checkpoint_comes_from_every_node(nodes: Cluster, runs: Runs, tmp_path: Path) -> None:
    document = runs(2).command("fetch", str(tmp_path / "here"), "--checkpoint")
    assert {file["node"] for file in document["files"]} == {"ana", "bea"}
    for file in document["files"]:
        content = (tmp_path / "here" / file["name"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == file["sha256"]
        assert nodes[file["node"]].run(["sha256sum", file["path"]]).stdout.split()[0] == file["sha256"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_newest_checkpoint_of_a_run_that_failed_is_used_as_a_result(
    nodes: Cluster, runs: Runs, tmp_path: Path, ranks: int
) -> None:
    """Of which every node has a part. What is expected is stock mlx-lm's, with the parts as they are fetched."""
    home, whole = runs(2).run.dir.path.parent.parent, runs(2)
    config = training(nodes, home, ranks, iters=ENDLESS)
    run = start_on(nodes, home, config.model_copy(update={"recovery": RecoveryConfig(max_restarts=0)}))
    run.wait(lambda: run.dir.events(ranks - 1).exists() and has_checkpoint(run), LIMIT_S)
    run.kill(1, run.identity(1).trainer_pid)
    assert run.ended(within_s=LIMIT_S).state is RunState.FAILED, run.troubles()
    failed = Divided(run, nodes, whole.model, whole.data)

    fetched: Any = failed.command("fetch", str(tmp_path / "parts"), "--checkpoint")
    files = [file for file in fetched["files"] if file["name"].endswith("/weights.safetensors")]
    assert len({file["node"] for file in files}) == ranks
    adapter = tmp_path / "adapter"
    shutil.copytree(whole.adapter, adapter)
    parts: list[Any] = [mx.load(str(tmp_path / "parts" / file["name"])) for file in files]
    mx.save_safetensors(str(adapter / "adapters.safetensors"), {name: part[name] for part in parts for name in part})

    rows = whole.data / "test.jsonl"
    expected = {"base": stock_loss(whole.model, rows), "adapter": stock_loss(whole.model, rows, adapter)}
    measured = {result["variant"]: result["loss"] for result in failed.command("eval")["task_results"]}
    assert measured == pytest.approx(expected, abs=CLOSE) and measured["adapter"] < measured["base"] - 0.1
    keys = ("--prompt", PROMPTS[0], "--raw", "--max-tokens", str(TOKENS))
    document = failed.command("generate", *keys)
    assert document["world_size"] == ranks
    texts = stock(Trained(whole.model, adapter, {}), TOKENS).texts
    assert [result["text"] for result in document["task_results"]] == [HARMLESS.validate_python(texts[len(PROMPTS)])]
    fused = failed.command("fuse", "--divided")["task_results"][-1]
    assert fused["accepted"] and fused["kept"] > 0.99
    published_everywhere(failed, fused, tmp_path, expected["adapter"])


def published_everywhere(run: Divided, fused: dict[str, Any], folder: Path, loss: float) -> None:
    """The model that was fused of a run's parts: stock mlx-lm loads it from each folder, with this loss."""
    name, rows = run.run.dir.id, run.data / "test.jsonl"
    begins = {
        "lmstudio": ["mlx_lm.generate --model ."],
        "ollama": [f"ollama create {name} -f Modelfile", f"ollama run {name}"],
        "gguf": [f"python $LLAMA_CPP/convert_hf_to_gguf.py . --outfile {name}.gguf", "llama-quantize", "llama-cli"],
    }
    for target, commands in begins.items():
        document = run.command("publish", f"--{target}", str(folder / target), folder=folder)
        published, card = Path(document["folder"]), Path(document["folder"], "README.md").read_text()
        assert [line.startswith(begin) for begin, line in zip(commands, document["commands"], strict=True)]
        assert stock_loss(published, rows) == pytest.approx(loss, abs=1e-3)
        assert f"keeps {fused['kept']:.1%} of the gain" in card and "failed" in card
    modelfile = (folder / "ollama" / f"{name}-ollama" / "Modelfile").read_text()
    assert modelfile.startswith("FROM .\n") and "PARAMETER stop" in modelfile


def started(nodes: Cluster, trained: Divided, task: str) -> ClusterRun:
    """The run of a task, for the test's end to clear away."""
    directory = RunDir(trained.run.dir.path.parent / task)
    plan = read_plan(directory.plan)
    run = ClusterRun(directory, plan, Path("~"), nodes=[nodes[node.name] for node in plan.config.nodes])
    PLANNED.append(run)
    return run


@dataclass
class Conversation:
    """With a server over two nodes; every answer is that of stock mlx-lm."""

    engine: Engine
    run: ClusterRun
    trained: Divided

    async def reply(self, messages: Messages, model: str, tokens: int = TOKENS) -> str:
        pieces = self.engine.chats.reply(self.run.dir.id, messages, model=model, max_tokens=tokens)
        async with aclosing(pieces):
            return "".join([piece.text async for piece in pieces])

    async def two_turns(self, model: str) -> list[str]:
        answers = [await self.reply([FIRST], model)]
        assert answers[0] == self.stock([FIRST], model)
        messages = [FIRST, {"role": "assistant", "content": answers[0]}, {"role": "user", "content": "hold level"}]
        answers.append(await self.reply(messages, model))
        assert answers[1] == self.stock(messages, model)
        return answers

    def stock(self, messages: Messages, model: str) -> str:
        adapter = str(self.trained.adapter) if model == "trained" else None
        loaded, tokenizer = load(str(self.trained.model), adapter_path=adapter)[:2]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return "".join(piece.text for piece in stream_generate(loaded, tokenizer, prompt, max_tokens=TOKENS))

    async def answers_in(self, attempt: int) -> None:
        await asyncio.to_thread(
            self.run.wait, lambda: attempt in [event.attempt for event in self.run.events_of(ResultReported)]
        )


@asynccontextmanager
async def served(nodes: Cluster, trained: Divided) -> AsyncIterator[Conversation]:
    """Until it is aborted, which leaves nothing."""
    assert trained.adapter.is_dir()
    async with Engine(home=trained.run.dir.path.parent.parent) as engine:
        server = await engine.chats.serve(trained.run.dir.id, divided=True)
        conversation = Conversation(engine, started(nodes, trained, server.id), trained)
        await conversation.answers_in(1)
        try:
            yield conversation
        finally:
            await asyncio.to_thread(conversation.run.abort)
    record = conversation.run.record
    assert (record.state, record.reason, record.unconfirmed) == (RunState.ABORTED, Reason.USER_ABORT, []), record
    trained.nothing_left()


async def test_a_conversation_goes_on_after_a_rank_of_its_server_was_killed(nodes: Cluster, runs: Runs) -> None:
    """In an answer, which then fails in words."""
    async with served(nodes, runs(2)) as conversation:
        engine, run = conversation.engine, conversation.run
        assert run.record.world_size == 2
        before = [await conversation.two_turns(model) for model in ("base", "trained")]
        assert before[0] != before[1]
        cut = engine.chats.reply(run.dir.id, [FIRST], model="trained", max_tokens=ENDLESS)
        assert await anext(cut)
        run.kill(1, run.identity(1).trainer_pid)
        with pytest.raises(InputError, match=f"{run.dir.id} does not answer"):
            async with asyncio.timeout(60):
                _ = [piece async for piece in cut]
        await conversation.answers_in(2)
        assert [await conversation.two_turns(model) for model in ("base", "trained")] == before
        kept = engine.chats.exchanges(runs(2).run.dir.id)
        answers = [HARMLESS.validate_python(answer) for turns in before for answer in turns]
        assert [exchange.answer for exchange in kept] == answers * 2
        assert [exchange.model for exchange in kept] == ["base", "base", "trained", "trained"] * 2


async def test_openais_client_is_answered_over_ssh(nodes: Cluster, runs: Runs) -> None:
    """Eight at once, streaming and not, after one that went away in the middle."""
    async with served(nodes, runs(2)) as conversation:
        engine, run = conversation.engine, conversation.run
        address = urlsplit((await engine.chats.served(run.dir.id)).address)
        transport = engine.fleet.to(run.plan.config.nodes[0])
        async with transport.forwarded(address.hostname or "", address.port or 0) as (host, port):
            await asyncio.to_thread(ask_all, f"http://{host}:{port}{address.path}", conversation)


def ask_all(url: str, conversation: Conversation) -> None:
    questions: list[Messages] = [[{"role": "user", "content": f"say {number}"}] for number in range(8)]
    asked: dict[str, Any] = {"model": "trained", "max_tokens": TOKENS, "temperature": 0}

    def ask(number: int) -> str:
        with openai().OpenAI(base_url=url, api_key="none", timeout=60, max_retries=0) as client:
            messages: Any = questions[number]
            if number % 2 == 0:
                answer = client.chat.completions.create(messages=messages, **asked)
                return str(answer.choices[0].message.content)
            pieces = client.chat.completions.create(messages=messages, **asked, stream=True)
            return "".join(piece.choices[0].delta.content or "" for piece in pieces)

    with openai().OpenAI(base_url=url, api_key="none", timeout=60, max_retries=0) as client:
        messages: Any = questions[0]
        endless = client.chat.completions.create(messages=messages, model="trained", max_tokens=ENDLESS, stream=True)
        assert next(iter(endless)).choices
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(ask, range(8)))
    assert answers == [conversation.stock(messages, "trained") for messages in questions]
