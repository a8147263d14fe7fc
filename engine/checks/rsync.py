"""`flightdeck sync`: runs the user's sync script, or copies this machine's project to every node with rsync, then
compares the workdirs.

Only flags that the rsync of macOS also has are used, and no file that exists only on a node is deleted."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from engine.checks import sync
from engine.checks.check import THIS_MACHINE, this_machine
from engine.checks.context import CheckContext
from engine.cluster.transport.base import quoted
from engine.cluster.transport.local import LocalTransport
from engine.cluster.transport.ssh_config import write_openssh_config
from engine.config.models import Config, NodeConfig
from engine.errors import InputError, LaunchError
from engine.launch.ssh_shim import openssh_client, put_first
from engine.models import NodeSync, SyncReport
from engine.security.identifiers import SshTarget
from engine.security.paths import make_home

COPY_LIMIT_S = 1800.0
"""For a whole project over a slow link."""
_NAMED = 20
"""Differing files of a node that the report names."""
_NO_RSYNC = re.compile(r"rsync\S*: (?:command )?not found|not found: rsync", re.IGNORECASE)
_INSTALL = "brew install rsync, or sudo apt-get install rsync"

OnLine = Callable[[str], None]


async def sync_workdirs(context: CheckContext, home: Path, *, dry_run: bool, on_line: OnLine) -> SyncReport:
    """Make the workdirs the same and compare them; `on_line` gets each line of output on the way. Raises InputError for
    a script or a source that is refused, LaunchError when this machine has no rsync."""
    config = context.config
    script = sync.find_sync_script(config)
    absent = isinstance(script, sync.SyncScriptOutcome) and script.status == "not_found"
    method: Literal["script", "rsync"] = "rsync" if absent else "script"
    source = sync_source(config) if method == "rsync" else None
    # One node for each workdir other than the source.
    source_workdir = (source.ssh, source.workdir) if source is not None else None
    targets = [node for node in sync.distinct_workdirs(config) if (node.ssh, node.workdir) != source_workdir]
    message, output, problems = "compared only", tuple[str, ...](), dict[str, str]()
    if not dry_run and source is not None:
        problems = await _copy(context, home, source, targets, on_line)
        message = f"copied from {source.workdir}" if not problems else f"not copied to {', '.join(problems)}"
    elif not dry_run:
        scripted = await sync.run_script(config, on_line)
        message, output = scripted.message, scripted.lines
        if scripted.status == "failed":
            return SyncReport(dry_run=False, method=method, synced=False, message=message, output=output)
    compared = await _compare(context, source, targets)
    nodes = {node.name: _node_sync(node.name, compared, problems) for node in targets}
    return SyncReport(
        dry_run=dry_run,
        method=method,
        synced=all(node.same for node in nodes.values()),
        message=message,
        reference=compared.reference.name,
        output=output,
        nodes=nodes,
    )


def sync_source(config: Config) -> NodeConfig:
    """The source of the copy: the workdir of the node that is this machine, else the configuration's folder. Raises
    InputError for a bare home, which is no project."""
    local = next((node for node in config.nodes if node.local), None)
    if local is None and config.file is None:
        raise InputError(
            "there is nothing to copy from", why="no node is this machine, and the configuration is not a file"
        )
    folder = Path(local.workdir) if local is not None else config.folder
    if folder.resolve() in (Path.home().resolve(), Path("/")):
        raise InputError(
            f"{folder} is not copied", why="it is not a project", todo="set workdir in [[node]] to the project's folder"
        )
    return local or this_machine(str(folder))


def rsync_argv(source: Path, target: NodeConfig, exclude: Iterable[str], *, every_file: bool = False) -> list[str]:
    """The command that copies `source` to a node's workdir. `every_file` also copies files of the same size and time,
    which rsync otherwise takes to be the same."""
    excluded = [word for name in (*sync.EXCLUDED, *(f"/{path}" for path in exclude)) for word in ("--exclude", name)]
    argv = ["rsync", "-rlpt", *(["-I"] if every_file else []), *excluded]
    if target.local:
        return [*argv, f"{source}/", f"{target.workdir}/"]
    # The port is an option of our ssh.
    host, workdir = replace(SshTarget.parse(target.ssh), port=None), quoted(target.workdir)
    # The two ends' versions quote a remote path differently, so the remote rsync is started in the folder instead.
    begin = f'mkdir -p {workdir} && cd {workdir} && exec rsync "$@"'
    return [*argv, "--rsync-path", f"/bin/sh -c {shlex.quote(begin)} rsync", f"{source}/", f"{host}:./"]


async def _copy(
    context: CheckContext, home: Path, source: NodeConfig, targets: Sequence[NodeConfig], on_line: OnLine
) -> dict[str, str]:
    """Copy to `targets`, and once more, every file, to those that still differ. Node → why it failed."""
    if shutil.which("rsync") is None:
        raise LaunchError("there is no rsync", where=THIS_MACHINE, todo=_INSTALL)
    before = await _compare(context, source, targets)
    copier = _Copier(home, source, before.trees[source.name].left, on_line)
    problems = dict.fromkeys(
        before.homes, "its workdir is a bare home: set workdir in its [[node]] to the project's folder"
    )
    for name, difference in before.differences.items():
        if blocking := difference.blocking:
            problems[name] = f"{blocking[0]} is a folder here, and a file or link there: move it out of the way first"
    await asyncio.to_thread(make_home, home)
    problems |= await copier.copy_to([node for node in targets if node.name not in problems])
    compared = await _compare(context, source, targets)
    differing = [node for node in targets if node.name not in problems and compared.differences.get(node.name)]
    return problems | await copier.copy_to(differing, every_file=True)


@dataclass(frozen=True)
class _Copier:
    home: Path
    source: NodeConfig
    exclude: Sequence[str]
    on_line: OnLine

    async def copy_to(self, targets: Sequence[NodeConfig], *, every_file: bool = False) -> dict[str, str]:
        """Copy to all `targets` at once; node → why it failed."""
        # One after the other: some share a file.
        shims = [None if node.local else await asyncio.to_thread(_ssh_shim, self.home, node) for node in targets]
        copies = (self._copy_to(node, shim, every_file) for node, shim in zip(targets, shims, strict=True))
        failures = await asyncio.gather(*copies)
        return {node.name: why for node, why in zip(targets, failures, strict=True) if why is not None}

    async def _copy_to(self, target: NodeConfig, shim: Path | None, every_file: bool) -> str | None:
        argv = rsync_argv(Path(self.source.workdir), target, self.exclude, every_file=every_file)
        environment = {"PATH": f"{shim}:{os.environ.get('PATH', os.defpath)}"} if shim is not None else {}
        if target.local:
            await asyncio.to_thread(Path(target.workdir).mkdir, parents=True, exist_ok=True)
        ended = await LocalTransport().run(
            argv,
            timeout_s=COPY_LIMIT_S,
            environment=environment,
            on_line=lambda line: self.on_line(f"{target.name}: {line}"),
        )
        if ended.code == 0:
            return None
        lines = sync.last_lines(ended)
        if any(_NO_RSYNC.search(line) for line in lines):
            return f"there is no rsync on {target.name} ({_INSTALL})"
        how = f"rsync ended with {ended.code}" if ended.code is not None else f"no end within {COPY_LIMIT_S:.0f} s"
        first = next((line for line in lines if "error" not in line), lines[-1] if lines else "")
        return f"{how}: {first}" if first else how


def _ssh_shim(home: Path, target: NodeConfig) -> Path:
    """A folder whose `ssh` is the real one with our settings: an option of rsync's would split a path with a space."""
    make_home(home)
    config = home / "ssh_config.sync"
    write_openssh_config(config, home)
    port = SshTarget.parse(target.ssh).port
    option = f" -p {port}" if port is not None else ""
    text = f'#!/bin/sh\nexec {shlex.quote(openssh_client())} -F {shlex.quote(str(config))}{option} "$@"\n'
    return put_first(home / "sync" / (f"port{port}" if port is not None else "ssh"), text, "rsync")


async def _compare(
    context: CheckContext, source: NodeConfig | None, targets: Sequence[NodeConfig]
) -> sync.WorkdirComparison:
    """Against what is copied, where something is; else as the check does it. Raises LaunchError for a bad source."""
    if source is None:
        return await sync.compare_workdirs(context, targets)
    compared = await sync.compare_workdirs(context, [source, *targets])
    if source.name in compared.problems:
        raise LaunchError(compared.problems[source.name], where=THIS_MACHINE)
    return compared


def _node_sync(name: str, compared: sync.WorkdirComparison, problems: Mapping[str, str]) -> NodeSync:
    problem = problems.get(name) or compared.problems.get(name)
    if name in compared.homes and problem is None:
        problem = "its workdir is a bare home: it is not compared"
    if problem is not None:
        return NodeSync(same=False, problem=problem)
    difference = compared.differences.get(name, sync.TreeDifference())
    return NodeSync(
        same=not difference,
        differing=difference.different[:_NAMED],
        differing_count=len(difference.different),
        missing=difference.missing[:_NAMED],
        missing_count=len(difference.missing),
        own_count=len(difference.extra),
    )
