"""pre_rdma_sync: the user's sync script succeeded, and the workdirs of all nodes hold the same files.

Every file of the reference must be the same on each node; files that exist only on a node are reported and are no
difference. Without a script the workdirs are still compared, and a difference is a warning. A workdir that is a bare
home directory is not read."""

from __future__ import annotations

import errno
import json
import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from engine.checks import connectivity
from engine.checks.check import THIS_MACHINE, Check, Findings, first_of, verdict
from engine.checks.context import CheckContext
from engine.checks.fixes import Fix, chained, copy_tree, path_fix
from engine.cluster.probe_results import WorkdirTree
from engine.cluster.transport.base import Completed
from engine.cluster.transport.local import LINE_LIMIT, LocalTransport
from engine.config.models import Config, NodeConfig
from engine.errors import InputError, plural
from engine.models import CheckResult, CheckStatus, PreRdmaSync
from engine.plan.preflight import sync_not_applicable, sync_switched_off
from engine.security.paths import state_home, validate_path
from engine.security.sanitise import plain

NAME = "pre_rdma_sync"
EXCLUDED = (
    *(".git", ".hg", ".svn"),
    *("__pycache__", "*.pyc", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"),
    *(".venv", "venv", ".tox", ".nox", "node_modules"),
    *(".ipynb_checkpoints", ".flightdeck", ".DS_Store", "._*"),
)
"""Histories, caches and environments, which each machine has of its own: never copied and never compared."""
MAX_FILES = 20_000
"""More than a project has; the rest of a larger tree is not compared, and the result says so."""
MAX_HASHED_FILE_BYTES = 64_000_000
"""A larger file is compared by its size: weights and data have checks of their own, which hash what matters."""
_COPIES = (
    "copies the project over the node's, whose files it first keeps in an archive in ~/.flightdeck/replaced; "
    "`tar -xzf` in the folder brings them back"
)
MAX_HASHED_BYTES = 1_000_000_000
"""Hashed per node, a second or two; the rest is compared by size."""
SCRIPT_LIMIT_S = 300.0
LAST_LINES = 20
READ_LIMIT_S = 60.0
_PROGRESS_EVERY_S = 0.25
"""Each progress message is written to the disk of a run."""


@dataclass(frozen=True)
class SyncScriptOutcome:
    """How the sync script ended, or why it was not run."""

    status: Literal["success", "failed", "not_found"]
    message: str
    lines: tuple[str, ...] = ()
    """The last lines of its output."""
    fix: Fix | None = None
    advice: str = ""


def find_sync_script(config: Config) -> Path | SyncScriptOutcome:
    """The script that the configuration names, or why it cannot be run. Raises InputError for a refused path."""
    # Not below the working directory: a supervisor's is another one than its user's.
    roots = [Path.home(), state_home(), *(Path(root) for root in config.preflight.roots)]
    roots += [config.file.parent] if config.file is not None else []
    roots += [Path(node.workdir) for node in config.nodes if node.local]
    path = validate_path(config.preflight.sync_script, "sync script", roots=roots)
    try:
        if not path.exists():
            return SyncScriptOutcome("not_found", f"no sync script {config.preflight.sync_script}")
        if not path.is_file():
            return SyncScriptOutcome("failed", f"{path} is not a file")
    except PermissionError:
        return SyncScriptOutcome("failed", f"{path} cannot be reached: permission denied")
    if not os.access(path, os.R_OK | os.X_OK):
        why = "executed" if os.access(path, os.R_OK) else "read"
        return SyncScriptOutcome("failed", f"{path} may not be {why}", fix=path_fix("chmod u+rx", str(path)))
    return path


@dataclass(frozen=True)
class TreeDifference:
    """A node's tree against the reference. Paths are relative to the workdir, in order."""

    missing: tuple[str, ...] = ()
    different: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    """Only on the node."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.different)

    @property
    def blocking(self) -> tuple[str, ...]:
        """Extra files and links where the reference has a folder, which a copy would replace."""
        folders = {path[:end] for path in self.missing for end, character in enumerate(path) if character == "/"}
        return tuple(path for path in self.extra if path in folders)

    def describe(self, node: str, reference: str) -> str:
        """For example "ana is missing 3 files that ultra has: a.py, b.py, c.py"."""
        parts = []
        if self.missing:
            files = plural(len(self.missing), "file")
            parts.append(f"{node} is missing {files} that {reference} has: {first_of(self.missing)}")
        if self.different:
            verb = "differs" if len(self.different) == 1 else "differ"
            subject = f"{plural(len(self.different), 'file')} on {node} {verb} from {reference}"
            parts.append(f"{subject}: {first_of(self.different)}")
        return "; ".join(parts)


def compare_trees(reference: WorkdirTree, tree: WorkdirTree) -> TreeDifference:
    """Entries after the cut of a tree that was cut are not compared; a file that either side did not hash is compared
    by its size."""
    ends = (max(cut.entries, key=_order) for cut in (reference, tree) if cut.cut and cut.entries)
    last = min(ends, key=_order, default=None)
    paths = sorted({*reference.entries, *tree.entries}, key=_order)
    compared = [path for path in paths if last is None or _order(path) <= _order(last)]
    both = [path for path in compared if path in tree.entries and path in reference.entries]
    return TreeDifference(
        missing=tuple(path for path in compared if path not in tree.entries),
        different=tuple(path for path in both if not _same(reference.entries[path], tree.entries[path])),
        extra=tuple(path for path in compared if path not in reference.entries),
    )


def distinct_workdirs(config: Config) -> list[NodeConfig]:
    """The first node with each workdir; the reference comes first: this machine if it is a node, else the first one."""
    nodes: dict[tuple[str, str], NodeConfig] = {}
    for node in sorted(config.nodes, key=lambda node: not node.local):
        nodes.setdefault((node.ssh, node.workdir), node)
    return list(nodes.values())


async def read_tree(context: CheckContext, node: NodeConfig) -> WorkdirTree:
    """The tree of the node's workdir. Raises LaunchError, NodeUnreachable."""
    layout = await context.layout_of(node)
    adapters = context.config.job.mlx_lm.get("adapter_path")
    # A training writes its adapters on one node only.
    excluded = [layout.expanded(context.path(node, str(adapters)))] if adapters else []
    request = {
        "without": EXCLUDED, "apart": [*excluded, layout.root],
        "files": MAX_FILES, "whole_bytes": MAX_HASHED_FILE_BYTES, "all_bytes": MAX_HASHED_BYTES,
    }  # fmt: skip
    arguments = context.path(node, node.workdir), json.dumps(request)
    return await context.probe(node, "tree", *arguments, result_type=WorkdirTree, timeout_s=READ_LIMIT_S)


def _same(here: tuple[int, str | None], there: tuple[int, str | None]) -> bool:
    return here[0] == there[0] and (here[1] == there[1] or None in (here[1], there[1]))


def _order(path: str) -> tuple[bytes, ...]:
    """The probe's order: folder by folder."""
    return tuple(part.encode(errors="replace") for part in path.split("/"))


@dataclass(frozen=True)
class WorkdirComparison:
    """The trees of all workdirs against the reference."""

    reference: NodeConfig
    trees: dict[str, WorkdirTree]
    """Node → its tree, where there is an answer."""
    messages: dict[str, str]
    """Node → what was found there."""
    differences: dict[str, TreeDifference]
    problems: dict[str, str]
    """Node → why it could not be compared, though it should have been."""

    @property
    def homes(self) -> list[str]:
        """Nodes whose workdir is a bare home."""
        return [name for name, tree in self.trees.items() if tree.home]


async def run(context: CheckContext) -> CheckResult:
    reported_at = float("-inf")

    def report_line(message: str) -> None:
        nonlocal reported_at
        if time.monotonic() - reported_at >= _PROGRESS_EVERY_S:
            reported_at = time.monotonic()
            context.progress(NAME, message)

    scripted = await run_script(context.config, report_line)
    if scripted.status == "not_found" and not _wants_script(context.config):
        scripted = replace(scripted, message="")
    compared = None
    if scripted.status != "failed":
        context.progress(NAME, "; ".join(filter(None, [scripted.message, "comparing the trees"])))
        compared = await compare_workdirs(context, distinct_workdirs(context.config))
    return evaluate(context.config, scripted, compared)


def _wants_script(config: Config) -> bool:
    """The job is code of the user's own, which each of several hosts must have, or a script is named."""
    return bool(config.job.words) or "sync_script" in config.preflight.model_fields_set


async def run_script(config: Config, on_line: Callable[[str], None]) -> SyncScriptOutcome:
    """Run the script, if there is one; `on_line` gets each line of its output."""
    try:
        script = find_sync_script(config)
    except InputError as error:
        return SyncScriptOutcome("failed", f"[preflight] sync_script: {error}")
    if isinstance(script, SyncScriptOutcome):
        return script
    directory = config.folder if config.file is not None else Path.home()
    try:
        ended = await _run(script, directory, on_line)
    except OSError as error:
        return SyncScriptOutcome("failed", f"{script} cannot be run: {error.strerror or error}")
    lines = last_lines(ended)
    if ended.code == 0:
        return SyncScriptOutcome("success", f"{script.name}: success", lines)
    how = f"ended with {ended.code}" if ended.code is not None else f"did not end within {SCRIPT_LIMIT_S:.0f} s"
    last = f": {lines[-1]}" if lines else ""
    again = f"cd {shlex.quote(str(directory))} && {shlex.quote(str(script))}"
    fix = Fix(again, "runs your script again; what that changes, the script decides")
    return SyncScriptOutcome("failed", f"{script.name} {how}{last}", lines, fix, "run it by hand and fix it")


async def _run(script: Path, directory: Path, on_line: Callable[[str], None]) -> Completed:
    run = partial(LocalTransport().run, timeout_s=SCRIPT_LIMIT_S, directory=directory, on_line=on_line)
    try:
        return await run([str(script)])
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
        # A script without a #! line is read by the shell, as every shell does.
        return await run(["/bin/sh", str(script)])


def last_lines(ended: Completed) -> tuple[str, ...]:
    """The last lines of stdout, sanitised, without empty ones."""
    lines = [line for line in ended.stdout.decode(errors="replace").splitlines() if line.strip()]
    return tuple(plain(line, LINE_LIMIT) for line in lines[-LAST_LINES:])


async def compare_workdirs(context: CheckContext, nodes: Sequence[NodeConfig]) -> WorkdirComparison:
    """Compare the workdirs of `nodes` with the first that can be read."""
    answers = await context.on_all_nodes(lambda node: read_tree(context, node), nodes)
    trees = {name: tree for name, tree in answers.items() if isinstance(tree, WorkdirTree)}
    problems = {
        name: problem
        for name, tree in answers.items()
        if (problem := tree.problem if isinstance(tree, WorkdirTree) else str(tree)) is not None
    }
    readable = {name: tree for name, tree in trees.items() if not tree.home and name not in problems}
    reference = next((node for node in nodes if node.name in readable), nodes[0])
    differences = {
        name: compare_trees(readable[reference.name], tree) for name, tree in readable.items() if name != reference.name
    }
    messages = {name: _describe(name, tree, reference.name, differences.get(name)) for name, tree in readable.items()}
    homes = {name: "its workdir is a bare home: not compared" for name, tree in trees.items() if tree.home}
    return WorkdirComparison(reference, trees, messages | homes | problems, differences, problems)


def evaluate(config: Config, scripted: SyncScriptOutcome, compared: WorkdirComparison | None) -> CheckResult:
    """FAIL when the script failed or the workdirs differ after it; WARN without `block_on_failure` or a script."""
    blocks = config.preflight.block_on_failure
    if compared is None:
        status = CheckStatus.FAIL if blocks else CheckStatus.WARN
        summary = scripted.message + (f"; {scripted.advice}" if scripted.advice else "")
        result = verdict(NAME, status, summary, fix=scripted.fix)
    else:
        result = _evaluate_trees(config, scripted, compared, blocks=blocks and scripted.status == "success")
    evidence = result.evidence
    if scripted.lines:
        # It ran here, whatever it did elsewhere.
        evidence = {**evidence, THIS_MACHINE: "\n".join(scripted.lines)}
    detail = PreRdmaSync(
        enabled=True,
        sync_script=config.preflight.sync_script,
        validation_checks=_checks(compared) if compared is not None else (),
        block_on_failure=blocks,
        sync_status=scripted.status,
        sync_output=scripted.lines,
    )
    return result.model_copy(update={"detail": detail, "evidence": evidence})


def _evaluate_trees(
    config: Config, scripted: SyncScriptOutcome, compared: WorkdirComparison, *, blocks: bool
) -> CheckResult:
    findings = Findings(NAME, config)
    findings.evidence.update(compared.messages)
    report = findings.fault if blocks else findings.warn
    incomplete = []
    for node in config.nodes:
        difference, tree = compared.differences.get(node.name, TreeDifference()), compared.trees.get(node.name)
        if node.name in compared.problems:
            fix = path_fix("chmod u+rX", tree.permit) if tree is not None else None
            report(node, compared.problems[node.name], fix)
        elif difference:
            report(node, difference.describe(node.name, compared.reference.name))
        if (difference or (tree is not None and tree.absent)) and not difference.blocking:
            incomplete.append(node)
    if findings.verdict().status is CheckStatus.PASS:
        proved = compared.differences or not compared.homes
        as_wanted = scripted.status == "success" or not scripted.message
        status = CheckStatus.PASS if as_wanted and proved else CheckStatus.WARN
        summary = "; ".join(filter(None, [scripted.message, *_checks(compared)]))
        return verdict(NAME, status, summary, evidence=findings.evidence)
    workdirs = {node.name: node.workdir for node in config.nodes}
    copied = compared.trees.get(compared.reference.name)
    excluded = copied.left if copied is not None else ()
    copy = copy_tree(compared.reference, incomplete, workdirs, exclude_names=EXCLUDED, exclude_paths=excluded)
    fixed = findings.verdict()
    line, effects = chained([fixed.fix_command, copy]), filter(None, [fixed.fix_effect, copy and _COPIES])
    return findings.verdict(fix=Fix(line, "; ".join(effects)) if line else None, advice=scripted.message)


def _checks(compared: WorkdirComparison) -> tuple[str, ...]:
    checks = []
    if differences := compared.differences:
        same = sum(not difference for difference in differences.values())
        checks.append(f"{same} of {len(differences)} trees are the same as on {compared.reference.name}")
    if compared.homes:
        checks.append(f"not compared on {', '.join(compared.homes)}: the workdir is a bare home")
    if not compared.differences and not compared.homes and not compared.problems:
        checks.append("one workdir: nothing to compare")
    return tuple(checks)


def _describe(node: str, tree: WorkdirTree, reference: str, difference: TreeDifference | None) -> str:
    sized = sum(1 for size, digest in tree.entries.values() if size >= 0 and digest is None)
    description = plural(len(tree.entries), "file")
    description += f", {sized:,} of them large: compared by size" if sized else ""
    description += f", no more than {MAX_FILES:,} compared" if tree.cut else ""
    if difference is None:
        return description
    description = difference.describe(node, reference) or f"the same, {description}"
    extra = f", {len(difference.extra):,} only there ({first_of(difference.extra)})" if difference.extra else ""
    return description + extra


CHECK = Check(
    NAME, "the sync script ran, and every node has the same files", run,
    time_limit_s=SCRIPT_LIMIT_S + READ_LIMIT_S + 60, needs=(connectivity.NAME,), not_applicable=sync_not_applicable,
    switched_off=sync_switched_off, label="file sync",
)  # fmt: skip
