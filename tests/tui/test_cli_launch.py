"""The commands that start and stop runs: real ranks under a real mlx.launch, started, followed, interrupted and
stopped from a shell.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.api import Engine
from engine.models import RunState
from engine.node.processes import with_nonce
from engine.plan.document import TrainingPlan
from engine.run.history import fold
from engine.run.journal import read_journal
from tests.demo_copies import demo_below
from tests.tui.commands import FLIGHTDECK, Done, accepting, environment, flightdeck, shell

ITERATIONS = 3
QUICK = ("--skip", "gradient_layer", "--skip", "versions_match")
"""The two checks that take seconds have been run once, by `ended_demo`."""


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One home for this module."""
    return demo_below(tmp_path_factory.mktemp("ended_demo") / "home")


@pytest.fixture(scope="module")
def ended_demo(shared_home: Path) -> Done:
    """A demo that has ended."""
    return shell(shared_home, "demo", "--json", "--ranks", "2", "--iters", str(ITERATIONS), timeout_s=180)


@pytest.fixture
def running(shared_home: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a command in a group of its own, and ends its run afterwards whatever the test did."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [FLIGHTDECK, *accepting(arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(shared_home),
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    flightdeck(shared_home, "abort", "last", "--now")


def id_of(ended_demo: Done) -> str:
    return str(json.loads(ended_demo.out)["id"])


def wait_for(process: subprocess.Popen[str], *starts: str) -> list[str]:
    """Read lines until one starts with one of `starts`; all that were read."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if line.startswith(starts):
            return lines
    raise AssertionError(f"it ended before {starts}: {lines}")


def nonce_of(home: Path, run: str) -> str:
    return fold(read_journal(Engine(home).runs.find(run).journal)).nonce


def test_a_headless_demo_succeeds_with_one_document_on_stdout(ended_demo: Done) -> None:
    assert ended_demo.code == 0, ended_demo.err
    record: dict[str, Any] = json.loads(ended_demo.out)
    assert (record["state"], record["reason"], record["world_size"]) == ("succeeded", "completed", 2)
    assert (record["iteration"], record["iterations"]) == (ITERATIONS, ITERATIONS)
    assert record["tokens_per_second"] > 0
    for word in ("pass  versions_match", "pass  gradient_layer", "running", f"iteration {ITERATIONS}/{ITERATIONS}"):
        assert word in ended_demo.err
    ended = [line for line in ended_demo.err.splitlines() if line.startswith("succeeded: completed")]
    head, *rows, sentence, following = ended_demo.err.splitlines()[-5:]
    assert len(ended) == 1 and head.split() == ["WEIGHTS", "SPLIT", "LOSS", "PERPLEXITY", "TOKENS", "TOOK"]
    assert [row.split()[:2] for row in rows] == [["base", "test"], ["adapter", "test"]]
    before, after = (float(row.split()[2]) for row in rows)
    assert before > after
    assert re.fullmatch(r'"tower to heron: land" goes on as ".*" before, as ".*" after', sentence)
    assert following == "ask it: flightdeck chat demo   make one model of it: flightdeck fuse demo"


def test_its_answers_are_shown(shared_home: Path, ended_demo: Done) -> None:
    shown = flightdeck(shared_home, "show", id_of(ended_demo)).out
    assert all(f"  {label:<10} " in shown for label in ("prompt", "base", f"at {ITERATIONS}", "answers"))
    samples = json.loads(flightdeck(shared_home, "show", id_of(ended_demo), "--json").out)["samples"]
    assert [(sample["iteration"], sample["prompt"]) for sample in samples] == [
        *((0, "tower to heron: land"), (ITERATIONS, "tower to heron: land")),
    ]


def test_its_loss_falls(shared_home: Path, ended_demo: Done) -> None:
    losses = [
        row["train_loss"]
        for row in json.loads(flightdeck(shared_home, "metrics", id_of(ended_demo), "--json").out)
        if "train_loss" in row
    ]
    assert len(losses) == ITERATIONS
    assert losses[-1] < losses[0]


def test_its_weights_lie_where_it_is_shown_and_can_be_used(shared_home: Path, ended_demo: Done) -> None:
    shown = flightdeck(shared_home, "show", id_of(ended_demo)).out
    (file,) = [Path(word) for word in shown.split() if word.endswith("adapters.safetensors")]
    assert file.is_file() and f"--adapter-path {file.parent}" in " ".join(shown.split())
    assert json.loads(flightdeck(shared_home, "show", id_of(ended_demo), "--json").out)["trained"] is not None


def test_its_training_plan_lies_beside_it(shared_home: Path, ended_demo: Done) -> None:
    run = Engine(shared_home).runs.find(id_of(ended_demo))
    plan = TrainingPlan.model_validate_json(run.training_plan.read_bytes())
    assert (plan.version, plan.strategy.world_size, plan.data.examples, plan.refusals) == ("2.0.0", 2, 512, ())


def test_no_line_is_printed_twice(ended_demo: Done) -> None:
    iterations = [line for line in ended_demo.err.splitlines() if line.startswith("iteration") and "tok/s" in line]
    assert len(iterations) == ITERATIONS


def test_its_logs_are_there_by_rank_merged_and_raw(shared_home: Path, ended_demo: Done) -> None:
    run = id_of(ended_demo)
    directory = Engine(shared_home).runs.find(run)
    merged = flightdeck(shared_home, "logs", run).out.splitlines()
    single = flightdeck(shared_home, "logs", run, "--rank", "1").out.splitlines()
    assert [line.removeprefix("1 | ") for line in merged if line.startswith("1 | ")] == single
    assert flightdeck(shared_home, "logs", run, "--rank", "1", "-n", "2").out.splitlines() == single[-2:]
    raw = flightdeck(shared_home, "logs", run, "--rank", "0", "--raw").out
    assert raw == directory.log(0).read_text()
    documents = json.loads(flightdeck(shared_home, "logs", run, "--rank", "1", "--json").out)
    assert [document["text"] for document in documents] == single
    streamed = flightdeck(shared_home, "logs", run, "--rank", "1", "--json", "--follow").out
    assert json.loads(streamed) == documents and len(streamed.splitlines()) == len(documents) + 2
    assert json.loads(flightdeck(shared_home, "logs", run, "--rank", "1", "--json", "-n", "0").out) == []


@pytest.mark.slow
def test_ctrl_c_in_a_headless_demo_stops_the_run_and_proves_it(
    shared_home: Path, running: Callable[..., subprocess.Popen[str]]
) -> None:
    process = running("demo", "--headless", "--ranks", "1", "--iters", "100000", *QUICK)
    wait_for(process, "iteration")
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "interrupted: stopping the run" in output
    assert "aborted: on request" in output
    assert Engine(shared_home).runs.record("last").state is RunState.ABORTED
    assert with_nonce(nonce_of(shared_home, "last")) == []


def test_ctrl_c_while_a_demo_is_being_made_leaves_no_run_behind(
    shared_home: Path, running: Callable[..., subprocess.Popen[str]]
) -> None:
    supervised_before = set(shared_home.glob("runs/*/supervisor.json"))
    process = running("demo", "--headless", "--ranks", "1", "--iters", "100000", *QUICK)
    wait_for(process, "demo: making")
    # A supervisor that has just been forked is still in the command's group, and would be interrupted, too.
    while set(shared_home.glob("runs/*/supervisor.json")) == supervised_before:
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert (process.returncode, "aborted: on request" in output) == (130, True), output
    assert with_nonce(nonce_of(shared_home, "last")) == []


def test_ctrl_c_while_following_a_launch_leaves_the_run_alone_until_it_is_aborted(
    shared_home: Path, running: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    script = tmp_path / "mine.py"
    script.write_text("import time\nfor n in range(10_000):\n    print('tick', n, flush=True)\n    time.sleep(0.05)\n")
    file = write_config(tmp_path, command=[sys.executable, str(script)])
    process = running("launch", "-c", str(file), "--follow", *QUICK)
    wait_for(process, "running")
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    run = Engine(shared_home).runs.find("last").id
    assert f"flightdeck abort {run}" in output
    assert Engine(shared_home).runs.record(run).state is RunState.RUNNING
    aborted = flightdeck(shared_home, "abort", run)
    assert (aborted.code, "nothing is left" in aborted.out) == (0, True), aborted
    assert Engine(shared_home).runs.record(run).state is RunState.ABORTED
    assert with_nonce(nonce_of(shared_home, run)) == []


@pytest.mark.slow
def test_a_run_whose_supervisor_was_killed_is_aborted_all_the_same(
    shared_home: Path, running: Callable[..., subprocess.Popen[str]]
) -> None:
    process = running("demo", "--headless", "--ranks", "1", "--iters", "100000", *QUICK)
    wait_for(process, "running")
    directory = Engine(shared_home).runs.find("last")
    process.kill()
    os.kill(json.loads(directory.supervisor.read_text())["pid"], signal.SIGKILL)
    aborted = flightdeck(shared_home, "abort", directory.id)
    assert aborted.code == 0, aborted
    assert Engine(shared_home).runs.record(directory.id).state is RunState.ABORTED
    assert with_nonce(nonce_of(shared_home, directory.id)) == []


def test_a_launch_that_preflight_blocks_exits_1_with_the_fix_and_fixed_its_logs_can_be_followed(
    shared_home: Path, running: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    file = write_config(tmp_path, command=["./run.sh"])
    script = tmp_path / "run.sh"
    script.write_text("#!/bin/sh\nfor n in $(seq 0 39); do echo tick $n; sleep 0.05; done\n")
    blocked = shell(shared_home, "launch", "-c", str(file), *QUICK)
    assert blocked.code == 1
    assert "fail  program_present" in blocked.out
    assert f"fix: chmod +x {script}" in blocked.out
    assert "failed: preflight failed" in blocked.out
    script.chmod(0o755)
    launched = running("launch", "-c", str(file), *QUICK, "--follow")
    wait_for(launched, "running")
    follower = running("logs", "last", "--rank", "0", "-f")
    output, _ = follower.communicate(timeout=120)
    assert follower.returncode == 0
    followed, _ = launched.communicate(timeout=60)
    assert (launched.returncode, Engine(shared_home).runs.record("last").state) == (0, RunState.SUCCEEDED), followed
    assert output == flightdeck(shared_home, "logs", "last", "--rank", "0").out
    assert "tick 39" in output
    assert "0 | tick 39" in flightdeck(shared_home, "logs").out
    audit = [json.loads(line) for line in (shared_home / "audit.jsonl").read_text().splitlines()]
    assert ("preflight_override", "gradient_layer") in {
        (entry["event_type"], entry["context"].get("check")) for entry in audit
    }


def test_a_rank_that_exits_3_fails_the_run_with_rank_and_code(shared_home: Path, tmp_path: Path) -> None:
    script = tmp_path / "three.py"
    script.write_text(THREE)
    file = write_config(tmp_path, command=["python", str(script)])
    done = shell(shared_home, "launch", "-c", str(file), *QUICK, "--follow", "--json")
    record = json.loads(done.out)
    assert (done.code, record["state"], record["reason"]) == (1, "failed", "rank_failed")
    assert (record["rank"], record["host"], record["exit_code"]) == (1, "b", 3)
    shown = flightdeck(shared_home, "show").out
    assert "    | rank 1 gives up" in shown
    assert "failed: rank failed, rank 1 on b (exit 3)" in shown


THREE = """
import os, sys, time
if os.environ["MLX_RANK"] == "1":
    print("rank 1 gives up", flush=True)
    sys.exit(3)
time.sleep(60)
"""


def write_config(directory: Path, *, command: list[str]) -> Path:
    file = directory / "flightdeck.toml"
    nodes = "".join(
        f'[[node]]\nname = "{name}"\npython = "{sys.executable}"\nworkdir = "{directory}"\n' for name in ("a", "b")
    )
    file.write_text(f'[cluster]\nname = "here"\n\n{nodes}\n[job]\nname = "mine"\ncommand = {json.dumps(command)}\n')
    return file
