"""start.sh: the one program that mlx.launch runs on every rank. It becomes that rank's keeper."""

from __future__ import annotations

import shlex
from pathlib import Path

from engine.worker.wire import AttemptSpec, NodeFiles

_NO_SUCH_RANK = 126


def start_script(spec: AttemptSpec, files: NodeFiles, bundle: Path, temporary: str | None = None) -> str:
    """The script's text. `bundle` is the folder that holds `worker/` on the node.

    The keeper takes none of the launcher's pipes: the launcher drops them at the first word it is sent, and then costs
    1 % of a core where it would cost a whole one. `temporary` is the ranks' TMPDIR, which is not the launcher's.
    """
    lines = ["#!/bin/sh"]
    lines.append(f"TMPDIR={shlex.quote(temporary)}; export TMPDIR" if temporary else "unset TMPDIR")
    lines.append(f"cd {shlex.quote(str(bundle))} || exit {_NO_SUCH_RANK}")
    if spec.world_size == 1:
        # For a lone rank mlx.launch names an empty hostfile, which MLX then cannot parse.
        lines.append("unset MLX_HOSTFILE")
    lines.append('case "$MLX_RANK" in')
    for rank in spec.ranks:
        keeper = shlex.join([rank.python, "-m", "worker.keeper", "--spec", str(files.spec)])
        # Redirected before exec, so that the shell's own complaint about a missing interpreter is kept as well.
        troubles = shlex.quote(str(files.keeper_log(rank.rank)))
        lines.append(f"{rank.rank}) exec </dev/null >/dev/null 2>>{troubles}; exec {keeper} ;;")
    lines.append("esac")
    lines.append('echo "start.sh: no rank ${MLX_RANK:-(MLX_RANK is not set)} in this attempt" >&2')
    lines.append(f"exit {_NO_SUCH_RANK}")
    return "\n".join(lines) + "\n"
