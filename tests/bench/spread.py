"""A model on its way to four nodes, measured: `uv run python -m tests.bench.spread [--megabytes N]`.

Five nodes of the test cluster, each behind a link of 200 Mbit/s; one has the model. Compared is `flightdeck models
push` to the four others with one scp of the same bytes to one of them; then the same with two of the four cut off for
a while, one after the other, and with a damaged file on one. Exits 1 when a target is missed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from engine.protocol.manifest import HubName
from tests.bench.figures import Figure, measure
from tests.cluster.cluster import Cluster
from tests.cluster.node import Node
from tests.cluster.registry import Record
from tests.conftest import FLIGHTDECK
from tests.integration.over_ssh import write_config
from tests.model_copies import COMMIT, git_digest

RATE, LINK_BYTES_PER_S = "200mbit", 25e6
MOST_COPIES = 1.3
SHARDS = 4
REPOSITORY = f"~/.cache/huggingface/hub/{HubName('model', 'org/big').folder}"
CUT_S = 15.0


class RoomyNode(Node):
    home_mib = 2500


class RoomyCluster(Cluster):
    def _make_nodes(self, record: Record) -> list[Node]:
        return [RoomyNode(spec, record, index) for index, spec in enumerate(self._specs)]


def shards(megabytes: int) -> dict[str, bytes]:
    """Safetensors files of random bytes."""
    size = megabytes * 10**6 // SHARDS
    header = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    head = len(header).to_bytes(8, "little") + header
    return {f"model-{number:05}-of-{SHARDS:05}.safetensors": head + os.urandom(size) for number in range(1, SHARDS + 1)}


def place(node: Node, files: dict[str, bytes]) -> None:
    """The files in the node's cache; its user only reads them."""
    repository = node.disk.seen_from_head(REPOSITORY)
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name, content in files.items():
        digest = hashlib.sha256(content).hexdigest() if name.endswith(".safetensors") else git_digest(content)
        node.write(f"{REPOSITORY}/blobs/{digest}", content)
        (snapshot / name).symlink_to(f"../../blobs/{digest}")
    node.write(f"{REPOSITORY}/refs/main", COMMIT)


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Bench:
    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        write_config(cluster, folder / "flightdeck.toml", *(node.name for node in cluster.nodes))
        more = {"FLIGHTDECK_HOME": str(folder / "home"), "FLIGHTDECK_SSH_CONFIG": str(cluster.ssh_config)}
        self.environment = {**os.environ, **more, "HF_HOME": str(folder / "hf")}

    def push(self) -> None:
        targets = [node.name for node in self.cluster.nodes[1:]]
        command = [str(FLIGHTDECK), "models", "push", "org/big", "--to", *targets, "--accept"]
        subprocess.run(command, cwd=self.folder, env=self.environment, check=True, stdout=sys.stderr)

    def clear(self) -> None:
        for node in self.cluster.nodes[1:]:
            shutil.rmtree(node.disk.seen_from_head(REPOSITORY), ignore_errors=True)

    def check(self, files: dict[str, bytes]) -> bool:
        """Every file is whole on every node."""
        snapshots = [node.disk.seen_from_head(f"{REPOSITORY}/snapshots/{COMMIT}") for node in self.cluster.nodes]
        return all((folder / name).read_bytes() == content for folder in snapshots for name, content in files.items())

    def received(self, node: Node) -> int:
        """Bytes that have come into the node."""
        return int(node.read("/sys/class/net/eth0/statistics/rx_bytes"))


def figures(megabytes: int, folder: Path) -> Iterator[Figure]:
    files = {**shards(megabytes), "config.json": b'{"model_type": "llama"}'}
    with RoomyCluster(5) as cluster:
        bench = Bench(cluster, folder)
        source, first, second, *_ = cluster.nodes
        place(source, files)
        (whole := folder / "whole").write_bytes(b"".join(files.values()))
        for node in cluster.nodes:
            node.slow_link(RATE)
        scp = ["scp", "-q", "-F", str(cluster.ssh_config), str(whole), f"{first.name}:whole"]
        one_s = seconds(lambda: subprocess.run(scp, check=True))
        first.disk.seen_from_head("~/whole").unlink()
        whole.unlink()
        yield Figure(f"one scp of {megabytes} MB at {RATE}", f"{one_s:.1f} s")
        spread_s = seconds(bench.push)
        ratio = spread_s / one_s
        yield Figure(
            "models push to 4 nodes",
            f"{spread_s:.1f} s = {ratio:.2f} copies",
            f"<= {MOST_COPIES}",
            ratio <= MOST_COPIES,
        )
        yield Figure("whole on all", "yes" if (met := bench.check(files)) else "no", "yes", met)
        bench.clear()
        cuts = [threading.Timer(one_s * share, cut_for, [node]) for node, share in ((first, 0.2), (second, 0.5))]
        for timer in cuts:
            timer.start()
        before = {node.name: bench.received(node) for node in cluster.nodes[1:]}
        cut_s = seconds(bench.push)
        most = max(bench.received(node) - before[node.name] for node in cluster.nodes[1:]) / (megabytes * 1e6)
        for timer in cuts:
            timer.join()
        yield Figure(f"the same with two nodes cut off for {CUT_S:g} s", f"{cut_s:.1f} s")
        yield Figure("most that one received, copies", f"{most:.2f}", "<= 1.25", most <= 1.25)
        yield Figure("whole on all", "yes" if (met := bench.check(files)) else "no", "yes", met)
        yield from repaired(bench, files, megabytes)


def cut_for(node: Node) -> None:
    node.link_down()
    time.sleep(CUT_S)
    node.link_up()


def repaired(bench: Bench, files: dict[str, bytes], megabytes: int) -> Iterator[Figure]:
    """One damaged byte on one node."""
    node, name = bench.cluster.nodes[2], next(iter(files))
    with node.disk.seen_from_head(f"{REPOSITORY}/snapshots/{COMMIT}/{name}").open("r+b") as file:
        file.seek(len(files[name]) // 2)
        file.write(b"damage")
    before = bench.received(node)
    repair_s = seconds(bench.push)
    share = (bench.received(node) - before) / len(files[name])
    yield Figure(
        "a damaged shard found and sent again", f"{repair_s:.1f} s, {share:.2f} shards", "<= 1.25", share <= 1.25
    )
    yield Figure("whole on all", "yes" if (met := bench.check(files)) else "no", "yes", met)


if __name__ == "__main__":
    sys.exit(measure(__doc__ or "", figures, "--megabytes", 1000))
