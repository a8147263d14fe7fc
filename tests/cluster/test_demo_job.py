"""The configuration that a test cluster prints is one that the console loads, and its paths are there."""

from __future__ import annotations

from pathlib import Path

from engine.config.load import load_config
from tests.cluster.cluster import Cluster
from tests.cluster.demo_job import write_toml


def test_the_printed_configuration_names_every_node(cluster: Cluster) -> None:
    config = load_config(write_toml(cluster))
    assert [(node.name, node.ssh, node.python) for node in config.nodes] == [
        (node.name, node.ssh, node.python) for node in cluster.nodes
    ]
    assert config.nodes[0].model == "~/models/demo"
    assert config.job.mlx_lm["iters"] == 60


def test_a_folder_is_copied_in_as_the_users(cluster: Cluster, tmp_path: Path) -> None:
    node = cluster.nodes[1]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}\n")
    node.copy_in(tmp_path / "model", "~/models/tiny")
    assert node.run(["sh", "-c", "cat ~/models/tiny/config.json; touch ~/models/tiny/mine"]).stdout == "{}\n"
