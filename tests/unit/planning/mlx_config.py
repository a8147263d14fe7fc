"""The installed MLX's own `mlx.distributed_config`, given the outputs of Macs that are not there."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from mlx._distributed_utils import config as mlx_config
from mlx._distributed_utils.common import Host

from tests.unit.nodes.macs import Macs


class Upstream:
    """What MLX works out for these Macs."""

    def __init__(self, macs: Macs) -> None:
        self.macs = macs
        self.hosts = [Host(rank, name, [], []) for rank, name in enumerate(macs.names)]
        with self._answering():
            self.tb_hosts, self.index = mlx_config.extract_connectivity(self.hosts, False)
        self.connectivity: list[list[int]] = mlx_config.make_connectivity_matrix(self.tb_hosts, self.index)
        self.ips = mlx_config.IPConfigurator(self.hosts, self.tb_hosts, self.index)

    @property
    def rings(self) -> list[tuple[list[int], int]]:
        found: list[tuple[list[int], int]] = mlx_config.extract_rings(self.connectivity)
        return found

    @property
    def whole_ring(self) -> list[int] | None:
        rings = self.rings
        return rings[0][0] if mlx_config.check_valid_ring(self.hosts, rings, False) else None

    @property
    def mesh(self) -> bool:
        return bool(mlx_config.check_valid_mesh(self.hosts, self.connectivity, False))

    def setup(self) -> dict[str, list[str]]:
        """Per host, the commands that it asks a person to run."""
        printed: list[str] = []
        with (
            patch.object(mlx_config, "print", lambda *words: printed.append(" ".join(words)), create=True),
            patch.object(mlx_config, "input", lambda _: "", create=True),
        ):
            self.ips.setup()
        texts = [text for text in printed if text.startswith("sudo")]
        return {name: text.strip().splitlines() for name, text in zip(self.macs.names, texts, strict=True)}

    def hostfile(self, backend: str, directory: Path) -> list[dict[str, Any]]:
        """The hosts of the hostfile that it writes for the backend."""
        path = directory / f"{backend}.json"
        arguments = argparse.Namespace(verbose=False, env=[], auto_setup=False, output_hostfile=str(path))
        steps: dict[str, Callable[[], None]] = {
            "jaccl": lambda: mlx_config.configure_jaccl(arguments, self.hosts, self.ips, []),
            "jaccl-ring": lambda: mlx_config.configure_jaccl_ring(arguments, self.hosts, self.ips, self.rings[0], []),
            "ring": lambda: mlx_config.configure_ring(arguments, self.hosts, self.ips, self.rings[0], []),
        }
        with self._answering(), patch.object(self.ips, "setup", lambda **_: None):
            steps[backend]()
        hosts: list[dict[str, Any]] = json.loads(path.read_text())["hosts"]
        return hosts

    @contextmanager
    def _answering(self) -> Iterator[None]:
        def run(argv: list[str], **_: object) -> SimpleNamespace:
            number = self.macs.names.index(argv[1])
            if "system_profiler" in argv:
                return SimpleNamespace(stdout=self.macs.thunderbolt(number).encode())
            if "networksetup" in argv:
                return SimpleNamespace(stdout=self.macs.networksetup(number).encode())
            return SimpleNamespace(stdout=f"10.0.0.{number + 1}\n")

        with patch.object(mlx_config, "run", run):
            yield
