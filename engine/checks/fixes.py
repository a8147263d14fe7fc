"""Shell commands that fix what a check has found, ready to be pasted on this machine."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePath, PurePosixPath

from engine.cluster.transport.base import in_home, quoted
from engine.config.models import Config, NodeConfig
from engine.security.identifiers import SshTarget

FLIGHTDECK = "flightdeck "
"""A fix that begins with it runs on this machine, whichever node it is for."""
ASIDE = ".aside"
"""Suffix of a file that was moved out of the way, before its hash."""
_NOT_HEX = re.compile(r"[^0-9a-f]")
_DEFAULT_CONFIG = "flightdeck.toml"
_FROM_PROFILE = ("uv", "hf")
"""Programs that may be on a login shell's PATH only: on a Mac its profile names the folders of Homebrew and of uv."""
_ESCAPED = "\\ud"
"""In a path from a node: a byte of its name is not UTF-8, and was replaced by this escape (security.sanitise.plain)."""
_PACK = "env COPYFILE_DISABLE=1 tar"
"""Without it macOS's tar puts a file beside each file that has attributes."""


def flightdeck_command(config: Config, command: str) -> str:
    """A flightdeck command on this configuration, with -c unless it is the default ./flightdeck.toml."""
    if config.file is None or config.file == Path(_DEFAULT_CONFIG).absolute():
        return f"{FLIGHTDECK}{command}"
    return f"{FLIGHTDECK}{command} -c {shlex.quote(str(config.file))}"


def chained(lines: Iterable[str | None]) -> str | None:
    """The lines as one, each once; None where there is none."""
    return " && ".join(dict.fromkeys(filter(None, lines))) or None


def as_shell_line(config: Config, fixes: Mapping[str, str]) -> str | None:
    """All of `fixes` (node → command to be run there) as one line for this machine's shell, each host's once."""
    return chained(_on(node, fixes[node.name]) for node in config.nodes if node.name in fixes)


def on_path(command: str, path: str | None) -> str | None:
    """`command` for a path from a node; None where there is none, or no command can name it."""
    return f"{command} {quoted(path)}" if path is not None and _ESCAPED not in path else None


def copy_folder(source: NodeConfig, targets: Sequence[NodeConfig], folders: Mapping[str, str]) -> str | None:
    """A line for this machine's shell that copies the files of a folder of `source` to `targets`. `folders` has each
    node's own path of it; a folder that several nodes share is written once."""
    return _for_each(source, targets, folders, lambda node, path: _copy(source, folders[source.name], node, path))


def copy_tree(
    source: NodeConfig,
    targets: Sequence[NodeConfig],
    folders: Mapping[str, str],
    *,
    exclude_names: Sequence[str],
    exclude_paths: Sequence[str],
) -> str | None:
    """Like `copy_folder`, hidden files included and without `exclude_names` (anywhere) and `exclude_paths` (below the
    folder). Uses tar, which every system has, and deletes nothing. None also where it cannot name a path."""
    if any(_ESCAPED in path for path in exclude_paths):
        return None
    excluded = (*exclude_names, *(f"./{path}" for path in exclude_paths))
    options = " ".join(f"--exclude {shlex.quote(name)}" for name in excluded)
    pack = _on(source, f"{_PACK} -C {quoted(folders[source.name])} {options} -cf - .")
    return _for_each(source, targets, folders, lambda node, path: f"{pack} | {_unpack(node, path)}")


def copy_file(source: NodeConfig, file: PurePosixPath, target: NodeConfig, folder: PurePosixPath) -> str:
    """A line for this machine's shell that copies a file of `source`, with its permissions, to a folder of `target`."""
    pack = _on(source, f"{_PACK} -C {quoted(file.parent)} -chf - {shlex.quote(f'./{file.name}')}")
    return f"{pack} | {_unpack(target, folder)}"


def move_aside(node: NodeConfig, file: str, seen: str | None) -> str | None:
    """A line for this machine's shell that renames a file on its node, so that a copy does not overwrite it; `seen` is
    its hash, which becomes part of its new name. None for a file that is not there (`seen` is None) or cannot be named.
    """
    if seen is None or (move := on_path("mv", file)) is None:
        return None
    aside = quoted(f"{file}{ASIDE}-{_NOT_HEX.sub('', seen)[:12]}")
    return _on(node, f"test ! -e {aside} && {move} {aside}")


def _for_each(
    source: NodeConfig,
    targets: Sequence[NodeConfig],
    paths: Mapping[str, str],
    command: Callable[[NodeConfig, str], str],
) -> str | None:
    """`command` of each distinct path of `targets` other than the source's, chained."""
    distinct = {(node.ssh, paths[node.name]): node for node in targets}
    distinct.pop((source.ssh, paths[source.name]), None)
    return chained(command(node, path) for (_, path), node in distinct.items())


def _unpack(node: NodeConfig, folder: PurePath | str) -> str:
    command = f"mkdir -p {quoted(folder)} && tar -C {quoted(folder)} -xf -"
    # In a subshell here: its && would end the pipe.
    return f"({command})" if node.local else _on(node, command)


def _copy(source: NodeConfig, source_folder: str, target: NodeConfig, target_folder: str) -> str:
    make = f"mkdir -p {quoted(target_folder)}"
    if source.local and target.local:
        return f"{make} && cp -R {quoted(source_folder)}/* {quoted(target_folder)}/"
    # -3 copies through this machine: the nodes need not reach each other.
    copy = "scp -r" if source.local or target.local else "scp -3 -r"
    paths = f"{_scp_path(source, source_folder, '/*')} {_scp_path(target, target_folder, '/')}"
    return f"{_on(target, make)} && {copy} {paths}"


def _on(node: NodeConfig, command: str) -> str:
    if node.local or command.startswith(FLIGHTDECK):
        return command
    terminal = "-t " if asks_for_password(command) else ""
    if _runs(command, *_FROM_PROFILE):
        command = f'"$SHELL" -lc {shlex.quote(command)}'
    return f"ssh {terminal}{SshTarget.parse(node.ssh).openssh} {shlex.quote(command)}"


def asks_for_password(command: str) -> bool:
    """It needs a terminal: sudo refuses to ask without one."""
    return _runs(command, "sudo")


def _runs(command: str, *programs: str) -> bool:
    """One of them is a program of this command, one of ours without subshells, and not part of a path in it."""
    words = shlex.shlex(command, posix=True, punctuation_chars="|&;")
    words.whitespace_split, words.commenters = True, ""
    return any(
        word in programs and before and set(before) <= set("|&;") for before, word in itertools.pairwise((";", *words))
    )


def _scp_path(node: NodeConfig, folder: str, files: str) -> str:
    """A folder and which of its files, as scp takes them; a path in the home is relative there."""
    if node.local:
        return quoted(folder) + files
    target = SshTarget.parse(node.ssh)
    inside = in_home(folder)
    path = (inside if inside is not None else str(PurePosixPath(folder))) or "."
    if target.port is not None:
        return shlex.quote(f"scp{target.openssh.removeprefix('ssh')}/{path}{files}")
    return shlex.quote(f"{target.openssh}:{path}{files}")
