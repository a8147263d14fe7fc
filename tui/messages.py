"""What the bridge tells the app. A newer message of a kind replaces one that waits, so nothing piles up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.message import Message

if TYPE_CHECKING:
    from engine.config.models import FlightConfig
    from engine.events import RunSnapshot
    from engine.models import NodeFacts, RunRecord
    from engine.planning.outlook import Outlook
    from engine.session import Engine


class _Newest(Message):
    """A message whose newer kin makes it worthless."""

    def can_replace(self, message: Message) -> bool:
        return type(message) is type(self)


class EngineReady(Message):
    """The engine is loaded; with the configuration, where there is one, and what is known of its nodes."""

    def __init__(
        self,
        engine: Engine,
        config: FlightConfig | None,
        not_checked: tuple[str, ...],
        facts: tuple[NodeFacts, ...] = (),
        outlook: Outlook | None = None,
    ) -> None:
        super().__init__()
        self.engine = engine
        self.config = config
        self.not_checked = not_checked
        self.facts = facts
        self.outlook = outlook


class EngineFailed(Message):
    """There is nothing to open a console on: the engine cannot be loaded, or the configuration has faults."""

    def __init__(self, fault: str, exit_code: int) -> None:
        super().__init__()
        self.fault = fault
        self.exit_code = exit_code


class SnapshotTaken(_Newest):
    """The followed run as it is now."""

    def __init__(self, run: str, snapshot: RunSnapshot) -> None:
        super().__init__()
        self.run = run
        self.snapshot = snapshot


class RunsRead(_Newest):
    """All runs, newest first."""

    def __init__(self, runs: tuple[RunRecord, ...]) -> None:
        super().__init__()
        self.runs = runs


class Trouble(Message):
    """Something of the engine cannot be read; said once, until it is another."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
