"""Bugs to plant, one at a time: the simulation must find each. Those that say "modelled" change the simulated machines,
where the engine's own code works on files or processes; all others change the engine's functions."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final
from unittest import mock

from engine.job.kinds import ElasticTorchrun, RanksSeen
from engine.models import Reason, RunState
from engine.node.attempt_watch import AttemptWatch
from engine.node.keeper import Lease
from engine.run import events, history, outcome, recovery, running, shutdown, step, verdict
from engine.run.events import Trigger
from engine.run.shutdown import CleanupProof, Shutdown
from engine.run.state import State
from engine.trainer.checkpoint import resume
from tests.simulation.connection import Connection
from tests.simulation.nodes import Machine
from tests.simulation.training import Group
from tests.simulation.world import World

Patch = tuple[Any, str, Any]


def _lease_not_checked() -> list[Patch]:
    return [(Lease, "_ran_out_by", lambda lease, now: False)]


def _fence_skipped() -> list[Patch]:
    advance = shutdown.advance

    def skip(stop: Shutdown, view: Any) -> Any:
        if stop.plan.cooperative:
            return advance(stop, view)
        proofs = {key: CleanupProof(found=True) for key in stop.proofs}
        return replace(stop, stage=events.StopStage.STOPPED, proofs=proofs), [events.StopStage.STOPPED]

    return [(step, "advance", skip)]


def _stale_heartbeat_taken() -> list[Patch]:
    def renew(lease: Any, at: float) -> bool:
        lease._renewed_at, lease._over = lease._clock(), False
        return False

    def pass_on(watch: Any, received: Any, at: float) -> None:
        for rank in watch._ranks.values():
            rank.send_command(b"")

    return [(Lease, "renew", renew), (AttemptWatch, "pass_heartbeat", pass_on)]


def _mirror_offset_reset() -> list[Patch]:
    connect = Connection.hello

    def from_the_beginning(connection: Connection) -> None:
        connect(connection)
        for rank in connection.ranks:
            connection.world.disk.copied.pop((connection.number or 0, rank), None)
        if connection.world.head is not None:
            connection.world.head._taken_lines = -1

    return [(Connection, "hello", from_the_beginning)]


def _fold_ignores_event() -> list[Patch]:
    record = history._record

    def ignore(recorded: Any, event: events.Event) -> Any:
        return recorded if isinstance(event, events.CleanupConfirmed) else record(recorded, event)

    return [(history, "_record", ignore)]


def _restart_before_proof() -> list[Patch]:
    presence = outcome.presence
    return [(recovery, "presence", lambda t: tuple(replace(node, proved=True) for node in presence(t)))]


def _adoption_forgets_abort() -> list[Patch]:
    begin = step.begin

    def forget(plan: Any, recorded: Any, newest_attempt: int, *, adopting: bool) -> State:
        return begin(plan, replace(recorded, abort=None), newest_attempt, adopting=adopting)

    from tests.simulation import world  # noqa: PLC0415

    return [(world, "begin", forget)]


def _two_supervisors() -> list[Patch]:
    return [(fcntl, "flock", lambda descriptor, operation: None)]


def _checkpoint_before_manifest() -> list[Patch]:
    begin = Group._begin_save

    def report(group: Group) -> None:
        begin(group)
        if group._saving is not None:
            for program, state in group._saving[1]:
                state.reported = True
                program.write({"event": "checkpoint", "phase": "committed", "state": state.name,
                               "manifest": state.manifest, "background": True})  # fmt: skip

    return [(Group, "_begin_save", report)]


def _exit_record_ignored() -> list[Patch]:
    take = Connection.take_end
    return [(Connection, "take_end", lambda host, rank, record, output, kills: take(host, rank, None, output, kills))]


def _sleep_not_counted() -> list[Patch]:
    return [(World, "lease_clock", lambda world, machine: world.time.now - machine.slept_s)]


def _survivor_preferred() -> list[Patch]:
    complete = resume.complete_states

    def emergencies_first(copies: Any, *, any_part: bool = False) -> Any:
        states = complete(copies, any_part=any_part)
        return sorted(states, key=lambda state: state[0][0].author is None)

    return [(resume, "complete_states", emergencies_first)]


def _elastic_loss_counted_twice() -> list[Patch]:
    losable = ElasticTorchrun.losable

    def twice(kind: Any, seen: RanksSeen) -> frozenset[int]:
        lost = sum(rank.failed for rank in seen.ranks)
        least = min((seen.min_nodes or len(seen.ranks)) + lost, len(seen.ranks))
        return losable(kind, replace(seen, min_nodes=least))

    return [(ElasticTorchrun, "losable", twice)]


def _hang_after_last_step() -> list[Patch]:
    find = running.find_hang

    def always(t: Any) -> Any:
        completed_at = t.watch.completed_at
        t.set_watch(completed_at=None)
        hang = find(t)
        t.set_watch(completed_at=completed_at)
        return hang

    return [(step, "find_hang", always)]


def _verdict_by_launcher() -> list[Patch]:
    judge = verdict.verdict_on

    def by_code(evidence: Any) -> events.Verdict:
        if evidence.trigger in (Trigger.ENDED, Trigger.RANK) and all(rank.record for rank in evidence.ranks):
            return events.Verdict(RunState.SUCCEEDED, Reason.COMPLETED)
        return judge(evidence)

    return [(verdict, "verdict_on", by_code)]


PLANTS: Final[dict[str, Callable[[], list[Patch]]]] = {
    "lease_not_checked": _lease_not_checked,
    "fence_skipped": _fence_skipped,
    "stale_heartbeat_taken": _stale_heartbeat_taken,
    "mirror_offset_reset": _mirror_offset_reset,  # modelled
    "fold_ignores_event": _fold_ignores_event,
    "restart_before_proof": _restart_before_proof,
    "adoption_forgets_abort": _adoption_forgets_abort,
    "two_supervisors": _two_supervisors,
    "checkpoint_before_manifest": _checkpoint_before_manifest,  # modelled
    "exit_record_ignored": _exit_record_ignored,
    "sleep_not_counted": _sleep_not_counted,
    "survivor_preferred": _survivor_preferred,
    "elastic_loss_counted_twice": _elastic_loss_counted_twice,
    "hang_after_last_step": _hang_after_last_step,
    "verdict_by_launcher": _verdict_by_launcher,
}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module, attribute, value in PLANTS[name]():
            stack.enter_context(mock.patch.object(module, attribute, value))
        yield


__all__ = ["PLANTS", "Machine", "planted"]
