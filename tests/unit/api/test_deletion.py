"""A run is deleted here and on its nodes, or stays listed with the reason."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine.api import Engine
from engine.config.models import CheckpointConfig
from engine.errors import InputError
from engine.node.probes.storage import probe_run_folders
from engine.protocol.task import Task
from engine.run.events import SavedFiles, WeightsSaved
from engine.run.run_plan import copy_of
from engine.run.supervisor_process import take_lock
from engine.snapshots import Deletion
from engine.store.store import Store
from tests.unit.run.run_maker import MadeRun, make_run_config

DIGEST = "a" * 64


def made(home: Path, *, python: str | None = None) -> MadeRun:
    """A run of two ranks of this machine that has failed, with its files on its nodes and elsewhere."""
    config = make_run_config()
    config = config.model_copy(update={"checkpoint": CheckpointConfig(destination=str(home / "disk"))})
    if python is not None:
        nodes = tuple(node.model_copy(update={"python": python}) for node in config.nodes)
        config = config.model_copy(update={"nodes": nodes})
    run = MadeRun(home, config=config)
    run.state("preflight", "launching").attempt().state("running", "finishing")
    saved = SavedFiles(folder=str(home / "elsewhere"), iteration=3, files=(("adapters.safetensors", 5, DIGEST),))
    run.append(WeightsSaved(rank=0, node="node0", attempt=1, holds="adapter", saved=saved))
    run.state("failed", reason="rank_failed").close()
    for folder in (home / "node" / "runs" / run.id / "attempts", home / "disk" / run.id, home / "elsewhere"):
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(b"w" * 50_000)
    Store(home).put_run(run.plan.record())
    return run


def deletion(home: Path, run: str, *, go: bool, anyway: bool = False) -> Deletion:
    async def delete() -> Deletion:
        async with Engine(home=home) as engine:
            return await engine.runs.delete(run, go=go, anyway=anyway)

    return asyncio.run(delete())


def test_a_run_is_deleted_with_its_folders_and_what_is_not_its_own_is_kept(home: Path) -> None:
    run = made(home)
    asked = deletion(home, run.id, go=False)
    folders = tuple(sorted((str(home / "disk" / run.id), str(home / "node" / "runs" / run.id))))
    (nodes,) = asked.nodes
    assert (nodes.node, nodes.folders, nodes.problem, asked.deleted) == ("node0, node1", folders, None, False)
    assert 100_000 <= (nodes.bytes or 0) <= 200_000
    assert (asked.here.bytes or 0) > 1_000
    assert asked.kept == (("node0", str(home / "elsewhere")),)
    assert run.directory.path.exists() and all(map(os.path.exists, folders))
    done = deletion(home, run.id, go=True)
    assert (done.deleted, done.nodes) == (True, asked.nodes)
    left = sorted(path.name for path in home.rglob("*") if run.id in str(path))
    assert left == []
    assert (home / "elsewhere" / "weights").exists()
    assert Engine(home=home).runs.all() == []


def test_a_node_that_cannot_be_asked_keeps_the_run_in_the_list(home: Path) -> None:
    run = made(home, python="/no/python")
    done = deletion(home, run.id, go=True)
    assert not done.deleted
    assert "/no/python cannot be run on node0" in done.problems["node0, node1"]
    assert [kept.id for kept in Engine(home=home).runs.all()] == [run.id]
    gone = deletion(home, run.id, go=True, anyway=True)
    assert (gone.deleted, gone.problems) == (True, done.problems)
    assert Engine(home=home).runs.all() == []
    assert (home / "node" / "runs" / run.id).exists()


def test_a_run_that_has_not_ended_or_is_used_or_supervised_is_refused(home: Path) -> None:
    active = MadeRun(home, name="active").state("preflight", "launching").attempt().state("running").close()
    with pytest.raises(InputError, match="has not ended"):
        deletion(home, active.id, go=True)
    run = made(home)
    job = make_run_config().job.model_copy(update={"task": Task("serve", run.id)})
    server = MadeRun(home, name="server", config=make_run_config().model_copy(update={"job": job}))
    server.state("preflight", "launching").attempt().state("running")
    with pytest.raises(InputError, match=f"{server.id} uses it"):
        deletion(home, run.id, go=True)
    server.state("finishing", "aborted", reason="user_abort").close()
    held = take_lock(run.directory)
    assert held is not None
    with pytest.raises(InputError, match="its supervisor is still at work"):
        deletion(home, run.id, go=True)
    os.close(held)
    assert run.directory.path.exists()


@pytest.mark.parametrize("key", ["resume_adapter_file", "model"])
def test_a_run_whose_files_an_active_one_begins_with_is_refused(home: Path, key: str) -> None:
    run, config = made(home), make_run_config()
    path = str(home / "node" / "runs" / run.id / "weights")
    if key == "model":
        nodes = tuple(node.model_copy(update={"model": path}) for node in config.nodes)
        config = config.model_copy(update={"nodes": nodes})
    else:
        job = config.job.model_copy(update={"mlx_lm": {**config.job.mlx_lm, key: path}})
        config = config.model_copy(update={"job": job})
    other = MadeRun(home, name="other", config=config).state("preflight", "launching").attempt().state("running")
    with pytest.raises(InputError, match=f"{other.id} uses it"):
        deletion(home, run.id, go=True)
    for file in (other.directory.plan, copy_of(other.directory.plan)):
        file.write_text("{")
    held = take_lock(other.directory)
    assert held is not None
    with pytest.raises(InputError, match=f"{other.id} may use it: "):
        deletion(home, run.id, go=True)
    os.close(held)
    other.state("finishing", "aborted", reason="user_abort").close()
    assert deletion(home, run.id, go=True).deleted


@pytest.mark.parametrize("folder", ["/", "relative/run", "/tmp/other", "{tmp}/link/run"])
def test_a_node_removes_nothing_but_folders_of_the_run(tmp_path: Path, folder: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "run").symlink_to(tmp_path / "run")
    asked = f'{{"run": "run", "nonce": "n0", "remove": true, "folders": ["{folder.format(tmp=tmp_path)}"]}}'
    assert "is no folder of the run" in probe_run_folders(asked)["problem"]
    assert (tmp_path / "run").exists()


def test_tags_are_identifiers_and_a_note_is_a_line(home: Path) -> None:
    run, runs = made(home), Engine(home=home).runs
    assert runs.annotate(run.id, add=["night", "base"], note="a\nb\x1b[31m").tags == ["base", "night"]
    annotated = runs.annotate(run.id, remove=["base", "none"])
    assert (annotated.tags, annotated.note) == (["night"], "a b")
    with pytest.raises(InputError, match="not a valid name"):
        runs.annotate(run.id, add=["a b"])
    assert [run.note for run in runs.select("tag:night")] == ["a b"]
    assert runs.annotate(run.id, note="").note is None


def test_of_two_tags_at_the_same_time_none_is_lost(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, both, change = made(home), threading.Barrier(2), Store._change

    def changed(store: Store, action: Any) -> None:
        both.wait(30)
        change(store, action)

    monkeypatch.setattr(Store, "_change", changed)
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda tag: Engine(home=home).runs.annotate(run.id, add=[tag]), ["night", "base"]))
    assert Engine(home=home).runs.listed(run.id).tags == ["base", "night"]


@pytest.mark.parametrize("listed", [True, False])
def test_a_run_without_a_plan_that_can_be_read_is_listed_and_deleted_by_its_journal(home: Path, listed: bool) -> None:
    run = made(home)
    for file in (run.directory.plan, copy_of(run.directory.plan)):
        file.write_text("{")
    if not listed:
        Store(home).delete_run(run.id)
    (kept,) = Engine(home=home).runs.all()
    assert (kept.id, kept.name, kept.state) == (run.id, "job", "lost" if listed else "failed")
    done = deletion(home, run.id, go=True)
    ((nodes,), folder) = done.nodes, home / "node" / "runs" / run.id
    assert (nodes.node, nodes.folders, nodes.problem, done.deleted) == ("node0, node1", (str(folder),), None, True)
    assert not folder.exists() and Engine(home=home).runs.all() == []


def test_a_run_of_which_neither_plan_nor_journal_can_be_read_is_deleted_here(home: Path) -> None:
    run = made(home)
    for file in (run.directory.plan, copy_of(run.directory.plan), run.directory.journal):
        file.write_text("{")
    done = deletion(home, run.id, go=True)
    assert (done.deleted, list(done.problems)) == (False, ["its nodes"])
    assert "the plan is not valid" in done.problems["its nodes"]
    assert deletion(home, run.id, go=True, anyway=True).deleted
    assert Engine(home=home).runs.all() == [] and not run.directory.path.exists()
