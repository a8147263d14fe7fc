"""Macs for the checks, out of what the commands on them print; the form is that of recorded output."""

from __future__ import annotations

from typing import Any

from engine.cluster.facts import read_facts
from engine.config.models import ClusterConfig, Config, JobConfig, NodeConfig
from engine.models import NodeFacts
from engine.plan.document import RankMemory
from tests.unit.cluster.macs import NOW

GB = 2**30
RANK: dict[str, Any] = {
    **{name: 0 for name in RankMemory.model_fields if name.endswith("_bytes")},
    "node": "a",
    "peak_bytes": 89 * GB,
    "reserve_bytes": 2 * GB,
    "source": "estimate",
    "limit_bytes": 100 * GB,
    "limit_from": "Metal",
    "fits": True,
}
"""A rank's row of a plan."""

STUDIO = {
    "sysctl": "hw.memsize: 549755813888\nhw.model: Mac15,14\nmachdep.cpu.brand_string: Apple M3 Ultra\n"
    "vm.swapusage: total = 2048.00M  used = 512.25M  free = 1535.75M  (encrypted)\n",
    "sw_vers": "ProductName:\t\tmacOS\nProductVersion:\t\t26.4.1\nBuildVersion:\t\t25E253\n",
    "mlx_import": '{"gpu": "gpu", "backends": ["ring", "jaccl"], "working_set": 412316860416}',
    "versions": {"mlx": "0.32.4", "mlx_lm": "0.32.2"},
    "pmset_batt": "Now drawing from 'AC Power'\n",
    "pmset": "System-wide power settings:\nCurrently in use:\n lowpowermode         0\n sleep                1\n",
    "pmset_therm": "Note: No thermal warning level has been recorded\nNote: No performance warning level has been "
    "recorded\n",
    "rdma_ctl": "enabled\n",
    "ibv_devices": "    device                 node GUID\n    ------              ----------------\n"
    "    rdma_en3            0102030405060708\n",
    "disk": [900_000_000_000, 1_000_000_000_000],
}
"""What `facts_script` would send of a Mac Studio at rest."""


def mac(name: str = "ultra", **answers: object) -> NodeFacts:
    """STUDIO, with these answers in place of its own; None leaves one out."""
    reported = {key: value for key, value in {**STUDIO, **answers}.items() if value is not None}
    fields = read_facts({"system": "Darwin", "python": "3.12.4", "answers": reported})
    return NodeFacts(node=name, host=f"{name}.local", probed_at=NOW, clock_skew_s=0.01, **fields)


def studio(*names: str, **cluster: object) -> Config:
    """A configuration of these Macs."""
    nodes = tuple(
        NodeConfig(name=name, ssh=f"ana@{name}.local", ips=(), python="~/venv/bin/python", workdir="~/run")
        for name in names or ("ultra", "max")
    )
    return Config(
        cluster=ClusterConfig.model_validate({"name": "studio", **cluster}),
        nodes=nodes,
        job=JobConfig(name="job", command=("python", "mine.py")),
    )
