"""What mlx.launch has in its environment for its own part; start.sh undoes it for the ranks of this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from engine.config.models import NodeConfig
from engine.launch import ssh_shim
from engine.launch.place import Place
from engine.transport.openssh import write_openssh_config


def launchers_own(
    here: Path, nodes: Sequence[NodeConfig], places: Sequence[Place], *, home: Path, run_id: str, attempt: int
) -> dict[str, str]:
    """For mlx.launch with the ranks at `places`: its files are in `here`, our ssh is before its own where a rank is on
    another machine. Raises LaunchError, OSError."""
    own = temporary_files(here)
    local = [place for place in places if nodes[place.ranks[0]].local]
    for place in local:
        own[ssh_shim.NODE_ROOT_ENV] = place.root
    if len(local) < len(places):
        config = here / "ssh_config"
        write_openssh_config(config, home)
        folder = ssh_shim.write_shim(here, config, run_id, attempt)
        own["PATH"] = f"{folder}:{os.environ.get('PATH', os.defpath)}"
    return own


def temporary_files(here: Path) -> dict[str, str]:
    """What mlx.launch leaves among the temporary files, and it removes nothing, goes with the folder `here`."""
    folder = here / "tmp"
    folder.mkdir(mode=0o700, exist_ok=True)
    return {"TMPDIR": str(folder), ssh_shim.KEPT_TMPDIR_ENV: os.environ.get("TMPDIR", "")}
