"""Starts tests.training.divided_program on ranks of a ring on this machine, and reads what they wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.unit.launch.places import ring_ports

LIMIT_S = 240.0


@dataclass
class Ran:
    """What one case left on all ranks."""

    directory: Path
    name: str
    ranks: list[dict[str, Any]]

    @property
    def losses(self) -> list[float]:
        losses: list[float] = self.ranks[0]["losses"]
        return losses

    def gradients(self) -> dict[str, mx.array]:
        """Of the first update, from all ranks together."""
        return self._arrays(*(f"gradients.{rank}" for rank in range(len(self.ranks))))

    def trained(self) -> dict[str, mx.array]:
        return self._arrays("trained")

    def _arrays(self, *kinds: str) -> dict[str, mx.array]:
        found: dict[str, mx.array] = {}
        for kind in kinds:
            found |= loaded(self.directory / f"{self.name}.{kind}.safetensors")
        return found


def loaded(path: Path) -> dict[str, mx.array]:
    """A file of safetensors."""
    arrays = mx.load(str(path))
    assert isinstance(arrays, dict)
    return arrays


def run(directory: Path, cases: list[dict[str, Any]], ranks: int) -> dict[str, Ran]:
    """Run the cases on so many ranks; by name."""
    directory.mkdir(parents=True)
    (directory / "cases.json").write_text(json.dumps(cases))
    first = ring_ports(ranks)
    hosts = directory / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{first + rank}"] for rank in range(ranks)]))
    own = {"RANKS": str(ranks), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if ranks > 1:
        own["MLX_HOSTFILE"] = str(hosts)
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.training.divided_program", str(directory)],
            env={**os.environ, **own, "MLX_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=LIMIT_S)[1].decode(errors="replace") for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0] * ranks, "\n".join(text[-3000:] for text in said)
    results = [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return {case["name"]: Ran(directory, case["name"], [told[case["name"]] for told in results]) for case in cases}
