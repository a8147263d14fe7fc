"""pre_rdma_sync: the user's sync script has run, and the workers have the same files. The first is heard, the second is
proved.

Without a script the trees are compared all the same, and a difference warns: nobody has said that they should be equal.
A workdir that is a bare home is not read: it is no project, and what lies in it is the user's own business.
"""

from __future__ import annotations

import errno
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.config.models import FlightConfig, NodeConfig
from engine.errors import FlightDeckError, InputError
from engine.models import CheckResult, CheckStatus, PreRdmaSync
from engine.planning.before_launch import sync_not_applicable, sync_switched_off
from engine.preflight import connectivity
from engine.preflight.answers import Tree
from engine.preflight.check import Check, Findings, verdict
from engine.preflight.fixes import pasted, tree_copies
from engine.preflight.scene import Scene
from engine.preflight.script import Ran, Script, find, run
from engine.preflight.tree import LEFT_OUT, READ_LIMIT_S, Difference, compare, counted, folders, trees
from engine.transport.base import quoted

NAME = "pre_rdma_sync"
SCRIPT_LIMIT_S = 300.0
_TELL_EVERY_S = 0.25
"""Each word about the progress is written to the disk of a run."""
_SHELL = "/bin/sh"
HERE = "this machine"

SyncStatus = Literal["success", "failed", "not_found"]


@dataclass(frozen=True)
class Scripted:
    """What came of the sync script."""

    status: SyncStatus
    words: str
    lines: tuple[str, ...] = ()
    fix: str | None = None
    advice: str = ""


@dataclass(frozen=True)
class Proof:
    """The trees of all workdirs against the reference."""

    reference: NodeConfig
    words: dict[str, str]
    """Node → what was seen there."""
    differences: dict[str, Difference]
    problems: dict[str, str]
    """Node → why it could not be compared, though it should have been."""
    permits: dict[str, str]
    """Of these, node → what may not be read there."""
    absent: tuple[str, ...]
    """Of these, nodes that have no such folder."""
    homes: tuple[str, ...]
    """Nodes whose workdir is a bare home."""
    left: tuple[str, ...] = ()
    """Paths of the reference's tree that are no part of it."""

    @property
    def compared(self) -> int:
        return len(self.differences)


async def look(scene: Scene) -> CheckResult:
    told = _Sparing(lambda words: scene.progress(NAME, words))
    scripted = await run_script(scene.config, told)
    proof = None
    if scripted.status != "failed":
        scene.progress(NAME, f"{scripted.words}; comparing the trees")
        proof = await prove(scene)
    return judge(scene.config, scripted, proof)


async def run_script(config: FlightConfig, heard: Callable[[str], None]) -> Scripted:
    """Run the script, if there is one; `heard` is told each line that it says."""
    try:
        script = find(config)
    except InputError as error:
        return Scripted("failed", f"[preflight] sync_script: {error}")
    if script.absent:
        return Scripted("not_found", f"no sync script {config.preflight.sync_script}")
    if script.fault is not None:
        fix = f"chmod u+rx {shlex.quote(str(script.path))}" if script.permit else None
        return Scripted("failed", script.fault, fix=fix)
    directory = config.file.parent if config.file is not None else Path.home()
    try:
        ran = await _run(script, directory, heard)
    except OSError as error:
        return Scripted("failed", f"{script.path} cannot be run: {error.strerror or error}")
    if ran.code == 0:
        return Scripted("success", f"{script.path.name}: success", ran.lines)
    ended = f"ended with {ran.code}" if ran.code is not None else f"was not done within {SCRIPT_LIMIT_S:.0f} s"
    last = f": {ran.lines[-1]}" if ran.lines else ""
    again = f"cd {shlex.quote(str(directory))} && {shlex.quote(str(script.path))}"
    return Scripted("failed", f"{script.path.name} {ended}{last}", ran.lines, again, "run it by hand, and mend it")


async def _run(script: Script, directory: Path, heard: Callable[[str], None]) -> Ran:
    try:
        return await run([str(script.path)], limit_s=SCRIPT_LIMIT_S, directory=directory, heard=heard)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
        # Without a #! line: every shell then reads it itself.
        argv = [_SHELL, str(script.path)]
        return await run(argv, limit_s=SCRIPT_LIMIT_S, directory=directory, heard=heard)


async def prove(scene: Scene, against: tuple[NodeConfig, Tree] | None = None) -> Proof:
    """Compare the workdirs of all nodes with the reference's: the first node's, this machine's before all; or with a
    tree of this machine, `against`, that is no node's."""
    where = folders(scene.config)
    found = await trees(scene)
    homes = tuple(name for name, tree in found.items() if isinstance(tree, Tree) and tree.home)
    problems = {name: why for name, tree in found.items() if (why := _problem(tree)) is not None}
    whole = {name: tree for name, tree in found.items() if isinstance(tree, Tree) and name not in (*homes, *problems)}
    reference = next((node for node in where.values() if node.name in whole), next(iter(where.values())))
    if against is not None:
        reference, whole[against[0].name] = against
    differences = {name: compare(whole[reference.name], tree) for name, tree in whole.items() if name != reference.name}
    words = {name: _words(tree, differences.get(name)) for name, tree in whole.items()}
    words |= dict.fromkeys(homes, "its workdir is a bare home: not compared") | problems
    absent = tuple(name for name, tree in found.items() if isinstance(tree, Tree) and tree.absent)
    left = tuple(whole[reference.name].left) if reference.name in whole else ()
    permits = {name: tree.permit for name, tree in found.items() if isinstance(tree, Tree) and tree.permit is not None}
    return Proof(reference, words, differences, problems, permits, absent, homes, left)


def judge(config: FlightConfig, scripted: Scripted, proof: Proof | None) -> CheckResult:
    """FAIL when the script failed, or did not make the workers alike; a warning with `block_on_failure = false`, or
    where no script was to make them so."""
    blocks = config.preflight.block_on_failure
    if proof is None:
        status = CheckStatus.FAIL if blocks else CheckStatus.WARN
        summary = scripted.words + (f"; {scripted.advice}" if scripted.advice else "")
        result = verdict(NAME, status, summary, fix_command=scripted.fix)
    else:
        result = _judge_trees(config, scripted, proof, blocks=blocks and scripted.status == "success")
    evidence = result.evidence
    if scripted.lines:
        # It ran here, whatever it did elsewhere.
        evidence = {**evidence, HERE: "\n".join(scripted.lines)}
    detail = PreRdmaSync(
        enabled=True,
        sync_script=config.preflight.sync_script,
        validation_checks=_checks(proof) if proof is not None else (),
        block_on_failure=blocks,
        sync_status=scripted.status,
        sync_output=scripted.lines,
    )
    return result.model_copy(update={"detail": detail, "evidence": evidence})


def _judge_trees(config: FlightConfig, scripted: Scripted, proof: Proof, *, blocks: bool) -> CheckResult:
    found = Findings(NAME, config)
    found.evidence.update(proof.words)
    say = found.fault if blocks else found.warning
    lacking = []
    for node in config.nodes:
        if node.name in proof.problems:
            permit = proof.permits.get(node.name)
            say(node, proof.problems[node.name], f"chmod u+rX {quoted(permit)}" if permit is not None else None)
        elif difference := proof.differences.get(node.name):
            say(node, f"{node.name} has not what {proof.reference.name} has: {difference.words()}")
        blocked = difference.in_the_way if (difference := proof.differences.get(node.name)) is not None else ()
        if (node.name in proof.absent or difference) and not blocked:
            lacking.append(node)
    if not found.faults and not found.warnings:
        proved = proof.compared or not proof.homes
        status = CheckStatus.PASS if scripted.status == "success" and proved else CheckStatus.WARN
        return verdict(NAME, status, "; ".join([scripted.words, *_checks(proof)]), evidence=found.evidence)
    workdirs = {node.name: node.workdir for node in config.nodes}
    copied = tree_copies(proof.reference, lacking, workdirs, without=LEFT_OUT, left=proof.left)
    fix = " && ".join(filter(None, [pasted(config, found.fixes), copied]))
    return found.verdict("", fix_command=fix or None, advice=scripted.words)


def _checks(proof: Proof) -> tuple[str, ...]:
    checks = []
    if proof.compared:
        alike = [name for name, difference in proof.differences.items() if not difference]
        checks.append(f"{len(alike)} of {proof.compared} trees are as that of {proof.reference.name}")
    if proof.homes:
        checks.append(f"not compared on {', '.join(proof.homes)}: the workdir is a bare home")
    if not proof.compared and not proof.homes and not proof.problems:
        checks.append("one workdir: nothing to compare")
    return tuple(checks)


def _problem(tree: Tree | FlightDeckError) -> str | None:
    return tree.problem if isinstance(tree, Tree) else str(tree)


def _words(tree: Tree, difference: Difference | None) -> str:
    if difference is None:
        return counted(tree)
    parts = [difference.words() or f"the same, {counted(tree)}", difference.own_words()]
    return ", ".join(filter(None, parts))


class _Sparing:
    """Passes on a word at most every quarter of a second."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._told_at = float("-inf")

    def __call__(self, words: str) -> None:
        now = time.monotonic()
        if now - self._told_at >= _TELL_EVERY_S:
            self._told_at = now
            self._tell(words)


CHECK = Check(
    NAME,
    "the sync script ran, and every worker has the same files",
    look,
    time_limit_s=SCRIPT_LIMIT_S + READ_LIMIT_S + 60,
    needs=(connectivity.NAME,),
    not_applicable=sync_not_applicable,
    switched_off=sync_switched_off,
)
