"""`flightdeck sync`: the user's own script, or rsync of this machine's project to every node; then the proof.

rsync's flags are those that macOS's own rsync has too; nothing that a node has of its own is deleted.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from engine.config.models import FlightConfig, NodeConfig
from engine.errors import InputError, LaunchError
from engine.models import NodeSync, SyncReport
from engine.preflight.answers import Tree
from engine.preflight.scene import Scene, read
from engine.preflight.script import find, run
from engine.preflight.sync import HERE, Proof, prove, run_script
from engine.preflight.tree import LEFT_OUT, READ_LIMIT_S, Difference, folders, question
from engine.security.home import make_home, make_private
from engine.security.hosts import LOCAL, SshTarget
from engine.transport.base import quoted
from engine.transport.local import LocalTransport
from engine.transport.openssh import write_openssh_config
from engine.worker.wire import write_atomic

COPY_LIMIT_S = 1800.0
"""For all of a project over a slow link."""
_NAMED = 20
"""So many differing files of a node are in the report."""
_NO_RSYNC = re.compile(r"rsync\S*: (?:command )?not found|not found: rsync", re.IGNORECASE)
_INSTALL = "brew install rsync, or sudo apt-get install rsync"

Heard = Callable[[str], None]


async def synchronise(scene: Scene, home: Path, *, dry_run: bool, heard: Heard) -> SyncReport:
    """Make the nodes alike and prove it; `heard` is told each line on the way. Raises InputError for a script or a
    source that is refused, LaunchError when this machine has no rsync."""
    config = scene.config
    method: Literal["script", "rsync"] = "rsync" if find(config).absent else "script"
    source = source_of(config) if method == "rsync" else None
    words, output, problems = "compared only", tuple[str, ...](), dict[str, str]()
    if not dry_run and source is not None:
        lacking = await _copy(scene, home, source, heard)
        problems = lacking
        words = f"copied from {source.workdir}" if not lacking else f"not copied to {', '.join(lacking)}"
    elif not dry_run:
        scripted = await run_script(config, heard)
        words, output = scripted.words, scripted.lines
        if scripted.status == "failed":
            return SyncReport(dry_run=False, method=method, synced=False, words=words, output=output)
    proof = await _prove(scene, source)
    nodes = {name: _node(name, proof, problems) for name in _compared(config, source)}
    return SyncReport(
        dry_run=dry_run,
        method=method,
        synced=all(node.same for node in nodes.values()),
        words=words,
        reference=proof.reference.name,
        output=output,
        nodes=nodes,
    )


def source_of(config: FlightConfig) -> NodeConfig:
    """What is copied: the workdir of the node that is this machine, else the configuration's folder. Raises InputError
    for a bare home: it is no project."""
    local = next((node for node in config.nodes if node.local), None)
    if local is None and config.file is None:
        raise InputError(
            "there is nothing to copy from", why="no node is this machine, and the configuration is no file"
        )
    folder = Path(local.workdir) if local is not None else (config.file or Path("/")).parent
    if folder.resolve() in (Path.home().resolve(), Path("/")):
        raise InputError(
            f"{folder} is not copied", why="it is no project", todo="set workdir in [[node]] to the project's folder"
        )
    return local or NodeConfig(name=HERE, ssh=LOCAL, python=sys.executable, workdir=str(folder))


def rsync_argv(source: Path, target: NodeConfig, left: Iterable[str], *, anew: bool = False) -> list[str]:
    """The command that copies `source` to a node's workdir. `anew` reads every file, also those of the same size and
    time, which are else taken for the same."""
    excluded = [word for name in (*LEFT_OUT, *(f"/{path}" for path in left)) for word in ("--exclude", name)]
    argv = ["rsync", "-rlpt", *(["-I"] if anew else []), *excluded]
    if target.local:
        return [*argv, f"{source}/", f"{target.workdir}/"]
    workdir = quoted(target.workdir)
    # The one way past how the two ends' versions quote a path: the far end begins in the folder, made where it is not.
    begin = f'mkdir -p {workdir} && cd {workdir} && exec rsync "$@"'
    return [*argv, "--rsync-path", f"/bin/sh -c {shlex.quote(begin)} rsync", f"{source}/", f"{_host(target)}:./"]


async def _copy(scene: Scene, home: Path, source: NodeConfig, heard: Heard) -> dict[str, str]:
    """Copy to every other workdir, and to those that differ after it once more, thoroughly; node → why it failed."""
    if shutil.which("rsync") is None:
        raise LaunchError("there is no rsync", where=HERE, todo=_INSTALL)
    left = (await _tree_here(scene.config, source)).left
    before = await _prove(scene, source)
    problems = dict.fromkeys(
        before.homes, "its workdir is a bare home: set workdir in its [[node]] to the project's folder"
    )
    for name, difference in before.differences.items():
        if blocked := difference.in_the_way:
            problems[name] = f"{blocked[0]} is a folder here, and a file or link there: move it out of the way first"
    others = [node for key, node in folders(scene.config).items() if key != (source.ssh, source.workdir)]
    targets = [node for node in others if node.name not in problems]
    await asyncio.to_thread(make_home, home)
    problems |= await _all(home, source, targets, left, heard, anew=False)
    good = [node for node in targets if node.name not in problems]
    proof = await _prove(scene, source)
    differing = [node for node in good if proof.differences.get(node.name)]
    return problems | await _all(home, source, differing, left, heard, anew=True)


async def _all(
    home: Path, source: NodeConfig, targets: Sequence[NodeConfig], left: Sequence[str], heard: Heard, *, anew: bool
) -> dict[str, str]:
    # One after the other: some are one and the same file.
    ways = [None if node.local else await asyncio.to_thread(_ssh, home, node) for node in targets]
    said = await asyncio.gather(
        *(_one(source, node, way, left, heard, anew=anew) for node, way in zip(targets, ways, strict=True))
    )
    return {node.name: why for node, why in zip(targets, said, strict=True) if why is not None}


async def _one(
    source: NodeConfig, target: NodeConfig, way: Path | None, left: Sequence[str], heard: Heard, *, anew: bool
) -> str | None:
    """Copy to one node, with the `ssh` of the folder `way`; why it failed, if so."""
    argv = rsync_argv(Path(source.workdir), target, left, anew=anew)
    environment = dict(os.environ)
    if way is not None:
        environment["PATH"] = f"{way}:{environment.get('PATH', os.defpath)}"

    def tell(line: str) -> None:
        heard(f"{target.name}: {line}")

    if target.local:
        await asyncio.to_thread(Path(target.workdir).mkdir, parents=True, exist_ok=True)
    ran = await run(argv, limit_s=COPY_LIMIT_S, directory=Path("/"), heard=tell, environment=environment)
    if ran.code == 0:
        return None
    if any(_NO_RSYNC.search(line) for line in ran.lines):
        return f"there is no rsync on {target.name} ({_INSTALL})"
    ended = f"rsync ended with {ran.code}" if ran.code is not None else f"no end within {COPY_LIMIT_S:.0f} s"
    first = next((line for line in ran.lines if "error" not in line), ran.lines[-1] if ran.lines else "")
    return f"{ended}: {first}" if first else ended


def _ssh(home: Path, target: NodeConfig) -> Path:
    """A folder whose `ssh` is the real one with our settings: an option of rsync's would tear a path with a space."""
    real = shutil.which("ssh")
    if real is None:
        raise LaunchError("there is no ssh", where=HERE, todo="install OpenSSH's client")
    if ":" in str(home):
        raise LaunchError("rsync cannot be given our ssh", where=str(home), why="a : in a path ends it on PATH")
    make_private(home)
    config = home / "ssh_config.sync"
    write_openssh_config(config, home)
    port = SshTarget.parse(target.ssh).port
    folder = home / "sync" / (f"port{port}" if port is not None else "ssh")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    option = f" -p {port}" if port is not None else ""
    write_atomic(folder / "ssh", f'#!/bin/sh\nexec {shlex.quote(real)} -F {shlex.quote(str(config))}{option} "$@"\n')
    (folder / "ssh").chmod(0o700)
    return folder


def _host(node: NodeConfig) -> str:
    target = SshTarget.parse(node.ssh)
    host = f"[{target.host}]" if ":" in target.host else target.host
    return f"{target.user}@{host}" if target.user else host


async def _prove(scene: Scene, source: NodeConfig | None) -> Proof:
    """Against what was copied, where this machine is no node; else as the check does it."""
    if source is None or source.name != HERE:
        return await prove(scene)
    return await prove(scene, (source, await _tree_here(scene.config, source)))


async def _tree_here(config: FlightConfig, source: NodeConfig) -> Tree:
    """The tree of a folder of this machine. Raises LaunchError when it cannot be read."""
    adapters = config.job.mlx_lm.get("adapter_path")
    apart = [str(Path(source.workdir) / Path(str(adapters)).expanduser())] if adapters else []
    argv = [sys.executable, "-m", "engine.worker.looks.tree", source.workdir, json.dumps(question(apart))]
    done = await LocalTransport().run(argv, timeout_s=READ_LIMIT_S)
    for line in reversed(done.stdout.splitlines()):
        if (answer := read(line, Tree)) is not None:
            if answer.problem is not None:
                raise LaunchError(answer.problem, where=HERE)
            return answer
    raise LaunchError("the source cannot be read", where=source.workdir, why=done.last_words[:200])


def _compared(config: FlightConfig, source: NodeConfig | None) -> list[str]:
    """The nodes that are compared with the reference: one for each other workdir."""
    where = list(folders(config).values())
    return [node.name for node in where if source is None or (node.ssh, node.workdir) != (source.ssh, source.workdir)]


def _node(name: str, proof: Proof, problems: Mapping[str, str]) -> NodeSync:
    problem = problems.get(name) or proof.problems.get(name)
    if name in proof.homes and problem is None:
        problem = "its workdir is a bare home: it is not compared"
    if problem is not None:
        return NodeSync(same=False, problem=problem)
    found = proof.differences.get(name, Difference())
    return NodeSync(
        same=not found,
        differing=found.other[:_NAMED],
        differing_count=len(found.other),
        missing=found.missing[:_NAMED],
        missing_count=len(found.missing),
        own_count=len(found.own),
    )
