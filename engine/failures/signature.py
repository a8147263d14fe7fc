"""A failure signature: a text that a program prints when it fails, with its cause, its fix and its source."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple

from engine.models import Reason


class SignatureKind(IntEnum):
    """How much a match explains; a lower one goes before a higher."""

    CAUSE = 0
    """Explains the end by itself."""
    CONSEQUENCE = 1
    """A rank prints it because another one, or a link, failed before: used only when nothing better is known."""
    NOISE = 2
    """Printed in healthy runs too, or about a rank that another log explains: never used."""


class Provenance(StrEnum):
    """How well the meaning of the text is known."""

    REPRODUCED = "reproduced"
    """Made to happen with real programs."""
    SOURCE = "source"
    """Read in the source of the program that prints it."""
    REPORTED = "reported"
    """Reported by others in an issue or a pull request; not seen here."""
    ASSUMED = "assumed"
    """Taken from the text itself."""


class Citation(NamedTuple):
    """Where a text is from: a program, a file of its source, or an issue as repository#number."""

    text: str
    proof: Provenance


_COMMUNICATING = ("ring", "jaccl", "metal", "c10d", "gloo", "nccl", "cuda", "torch", "ddp", "fsdp", "deepspeed")
"""The first parts of the ids of what a rank's own group, GPU and framework print."""


@dataclass(frozen=True)
class Signature:
    """`cause` and `fix` may name the pattern's groups; `{errno}` is replaced by its name and number."""

    id: str
    pattern: str
    """A regular expression for a place within one line. Nothing in it but `\\d+` repeats without a bound, so that no
    line costs more than a constant times its length."""
    cause: str
    fix: str
    example: str
    """A line as the program prints it."""
    source: Citation
    kind: SignatureKind = SignatureKind.CAUSE
    reason: Reason | None = None
    """The reason for which a run ends by it, where that is one of its own."""
    transient: bool = False
    """It may be over at the next start; all other known causes lie in the job, the software or the network."""

    @property
    def own_fault(self) -> bool:
        """Its rank failed by itself: only after it did MLX or torch report that a connection is gone. Whether other
        causes mattered is not known."""
        return self.kind is SignatureKind.CAUSE and self.id.partition(".")[0] in _COMMUNICATING
