"""The `ssh` that mlx.launch finds first on its PATH, a script that runs the real one with our settings; and the rest
of mlx.launch's own environment.

mlx.launch runs `ssh -tt -o LogLevel=QUIET HOST COMMAND` for a rank, which allocates a terminal on the node (CRLF, one
stream for two, SIGHUP when the connection drops) and hides why ssh failed; and `ssh HOST COMMAND` to kill a rank by a
pid that is always wrong. Instead of the first, the real ssh runs without a terminal, with our time limits and known
hosts, in bash whatever the user's shell is, with mlx.launch's temporary files in the attempt's own folder. The second
is answered and not executed: stopping ranks is the supervisor's job."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from engine.cluster.staging import HostLayout
from engine.cluster.transport.ssh_config import write_openssh_config
from engine.config.models import NodeConfig
from engine.errors import LaunchError
from engine.protocol.attempt import write_atomic
from engine.protocol.exit_codes import ShellExit

NODE_ROOT_ENV = "FLIGHTDECK_NODE_ROOT"
"""This machine's root as a node; that of other machines is ~/.flightdeck."""
KEPT_TMPDIR_ENV = "FLIGHTDECK_TMPDIR"
"""The node's own TMPDIR ("" for none) while mlx.launch uses another; start.sh restores it."""

_SHIM = r"""#!/bin/sh
if [ "$1" != -tt ]; then
    # The launcher wants to kill a rank: it takes "0" to mean that the rank had ended.
    echo 0
    exit 0
fi
# As start.sh does: the launcher burns a core while anybody holds its pipe.
exec </dev/null
host=$4
rank=${{5##*export MLX_RANK=}}
log={log}"${{rank%%;*}}".log
# stty fails without a terminal, and there is no echo to switch off. Each ' and \ outside of the quotes: within them, a
# fish reads \\ as one.
command=$(printf '%s\n%s' {prepare} "${{5#stty -echo; }}" | sed "s/[\\\\']/'\\\\&'/g")
{ssh} -n -T -o LogLevel=ERROR -o RemoteCommand=none -F {config} -- "$host" "exec /bin/bash -c '$command'" 2>"$log" &
child=$!
trap 'kill "$child" 2>/dev/null' HUP INT TERM
wait "$child"
code=$?
# Only now, and not through a pipe: the launcher stops listening when this shell ends. It takes the first line of a
# rank, on whichever stream, for the name of its pidfile.
[ "$code" = 0 ] || echo
cat "$log" >&2
exit "$code"
"""
_PREPARE = """{kept}=${{TMPDIR-}}
TMPDIR={attempt}/tmp
mkdir -p "$TMPDIR" || exit {not_prepared}
export {kept} TMPDIR
# mlx.launch writes to $(mktemp) without quotes: a home may have a blank.
IFS= && set -f
"""


def program(run_id: str, attempt: int) -> list[str]:
    """The program for mlx.launch, the same on hosts with different homes."""
    return ["/bin/sh", "-c", f"exec /bin/sh {_attempt_path(run_id, attempt)}/start.sh"]


def ssh_log_path(directory: Path, rank: int) -> Path:
    """The stderr of the real ssh for `rank`, written by the shim in `directory`."""
    return directory / f"ssh.rank{rank}.log"


def write_shim(directory: Path, config: Path, run_id: str, attempt: int) -> Path:
    """Write the shim for one attempt; returns the folder to put first on PATH. Raises LaunchError, OSError."""
    prepare = _PREPARE.format(
        kept=KEPT_TMPDIR_ENV, attempt=_attempt_path(run_id, attempt), not_prepared=ShellExit.NOT_PREPARED
    )
    text = _SHIM.format(
        prepare=shlex.quote(prepare.rstrip("\n")),
        ssh=shlex.quote(openssh_client()),
        config=shlex.quote(str(config)),
        log=shlex.quote(str(directory / "ssh.rank")),
    )
    return put_first(directory / "bin", text, "mlx.launch")


def openssh_client() -> str:
    """The absolute path of the real ssh. Raises LaunchError."""
    real = shutil.which("ssh")
    if real is None:
        raise LaunchError("there is no ssh", where="this machine", todo="install OpenSSH's client")
    return str(Path(real).absolute())


def put_first(folder: Path, text: str, user: str) -> Path:
    """Write `text` as the `ssh` of a folder that `user` is to find first on its PATH. Raises LaunchError, OSError."""
    if ":" in str(folder):
        raise LaunchError(
            f"{user} cannot be given our ssh",
            where=str(folder),
            why="a : in a path ends it on PATH",
            todo="set FLIGHTDECK_HOME to another folder",
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomic(folder / "ssh", text)
    (folder / "ssh").chmod(0o700)
    return folder


def _attempt_path(run_id: str, attempt: int) -> str:
    """The attempt's folder for a shell on any of the hosts; a run's id is an identifier and needs no quotes."""
    return f'"${{{NODE_ROOT_ENV}:-$HOME/.flightdeck}}"/runs/{run_id}/attempts/{attempt}'


def launcher_environment(
    here: Path, nodes: Sequence[NodeConfig], layouts: Sequence[HostLayout], *, home: Path, run_id: str, attempt: int
) -> dict[str, str]:
    """For mlx.launch with the ranks at `layouts`: its files are in `here`, and our ssh comes first on PATH where a rank
    is on another machine. Raises LaunchError, OSError."""
    variables = temporary_files(here)
    local = [layout for layout in layouts if nodes[layout.ranks[0]].local]
    for layout in local:
        variables[NODE_ROOT_ENV] = layout.root
    if len(local) < len(layouts):
        config = here / "ssh_config"
        write_openssh_config(config, home)
        folder = write_shim(here, config, run_id, attempt)
        variables["PATH"] = f"{folder}:{os.environ.get('PATH', os.defpath)}"
    return variables


def temporary_files(here: Path) -> dict[str, str]:
    """mlx.launch never removes its temporary files: they go into the folder `here`, its working directory, and are
    removed with it."""
    folder = here / "tmp"
    folder.mkdir(mode=0o700, exist_ok=True)
    # Relative: its scripts write to $(mktemp) without quotes, and a Mac's state lies in "Application Support".
    return {"TMPDIR": folder.name, KEPT_TMPDIR_ENV: os.environ.get("TMPDIR", "")}
