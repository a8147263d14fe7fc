"""`flightdeck models` on real nodes over ssh: copies go from node to node, also where these do not reach each other."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from engine.demo import ensure_made
from engine.protocol.manifest import HubName
from engine.run.run_plan import read_plan
from engine.store.layout import RunDir
from tests.cluster.cluster import Cluster
from tests.cluster.demo_job import flightdeck_toml
from tests.cluster.faults import Traffic
from tests.cluster.node import Node
from tests.hub_server import hub
from tests.integration.over_ssh import write_config
from tests.model_copies import COMMIT, git_digest
from tests.model_files import llama_files
from tests.tui.commands import Done, flightdeck

TINY = HubName("model", "org/tiny", COMMIT)
REPOSITORY = f"~/.cache/huggingface/hub/{TINY.folder}"
FILES = {**llama_files(), "extra.bin": os.urandom(1_000_000)}


@pytest.fixture
def studio(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the configuration of four nodes, the first of which has the model."""
    monkeypatch.setenv("FLIGHTDECK_SSH_CONFIG", str(cluster.ssh_config))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    give(cluster.nodes[0])
    yield write_config(cluster, tmp_path / "flightdeck.toml", *(node.name for node in cluster.nodes)).parent
    for node in cluster.nodes:
        for folder in (REPOSITORY, "~/models"):
            shutil.rmtree(node.disk.seen_from_head(folder), ignore_errors=True)


def give(node: Node, files: Mapping[str, bytes] = FILES) -> None:
    for name, content in files.items():
        digest = hashlib.sha256(content).hexdigest() if name.endswith(".safetensors") else git_digest(content)
        node.write(f"{REPOSITORY}/blobs/{digest}", content)
        snapshot = node.disk.seen_from_head(f"{REPOSITORY}/snapshots/{COMMIT}")
        snapshot.mkdir(parents=True, exist_ok=True)
        link = snapshot / name
        link.unlink(missing_ok=True)
        link.symlink_to(f"../../blobs/{digest}")
    node.write(f"{REPOSITORY}/refs/main", COMMIT)


def pushed(studio: Path, home: Path, *arguments: str) -> Done:
    done = flightdeck(home, "models", "push", "org/tiny", *arguments, "--json", cwd=studio)
    assert done.code == 0, done.err
    return done


def check_whole(node: Node) -> None:
    for name, content in FILES.items():
        assert node.disk.seen_from_head(f"{REPOSITORY}/snapshots/{COMMIT}/{name}").read_bytes() == content


def test_a_model_of_one_node_gets_onto_all_and_a_damaged_file_is_repaired(
    cluster: Cluster, home: Path, studio: Path
) -> None:
    bea = cluster.nodes[1]
    copies = json.loads(pushed(studio, home).out)["copies"]
    assert {copy["node"] for copy in copies} == {node.name for node in cluster.nodes}
    for node in cluster.nodes:
        check_whole(node)
    weights = f"{REPOSITORY}/blobs/{hashlib.sha256(FILES['model.safetensors']).hexdigest()}"
    bea.write(weights, b"x" * len(FILES["model.safetensors"]))
    verified = flightdeck(home, "models", "verify", "org/tiny", "--json", cwd=studio)
    assert verified.code == 1
    assert json.loads(verified.out)[bea.name] == {"damaged": ["model.safetensors"]}
    pushed(studio, home, "--to", bea.name)
    check_whole(bea)
    listed = json.loads(flightdeck(home, "models", "--json", cwd=studio).out)["nodes"]
    copies = [copy for node in listed for copy in node["copies"] if copy["name"] == "org/tiny"]
    assert [copy["complete"] for copy in copies] == [True] * 4
    removed = flightdeck(home, "models", "rm", "org/tiny", "--node", bea.name, "--yes", cwd=studio)
    assert removed.code == 0, removed.err
    assert not bea.disk.seen_from_head(REPOSITORY).exists()


def test_it_goes_over_this_machine_where_nodes_do_not_reach_each_other(
    isolated_cluster: Cluster, home: Path, studio: Path
) -> None:
    bea = isolated_cluster.nodes[1]
    bea.cut(Traffic.RING)
    pushed(studio, home, "--to", bea.name)
    check_whole(bea)


def test_a_folder_of_this_machine_is_pushed_and_not_over_another(cluster: Cluster, home: Path, studio: Path) -> None:
    folder = studio / "mine"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    bea = cluster.nodes[1]
    for _ in range(2):
        assert flightdeck(home, "models", "push", str(folder), "--to", bea.name, cwd=studio).code == 0
    assert bea.disk.seen_from_head("~/models/mine/extra.bin").read_bytes() == FILES["extra.bin"]
    (folder / "config.json").write_text("{}")
    refused = flightdeck(home, "models", "push", str(folder), "--to", bea.name, cwd=studio)
    assert refused.code == 1 and "--replace" in refused.err
    assert flightdeck(home, "models", "push", str(folder), "--to", bea.name, "--replace", cwd=studio).code == 0
    assert bea.read("~/models/mine/config.json") == "{}"


@pytest.mark.slow
def test_a_launch_brings_the_named_model_and_the_pushed_data_onto_its_nodes(
    cluster: Cluster, home: Path, studio: Path
) -> None:
    ana, bea = cluster.nodes[:2]
    made = ensure_made(studio / "demo-home")
    give(ana, {path.name: path.read_bytes() for path in (made / "model").iterdir()})
    shutil.copytree(made / "data", studio / "rows")
    text = flightdeck_toml(cluster, [ana.name, bea.name], model="org/tiny", data="rows", iters=4, batch_size=4)
    (studio / "flightdeck.toml").write_text(f"{text}\n[data]\npush = true\n")
    done = flightdeck(home, "launch", "--follow", "--json", cwd=studio)
    assert done.code == 0, done.err + done.out
    nodes = read_plan(RunDir(home / "runs" / json.loads(done.out)["id"]).plan).config.nodes
    for node, config in zip((ana, bea), nodes, strict=True):
        assert config.model == f"{node.home}/.cache/huggingface/hub/{TINY.folder}/snapshots/{COMMIT}"
        assert (config.data or "").startswith(f"{node.home}/.flightdeck/pushed/datasets--pushed--rows/snapshots/")
        specs = node.disk.seen_from_head("~/.flightdeck/runs").glob("*/attempts/*/spec.json")
        assert all(str(config.data) in spec.read_text() for spec in specs), "by which it is kept"
    listed = json.loads(flightdeck(home, "models", "--json", cwd=studio).out)["nodes"]
    # Beside what other tests have left on the cluster.
    assert {"org/tiny", "pushed/rows"} <= {copy["name"] for copy in listed[0]["copies"]}
    verified = flightdeck(home, "models", "verify", "hf:pushed/rows", "--json", cwd=studio)
    assert json.loads(verified.out) == {node.name: {"damaged": []} for node in (ana, bea)}
    removed = flightdeck(home, "models", "rm", "hf:pushed/rows", "--node", bea.name, "--yes", cwd=studio)
    assert removed.code == 0 and not any(bea.disk.seen_from_head("~/.flightdeck/pushed").iterdir())


@pytest.mark.slow
def test_what_nobody_has_is_downloaded_once_and_spread(isolated_cluster: Cluster, home: Path, studio: Path) -> None:
    shutil.rmtree(isolated_cluster.nodes[0].disk.seen_from_head(REPOSITORY))
    with hub(FILES, isolated_cluster.head) as (endpoint, sent):
        for node in isolated_cluster.nodes:
            node.write("~/.profile", f"export HF_ENDPOINT={endpoint}\n")
        assert "has the best way to the Hub: " in pushed(studio, home).err
    for node in isolated_cluster.nodes:
        node.disk.seen_from_head("~/.profile").unlink()
        snapshot = node.disk.seen_from_head(f"{REPOSITORY}/snapshots/{COMMIT}")
        assert {path.name: path.read_bytes() for path in snapshot.iterdir()} == llama_files()
    assert len(sent) == len(llama_files()) + len(isolated_cluster.nodes), "once, and each node has measured its way"
