"""What a check is: a name, what it looks at, and the verdict that it gives."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from engine.config.models import FlightConfig, NodeConfig
from engine.models import CheckResult, CheckStatus
from engine.preflight.fixes import pasted
from engine.preflight.scene import Scene

Look = Callable[[Scene], Awaitable[CheckResult]]
Applies = Callable[[FlightConfig], str | None]


def _always(_: FlightConfig) -> str | None:
    return None


@dataclass(frozen=True)
class Check:
    """One entry of the registry."""

    name: str
    title: str
    """What it verifies, in a few words."""
    look: Look
    time_limit_s: float
    """An answer later than this is a failure."""
    needs: tuple[str, ...] = ()
    """Checks that must not have failed: what they find would only be found again, less clearly."""
    after: tuple[str, ...] = ()
    """Checks that must have ended, whatever they found: what they change is looked at afterwards."""
    not_applicable: Applies = _always
    """Why the check does not apply to a configuration; None when it does."""
    switched_off: Applies = _always
    """Which words of a configuration leave it out; None when none do. That is told in the audit log."""


def verdict(
    name: str,
    status: CheckStatus,
    summary: str,
    *,
    evidence: dict[str, str] | None = None,
    fix_command: str | None = None,
    blames: tuple[int, str] | None = None,
) -> CheckResult:
    """A result without fixes of nodes; see `Findings` for one over all nodes."""
    return CheckResult(
        name=name, status=status, summary=summary, evidence=evidence or {}, fix_command=fix_command, blames=blames
    )


class Findings:
    """What a check finds node by node, and the verdict over all of them."""

    def __init__(self, name: str, config: FlightConfig) -> None:
        self._name = name
        self._config = config
        self.evidence: dict[str, str] = {}
        """Node → what was seen there."""
        self.faults: dict[str, str] = {}
        """Node → why the check fails there."""
        self.warnings: dict[str, str] = {}
        self.fixes: dict[str, str] = {}
        """Node → the command that mends it, to be run there."""

    def fault(self, node: NodeConfig, words: str, fix: str | None = None) -> None:
        self.faults[node.name] = words
        self.evidence.setdefault(node.name, words)
        if fix is not None:
            self.fixes[node.name] = fix

    def warning(self, node: NodeConfig, words: str, fix: str | None = None) -> None:
        self.warnings[node.name] = words
        if fix is not None:
            self.fixes[node.name] = fix

    def verdict(self, passed: str, *, advice: str = "", fix_command: str | None = None) -> CheckResult:
        """FAIL with all faults, else WARN with all warnings, else PASS with `passed`.

        `fix_command` is one for this machine; without it, it is made of the nodes' fixes. `advice` ends the summary of
        what did not pass.
        """
        status = CheckStatus.FAIL if self.faults else CheckStatus.WARN if self.warnings else CheckStatus.PASS
        told = self.faults or self.warnings
        # What would mend a warning is not pasted together with what mends a failure.
        fixes = {node: fix for node, fix in self.fixes.items() if node in told}
        return CheckResult(
            name=self._name,
            status=status,
            summary=self._summary(told) + (f"; {advice}" if advice else "") if told else passed,
            evidence=self.evidence,
            fix_command=(fix_command or pasted(self._config, fixes)) if told else None,
            fixes=fixes,
            blames=next(((rank, node.name) for rank, node in ranks_of(self._config) if node.name in self.faults), None),
        )

    def _summary(self, told: Mapping[str, str]) -> str:
        """Each fault once, with the nodes that have it where not all do."""
        nodes: dict[str, list[str]] = {}
        for node, words in told.items():
            nodes.setdefault(words, []).append(node)
        return "; ".join(
            words
            if len(having) == len(self._config.nodes) or all(node in words for node in having)
            else f"{', '.join(having)}: {words}"
            for words, having in nodes.items()
        )


def trains(config: FlightConfig) -> str | None:
    """For checks of the model and the data: a job with a command of its own brings its own."""
    return "the job runs a command of its own, which brings its own model and data" if config.job.command else None


def ranks_of(config: FlightConfig) -> list[tuple[int, NodeConfig]]:
    return list(enumerate(config.nodes))
