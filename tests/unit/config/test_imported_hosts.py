"""A hostfile that somebody has already becomes the cluster's nodes; a hostile one is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config.draft import DraftNode, draft
from engine.config.load import load_config
from engine.config.models import Config
from engine.errors import ConfigError
from tests.unit.config.documents import JOB, NODES, faults_of, load

IMPORT = '[cluster]\nhostfile = "hosts"\n[node_defaults]\npython = "~/mlx/bin/python"\n'
JACCL = {
    "backend": "jaccl",
    "envs": ["NCCL_DEBUG=INFO", "A=b=c"],
    "hosts": [
        {"ssh": "ana@ultra.local", "ips": ["192.168.0.1"], "rdma": [None, "rdma_en5"]},
        {"ssh": "max.local", "ips": [], "rdma": ["rdma_en4", None]},
    ],
}


def imported(directory: Path, hosts: str | bytes | dict[str, Any] | list[Any], text: str = IMPORT + JOB) -> Config:
    write(directory, hosts)
    return load(directory, text)


def write(directory: Path, hosts: str | bytes | dict[str, Any] | list[Any]) -> None:
    content = hosts if isinstance(hosts, str | bytes) else json.dumps(hosts)
    (directory / "hosts").write_bytes(content if isinstance(content, bytes) else content.encode())


def test_mlxs_json_gives_the_nodes_the_backend_and_the_variables(tmp_path: Path) -> None:
    config = imported(tmp_path, JACCL)
    assert [(node.name, node.ssh, node.ips, node.rdma) for node in config.nodes] == [
        ("ultra", "ana@ultra.local", ("192.168.0.1",), (None, "rdma_en5")),
        ("max", "max.local", (), ("rdma_en4", None)),
    ]
    assert {node.python for node in config.nodes} == {"~/mlx/bin/python"}
    assert config.cluster.backend == "jaccl"
    assert config.job.env == {"NCCL_DEBUG": "INFO", "A": "b=c"}


def test_several_cables_and_connections_are_read_as_mlx_writes_them(tmp_path: Path) -> None:
    """The form of mlx.distributed_config with two cables between two Macs, and of --connections-per-ip."""
    hosts = [
        {"ssh": "a", "ips": ["10.0.0.1"], "rdma": [None, ["rdma_en5", "rdma_en4"]]},
        {"ssh": "b", "ips": ["10.0.0.2"], "rdma": [["rdma_en3", "rdma_en2"], None]},
    ]
    config = imported(tmp_path, {"backend": "jaccl", "envs": [], "connections_per_ip": 2, "hosts": hosts})
    assert [(node.ips, node.rdma) for node in config.nodes] == [
        (("10.0.0.1", "10.0.0.1"), (None, ("rdma_en5", "rdma_en4"))),
        (("10.0.0.2", "10.0.0.2"), (("rdma_en3", "rdma_en2"), None)),
    ]
    drafted = draft([DraftNode(node.name, node.ssh, python="/p", rdma=node.rdma) for node in config.nodes])
    assert 'rdma = ["", ["rdma_en5", "rdma_en4"]]' in drafted


def test_what_flightdeck_toml_says_wins(tmp_path: Path) -> None:
    text = IMPORT.replace("[cluster]", '[cluster]\nbackend = "ring"') + JOB + 'env = {A = "mine"}\n'
    config = imported(tmp_path, JACCL, text)
    assert (config.cluster.backend, config.job.env["A"]) == ("ring", "mine")


def test_a_bare_list_is_mlxs_other_form(tmp_path: Path) -> None:
    config = imported(tmp_path, b"\xef\xbb\xbf" + json.dumps([{"ssh": "127.0.0.1"}] * 3).encode())
    assert [(node.name, node.ips) for node in config.nodes] == [(f"node{rank}", ("127.0.0.1",)) for rank in range(3)]
    assert config.cluster.backend == "auto"


def test_lines_of_host_and_slots_are_that_many_ranks(tmp_path: Path) -> None:
    text = "# two Macs\r\nnode1.example.com:2\n\n  ana@node1.example.net slots = 1  # the other\nplain\n10.0.0.7:1\n"
    config = imported(tmp_path, text, IMPORT + JOB + "batch_size = 5\n")
    assert [(node.name, node.ssh) for node in config.nodes] == [
        ("node1", "node1.example.com"),
        ("node1-1", "node1.example.com"),
        ("node1-2", "ana@node1.example.net"),
        ("plain", "plain"),
        ("node4", "10.0.0.7"),
    ]


ROWS = [None, "rdma_en5"], ["rdma_en4", None]
HOSTILE: list[tuple[str, str | bytes | dict[str, Any] | list[Any], str, str]] = [
    ("no hosts", [], "hosts", "one entry per rank"),
    ("an empty file", "", "the file", "host:slots"),
    ("10,000 hosts", [{"ssh": "h"}] * 10_000, "hosts", "at most 64"),
    ("10,000 lines", "h:1\n" * 10_000, "line 65", "at most 64"),
    ("a billion slots", "h:999999999\n", "line 1", "at most 64"),
    ("no slots", "h:0\n", "line 1", "1 slot or more"),
    ("other text", "<html>\n<body>no hosts here</body>\n" * 50, "line 2", "host:slots"),
    ("deep nesting", "[" * 100_000, "the file", "JSON of plain values"),
    ("NaN", '[{"ssh": "h", "x": NaN}]', "the file", "does not have such numbers"),
    ("infinity", '[{"ssh": "h", "x": -Infinity}]', "the file", "does not have such numbers"),
    ("half a document", '{"hosts": [', "line 1", "JSON"),
    ("not UTF-8", b"h\xff:1\n", "line 1", "UTF-8"),
    ("a number", {"hosts": 3}, "hosts", "one entry per rank"),
    ("an entry that is none", ["h"], "hosts[0]", "an entry such as"),
    ("no ssh", [{"ips": ["10.0.0.1"]}], "hosts[0]", "an entry such as"),
    ("an option for ssh", [{"ssh": "-oProxyCommand=id"}], "hosts[0].ssh", "[user@]host[:port]"),
    ("a command", "a;id\n", "line 1.ssh", "[user@]host[:port]"),
    ("localhost", [{"ssh": "localhost"}], "hosts[0].ssh", "127.0.0.1"),
    ("a name as address", [{"ssh": "h", "ips": ["h.local"]}], "hosts[0].ips[0]", "an IPv4 address"),
    ("addresses that are no list", [{"ssh": "h", "ips": "10.0.0.1"}], "hosts[0].ips", "a list"),
    ("a short matrix", [{"ssh": "h", "rdma": [None]}, {"ssh": "i", "rdma": ROWS[1]}], "hosts[0].rdma", "2 entries"),
    ("no null for itself", [{"ssh": "h", "rdma": ROWS[1]}, {"ssh": "i"}], "hosts[0].rdma[0]", "the node itself"),
    ("a device twice", [{"ssh": "h", "rdma": [None, ["a", "a"]]}, {"ssh": "i"}], "hosts[0].rdma[1]", "RDMA device"),
    ("no device", [{"ssh": "h", "rdma": [None, []]}, {"ssh": "i"}], "hosts[0].rdma[1]", "RDMA device"),
    ("a device that is none", [{"ssh": "h", "rdma": [None, [1]]}, {"ssh": "i"}], "hosts[0].rdma[1]", "RDMA device"),
    ("no connections", {"connections_per_ip": 0, "hosts": [{"ssh": "h"}]}, "connections_per_ip", "1 to 8"),
    ("a true number", {"connections_per_ip": True, "hosts": [{"ssh": "h"}]}, "connections_per_ip", "1 to 8"),
    ("another backend", {"backend": "mpi", "hosts": [{"ssh": "h"}]}, "backend", "ring, jaccl, jaccl-ring, nccl"),
    ("a backend that is a list", {"backend": [], "hosts": [{"ssh": "h"}]}, "backend", "ring"),
    ("our variables", {"envs": ["MLX_RANK=3"], "hosts": [{"ssh": "h"}]}, "envs[0]", "are reserved"),
    ("a launch's own", {"envs": ["MLX_JACCL_RING=1"], "hosts": [{"ssh": "h"}]}, "envs[0]", "are reserved"),
    ("half a character", {"envs": ["A=\ud800"], "hosts": [{"ssh": "h"}]}, "envs[0]", "valid characters"),
    ("no variable", {"envs": ["A"], "hosts": [{"ssh": "h"}]}, "envs[0]", "NAME=value"),
    ("variables in a table", {"envs": {"A": "b"}, "hosts": [{"ssh": "h"}]}, "envs", "a list"),
]


@pytest.mark.parametrize(
    ("hosts", "key", "accepted"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE]
)
def test_a_hostile_hostfile_is_one_line(tmp_path: Path, hosts: Any, key: str, accepted: str) -> None:
    write(tmp_path, hosts)
    faults = faults_of(tmp_path, IMPORT + JOB)
    assert len(faults) == 1, [str(fault) for fault in faults]
    assert (faults[0].key, faults[0].file) == (key, str(tmp_path / "hosts"))
    assert accepted in faults[0].accepted


def test_a_hundred_megabytes_are_not_read(tmp_path: Path) -> None:
    with (tmp_path / "hosts").open("wb") as large:
        large.truncate(100_000_000)
    assert "at most 1,000,000 bytes" in faults_of(tmp_path, IMPORT + JOB)[0].accepted


def test_an_absent_one_and_one_beside_nodes_are_refused(tmp_path: Path) -> None:
    assert faults_of(tmp_path, IMPORT + JOB)[0].value == "(not found)"
    write(tmp_path, "127.0.0.1:2\n")
    assert [fault.key for fault in faults_of(tmp_path, IMPORT + NODES + JOB)] == ["node"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.binary(max_size=60),
        st.text(alphabet='ab.:@-0123 \n[]{}"#=slot,', max_size=60).map(str.encode),
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.text(max_size=6),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["ssh", "ips", "rdma", "hosts", "envs", "backend"]), inner, max_size=4
                )
            ),
            max_leaves=12,
        ).map(lambda value: json.dumps(value).encode()),
    )
)
def test_no_hostfile_raises_anything_but_a_config_error(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, content)
    (tmp_path / "flightdeck.toml").write_text(IMPORT + JOB)
    try:
        load_config(tmp_path / "flightdeck.toml")
    except ConfigError as error:
        assert error.faults
        assert all(str(fault).isprintable() for fault in error.faults)
