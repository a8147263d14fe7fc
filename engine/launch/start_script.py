"""start.sh: the one program that starts every rank of a host. In an attempt it becomes that rank's keeper."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from engine.launch.environment import NEEDED_FILE
from engine.launch.ssh_shim import KEPT_TMPDIR_ENV, NODE_ROOT_ENV
from engine.worker.wire import AttemptSpec, NodeFiles

_NO_SUCH_RANK = 126
_NO_FILE = 125


def start_script(
    spec: AttemptSpec,
    files: NodeFiles,
    bundle: PurePath,
    *,
    ranks: Collection[int] | None = None,
    detached: Collection[int] = (),
    environment: Mapping[str, str | None] | None = None,
) -> str:
    """The script's text, for `ranks` of the attempt, all of them by default. `bundle` is the folder that holds
    `worker/` on the node. The keepers of the `detached` ranks leave whoever runs the script as soon as their rank runs.
    """
    programs = {}
    for rank in spec.ranks:
        if ranks is None or rank.rank in ranks:
            options = ["--detach"] if rank.rank in detached else []
            keeper = [rank.python, "-m", "worker.keeper", "--spec", str(files.spec), *options]
            troubles = shlex.quote(str(files.keeper_log(rank.rank)))
            programs[rank.rank] = RankProgram(keeper, f">/dev/null 2>>{troubles}")
    return ranks_script(programs, bundle, backend=spec.backend, world_size=spec.world_size, environment=environment)


@dataclass(frozen=True)
class RankProgram:
    """What one rank's shell becomes."""

    argv: Sequence[str]
    output: str
    """Redirections of its output, as the shell reads them."""


def ranks_script(
    programs: Mapping[int, RankProgram],
    bundle: PurePath,
    *,
    backend: str,
    world_size: int,
    environment: Mapping[str, str | None] | None = None,
) -> str:
    """The one program that starts every rank of a host, whatever they run: it goes to `bundle`, and becomes the program
    of the rank that MLX_RANK says.

    The program takes none of the launcher's pipes: the launcher drops them at the first word it is sent, and then costs
    1 % of a core where it would cost a whole one. `environment` is what the launcher has otherwise than the ranks are
    to have it; None is a variable that they do not have.
    """
    lines = ["#!/bin/sh"]
    for name, value in (environment or {}).items():
        lines.append(f"unset {name}" if value is None else f"{name}={shlex.quote(value)}; export {name}")
    lines += _given_back()
    lines.append(f"cd {shlex.quote(str(bundle))} || exit {_NO_SUCH_RANK}")
    if world_size == 1:
        # For a lone rank mlx.launch names an empty hostfile, which MLX then cannot parse.
        lines.append("unset MLX_HOSTFILE")
    lines.append('case "$MLX_RANK" in')
    check = _check(backend) if world_size > 1 else ""
    for rank, program in programs.items():
        # Redirected before exec, so that the shell's own complaint about a missing interpreter is kept as well.
        lines.append(f"{rank}) exec </dev/null {program.output}; {check}exec {shlex.join(program.argv)} ;;")
    lines.append("esac")
    lines.append('echo "start.sh: no rank ${MLX_RANK:-(MLX_RANK is not set)} in this attempt" >&2')
    lines.append(f"exit {_NO_SUCH_RANK}")
    return "\n".join(lines) + "\n"


def _given_back() -> list[str]:
    """What the way here has set for itself."""
    kept = KEPT_TMPDIR_ENV
    return [
        f'if [ -n "${{{kept}-}}" ]; then TMPDIR=${kept}; export TMPDIR',
        f'elif [ -n "${{{kept}+x}}" ]; then unset TMPDIR; fi',
        f"unset {kept} {NODE_ROOT_ENV}",
    ]


def _check(backend: str) -> str:
    """Without the file that MLX is told of, or with an empty one where the disk was full, every rank would be alone."""
    name = NEEDED_FILE.get(backend)
    if name is None:
        return ""
    said = f"{name} names no file: it could not be written, perhaps because the disk is full"
    return f'if [ -n "${{{name}+x}}" ] && [ ! -s "${name}" ]; then echo "{said}" >&2; exit {_NO_FILE}; fi; '
