"""Runs one history, with the engine's modules on virtual time."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from engine.failures import explanation
from engine.job import kinds
from engine.models import RunRecord, RunState
from engine.node import keeper as keeper_module
from engine.run import (
    decide,
    effects,
    events,
    failure_evidence,
    history,
    node_health,
    observation,
    outcome,
    progress,
    recovery,
    running,
    shutdown,
    state,
    verdict,
)
from tests.simulation import nodes
from tests.simulation.invariants import Violation
from tests.simulation.quick_values import quick_copy, quick_init, quick_replace
from tests.simulation.scenario import Scenario
from tests.simulation.world import World

_MADE_OFTEN: tuple[type, ...] = (
    *(observation.Observation, observation.HostView, observation.RankView, observation.ProgressView),
    *(
        observation.CommandView,
        effects.Record,
        effects.Send,
        effects.Standing,
        state.WatchState,
        node_health.HostHealth,
    ),
    *(decide.RankState, decide.RunningAttempt, decide.NodePresence, kinds.RankSeen, kinds.RanksSeen),
    *(shutdown.AttemptView, shutdown.CleanupProof, shutdown.Shutdown, failure_evidence.RankEvidence),
    *(events.Figures, events.Verdict, history.AttemptHistory, verdict.Fault),
)


@dataclass(frozen=True)
class Outcome:
    state: RunState
    violation: str | None
    log: tuple[tuple[float, str | events.Event], ...]
    steps: int
    virtual_s: float


class _Current:
    world: World | None = None


def _virtual_clock() -> float:
    assert _Current.world is not None
    return _Current.world.time.now


def use(world: World) -> None:
    """Its time is that of the engine's modules from here on."""
    _Current.world = world


@contextlib.contextmanager
def virtual_engine() -> Iterator[None]:
    """The engine's modules with virtual time, and without a node's files."""
    findings, explain = explanation.findings, explanation.explain
    known = functools.cache(lambda lines: findings(list(lines)))
    explained = functools.cache(lambda lines: explain(list(lines)))
    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (keeper_module, "lease_clock", _virtual_clock),
            (keeper_module, "_log", lambda text: None),
            (keeper_module, "last_phase", nodes.last_phase),
            (keeper_module, "has_stepped", nodes.has_stepped),
            (keeper_module, "exit_output", nodes.exit_output),
            (keeper_module, "processes", SimpleNamespace(kill_group=nodes.kill_group)),
            (verdict, "findings", lambda lines: known(tuple(lines))),
            (verdict, "explain", lambda lines: explained(tuple(lines))),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        for module in (history, node_health, outcome, progress, recovery, running, shutdown, state, verdict):
            stack.enter_context(mock.patch.object(module, "replace", quick_replace))
        for model in (events.Event, RunRecord):
            stack.enter_context(mock.patch.object(model, "model_copy", quick_copy))
        for kind in _MADE_OFTEN:
            stack.enter_context(mock.patch.object(kind, "__init__", quick_init(kind)))
        yield


def written(log: tuple[tuple[float, str | events.Event], ...]) -> str:
    return "\n".join(f"{at:9.2f}  {_line(what)}" for at, what in log)


def _line(what: str | events.Event) -> str:
    if isinstance(what, str):
        return what
    fields = what.model_dump(exclude={"at", "run", "attempt", "identity", "figures", "manifest", "decisions"})
    shown = " ".join(f"{name}={value}" for name, value in fields.items() if value not in (None, (), {}, "", [], False))
    return f"{type(what).__name__} {shown}"[:300]


def simulate(scenario: Scenario) -> Outcome:
    """Within `virtual_engine`."""
    world = World(scenario)
    use(world)
    violation = None
    try:
        world.run()
    except Violation as found:
        violation = str(found)
    except Exception as fault:
        # Whatever it is, it must be possible to replay and to shrink it.
        last = traceback.extract_tb(fault.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        violation = f"{type(fault).__name__} in {place}: {fault}"
    return Outcome(world.checks.end, violation, tuple(world.log), world.steps, world.time.now)
