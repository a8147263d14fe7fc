"""What a check of many parts has to say of one node, gathered before the verdict over all nodes."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.config.models import NodeConfig
from engine.preflight.check import Findings


@dataclass
class NodeNotes:
    """One node's."""

    seen: list[str] = field(default_factory=list)
    """What is as it should be, or only for the record."""
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    fixes: list[str] = field(default_factory=list)
    """Commands to be run there against the faults, in that order."""
    cures: list[str] = field(default_factory=list)
    """Against the warnings: never pasted together with those of a fault."""

    def fault(self, words: str, fix: str | None = None) -> None:
        self.faults.append(words)
        if fix is not None:
            self.fixes.append(fix)

    def warn(self, words: str, fix: str | None = None) -> None:
        self.warnings.append(words)
        if fix is not None:
            self.cures.append(fix)

    def tell(self, found: Findings, node: NodeConfig) -> None:
        """Into the findings over all nodes."""
        found.evidence[node.name] = ", ".join([*self.faults, *self.warnings, *self.seen]) or "nothing to tell"
        if self.faults:
            found.fault(node, "; ".join(self.faults), _in_a_row(self.fixes))
        elif self.warnings:
            found.warning(node, "; ".join(self.warnings), _in_a_row(self.cures))


def _in_a_row(commands: list[str]) -> str | None:
    return " && ".join(dict.fromkeys(commands)) or None
