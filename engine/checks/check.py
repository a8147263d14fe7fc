"""A check: its registry entry, the findings it collects per node, and its result over all nodes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from engine.checks.context import CheckContext
from engine.checks.fixes import Fix, as_shell_line, chained
from engine.cluster import agent_client
from engine.config.models import Config, NodeConfig
from engine.errors import FlightDeckError
from engine.models import CheckResult, CheckStatus
from engine.security.sanitise import plain

CheckFunction = Callable[[CheckContext], Awaitable[CheckResult]]
SkipReason = Callable[[Config], str | None]
Answer = TypeVar("Answer")

THIS_MACHINE = agent_client.THIS_MACHINE.name
"""The head in messages, and in place of a node's name where it is none."""
_NAMED = 4


@dataclass(frozen=True)
class Check:
    """One entry of the registry in `engine.checks.runner`."""

    name: str
    title: str
    """The subject in a few words, shown while it runs and in the plan."""
    run: CheckFunction
    time_limit_s: float
    """Running longer is a failure."""
    label: str = ""
    """One or two words for a screen."""
    needs: tuple[str, ...] = ()
    """Checks that must not have failed, since this one would only repeat their failure less clearly."""
    after: tuple[str, ...] = ()
    """Checks that must have ended, pass or fail, because they may change what this one inspects."""
    not_applicable: SkipReason = lambda _: None
    """Why the check does not apply to a configuration; None when it does."""
    switched_off: SkipReason = lambda _: None
    """Which setting of a configuration turns it off; None when none does. Recorded in the audit log."""


def verdict(
    name: str, status: CheckStatus, summary: str, *, evidence: dict[str, str] | None = None, fix: Fix | None = None
) -> CheckResult:
    """A result without per-node fixes; `Findings` makes those that have some."""
    command, effect = fix or (None, None)
    return CheckResult(
        name=name, status=status, summary=summary, evidence=evidence or {}, fix_command=command, fix_effect=effect
    )


def worst(statuses: Iterable[CheckStatus]) -> CheckStatus:
    """FAIL when any is that, else WARN when any is, else PASS."""
    seen = set(statuses)
    return next((status for status in (CheckStatus.FAIL, CheckStatus.WARN) if status in seen), CheckStatus.PASS)


@dataclass
class NodeFindings:
    """A check's findings on one node, or on all of them together."""

    passed: list[str] = field(default_factory=list)
    """Facts in order, for the record."""
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    fixes: list[Fix] = field(default_factory=list)
    """Commands against the faults, to be run on the node in this order."""
    warning_fixes: list[Fix] = field(default_factory=list)

    def fault(self, message: str, fix: Fix | None = None) -> None:
        self.faults.append(message)
        if fix is not None:
            self.fixes.append(fix)

    def warn(self, message: str, fix: Fix | None = None) -> None:
        self.warnings.append(message)
        if fix is not None:
            self.warning_fixes.append(fix)

    @property
    def status(self) -> CheckStatus:
        return CheckStatus.FAIL if self.faults else CheckStatus.WARN if self.warnings else CheckStatus.PASS

    def reported(self, status: CheckStatus) -> tuple[list[str], list[Fix]]:
        """The messages of a FAIL or a WARN, and their fixes: a warning's is not pasted together with a failure's."""
        return (self.faults, self.fixes) if status is CheckStatus.FAIL else (self.warnings, self.warning_fixes)

    def describe(self) -> str:
        return ", ".join([*self.faults, *self.warnings, *self.passed])


class Findings:
    """A check's findings on each node, and its result over all of them."""

    def __init__(self, name: str, config: Config) -> None:
        self._name = name
        self._config = config
        self._nodes = {node.name: NodeFindings() for node in config.nodes}
        self.overall = NodeFindings()
        """Findings on no single node. They come first in the result; their fixes are for this machine's shell."""
        self.evidence: dict[str, str] = {}
        """Node → what was seen there; by default its findings."""

    @property
    def faulty(self) -> list[NodeConfig]:
        """The nodes on which the check fails."""
        return [node for node in self._config.nodes if self.on(node).faults]

    def on(self, node: NodeConfig) -> NodeFindings:
        return self._nodes[node.name]

    def fault(self, node: NodeConfig, message: str, fix: Fix | None = None) -> None:
        self.on(node).fault(message, fix)

    def warn(self, node: NodeConfig, message: str, fix: Fix | None = None) -> None:
        self.on(node).warn(message, fix)

    def answered(self, answers: Mapping[str, Answer | FlightDeckError]) -> Iterator[tuple[NodeConfig, Answer]]:
        """Each node that has answered, with its answer; an error in place of an answer is the node's fault."""
        for node in self._config.nodes:
            answer = answers[node.name]
            if isinstance(answer, FlightDeckError):
                self.fault(node, str(answer))
            else:
                yield node, answer

    def verdict(self, passed: str = "", *, advice: str = "", fix: Fix | None = None) -> CheckResult:
        """FAIL with all faults, else WARN with all warnings, else PASS with `passed`.

        `fix` is a line for this machine's shell, by default the nodes' fixes joined. `advice` ends the summary of the
        nodes' failure or warning."""
        on_nodes = worst(findings.status for findings in self._nodes.values())
        status = worst((on_nodes, self.overall.status))
        messages, fixes, effects = {}, {}, {}
        for node, findings in self._nodes.items():
            reported, commands = findings.reported(on_nodes)
            if reported:
                messages[node] = "; ".join(dict.fromkeys(reported))
            if commands:
                fixes[node] = " && ".join(dict.fromkeys(command.command for command in commands))
                effects[node] = _joined(command.effect for command in commands)
        seen = {node: self.evidence.get(node, findings.describe()) for node, findings in self._nodes.items()}
        parts = [*self.overall.faults, *self.overall.warnings]
        lines = [*self.overall.reported(status)[1]]
        if messages:
            parts.append(self._summary(messages) + (f"; {advice}" if advice else ""))
            if on_nodes is status:
                line = as_shell_line(self._config, fixes)
                lines += [fix] if fix else [Fix(line, _joined(effects.values()))] if line else []
        return CheckResult(
            name=self._name,
            status=status,
            summary="; ".join(parts) or passed,
            evidence={node: text for node, text in seen.items() if text},
            fix_command=chained(line.command for line in lines),
            fix_effect=_joined(line.effect for line in lines) or None,
            fixes=fixes,
            effects=effects,
            blames=next(((self._config.nodes.index(node), node.name) for node in self.faulty), None),
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


def _joined(effects: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(effects))


def this_machine(folder: str) -> NodeConfig:
    """The head where it is no node, with a folder as its workdir."""
    return agent_client.THIS_MACHINE.model_copy(update={"workdir": folder})


def differing_items(items: Mapping[str, str | None], reference: Mapping[str, str | None]) -> list[str]:
    return sorted(name for name in {*items, *reference} if items.get(name) != reference.get(name))


def first_of(names: Sequence[str]) -> str:
    """For example "a, b, c, d and 3 more"."""
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return ", ".join(plain(name, 300) for name in names[:_NAMED]) + more
