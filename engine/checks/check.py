"""A check: its registry entry, the findings it collects per node, and its result over all nodes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from engine.checks.context import CheckContext
from engine.checks.fixes import as_shell_line
from engine.config.models import Config, NodeConfig
from engine.models import CheckResult, CheckStatus

CheckFunction = Callable[[CheckContext], Awaitable[CheckResult]]
SkipReason = Callable[[Config], str | None]

THIS_MACHINE = "this machine"
"""The head in messages, and in place of a node's name where it is none."""


def _never_skipped(_: Config) -> str | None:
    return None


@dataclass(frozen=True)
class Check:
    """One entry of the registry in `engine.checks.runner`."""

    name: str
    title: str
    """The subject in a few words, shown while it runs and in the plan."""
    run: CheckFunction
    time_limit_s: float
    """Running longer is a failure."""
    needs: tuple[str, ...] = ()
    """Checks that must not have failed, since this one would only repeat their failure less clearly."""
    after: tuple[str, ...] = ()
    """Checks that must have ended, pass or fail, because they may change what this one inspects."""
    not_applicable: SkipReason = _never_skipped
    """Why the check does not apply to a configuration; None when it does."""
    switched_off: SkipReason = _never_skipped
    """Which setting of a configuration turns it off; None when none does. Recorded in the audit log."""


def verdict(
    name: str,
    status: CheckStatus,
    summary: str,
    *,
    evidence: dict[str, str] | None = None,
    fix_command: str | None = None,
) -> CheckResult:
    """A result without per-node fixes; `Findings` makes those that have some."""
    return CheckResult(name=name, status=status, summary=summary, evidence=evidence or {}, fix_command=fix_command)


class Findings:
    """A check's findings on each node, and its result over all of them."""

    def __init__(self, name: str, config: Config) -> None:
        self._name = name
        self._config = config
        self.evidence: dict[str, str] = {}
        self.faults: dict[str, str] = {}
        """Node → why the check fails there."""
        self.warnings: dict[str, str] = {}
        self.fixes: dict[str, str] = {}
        """Node → the command that fixes it, to be run there."""

    def fault(self, node: NodeConfig, message: str, fix: str | None = None) -> None:
        self.faults[node.name] = message
        self.evidence.setdefault(node.name, message)
        if fix is not None:
            self.fixes[node.name] = fix

    def warning(self, node: NodeConfig, message: str, fix: str | None = None) -> None:
        self.warnings[node.name] = message
        if fix is not None:
            self.fixes[node.name] = fix

    def verdict(self, passed: str, *, advice: str = "", fix_command: str | None = None) -> CheckResult:
        """FAIL with all faults, else WARN with all warnings, else PASS with `passed`.

        `fix_command` is a line for this machine's shell, by default the nodes' fixes joined. `advice` ends the summary
        of a failure or a warning.
        """
        status = CheckStatus.FAIL if self.faults else CheckStatus.WARN if self.warnings else CheckStatus.PASS
        reported = self.faults or self.warnings
        # The fix of a warning is not pasted together with that of a failure.
        fixes = {node: fix for node, fix in self.fixes.items() if node in reported}
        return CheckResult(
            name=self._name,
            status=status,
            summary=self._summary(reported) + (f"; {advice}" if advice else "") if reported else passed,
            evidence=self.evidence,
            fix_command=(fix_command or as_shell_line(self._config, fixes)) if reported else None,
            fixes=fixes,
            blames=next(((rank, node.name) for rank, node in ranks_of(self._config) if node.name in self.faults), None),
        )

    def _summary(self, reported: Mapping[str, str]) -> str:
        """Each message once, preceded by the nodes it applies to unless that is all of them."""
        nodes: dict[str, list[str]] = {}
        for node, message in reported.items():
            nodes.setdefault(message, []).append(node)
        return "; ".join(
            message
            if len(affected) == len(self._config.nodes) or all(node in message for node in affected)
            else f"{', '.join(affected)}: {message}"
            for message, affected in nodes.items()
        )


def skip_for_command(config: Config) -> str | None:
    """The skip reason of checks of the model and the data, which a job with its own command brings along."""
    return "the job runs a command of its own, which brings its own model and data" if config.job.command else None


def ranks_of(config: Config) -> list[tuple[int, NodeConfig]]:
    return list(enumerate(config.nodes))


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


@dataclass
class NodeFindings:
    """Several findings on one node."""

    passed: list[str] = field(default_factory=list)
    """Facts in order, for the record."""
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    fixes: list[str] = field(default_factory=list)
    """Commands against the faults, to be run on the node in this order."""
    warning_fixes: list[str] = field(default_factory=list)

    def fault(self, message: str, fix: str | None = None) -> None:
        self.faults.append(message)
        if fix is not None:
            self.fixes.append(fix)

    def warn(self, message: str, fix: str | None = None) -> None:
        self.warnings.append(message)
        if fix is not None:
            self.warning_fixes.append(fix)

    def add_to(self, findings: Findings, node: NodeConfig) -> None:
        findings.evidence[node.name] = ", ".join([*self.faults, *self.warnings, *self.passed]) or "nothing to report"
        if self.faults:
            findings.fault(node, "; ".join(self.faults), _chain(self.fixes))
        elif self.warnings:
            findings.warning(node, "; ".join(self.warnings), _chain(self.warning_fixes))


def _chain(commands: list[str]) -> str | None:
    return " && ".join(dict.fromkeys(commands)) or None
