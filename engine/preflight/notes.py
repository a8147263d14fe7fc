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
    """Commands to be run there, in that order."""

    def fault(self, words: str, fix: str | None = None) -> None:
        self.faults.append(words)
        self._mend(fix)

    def warn(self, words: str, fix: str | None = None) -> None:
        self.warnings.append(words)
        self._mend(fix)

    def tell(self, found: Findings, node: NodeConfig) -> None:
        """Into the findings over all nodes."""
        found.evidence[node.name] = ", ".join([*self.faults, *self.warnings, *self.seen]) or "nothing to tell"
        fix = " && ".join(dict.fromkeys(self.fixes)) or None
        if self.faults:
            found.fault(node, "; ".join(self.faults), fix)
        elif self.warnings:
            found.warning(node, "; ".join(self.warnings), fix)

    def _mend(self, fix: str | None) -> None:
        if fix is not None:
            self.fixes.append(fix)
