"""Whoever is to be told of a run is told once, whatever is killed meanwhile."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from engine.config.models import ClusterConfig, Config, JobConfig, NotifyConfig, WebhookConfig
from engine.models import RunState
from engine.node import processes
from engine.run.notifications import NOTIFIER
from engine.run.supervisor_process import adopt_orphans
from engine.run.tracker import VARIABLE, mark
from tests.faults.local_runs import Run, kill_and_await, ring, start_config, two_nodes
from tests.unit.notify.receiver import Receiver, receiver

pytestmark = [pytest.mark.busy, pytest.mark.slow]


def notifiers(run: Run) -> list[int]:
    return [process.pid for process in processes.with_variables({VARIABLE: mark(run.dir, NOTIFIER)})]


def start_ring(home: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch, server: Receiver) -> Run:
    """The address is in the launch's environment alone."""
    monkeypatch.setenv("WHERE", server.url)
    workdir.mkdir()
    (workdir / "script.py").write_text(ring())
    notify = NotifyConfig(webhooks=(WebhookConfig(url="env:WHERE"),))
    job = JobConfig(name="night", command=("python", "script.py"))
    nodes = two_nodes(workdir)
    run = start_config(home, Config(cluster=ClusterConfig(), nodes=nodes, job=job, notify=notify))
    run.await_output("step 2")
    run.wait(run.dir.end_untold.exists)
    monkeypatch.delenv("WHERE")
    return run


def titles(server: Receiver) -> list[str]:
    return [json.loads(body)["title"] for body in server.bodies]


def gone(run: Run) -> bool:
    return not processes.exists(run.supervisor) and notifiers(run) == []


def test_the_end_is_told_once_over_the_deaths_of_supervisor_and_notifier(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiver() as server:
        run = start_ring(home, tmp_path / "work", monkeypatch, server)
        kill_and_await(run.supervisor)
        assert adopt_orphans(home) == [run.dir.id]
        run.wait(lambda: len(notifiers(run)) == 1)
        os.kill(notifiers(run)[0], signal.SIGKILL)
        run.finish()
        assert run.ended().state is RunState.SUCCEEDED, run.troubles()
        run.wait(lambda: gone(run), after_end=True)
        assert titles(server) == ["night has succeeded"]
        assert not (run.dir.end_untold.exists() or run.dir.secrets.exists())
        assert adopt_orphans(home) == []


def test_an_end_that_nobody_could_tell_any_more_is_told_by_the_next_command(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiver() as server:
        run = start_ring(home, tmp_path / "work", monkeypatch, server)
        # It gets no processor from here on.
        run.wait(lambda: len(notifiers(run)) == 1)
        (notifier,) = notifiers(run)
        os.kill(notifier, signal.SIGSTOP)
        run.finish()
        assert run.ended().state is RunState.SUCCEEDED, run.troubles()
        kill_and_await(run.supervisor)
        kill_and_await(notifier)
        assert titles(server) == []
        assert adopt_orphans(home) == [run.dir.id]
        run.wait(lambda: not run.dir.end_untold.exists() and gone(run), after_end=True)
        assert titles(server) == ["night has succeeded"]
        assert not run.dir.secrets.exists()
        assert adopt_orphans(home) == []
