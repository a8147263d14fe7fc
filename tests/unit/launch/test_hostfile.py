"""What we write as a hostfile is what MLX's own parser reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config.models import NodeConfig
from engine.launch.hostfile import port_count, ports_of, ring_hostfile, write_hostfile

ADDRESSES = st.ip_addresses(v=4).map(str)
NODES = st.lists(
    st.builds(
        lambda name, ssh, ips: NodeConfig(name=name, ssh=ssh, ips=tuple(ips), python="/p", workdir="/w"),
        st.text(min_size=1, max_size=8),
        st.text(min_size=1, max_size=20),
        st.lists(ADDRESSES, min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=12,
)

PARSE_ALL = """
import json, sys
from mlx._distributed_utils.common import Hostfile
for path in sys.argv[1:]:
    parsed = Hostfile.from_file(path)
    print(json.dumps([parsed.backend, [[h.rank, h.ssh_hostname, h.ips] for h in parsed.hosts]]))
"""


def test_whatever_is_written_parses_in_mlxs_own_hostfile(tmp_path: Path) -> None:
    written: list[list[NodeConfig]] = []

    @settings(max_examples=60, database=None)
    @given(NODES)
    def write(nodes: list[NodeConfig]) -> None:
        write_hostfile(tmp_path / f"{len(written)}.json", nodes)
        written.append(nodes)

    write()
    paths = [str(tmp_path / f"{number}.json") for number in range(len(written))]
    done = subprocess.run([sys.executable, "-c", PARSE_ALL, *paths], capture_output=True, text=True, check=True)
    for nodes, line in zip(written, done.stdout.splitlines(), strict=True):
        expected = [[rank, node.ssh, list(node.ips)] for rank, node in enumerate(nodes)]
        assert json.loads(line) == ["", expected]


@given(NODES, st.integers(1024, 60_000))
def test_every_rank_has_its_own_ports_without_a_gap(nodes: list[NodeConfig], first: int) -> None:
    counted = [port for rank in range(len(nodes)) for port in ports_of(rank, nodes, first)]
    assert counted == list(range(first, first + port_count(nodes)))
    assert [len(entry["ips"]) for entry in ring_hostfile(nodes)] == [
        len(ports_of(rank, nodes, first)) for rank in range(len(nodes))
    ]
