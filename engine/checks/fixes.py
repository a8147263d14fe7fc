"""Shell commands that fix what a check has found, ready to be pasted on this machine."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath, PurePosixPath
from typing import NamedTuple

from engine.cluster.transport.base import quoted
from engine.config.models import Config, NodeConfig
from engine.security.identifiers import SshTarget

FLIGHTDECK = "flightdeck "
"""A fix that begins with it runs on this machine, whichever node it is for."""
MAKE_ENVIRONMENT = f"{FLIGHTDECK}environments make"
"""Begins a fix that the console runs here; any other of FLIGHTDECK a person does, or the console in its own way."""
ASIDE = ".aside"
"""Suffix of a file that was moved out of the way, before its hash."""
_NOT_HEX = re.compile(r"[^0-9a-f]")
_DEFAULT_CONFIG = "flightdeck.toml"
_FROM_PROFILE = ("uv", "hf")
"""Programs that may be on a login shell's PATH only: on a Mac its profile names the folders of Homebrew and of uv."""
_ESCAPED = "\\ud"
"""In a path from a node: a byte of its name is not UTF-8, and was replaced by this escape (security.sanitise.plain)."""
REPLACED = '"$HOME"/.flightdeck/replaced'
"""On a node."""
_PACK = "env COPYFILE_DISABLE=1 tar"
"""Without it macOS's tar puts a file beside each file that has attributes."""
_KEEP = "$(tar --help | grep -q skip-old-files && echo --skip-old-files || echo -k)"
"""The option not to overwrite: GNU tar fails at its -k, macOS's tar skips the file."""
LISTS = "lists the largest folders, and changes nothing"
ENDS = "ends these processes for good, with what they have not saved: it cannot be taken back"
_EFFECTS = {
    "mkdir -p": "makes a folder; rmdir removes it",
    "rm": "removes an empty file; touch makes it again",
    "chmod +x": "lets it be run; chmod -x takes that back",
    "chmod u+rx": "lets its owner read and run it; chmod u-rx takes that back",
    "chmod u+rX": "lets its owner read it; chmod u-r takes that back",
    "chmod u+rwx": "gives its owner all rights to it; chmod u-rwx takes them back",
    'sudo chown "$USER"': "makes you its owner; chown gives it back",
}


class Fix(NamedTuple):
    command: str
    effect: str
    """The change, and how it is taken back."""


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


def path_fix(command: str, path: str | None) -> Fix | None:
    """As `on_path`, with the effect of a command of `_EFFECTS`."""
    line = on_path(command, path)
    return Fix(line, _EFFECTS[command]) if line is not None else None


def copies(lines: Iterable[str | None], source: NodeConfig, folder: PurePath | str) -> Fix | None:
    """Lines of `move_aside`, `copy_folder` and `copy_file` as one fix; it ends at once if `folder` cannot be read."""
    if (line := chained(lines)) is None:
        return None
    effect = f"copies files and overwrites none: one that differs is renamed to *{ASIDE}-HASH; mv brings it back"
    return Fix(f"{_on(source, f'test -r {quoted(folder)}')} && {line}", effect)


def copy_folder(source: NodeConfig, targets: Sequence[NodeConfig], folders: Mapping[str, str]) -> str | None:
    """A line for this machine's shell that copies the files of a folder of `source`, hidden ones apart, to `targets`,
    and overwrites none. `folders` has each node's path of it; one that several nodes share is written once."""
    # macOS's tar reads ./ as nothing: to it './.*' is the folder itself.
    pack = _pack(source, f"-C {quoted(folders[source.name])} --exclude './.?*' -chf - .")
    return _for_each(source, targets, folders, pack)


def copy_tree(
    source: NodeConfig,
    targets: Sequence[NodeConfig],
    folders: Mapping[str, str],
    *,
    exclude_names: Sequence[str],
    exclude_paths: Sequence[str],
) -> str | None:
    """Like `copy_folder`, hidden files included and without `exclude_names` (anywhere) and `exclude_paths` (below the
    folder). Overwrites, once the folder as it was is in REPLACED; deletes nothing. None for a path it cannot name."""
    if any(_ESCAPED in path for path in exclude_paths):
        return None
    # Only below the folder itself: the first pattern is for GNU tar, the second for macOS's.
    excluded = (*exclude_names, *(f"{start}/{path}" for path in exclude_paths for start in ("[.]", "^.")))
    options = " ".join(f"--exclude {shlex.quote(name)}" for name in excluded)
    pack = _pack(source, f"-C {quoted(folders[source.name])} {options} -cf - .")
    return _for_each(source, targets, folders, pack, saved=options)


def copy_file(source: NodeConfig, file: PurePosixPath, target: NodeConfig, folder: PurePosixPath) -> str:
    """A line for this machine's shell that copies a file of `source`, with its permissions, to a folder of `target`,
    unless it has one of this name."""
    pack = _pack(source, f"-C {quoted(file.parent)} -chf - {shlex.quote(f'./{file.name}')}")
    return f"{pack} | {_unpack(target, folder, keep=True)}"


def move_aside(node: NodeConfig, file: str, seen: str | None) -> str | None:
    """A line for this machine's shell that renames a file on its node, to make room for a copy; `seen` is its hash, or
    "" where it cannot be read. None for a file that is not there (`seen` is None) or cannot be named."""
    if seen is None or (move := on_path("mv", file)) is None:
        return None
    aside = quoted(f"{file}{ASIDE}-{_NOT_HEX.sub('', seen)[:12] or 'unread'}")
    return _on(node, f"test ! -e {aside} && {move} {aside}")


def _for_each(
    source: NodeConfig, targets: Sequence[NodeConfig], paths: Mapping[str, str], pack: str, saved: str | None = None
) -> str | None:
    """The output of `pack`, unpacked in each distinct path of `targets` other than the source's. Overwrites nothing
    without `saved`: the options of tar for an archive of what is there, in REPLACED."""
    distinct = {(node.ssh, paths[node.name]): node for node in targets}
    distinct.pop((source.ssh, paths[source.name]), None)
    lines = list[str]()
    for (_, path), node in distinct.items():
        if saved is not None:
            archive = f'{REPLACED}/{shlex.quote(PurePath(path).name)}-"$(date +%Y%m%d-%H%M%S)".tar.gz'
            save = f"mkdir -p {REPLACED} && {_PACK} -C {quoted(path)} {saved} -czf {archive} ."
            lines.append(_on(node, posix(f"test ! -d {quoted(path)} || {{ {save}; }}")))
        lines.append(f"{pack} | {_unpack(node, path, keep=saved is None)}")
    return chained(lines)


def _pack(node: NodeConfig, arguments: str) -> str:
    # macOS's tar takes no input at all for an archive without files; this is none.
    return _on(node, posix(f"{_PACK} {arguments} || printf x"))


def _unpack(node: NodeConfig, folder: PurePath | str, *, keep: bool) -> str:
    return _on(node, posix(f"mkdir -p {quoted(folder)} && tar -C {quoted(folder)} {_KEEP + ' ' if keep else ''}-xf -"))


def posix(command: str) -> str:
    """For a login shell such as fish or tcsh, and as one command of a chain."""
    return f"sh -c {shlex.quote(command)}"


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
    """One of them is a program of this command, one of ours, and not part of a path in it."""
    words = shlex.shlex(command, posix=True, punctuation_chars="|&;")
    words.whitespace_split, words.commenters = True, ""
    return any(
        (word in programs and before and set(before) <= set("|&;")) or (before == "-c" and _runs(word, *programs))
        for before, word in itertools.pairwise((";", *words))
    )
