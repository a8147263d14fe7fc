"""The `ssh` that mlx.launch finds first on its PATH: ours, which runs the real one with our settings.

mlx.launch runs `ssh -tt -o LogLevel=QUIET HOST COMMAND` for a rank, which takes a terminal on the node (CRLF, one
stream for two, a hang-up when the connection goes) and hides why ssh failed; and `ssh HOST COMMAND` to kill a rank by a
pid that it never gets right. In place of the first, the real ssh runs without a terminal, with our time limits and
known hosts, in a bash whatever the user's shell is, with the temporary files of mlx.launch in the attempt's own folder.
The second is answered and not done: stopping is the supervisor's.
"""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from engine.errors import LaunchError
from engine.worker.wire import write_atomic

NODE_ROOT_ENV = "FLIGHTDECK_NODE_ROOT"
"""Where this machine, as a node, has its root; other machines have ~/.flightdeck."""
KEPT_TMPDIR_ENV = "FLIGHTDECK_TMPDIR"
"""The node's own TMPDIR ("" for none) while mlx.launch's is another; start.sh gives it back."""

_SHIM = r"""#!/bin/sh
if [ "$1" != -tt ]; then
    # The launcher asks for the end of a rank: "0" is its word for a rank that was gone.
    echo 0
    exit 0
fi
host=$4
rank=${{5##*export MLX_RANK=}}
words={words}"${{rank%%;*}}".log
# Without a terminal there is no echo to be switched off, and stty would complain of it.
command=$(printf '%s\n%s' {prepare} "${{5#stty -echo; }}" | sed "s/'/'\\\\''/g")
{ssh} -n -T -o LogLevel=ERROR -o RemoteCommand=none -F {config} -- "$host" "exec /bin/bash -c '$command'" 2>"$words" &
child=$!
trap 'kill "$child" 2>/dev/null' HUP INT TERM
wait "$child"
code=$?
# Only now, and not through a pipe: the launcher stops listening when this shell ends. It takes the first line of a
# rank, on whichever stream, for the name of its pidfile.
[ "$code" = 0 ] || echo
cat "$words" >&2
exit "$code"
"""
_PREPARE = """{kept}=${{TMPDIR-}}
TMPDIR={attempt}/tmp
mkdir -p "$TMPDIR" || exit 125
export {kept} TMPDIR
"""


def program(run_id: str, attempt: int) -> list[str]:
    """What mlx.launch is to run: one and the same on hosts with different homes."""
    return ["/bin/sh", "-c", f"exec /bin/sh {_attempt(run_id, attempt)}/start.sh"]


def words_of(directory: Path, rank: int) -> Path:
    """Where the shim in `directory` keeps what the real ssh has said about `rank`."""
    return directory / f"ssh.rank{rank}.log"


def write_shim(directory: Path, config: Path, run_id: str, attempt: int) -> Path:
    """Write the shim for one attempt; returns the folder to be put first on PATH. Raises LaunchError, OSError."""
    real = shutil.which("ssh")
    if real is None:
        raise LaunchError("there is no ssh", where="this machine", todo="install OpenSSH's client")
    folder = directory / "bin"
    if ":" in str(folder):
        raise LaunchError(
            "mlx.launch cannot be given our ssh",
            where=str(folder),
            why="a : in a path ends it on PATH",
            todo="set FLIGHTDECK_HOME to another folder",
        )
    text = _SHIM.format(
        prepare=shlex.quote(_PREPARE.format(kept=KEPT_TMPDIR_ENV, attempt=_attempt(run_id, attempt)).rstrip("\n")),
        ssh=shlex.quote(str(Path(real).absolute())),
        config=shlex.quote(str(config)),
        words=shlex.quote(str(directory / "ssh.rank")),
    )
    folder.mkdir(mode=0o700, exist_ok=True)
    write_atomic(folder / "ssh", text)
    (folder / "ssh").chmod(0o700)
    return folder


def _attempt(run_id: str, attempt: int) -> str:
    """The attempt's folder for a shell on any of the hosts; a run's id is an identifier and needs no quotes."""
    return f'"${{{NODE_ROOT_ENV}:-$HOME/.flightdeck}}"/runs/{run_id}/attempts/{attempt}'
