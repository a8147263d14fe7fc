"""A server of a run's weights under its supervisor: lost and hung ranks, ports that are taken, and its end."""

from __future__ import annotations

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.api.tasks import _with_task
from engine.config.models import Config, RecoveryConfig
from engine.demo import demo_config
from engine.models import Reason, RunState
from engine.protocol.task import Task
from engine.run.events import HangDetected, ResultReported
from engine.run.watch import RunWatch
from engine.task_result import Served
from tests.demo_copies import demo_below
from tests.faults.local_runs import ABORT_LIMIT_S, Run, start_config
from tests.faults.test_recovery import signal_rank
from tests.faults.test_training import with_keys
from tests.machine import free_port
from tests.openai_client import openai

pytestmark = [pytest.mark.busy, pytest.mark.slow]

RECOVERY = RecoveryConfig(stop_grace_s=2.5, term_grace_s=0.5, max_restarts=4, hang_s=5.0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path]:
    """The demo's configuration, and what a full fine-tuning could have saved."""
    home = tmp_path_factory.mktemp("demo")
    config = demo_config(demo_below(home), ranks=2, iters=1)
    model = Path(str(config.job.model)) / "model.safetensors"
    return with_keys(config, max_seq_length=64).model_copy(update={"recovery": RECOVERY}), model


def start(home: Path, trained: tuple[Config, Path], ranks: int, port: int, host: str = "127.0.0.1") -> Run:
    config, weights = trained
    options = {"name": "demo", "host": host, "port": port, "max_tokens": 64}
    task = Task("serve", "source", str(weights), None, options)
    return start_config(home, _with_task(config, task, config.nodes[0].name, divided=ranks > 1))


def ask(port: int, tokens: int = 8) -> str:
    with openai().OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=30, max_retries=0) as client:
        answer = client.completions.create(model="demo", prompt="tower", max_tokens=tokens, temperature=0)
        return str(answer.choices[0].text)


def await_answers(run: Run, attempt: int) -> None:
    run.wait(lambda: attempt in [event.attempt for event in run.events_of(ResultReported)])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_whose_ranks_are_killed_answers_again_where_it_did(
    home: Path, trained: tuple[Config, Path], ranks: int
) -> None:
    """As often as [recovery] lets a training restart, although it makes no step."""
    port = free_port()
    run = start(home, trained, ranks, port)
    await_answers(run, 1)
    first = ask(port)
    victims = [0, ranks - 1, 0, ranks - 1]
    for attempt, victim in enumerate(victims, 1):
        signal_rank(run, victim, signal.SIGKILL, attempt)
        await_answers(run, attempt + 1)
        assert ask(port) == first
    snapshot = RunWatch(run.dir).poll()
    assert snapshot.task_results == (Served(address=f"http://127.0.0.1:{port}/v1", model="demo", token=False),)
    run.wait(lambda: (served := RunWatch(run.dir).poll().ranks[0].served) is not None and served.requests == 1)
    took = run.abort()
    assert (run.record.state, run.record.attempts) == (RunState.ABORTED, 5) and took < ABORT_LIMIT_S


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_hangs_is_noticed_and_the_server_restarted(
    home: Path, trained: tuple[Config, Path], victim: int
) -> None:
    port = free_port()
    run = start(home, trained, 2, port)
    await_answers(run, 1)
    began = time.monotonic()
    signal_rank(run, victim, signal.SIGSTOP)
    run.wait(lambda: bool(run.events_of(HangDetected)))
    assert time.monotonic() - began < 60, "30 s, and what the last report was early"
    (hang,) = run.events_of(HangDetected)
    assert hang.hang.doing == "serving"
    await_answers(run, 2)
    assert ask(port)
    run.abort()


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_abort_with_requests_under_way_leaves_nothing(home: Path, trained: tuple[Config, Path], ranks: int) -> None:
    port = free_port()
    run = start(home, trained, ranks, port)
    await_answers(run, 1)
    answers = list[str]()

    def ask_on(_: int) -> None:
        while True:
            answers.append(ask(port, 1_000_000))

    with ThreadPoolExecutor(4) as clients:
        asking = [clients.submit(ask_on, number) for number in range(4)]
        run.wait(lambda: len(answers) > 8)
        took = run.abort()
        assert all(isinstance(one.exception(30), openai().APIError) for one in asking)
    record = run.record
    assert (record.state, record.reason, record.unconfirmed) == (RunState.ABORTED, Reason.USER_ABORT, []), record
    assert took < 20, took


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_port_that_is_taken_is_said_and_not_tried_again(home: Path, trained: tuple[Config, Path], ranks: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = start(home, trained, ranks, port)
        record = run.ended()
    assert (record.state, record.attempts) == (RunState.FAILED, 1), run.troubles()
    assert f"127.0.0.1:{port} cannot be listened on: Address already in use" in (record.cause or "")


def cpu_s(pid: int) -> float:
    """The processor time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_the_ranks_of_a_divided_server_sleep_while_nobody_asks(home: Path, trained: tuple[Config, Path]) -> None:
    run = start(home, trained, 2, free_port())
    await_answers(run, 1)
    pids = [run.identity(rank).trainer_pid for rank in (0, 1)]
    before = [cpu_s(pid) for pid in pids]
    time.sleep(8)
    shares = [(cpu_s(pid) - spent) / 8 for pid, spent in zip(pids, before, strict=True)]
    print("shares of a core:", shares)
    assert max(shares) < 0.25, shares
    run.abort()
