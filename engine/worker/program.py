"""A rank's program: the trainer, or the user's own command, started on this node's terms."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from . import processes
from .wire import CONTROL_FD_ENV, EVENTS_ENV, NONCE_ENV, SPEC_ENV, AttemptSpec, NodeFiles, RankSpec


class Program:
    """The rank's program in a session and process group of its own, with its pipe and its control descriptor."""

    def __init__(self, spec: AttemptSpec, rank: RankSpec, files: NodeFiles) -> None:
        """Start it. Raises OSError when that cannot be done."""
        self.cooperative = spec.command is None
        control_read, self._control = os.pipe()
        self.output, output_write = os.pipe()
        environment = _environment(spec, rank, files)
        environment[CONTROL_FD_ENV] = str(control_read)
        if not Path(rank.workdir).is_dir():
            raise FileNotFoundError(2, "no such working directory", rank.workdir)
        try:
            self._process = subprocess.Popen(
                _arguments(spec, rank),
                # The trainer imports from the bundle and changes to its working directory by itself.
                cwd=_bundle_root() if self.cooperative else rank.workdir,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output_write,
                stderr=output_write,
                pass_fds=(control_read,) if self.cooperative else (),
                start_new_session=True,
            )
        finally:
            os.close(control_read)
            os.close(output_write)
        self.pid = self._process.pid

    def returncode(self) -> int | None:
        """As subprocess has it: negative for a signal, None while it runs."""
        return self._process.poll()

    def tell(self, word: bytes) -> None:
        """STOP or RESCUE, to a trainer."""
        try:
            os.write(self._control, word)
        except BrokenPipeError:
            # It has left already: the next look at its return code will say so.
            return

    def signal_group(self, number: int) -> None:
        processes.kill_group(self.pid, number)


def _environment(spec: AttemptSpec, rank: RankSpec, files: NodeFiles) -> dict[str, str]:
    environment = {**os.environ, **spec.env}
    environment[NONCE_ENV] = spec.nonce
    environment[SPEC_ENV] = str(files.spec)
    environment[EVENTS_ENV] = str(files.events(rank.rank))
    environment["MLX_RANK"] = str(rank.rank)
    environment["PYTHONUNBUFFERED"] = "1"
    if spec.world_size == 1:
        # mlx.launch gives a lone rank an empty hostfile, on which MLX's ring then fails as on a broken one.
        environment.pop("MLX_HOSTFILE", None)
    bundle = str(_bundle_root())
    paths = [path for path in environment.pop("PYTHONPATH", "").split(os.pathsep) if path not in ("", bundle)]
    if paths:
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def _arguments(spec: AttemptSpec, rank: RankSpec) -> list[str]:
    """The program's argument list, with this node's python and paths in place of the head's logical ones."""
    if spec.command is None:
        return [sys.executable, "-m", f"{__package__}.trainer"]
    if not spec.command:
        raise ValueError("the command is empty")
    here = {
        "{workdir}": rank.workdir,
        "{model}": rank.model or "",
        "{data}": rank.data or "",
        "{python}": rank.python,
        "{rank}": str(rank.rank),
    }
    program, *arguments = spec.command
    if program in ("python", "python3"):
        program = rank.python
    command = [program, *arguments]
    for word, value in here.items():
        command = [argument.replace(word, value) for argument in command]
    return command


def _bundle_root() -> Path:
    """The folder that `worker` (or `engine.worker`) is imported from."""
    return Path(__file__).resolve().parents[len((__package__ or "worker").split("."))]
