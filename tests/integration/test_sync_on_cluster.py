"""`flightdeck sync` over real nodes, by rsync, and the checks of files: what is printed fixes what was broken."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.api import Engine
from engine.checks import checkpoint, consistency, model_files, sync
from engine.cluster.transport.fleet import Fleet
from engine.config.models import Config
from engine.models import CheckStatus, SyncReport
from tests.cluster.cluster import Cluster
from tests.cluster.node import Node
from tests.integration.checks import as_user, config_of, furnish, run_check_on

WORKDIR = "~/my project"
"""A folder whose name a shell would take for two."""


@pytest.fixture
def project(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    """A project on this machine, which is no node, and nodes that have nothing of it yet."""
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.setenv("FLIGHTDECK_HOME", str(tmp_path / "state with space"))
    monkeypatch.setenv("FLIGHTDECK_SSH_CONFIG", str(cluster.ssh_config))
    folder = tmp_path / "me" / "project"
    for name, text in (("train.py", "print(1)\n"), ("src/it's.py", "x = 1\n"), (".env", "A=1\n")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name in (".git/index", "src/__pycache__/a.pyc", "env/pyvenv.cfg"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("of this machine")
    (folder / "latest").symlink_to("src")
    config = config_of(cluster)
    nodes = tuple(node.model_copy(update={"workdir": WORKDIR}) for node in config.nodes)
    yield config.model_copy(update={"nodes": nodes, "file": folder / "flightdeck.toml"})
    for node in cluster.nodes:
        shell(node, 'chmod -R u+rwx "$HOME/my project"; rm -rf "$HOME/my project" "$HOME/saved" "$HOME/few"')
        shell(node, 'rm -f "$HOME"/models/tiny/vocab.json*')


@pytest.fixture
def two_nodes(project: Config) -> Config:
    """The project on the first two nodes alone."""
    return project.model_copy(update={"nodes": project.nodes[:2]})


@pytest.fixture
def three_nodes(project: Config) -> Config:
    """The project on the first three nodes alone: one of them can differ from most."""
    return project.model_copy(update={"nodes": project.nodes[:3]})


def shell(node: Node, line: str) -> str:
    return node.run(["/bin/sh", "-c", line]).stdout


async def synced(config: Config, *, dry_run: bool = False) -> SyncReport:
    async with Engine() as engine:
        return await engine.checks.sync(config, dry_run=dry_run)


async def test_rsync_brings_the_project_to_every_node_and_the_trees_prove_it(cluster: Cluster, project: Config) -> None:
    before = await synced(project, dry_run=True)
    assert not before.synced
    assert all(node.problem is not None and "is not there" in node.problem for node in before.nodes.values())
    after = await synced(project)
    assert after.synced, after
    assert set(after.nodes) == {node.name for node in cluster.nodes}
    for node in cluster.nodes:
        assert shell(node, 'cd "$HOME/my project" && ls -A . src').split() == [
            ".:", ".env", "latest", "src", "train.py", "src:", "it's.py",
        ]  # fmt: skip
    audit = [
        json.loads(line) for line in (Path(os.environ["FLIGHTDECK_HOME"]) / "audit.jsonl").read_text().splitlines()
    ]
    assert [(entry["event_type"], entry["status"]) for entry in audit] == [("sync", "failed"), ("sync", "success")]


async def test_a_change_that_size_and_time_hide_is_found_and_copied(cluster: Cluster, two_nodes: Config) -> None:
    await synced(two_nodes)
    second = cluster.nodes[1]
    hidden = (
        'cd "$HOME/my project" && touch -r train.py when && printf "print(2)\\n" > train.py && touch -r when train.py'
    )
    shell(second, hidden + " && mv when own.log")
    found = await synced(two_nodes, dry_run=True)
    assert [name for name, node in found.nodes.items() if not node.same] == [second.name]
    assert (found.nodes[second.name].differing, found.nodes[second.name].own_count) == (("train.py",), 1)
    assert (await synced(two_nodes)).synced
    assert shell(second, 'cat "$HOME/my project/train.py"; ls "$HOME/my project/own.log"').startswith("print(1)\n/")


async def test_a_node_without_rsync_is_named_with_what_installs_it(cluster: Cluster, three_nodes: Config) -> None:
    third = cluster.nodes[2]
    shell(third, 'mkdir -p "$HOME/few" && ln -s "$(command -v mkdir)" "$HOME/few/mkdir"')
    third.noisy_bashrc('PATH="$HOME/few"\n')
    report = await synced(three_nodes)
    assert [name for name, node in report.nodes.items() if not node.same] == [third.name]
    assert f"there is no rsync on {third.name} (" in (report.nodes[third.name].problem or "")


@pytest.mark.slow
async def test_a_file_where_a_folder_belongs_stops_the_sync_of_its_node_alone(
    cluster: Cluster, project: Config, fleet: Fleet
) -> None:
    second, last = cluster.nodes[1], cluster.nodes[3]
    shell(second, 'mkdir "$HOME/my project" && echo precious > "$HOME/my project/src"')
    shell(last, 'mkdir -p "$HOME/my project/elsewhere" && ln -s elsewhere "$HOME/my project/src"')
    report = await synced(project)
    for node in (second, last):
        assert report.nodes[node.name].problem == (
            "src is a folder here, and a file or link there: move it out of the way first"
        )
    assert [name for name, node in report.nodes.items() if node.same] == [cluster.nodes[0].name, cluster.nodes[2].name]
    assert shell(second, 'cd "$HOME/my project" && ls -A && cat src') == "src\nprecious\n"
    assert shell(last, 'cd "$HOME/my project" && ls -A && readlink src') == "elsewhere\nsrc\nelsewhere\n"
    checked = await run_check_on(sync.run, project, fleet)
    assert "src/it's.py" in checked.evidence[second.name]
    assert second.name not in checked.fixes and checked.fix_command is None, "a copy would put the folder in its place"
    shell(second, 'mv "$HOME/my project/src" "$HOME/my project/own.txt"')
    shell(last, 'rm "$HOME/my project/src"')
    assert (await synced(project)).synced


@pytest.mark.parametrize("named", ["~", pytest.param("absolute", marks=pytest.mark.slow)])
async def test_nothing_is_copied_into_a_bare_home(cluster: Cluster, two_nodes: Config, named: str) -> None:
    first = cluster.nodes[0]
    home = first.home if named == "absolute" else named
    nodes = (two_nodes.nodes[0].model_copy(update={"workdir": home}), *two_nodes.nodes[1:])
    report = await synced(two_nodes.model_copy(update={"nodes": nodes}))
    assert [name for name, node in report.nodes.items() if not node.same] == [first.name]
    assert "its workdir is a bare home" in (report.nodes[first.name].problem or "")
    assert "train.py" not in shell(first, 'ls "$HOME"')


@pytest.mark.slow
async def test_a_sync_script_is_permitted_by_the_fix_and_its_lies_are_fixed(
    cluster: Cluster, project: Config, fleet: Fleet
) -> None:
    await synced(project)
    script = Path(os.environ["HOME"]) / "Dev" / "sync-dev.sh"
    script.parent.mkdir(parents=True)
    script.write_text("#!/bin/sh\necho done\n")
    refused = await run_check_on(sync.run, project, fleet)
    assert (refused.status, refused.summary) == (CheckStatus.FAIL, f"{script} may not be executed")
    await paste(cluster, refused.fix_command)
    assert (await run_check_on(sync.run, project, fleet)).status is CheckStatus.PASS
    second, third, last = cluster.nodes[1:4]
    shell(second, 'echo more >> "$HOME/my project/train.py"')
    shell(third, 'rm "$HOME/my project/.env" "$HOME/my project/latest"')
    shell(last, 'rm -r "$HOME/my project"')
    lied = await run_check_on(sync.run, project, fleet)
    assert (lied.status, lied.blames) == (CheckStatus.FAIL, (1, second.name))
    for message in ("1 file on", "differs from", ": train.py", "is missing 2 files", ": .env, latest", "is not there"):
        assert message in lied.summary
    await paste(cluster, lied.fix_command)
    assert (await run_check_on(sync.run, project, fleet)).status is CheckStatus.PASS


async def test_a_file_that_cannot_be_read_is_named(cluster: Cluster, two_nodes: Config, fleet: Fleet) -> None:
    await synced(two_nodes)
    shell(cluster.nodes[1], 'chmod 0 "$HOME/my project/train.py"; chmod 0 "$HOME/my project/src"')
    result = await run_check_on(sync.run, two_nodes, fleet)
    assert "cannot be read: Permission denied" in result.evidence[cluster.nodes[1].name]
    await paste(cluster, result.fix_command)
    checked_again = await run_check_on(sync.run, two_nodes, fleet)
    assert "train.py cannot be read" in checked_again.evidence[cluster.nodes[1].name], "one after the other"
    await paste(cluster, checked_again.fix_command)
    assert "the same" in (await run_check_on(sync.run, two_nodes, fleet)).evidence[cluster.nodes[1].name]


@pytest.mark.slow
async def test_another_script_and_another_tokenizer_are_fixed_by_the_fix(
    cluster: Cluster, project: Config, fleet: Fleet
) -> None:
    await synced(project)
    command = project.model_copy(update={"job": project.job.model_copy(update={"command": ("python", "train.py")})})
    third = cluster.nodes[2]
    shell(third, 'echo more >> "$HOME/my project/train.py"')
    for node in cluster.nodes:
        furnish(node)
    third.write("~/models/tiny/tokenizer.json", '{"other": 1}')
    for config, name in ((command, "train.py"), (project, "model tokenizer.json")):
        result = await run_check_on(consistency.run, config, fleet)
        assert (result.status, result.blames) == (CheckStatus.FAIL, (2, third.name)), result
        assert f"{third.name}: {name} is " in result.summary
        await paste(cluster, result.fix_command)
        assert (await run_check_on(consistency.run, config, fleet)).status is CheckStatus.PASS


async def test_a_file_too_many_and_a_program_that_is_missing_are_fixed_by_the_fix(
    cluster: Cluster, three_nodes: Config, fleet: Fleet
) -> None:
    program = Path(os.environ["HOME"]) / "project" / "run it.sh"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    await synced(three_nodes)
    command = three_nodes.model_copy(
        update={"job": three_nodes.job.model_copy(update={"command": ("./run it.sh", "own.yaml")})}
    )
    third = cluster.nodes[2]
    shell(third, 'rm "$HOME/my project/run it.sh"; echo 1 > "$HOME/my project/own.yaml"')
    for node in cluster.nodes[:3]:
        furnish(node)
    third.write("~/models/tiny/vocab.json", "{}")
    cases = (
        (consistency.run, command, "own.yaml"),
        (consistency.run, three_nodes, "model vocab.json"),
    )
    for check, config, name in cases:
        result = await run_check_on(check, config, fleet)
        assert (result.status, result.blames) == (CheckStatus.FAIL, (2, third.name)), result
        assert f"{name} is " in result.summary and "missing on most nodes" in result.summary
        await paste(cluster, result.fix_command)
        assert (await run_check_on(check, config, fleet)).status is CheckStatus.PASS
    assert shell(third, 'cd "$HOME/my project" && test -x "run it.sh" && cat own.yaml.aside-*') == "1\n"
    shell(third, "mv ~/models/tiny/vocab.json.aside-* ~/models/tiny/vocab.json")
    another = await run_check_on(model_files.run, three_nodes, fleet)
    assert (another.status, another.blames) == (CheckStatus.FAIL, (2, third.name)), another
    await paste(cluster, another.fix_command)
    assert (await run_check_on(model_files.run, three_nodes, fleet)).status is CheckStatus.PASS
    assert shell(third, "cat ~/models/tiny/vocab.json.aside-*") == "{}"


async def test_a_place_that_cannot_be_written_or_entered_is_fixed_by_the_fix(
    isolated_cluster: Cluster, project: Config, fleet: Fleet
) -> None:
    for node in isolated_cluster.nodes:
        furnish(node)
        shell(node, 'mkdir -p "$HOME/my project"')
    first, second, third, fourth = isolated_cluster.nodes[:4]
    shell(first, 'mkdir -p "$HOME/saved/adapters" && chmod 555 "$HOME/saved/adapters"')
    shell(second, 'mkdir -p "$HOME/saved" && ln -s "$HOME/saved/disk" "$HOME/saved/adapters"')
    shell(third, 'mkdir -p "$HOME/saved/adapters" && chmod 600 "$HOME/saved"')
    shell(fourth, 'mkdir -p "$HOME/disk/new" "$HOME/saved" && ln -s "$HOME/disk/new" "$HOME/saved/adapters"')
    shell(fourth, 'chmod 0 "$HOME/disk"')
    settings = {**project.job.mlx_lm, "adapter_path": "~/saved/adapters"}
    config = project.model_copy(update={"job": project.job.model_copy(update={"mlx_lm": settings})})
    result = await run_check_on(checkpoint.run, config, fleet)
    assert (result.status, result.blames) == (CheckStatus.FAIL, (0, first.name)), result
    assert "cannot be written: Permission denied" in result.evidence[first.name]
    assert "which is not there" in result.evidence[second.name]
    assert "/saved cannot be entered: Permission denied" in result.evidence[third.name]
    assert "/disk cannot be entered: Permission denied" in result.evidence[fourth.name]
    assert set(result.fixes) == {first.name, second.name, third.name, fourth.name}
    await paste(isolated_cluster, result.fix_command)
    assert (await run_check_on(checkpoint.run, config, fleet)).status is CheckStatus.PASS


async def test_a_full_disk_says_what_is_needed(isolated_cluster: Cluster, project: Config, fleet: Fleet) -> None:
    last = isolated_cluster.nodes[3]
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    llama = {"model_type": "llama", "num_hidden_layers": 4, "rms_norm_eps": 1e-5, "vocab_size": 100, **sizes}
    for node in isolated_cluster.nodes:
        furnish(node)
        node.write("~/models/tiny/config.json", json.dumps(llama))
        shell(node, 'mkdir -p "$HOME/my project"')
    settings = {**project.job.mlx_lm, "num_layers": 4, "iters": 1000, "save_every": 10}
    config = project.model_copy(update={"job": project.job.model_copy(update={"mlx_lm": settings})})
    assert (await run_check_on(checkpoint.run, config, fleet)).status is CheckStatus.PASS  # stages the bundle, too
    last.fill_disk(leave=200_000)
    result = await run_check_on(checkpoint.run, config, fleet)
    assert (result.status, result.blames) == (CheckStatus.FAIL, (3, last.name)), result
    assert " MB are needed: make room" in result.summary
    last.free_disk()
    assert (await run_check_on(checkpoint.run, config, fleet)).status is CheckStatus.PASS


async def paste(cluster: Cluster, command: str | None) -> None:
    assert command is not None
    done = await asyncio.to_thread(as_user, cluster, command)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
