"""A draft is a configuration: reading it gives what was meant, whatever the hosts and folders are called."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config.draft import DraftJob, DraftNode, answer_form, draft, find_job, unique_names, write_draft
from engine.config.load import load_config
from engine.errors import InputError, StateError
from engine.security.identifiers import is_identifier

TWO = [
    DraftNode("ultra", "ana@ultra.local", "~/mlx/.venv/bin/python", about="mlx 0.32.4"),
    DraftNode("max", "bea@max.local:2222", doubt="host key unknown"),
]


def test_two_macs_can_be_loaded_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "flightdeck.toml").write_text(draft(TWO, cluster="Ana's studio"))
    config = load_config(tmp_path / "flightdeck.toml")
    assert (config.cluster.name, config.cluster.backend) == ("Ana-s-studio", "auto")
    assert [(node.name, node.ssh, node.ips) for node in config.nodes] == [
        ("ultra", "ana@ultra.local", ()),
        ("max", "bea@max.local:2222", ()),
    ]
    assert config.nodes[0].python == "~/mlx/.venv/bin/python"
    assert config.job.mlx_lm["batch_size"] == 8


def test_what_nobody_knows_is_marked_where_it_stands() -> None:
    lines = draft(TWO).splitlines()
    guess = next(line for line in lines if "NOT VERIFIED" in line)
    assert guess.startswith("python = ") and guess.endswith("# NOT VERIFIED: host key unknown")
    assert [line.split(" = ")[0] for line in lines if "CHANGE ME" in line] == ["model", "data"]


def test_three_ranks_divide_the_batch() -> None:
    nodes = [DraftNode(f"n{number}", "127.0.0.1", "/usr/bin/python3") for number in range(3)]
    assert tomllib.loads(draft(nodes))["job"]["batch_size"] == 9


def test_a_hostfiles_addresses_and_devices_are_kept(tmp_path: Path) -> None:
    nodes = [
        DraftNode("a", "a.local", "~/p/bin/python", ips=("10.0.0.1",), rdma=(None, "rdma_en5")),
        DraftNode("b", "b.local", "~/p/bin/python", ips=("10.0.0.2",), rdma=("rdma_en4", None)),
    ]
    path = tmp_path / "flightdeck.toml"
    path.write_text(draft(nodes, backend="jaccl", job=DraftJob(env={"HF_HOME": '/x "y"'})))
    config = load_config(path)
    assert config.cluster.backend == "jaccl"
    assert [(node.ips, node.rdma) for node in config.nodes] == [(node.ips, node.rdma) for node in nodes]
    assert config.job.env == {"HF_HOME": '/x "y"'}


@pytest.mark.parametrize(
    "node",
    [
        DraftNode("a", "-oProxyCommand=id"),
        DraftNode("a", "a\nb"),
        DraftNode("a", "localhost"),
        DraftNode("a", "a.local", ips=("$(id)",)),
        DraftNode("a", "a.local", rdma=("rdma en5",)),
    ],
)
def test_what_is_no_host_address_or_device_is_refused(node: DraftNode) -> None:
    with pytest.raises(InputError):
        draft([node])
    with pytest.raises(InputError):
        draft([])


HOSTS = st.from_regex(
    r"(?:[a-z_][a-z0-9_-]{0,8}@)?h[a-z0-9][a-z0-9.-]{0,8}[a-z0-9](?::[1-9][0-9]{0,3})?", fullmatch=True
)
PART = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"], exclude_characters="/$`;|<>~.-"), min_size=1)
PYTHONS = st.builds(lambda start, part, name: f"{start}{part} {name}", st.sampled_from(["~/", "/"]), PART, PART)
NODES = st.builds(DraftNode, st.text(), HOSTS, PYTHONS, st.text(), st.text())


@settings(max_examples=40)
@given(nodes=st.lists(NODES, min_size=1, max_size=6), cluster=st.text(), work=st.booleans())
def test_reading_gives_what_was_meant(
    nodes: list[DraftNode], cluster: str, work: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "drafted.toml"
    path.write_text(draft(nodes, cluster=cluster), encoding="utf-8")
    config = load_config(path)
    assert [(node.ssh, node.python) for node in config.nodes] == [(node.ssh, node.python) for node in nodes]
    assert is_identifier(config.cluster.name)


@given(st.lists(st.text() | st.sampled_from(["mac", "mac-2", "m" * 64, "node1"])))
def test_names_are_names_and_each_is_there_once(names: list[str]) -> None:
    made = unique_names(names)
    assert len(set(made)) == len(names) == len(made)
    assert all(map(is_identifier, made))


def test_the_job_is_what_lies_there(tmp_path: Path) -> None:
    assert find_job(tmp_path, remote=False) == DraftJob()
    (tmp_path / "other.yaml").write_text("services: {}\nmodel: x\n")
    (tmp_path / "broken.yaml").write_text("a: [")
    (tmp_path / "data").mkdir()
    assert find_job(tmp_path, remote=False) == DraftJob()
    (tmp_path / "data/train.jsonl").write_text("")
    assert find_job(tmp_path, remote=False) == DraftJob(data="data")
    assert find_job(tmp_path, remote=True) == DraftJob(data="data", push=True)
    (tmp_path / "lora.yaml").write_text("model: ~/m\niters: 100\n")
    job = find_job(tmp_path, remote=False)
    assert job == DraftJob(data="data", config="lora.yaml", has_model=True)
    (tmp_path / "flightdeck.toml").write_text(draft([DraftNode("a", "127.0.0.1", "/usr/bin/python3")], job=job))
    loaded = load_config(tmp_path / "flightdeck.toml")
    assert (loaded.job.mlx_lm["iters"], loaded.job.mlx_lm["batch_size"]) == (100, 4)


def test_a_file_is_written_whole_and_none_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "flightdeck.toml"
    write_draft(path, "one")
    with pytest.raises(InputError, match="--force"):
        write_draft(path, "two")
    assert path.read_text() == "one"
    write_draft(path, "two", force=True)
    assert path.read_text() == "two"
    with pytest.raises(StateError):
        write_draft(tmp_path / "no" / "such" / "folder.toml", "x")
    assert [file.name for file in tmp_path.iterdir()] == ["flightdeck.toml"]


def test_a_model_is_judged_as_the_configuration_does_and_only_data_has_a_prefix() -> None:
    assert answer_form("model", "hf:") is None and "org/set" in str(answer_form("data", "hf:"))
    assert answer_form("data", "hf:org/set main") is None
    assert all("without .." in str(answer_form(key, "../m")) for key in ("model", "data"))
