"""How asking a node for something ends: with a value, or with the reason why there is none. The reason is a value too,
so that a late, failed or cut reply is never read as "there is nothing".
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class _Reason(BaseModel):
    model_config = ConfigDict(frozen=True)

    command: str
    """The command as a person would type it, or the name of the probe."""


class Late(_Reason):
    """No reply within the time limit."""

    kind: Literal["late"] = "late"
    after_s: float

    def __str__(self) -> str:
        return f"{self.command} gave no answer within {self.after_s:g} s"


class Failed(_Reason):
    """It ended with an error, and without a reply that could be used."""

    kind: Literal["failed"] = "failed"
    exit_code: int
    """Negative for a signal."""
    stderr: str = ""
    """Its last line, safe to show."""

    def __str__(self) -> str:
        return f"{self.command} ended with {self.exit_code}" + (f": {self.stderr}" if self.stderr else "")


class Unparsable(_Reason):
    """It ended well, and what it printed is not what was expected."""

    kind: Literal["unparsable"] = "unparsable"
    output: str
    """The beginning of it, safe to show."""

    def __str__(self) -> str:
        return f"{self.command} printed what cannot be read" + (f": {self.output}" if self.output else " (nothing)")


NoValue = Late | Failed | Unparsable
