"""What the watch over an attempt does when it ends: which ends are worth a rescue, and what an abort leaves of one."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from engine.models import RunState
from engine.runs.journal import read_journal
from engine.runs.signatures import BY_ID
from engine.supervision.attempt import Attempt
from engine.supervision.flight import Flight
from engine.supervision.history import Ended, policy_of
from engine.supervision.judging.verdict import Verdict
from engine.supervision.links.links import Links
from engine.supervision.links.local import LocalLink
from engine.supervision.logbook import Logbook
from engine.supervision.outset import Outset
from engine.supervision.recovery import refusal
from engine.supervision.requests import ABORT, Request
from engine.worker.processes import boot_id, start_time
from engine.worker.wire import ExitRecord, Identity, write_atomic
from tests.unit.watch.run_maker import MadeRun

PATIENCE_S = 10.0


class Air:
    """An attempt of two ranks in its flight; their keepers and trainers are the test itself."""

    def __init__(self, home: Path, *, restarts: bool, steps: bool = True) -> None:
        run = MadeRun(home).attempt().state("preflight", "launching", "running").close()
        self.directory, self.plan = run.directory, run.plan
        entries = read_journal(run.directory.journal)
        attempt = Attempt.from_entry(next(each for each in entries if each["event"] == "attempt"), "n")
        self.files = attempt.files(run.id, 0)
        self.files.directory.mkdir(parents=True, exist_ok=True)
        self.logbook = Logbook(run.directory.journal, lambda _record: None, lambda: datetime.now(UTC))
        self.abort: Request | None = None
        self.asked: list[Verdict] = []
        self._restarts = restarts
        for rank in (0, 1):
            self._start(rank, attempt.nonce, run.id)
            if steps:
                self.tell(rank, event="step", iteration=3, update=3, t=1.0, at=1.0)
        links = Links([LocalLink(self.files, attempt.nonce, (0, 1), ("node0", "node1"))])
        self.flight = Flight(
            run.directory,
            run.plan,
            attempt,
            links=links,
            logbook=self.logbook,
            outset=Outset(),
            recovers=self._recovers,
        )

    def _start(self, rank: int, nonce: str, run_id: str) -> None:
        os.mkfifo(self.files.control(rank))
        pid = os.getpid()
        start = start_time(pid) or ""
        # The trainers' group is nobody's: what is sent to it reaches no process.
        nobody = 2**22 + 7
        identity = Identity(rank, run_id, 1, nonce, boot_id(), pid, start, nobody, nobody, start, 1.0)
        write_atomic(self.files.identity(rank), json.dumps(asdict(identity)))

    def _recovers(self, verdict: Verdict, _reached: int) -> bool:
        self.asked.append(verdict)
        return self._restarts

    def tell(self, rank: int, **event: Any) -> None:
        with self.files.events(rank).open("a") as file:
            file.write(json.dumps({**event, "rank": rank}) + "\n")

    def exit(self, rank: int, code: int) -> None:
        write_atomic(self.files.exit(rank), json.dumps(asdict(ExitRecord(rank, 1, code, None, 0.0, 0))))

    def stages(self) -> list[str]:
        return [each["stage"] for each in read_journal(self.directory.journal) if each["event"] == "stop"]

    async def until(self, seen: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not seen():
                await asyncio.sleep(0.02)

    def watch(self) -> Awaitable[Any]:
        return asyncio.create_task(self.flight.watch(lambda: self.abort))


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Air]]:
    airs: list[Air] = []

    def make(**how: bool) -> Air:
        airs.append(Air(tmp_path, **how))
        return airs[-1]

    yield make
    for air in airs:
        air.flight.close()
        air.logbook.close()


async def fail(air: Air, error_type: str) -> None:
    await air.until(lambda: bool(air.flight.intake.progress.steps))
    air.tell(1, event="failure", error_type=error_type, message="x", certain=True)
    air.exit(1, 1)


@pytest.mark.parametrize("restarts", [True, False])
async def test_the_newest_state_is_rescued_whether_a_restart_follows_or_not(
    made: Callable[..., Air], restarts: bool
) -> None:
    air = made(restarts=restarts)
    watched = air.watch()
    await fail(air, "OSError")
    await air.until(lambda: "rescue" in air.stages())
    assert air.logbook.state is (RunState.RECOVERING if restarts else RunState.FINISHING)
    air.exit(0, 6)
    await watched
    assert air.stages()[:2] == ["rescue", "verifying"]


@pytest.mark.parametrize("error_type", ["Diverged", "Corrupted"])
async def test_a_state_that_is_not_sound_is_not_rescued(made: Callable[..., Air], error_type: str) -> None:
    air = made(restarts=False)
    watched = air.watch()
    await fail(air, error_type)
    await air.until(lambda: "term" in air.stages())
    air.exit(0, 1)
    await watched
    assert "rescue" not in air.stages()


@pytest.mark.parametrize("now", [False, True])
async def test_an_abort_leaves_a_rescue_its_time_unless_it_is_to_be_now(made: Callable[..., Air], now: bool) -> None:
    air = made(restarts=True)
    watched = air.watch()
    await fail(air, "OSError")
    air.tell(0, event="rescue", phase="begin", bytes=1)
    await air.until(lambda: air.flight.intake.progress.rescues == {0: "begin"} and "rescue" in air.stages())
    air.abort = Request(ABORT, now=now)
    await air.until(lambda: "asked" in air.stages())
    if now:
        await air.until(lambda: "term" in air.stages())
    air.exit(0, 6)
    await watched
    assert air.flight.hurried
    assert ("term" in air.stages()) is now


@pytest.mark.parametrize("signature", ["ring.bind", "ring.connect"])
async def test_a_first_launch_that_fails_for_a_passing_cause_is_judged_by_it(
    made: Callable[..., Air], signature: str
) -> None:
    air = made(restarts=True, steps=False)
    air.files.log(1).write_text(BY_ID[signature].example + "\n")
    air.exit(1, 1)
    watched = air.watch()
    await air.until(lambda: "term" in air.stages())
    air.exit(0, 1)
    await watched
    [verdict] = air.asked
    assert verdict.signature == signature
    assert refusal(policy_of(air.plan), [Ended.of(1, verdict, 0, "").failure]) is None
