"""The queue after a restart of this machine: a launchd agent, a systemd user unit or a line of the crontab, which
starts its process. Only where a person wants that; removed again without a trace."""

from __future__ import annotations

import contextlib
import hashlib
import os
import plistlib
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from engine.errors import InputError, StateError
from engine.protocol.attempt import write_atomic
from engine.security.sanitise import last_line, plain

_LIMIT_S = 20.0
_UNLOADED_S, _AGAIN_S = 10.0, 0.2
"""launchctl does not wait for the end of an agent that it unloads, and refuses to load it until then."""


@dataclass(frozen=True)
class Autostart:
    kind: str
    """ "launchd", "systemd" or "cron"."""
    text: str
    """The content of the file, or the line of the crontab."""
    file: Path | None = None
    """None: the crontab."""
    to_install: tuple[tuple[str, ...], ...] = ()
    """Commands that come after the file is written."""
    to_uninstall: tuple[tuple[str, ...], ...] = ()
    """Commands that come before it is removed."""


def autostart(home: Path, user: Path | None = None) -> Autostart:
    """That of this machine. `user`: the person's own folder. Raises InputError where there is none of the three."""
    user = user or Path.home()
    name = f"flightdeck-queue-{hashlib.sha256(bytes(home)).hexdigest()[:8]}"
    argv = [sys.executable, "-P", "-m", "engine.api.queue_runner", str(home)]
    if sys.platform == "darwin":
        file, domain = user / "Library/LaunchAgents" / f"{name}.plist", f"gui/{os.getuid()}"
        keys = {"Label": name, "ProgramArguments": argv, "RunAtLoad": True, "AbandonProcessGroup": True}
        environment = {"EnvironmentVariables": {"FLIGHTDECK_HOME": str(home), "PATH": os.environ.get("PATH", "")}}
        start, end = ("launchctl", "bootstrap", domain, str(file)), ("launchctl", "bootout", f"{domain}/{name}")
        return Autostart("launchd", plistlib.dumps({**keys, **environment}).decode(), file, (start,), (end,))
    if _succeeds("systemctl", "--user", "show-environment"):
        # In arguments $ begins a variable, but in neither a program's path nor a variable's value.
        words = [_quoted(argv[0]), *(_quoted(word).replace("$", "$$") for word in argv[1:])]
        setting = _quoted(f"FLIGHTDECK_HOME={home}")
        # Supervisors that it has started go on when it ends.
        service = f"[Service]\nExecStart={' '.join(words)}\nEnvironment={setting}\nKillMode=process\n"
        text = f"[Unit]\nDescription=Flight Deck's queue\n\n{service}\n[Install]\nWantedBy=default.target\n"
        enable = ("systemctl", "--user", "enable", name), ("loginctl", "enable-linger")
        disable = (("systemctl", "--user", "disable", name),)
        return Autostart("systemd", text, user / ".config/systemd/user" / f"{name}.service", enable, disable)
    if shutil.which("crontab"):
        command = shlex.join(["env", f"FLIGHTDECK_HOME={home}", *argv]).replace("%", "\\%")
        return Autostart("cron", f"@reboot {command} # {name}")
    todo = "run any command of Flight Deck after a restart: it starts the queue again"
    raise InputError("nothing here can start the queue", why="no launchd, systemd or crontab", todo=todo)


def _quoted(word: str) -> str:
    """As systemd.syntax(7) and systemd.unit(5) have it."""
    for sign, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("%", "%%")):
        word = word.replace(sign, escaped)
    return f'"{word}"'


def install(made: Autostart) -> None:
    """Also over itself. Raises StateError."""
    if made.file is None:
        _put_crontab([*_other_lines(made), made.text])
        return
    until = time.monotonic()
    if made.file.exists():
        until += _UNLOADED_S * (made.kind == "launchd")
        # launchd refuses to load an agent twice; one that is not loaded is not unloaded.
        for command in made.to_uninstall:
            with contextlib.suppress(StateError):
                _run(command)
    try:
        made.file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(made.file, made.text)
    except OSError as error:
        raise StateError("the queue's start is not installed", where=str(made.file), why=error) from error
    for command in made.to_install:
        _run_until(until, command)


def uninstall(made: Autostart) -> None:
    """Nothing where it is not installed. Raises StateError."""
    if made.file is None:
        _put_crontab(_other_lines(made))
    elif made.file.exists():
        try:
            for command in made.to_uninstall:
                _run(command)
        finally:
            # Also of an agent that somebody has unloaded by hand.
            made.file.unlink()


def _other_lines(made: Autostart) -> list[str]:
    """Those of the crontab that are not ours. One that cannot be read is not taken for an empty one."""
    done = _done(("crontab", "-l"))
    if done.returncode and "no crontab for" not in done.stderr:
        raise StateError("the crontab cannot be read", why=plain(last_line(done.stderr), 200))
    mark = made.text.rpartition("# ")[2]
    return [line for line in done.stdout.splitlines() if not line.endswith(f"# {mark}")]


def _put_crontab(lines: list[str]) -> None:
    """crontab(1) replaces it as a whole."""
    _run(("crontab", "-"), "".join(f"{line}\n" for line in lines))


def _run_until(until: float, command: tuple[str, ...]) -> None:
    """Again and again until it succeeds, or that time has come. Raises StateError."""
    while True:
        try:
            _run(command)
        except StateError:
            if time.monotonic() >= until:
                raise
            time.sleep(_AGAIN_S)
        else:
            return


def _run(command: tuple[str, ...], given: str = "") -> None:
    done = _done(command, given)
    if done.returncode:
        why = plain(last_line(done.stderr), 200) or f"it ended with {done.returncode}"
        raise StateError(f"`{shlex.join(command)}` failed", why=why)


def _done(command: tuple[str, ...], given: str = "") -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, input=given, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise StateError(f"`{shlex.join(command)}` failed", why=str(error)) from error


def _succeeds(*command: str) -> bool:
    try:
        return _done(command).returncode == 0
    except StateError:
        return False
