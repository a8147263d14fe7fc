"""Commands that mend what a check has found, as a person can paste them on this machine."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from engine.config.models import FlightConfig, NodeConfig
from engine.security.hosts import SshTarget
from engine.transport.base import in_home, quoted

OURS = "flightdeck "
"""A fix that begins so is for this machine, whichever node it is for."""
ASIDE = ".aside"
"""Ends the name of a file that was moved out of the way."""
_FOUND_BY_ITSELF = "flightdeck.toml"
_FROM_PROFILE = ("uv ", "hf ")
"""What a login shell alone may find: on a Mac its profile names the folders of Homebrew and of uv."""


def ours(config: FlightConfig, command: str) -> str:
    """A command of ours on this very configuration: it is named where it is not the ./flightdeck.toml that is found
    without a word."""
    if config.file is None or config.file == Path(_FOUND_BY_ITSELF).absolute():
        return f"{OURS}{command}"
    return f"{OURS}{command} -c {shlex.quote(str(config.file))}"


def pasted(config: FlightConfig, fixes: Mapping[str, str]) -> str | None:
    """All of `fixes` (node → command to be run there) as one line for this machine's shell, each host's once."""
    lines = [_on(node, fixes[node.name]) for node in config.nodes if node.name in fixes]
    return " && ".join(dict.fromkeys(lines)) or None


def copies(source: NodeConfig, targets: Sequence[NodeConfig], folders: Mapping[str, str]) -> str | None:
    """What brings all files of a folder of `source` to those of `targets`, as one line for this machine's shell.
    `folders` has each node's own path of it; a host's folder is written once."""
    theirs = {(node.ssh, folders[node.name]): node for node in targets}
    theirs.pop((source.ssh, folders[source.name]), None)
    lines = [_copy(source, folders[source.name], node, folder) for (_, folder), node in theirs.items()]
    return " && ".join(lines) or None


def tree_copies(
    source: NodeConfig,
    targets: Sequence[NodeConfig],
    folders: Mapping[str, str],
    *,
    without: Sequence[str],
    left: Sequence[str],
) -> str | None:
    """As `copies`, with what is hidden too, and nothing that is left out: `without` are names wherever they are, `left`
    paths below the folder. By tar, which every system has, and nothing is deleted."""
    excluded = " ".join(f"--exclude {shlex.quote(name)}" for name in (*without, *(f"./{path}" for path in left)))
    # macOS's tar would put a file beside each that has attributes.
    pack = f"env COPYFILE_DISABLE=1 tar -C {quoted(folders[source.name])} {excluded} -cf - ."
    theirs = {(node.ssh, folders[node.name]): node for node in targets}
    theirs.pop((source.ssh, folders[source.name]), None)
    lines = []
    for (_, folder), node in theirs.items():
        unpack = f"mkdir -p {quoted(folder)} && tar -C {quoted(folder)} -xf -"
        lines.append(f"{_on(source, pack)} | {_piped(node, unpack)}")
    return " && ".join(lines) or None


def file_copies(source: NodeConfig, targets: Sequence[NodeConfig], files: Mapping[str, str]) -> str | None:
    """As `copies`, of one file with its permissions; `files` has each node's own path of it, which ends in one and the
    same name."""
    folder, name = _split(files[source.name])
    theirs = {(node.ssh, files[node.name]): node for node in targets if _split(files[node.name])[1] == name}
    theirs.pop((source.ssh, files[source.name]), None)
    pack = f"env COPYFILE_DISABLE=1 tar -C {quoted(folder)} -chf - {shlex.quote(f'./{name}')}"
    lines = []
    for (_, file), node in theirs.items():
        there = quoted(_split(file)[0])
        lines.append(f"{_on(source, pack)} | {_piped(node, f'mkdir -p {there} && tar -C {there} -xf -')}")
    return " && ".join(lines) or None


def moved_aside(node: NodeConfig, file: str) -> str:
    """What takes a file out of the way on its node, as one line for this machine's shell; nothing is deleted."""
    return _on(node, f"mv -f {quoted(file)} {quoted(f'{file}{ASIDE}')}")


def _split(file: str) -> tuple[str, str]:
    """Folder and name."""
    path = PurePosixPath(file)
    return str(path.parent), path.name


def _piped(node: NodeConfig, command: str) -> str:
    """A command that reads its stdin, on this machine in a shell of its own: its && would end the pipe."""
    return f"({command})" if node.local else _on(node, command)


def _copy(source: NodeConfig, there: str, target: NodeConfig, here: str) -> str:
    make = f"mkdir -p {quoted(here)}"
    if source.local and target.local:
        return f"{make} && cp -R {quoted(there)}/* {quoted(here)}/"
    # From one node to another through this machine: they need not know each other.
    copy = "scp -r" if source.local or target.local else "scp -3 -r"
    return f"{_on(target, make)} && {copy} {_place(source, there, '/*')} {_place(target, here, '/')}"


def _on(node: NodeConfig, command: str) -> str:
    if node.local or command.startswith(OURS):
        return command
    # It may ask for a password.
    terminal = "-t " if _runs_sudo(command) else ""
    if command.startswith(_FROM_PROFILE):
        command = f'"$SHELL" -lc {shlex.quote(command)}'
    return f"ssh {terminal}{SshTarget.parse(node.ssh).openssh} {shlex.quote(command)}"


def _runs_sudo(command: str) -> bool:
    """Whether sudo is a program of this command, one of our own without subshells, and not a word of a path in it."""
    words = shlex.shlex(command, posix=True, punctuation_chars="|&;")
    words.whitespace_split, words.commenters = True, ""
    return any(
        word == "sudo" and before and set(before) <= set("|&;") for before, word in itertools.pairwise((";", *words))
    )


def _place(node: NodeConfig, folder: str, files: str) -> str:
    """A folder, and which of its files, as scp takes them. A path in the home is one without a folder before it."""
    if node.local:
        return quoted(folder) + files
    target = SshTarget.parse(node.ssh)
    inside = in_home(folder)
    path = (inside if inside is not None else str(PurePosixPath(folder))) or "."
    if target.port is not None:
        return shlex.quote(f"{_scheme(target)}/{path}{files}")
    return shlex.quote(f"{target.openssh}:{path}{files}")


def _scheme(target: SshTarget) -> str:
    return "scp" + target.openssh.removeprefix("ssh")
