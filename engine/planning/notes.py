"""Why each choice of a plan was made and where its figure came from, gathered while the plan is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class Source(StrEnum):
    """Where a figure came from."""

    FACT = "fact"
    """Seen on a node."""
    CALIBRATION = "calibration"
    """Measured by `flightdeck calibrate`."""
    RULE = "rule"
    """Follows from the other figures; the reason names the rule."""
    USER = "user"
    """The configuration says so."""
    DEFAULT = "default"
    """mlx-lm's or ours, since the configuration does not say."""
    UNKNOWN = "unknown"
    """Null, and the reason says why."""


class Reason(BaseModel):
    """Of one choice."""

    model_config = ConfigDict(frozen=True)

    key: str
    """Where it stands in the document: "batch_configuration.learning_rate"."""
    source: Source
    reason: str
    """One sentence."""


class Named(BaseModel):
    """A warning or a refusal by its name."""

    model_config = ConfigDict(frozen=True)

    name: str
    text: str
    override: str | None = None
    """What goes on in spite of it."""


@dataclass
class Notes:
    """Filled by those who make the parts of one plan, in the order of the document."""

    reasons: list[Reason] = field(default_factory=list)
    warnings: list[Named] = field(default_factory=list)
    refusals: list[Named] = field(default_factory=list)

    def why(self, key: str, source: Source, reason: str) -> None:
        self.reasons.append(Reason(key=key, source=source, reason=reason))

    def warn(self, name: str, text: str) -> None:
        self.warnings.append(Named(name=name, text=text))

    def refuse(self, name: str, text: str, override: str | None = None) -> None:
        self.refusals.append(Named(name=name, text=text, override=override))
