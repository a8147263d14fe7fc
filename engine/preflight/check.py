"""What a check is: a name, what it looks at, and the verdict that it gives."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from engine.config.models import FlightConfig, NodeConfig
from engine.models import CheckResult, CheckStatus
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
    not_applicable: Applies = _always
    """Why the check does not apply to a configuration; None when it does."""


def verdict(
    name: str,
    status: CheckStatus,
    summary: str,
    *,
    evidence: dict[str, str] | None = None,
    fixes: dict[str, str] | None = None,
    fix_command: str | None = None,
    blames: tuple[int, str] | None = None,
) -> CheckResult:
    """A result whose `fix_command`, where none is given, is all the nodes' fixes, each once, joined by `&&`."""
    fixes = fixes or {}
    return CheckResult(
        name=name,
        status=status,
        summary=summary,
        evidence=evidence or {},
        fix_command=fix_command or " && ".join(dict.fromkeys(fixes.values())) or None,
        fixes=fixes,
        blames=blames,
    )


def trains(config: FlightConfig) -> str | None:
    """For checks of the model and the data: a job with a command of its own brings its own."""
    return "the job runs a command of its own, which brings its own model and data" if config.job.command else None


def ranks_of(config: FlightConfig) -> list[tuple[int, NodeConfig]]:
    return list(enumerate(config.nodes))
